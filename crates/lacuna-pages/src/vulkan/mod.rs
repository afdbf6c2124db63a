#![expect(unsafe_code, reason = "the device trait is unsafe to implement")]

//! The Vulkan device: pages of device memory attached to sparse buffers by the GPU's page table, or listed in a table where
//! kernels look them up.
//!
//! A reservation is a `VkBuffer` with sparse binding, residency and aliasing, a heap is one
//! `VkDeviceMemory`, and a batch is one `vkQueueBindSparse` with its neighbours merged. The host
//! cannot see a reservation as one range, so [`Buffer::bytes`](crate::Buffer::bytes) is unsupported
//! on it; contents are copied by [`Buffer::read`](crate::Buffer::read) and
//! [`Buffer::write`](crate::Buffer::write), or worked on through a [`VulkanQueue`], whose copies and
//! kernels are ordered with the batches on one timeline. Kernels of others run in passes of a [`Compute`], on
//! mapped memory and on pieces of [`DeviceMemory`], in the same order.
//!
//! On a device without such buffers, or where [`PageTable`] says so, a reservation is a range of a block table in device
//! memory: a batch is a command that changes entries, and kernels find a page by its entry in an array of all heaps. Pages
//! come, go and are shared as before. Where kernels cannot have such an array, a reservation is a `VkBuffer` with memory from its
//! first to its last byte, as on the [`DenseDevice`](crate::DenseDevice).
//!
//! The driver is loaded when the device is opened. Where there is no loader or no driver, opening is
//! [`DeviceError::Unavailable`] and the dense device serves.
//!
//! ```
//! # use lacuna_pages::{ByteLength, Device, DeviceError, Pool, PoolConfig, VulkanDevice};
//! let device = match VulkanDevice::open() {
//!     Err(DeviceError::Unavailable { .. }) => return Ok(()), // and use a `DenseDevice`
//!     device => device?,
//! };
//! let queue = device.queue();
//! let pool = Pool::new(device, PoolConfig::default())?;
//! let mut keys = pool.reserve(ByteLength::mebibytes(64), "keys")?;
//! keys.ensure_mapped(0..4096)?;
//! keys.write(0, &[7; 4096])?;
//! assert_eq!(queue.checksum(keys.address(0), ByteLength::new(8))?, 0x0707_0707 * 4);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Costs on Mesa's software driver, on two busy cores, to the fence: a batch of one page 13 to 17
//! us, of 16 scattered pages 60 to 90 us, of 16 adjacent ones, which are one bind, 19 to 27 us. The
//! example `vulkan_costs` prints them; no real GPU has been measured.
//!
//! What a GPU does not do: a stray access to a hole or a write to a sealed page does not fault.
//! The queue therefore checks every range before it submits anything, and kernels mask what they
//! touch by length.
//!
//! # Safety
//!
//! The invariants of the Vulkan calls are in `driver` (V1 to V5) and beside it. For the
//! [`Device`] trait:
//!
//! * **D1**, **D2** are about host-visible devices, which this one is not.
//! * **D3** Bindings follow the operations, `State` refuses to give a mapped heap back and keeps
//!   a heap until all submitted work is done, so memory is never handed out twice; nothing else
//!   writes to it but what a [`VulkanQueue`] or a pass of a [`Compute`] is asked to write through a mapping.
//! * **D4** A batch is done in phases of one submission each; a phase is checked before it is
//!   submitted, and a submission that fails has no effect.

mod compute;
mod driver;
mod frames;
mod heap_set;
mod kernel_cache;
mod kernels;
mod layout;
mod memory;
mod objects;
mod open;
mod queue;
mod state;
mod table;
#[cfg(test)]
mod tests;
mod times;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ash::vk;

pub use crate::gpu::words::{Rows, checksum};
pub use compute::{Bound, Compute, ComputeCounters, ComputeKernel, Recording, WINDOWS};
pub use kernel_cache::KernelCache;
pub use memory::{DeviceMemory, MemoryUse};
pub use open::{DriverIdentity, PageTable};
pub use queue::VulkanQueue;

use crate::device::{
    Aliasing, BatchCost, BatchError, Capabilities, Commitment, Device, DeviceError, Fence,
    FenceState, HeapId, Hole, HostView, Operation, Ordering, Patience, SpaceId,
};
use crate::units::{ByteLength, PageSize};
use driver::Driver;
use state::State;

const NAME: &str = "vulkan";

/// What a kernel allows when it does not say: the default of `vm.max_map_count`.
const DEFAULT_MAP_COUNT: u64 = 65_530;

/// The Vulkan device: see the [module documentation](self).
#[derive(Debug)]
pub struct VulkanDevice {
    shared: Arc<Shared>,
}

/// What a device and its queues have in common.
#[derive(Debug)]
struct Shared {
    capabilities: Capabilities,
    driver: Arc<Driver>,
    state: Mutex<State>,
}

impl Shared {
    /// The state behind the lock; a panic under it is a bug, and the bindings still say what was
    /// submitted.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl VulkanDevice {
    /// Opens the best device there is: a GPU before a software driver.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`], with what is missing, when there is no loader, no driver, or
    /// no device that computes; other errors when a driver refuses to start.
    pub fn open() -> Result<Self, DeviceError> {
        Self::open_with(PageTable::default())
    }

    /// The same, with pages found as `pages` says at most.
    ///
    /// # Errors
    /// As [`VulkanDevice::open`].
    pub fn open_with(pages: PageTable) -> Result<Self, DeviceError> {
        Self::with_driver(Driver::open(None, pages)?)
    }

