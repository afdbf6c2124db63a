#![expect(unsafe_code, reason = "the device trait is unsafe to implement")]

//! The Metal device: pages of device memory attached to placement sparse buffers by the GPU's page table. It
//! is type-checked (`.ci/check-apple`); nobody has run it yet.
//!
//! A reservation is an `MTLBuffer` made with a sparse page size, a heap is an `MTLHeap` of the placement type
//! that is compatible with that size, and a batch is one `updateBufferMappings:heap:operations:count:` of an
//! `MTL4CommandQueue` for each buffer and heap it is about, its neighbours merged. That is Metal 4, of macOS 26 on
//! Apple silicon. Memory is private to the device, so [`Buffer::bytes`](crate::Buffer::bytes) is unsupported on
//! it; contents are copied by [`Buffer::read`](crate::Buffer::read) and [`Buffer::write`](crate::Buffer::write),
//! or worked on through a [`MetalQueue`], whose copies and kernels are ordered with the batches on one timeline.
//!
//! ```no_run
//! # use lacuna_pages::{ByteLength, Device, DeviceError, MetalDevice, Pool, PoolConfig};
//! let device = match MetalDevice::open() {
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
//! What a GPU does not do: a stray access to a hole or a write to a sealed page does not fault, but reads
//! zeros, or is lost. The queue therefore checks every range before it submits anything, and kernels mask what
//! they touch by length.
//!
//! What of Metal this relies on and only a Mac can show, as Apple's headers have it: that a tile of a heap
//! may be mapped in several buffers at once; that mapping a tile in place of another needs no unmapping before;
//! that changes of mappings are part of what `signalEvent` comes after and `waitForEvent` holds back; and that
//! a residency set that has the heaps covers what is mapped of them later.
//!
//! # Safety
//!
//! The invariants of the Metal calls are in `driver` (L1 to L4) and beside it. For the [`Device`] trait:
//!
//! * **D1**, **D2** are about host-visible devices, which this one is not.
//! * **D3** Mappings follow the operations, `State` refuses to give a mapped heap back and keeps a heap until
//!   all submitted work is done, so memory is never handed out twice; nothing else writes to it but what a
//!   [`MetalQueue`] is asked to write through a mapping.
//! * **D4** A batch is done in phases of one submission each; a phase is checked before it is submitted, and a
//!   submission that fails has no effect. Commands that fail while they run take the device with them.

mod driver;
mod frames;
mod kernels;
mod objects;
mod queue;
mod state;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use objc2::rc::autoreleasepool;

pub use crate::gpu::words::{Rows, checksum};
pub use queue::MetalQueue;

use crate::device::{
    Aliasing, BatchCost, BatchError, Capabilities, Commitment, Device, DeviceError, Fence,
    FenceState, HeapId, Hole, HostView, Operation, Ordering, Patience, SpaceId,
};
use crate::units::{ByteLength, PageSize};
use driver::Driver;
use state::State;

const NAME: &str = "metal";

/// The Metal device: see the [module documentation](self).
#[derive(Debug)]
pub struct MetalDevice {
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

impl MetalDevice {
    /// Opens the system's default device.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`], with what is missing, when there is no device with Metal 4 and sparse
    /// buffers; other errors when the system refuses to start.
    pub fn open() -> Result<Self, DeviceError> {
        let (driver, queue) = autoreleasepool(|_| Driver::open())?;
        let smallest =
            PageSize::new(driver.tile).map_err(|_| invalid("pages that are no power of two"))?;
        let capabilities = Capabilities {
            name: NAME,
            page_sizes: PageSize::all_between(smallest, smallest.max(PageSize::MIB_2)),
            aliasing: Aliasing::Shared,
            // What the first tier of sparse buffers promises.
            hole: Hole::Zero,
            ordering: Ordering::InOrder,
            commitment: Commitment::PerHeap,
            batch_cost: BatchCost::Call,
            mapping_limit: None,
            heap_limit: None,
        };
        let state = Mutex::new(State::new(Arc::clone(&driver), queue));
        Ok(Self {
            shared: Arc::new(Shared {
                capabilities,
                driver,
                state,
            }),
        })
    }

    /// The same device for another pool: both take from the same memory, and all work stays on one timeline.
    pub fn share(&self) -> Self {
        Self {
            shared: Arc::clone(&self.shared),
        }
    }

    /// What the system calls the device.
    pub fn device_name(&self) -> &str {
        self.shared.driver.name()
    }

    /// The queue on which work on the device's memory is submitted; it outlives the device.
    pub fn queue(&self) -> MetalQueue {
        MetalQueue {
            shared: Arc::clone(&self.shared),
        }
    }
}

// SAFETY: D1 to D4 as the module documentation has them.
unsafe impl Device for MetalDevice {
    fn capabilities(&self) -> &Capabilities {
        &self.shared.capabilities
    }

    fn reserve(&mut self, length: ByteLength) -> Result<SpaceId, DeviceError> {
        autoreleasepool(|_| self.shared.lock().reserve(length))
    }

    fn release(&mut self, space: SpaceId, after: Fence) -> Result<Fence, DeviceError> {
        autoreleasepool(|_| self.shared.lock().release(space, after))
    }

    fn create_heap(&mut self, length: ByteLength) -> Result<HeapId, DeviceError> {
        autoreleasepool(|_| self.shared.lock().create_heap(length))
    }

    fn destroy_heap(&mut self, heap: HeapId) -> Result<(), DeviceError> {
        autoreleasepool(|_| self.shared.lock().destroy_heap(heap))
    }

    fn apply(&mut self, batch: &[Operation], after: Fence) -> Result<Fence, BatchError> {
        autoreleasepool(|_| self.shared.lock().apply(batch, after))
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

fn invalid(what: &'static str) -> DeviceError {
    DeviceError::Invalid { device: NAME, what }
}
