//! What can go wrong while a model runs.

use std::num::NonZeroUsize;

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
    /// The model could not run the batch.
    #[error(transparent)]
    Forward(#[from] lacuna_models::ForwardError),
    /// The model's output is of no use.
    #[error(transparent)]
    NotFinite(#[from] NotFinite),
    /// The processor could not be set up.
    #[error(transparent)]
    Cpu(#[from] lacuna_kernels::CpuError),
    /// The budget does not even hold what every request needs.
    #[error(
        "a budget of {budget} is too small: the model needs {least} to run at all; raise the budget, or use a shorter context or a smaller batch"
    )]
    BudgetTooSmall {
        /// What was asked for, or what the system has.
        budget: lacuna_pages::ByteLength,
        /// Activations, copied weights and one page of each KV buffer.
        least: lacuna_pages::ByteLength,
    },
    /// The engine's thread could not be started.
    #[error("the engine's thread could not be started: {0}")]
    Thread(#[source] std::io::Error),
    /// A sampling setting is out of range.
    #[error(transparent)]
    Sampling(#[from] crate::sampler::SamplingError),
    /// Text could not be turned into tokens, or back.
    #[error(transparent)]
    Tokenizer(#[from] lacuna_models::tokenizer::TokenizerError),
}
