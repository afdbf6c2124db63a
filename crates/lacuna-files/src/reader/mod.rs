//! Reading parts of files into memory of our own, past the page cache where that is possible.
//!
//! A [`FileReader`] takes an [`Extent`] and a [`Buffer`] and gives back [`Loaded`] bytes, or an error that
//! says where. In between it cuts extents into calls that its [`ReadDevice`] carries out, some at a time: the
//! kernel's queue ([`ReadQueue`]) where there is one, else threads ([`ReadThreads`]). Calls that
//! return less than was asked for are gone on with. A buffer belongs to the reader from [`FileReader::begin`]
//! until its extent is finished, so nobody sees it half filled.
//!
//! Costs: two system calls for each megabyte, or for some dozens of small extents that are queued together, and no copy.

mod device;
pub mod faults;
mod file;
mod memory;
#[cfg(test)]
mod tests;
mod threads;
#[cfg(target_os = "linux")]
mod uring;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::ops::{Deref, Range};
use std::path::PathBuf;

pub use device::{Done, Read, ReadDevice};
pub use file::{Caching, Extent, Method, ReadFile};
use memory::ALIGNMENT;
pub use memory::{Buffer, Ring};
pub use threads::ReadThreads;
#[cfg(target_os = "linux")]
pub use uring::ReadQueue;

/// Bytes of one call. Measured on a virtual disk: a MiB at a time costs 0.02 s of processor for a GB, 4 KiB eighty
/// times that, and larger calls are no faster.
const CALL_BYTES: usize = 1 << 20;

/// How often a call may bring nothing for a reason that may pass (interrupted, no resources for now) before
/// that is an error.
const ATTEMPTS: usize = 16;

/// Calls under way from which on no more are handed over, though the device would take them: so small ones go by the
/// dozen with one system call, and there are always enough to keep a disk busy. Measured: 4 KiB at a time come at 580 MB/s
/// with 16 under way and at 680 with 64.
const ENOUGH_UNDER_WAY: usize = 32;

/// Bytes of a file that could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {bytes} bytes at {offset} cannot be read: {why}", path.display())]
pub struct ReadError {
    /// The file.
    pub path: PathBuf,
    /// The first byte that was not read.
    pub offset: u64,
    /// How many were needed from there on.
    pub bytes: u64,
    /// Why.
    pub why: ReadFailure,
}

/// Why bytes of a file could not be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReadFailure {
    /// The file ends before them.
    #[error("the file has become shorter; put it back whole and start again")]
    Shorter,
    /// The system says so.
    #[error("{message}; check the disk, and copy or download the file again")]
    Failed {
        /// The kind of error.
        kind: io::ErrorKind,
        /// What the system said.
        message: String,
    },
}

impl From<&io::Error> for ReadFailure {
    fn from(error: &io::Error) -> Self {
        Self::Failed {
            kind: error.kind(),
            message: error.to_string(),
        }
    }
}

/// Bytes that have been read.
#[derive(Debug)]
pub struct Loaded {
    buffer: Buffer,
    range: Range<usize>,
}

impl Deref for Loaded {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.buffer[self.range.clone()]
    }
}

impl Loaded {
    /// The buffer that was lent, to be read into again.
    #[must_use]
    pub fn into_buffer(self) -> Buffer {
        self.buffer
    }
}

/// An extent that is done with.
#[derive(Debug)]
pub struct Finished {
    /// What the caller called it.
    pub number: u64,
    /// Its bytes.
    pub result: Result<Loaded, ReadError>,
}

/// Reads extents of files, many at once.
#[derive(Debug)]
pub struct FileReader {
    device: Box<dyn ReadDevice>,
    /// Extents that are not done, by number.
    extents: HashMap<u64, Pending>,
    /// Those of them of which no call is left, in the order in which that came about.
    whole: VecDeque<u64>,
    /// Calls that have not begun, in the order in which their extents were asked for.
    waiting: VecDeque<Call>,
    /// Calls that the device has.
    under_way: Vec<Call>,
    /// Bytes of these.
    bytes_under_way: usize,
    calls: u64,
}

/// An extent that is not done.
#[derive(Debug)]
struct Pending {
    number: u64,
    extent: Extent,
    /// Parts of its buffer that nothing is read to any more.
    parts: Vec<(usize, Buffer)>,
    /// Calls that are not done.
    calls: usize,
    error: Option<ReadError>,
}

/// A part of an extent to be read with one call. Its buffer is with the device while it is under way.
#[derive(Debug)]
struct Call {
    number: u64,
    /// The extent's.
    of: u64,
    /// Where in the extent's buffer it begins.
    at: usize,
    buffer: Option<Buffer>,
    attempts: usize,
}

