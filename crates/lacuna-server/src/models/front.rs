//! What a server of several models answers itself, and how it finds the model that a request is for.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{FromRef, Path, Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use axum::{Extension, Json};
use hyper::body::{Frame, SizeHint};
use hyper::service::Service as _;
use hyper_util::service::TowerToHyperService;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use crate::anthropic;
use crate::config::ServerConfig;
use crate::date;
use crate::http::body::{Arrived, Arriving, Bodies, Received, read};
use crate::http::error::{ApiError, Interface};
use crate::http::ignored::Ignored;
use crate::intake::Intake;
use crate::memory::{first_key, limit};
use crate::models::arbiter::ModelStatus;
use crate::models::card::{Card, Purpose};
use crate::models::policy::ModelId;
use crate::models::registry::{Known, Lease, Models};
use crate::models::report;
use crate::ollama::KeepAlive;
use crate::openai;
use crate::sharing::Client;

/// What answers for all models together.
#[derive(Debug)]
pub(crate) struct Front {
    pub(crate) models: Models,
    intake: Intake,
    config: ServerConfig,
}

impl FromRef<Arc<Front>> for Bodies {
    fn from_ref(front: &Arc<Front>) -> Self {
        front.intake.bodies.clone()
    }
}

impl Front {
    pub(crate) fn new(models: Models, intake: Intake, config: ServerConfig) -> Self {
        Self {
            models,
            intake,
            config,
        }
    }

    /// The model of this name, which clients of Ollama may give a tag.
    fn find(&self, name: &str, interface: Interface) -> Result<ModelId, ApiError> {
        let bare = match interface {
            Interface::Ollama => name.strip_suffix(":latest"),
            Interface::OpenAi | Interface::Anthropic => None,
        };
        let found = self.models.find(name);
        let found = found.or_else(|| bare.and_then(|bare| self.models.find(bare)));
        found.ok_or_else(|| ApiError::none_of(name, &self.names()))
    }

    /// The names there are, as errors have them.
    fn names(&self) -> String {
        /// More are no help to anybody who reads them.
        const MOST: usize = 32;
        let names: Vec<String> = (self.models.known())
            .map(|(_, known)| format!("`{}`", known.entry.name))
            .collect();
        match names.get(..MOST) {
            Some(first) => format!("{} and {} more", first.join(", "), names.len() - MOST),
            None => names.join(", "),
        }
    }

    /// Whose body it is, and for how long the model is to stay.
    fn asked(
        &self,
        received: &Received,
        interface: Interface,
    ) -> Result<(ModelId, Option<Option<std::time::Duration>>), ApiError> {
        let [model, name, keep_alive] = received.fields(["model", "name", "keep_alive"])?;
        let named = match interface {
            Interface::Ollama => model.or(name),
            Interface::OpenAi | Interface::Anthropic => model,
        };
        let named: Option<String> = value("model", named)?;
        let named = named.ok_or_else(|| ApiError::which_model(&self.names()))?;
        let keep = match interface {
            Interface::Ollama => value::<KeepAlive>("keep_alive", keep_alive)?,
            Interface::OpenAi | Interface::Anthropic => None,
        };
        let keep = keep.as_ref().map(KeepAlive::time).transpose()?;
        Ok((self.find(&named, interface)?, keep))
    }

    fn started(&self) -> u64 {
        self.intake.started
    }

    fn ignored(&self) -> Ignored {
        Ignored::new(self.config.strict_fields)
    }

    /// What `GET /v1/models` has of a model.
    fn listed(&self, id: ModelId, known: &Known) -> Value {
        let (status, _) = self.models.status(id);
        let mut told = json!({"value": status.state});
        if let Some(failure) = &status.failure {
            told["failed"] = true.into();
            told["error"] = failure.as_str().into();
        }
        let writes = known.card.as_ref().ok();
        let writes = writes.filter(|card| card.purpose == Purpose::Writes);
        json!({
            "id": known.entry.name,
            "object": "model",
            "created": self.started(),
            "owned_by": "lacuna",
            "max_model_len": known.card.as_ref().ok().map(|card| card.context_tokens),
            "architecture": writes.map(|card| openai::models::architecture(card.sees)),
            "aliases": known.entry.aliases,
            "status": told,
        })
    }

