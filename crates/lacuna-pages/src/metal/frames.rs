#![expect(unsafe_code, reason = "Metal is a foreign interface")]

//! Recording commands. A frame is what one submission needs: a command buffer, memory for it, an argument
//! table and memory that the host sees; it is used again once the timeline has passed its last use.
//!
//! # Safety
//!
//! L1 to L4 of [`driver`](super::driver), and:
//!
//! * **F1** A frame is handed out only when the point of its last submission is reached, so that
//!   neither its commands, its arguments nor its staging memory are in use.
//! * **F2** Commands name only buffers that are retired, not dropped, after they were submitted,
//!   and only ranges within them that are mapped: the caller checked them under the same lock.
//! * **F3** The text of the kernels is what naga made of the sources: two buffers, sixteen bytes of constants at
//!   most, and the lengths of the buffers, which are the four slots of an argument table.

use std::fmt;
use std::sync::Arc;

use objc2::rc::Retained;
use objc2::runtime::ProtocolObject;
use objc2_foundation::NSRange;
use objc2_metal::{
    MTL4ArgumentTable, MTL4ArgumentTableDescriptor, MTL4CommandAllocator, MTL4CommandBuffer,
    MTL4CommandEncoder, MTL4ComputeCommandEncoder, MTL4VisibilityOptions, MTLBuffer, MTLDevice,
    MTLSize, MTLStages,
};

use super::driver::{Driver, Guarded, Queue, refused};
use super::kernels::{Kernel, Kernels};
use super::objects::Staging;
use crate::device::{DeviceError, Fence, FenceState};
use crate::gpu::words::GROUP;

/// How many frames may be in flight before a new one waits for the oldest.
const FRAMES: usize = 8;

/// The bytes of a kernel's constants, with the lengths of its windows behind them.
const CONSTANTS: usize = 16 + 2 * 4;

/// Where those lengths are.
const LENGTHS: u64 = 16;

/// A range of a buffer, in bytes.
#[derive(Clone)]
pub(super) struct Window {
    pub(super) buffer: Retained<ProtocolObject<dyn MTLBuffer>>,
    pub(super) offset: u64,
    pub(super) length: u64,
}

/// What one submission needs.
pub(super) struct Frame {
    driver: Arc<Driver>,
    allocator: Guarded<dyn MTL4CommandAllocator>,
    commands: Guarded<dyn MTL4CommandBuffer>,
    arguments: Guarded<dyn MTL4ArgumentTable>,
    constants: Staging,
    staging: Option<Staging>,
    busy: Fence,
}

impl fmt::Debug for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Frame").field(&self.busy).finish()
    }
}

impl Frame {
    fn new(driver: &Arc<Driver>, queue: &mut Queue) -> Result<Self, DeviceError> {
        let device = &driver.device;
        let descriptor = MTL4ArgumentTableDescriptor::new();
        descriptor.setMaxBufferBindCount(4);
        let arguments = device
            .newArgumentTableWithDescriptor_error(&descriptor)
            .map_err(|_| refused("newArgumentTableWithDescriptor:error:"))?;
        let frame = Self {
            driver: Arc::clone(driver),
            allocator: Guarded(
                device
                    .newCommandAllocator()
                    .ok_or(refused("newCommandAllocator"))?,
            ),
            commands: Guarded(
                device
                    .newCommandBuffer()
                    .ok_or(refused("newCommandBuffer"))?,
            ),
            arguments: Guarded(arguments),
            constants: Staging::new(device, CONSTANTS)?,
            staging: None,
            busy: Fence::DONE,
        };
        queue.add_resident(frame.constants.allocation());
        Ok(frame)
    }

    /// Memory of at least `length` bytes that host and device see.
    pub(super) fn staging(
        &mut self,
        queue: &mut Queue,
        length: usize,
    ) -> Result<&mut Staging, DeviceError> {
        let staging = match self.staging.take() {
            Some(staging) if staging.length() >= length => staging,
            short => {
                let staging =
                    Staging::new(&self.driver.device, length.next_power_of_two().max(4096))?;
                queue.add_resident(staging.allocation());
                if let Some(short) = short {
                    // F1: no submission uses it.
                    queue.remove_resident(short.allocation());
                }
                staging
            }
        };
        Ok(self.staging.insert(staging))
    }

    /// Copies what was staged from `start` on to `bytes`; the frame's submission is done (F1).
    pub(super) fn read_staged(&self, start: usize, bytes: &mut [u8]) {
        if let Some(staging) = &self.staging {
            staging.read(start, bytes);
        }
    }

    /// Starts recording; what was recorded before is gone. What is recorded sees the memory that everything
    /// submitted before has left, through whichever mapping.
    pub(super) fn begin(&mut self) -> Result<Recorder<'_>, DeviceError> {
        // F1: all commands that came from the allocator are done.
        self.allocator.0.reset();
        self.commands
            .0
            .beginCommandBufferWithAllocator(&self.allocator.0);
        let Some(encoder) = self.commands.0.computeCommandEncoder() else {
            self.commands.0.endCommandBuffer();
            return Err(refused("computeCommandEncoder"));
        };
        encoder.barrierAfterQueueStages_beforeStages_visibilityOptions(
            COMMANDS | MTLStages::ResourceState,
            COMMANDS,
            VISIBLE,
        );
        Ok(Recorder {
            frame: self,
            encoder,
        })
    }
}

