//! Sessions, sampling and text over a model and its KV cache.
//!
//! ```text
//! schedule -> prepare -> forward -> sample -> accept        Engine::step
//! ```
//!
//! [`Engine`] owns what is shared (model, threads, arena, KV pool) and computes. Two things drive it:
//!
//! * [`Service`] batches many requests continuously, shares the pages of prompts that begin alike,
//!   and keeps to a byte budget. [`Handle::submit`] takes a [`Request`] and gives a [`Stream`] of
//!   [`Event`]s.
//! * [`Session`] and [`Generation`] run one conversation on the caller's thread.
//! * [`ServiceSession`] is such a conversation beside a service's requests, in the same memory.
//!
//! [`Embedder`] runs models that make embeddings of texts, and [`Reranker`] those that score pairs of them, on
//! the caller's thread too.
#![forbid(unsafe_code)]

mod arbiter;
mod block_feed;
mod budget;
mod embedder;
mod engine;
mod error;
mod fingerprint;
mod generation;
mod images;
mod logprobs;
mod needs;
mod predictors;
mod request;
mod request_limits;
mod request_memory;
mod row;
mod runner;
mod sampler;
mod saved_session;
mod scheduler;
mod service;
mod service_session;
mod session;
mod speculation;
mod status;
mod stop;
mod stream;
mod system;
mod text_encoder;
mod transcript;

pub use block_feed::{BlockFeed, BlockWatch, NetChange};
pub use embedder::{Embedder, EmbedderConfig, Reranker, WrongDimensions, shortened};
pub use engine::{Accounting, Engine, EngineConfig, PlannedDevice};
pub use error::{EngineError, NotFinite};
pub use generation::{Generation, Timing};
pub use images::{Eyes, ImageError, ImagePlan};
pub use lacuna_images::{Format as ImageFormat, Header as ImageHeader, Limits as ImageLimits};
pub use needs::Needs;
pub use request::{Constraint, ConstraintError, Limits, Refusal, Request};
pub use request_memory::{HeldMemory, MemoryRefusal, RequestMemory, RequestMemoryStatus};
pub use sampler::{Candidates, Penalties, Sampler, Sampling, SamplingError};
pub use scheduler::{Borrower, LoanRefusal};
pub use service::{Grace, Handle, PrefixCacheConfig, Service, ServiceConfig};
pub use service_session::{Continuation, Piece, ServiceSession};
pub use session::Session;
pub use speculation::{
    DraftCounts, DraftError, DraftModel, Drafts, Speculation, UnknownSpeculation,
};
pub use status::{
    BudgetStatus, CacheStatus, Counters, DeviceStatus, ExpertStatus, GroupRun, GroupState,
    Histogram, Latencies, NeuronStatus, PageSizes, Phase, SessionStatus, Status, WeightMemory,
};
pub use stop::{StopFilter, StopText};
pub use stream::{
    Difference, Event, Failure, FinishReason, Miss, PromptToken, Stream, TokenLogprobs, Usage,
};
pub use text_encoder::{Excess, Pair, TextEncoder};
