//! What can go wrong while a model runs.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use lacuna_kv::saved::SavedError;
use lacuna_pages::ByteLength;

/// Logits that no token can be chosen from: at least one is infinite or no number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the model's logits are not finite, from that of token {token} on; its weights or the KV rows of the text so far are damaged, or its activations overflow"
)]
pub struct NotFinite {
    /// The first token that has such a logit.
    pub token: usize,
}

/// A step that was not made. The session is as it was before.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// More threads than processors would only wait for each other.
    #[error(
        "{asked} threads asked for, but this machine has {available}; use {available} or fewer"
    )]
    TooManyThreads {
        /// Threads asked for.
        asked: NonZeroUsize,
        /// Processors this process may use.
        available: NonZeroUsize,
    },
    /// The settings cannot be planned for.
    #[error(transparent)]
    Plan(#[from] lacuna_models::plan::PlanError),
    /// Neurons that are read one by one are multiplied as they are stored, and their model would not be what it is without.
    #[error(
        "neurons that are read one by one are multiplied in f32; leave the other precision, or the neurons, out"
    )]
    RoundedNeurons,
    /// Neurons are to be read one by one, and the model was loaded without the files that they are read from.
    #[error(
        "the model was loaded without the files that its neurons are read from; give its files to `EngineConfig::with_neurons` first, or leave the neurons out"
    )]
    NoNeurons,
    /// A prompt without a single token gives the model nothing to continue.
    #[error("the prompt is empty; give at least one character")]
    EmptyPrompt,
    /// The prompt alone fills the context.
    #[error(
        "the prompt has {prompt} tokens, but the context holds {context}; make the context longer or the prompt shorter"
    )]
    PromptTooLong {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens the context holds.
        context: usize,
    },
    /// KV memory could not be had.
    #[error(transparent)]
    Kv(#[from] lacuna_kv::KvError),
    /// Activation memory could not be had.
    #[error(transparent)]
    Activations(#[from] lacuna_models::OutOfMemory),
    /// The system refuses memory for choosing tokens.
    #[error("there is not enough memory to choose tokens: {0}")]
    OutOfMemory(#[from] std::collections::TryReserveError),
    /// The model could not run the batch.
    #[error(transparent)]
    Forward(#[from] lacuna_models::ForwardError),
    /// The device that is to compute does not run the model.
    #[error(transparent)]
    Executor(#[from] lacuna_models::ExecutorError),
    /// The model's output is of no use.
    #[error(transparent)]
    NotFinite(#[from] NotFinite),
    /// A pair of texts could not be put to the model.
    #[error(transparent)]
    Prompt(#[from] lacuna_models::PromptError),
    /// Predictors of neurons could not be fitted.
    #[error(transparent)]
    Predictors(#[from] lacuna_models::PredictorsError),
    /// The processor could not be set up.
    #[error(transparent)]
    Cpu(#[from] lacuna_kernels::CpuError),
    /// The budget does not hold what the first token needs.
    #[error(transparent)]
    BudgetTooSmall(#[from] lacuna_models::plan::BudgetTooSmall),
    /// The system cannot spare what the first token needs.
    #[error(
        "not enough memory: the system can spare {} beside a reserve of {}, but the first token needs {} ({needed})",
        mebibytes(*spare), mebibytes(*reserve), mebibytes(ByteLength::new(needed.bytes()))
    )]
    MemoryShort {
        /// What there is for this process, with what it has already.
        spare: ByteLength,
        /// What is left to the kernel and to others.
        reserve: ByteLength,
        /// What there would have to be.
        needed: Box<lacuna_models::plan::Parts>,
    },
    /// A text has so many tokens that its activations do not fit.
    #[error(
        "a text of {tokens} tokens is too long for the memory there is; send shorter ones: {source}"
    )]
    LongText {
        /// Tokens of the text.
        tokens: usize,
        /// What there is, and what it takes.
        source: Box<EngineError>,
    },
    /// The process holds so much more than was planned that nothing is left for KV pages.
    #[error(
        "the budget is too small: with what this process has taken for the model, the first token \
         needs {}", mebibytes(*needed)
    )]
    ProcessTooLarge {
        /// The least budget with which it would run.
        needed: ByteLength,
    },
    /// The draft model cannot guess for the model.
    #[error(transparent)]
    Draft(#[from] crate::speculation::DraftError),
    /// The model's files have no head that guesses tokens.
    #[error(
        "the model's files have no head that guesses tokens (multi-token prediction); guess from the text itself (ngram), or with a draft model or a head (EAGLE-3) in files of its own"
    )]
    NoHead,
    /// It would be read for each guess.
    #[error(
        "the budget does not hold all weights beside the head that guesses tokens, so guesses would be slower than none; give it more, or ask for \
         guesses where they fit (auto)"
    )]
    HeadOverBudget,
    /// Two would guess.
    #[error("the model's own head and a draft model cannot both guess; leave one of them out")]
    HeadAndDraft,
    /// The cache folder cannot be used.
    #[error(transparent)]
    Folder(#[from] lacuna_kv::folder::FolderError),
    /// A session in a file cannot be read or written.
    #[error("{}: {source}", path.display())]
    Saved {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: Box<SavedError>,
    },
    /// There is no swap file.
    #[error(transparent)]
    Swap(#[from] lacuna_kv::swap::SwapError),
    /// The engine's thread could not be started.
    #[error("the engine's thread could not be started: {0}")]
    Thread(#[source] std::io::Error),
    /// Its rows are in another engine's pages, and of what that computes.
    #[error(
        "the session is another engine's; make one of this engine, and give it the same tokens"
    )]
    OtherEngine,
    /// It was begun for another session, whose text and limits it has.
    #[error("the continuation is of another session; begin one of this session")]
    OtherSession,
    /// The service has ended, and with it its sessions.
    #[error("the service has ended; start another")]
    ServiceEnded,
    /// A sampling setting is out of range.
    #[error(transparent)]
    Sampling(#[from] crate::sampler::SamplingError),
    /// Text could not be turned into tokens, or back.
    #[error(transparent)]
    Tokenizer(#[from] lacuna_text::tokenizer::TokenizerError),
}

/// What is wrong with the session in the file at `path`.
pub(crate) fn saved<E: Into<SavedError>>(path: &Path) -> impl Fn(E) -> EngineError {
    move |error| EngineError::Saved {
        path: path.to_owned(),
        source: Box::new(error.into()),
    }
}

/// `length` for people.
fn mebibytes(length: ByteLength) -> String {
    format!("{:.1} MiB", length.get() as f64 / (1u64 << 20) as f64)
}
