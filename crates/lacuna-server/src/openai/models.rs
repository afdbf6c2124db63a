//! `GET /v1/models` and `GET /v1/models/{name}`, which clients of Anthropic ask for too.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::HeaderMap;
use serde_json::{Value, json};

use crate::anthropic;
use crate::app::App;
use crate::http::error::ApiError;

pub(crate) async fn list(State(app): State<Arc<App>>, headers: HeaderMap) -> Json<Value> {
    Json(match anthropic::is_spoken(&headers) {
        true => anthropic::models(&app),
        false => json!({"object": "list", "data": [card(&app)]}),
    })
}

pub(crate) async fn one(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
    headers: HeaderMap,
) -> Result<Json<Value>, ApiError> {
    app.check_model(Some(&name))?;
    Ok(Json(match anthropic::is_spoken(&headers) {
        true => anthropic::model(&app),
        false => card(&app),
    }))
}

/// What goes into a model that writes and comes out of it, in the words of routers.
pub(crate) fn architecture(sees: bool) -> Value {
    let input: &[&str] = match sees {
        true => &["text", "image"],
        false => &["text"],
    };
    json!({"input_modalities": input, "output_modalities": ["text"]})
}

fn card(app: &App) -> Value {
    json!({
        "id": &*app.model_name,
        "object": "model",
        "created": app.started,
        "owned_by": "lacuna",
        "max_model_len": app.engine.context_tokens(),
        "architecture": architecture(app.sees()),
    })
}
