//! Model files, tokenizers, chat templates, families of models and the forward pass.
//!
//! [`files::ModelFiles`] opens what is on disk, [`Model`] connects it, [`Model::forward`] computes.
//! Nothing here keeps state between calls: KV caches and activations are passed in.

mod demo;
mod error;
mod executor;
mod families;
pub mod files;
mod layers;
mod model;
pub mod plan;
pub mod program;
mod recommended;
mod scratch;
pub mod spec;
pub mod synth;
pub mod template;
pub mod tokenizer;
mod weights;

pub use demo::demo;
pub use error::{ConfigError, ForwardError, LoadError, Place, PromptError};
pub use executor::{LogitRows, Segment};
pub use families::{Description, names as families};
pub use model::{Model, describe, load_tokenizer};
pub use recommended::RecommendedSampling;
pub use scratch::{BatchLimits, FiniteCheck, OutOfMemory, Scratch};
pub use spec::ModelSpec;
