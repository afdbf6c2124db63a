//! Model files, tokenizers, chat templates, architectures and the forward pass.
//!
//! [`files::ModelFiles`] opens what is on disk, [`Model`] connects it, [`Model::forward`] computes.
//! Nothing here keeps state between calls: KV caches and activations are passed in.

pub mod architecture;
mod config;
mod decoder;
mod demo;
mod error;
pub mod files;
mod model;
pub mod plan;
mod scratch;
pub mod synth;
pub mod template;
pub mod tokenizer;
mod weights;

pub use config::{Config, Rope, RopeScaling};
pub use decoder::{LogitRows, Segment};
pub use demo::demo;
pub use error::{ConfigError, ForwardError, LoadError, Place, PromptError};
pub use model::{Model, describe, load_tokenizer};
pub use scratch::{BatchLimits, FiniteCheck, OutOfMemory, Scratch};
