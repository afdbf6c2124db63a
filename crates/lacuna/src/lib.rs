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
    Config, FiniteCheck, LoadError, Model, PromptError, describe, load_tokenizer,
};
pub use lacuna_models::{plan, synth};

/// The demo model: 4 million parameters trained on the documentation of Rust, built into the
/// program. Its pages are file-backed like those of any other model file.
///
/// # Panics
/// Never: the file is part of the program and is parsed by its tests.
#[must_use]
pub fn demo() -> ModelFiles {
    static FILE: &[u8] = include_bytes!("../../../models/demo/lacuna-demo-q8_0.gguf");
    ModelFiles::from_gguf(files::Mapping::from_static(FILE))
        .expect("the model built into the program is whole")
}
