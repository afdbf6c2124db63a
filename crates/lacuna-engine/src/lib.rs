//! Sessions, sampling and text over a model and its KV cache.
//!
//! ```text
//! schedule -> prepare -> forward -> sample -> accept        Engine::step
//! ```
//!
//! [`Engine`] owns what is shared (model, threads, arena, KV pool), [`Session`] what one
//! conversation needs, [`Generation`] turns steps into text.
#![forbid(unsafe_code)]

mod engine;
mod error;
mod generation;
mod sampler;
mod session;
mod stop;

pub use engine::{Engine, EngineConfig};
pub use error::EngineError;
pub use generation::{FinishReason, Generation, Limits, Timing};
pub use sampler::{Penalties, Sampler, Sampling, SamplingError};
pub use session::Session;
pub use stop::StopFilter;
