#![expect(unsafe_code, reason = "Metal is a foreign interface")]

//! The open device: its handle, its queue, its timeline, and the resources that are resident for it.
//!
//! All work goes onto one timeline, which is an `MTLSharedEvent`. Metal 4 orders nothing by itself: what is
//! on one queue may run at once, and changes of mappings beside commands. So each submission, be it changes or
//! commands, waits for the one before it and signals the next point. Changes and commands are ordered both
//! ways, a later [`Fence`] implies every earlier one, and memory taken from one buffer may be given to another
//! at once.
//!
//! Commands can fail while they run, and then the queue goes on: what they were to write is unknown. Metal
//! tells a handler, on a thread of its own, and a point counts as reached when the handlers of all commands up
//! to it have been told as well; a failure is [`DeviceError::Lost`] from then on.
//!
//! # Safety
//!
//! * **L1** *Alive.* Command buffers and queues of Metal 4 hold no resources: what the queue may still use is
//!   not dropped but retired, and dropped once the timeline has passed its last use. What is retired stays
//!   resident until then. A change of mappings to a heap that is gone can take the machine down, so where the
//!   timeline stands still when the device goes, everything is leaked.
//! * **L2** *One at a time.* The queue, the residency set and everything that commands are recorded with are
//!   used under the device's lock, or by `&mut`. They belong to no thread, so they may move between threads. The
//!   device's handle and the timeline may be used by any thread at once, as Metal says of both.
//! * **L3** *In bounds.* Offsets and lengths given to Metal lie within their buffer and heap, and those of
//!   mappings are whole tiles; the caller has checked them. Metal checks none of that.
//! * **L4** *Nothing dangles.* Arrays given to a call live until it returns; blocks are copied by it.

use std::collections::BTreeSet;
use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use block2::RcBlock;
use objc2::rc::Retained;
use objc2::runtime::ProtocolObject;
use objc2_metal::{
    MTL4CommandBuffer, MTL4CommandQueue, MTL4CommitFeedback, MTL4CommitOptions,
    MTL4UpdateSparseBufferMappingOperation, MTLAllocation, MTLBuffer, MTLBufferSparseTier,
    MTLCreateSystemDefaultDevice, MTLDevice, MTLEvent, MTLGPUFamily, MTLHeap, MTLResidencySet,
    MTLResidencySetDescriptor, MTLSharedEvent, MTLSparsePageSize,
};

use super::NAME;
use super::objects::sparse_buffer;
use crate::device::{DeviceError, Fence, FenceState, Patience};
use crate::units::ByteLength;

/// The tiles of all reservations and heaps. Metal has 16, 64 and 256 KiB; pools have pages of 64 KiB unless they
/// are told otherwise, and smaller tiles would only be more entries for each page.
pub(super) const TILE: MTLSparsePageSize = MTLSparsePageSize::Size64;

/// How long one wait lasts before it is looked whether the device is lost.
const LOOK: Duration = Duration::from_millis(100);

/// How long a device that goes waits for what was submitted. The system ends commands that take longer.
const LAST_WAIT: Duration = Duration::from_secs(10);

/// A Metal object that is only used under the device's lock (L2).
pub(super) struct Guarded<T: ?Sized>(pub(super) Retained<ProtocolObject<T>>);

// SAFETY: L2: no thread owns it, and no two use it at once.
unsafe impl<T: ?Sized> Send for Guarded<T> {}

/// The open device.
pub(super) struct Driver {
    pub(super) device: Retained<ProtocolObject<dyn MTLDevice>>,
    timeline: Retained<ProtocolObject<dyn MTLSharedEvent>>,
    progress: Arc<Progress>,
    /// The bytes of a tile.
    pub(super) tile: u64,
    /// The most bytes of a buffer. The headers do not say that sparse ones may be longer, and some checks of Metal
    /// end the process.
    pub(super) longest: u64,
    /// The last point that was seen to be reached.
    reached: AtomicU64,
    name: String,
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver")
            .field("name", &self.name)
            .field("reached", &self.reached)
            .field("progress", &self.progress)
            .finish_non_exhaustive()
    }
}

/// What the handlers of commands have been told.
#[derive(Debug, Default)]
struct Progress {
    lost: AtomicBool,
    /// The points of commands whose handlers have not been called.
    running: Mutex<BTreeSet<u64>>,
    told: Condvar,
}

