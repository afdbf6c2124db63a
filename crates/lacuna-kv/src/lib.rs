//! KV cache policy over paged memory: geometry, sequences, and which way memory is held.
//!
//! No unsafe code and no model: everything here can be tested with a few bytes per row.
#![forbid(unsafe_code)]

mod cache;
mod error;
mod geometry;
mod sequence;

pub use cache::{KvCache, KvPolicy, UnknownPolicy};
pub use error::KvError;
pub use geometry::{Geometry, Layer, Side};
pub use sequence::{KvReport, Sequence};
