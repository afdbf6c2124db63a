//! What a client asks for, and why it may be refused before anything is computed.

use std::num::NonZeroUsize;
use std::time::Duration;

use lacuna_files::LostFile;
use lacuna_kv::folder::SessionId;
use lacuna_kv::prefix::Namespace;
use lacuna_models::Shown;
use lacuna_pages::ByteLength;
use lacuna_text::tokenizer::SpecialText;

use crate::request_memory::{HeldMemory, MemoryRefusal};
use crate::sampler::{Sampling, SamplingError};
use crate::scheduler::Waiting;
use crate::stop::StopText;

/// When a generation ends, and what is shown of it.
#[derive(Debug, Clone, Default)]
pub struct Limits {
    /// Tokens to generate at most. `None`: until the model ends or the context is full. `Some(0)`:
    /// none; the text ends at once with [`crate::FinishReason::MaxTokens`].
    pub max_tokens: Option<usize>,
    /// Before there are so many tokens, no token that would end the text can come, unless its
    /// constraint leaves no other, and no stop string is looked for. At most `max_tokens`.
    pub min_tokens: usize,
    /// Text that ends the generation.
    pub stop: Vec<String>,
    /// Tokens that end the generation, beside those by which the model says that it is done.
    pub stop_tokens: Vec<u32>,
    /// Whether what ended the generation is shown: a stop string, or the text of a token, if that
    /// is not a control token that `special` hides.
    pub stop_text: StopText,
    /// Whether the tokens by which the model says that it is done are like any other. A text that
    /// has a constraint then ends where nothing else may follow.
    pub ignore_eos: bool,
    /// Whether control tokens appear in the text.
    pub special: SpecialText,
}

/// One prompt and how to continue it.
pub struct Request {
    /// Tokens to continue; at least one.
    pub prompt: Vec<u32>,
    /// Images that the prompt shows, in order: at their positions tokens are what [`crate::Eyes`] has put there.
    pub images: Vec<Shown>,
    /// Choices wanted. The prompt is computed once and forked.
    pub choices: NonZeroUsize,
    /// How tokens are chosen. Choice `i` draws with `seed + i`.
    pub sampling: Sampling,
    /// When a choice ends.
    pub limits: Limits,
    /// `Some(n)`: log-probabilities of each chosen token and of the `n` likeliest ones.
    pub logprobs: Option<usize>,
    /// `Some(n)`: log-probabilities of the prompt's tokens from the second on, and of the `n`
    /// likeliest ones in the place of each, in [`crate::Event::PromptScored`]. Only what has been
    /// handed out is then taken from the prefix cache.
    pub prompt_logprobs: Option<usize>,
    /// What the text must conform to. Every choice gets its own clone.
    pub constraint: Option<Box<dyn Constraint>>,
    /// Time from submission until the request fails with [`crate::Failure::Deadline`].
    pub deadline: Option<Duration>,
    /// Who shares computed prompts with it: requests of the same namespace, and no others, not even
    /// while they run. Default [`Namespace::COMMON`].
    pub prefix_namespace: Namespace,
    /// For this long from the prompt's end on, its page groups are the last to be evicted.
    pub pin_prefix: Option<Duration>,
    /// The conversation that the first choice goes on with, which a cache folder keeps under its name, however it ends.
    /// Without a folder it has no effect. Of several at once it is that of the last to end.
    pub session: Option<SessionId>,
    /// What has been taken from the service's [`crate::RequestMemory`] for it already. Submission
    /// brings it to what the request holds until it ends, and takes that if this is `None`.
    pub memory: Option<HeldMemory>,
    /// Lower values start earlier and give their memory up later; among equals, those that came
    /// first. Default 0.
    pub priority: i32,
}

impl Request {
    /// A request for one choice after `prompt`, with default sampling and no limits.
    #[must_use]
    pub fn new(prompt: Vec<u32>) -> Self {
        Self {
            prompt,
            images: Vec::new(),
            choices: NonZeroUsize::MIN,
            sampling: Sampling::default(),
            limits: Limits::default(),
            logprobs: None,
            prompt_logprobs: None,
            constraint: None,
            deadline: None,
            prefix_namespace: Namespace::COMMON,
            pin_prefix: None,
            session: None,
            memory: None,
            priority: 0,
        }
    }

    /// Bytes the request holds from its submission to its end: its prompt once for each choice, what
    /// decides their tokens, and events that are not read. A constraint holds what it takes itself.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        let prompt = self.prompt.capacity() * size_of::<u32>();
        // Of the same picture in several requests there is one, which is counted in each.
        let rows = self.images.iter().map(|shown| size_of_val(&*shown.rows));
        let images: usize = rows.sum();
        let stops: usize = self.limits.stop.iter().map(String::capacity).sum();
        let biases = self.sampling.logit_bias.len() * size_of::<(u32, f32)>();
        let ends = self.limits.stop_tokens.capacity() * size_of::<u32>();
        let scored = self.scored();
        let repeated = scored * Self::REPEATED_LOGPROB_BYTES;
        let choice = prompt + stops + ends + repeated + Self::CHOICE_BYTES;
        let choices = choice.saturating_mul(self.choices.get());
        let once = scored * Self::LOGPROB_BYTES + self.unread_bytes() + biases + images;
        choices.saturating_add(Self::BYTES + once)
    }

    /// Bytes of alternatives in events that are not read. The events themselves are a part of
    /// [`Self::BYTES`].
    fn unread_bytes(&self) -> usize {
        let each = self.logprobs.map_or(0, |top| top * size_of::<(u32, f32)>());
        Waiting::unread_events(self.choices.get()).saturating_mul(each)
    }

    /// The prompt's log-probabilities in the reply.
    fn scored(&self) -> usize {
        let listed = self.prompt_logprobs.map_or(0, |top| top + 1);
        self.prompt.len() * listed
    }

    /// A token and its log-probability: here some 16 bytes in a list that grows, and as JSON, which
    /// names everything, some 100 in a text that grows.
    const LOGPROB_BYTES: usize = 384;
    /// The same in each choice that repeats it.
    const REPEATED_LOGPROB_BYTES: usize = 128;

    /// A request's own fields and the channel of its events, which holds a few hundred small ones.
    const BYTES: usize = 32 << 10;
    /// A choice's own fields: its sampler, the text it holds back, and its path in the cache.
    const CHOICE_BYTES: usize = 8 << 10;
}

