//! Reads by the kernel's own queue (io_uring): no thread waits, and many begin with one call.
//!
//! # Safety
//!
//! * **U1** The kernel writes to a buffer from the moment its read is in the queue until its completion is
//!   taken out. All that time the buffer is in `under_way`, which nothing else gives out.
//! * **U2** The file of a read is open as long, because [`Read`] has it.
//! * **U3** A queue that is dropped waits for all of it first. What cannot be waited for is leaked.

#![expect(
    unsafe_code,
    reason = "the kernel writes to memory while the call that asked for it has returned"
)]

use std::collections::HashMap;
use std::io;
use std::os::fd::AsRawFd;

use io_uring::{IoUring, opcode, types};

use super::device::{Done, Read, ReadDevice};

/// Reads that the disk has at once, whatever their size. Measured: from four of 1 MiB on a disk gives no more, and some
/// give less beyond sixteen; eight let one that is late be late.
const LARGE: usize = 8;

/// Reads that it has at once as long as they are small together.
const SMALL: usize = 64;
const SMALL_BYTES: usize = 1 << 20;

/// The kernel's queue.
pub struct ReadQueue {
    ring: IoUring,
    under_way: HashMap<u64, Read>,
}

impl ReadQueue {
    /// Sets it up.
    ///
    /// # Errors
    /// Where the kernel has none, or the process may not (seccomp, `kernel.io_uring_disabled`).
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            ring: IoUring::new(SMALL as u32)?,
            under_way: HashMap::new(),
        })
    }

    /// Hands over what is queued, and waits for so many completions.
    fn enter(&mut self, wait_for: usize) -> io::Result<()> {
        loop {
            match self.ring.submit_and_wait(wait_for) {
                Ok(_) => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // The kernel is short of memory for requests, or completions are to be taken out first.
                Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY)) => {
                    if !self.ring.completion().is_empty() {
                        return Ok(());
                    }
                    std::thread::yield_now();
                }
                Err(error) => return Err(error),
            }
        }
    }
}

impl std::fmt::Debug for ReadQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ReadQueue")
            .field("under_way", &self.under_way.len())
            .finish_non_exhaustive()
    }
}

impl ReadDevice for ReadQueue {
    fn name(&self) -> &'static str {
        "io_uring"
    }

    fn takes(&self, calls: usize, bytes: usize) -> bool {
        calls < LARGE || (calls < SMALL && bytes <= SMALL_BYTES)
    }

    fn begin(&mut self, read: Read) {
        let file = types::Fd(read.file.file().as_raw_fd());
        let length = u32::try_from(read.buffer.len()).unwrap_or(u32::MAX);
        let entry = opcode::Read::new(file, read.buffer.address(), length)
            .offset(read.offset)
            .build()
            .user_data(read.number);
        self.under_way.insert(read.number, read);
        // SAFETY: (U1) and (U2): memory and file are in `under_way` until the completion is taken out.
        let queued = unsafe { self.ring.submission().push(&entry) };
        debug_assert!(queued.is_ok(), "there is room for all that it takes");
    }

    fn submit(&mut self) {
        // An error is found again where completions are waited for.
        self.enter(0).ok();
    }

    fn finish(&mut self, wait: bool) -> io::Result<Option<Done>> {
        loop {
            if let Some(completion) = self.ring.completion().next() {
                let Some(read) = self.under_way.remove(&completion.user_data()) else {
                    continue;
                };
                let result = match usize::try_from(completion.result()) {
                    Ok(bytes) => Ok(bytes),
                    Err(_) => Err(io::Error::from_raw_os_error(-completion.result())),
                };
                return Ok(Some(Done { read, result }));
            }
            if !wait || self.under_way.is_empty() {
                return Ok(None);
            }
            if let Err(error) = self.enter(1) {
                self.leak();
                return Err(error);
            }
        }
    }
}

impl ReadQueue {
    /// Gives up what the kernel may still write to: it is never used again.
    fn leak(&mut self) {
        self.under_way
            .drain()
            .for_each(|(_, read)| std::mem::forget(read));
    }
}

impl Drop for ReadQueue {
    fn drop(&mut self) {
        // (U3): an error has leaked what is left.
        while let Ok(Some(_)) = self.finish(true) {}
    }
}
