//! Files that are read, and the way the system lets each be read.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::memory::ALIGNMENT;
#[cfg(target_os = "linux")]
use super::memory::Buffer;
use super::{ReadError, ReadFailure};
use crate::mapping::Mapping;

/// How much of the page cache reading a file may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Caching {
    /// None, where the system and the file system can do that.
    Avoided,
    /// What the system likes.
    Allowed,
}

/// How a file is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// From the disk into our memory (`O_DIRECT`).
    Direct,
    /// Through the page cache, which forgets it at once (`RWF_DONTCACHE`, Linux 6.14).
    Uncached,
    /// Through the page cache.
    Cached,
}

impl Method {
    /// The name in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Direct => "past the page cache",
            Self::Uncached => "through the page cache, which forgets it",
            Self::Cached => "through the page cache",
        }
    }
}

/// A file that is read in extents. Cheap to clone.
#[derive(Clone, Debug)]
pub struct ReadFile(Arc<Opened>);

#[derive(Debug)]
struct Opened {
    path: PathBuf,
    file: File,
    method: Method,
}

impl ReadFile {
    /// The file behind a mapping, opened once more: by the first method that works of those that
    /// `caching` allows. `None` for memory that stands in for a file.
    ///
    /// # Errors
    /// What the system says; also when there is another file under the path by now.
    pub fn open(mapping: &Mapping, caching: Caching) -> io::Result<Option<Self>> {
        let Some(path) = mapping.path() else {
            return Ok(None);
        };
        let path = path.to_owned();
        if caching == Caching::Avoided
            && let Some(file) = open_direct(mapping)?
        {
            let method = Method::Direct;
            return Ok(Some(Self(Arc::new(Opened { path, file, method }))));
        }
        let Some(file) = mapping.open_again(0)? else {
            return Ok(None);
        };
        let method = match caching == Caching::Avoided && can_be_uncached(&file) {
            true => Method::Uncached,
            false => Method::Cached,
        };
        Ok(Some(Self(Arc::new(Opened { path, file, method }))))
    }

    /// The path it was opened under.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// How it is read.
    #[must_use]
    pub fn method(&self) -> Method {
        self.0.method
    }

    /// For the queue of reads that only Linux has.
    #[cfg(target_os = "linux")]
    pub(super) fn file(&self) -> &File {
        &self.0.file
    }

    /// Reads into `out` from `offset` on, once.
    pub(super) fn read_at(&self, out: &mut [u8], offset: u64) -> io::Result<usize> {
        match self.0.method {
            Method::Uncached => read_uncached(&self.0.file, out, offset),
            Method::Direct | Method::Cached => read_plainly(&self.0.file, out, offset),
        }
    }
}

/// Bytes of a file.
#[derive(Clone, Debug)]
pub struct Extent {
    /// The file.
    pub file: ReadFile,
    /// The bytes.
    pub range: Range<u64>,
}

impl Extent {
    /// Bytes of the buffer it is read into: whole pages of the file, since nothing else can be read past the
    /// page cache.
    #[must_use]
    pub fn buffer_bytes(&self) -> usize {
        let page = ALIGNMENT as u64;
        let end = self.range.end.max(self.range.start + 1);
        usize::try_from(end.next_multiple_of(page) - self.first()).unwrap_or(usize::MAX)
    }

    /// The error of an extent for which the system refuses memory.
    #[must_use]
    pub fn refused(&self, error: &io::Error) -> ReadError {
        ReadError {
            path: self.file.path().to_owned(),
            offset: self.range.start,
            bytes: self.range.end - self.range.start,
            why: ReadFailure::from(error),
        }
    }

    /// Where reading begins.
    pub(super) fn first(&self) -> u64 {
        self.range.start / ALIGNMENT as u64 * ALIGNMENT as u64
    }

    /// Where in its buffer it lies.
    pub(super) fn within(&self) -> Range<usize> {
        let start = (self.range.start - self.first()) as usize;
        start..start + (self.range.end - self.range.start) as usize
    }
}

/// A page of the file past the page cache, to see whether that works: some file systems take the flag and refuse
/// the reads.
fn open_direct(mapping: &Mapping) -> io::Result<Option<File>> {
    #[cfg(target_os = "linux")]
    {
        // Refused where the file system has no such thing; other reasons are found again without it.
        let Ok(Some(file)) = mapping.open_again(libc::O_DIRECT) else {
            return Ok(None);
        };
        let mut page = Buffer::new(ALIGNMENT)?;
        let worked = read_plainly(&file, &mut page, 0).is_ok();
        Ok(worked.then_some(file))
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = mapping;
        Ok(None)
    }
}

fn can_be_uncached(file: &File) -> bool {
    read_uncached(file, &mut [0], 0).is_ok()
}

#[cfg(target_os = "linux")]
fn read_uncached(file: &File, out: &mut [u8], offset: u64) -> io::Result<usize> {
    /// `RWF_DONTCACHE` of the kernel's interface, which rustix does not name yet.
    const DONTCACHE: u32 = 0x80;
    let flags = rustix::io::ReadWriteFlags::from_bits_retain(DONTCACHE);
    let read = rustix::io::preadv2(file, &mut [io::IoSliceMut::new(out)], offset, flags);
    Ok(read?)
}

#[cfg(not(target_os = "linux"))]
fn read_uncached(_: &File, _: &mut [u8], _: u64) -> io::Result<usize> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(unix)]
fn read_plainly(file: &File, out: &mut [u8], offset: u64) -> io::Result<usize> {
    std::os::unix::fs::FileExt::read_at(file, out, offset)
}

#[cfg(windows)]
fn read_plainly(file: &File, out: &mut [u8], offset: u64) -> io::Result<usize> {
    std::os::windows::fs::FileExt::seek_read(file, out, offset)
}
