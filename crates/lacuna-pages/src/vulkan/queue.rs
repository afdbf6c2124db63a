//! Work on mapped memory: copies between it and the host, and the kernels.

use std::sync::{Arc, MutexGuard};

use super::frames::{Frame, Window};
use super::kernels::Kernel;
use super::state::State;
use super::{NAME, Shared, invalid};
use crate::device::{Access, Address, DeviceError, Fence, FenceState, HostCopies, Patience};
use crate::gpu::words::{CHECKSUM_GROUPS, GROUP, Rows, STAGING_BYTES, WORD, later, words_of};
use crate::units::ByteLength;

/// Submits work on memory that a pool has mapped on the [`VulkanDevice`](super::VulkanDevice) it
/// came from. A handle: clones are the same queue, and any thread may use them.
///
/// All work, and every batch of the device, happens in the order in which it was submitted. Ranges
/// are checked against what is mapped at that moment: touching a hole, or writing to a sealed
/// page, is [`DeviceError::Invalid`] and nothing is submitted.
#[derive(Clone, Debug)]
pub struct VulkanQueue {
    pub(super) shared: Arc<Shared>,
}

impl VulkanQueue {
    /// Writes `data`, which is rows one after the other, to where `rows` has them, with a compute
    /// kernel, or by copies where kernels look pages up. Bytes between the rows stay as they are. Returns when the last
    /// submission is queued.
    ///
    /// # Errors
    /// [`DeviceError::Invalid`] for lengths that `rows` does not allow or when a byte from the first
    /// row to the last is not mapped or not writable, or as any submission.
    pub fn write_rows(&self, rows: Rows, data: &[u8]) -> Result<Fence, DeviceError> {
        let Rows {
            address,
            row,
            stride,
        } = rows;
        rows.check(NAME, data)?;
        let count = data.len() as u64 / row.get();
        self.lock()
            .check_mapped(address, rows.span(count), Access::ReadWrite)?;
        let fitting =
            (STAGING_BYTES as u64 / row.get()).min(self.lock().largest_window() / stride.get());
        let fitting = fitting.max(1);
        let mut fence = Fence::DONE;
        for (index, chunk) in data.chunks((fitting * row.get()) as usize).enumerate() {
            let count = chunk.len() as u64 / row.get();
            let at = later(address, index as u64 * fitting * stride.get());
            fence = self.dispatch_rows(
                Rows {
                    address: at,
                    ..rows
                },
                chunk,
                rows.span(count),
            )?;
        }
        Ok(fence)
    }

    fn dispatch_rows(
        &self,
        rows: Rows,
        data: &[u8],
        span: ByteLength,
    ) -> Result<Fence, DeviceError> {
        let mut state = self.lock();
        let windows = state.windows(rows.address, span, Access::ReadWrite)?;
        let copies = match windows[..] {
            [_] => Vec::new(),
            _ => places_of_rows(&state, rows, data.len() as u64)?,
        };
        let kernels = state.kernels()?;
        let mut frame = take_frame(&mut state)?;
        let source = stage(&mut frame, data)?;
        let mut recorder = frame.begin()?;
        match windows[..] {
            [window] => {
                let (window, first) = state.aligned(window);
                let words = data.len() as u64 / WORD;
                let (row, stride) = (rows.row.get() / WORD, rows.stride.get() / WORD);
                let parameters = [first, row, stride, words].map(|value| value as u32);
                let groups = words.div_ceil(GROUP.into()) as u32;
                let windows = [window, source];
                recorder.dispatch(&kernels, Kernel::WriteRows, windows, parameters, groups)?;
            }
            _ => recorder.copies(source.beside(&copies).zip(copies)),
        }
        let fence = recorder.submit(&mut state.queue)?;
        state.frames.put(frame);
        Ok(fence)
    }

    /// The checksum of `length` bytes from `address` on, with a compute kernel: see [`checksum`](super::checksum).
    /// Waits for everything submitted before.
    ///
    /// # Errors
    /// [`DeviceError::Invalid`] when the range is not mapped or not made of whole words of four
    /// bytes, or as any submission.
    pub fn checksum(&self, address: Address, length: ByteLength) -> Result<u32, DeviceError> {
        if !(address.offset | length.get()).is_multiple_of(WORD) {
            return Err(invalid("a checksum of part of a word"));
        }
        self.lock().check_mapped(address, length, Access::Read)?;
        let most = self.lock().largest_window();
        let (mut sum, mut start) = (0u32, 0);
        while start < length.get() {
            let part = most.min(length.get() - start);
            let (partial, summed) =
                self.checksum_part(later(address, start), part, start / WORD)?;
            sum = sum.wrapping_add(partial);
            start += summed;
        }
        Ok(sum)
    }

