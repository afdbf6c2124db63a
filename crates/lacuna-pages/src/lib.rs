//! Physical pages attached to reserved address space, under one byte budget.
//!
//! A [`Pool`] owns physical pages of one [`Device`]; a [`Buffer`] is reserved address space whose
//! pages are attached, shared, sealed, given back and moved by page table, while the addresses stay
//! as they are. On Linux and Android the [`HostDevice`] does it with the CPU's own page table, and on macOS
//! with the feature `macos`, which nobody has run yet; anywhere else the [`DenseDevice`] stands behind the
//! same buffers.
//!
//! ```
//! # use lacuna_pages::{ByteLength, DenseDevice, HostDevice, Pool, PoolConfig, Request};
//! # if !cfg!(target_os = "linux") { return Ok(()); }
//! let pool = Pool::new(HostDevice::new()?, PoolConfig::default())?;
//! let mut keys = pool.reserve(ByteLength::gibibytes(1), "keys")?;
//! let mut values = pool.reserve(ByteLength::gibibytes(1), "values")?;
//! pool.ensure_mapped(&mut [Request::new(&mut keys, 0..2048), Request::new(&mut values, 0..2048)])?;
//! keys.bytes_mut(0..2048)?.fill(1);
//! assert_eq!(pool.ledger().committed, ByteLength::kibibytes(128));
//! # Ok::<(), lacuna_pages::Error>(())
//! ```
//!
//! # Invariants
//!
//! Named here, cited where code relies on them, checked by debug builds after every change:
//!
//! * **M1** A physical page is free or owned, never both.
//! * **M2** A page's count is its mappings plus its pins; every buffer's account agrees.
//! * **M3** A page with more than one mapping, or with a pin, is sealed: every slot that maps it
//!   says so, and no mapping of it allows writing. So is a page of a file, always.
//! * **M4** No virtual page maps a freed page, and no heap is given back while a page of it is
//!   owned.
//! * **M5** Books and tables change only after the device's effect succeeded (*plan, do, record*),
//!   so an error leaves everything as it was; an undo that fails too costs pages, never safety.
//! * **M6** A page that lost its last owner is reused only after its readers' fence.
//! * **M7** `Drop` never panics and never fails: what the device refuses is tried again later, and
//!   stays owned until then.
//! * **M8** Every page of a buffer is of the kind of memory that it was reserved for.

mod buffer;
mod dense;
pub mod device;
mod error;
pub mod faults;
mod freed;
#[cfg(any(feature = "vulkan", all(feature = "metal", target_os = "macos")))]
mod gpu;
#[cfg(any(target_os = "linux", target_os = "android", target_os = "macos"))]
pub mod guard;
#[cfg(not(any(target_os = "linux", target_os = "android", target_os = "macos")))]
#[path = "unguarded.rs"]
pub mod guard;
mod host;
mod ledger;
#[cfg(all(feature = "metal", target_os = "macos"))]
pub mod metal;
mod pool;
mod slices;
mod split;
mod system;
mod table;
mod units;
#[cfg(feature = "vulkan")]
pub mod vulkan;

pub use buffer::Buffer;
pub use dense::DenseDevice;
pub use device::{Capabilities, Device, DeviceError};
pub use error::{Error, SwapError};
pub use freed::{return_freed_memory, return_large_blocks};
pub use host::{HostConfig, HostDevice, HugePages};
pub use ledger::{BufferLedger, Counts, Ledger};
#[cfg(all(feature = "metal", target_os = "macos"))]
pub use metal::MetalDevice;
pub use pool::{
    BrokenInvariant, MapReport, PagePin, Pages, Pool, PoolConfig, Recycle, Request, Share, Source,
};
pub use split::SplitDevice;
pub use system::{ProcessMemory, SystemMemory, available_memory};
pub use units::{ByteLength, ByteRange, PageCount, PageRange, PageSize, PhysicalPage, VirtualPage};
#[cfg(feature = "vulkan")]
pub use vulkan::VulkanDevice;
