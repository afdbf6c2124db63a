//! `GET /v1/models` and `GET /v1/models/{name}`.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use serde_json::{Value, json};

use crate::app::App;
use crate::http::error::ApiError;

pub(crate) async fn list(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({"object": "list", "data": [card(&app)]}))
}

pub(crate) async fn one(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
) -> Result<Json<Value>, ApiError> {
    app.check_model(Some(&name))?;
    Ok(Json(card(&app)))
}

fn card(app: &App) -> Value {
    json!({
        "id": &*app.model_name,
        "object": "model",
        "created": app.started,
        "owned_by": "lacuna",
        "max_model_len": app.engine.context_tokens(),
    })
}