    /// The share in a checksum of what is in one piece of a part that begins with the word numbered `base`, and the bytes of
    /// that.
    fn checksum_part(
        &self,
        address: Address,
        length: u64,
        base: u64,
    ) -> Result<(u32, u64), DeviceError> {
        let mut state = self.lock();
        let windows = state.windows(address, ByteLength::new(length), Access::Read)?;
        let window = *windows.first().ok_or(invalid("a checksum of nothing"))?;
        let length = window.length;
        let kernels = state.kernels()?;
        let mut frame = take_frame(&mut state)?;
        let words = length / WORD;
        let groups = words.div_ceil(GROUP.into()).min(CHECKSUM_GROUPS) as u32;
        let mut partials = vec![0; groups as usize * WORD as usize];
        let target = Window {
            buffer: frame.staging(partials.len())?.name(),
            offset: 0,
            length: partials.len() as u64,
        };
        let (window, first) = state.aligned(window);
        let parameters = [first as u32, words as u32, base as u32, 0];
        let mut recorder = frame.begin()?;
        recorder.dispatch(
            &kernels,
            Kernel::Checksum,
            [window, target],
            parameters,
            groups,
        )?;
        let fence = recorder.submit(&mut state.queue)?;
        drop(state);
        self.collect(frame, fence, &mut partials)?;
        let sum = words_of(&partials).fold(0, u32::wrapping_add);
        Ok((sum, length))
    }

    /// Looks at a fence, or waits for it.
    ///
    /// # Errors
    /// [`DeviceError::Invalid`] for a fence that was never given out, [`DeviceError::Lost`] for one
    /// that will never be reached.
    pub fn wait(&self, fence: Fence, patience: Patience) -> Result<FenceState, DeviceError> {
        self.lock().check_fence(fence)?;
        // Not under the lock: others may submit meanwhile.
        self.shared.driver.wait(fence, patience)
    }

    /// Waits for `fence`, copies what a frame staged, and puts the frame back.
    fn collect(&self, mut frame: Frame, fence: Fence, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.shared.driver.block(fence)?;
        frame.staging(bytes.len())?.read(bytes);
        self.lock().frames.put(frame);
        Ok(())
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.shared.lock()
    }
}

/// Through staging buffers of 4 MiB at most. A write returns when its last part is queued.
impl HostCopies for VulkanQueue {
    fn write(&self, address: Address, bytes: &[u8]) -> Result<Fence, DeviceError> {
        let mut fence = Fence::DONE;
        if bytes.is_empty() {
            return Ok(fence);
        }
        let all = ByteLength::new(bytes.len() as u64);
        self.lock().check_mapped(address, all, Access::ReadWrite)?;
        for (index, chunk) in bytes.chunks(STAGING_BYTES).enumerate() {
            let mut state = self.lock();
            let at = later(address, (index * STAGING_BYTES) as u64);
            let length = ByteLength::new(chunk.len() as u64);
            let windows = state.windows(at, length, Access::ReadWrite)?;
            let mut frame = take_frame(&mut state)?;
            let source = stage(&mut frame, chunk)?;
            let mut recorder = frame.begin()?;
            recorder.copies(source.beside(&windows).zip(windows));
            fence = recorder.submit(&mut state.queue)?;
            state.frames.put(frame);
        }
        Ok(fence)
    }

    fn read(&self, address: Address, bytes: &mut [u8]) -> Result<(), DeviceError> {
        for (index, chunk) in bytes.chunks_mut(STAGING_BYTES).enumerate() {
            let mut state = self.lock();
            let at = later(address, (index * STAGING_BYTES) as u64);
            let windows = state.windows(at, ByteLength::new(chunk.len() as u64), Access::Read)?;
            let mut frame = take_frame(&mut state)?;
            let target = Window {
                buffer: frame.staging(chunk.len())?.name(),
                offset: 0,
                length: chunk.len() as u64,
            };
            let mut recorder = frame.begin()?;
            let parts = target.beside(&windows);
            recorder.copies(windows.into_iter().zip(parts));
            let fence = recorder.submit(&mut state.queue)?;
            drop(state);
            self.collect(frame, fence, chunk)?;
        }
        Ok(())
    }
}

pub(super) fn take_frame(state: &mut State) -> Result<Frame, DeviceError> {
    let driver = Arc::clone(&state.driver);
    state.frames.take(&driver)
}

/// Host-visible memory of a frame with `bytes` in it.
fn stage(frame: &mut Frame, bytes: &[u8]) -> Result<Window, DeviceError> {
    let staging = frame.staging(bytes.len())?;
    staging.fill(bytes);
    Ok(Window {
        buffer: staging.name(),
        offset: 0,
        length: bytes.len() as u64,
    })
}

/// Where each row's bytes go, piece by piece, of `bytes` bytes of rows in mapped memory.
fn places_of_rows(state: &State, rows: Rows, bytes: u64) -> Result<Vec<Window>, DeviceError> {
    let mut places = Vec::new();
    for row in 0..bytes / rows.row.get() {
        let at = later(rows.address, row * rows.stride.get());
        places.extend(state.windows(at, rows.row, Access::ReadWrite)?);
    }
    Ok(places)
}

impl State {
    /// The most bytes that a kernel can see of a buffer wherever they begin, in whole words.
    fn largest_window(&self) -> u64 {
        let limits = &self.driver.limits;
        limits.window.saturating_sub(limits.window_alignment) / WORD * WORD
    }

    /// `window`, begun early enough to be aligned as descriptors must be, and the number of words
    /// to skip in it.
    fn aligned(&self, window: Window) -> (Window, u64) {
        let skip = window.offset % self.driver.limits.window_alignment;
        let window = Window {
            offset: window.offset - skip,
            length: window.length + skip,
            ..window
        };
        (window, skip / WORD)
    }
}