impl Progress {
    fn running(&self) -> MutexGuard<'_, BTreeSet<u64>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The commands of `point` are done, or have failed.
    fn finish(&self, point: u64, failed: bool) {
        if failed {
            self.lost.store(true, Ordering::Release);
        }
        self.running().remove(&point);
        self.told.notify_all();
    }
}

impl Driver {
    /// Opens the system's default device.
    pub(super) fn open() -> Result<(Arc<Self>, Queue), DeviceError> {
        let device = MTLCreateSystemDefaultDevice().ok_or(unavailable("no Metal device"))?;
        // Nothing of Metal 4 may be called where the system does not know it.
        if !device.supportsFamily(MTLGPUFamily::Metal4) {
            return Err(unavailable(
                "no device with Metal 4, which macOS 26 has on Apple silicon",
            ));
        }
        let tile = device.sparseTileSizeInBytesForSparsePageSize(TILE) as u64;
        let probe = sparse_buffer(&device, tile)?;
        if probe.sparseBufferTier() < MTLBufferSparseTier::Tier1 {
            return Err(unavailable("no sparse buffers on the device"));
        }
        let timeline = device.newSharedEvent().ok_or(refused("newSharedEvent"))?;
        let queue = device
            .newMTL4CommandQueue()
            .ok_or(refused("newMTL4CommandQueue"))?;
        let resident = device
            .newResidencySetWithDescriptor_error(&MTLResidencySetDescriptor::new())
            .map_err(|_| refused("newResidencySetWithDescriptor"))?;
        queue.addResidencySet(&resident);
        let driver = Arc::new(Self {
            name: device.name().to_string(),
            longest: device.maxBufferLength() as u64,
            device,
            timeline,
            progress: Arc::default(),
            tile,
            reached: AtomicU64::new(0),
        });
        let queue = Queue {
            driver: Arc::clone(&driver),
            queue: Guarded(queue),
            resident: Guarded(resident),
            submitted: Fence::DONE,
        };
        Ok((driver, queue))
    }

    /// What the system calls the device.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// An error unless the device is still there.
    pub(super) fn check_alive(&self) -> Result<(), DeviceError> {
        match self.progress.lost.load(Ordering::Acquire) {
            true => Err(DeviceError::Lost),
            false => Ok(()),
        }
    }

    /// Bytes that the device's buffers and heaps may take together before the system slows down.
    pub(super) fn memory(&self) -> u64 {
        self.device.recommendedMaxWorkingSetSize()
    }

    /// Looks whether `fence` is reached. Costs nothing if it was seen to be before.
    pub(super) fn poll(&self, fence: Fence) -> Result<FenceState, DeviceError> {
        if self.reached.load(Ordering::Acquire) >= fence.0 {
            return Ok(FenceState::Signalled);
        }
        let signalled = self.timeline.signaledValue() >= fence.0;
        let running = self.progress.running().range(..=fence.0).next().is_some();
        self.check_alive()?;
        if !signalled || running {
            return Ok(FenceState::Pending);
        }
        self.reached.fetch_max(fence.0, Ordering::AcqRel);
        Ok(FenceState::Signalled)
    }

    /// Waits until `fence`, which has been submitted, is reached.
    pub(super) fn block(&self, fence: Fence) -> Result<(), DeviceError> {
        while self.poll(fence)? == FenceState::Pending {
            // What fails may leave the timeline or a handler where it is, so each wait has an end.
            self.is_signalled_within(LOOK, fence);
            let running = self.progress.running();
            if running.range(..=fence.0).next().is_some() {
                drop(self.progress.told.wait_timeout(running, LOOK));
            }
        }
        Ok(())
    }

    fn is_signalled_within(&self, time: Duration, fence: Fence) -> bool {
        let milliseconds = time.as_millis() as u64;
        self.timeline
            .waitUntilSignaledValue_timeoutMS(fence.0, milliseconds)
    }

    /// Waits until nothing that was submitted up to `fence` runs, the device being lost or not, and says whether that
    /// came to pass.
    pub(super) fn is_idle_after(&self, fence: Fence) -> bool {
        self.is_signalled_within(LAST_WAIT, fence)
    }

    pub(super) fn wait(&self, fence: Fence, patience: Patience) -> Result<FenceState, DeviceError> {
        match patience {
            Patience::Poll => self.poll(fence),
            Patience::Block => self.block(fence).map(|()| FenceState::Signalled),
        }
    }
}

/// The queue, and how far the timeline has been submitted.
pub(super) struct Queue {
    driver: Arc<Driver>,
    queue: Guarded<dyn MTL4CommandQueue>,
    resident: Guarded<dyn MTLResidencySet>,
    submitted: Fence,
}

