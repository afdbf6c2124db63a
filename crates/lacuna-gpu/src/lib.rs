//! The forward pass on a GPU through Vulkan, over pages that its page table maps, or that kernels look up in a table of ours.
//!
//! A [`Vulkan`] device runs the same program as the processor does, for decoders. Keys and values lie in sparse
//! buffers of the device whose pages a pool attaches as rows arrive, so kernels read one flat range; where there are no such
//! buffers, in pages that a block table lists ([`PageTable`]). Whatever it
//! cannot do is refused when a model is opened, by name; nothing is done on the processor instead without a word, but for
//! looking up rows of the embedding table and making tables of rotations, which is always done there, and for the first
//! layers where a KV cache says that they are the processor's
//! ([`Geometry::host_layers`](lacuna_kv::Geometry::host_layers)).
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let device = lacuna_gpu::Vulkan::open()?;
//! println!("{}", lacuna_models::ComputeDevice::name(&device));
//! # Ok(())
//! # }
//! ```
//!
//! Sums are made in orders that the shapes of a model decide, with trees in shared memory: not by subgroups, nor by how
//! a prompt was cut. So on one device a pass gives the same bits whatever else is in its batch.

mod arranged;
mod attention;
mod capability;
mod device;
mod elementwise;
mod executor;
mod experts;
mod fused;
mod kernels;
mod likeliest;
mod part;
mod pass;
mod products;
mod recurrence;
mod rows;
mod self_test;
mod top_k;
mod weights;

pub use device::{Vulkan, VulkanConfig};
pub use lacuna_pages::vulkan::PageTable;