/// What commands here are: kernels, copies and filling.
const COMMANDS: MTLStages = MTLStages(MTLStages::Dispatch.0 | MTLStages::Blit.0);

/// Also through other mappings of the same memory, since pages may be mapped in several buffers at once.
const VISIBLE: MTL4VisibilityOptions =
    MTL4VisibilityOptions(MTL4VisibilityOptions::Device.0 | MTL4VisibilityOptions::ResourceAlias.0);

/// A frame being recorded, which ends by [`Recorder::submit`]. Its commands take effect in order: each is
/// separated from the next by a barrier over all memory.
pub(super) struct Recorder<'a> {
    frame: &'a mut Frame,
    encoder: Retained<ProtocolObject<dyn MTL4ComputeCommandEncoder>>,
}

impl Recorder<'_> {
    /// Whole words of four bytes, which is what macOS copies.
    pub(super) fn copy(&mut self, from: &Window, to: &Window) {
        // SAFETY: F2 and L3.
        unsafe {
            self.encoder
                .copyFromBuffer_sourceOffset_toBuffer_destinationOffset_size(
                    &from.buffer,
                    from.offset as usize,
                    &to.buffer,
                    to.offset as usize,
                    from.length as usize,
                );
        }
        self.barrier();
    }

    pub(super) fn zero(&mut self, window: &Window) {
        let range = NSRange::new(window.offset as usize, window.length as usize);
        // SAFETY: F2 and L3.
        unsafe {
            self.encoder
                .fillBuffer_range_value(&window.buffer, range, 0);
        }
        self.barrier();
    }

    /// Runs `groups` workgroups of a kernel on two windows, once in a submission: there is one set of constants.
    pub(super) fn dispatch(
        &mut self,
        kernels: &Kernels,
        kernel: Kernel,
        windows: [&Window; 2],
        constants: [u32; 4],
        groups: u32,
    ) {
        // Kernels look at no lengths, but what naga writes for arrays of any length names them.
        let lengths = windows.map(|window| u32::try_from(window.length).unwrap_or(u32::MAX));
        let numbers = constants.into_iter().chain(lengths);
        let bytes: Vec<u8> = numbers.flat_map(u32::to_le_bytes).collect();
        self.frame.constants.fill(0, &bytes);
        let arguments = &self.frame.arguments.0;
        let [first, second] = windows.map(|window| window.buffer.gpuAddress() + window.offset);
        let constants = self.frame.constants.buffer.0.gpuAddress();
        let addresses = [first, second, constants, constants + LENGTHS];
        for (slot, address) in addresses.into_iter().enumerate() {
            // SAFETY: F1 for the table, which has four slots; F2 and L3 for the windows.
            unsafe { arguments.setAddress_atIndex(address, slot) };
        }
        let size = |width: u32| MTLSize {
            width: width as usize,
            height: 1,
            depth: 1,
        };
        self.encoder.setArgumentTable(Some(arguments));
        self.encoder
            .setComputePipelineState(kernels.pipeline(kernel));
        let shared = kernel.shared_bytes();
        if shared > 0 {
            // SAFETY: F3: it is the one piece of shared memory that the kernel has.
            unsafe { self.encoder.setThreadgroupMemoryLength_atIndex(shared, 0) };
        }
        // F3: the kernels touch only the words that their constants name.
        self.encoder
            .dispatchThreadgroups_threadsPerThreadgroup(size(groups), size(GROUP));
        self.barrier();
    }

    fn barrier(&mut self) {
        self.encoder
            .barrierAfterEncoderStages_beforeEncoderStages_visibilityOptions(
                COMMANDS, COMMANDS, VISIBLE,
            );
    }

    /// Ends recording and queues what was recorded.
    pub(super) fn submit(self, queue: &mut Queue) -> Result<Fence, DeviceError> {
        self.encoder.endEncoding();
        let frame = self.frame;
        frame.commands.0.endCommandBuffer();
        frame.busy = queue.submit(&frame.commands.0)?;
        Ok(frame.busy)
    }
}

/// The frames of a device that nobody holds.
#[derive(Debug, Default)]
pub(super) struct Frames {
    frames: Vec<Frame>,
}

impl Frames {
    /// An idle frame (F1): one whose work is done, a new one, or the oldest after waiting for it.
    pub(super) fn take(
        &mut self,
        driver: &Arc<Driver>,
        queue: &mut Queue,
    ) -> Result<Frame, DeviceError> {
        let oldest = (0..self.frames.len()).min_by_key(|&index| self.frames[index].busy);
        let Some(oldest) = oldest else {
            return Frame::new(driver, queue);
        };
        let fence = self.frames[oldest].busy;
        if driver.poll(fence)? == FenceState::Pending {
            if self.frames.len() < FRAMES {
                return Frame::new(driver, queue);
            }
            driver.block(fence)?;
        }
        Ok(self.frames.swap_remove(oldest))
    }

    /// Takes a frame back, in use or not.
    pub(super) fn put(&mut self, frame: Frame) {
        self.frames.push(frame);
    }
}
