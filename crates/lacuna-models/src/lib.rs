//! Families of models, the memory plan and the forward pass.
//!
//! [`lacuna_files::ModelFiles`] opens what is on disk, [`Model`] connects it, [`Model::forward`] computes.
//! Nothing here keeps state between calls: KV caches and activations are passed in.

mod demo;
mod device;
mod error;
mod executor;
mod families;
mod layers;
mod model;
pub mod plan;
mod predictors;
pub mod program;
mod prompts;
pub mod quantize;
mod recommended;
mod scratch;
mod smoothing;
pub mod spec;
pub mod synth;
pub mod trace;
mod vision;
mod weights;

/// Raised with every change of a bit that some pass computes: KV that an earlier version has left in a folder is not
/// gone on with then.
pub const NUMERICS_VERSION: u32 = 4;

pub use demo::demo;
pub use device::{
    ComputeDevice, DeviceLayers, Executor, ExecutorCounters, ExecutorError, ExecutorMemory,
    KernelTime, Likeliest, MatrixWeights, PassSize, TokenLogit, UnknownDeviceLayers,
};
pub use error::{
    ColumnsError, ConfigError, ForwardError, LoadError, Place, PromptError, UnreadableWeights,
};
pub use executor::{LogitRows, Segment, Shown, Texts, normalize};
pub use families::{Description, names as families};
pub use model::{Model, Outputs, Prompt, describe, is_head, tokenizer, with_head};
pub use predictors::{
    BlockFit, FitSettings, NeuronRecorder, PredictorFit, PredictorFitter, PredictorsError,
};
pub use prompts::{Prompts, UnknownPrompt};
pub use recommended::RecommendedSampling;
pub use scratch::{BatchLimits, FiniteCheck, OutOfMemory, Scratch};
pub use spec::ModelSpec;
pub use vision::{
    Blindness, ImageEncoder, ImageProducts, ImageShape, ImageTokens, blindness, describe_images,
    describe_images_for, with_images,
};
pub use weights::{ExpertCounts, Loading, MakeDevice, NeuronReads, RowReads, with_columns};