    /// The same for clients of Anthropic.
    fn listed_for_anthropic(&self, known: &Known) -> Value {
        json!({
            "type": "model",
            "id": known.entry.name,
            "display_name": known.entry.name,
            "created_at": date::text(self.started(), 0),
            "max_input_tokens": known.card.as_ref().ok().map(|card| card.context_tokens),
        })
    }

    /// Models whose files are some.
    fn cards(&self) -> impl Iterator<Item = (ModelId, &Known, &Card)> {
        let known = self.models.known();
        known.filter_map(|(id, known)| Some((id, known, known.card.as_ref().ok()?)))
    }
}

/// A field's value, if there is one.
fn value<T: DeserializeOwned>(
    name: &'static str,
    written: Option<&RawValue>,
) -> Result<Option<T>, ApiError> {
    let Some(written) = written.map(RawValue::get).filter(|text| *text != "null") else {
        return Ok(None);
    };
    let value = serde_json::from_str(written);
    value
        .map(Some)
        .map_err(|_| ApiError::field(name, format!("`{name}` has a value of the wrong kind")))
}

/// A request that names its model in its body: hands it on when the model is loaded.
pub(crate) async fn dispatch(
    State(front): State<Arc<Front>>,
    request: Request,
) -> Result<Response, ApiError> {
    let (parts, body) = request.into_parts();
    let received = front
        .intake
        .bodies
        .receive(Arriving::of(&parts.headers, body))
        .await?;
    let (id, keep) = front.asked(&received, Interface::of(parts.uri.path()))?;
    let lease = front.models.lease(id, keep).await?;
    let mut request = Request::from_parts(parts, Body::empty());
    request.extensions_mut().insert(Arrived::new(received));
    let router = TowerToHyperService::new(lease.loaded.router.clone());
    let response = match router.call(request).await {
        Ok(response) => response,
        Err(never) => match never {},
    };
    Ok(response.map(|body| {
        Body::new(Leased {
            body,
            _lease: lease,
        })
    }))
}

/// A reply that uses a model until its last byte has left.
struct Leased {
    body: Body,
    _lease: Lease,
}