    /// The same of the device at `place` in the driver's list of them, from 0.
    ///
    /// # Errors
    /// As [`VulkanDevice::open`]; where there is none at that place, naming those that there are.
    pub fn open_at(place: usize, pages: PageTable) -> Result<Self, DeviceError> {
        Self::with_driver(Driver::open(Some(place), pages)?)
    }

    /// Whether the driver computes on the processor.
    pub fn is_software(&self) -> bool {
        self.shared.driver.kind == vk::PhysicalDeviceType::CPU
    }

    /// Whether its memory is a card's own, and no part of the host's.
    pub fn has_own_memory(&self) -> bool {
        self.shared.driver.kind == vk::PhysicalDeviceType::DISCRETE_GPU
    }

    /// How the pages of reservations are found.
    pub fn page_table(&self) -> PageTable {
        self.shared.driver.pages
    }

    fn with_driver((driver, queue): (Arc<Driver>, driver::Queue)) -> Result<Self, DeviceError> {
        let state = State::new(Arc::clone(&driver), queue)?;
        let smallest = PageSize::new(state.granularity().max(PageSize::KIB_4.bytes()))
            .map_err(|_| invalid("pages that are no power of two"))?;
        let strict = driver.limits.strict_holes && driver.pages == PageTable::Device;
        let hole = match strict {
            true => Hole::Zero,
            false => Hole::Undefined,
        };
        let capabilities = Capabilities {
            name: NAME,
            page_sizes: PageSize::all_between(smallest, smallest.max(PageSize::MIB_2)),
            aliasing: match driver.pages {
                PageTable::Lookup | PageTable::Device => Aliasing::Shared,
                PageTable::Unused => Aliasing::Unsupported,
            },
            hole,
            ordering: Ordering::InOrder,
            commitment: match driver.pages {
                PageTable::Unused => Commitment::WithReservation,
                PageTable::Lookup | PageTable::Device => Commitment::PerHeap,
            },
            batch_cost: BatchCost::Call,
            mapping_limit: match driver.pages {
                PageTable::Device => mapping_limit(driver.kind),
                PageTable::Unused | PageTable::Lookup => None,
            },
            heap_limit: state.heap_limit(),
        };
        Ok(Self {
            shared: Arc::new(Shared {
                capabilities,
                driver,
                state: Mutex::new(state),
            }),
        })
    }

    /// The same device for another pool: both take from the same memory, and all work stays on one timeline.
    pub fn share(&self) -> Self {
        Self {
            shared: Arc::clone(&self.shared),
        }
    }

    /// What the driver calls the device.
    pub fn driver_name(&self) -> &str {
        self.shared.driver.name()
    }

    /// Whose kernels are compiled here.
    pub fn driver_identity(&self) -> DriverIdentity {
        self.shared.driver.identity
    }

    /// The most threads of a workgroup of kernels, and the most bytes that they share.
    pub fn workgroup_limits(&self) -> (u32, u32) {
        let limits = &self.shared.driver.limits;
        (limits.group_threads, limits.shared_bytes)
    }

    /// The queue on which work on the device's memory is submitted; it outlives the device.
    pub fn queue(&self) -> VulkanQueue {
        VulkanQueue {
            shared: Arc::clone(&self.shared),
        }
    }
}

// SAFETY: D1 to D4 as the module documentation has them.
unsafe impl Device for VulkanDevice {
    fn capabilities(&self) -> &Capabilities {
        &self.shared.capabilities
    }

    fn reserve(&mut self, length: ByteLength) -> Result<SpaceId, DeviceError> {
        self.shared.lock().reserve(length)
    }

    fn release(&mut self, space: SpaceId, after: Fence) -> Result<Fence, DeviceError> {
        self.shared.lock().release(space, after)
    }

    fn create_heap(&mut self, length: ByteLength) -> Result<HeapId, DeviceError> {
        self.shared.lock().create_heap(length)
    }

    fn destroy_heap(&mut self, heap: HeapId) -> Result<(), DeviceError> {
        self.shared.lock().destroy_heap(heap)
    }

    fn apply(&mut self, batch: &[Operation], after: Fence) -> Result<Fence, BatchError> {
        self.shared.lock().apply(batch, after)
    }

    fn wait(&mut self, fence: Fence, patience: Patience) -> Result<FenceState, DeviceError> {
        self.queue().wait(fence, patience)
    }

    fn host_view(&self, space: SpaceId) -> Option<HostView> {
        self.shared.lock().space(space).ok()?;
        Some(HostView::Copies(Arc::new(self.queue())))
    }

    fn is_lost(&self) -> bool {
        self.shared.driver.check_alive().is_err()
    }
}

/// A software driver maps pages of this process: each run costs one of its mappings, and when they
/// run out it says nothing and leaves the page unbound. Half of them is left to the process.
fn mapping_limit(kind: vk::PhysicalDeviceType) -> Option<u64> {
    if kind != vk::PhysicalDeviceType::CPU {
        return None;
    }
    let text = std::fs::read_to_string("/proc/sys/vm/max_map_count").ok();
    let count = text.and_then(|text| text.trim().parse::<u64>().ok());
    Some(count.unwrap_or(DEFAULT_MAP_COUNT) / 2)
}

fn invalid(what: &'static str) -> DeviceError {
    DeviceError::Invalid { device: NAME, what }
}
