//! Work on mapped memory: copies between it and the host, and the kernels.

use std::sync::{Arc, MutexGuard};

use objc2::rc::autoreleasepool;

use super::frames::{Frame, Window};
use super::kernels::Kernel;
use super::state::State;
use super::{NAME, Shared, invalid};
use crate::device::{Access, Address, DeviceError, Fence, FenceState, HostCopies, Patience};
use crate::gpu::words::{CHECKSUM_GROUPS, GROUP, Rows, STAGING_BYTES, WORD, later, words_of};
use crate::units::ByteLength;

/// The most bytes that a kernel works on at once: it counts words in 32 bits.
const MOST: u64 = 1 << 30;

/// Submits work on memory that a pool has mapped on the [`MetalDevice`](super::MetalDevice) it
/// came from. A handle: clones are the same queue, and any thread may use them.
///
/// All work, and every batch of the device, happens in the order in which it was submitted. Ranges
/// are checked against what is mapped at that moment: touching a hole, or writing to a sealed
/// page, is [`DeviceError::Invalid`] and nothing is submitted.
#[derive(Clone, Debug)]
pub struct MetalQueue {
    pub(super) shared: Arc<Shared>,
}

impl MetalQueue {
    /// Writes `data`, which is rows one after the other, to where `rows` has them, with a compute
    /// kernel. Bytes between the rows stay as they are. Returns when the last dispatch is queued.
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
            .window(address, rows.span(count), Access::ReadWrite)?;
        let fitting = (STAGING_BYTES as u64 / row.get()).min(MOST / stride.get());
        let fitting = fitting.max(1);
        let mut fence = Fence::DONE;
        for (index, chunk) in data.chunks((fitting * row.get()) as usize).enumerate() {
            let at = later(address, index as u64 * fitting * stride.get());
            let part = Rows {
                address: at,
                ..rows
            };
            fence = autoreleasepool(|_| self.dispatch_rows(part, chunk))?;
        }
        Ok(fence)
    }

    fn dispatch_rows(&self, rows: Rows, data: &[u8]) -> Result<Fence, DeviceError> {
        let mut state = self.lock();
        let span = rows.span(data.len() as u64 / rows.row.get());
        let target = state.window(rows.address, span, Access::ReadWrite)?;
        let kernels = state.kernels()?;
        let (mut frame, source) = staged(&mut state, data.len(), data)?;
        let words = data.len() as u64 / WORD;
        let constants = [0, rows.row.get() / WORD, rows.stride.get() / WORD, words];
        let constants = constants.map(|value| value as u32);
        let groups = words.div_ceil(GROUP.into()) as u32;
        let mut recorder = frame.begin()?;
        recorder.dispatch(
            &kernels,
            Kernel::WriteRows,
            [&target, &source],
            constants,
            groups,
        );
        let fence = recorder.submit(&mut state.queue)?;
        state.frames.put(frame);
        Ok(fence)
    }

    /// The checksum of `length` bytes from `address` on, with a compute kernel: see
    /// [`checksum`](super::checksum). Waits for everything submitted before.
    ///
    /// # Errors
    /// [`DeviceError::Invalid`] when the range is not mapped or not made of whole words of four
    /// bytes, or as any submission.
    pub fn checksum(&self, address: Address, length: ByteLength) -> Result<u32, DeviceError> {
        if !(address.offset | length.get()).is_multiple_of(WORD) {
            return Err(invalid("a checksum of part of a word"));
        }
        self.lock().window(address, length, Access::Read)?;
        let mut sum = 0u32;
        for start in (0..length.get()).step_by(MOST as usize) {
            let part = MOST.min(length.get() - start);
            let partial =
                autoreleasepool(|_| self.checksum_part(later(address, start), part, start / WORD))?;
            sum = sum.wrapping_add(partial);
        }
        Ok(sum)
    }

    /// The share in a checksum of a part that begins with the word numbered `base`.
    fn checksum_part(&self, address: Address, length: u64, base: u64) -> Result<u32, DeviceError> {
        let mut state = self.lock();
        let source = state.window(address, ByteLength::new(length), Access::Read)?;
        let kernels = state.kernels()?;
        let words = length / WORD;
        let groups = words.div_ceil(GROUP.into()).min(CHECKSUM_GROUPS) as u32;
        let mut partials = vec![0; groups as usize * WORD as usize];
        let (mut frame, target) = staged(&mut state, partials.len(), &[])?;
        let constants = [0, words as u32, base as u32, 0];
        let mut recorder = frame.begin()?;
        recorder.dispatch(
            &kernels,
            Kernel::Checksum,
            [&source, &target],
            constants,
            groups,
        );
        let fence = recorder.submit(&mut state.queue)?;
        drop(state);
        self.collect(frame, fence, 0, &mut partials)?;
        Ok(words_of(&partials).fold(0, u32::wrapping_add))
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

    /// Copies one piece to `bytes`, through words that begin before them and end after.
    fn read_piece(&self, address: Address, bytes: &mut [u8]) -> Result<(), DeviceError> {
        let mut state = self.lock();
        let length = ByteLength::new(bytes.len() as u64);
        state.window(address, length, Access::Read)?;
        let (words, length, skip) = whole_words(address, bytes.len());
        let source = state.window(words, ByteLength::new(length as u64), Access::Read)?;
        let (mut frame, target) = staged(&mut state, length, &[])?;
        let mut recorder = frame.begin()?;
        recorder.copy(&source, &target);
        let fence = recorder.submit(&mut state.queue)?;
        drop(state);
        self.collect(frame, fence, skip, bytes)
    }

    /// Copies one piece from `bytes`, which are whole words.
    fn write_piece(&self, address: Address, bytes: &[u8]) -> Result<Fence, DeviceError> {
        let mut state = self.lock();
        let length = ByteLength::new(bytes.len() as u64);
        let target = state.window(address, length, Access::ReadWrite)?;
        let (mut frame, source) = staged(&mut state, bytes.len(), bytes)?;
        let mut recorder = frame.begin()?;
        recorder.copy(&source, &target);
        let fence = recorder.submit(&mut state.queue)?;
        state.frames.put(frame);
        Ok(fence)
    }

    /// Waits for `fence`, copies what a frame staged from `start` on, and puts the frame back.
    fn collect(
        &self,
        frame: Frame,
        fence: Fence,
        start: usize,
        bytes: &mut [u8],
    ) -> Result<(), DeviceError> {
        let done = self.shared.driver.block(fence);
        if done.is_ok() {
            frame.read_staged(start, bytes);
        }
        // L1: where the device is lost, the frame may be in use still.
        self.lock().frames.put(frame);
        done
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.shared.lock()
    }
}

