//! Model files: mapped and parsed in place, or read into memory ([`reader`]); weights in forms that cannot be computed from are converted.
//!
//! ```text
//! path -> Mapping -> gguf, or safetensors and config.json -> Tensors -> Tensor { bytes in the mapping }
//! ```
//!
//! Every parser here treats its input as hostile: a malformed file is a typed error that says what
//! to do, never a panic, and never an allocation larger than the file itself calls for.

mod conversion;
pub mod gguf;
#[cfg(feature = "hub")]
pub mod hub;
pub mod huggingface;
mod identity;
mod mapping;
mod model;
mod output;
mod progress;
pub mod reader;
pub mod safetensors;
mod source;
mod tensor;

pub use conversion::ConversionError;
pub use identity::REMEMBERED;
pub use lacuna_kernels::{DType, UnknownDType};
pub use mapping::{Error as MappingError, LostFile, Mapping, guard_mappings, open_regular};
pub use model::{Error, Metadata, ModelFiles};
pub use output::{OutputFile, remove_unfinished_files};
pub use progress::Progress;
pub use source::{HubId, ModelSource, SourceError};
pub use tensor::{Error as TensorError, Summary, Tensor, Tensors, TypeTotal};