impl FileReader {
    /// A reader with the best device there is: the kernel's queue where it exists and all of `files` are read past
    /// the page cache (through it, threads do as well), else threads.
    ///
    /// # Errors
    /// When the system refuses threads too.
    pub fn new<'a>(files: impl IntoIterator<Item = &'a ReadFile>) -> io::Result<Self> {
        #[cfg(target_os = "linux")]
        if files
            .into_iter()
            .all(|file| file.method() == Method::Direct)
            && let Ok(queue) = ReadQueue::new()
        {
            return Ok(Self::with(Box::new(queue)));
        }
        #[cfg(not(target_os = "linux"))]
        let _ = files;
        Ok(Self::with(Box::new(ReadThreads::new()?)))
    }

    /// A reader with a device.
    #[must_use]
    pub fn with(device: Box<dyn ReadDevice>) -> Self {
        Self {
            device,
            extents: HashMap::new(),
            whole: VecDeque::new(),
            waiting: VecDeque::new(),
            under_way: Vec::new(),
            bytes_under_way: 0,
            calls: 0,
        }
    }

    /// What its device is called.
    #[must_use]
    pub fn device(&self) -> &'static str {
        self.device.name()
    }

    /// Begins to read `extent`, into a buffer of [`Extent::buffer_bytes`] or more. Extents are read in the order
    /// in which they are asked for, and finished in any. Two that are not done have different numbers.
    ///
    /// # Panics
    /// When the buffer is too small.
    pub fn begin(&mut self, number: u64, extent: Extent, buffer: Buffer) {
        self.queue(number, extent, buffer);
        self.submit();
    }

    /// The same, to begin with others at the next [`FileReader::submit`], or when one is waited for.
    ///
    /// # Panics
    /// When the buffer is too small.
    pub fn queue(&mut self, number: u64, extent: Extent, mut buffer: Buffer) {
        let bytes = extent.buffer_bytes();
        assert!(buffer.len() >= bytes, "a buffer as large as the extent");
        let mut parts = Vec::new();
        if buffer.len() > bytes {
            parts.push((bytes, buffer.split_off(bytes)));
        }
        let mut calls = 0;
        let mut at = 0;
        while at < bytes {
            let length = CALL_BYTES.min(bytes - at);
            let rest = buffer.split_off(length);
            self.waiting.push_back(Call {
                number: self.calls,
                of: number,
                at,
                buffer: Some(std::mem::replace(&mut buffer, rest)),
                attempts: 0,
            });
            self.calls += 1;
            calls += 1;
            at += length;
        }
        if calls == 0 {
            self.whole.push_back(number);
        }
        let pending = Pending {
            number,
            extent,
            parts,
            calls,
            error: None,
        };
        let before = self.extents.insert(number, pending);
        debug_assert!(
            before.is_none(),
            "extents under way have numbers of their own"
        );
    }

    /// Gives the device as many calls as it takes.
    pub fn submit(&mut self) {
        if self.under_way.len() > ENOUGH_UNDER_WAY {
            return;
        }
        let mut begun = false;
        while let Some(call) = self.waiting.pop_front() {
            let bytes = call.buffer.as_ref().map_or(0, |buffer| buffer.len());
            let with = self.bytes_under_way + bytes;
            if !self.device.takes(self.under_way.len(), with) {
                self.waiting.push_front(call);
                break;
            }
            begun |= self.hand_over(call);
        }
        if begun {
            self.device.submit();
        }
    }

    /// Gives the device a call. Returns whether there was anything to read.
    fn hand_over(&mut self, mut call: Call) -> bool {
        let extent = self.extents.get(&call.of);
        let (Some(extent), Some(buffer)) = (extent, call.buffer.take()) else {
            return false;
        };
        self.bytes_under_way += buffer.len();
        self.device.begin(Read {
            number: call.number,
            file: extent.extent.file.clone(),
            offset: extent.extent.first() + call.at as u64,
            buffer,
        });
        self.under_way.push(call);
        true
    }

    /// An extent that is done with, if there is one by now. Also hands the device what it has room for, so it is
    /// worth a call now and then while much is being read.
    pub fn poll(&mut self) -> Option<Finished> {
        self.next(false)
    }

    /// Waits for an extent; `None` when none is being read.
    pub fn wait(&mut self) -> Option<Finished> {
        self.next(true)
    }

    /// Forgets everything that was asked for: what the disk has begun is waited for.
    pub fn abandon(&mut self) {
        self.waiting.clear();
        while !self.under_way.is_empty() {
            match self.device.finish(true) {
                Ok(Some(done)) => self
                    .under_way
                    .retain(|call| call.number != done.read.number),
                Ok(None) | Err(_) => self.under_way.clear(),
            }
        }
        self.extents.clear();
        self.whole.clear();
        self.bytes_under_way = 0;
    }

    fn next(&mut self, wait: bool) -> Option<Finished> {
        loop {
            self.submit();
            if let Some(number) = self.whole.pop_front() {
                return self.extents.remove(&number).map(Pending::finish);
            }
            if self.under_way.is_empty() {
                return None;
            }
            match self.device.finish(wait) {
                Ok(Some(done)) => self.take(done),
                Ok(None) if !wait => return None,
                Ok(None) => self.lose(&io::ErrorKind::BrokenPipe.into()),
                Err(error) => self.lose(&error),
            }
        }
    }

    /// Enters what a call has brought.
    fn take(&mut self, Done { read, result }: Done) {
        let found = self
            .under_way
            .iter()
            .position(|call| call.number == read.number);
        let Some(index) = found else {
            return;
        };
        let mut call = self.under_way.swap_remove(index);
        self.bytes_under_way -= read.buffer.len();
        let Some(extent) = self.extents.get_mut(&call.of) else {
            return;
        };
        match extent.after(&mut call, read.buffer, result) {
            None => {
                extent.calls -= 1;
                if extent.calls == 0 {
                    self.whole.push_back(call.of);
                }
            }
            Some(buffer) => {
                call.buffer = Some(buffer);
                // Before everything that has not begun: it has waited already.
                self.waiting.push_front(call);
            }
        }
    }

    /// The device has failed, and has kept what it had.
    fn lose(&mut self, error: &io::Error) {
        self.bytes_under_way = 0;
        for call in self.under_way.drain(..).chain(self.waiting.drain(..)) {
            if let Some(extent) = self.extents.get_mut(&call.of) {
                extent.fail(call.at, ReadFailure::from(error));
                extent.calls -= 1;
                if extent.calls == 0 {
                    self.whole.push_back(call.of);
                }
            }
        }
    }
}

