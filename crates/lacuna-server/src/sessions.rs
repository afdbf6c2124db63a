//! `GET /v1/sessions`, `GET /v1/sessions/{name}` and `DELETE` of it: the conversations that a cache folder keeps by name.
//!
//! A client sees its own, whatever else is in the folder. Files are looked at away from the threads that serve
//! connections, and from the one that computes.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::{Extension, Json};
use lacuna_kv::folder::{self, KeptSession, SessionName};
use lacuna_kv::prefix::Namespace;
use serde_json::{Value, json};

use crate::app::App;
use crate::http::error::ApiError;
use crate::sharing::Client;

pub(crate) async fn list(
    State(app): State<Arc<App>>,
    Extension(client): Extension<Client>,
) -> Result<Json<Value>, ApiError> {
    let sessions = find(&app, client, None).await?;
    let data: Vec<Value> = sessions.iter().map(card).collect();
    Ok(Json(json!({"object": "list", "data": data})))
}

pub(crate) async fn one(
    State(app): State<Arc<App>>,
    Extension(client): Extension<Client>,
    Path(name): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let name = self::name(&name)?;
    let sessions = find(&app, client, Some(name.clone())).await?;
    // Of several settings it is the one that was used last.
    let newest = sessions.iter().max_by_key(|session| session.used);
    newest.map(card).map(Json).ok_or_else(|| none(&name))
}

pub(crate) async fn remove(
    State(app): State<Arc<App>>,
    Extension(client): Extension<Client>,
    Path(name): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let name = self::name(&name)?;
    let removed = {
        let name = name.clone();
        work(&app, client, move |folder, owner| {
            folder::remove_session(&folder, &name, Some(owner))
        })
        .await?
    };
    match removed {
        0 => Err(none(&name)),
        _ => Ok(Json(json!({
            "id": name.to_string(),
            "object": "session.deleted",
            "deleted": true,
        }))),
    }
}

/// A name, if it is one.
pub(crate) fn name(name: &str) -> Result<SessionName, ApiError> {
    let parsed = name.parse::<SessionName>();
    parsed.map_err(|why| ApiError::field("session", why.to_string()))
}

fn none(name: &SessionName) -> ApiError {
    absent(format!("there is no session `{name}`"))
}

fn absent(message: impl Into<String>) -> ApiError {
    ApiError::new(StatusCode::NOT_FOUND, "session_not_found", message)
}

fn card(session: &KeptSession) -> Value {
    let used = session.used.duration_since(UNIX_EPOCH);
    json!({
        "id": session.id.name.to_string(),
        "object": "session",
        "tokens": session.tokens,
        "bytes": session.bytes,
        "last_used": used.map_or(0, |used| used.as_secs()),
        "settings": session.fingerprint,
    })
}

async fn find(
    app: &App,
    client: Client,
    name: Option<SessionName>,
) -> Result<Vec<KeptSession>, ApiError> {
    let found = move |folder: PathBuf, owner| {
        let mut sessions = folder::sessions(&folder)?;
        sessions.retain(|session| {
            session.id.owner == owner && name.as_ref().is_none_or(|name| *name == session.id.name)
        });
        Ok(sessions)
    };
    work(app, client, found).await
}

/// What `work` makes of the folder, which may have to wait for whoever writes to it.
async fn work<T: Send + 'static>(
    app: &App,
    client: Client,
    work: impl FnOnce(PathBuf, Namespace) -> io::Result<T> + Send + 'static,
) -> Result<T, ApiError> {
    let Some(folder) = app.cache_folder().map(PathBuf::from) else {
        return Err(absent(
            "sessions are kept in a cache folder, and this server has none",
        ));
    };
    let owner = app.sharing.namespace(client, None);
    let done = tokio::task::spawn_blocking(move || work(folder, owner)).await;
    let done = done.unwrap_or_else(|_| Err(io::Error::other("it could not be looked at")));
    done.map_err(|error| ApiError::internal(format!("the cache folder: {error}")))
}