impl fmt::Debug for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Queue").field(&self.submitted).finish()
    }
}

/// Changes of the mappings of one buffer to one heap, or to holes.
pub(super) struct Change<'a> {
    pub(super) buffer: &'a ProtocolObject<dyn MTLBuffer>,
    pub(super) heap: Option<&'a ProtocolObject<dyn MTLHeap>>,
    pub(super) operations: Vec<MTL4UpdateSparseBufferMappingOperation>,
}

impl Queue {
    /// The last point that anything was submitted for.
    pub(super) fn submitted(&self) -> Fence {
        self.submitted
    }

    /// Has `allocation` resident whenever the queue's commands run.
    pub(super) fn add_resident(&mut self, allocation: &ProtocolObject<dyn MTLAllocation>) {
        self.resident.0.addAllocation(allocation);
        self.resident.0.commit();
    }

    /// The opposite; no submission uses it any more (L1).
    pub(super) fn remove_resident(&mut self, allocation: &ProtocolObject<dyn MTLAllocation>) {
        self.resident.0.removeAllocation(allocation);
        self.resident.0.commit();
    }

    /// Queues changes of the device's page table, all at one point.
    pub(super) fn map(&mut self, changes: &mut [Change<'_>]) -> Result<Fence, DeviceError> {
        self.driver.check_alive()?;
        let next = self.wait_for_submitted();
        for change in changes {
            let Some(first) = change.operations.first_mut() else {
                continue;
            };
            // SAFETY: L1 for the buffer and the heap, which the caller holds; L2 by `&mut self`; L3; L4: the pointer
            // is to the first of as many operations as are counted.
            unsafe {
                self.queue.0.updateBufferMappings_heap_operations_count(
                    change.buffer,
                    change.heap,
                    NonNull::from(first),
                    change.operations.len(),
                );
            }
        }
        Ok(self.signal(next))
    }

    /// Queues recorded commands.
    pub(super) fn submit(
        &mut self,
        commands: &ProtocolObject<dyn MTL4CommandBuffer>,
    ) -> Result<Fence, DeviceError> {
        self.driver.check_alive()?;
        let next = self.wait_for_submitted();
        let progress = Arc::clone(&self.driver.progress);
        let point = next.0;
        let handler = RcBlock::new(
            move |feedback: NonNull<ProtocolObject<dyn MTL4CommitFeedback>>| {
                // SAFETY: L4: Metal passes an object that lives until the handler returns.
                let failed = unsafe { feedback.as_ref() }.error().is_some();
                progress.finish(point, failed);
            },
        );
        let options = MTL4CommitOptions::new();
        self.driver.progress.running().insert(point);
        let mut list = NonNull::from(commands);
        // SAFETY: L1 for what the commands name; L2; L4 for the block and for the list of one.
        unsafe {
            options.addFeedbackHandler(RcBlock::as_ptr(&handler));
            self.queue
                .0
                .commit_count_options(NonNull::from(&mut list), 1, &options);
        }
        Ok(self.signal(next))
    }

    /// Has what is queued next wait for all before it, and says which point it will be.
    fn wait_for_submitted(&self) -> Fence {
        let timeline: &ProtocolObject<dyn MTLEvent> =
            ProtocolObject::from_ref(&*self.driver.timeline);
        self.queue.0.waitForEvent_value(timeline, self.submitted.0);
        Fence(self.submitted.0 + 1)
    }

    /// Has the timeline reach `point` once all that is queued is done.
    fn signal(&mut self, point: Fence) -> Fence {
        let timeline: &ProtocolObject<dyn MTLEvent> =
            ProtocolObject::from_ref(&*self.driver.timeline);
        self.queue.0.signalEvent_value(timeline, point.0);
        self.submitted = point;
        point
    }
}

fn unavailable(reason: &str) -> DeviceError {
    DeviceError::Unavailable {
        device: NAME,
        reason: reason.to_owned(),
    }
}

/// A call that gave nothing; Metal does not say why.
pub(super) fn refused(call: &'static str) -> DeviceError {
    let (device, code) = (NAME, 0);
    DeviceError::Driver { device, call, code }
}

/// The same of memory.
pub(super) fn out_of_memory(call: &'static str, length: u64) -> DeviceError {
    let (code, length) = (0, ByteLength::new(length));
    DeviceError::OutOfMemory { call, code, length }
}
