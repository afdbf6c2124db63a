//! Several models under one byte budget, each loaded when it is asked for.
//!
//! ```text
//! request -> front (whose model?) -> registry (is it loaded? may it be?) -> the model's own handlers
//! ```
//!
//! [`policy`] is arithmetic, [`arbiter`] a state machine, both without effects; [`registry`] has the one thread that
//! loads and unloads; [`loaded`] is a model with what answers its requests, [`front`] what is answered for all of them.

mod arbiter;
mod card;
pub(crate) mod front;
mod loaded;
mod policy;
mod registry;
mod report;
mod server;

use std::path::PathBuf;
use std::time::Duration;

pub(crate) use registry::More;
pub use server::ModelServer;

/// A model that may be loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelEntry {
    /// Name that requests have for it, and that replies say.
    pub name: String,
    /// Further names.
    pub aliases: Vec<String>,
    /// Where it is.
    pub source: ModelPath,
    /// Whether the server is not to start without it: files that are no model, or more than the budget holds, are an
    /// error then. Else they are one for those who ask for the model.
    pub required: bool,
}

/// Where a model is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelPath {
    /// In the program.
    Demo,
    /// A GGUF file, the first of several, or a folder as Hugging Face has them.
    Path(PathBuf),
}

/// The models of a server.
#[derive(Debug, Clone)]
pub struct ModelsConfig {
    /// All that there are. Names and aliases are different from each other.
    pub models: Vec<ModelEntry>,
    /// How long one stays loaded that nobody uses, if the room is not needed before. `None`: for ever. Default 5
    /// minutes, as Ollama has it.
    pub keep_alive: Option<Duration>,
}

impl Default for ModelsConfig {
    fn default() -> Self {
        Self {
            models: Vec::new(),
            keep_alive: Some(Duration::from_secs(300)),
        }
    }
}

/// A span of time as `keep_alive` has it: a number of seconds, or `5m`, `1h30m`; `None` for a negative one, which is
/// for ever.
///
/// # Errors
/// The text, if it is none.
pub fn keep_alive(text: &str) -> Result<Option<Duration>, String> {
    let seconds = crate::ollama::span_seconds(text);
    let seconds = seconds.ok_or_else(|| {
        format!("`{text}` is no time; use seconds, or a text such as 5m, or -1 for ever")
    })?;
    Ok((seconds >= 0.0)
        .then(|| Duration::try_from_secs_f64(seconds).ok())
        .flatten())
}
