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
#![forbid(unsafe_code)]

pub use lacuna_engine::{
    Engine, EngineConfig, EngineError, FinishReason, Generation, Limits, Penalties, Sampling,
    SamplingError, Session,
};
pub use lacuna_kernels::{DType, ElementType};
pub use lacuna_kv::{KvElements, KvPolicy, KvReport};
pub use lacuna_models::files::{self, ModelFiles};
pub use lacuna_models::template::Message;
pub use lacuna_models::tokenizer::{
    AddSpecial, Decode, Description as TokenizerDescription, ParseSpecial, Special, Tokenizer,
};
pub use lacuna_models::{
    Config, FiniteCheck, LoadError, Model, PromptError, demo, describe, load_tokenizer,
};
pub use lacuna_models::{plan, synth};
