//! From a path to a model that is ready, and what it will take.

use std::path::Path;
use std::sync::Arc;

use lacuna::files::Progress;
use lacuna::{ByteLength, EngineConfig, Loading, Model, ModelFiles, describe};

use crate::error::LacunaError;
use crate::settings::EngineSettings;
use crate::waiting::apart;

/// Is told how far a model's loading has come. It is called by another thread, and loading waits for it.
#[uniffi::export(with_foreign)]
pub trait LoadProgress: Send + Sync {
    /// Of `total_bytes` bytes that are read into memory, `done_bytes` are there. Weights that stay in their file, mapped,
    /// are none of them.
    fn progressed(&self, done_bytes: u64, total_bytes: Option<u64>);
}

/// Tells a listener what the loader says.
struct Told {
    listener: Option<Arc<dyn LoadProgress>>,
    done: u64,
    total: Option<u64>,
}

impl Told {
    fn tell(&self) {
        if let Some(listener) = &self.listener {
            listener.progressed(self.done, self.total);
        }
    }
}

impl Progress for Told {
    fn begin(&mut self, _item: &str, total: Option<u64>) {
        (self.done, self.total) = (0, total);
        self.tell();
    }

    fn advance(&mut self, bytes: u64) {
        self.done += bytes;
        self.tell();
    }

    fn finish(&mut self) {}
}

/// The files of a model: a GGUF file, a Hugging Face folder, or `demo`, which is built in.
pub(crate) fn files(model: &str) -> Result<ModelFiles, LacunaError> {
    match model {
        "demo" => Ok(lacuna::demo()),
        path => ModelFiles::open(Path::new(path)).map_err(LacunaError::model),
    }
}

/// Loads a model for an engine as `config` has it: what could not run is refused before.
pub(crate) fn load(
    model: &str,
    config: &EngineConfig,
    listener: Option<Arc<dyn LoadProgress>>,
) -> Result<Arc<Model>, LacunaError> {
    let files = files(model)?;
    let described = describe(&files)?;
    let mut progress = Told {
        listener,
        done: 0,
        total: None,
    };
    let loading = Loading {
        residency: config.check(&files, &described)?,
        device: None,
        progress: &mut progress,
    };
    Ok(Arc::new(Model::load_as(files, loading)?))
}

/// The budget that leaves `bytes` beside what requests hold: an eighth of it, from 2 to 64 MiB.
fn with_requests(bytes: u64) -> u64 {
    const LEAST: u64 = 2 << 20;
    const MOST: u64 = 64 << 20;
    bytes.saturating_add(bytes.div_ceil(7).clamp(LEAST, MOST))
}

/// Budgets for a model, known before it is loaded.
#[derive(Debug, Clone, PartialEq, Eq, uniffi::Record)]
pub struct Needs {
    /// The least that is useful: the rows of a conversation of some thousand tokens, with weights that are read
    /// for each token as far as they can be.
    pub least_bytes: u64,
    /// What it runs well with: the same with weights in memory.
    pub working_bytes: u64,
    /// The most that is of use: every text with a full context.
    pub most_bytes: u64,
    /// Tokens that the model was made for.
    pub context_tokens: u64,
}

/// What the model at a path takes with these settings, from its directory alone: whether it fits can be said before
/// anything is loaded. Its budget counts only where it is smaller than what the model takes.
///
/// # Errors
/// [`LacunaError::Model`] for a file that is none; [`LacunaError::InvalidValue`] for a setting.
#[uniffi::export]
pub async fn needs(model: String, settings: EngineSettings) -> Result<Needs, LacunaError> {
    apart(move || {
        let config = settings.config()?.engine_config();
        let files = files(&model)?;
        let described = describe(&files)?;
        let room = config.budget.unwrap_or(ByteLength::new(u64::MAX));
        let (needs, _) = config.needs(&files, &described, room)?;
        let budget = |bytes: u64| with_requests(bytes.saturating_add(needs.program));
        Ok(Needs {
            least_bytes: budget(needs.least),
            working_bytes: budget(needs.working),
            most_bytes: budget(needs.most),
            context_tokens: described.spec.context_tokens as u64,
        })
    })
    .await
}
