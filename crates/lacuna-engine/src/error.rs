//! What can go wrong while a model runs.

use std::num::NonZeroUsize;

/// A step that was not made. The session is as it was before.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// More threads than processors would only wait for each other.
    #[error(
        "{asked} threads asked for, but this machine has {available}; use --threads {available} or fewer"
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
    /// A prompt without a single token gives the model nothing to continue.
    #[error("the prompt is empty; give at least one character")]
    EmptyPrompt,
    /// The prompt alone fills the context.
    #[error(
        "the prompt has {prompt} tokens, but the context holds {context}; raise --ctx or shorten the prompt"
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
    /// The model could not run the batch.
    #[error(transparent)]
    Forward(#[from] lacuna_models::ForwardError),
    /// The processor could not be set up.
    #[error(transparent)]
    Cpu(#[from] lacuna_kernels::CpuError),
    /// A sampling setting is out of range.
    #[error(transparent)]
    Sampling(#[from] crate::sampler::SamplingError),
    /// Text could not be turned into tokens, or back.
    #[error(transparent)]
    Tokenizer(#[from] lacuna_models::tokenizer::TokenizerError),
}