/// Through staging buffers of 4 MiB at most. A write returns when its last part is queued.
impl HostCopies for MetalQueue {
    fn write(&self, address: Address, bytes: &[u8]) -> Result<Fence, DeviceError> {
        let mut fence = Fence::DONE;
        if bytes.is_empty() {
            return Ok(fence);
        }
        let all = ByteLength::new(bytes.len() as u64);
        self.lock().window(address, all, Access::ReadWrite)?;
        let (words, length, skip) = whole_words(address, bytes.len());
        let mut padded = Vec::new();
        let mut source = bytes;
        if length != bytes.len() {
            // Parts of words are read first, and written back around what is new. Whoever writes holds the buffer
            // exclusively, so nobody else writes to these words meanwhile.
            padded.resize(length, 0);
            let (first, last) = (WORD as usize, length - WORD as usize);
            self.read(words, &mut padded[..first])?;
            self.read(later(words, last as u64), &mut padded[last..])?;
            padded[skip..skip + bytes.len()].copy_from_slice(bytes);
            source = &padded;
        }
        for (index, chunk) in source.chunks(STAGING_BYTES).enumerate() {
            let at = later(words, (index * STAGING_BYTES) as u64);
            fence = autoreleasepool(|_| self.write_piece(at, chunk))?;
        }
        Ok(fence)
    }

    fn read(&self, address: Address, bytes: &mut [u8]) -> Result<(), DeviceError> {
        for (index, chunk) in bytes.chunks_mut(STAGING_BYTES).enumerate() {
            let at = later(address, (index * STAGING_BYTES) as u64);
            autoreleasepool(|_| self.read_piece(at, chunk))?;
        }
        Ok(())
    }
}

/// An idle frame with `bytes` staged in it, and `length` bytes of that.
fn staged(state: &mut State, length: usize, bytes: &[u8]) -> Result<(Frame, Window), DeviceError> {
    let mut frame = state.frame()?;
    let staging = frame.staging(&mut state.queue, length)?;
    staging.fill(0, bytes);
    let window = Window {
        buffer: staging.buffer.0.clone(),
        offset: 0,
        length: length as u64,
    };
    Ok((frame, window))
}

/// The whole words that `length` bytes from `address` on lie in, how many bytes these are, and how many come
/// before. They are mapped where the bytes are, and end where the reservation does at the latest: a page is
/// whole words.
fn whole_words(address: Address, length: usize) -> (Address, usize, usize) {
    let skip = address.offset % WORD;
    let start = Address {
        offset: address.offset - skip,
        ..address
    };
    let length = (skip as usize + length).next_multiple_of(WORD as usize);
    (start, length, skip as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::SpaceId;

    #[test]
    fn bytes_lie_in_the_words_from_the_one_of_the_first_to_the_one_of_the_last() {
        for (offset, length, start, words, skip) in [
            (0, 4, 0, 4, 0),
            (5, 1, 4, 4, 1),
            (3, 2, 0, 8, 3),
            (8, 5, 8, 8, 0),
            (7, 1, 4, 4, 3),
        ] {
            let space = SpaceId(0);
            let found = whole_words(Address { space, offset }, length);
            let offset = start;
            assert_eq!(found, (Address { space, offset }, words, skip));
        }
    }
}