impl Pending {
    /// What is left to be read of a call's part after a call: a buffer, and the call says where. `None` when it is
    /// done with, for better or worse.
    fn after(
        &mut self,
        call: &mut Call,
        mut buffer: Buffer,
        result: io::Result<usize>,
    ) -> Option<Buffer> {
        let needed = self.extent.within().end.saturating_sub(call.at);
        let needed = needed.min(buffer.len());
        let whole = |read| read / ALIGNMENT * ALIGNMENT;
        let tried = call.attempts == ATTEMPTS;
        let read = match result {
            Ok(read) if read >= needed => {
                self.parts.push((call.at, buffer));
                return None;
            }
            // Reads go on at a page only. Within one, fewer bytes than before may be all that there are.
            Ok(read) if whole(read) == 0 && (read == 0 || tried) => Err(ReadFailure::Shorter),
            Ok(read) => Ok(whole(read)),
            Err(error) if may_pass(&error) && !tried => Ok(0),
            Err(error) => Err(ReadFailure::from(&error)),
        };
        match read {
            Err(why) => {
                self.fail(call.at, why);
                self.parts.push((call.at, buffer));
                None
            }
            Ok(read) => {
                let rest = buffer.split_off(read);
                call.attempts = if read == 0 { call.attempts + 1 } else { 0 };
                self.parts.push((call.at, buffer));
                call.at += read;
                Some(rest)
            }
        }
    }

    fn fail(&mut self, at: usize, why: ReadFailure) {
        let within = self.extent.within();
        let from = at.max(within.start);
        self.error.get_or_insert(ReadError {
            path: self.extent.file.path().to_owned(),
            offset: self.extent.first() + from as u64,
            bytes: (within.end.saturating_sub(from)) as u64,
            why,
        });
    }

    fn finish(mut self) -> Finished {
        let number = self.number;
        if let Some(error) = self.error {
            return Finished {
                number,
                result: Err(error),
            };
        }
        // Empty parts lie where the next begins, and stay before it.
        self.parts.sort_by_key(|(at, part)| (*at, part.len()));
        let joined = self.parts.into_iter().map(|(_, part)| part);
        let buffer = joined.reduce(|mut whole, part| {
            whole.join(part);
            whole
        });
        Finished {
            number,
            result: Ok(Loaded {
                buffer: buffer.expect("an extent has a part"),
                range: self.extent.within(),
            }),
        }
    }
}

impl Drop for FileReader {
    fn drop(&mut self) {
        // What has not begun need not; the device waits for the rest.
        self.waiting.clear();
    }
}

/// Whether the same call may work the next time.
fn may_pass(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock
    )
}
