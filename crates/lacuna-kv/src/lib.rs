//! KV cache policy over paged memory: geometry, sequences, and which way memory is held.
//!
//! No unsafe code and no model: everything here can be tested with a few bytes per row.
#![forbid(unsafe_code)]

mod blocks;
mod cache;
mod checksum;
mod elements;
mod error;
pub mod folder;
mod footprint;
mod geometry;
mod growth;
mod layout;
mod policy;
pub mod prefix;
mod report;
pub mod saved;
mod sequence;
mod smoothing;
mod state;
mod store;
pub mod swap;

pub use blocks::{Admission, Allocation, BlockId, BlockPool, Demand, Reuse};
pub use cache::KvCache;
pub use elements::{KvElements, KvElementsError};
pub use error::KvError;
pub use footprint::Footprint;
pub use geometry::{Geometry, Keep, Layer, LayerCache, RowSpec, Side, ValueRows};
pub use growth::{Growth, GrowthSchedule};
/// The sizes pages can have.
pub use lacuna_pages::PageSize;
pub use layout::{BufferRows, Layout};
pub use policy::{KvPolicy, UnknownPolicy};
pub use report::KvReport;
pub use sequence::Sequence;
pub use smoothing::{KeySmoothing, SmoothedKeys};
pub use store::{DeviceRows, DeviceState};
