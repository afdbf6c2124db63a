//! Lacuna's front door: open a model, start a session, read text.
//!
//! ```
//! use std::sync::Arc;
//!
//! let model = Arc::new(lacuna::Model::load(lacuna::demo())?);
//! let mut engine = lacuna::Engine::new(model, &lacuna::EngineConfig::default())?;
//! let mut session = engine.session(lacuna::Sampling::greedy())?;
//! session.extend(&engine.model().prompt(&[lacuna::Message::new("user", "What is ownership?")])?);
//! let limits = lacuna::Limits { max_tokens: Some(16), ..Default::default() };
//! let mut generation = lacuna::Generation::new(&mut engine, &mut session, limits)?;
//! while let Some(piece) = generation.next_piece()? {
//!     print!("{piece}");
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A [`Service`] runs many requests at once under a byte budget, and shares the pages of prompts that
//! begin alike:
//!
//! ```
//! use std::sync::Arc;
//!
//! let model = Arc::new(lacuna::Model::load(lacuna::demo())?);
//! let engine = lacuna::EngineConfig {
//!     budget: Some(lacuna::ByteLength::mebibytes(64)),
//!     ..Default::default()
//! };
//! let config = lacuna::ServiceConfig { engine, ..Default::default() };
//! let service = lacuna::Service::start(Arc::clone(&model), config)?;
//! let streams = ["What is ownership?", "What is a trait?"].map(|question| {
//!     let prompt = model.prompt(&[lacuna::Message::new("user", question)])?;
//!     let limits = lacuna::Limits { max_tokens: Some(8), ..Default::default() };
//!     let request = lacuna::Request { limits, ..lacuna::Request::new(prompt) };
//!     Ok::<_, Box<dyn std::error::Error>>(service.handle().submit(request)?)
//! });
//! for stream in streams {
//!     let mut stream = stream?;
//!     while let Some(event) = stream.blocking_recv() {
//!         match event {
//!             lacuna::Event::Token { text, .. } => print!("{text}"),
//!             lacuna::Event::Finished { text, reason, .. } => println!("{text} ({})", reason.name()),
//!             lacuna::Event::Failed(failure) => return Err(failure.into()),
//!             lacuna::Event::Started { .. } | lacuna::Event::PromptScored(_) => {}
//!         }
//!     }
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! What programs set and match is named here. What signatures name beyond that is in the crates that it comes from,
//! which are modules here: [`engine`], [`files`], [`kernels`], [`kv`], [`models`], [`pages`] and [`text`].
#![forbid(unsafe_code)]

pub use lacuna_engine::{
    self as engine, Accounting, BlockWatch, Constraint, ConstraintError, Continuation,
    DeviceStatus, Difference, DraftCounts, DraftError, DraftModel, Drafts, Embedder,
    EmbedderConfig, Engine, EngineConfig, EngineError, Event, Excess, ExpertStatus, Failure,
    FinishReason, Generation, Grace, Handle, HeldMemory, Limits, MemoryRefusal, Miss, NotFinite,
    Pair, Penalties, Piece, PlannedDevice, PrefixCacheConfig, PromptToken, Refusal, Request,
    RequestMemory, Reranker, Sampler, Sampling, SamplingError, Service, ServiceConfig,
    ServiceSession, Session, Speculation, Status, StopText, Stream, TextEncoder, Timing,
    TokenLogprobs, UnknownSpeculation, Usage, WrongDimensions, shortened,
};
pub use lacuna_files::{self as files, ModelFiles};
pub use lacuna_kernels::{self as kernels, DType, ElementType, PrecisionMode};
pub use lacuna_kv::folder::{CacheKey, FolderConfig, SessionId, SessionName};
pub use lacuna_kv::prefix::Namespace;
pub use lacuna_kv::saved::{Saved, SavedError};
pub use lacuna_kv::swap::SwapConfig;
pub use lacuna_kv::{self as kv, GrowthSchedule, KvElements, KvError, KvPolicy, KvReport, Layout};
pub use lacuna_models::{
    self as models, ComputeDevice, DeviceLayers, FiniteCheck, ForwardError, LoadError, Loading,
    Model, ModelSpec, Prompt, PromptError, RecommendedSampling, RowReads, Shown, demo, describe,
    is_head, with_head,
};
pub use lacuna_models::{plan, quantize, synth, trace};
pub use lacuna_pages::{self as pages, ByteLength, Ledger};
pub use lacuna_text::template::Message;
pub use lacuna_text::tokenizer::{
    AddSpecial, Decode, Description as TokenizerDescription, EncodeLimits, ParseSpecial, Special,
    SpecialText, Tokenizer,
};
pub use lacuna_text::{self as text, reply};
