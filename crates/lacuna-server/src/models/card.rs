//! What is known of a model that is not loaded, from its files' directory alone.

use std::time::SystemTime;

use lacuna_engine::{EmbedderConfig, EngineConfig, Needs};
use lacuna_files::{Metadata, ModelFiles};
use lacuna_models::plan::WeightMode;
use lacuna_models::{Description, describe, describe_images_for};
use lacuna_pages::ByteLength;
use serde_json::{Value, json};

use crate::models::{ModelEntry, ModelPath};
use crate::ollama;

/// What a model is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    Writes,
    Embeds,
    Scores,
}

/// A model, as its files describe it.
#[derive(Debug, Clone)]
pub(crate) struct Card {
    pub(crate) purpose: Purpose,
    /// Whether it sees, with the encoder in its files or the one beside them.
    pub(crate) sees: bool,
    /// Tokens of a context, or of a text.
    pub(crate) context_tokens: usize,
    pub(crate) weight_bytes: u64,
    pub(crate) needs: Needs,
    /// Where its weights are to be, if it writes.
    pub(crate) weights: WeightMode,
    /// What Ollama's clients are told of it.
    digest: String,
    modified: Option<SystemTime>,
    details: Value,
    info: Value,
    template: String,
}

/// The files of a model.
///
/// # Errors
/// Why they are none, in words.
pub(crate) fn open(source: &ModelPath) -> Result<ModelFiles, String> {
    match source {
        ModelPath::Demo => Ok(lacuna_models::demo()),
        ModelPath::Path(path) => ModelFiles::open(path).map_err(|error| error.to_string()),
    }
}

impl Card {
    /// What the files of `entry` say, for a model that runs as `engine` says in `room` bytes at most.
    ///
    /// # Errors
    /// Why they are no model that runs here, in words.
    pub(crate) fn read(
        entry: &ModelEntry,
        engine: &EngineConfig,
        room: u64,
    ) -> Result<Self, String> {
        let files = open(&entry.source)?;
        let description = describe(&files).map_err(|error| error.to_string())?;
        let engine = EngineConfig {
            context_tokens: context_tokens(engine, &description),
            ..engine.clone()
        };
        let spec = &description.spec;
        let purpose = match (spec.pooled(), spec.judgement()) {
            (None, _) => Purpose::Writes,
            (Some(_), None) => Purpose::Embeds,
            (Some(_), Some(_)) => Purpose::Scores,
        };
        let (needs, weights) = match purpose {
            Purpose::Writes => engine.needs(&files, &description, ByteLength::new(room)),
            Purpose::Embeds | Purpose::Scores => EmbedderConfig::of(&engine)
                .needs(&files, &description)
                .map(|needs| (needs, engine.weights)),
        }
        .map_err(|error| error.to_string())?;
        let family = spec.family;
        let context_tokens = engine.context_tokens.unwrap_or(spec.context_tokens);
        let eyes = describe_images_for(&files, spec, None);
        Ok(Self {
            purpose,
            sees: eyes.map_err(|error| error.to_string())?.is_some(),
            context_tokens,
            weight_bytes: files.tensors().by_type().iter().map(|it| it.bytes).sum(),
            needs,
            weights,
            digest: files.digest(),
            modified: files.modified(),
            details: ollama::details(&files, family),
            info: json!({
                "general.architecture": family,
                "general.parameter_count": ollama::parameters(&files),
                format!("{family}.context_length"): context_tokens,
                format!("{family}.embedding_length"): spec.hidden,
                format!("{family}.block_count"): spec.layers.len(),
            }),
            template: template(&files),
        })
    }

    /// What `GET /api/tags` and `/api/ps` have of it.
    pub(crate) fn listed(&self, name: &str, started: u64) -> Value {
        json!({
            "name": name,
            "model": name,
            "modified_at": ollama::modified(self.modified, started),
            "size": self.weight_bytes,
            "digest": self.digest,
            "details": self.details,
        })
    }

    /// The reply to `POST /api/show`.
    pub(crate) fn shown(&self, started: u64) -> Value {
        let capabilities: &[&str] = match self.purpose {
            Purpose::Writes if self.sees => &["completion", "tools", "vision"],
            Purpose::Writes => &["completion", "tools"],
            Purpose::Embeds => &["embedding"],
            Purpose::Scores => &[],
        };
        json!({
            "modelfile": "",
            "template": self.template,
            "details": self.details,
            "model_info": self.info,
            "capabilities": capabilities,
            "modified_at": ollama::modified(self.modified, started),
        })
    }
}

/// Tokens of a context: one number is said for all models, and each has as many of them as it was made for.
pub(crate) fn context_tokens(engine: &EngineConfig, description: &Description) -> Option<usize> {
    let most = description.spec.context_tokens;
    engine.context_tokens.map(|asked| asked.min(most))
}

/// The chat template, where it is beside the weights.
fn template(files: &ModelFiles) -> String {
    let text = match files.metadata() {
        Metadata::Gguf(metadata) => metadata
            .get::<&str>("tokenizer.chat_template")
            .ok()
            .flatten(),
        Metadata::HuggingFace(_) => None,
    };
    text.unwrap_or_default().to_owned()
}
