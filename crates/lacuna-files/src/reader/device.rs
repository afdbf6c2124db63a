//! What carries reads out: many at once, done in any order.

use std::fmt;
use std::io;

use super::file::ReadFile;
use super::memory::Buffer;

/// One call to read. It owns the memory it is read into for as long as it takes.
#[derive(Debug)]
pub struct Read {
    /// What the caller calls it; two that are under way at once have different numbers.
    pub number: u64,
    /// The file.
    pub file: ReadFile,
    /// The first byte of it that is read, a multiple of the page size.
    pub offset: u64,
    /// Where it is read to: whole pages.
    pub buffer: Buffer,
}

/// A call that is done.
#[derive(Debug)]
pub struct Done {
    /// The call.
    pub read: Read,
    /// How many bytes were read, which may be fewer than there is room for; none at the file's end.
    pub result: io::Result<usize>,
}

/// What carries reads out.
pub trait ReadDevice: Send + fmt::Debug {
    /// The name in reports.
    fn name(&self) -> &'static str;

    /// Whether it takes one more read while it has `calls`, which are of `bytes` bytes together with that one.
    fn takes(&self, calls: usize, bytes: usize) -> bool;

    /// Begins a read that it takes, now or at the next [`ReadDevice::submit`] or [`ReadDevice::finish`].
    fn begin(&mut self, read: Read);

    /// Hands over what has begun.
    fn submit(&mut self) {}

    /// A read that is done, waiting for one if `wait` says so; `None` when there is none, or none under way.
    ///
    /// # Errors
    /// When nothing can be found out any more. Reads under way are lost then, with their memory.
    fn finish(&mut self, wait: bool) -> io::Result<Option<Done>>;
}
