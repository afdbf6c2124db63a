//! What is told of the one model.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use lacuna_files::Metadata;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::app::{App, Purpose};
use crate::date;
use crate::http::body;
use crate::http::error::ApiError;
use crate::ollama::request;

/// The version of Ollama whose interface this is: clients compare it to know what they may ask for.
const SPOKEN_VERSION: &str = "0.12.0";

#[derive(Debug, Deserialize)]
struct ShowRequest {
    #[serde(default)]
    model: Option<String>,
    /// As `model` was called before.
    #[serde(default)]
    name: Option<String>,
    /// Whether to list whole vocabularies, which nobody does here.
    #[serde(default, rename = "verbose")]
    _verbose: Option<bool>,
}

/// `GET /api/version`
pub(crate) async fn version() -> Json<Value> {
    Json(json!({"version": SPOKEN_VERSION, "lacuna": env!("CARGO_PKG_VERSION")}))
}

/// `GET /api/tags`
pub(crate) async fn list(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({"models": [{
        "name": &*app.model_name,
        "model": &*app.model_name,
        "modified_at": date::text(app.started, 0),
        "size": app.model().weight_bytes(),
        "details": details(&app),
    }]}))
}

/// `GET /api/ps`
pub(crate) async fn running(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({"models": [{
        "name": &*app.model_name,
        "model": &*app.model_name,
        "size": app.model().weight_bytes(),
        "size_vram": 0,
        "details": details(&app),
        "expires_at": date::NEVER,
        "context_length": app.engine.context_tokens(),
    }]}))
}

/// `POST /api/show`
pub(crate) async fn show(State(app): State<Arc<App>>, body: Body) -> Result<Json<Value>, ApiError> {
    let prepared = app.prepare(body, Purpose::Text, describe).await?;
    Ok(Json(prepared.value))
}

fn describe(app: &App, object: Map<String, Value>) -> Result<Value, ApiError> {
    let mut ignored = app.ignored();
    let asked: ShowRequest = body::read(object, &mut ignored)?;
    let name = asked.model.or(asked.name);
    let name = name.ok_or_else(|| ApiError::field("model", "`model` is missing"))?;
    request::check_model(app, &name)?;
    let spec = app.model().spec();
    let family = spec.family;
    let mut capabilities = vec!["completion", "tools"];
    if app.tells_thoughts() {
        capabilities.push("thinking");
    }
    Ok(json!({
        "modelfile": "",
        "template": app.model().tokenizer().chat_template().unwrap_or_default(),
        "details": details(app),
        "model_info": {
            "general.architecture": family,
            "general.parameter_count": parameters(app),
            format!("{family}.context_length"): app.engine.context_tokens(),
            format!("{family}.embedding_length"): spec.hidden,
            format!("{family}.block_count"): spec.layers.len(),
        },
        "capabilities": capabilities,
        "modified_at": date::text(app.started, 0),
    }))
}

fn details(app: &App) -> Value {
    let family = app.model().spec().family;
    let totals = app.model().files().tensors().by_type();
    let most = totals.iter().max_by_key(|total| total.bytes);
    let format = match app.model().files().metadata() {
        Metadata::Gguf(_) => "gguf",
        Metadata::HuggingFace(_) => "safetensors",
    };
    json!({
        "parent_model": "",
        "format": format,
        "family": family,
        "families": [family],
        "parameter_size": short(parameters(app)),
        "quantization_level": most.map(|total| total.type_name.to_string()),
    })
}

fn parameters(app: &App) -> u64 {
    let totals = app.model().files().tensors().by_type();
    totals.iter().map(|total| total.elements).sum()
}

/// A number of parameters as it is put into names of models.
fn short(parameters: u64) -> String {
    let units = [(1e9, "B"), (1e6, "M"), (1e3, "K")];
    let number = parameters as f64;
    let unit = units.into_iter().find(|(unit, _)| number >= *unit);
    let (unit, letter) = unit.unwrap_or((1.0, ""));
    format!("{:.1}{letter}", number / unit)
}