/// Restricts the tokens that may come next, for example to a grammar.
///
/// For every token: [`Constraint::mask`], then [`Constraint::accept`] with the token that was
/// chosen. A token that ends the text is chosen only if `mask` left it possible, and is not passed
/// to `accept`.
pub trait Constraint: Send {
    /// A constraint in the same state, for another choice.
    fn fork(&self) -> Box<dyn Constraint>;

    /// Sets the logits (of vocabulary size) of every token that may not come next to negative
    /// infinity. End-of-text tokens stay possible exactly where the text may end.
    ///
    /// # Errors
    /// [`ConstraintError`] when nothing may come next or the constraint cannot be evaluated; the
    /// request fails with it, as it does where no logit is left above negative infinity.
    fn mask(&mut self, logits: &mut [f32]) -> Result<(), ConstraintError>;

    /// Takes note of the chosen token.
    ///
    /// # Errors
    /// [`ConstraintError`] when the token was not allowed.
    fn accept(&mut self, token: u32) -> Result<(), ConstraintError>;

    /// Whether the text is complete, so that nothing but its end may follow.
    fn is_complete(&self) -> bool;
}

/// A constraint that cannot be met or evaluated.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConstraintError {
    /// Nothing may come next, or it cannot be told what.
    #[error("the output constraint cannot be followed: {0}")]
    NotFollowed(String),
    /// What has been written leads to more states than there is memory for.
    #[error("the output constraint takes more and more states: {0}")]
    Memory(#[from] MemoryRefusal),
}

/// A request that was not taken. Nothing was computed and nothing is held for it.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// An image that does not fit the prompt or the model.
    #[error("the image at the tokens {positions:?} cannot be taken: {reason}")]
    Image {
        /// Where it is.
        positions: std::ops::Range<usize>,
        /// What is wrong.
        reason: &'static str,
    },
    /// As many requests wait as may.
    #[error(
        "{waiting} requests are waiting already; try again in {} s",
        retry_after.as_secs().max(1)
    )]
    QueueFull {
        /// Requests that wait.
        waiting: usize,
        /// When a place is likely to be free.
        retry_after: Duration,
    },
    /// The request would not fit the budget even if it were alone.
    #[error(
        "the request needs up to {needed} of KV cache, but the budget leaves {budget}; ask for fewer tokens or choices"
    )]
    TooLarge {
        /// Bytes of KV cache at its end.
        needed: ByteLength,
        /// Bytes of KV cache there can be.
        budget: ByteLength,
    },
    /// The prompt alone fills the context.
    #[error("the prompt has {prompt} tokens, but the context holds {context}; shorten the prompt")]
    PromptTooLong {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens the context holds.
        context: usize,
    },
    /// A prompt without a single token gives the model nothing to continue.
    #[error("the prompt is empty; give at least one token")]
    EmptyPrompt,
    /// A token the model does not have.
    #[error("token {token} is out of range: the vocabulary has {vocabulary} tokens")]
    TokenOutOfRange {
        /// The token.
        token: u32,
        /// Tokens there are.
        vocabulary: usize,
    },
    /// A token in a setting, which the model does not have.
    #[error("`{setting}` names token {token}, but the vocabulary has {vocabulary} tokens")]
    SettingOutOfRange {
        /// Name of the setting.
        setting: &'static str,
        /// The token.
        token: u32,
        /// Tokens there are.
        vocabulary: usize,
    },
    /// The least number of tokens is more than the greatest.
    #[error("at least {least} tokens asked for, but at most {most}")]
    MinTokens {
        /// Tokens at least.
        least: usize,
        /// Tokens at most.
        most: usize,
    },
    /// More choices than can run at once.
    #[error("{asked} choices asked for, but at most {most} run at once")]
    TooManyChoices {
        /// Choices asked for.
        asked: usize,
        /// Choices possible.
        most: usize,
    },
    /// More alternatives than are given.
    #[error("{asked} log-probabilities per token asked for, but at most {most} are given")]
    TooManyLogprobs {
        /// Alternatives asked for.
        asked: usize,
        /// Alternatives possible.
        most: usize,
    },
    /// Requests hold too much memory for another one of this size.
    #[error(transparent)]
    Memory(#[from] MemoryRefusal),
    /// A sampling setting is out of range.
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    /// A file of the model was lost while it was in use.
    #[error(transparent)]
    LostFile(#[from] LostFile),
    /// The service is shutting down, or has stopped after an error.
    #[error("the service is shutting down and takes no more requests")]
    ShuttingDown,
}
