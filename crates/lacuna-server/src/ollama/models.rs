//! What is told of the one model, whether it writes or makes embeddings.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::Json;
use axum::extract::State;
use lacuna_files::{Metadata, ModelFiles};
use lacuna_models::Model;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::app::{App, Purpose};
use crate::date;
use crate::http::body::{self, Arriving};
use crate::http::error::ApiError;
use crate::http::ignored::Ignored;

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

/// A model that is served.
pub(crate) struct Served<'a> {
    pub(crate) model: &'a Model,
    pub(crate) name: &'a str,
    /// When the server started, in seconds since 1970.
    pub(crate) started: u64,
    pub(crate) context_tokens: usize,
    /// What it is good for, in Ollama's words.
    pub(crate) capabilities: Vec<&'static str>,
}

/// What serves a model.
pub(crate) trait Serves: Send + Sync + 'static {
    fn served(&self) -> Served<'_>;

    /// # Errors
    /// When `asked` is not the model's name.
    fn check_name(&self, asked: &str) -> Result<(), ApiError>;

    /// [`Serves::check_name`], for names that may have the tag `latest`: one without a tag has it.
    ///
    /// # Errors
    /// The same.
    fn check_tagged(&self, asked: &str) -> Result<(), ApiError> {
        let bare = asked.strip_suffix(":latest").unwrap_or(asked);
        match self.check_name(bare) {
            Err(_) => self.check_name(asked),
            known => known,
        }
    }
}

impl Serves for App {
    fn served(&self) -> Served<'_> {
        let mut capabilities = vec!["completion", "tools"];
        if self.tells_thoughts() {
            capabilities.push("thinking");
        }
        if self.sees() {
            capabilities.push("vision");
        }
        Served {
            model: self.model(),
            name: &self.model_name,
            started: self.started,
            context_tokens: self.engine.context_tokens(),
            capabilities,
        }
    }

    fn check_name(&self, asked: &str) -> Result<(), ApiError> {
        self.check_model(Some(asked))
    }
}

/// `GET /api/tags`
pub(crate) async fn list<S: Serves>(State(app): State<Arc<S>>) -> Json<Value> {
    let served = app.served();
    Json(json!({"models": [{
        "name": served.name,
        "model": served.name,
        "modified_at": served.modified(),
        "size": served.model.weight_bytes(),
        "digest": served.model.files().digest(),
        "details": served.details(),
    }]}))
}

/// `GET /api/ps`
pub(crate) async fn running<S: Serves>(State(app): State<Arc<S>>) -> Json<Value> {
    let served = app.served();
    Json(json!({"models": [{
        "name": served.name,
        "model": served.name,
        "size": served.model.weight_bytes(),
        "digest": served.model.files().digest(),
        "size_vram": 0,
        "details": served.details(),
        "expires_at": date::NEVER,
        "context_length": served.context_tokens,
    }]}))
}

/// `POST /api/show`
pub(crate) async fn show(
    State(app): State<Arc<App>>,
    body: Arriving,
) -> Result<Json<Value>, ApiError> {
    let work = |app: &App, object| describe(app, object, &mut app.ignored());
    let prepared = app.prepare(body, Purpose::Text, work).await?;
    Ok(Json(prepared.value))
}

/// The reply to the body of `POST /api/show`.
pub(crate) fn describe(
    app: &impl Serves,
    object: Map<String, Value>,
    ignored: &mut Ignored,
) -> Result<Value, ApiError> {
    let asked: ShowRequest = body::read(object, ignored)?;
    let name = asked.model.or(asked.name);
    let name = name.ok_or_else(|| ApiError::field("model", "`model` is missing"))?;
    app.check_tagged(&name)?;
    let served = app.served();
    let spec = served.model.spec();
    let family = spec.family;
    Ok(json!({
        "modelfile": "",
        "template": served.model.tokenizer().chat_template().unwrap_or_default(),
        "details": served.details(),
        "model_info": {
            "general.architecture": family,
            "general.parameter_count": served.parameters(),
            format!("{family}.context_length"): served.context_tokens,
            format!("{family}.embedding_length"): spec.hidden,
            format!("{family}.block_count"): spec.layers.len(),
        },
        "capabilities": served.capabilities,
        "modified_at": served.modified(),
    }))
}

impl Served<'_> {
    fn details(&self) -> Value {
        details(self.model.files(), self.model.spec().family)
    }

    fn modified(&self) -> String {
        modified(self.model.files().modified(), self.started)
    }

    fn parameters(&self) -> u64 {
        parameters(self.model.files())
    }
}

/// What a list of models has of one.
pub(crate) fn details(files: &ModelFiles, family: &str) -> Value {
    let totals = files.tensors().by_type();
    let most = totals.iter().max_by_key(|total| total.bytes);
    let format = match files.metadata() {
        Metadata::Gguf(_) => "gguf",
        Metadata::HuggingFace(_) => "safetensors",
    };
    json!({
        "parent_model": "",
        "format": format,
        "family": family,
        "families": [family],
        "parameter_size": short(parameters(files)),
        "quantization_level": most.map(|total| total.type_name.to_string()),
    })
}

/// When a model was written: what comes with the program was there when the server started.
pub(crate) fn modified(at: Option<SystemTime>, started: u64) -> String {
    let since = at.map(|at| at.duration_since(UNIX_EPOCH));
    let seconds = since.and_then(Result::ok).map(|since| since.as_secs());
    date::text(seconds.unwrap_or(started).min(date::LAST), 0)
}

/// How many weights there are.
pub(crate) fn parameters(files: &ModelFiles) -> u64 {
    let totals = files.tensors().by_type();
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
