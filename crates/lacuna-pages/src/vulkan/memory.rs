//! Memory of the device that is neither a reservation nor a heap: weights and activations, in one
//! piece each, filled by copies.

use std::fmt;
use std::sync::Arc;

use super::frames::Window;
use super::objects::{Buffer, Memory};
use super::queue::{VulkanQueue, take_frame};
use super::{Shared, invalid};
use crate::device::{DeviceError, Fence};
use crate::gpu::words::STAGING_BYTES;
use crate::units::ByteLength;

/// A piece of device memory. Dropping it waits until nothing that was submitted uses it any more.
pub struct DeviceMemory {
    pub(super) shared: Arc<Shared>,
    length: u64,
    /// Before the memory, so that it goes first.
    buffer: Option<Buffer>,
    memory: Option<Memory>,
}

/// How much of a device's memory is taken: heaps of its pools, and pieces of [`DeviceMemory`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryUse {
    /// What there is.
    pub total: ByteLength,
    /// What is taken of it.
    pub allocated: ByteLength,
}

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("DeviceMemory").field(&self.length).finish()
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        self.shared.finish_submitted();
        self.buffer = None;
        self.memory = None;
        self.shared.lock().give_memory(self.length);
    }
}

impl Shared {
    /// Waits until everything submitted so far is done, or the device is lost, after which nothing is.
    pub(super) fn finish_submitted(&self) {
        let submitted = self.lock().queue.submitted();
        // Not under the lock: others may submit meanwhile.
        let _ = self.driver.block(submitted);
    }
}

impl VulkanQueue {
    /// A piece of `length` bytes, counted in [`VulkanQueue::memory_use`]. What it holds at first is
    /// whatever was there.
    ///
    /// # Errors
    /// [`DeviceError::Limit`] when the device has not so much left or makes no buffers so long, or
    /// what the driver refuses.
    pub fn memory(&self, length: ByteLength) -> Result<DeviceMemory, DeviceError> {
        if length == ByteLength::ZERO {
            return Err(invalid("a piece of no bytes"));
        }
        let (buffer, memory, size) = self.lock().piece(length.get())?;
        Ok(DeviceMemory {
            shared: Arc::clone(&self.shared),
            length: size,
            buffer: Some(buffer),
            memory: Some(memory),
        })
    }

    /// How much of the device's memory could still be taken now: of a card that others use too, what these leave, where its
    /// driver tells.
    pub fn memory_left(&self) -> ByteLength {
        ByteLength::new(self.lock().memory_left())
    }

    /// How much of the device's memory is taken.
    pub fn memory_use(&self) -> MemoryUse {
        let state = self.lock();
        MemoryUse {
            total: ByteLength::new(state.memory()),
            allocated: ByteLength::new(state.allocated()),
        }
    }
}

impl DeviceMemory {
    /// Bytes of it.
    pub fn length(&self) -> ByteLength {
        ByteLength::new(self.length)
    }

    /// Copies `bytes` to the bytes from `start` on, through staging buffers of 4 MiB at most, after
    /// everything submitted before and before everything submitted after. The point returned is when
    /// it is done.
    ///
    /// # Errors
    /// [`DeviceError::Invalid`] for bytes beyond the end, or that are not whole words of four bytes,
    /// or as any submission.
    pub fn write(&self, start: u64, bytes: &[u8]) -> Result<Fence, DeviceError> {
        let mut fence = Fence::DONE;
        for (index, chunk) in bytes.chunks(STAGING_BYTES).enumerate() {
            let at = start.saturating_add((index * STAGING_BYTES) as u64);
            let target = self.window(at, chunk.len() as u64)?;
            let mut state = self.shared.lock();
            let mut frame = take_frame(&mut state)?;
            let staging = frame.staging(chunk.len())?;
            staging.fill(chunk);
            let source = Window {
                buffer: staging.name(),
                offset: 0,
                length: chunk.len() as u64,
            };
            let mut recorder = frame.begin()?;
            recorder.copy(source, target);
            fence = recorder.submit(&mut state.queue)?;
            state.frames.put(frame);
        }
        Ok(fence)
    }

    /// A part of it.
    pub(super) fn window(&self, offset: u64, length: u64) -> Result<Window, DeviceError> {
        let end = offset.checked_add(length);
        let within = end.is_some_and(|end| end <= self.length) && length > 0;
        match &self.buffer {
            Some(buffer) if within && (offset | length).is_multiple_of(4) => Ok(Window {
                buffer: buffer.name(),
                offset,
                length,
            }),
            _ => Err(invalid(
                "a part of memory that is none, or of part of a word",
            )),
        }
    }
}