impl HttpBody for Leased {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// `GET /v1/models` and `/models`
pub(crate) async fn list(State(front): State<Arc<Front>>, headers: HeaderMap) -> Json<Value> {
    let known = front.models.known();
    Json(match anthropic::is_spoken(&headers) {
        true => {
            let data: Vec<Value> = known
                .map(|(_, known)| front.listed_for_anthropic(known))
                .collect();
            let id = |model: Option<&Value>| model.map(|model| model["id"].clone());
            let (first, last) = (id(data.first()), id(data.last()));
            json!({"data": data, "has_more": false, "first_id": first, "last_id": last})
        }
        false => {
            let data: Vec<Value> = known.map(|(id, known)| front.listed(id, known)).collect();
            json!({"object": "list", "data": data})
        }
    })
}

/// `GET /v1/models/{name}`
pub(crate) async fn one(
    State(front): State<Arc<Front>>,
    Path(name): Path<String>,
    headers: HeaderMap,
) -> Result<Json<Value>, ApiError> {
    let id = front.find(&name, Interface::OpenAi)?;
    let known = front.models.get(id);
    Ok(Json(match anthropic::is_spoken(&headers) {
        true => front.listed_for_anthropic(known),
        false => front.listed(id, known),
    }))
}

/// `GET /api/tags`
pub(crate) async fn tags(State(front): State<Arc<Front>>) -> Json<Value> {
    let cards = front.cards();
    let models: Vec<Value> = cards
        .map(|(_, known, card)| card.listed(&known.entry.name, front.started()))
        .collect();
    Json(json!({"models": models}))
}

/// `GET /api/ps`
pub(crate) async fn running(State(front): State<Arc<Front>>) -> Json<Value> {
    let models: Vec<Value> = (front.cards())
        .filter_map(|(id, known, card)| {
            let (status, loaded) = front.models.status(id);
            loaded?;
            let mut told = card.listed(&known.entry.name, front.started());
            told["size_vram"] = 0.into();
            told["expires_at"] = expires(&status).into();
            told["context_length"] = card.context_tokens.into();
            Some(told)
        })
        .collect();
    Json(json!({"models": models}))
}

/// When a model is unloaded if nobody asks for it until then. One that is used is not.
fn expires(status: &ModelStatus) -> String {
    let left = status
        .expires
        .map(|at| at.saturating_duration_since(Instant::now()));
    let at = left.and_then(|left| SystemTime::now().checked_add(left));
    let since = at.and_then(|at| at.duration_since(UNIX_EPOCH).ok());
    match since.map(|since| since.as_secs()) {
        Some(seconds) if seconds < date::LAST => date::text(seconds, 0),
        _ => date::NEVER.to_owned(),
    }
}

/// `POST /api/show`, which loads nothing.
pub(crate) async fn show(
    State(front): State<Arc<Front>>,
    body: Arriving,
) -> Result<Json<Value>, ApiError> {
    let received = front.intake.bodies.receive(body).await?;
    let (id, _) = front.asked(&received, Interface::Ollama)?;
    match &front.models.get(id).card {
        Ok(card) => Ok(Json(card.shown(front.started()))),
        Err(reason) => Err(front.models.not_loaded(id, reason)),
    }
}

#[derive(Debug, Deserialize)]
struct Named {
    model: String,
}

impl Front {
    /// The model of a body that has nothing else, from a client who may say what is loaded.
    async fn named(&self, client: Client, body: Arriving) -> Result<ModelId, ApiError> {
        first_key(client, "models are loaded and unloaded")?;
        let object = self.intake.bodies.receive(body).await?.object()?;
        let Named { model } = read(object, &mut self.ignored())?;
        self.find(&model, Interface::OpenAi)
    }
}

/// `POST /models/load`: answered when it is loaded.
pub(crate) async fn load(
    State(front): State<Arc<Front>>,
    Extension(client): Extension<Client>,
    body: Arriving,
) -> Result<Json<Value>, ApiError> {
    let id = front.named(client, body).await?;
    drop(front.models.lease(id, None).await?);
    Ok(Json(json!({"success": true})))
}

/// `POST /models/unload`: answered at once. Replies under way may finish, for as long as they may when the server ends.
pub(crate) async fn unload(
    State(front): State<Arc<Front>>,
    Extension(client): Extension<Client>,
    body: Arriving,
) -> Result<Json<Value>, ApiError> {
    let id = front.named(client, body).await?;
    match front.models.unload(id, front.config.grace) {
        true => Ok(Json(json!({"success": true}))),
        false => Err(ApiError::new(
            StatusCode::BAD_REQUEST,
            "model_not_loaded",
            format!(
                "the model `{}` is not loaded",
                front.models.get(id).entry.name
            ),
        )),
    }
}

/// `GET /memory`
pub(crate) async fn memory(State(front): State<Arc<Front>>) -> Json<Value> {
    Json(report::memory(&front.models))
}

/// `POST /memory`: the budget of all models together.
pub(crate) async fn set_memory(
    State(front): State<Arc<Front>>,
    Extension(client): Extension<Client>,
    body: Arriving,
) -> Result<Json<Value>, ApiError> {
    first_key(client, "the budget is changed")?;
    let object = front.intake.bodies.receive(body).await?.object()?;
    let bytes = limit(object, &mut front.ignored())?;
    front.models.set_budget(bytes).map_err(|least| {
        let message = format!("{bytes} bytes are too few: the largest model needs {least} in all");
        ApiError::field("budget_bytes", message)
    })?;
    Ok(Json(json!({"budget_bytes": bytes})))
}

/// `GET /metrics`
pub(crate) async fn metrics(State(front): State<Arc<Front>>) -> Result<Response, ApiError> {
    report::metrics(&front.models)
}

/// `GET /server_info` and `/get_server_info`: what is the same for all models.
pub(crate) async fn server_info(State(front): State<Arc<Front>>) -> Json<Value> {
    let names = front.models.known().map(|(_, known)| &known.entry.name);
    Json(json!({
        "version": env!("CARGO_PKG_VERSION"),
        "models": names.collect::<Vec<_>>(),
        "max_running_requests": front.config.service.max_running,
        "tp_size": 1,
        "dp_size": 1,
    }))
}
