#![expect(unsafe_code, reason = "buffers hand out slices of mapped memory")]

//! Slices of mapped memory: the one place where a page table entry becomes a reference.
//!
//! # Safety
//!
//! A slice of a buffer is sound because, for as long as it lives:
//!
//! * **S1** *It is mapped.* Every page of the range has a `Writable` or `Sealed` slot, and a slot
//!   says so only after the device mapped the page (M5, D2). Slots change only through
//!   `&mut Buffer`, which cannot exist beside a borrow of it, and the pool never touches a
//!   buffer it was not given.
//! * **S2** *Nobody else writes.* `bytes_mut` is given for `Writable` slots only. Such a page has
//!   exactly one mapping (M3) and no pin, that mapping is this buffer's (M2), and `&mut Buffer`
//!   makes this the only slice of it.
//! * **S3** *Nobody writes what is read.* `bytes` reads pages that are sealed, which no mapping
//!   allows to be written (M3), or writable, whose only mapping is this borrowed buffer's.
//! * **S4** *It is one object.* The range lies within one reservation (D1), whose length fits an
//!   `isize`; memory from a device is initialised (zeros, or what was written before).

use std::ptr::NonNull;
use std::sync::Arc;

use crate::buffer::Buffer;
use crate::device::{HostCopies, HostView};
use crate::error::Error;
use crate::table::Slot;
use crate::units::{ByteRange, PageRange};

/// How the host reaches a buffer's memory.
#[derive(Debug)]
pub(crate) struct HostMemory {
    view: HostView,
}

// SAFETY: copies may be asked for by any thread. The pointer is used only through a borrow of its buffer, as S1 to S3 have it, and memory
// mapped into a process is the same for all its threads.
unsafe impl Send for HostMemory {}
// SAFETY: as above; a shared borrow only ever reads (S3).
unsafe impl Sync for HostMemory {}

impl HostMemory {
    pub(crate) fn new(view: HostView) -> Self {
        Self { view }
    }
}

impl Buffer {
    /// The bytes of `range`, every page of which is mapped.
    ///
    /// # Errors
    /// [`Error::Hole`] or [`Error::Swapped`] at the first page without memory,
    /// [`Error::ByteRange`], or [`Error::Unsupported`] when the host cannot see the device.
    pub fn bytes(&self, range: impl Into<ByteRange>) -> Result<&[u8], Error> {
        let range = range.into();
        let pages = self.pages_of(range)?;
        self.check_slots(pages, Slots::Readable)?;
        let base = self.base()?;
        let length = (range.end - range.start) as usize;
        // SAFETY: S1 and S3 by `check_slots` and the borrow of `self`; S4 by `pages_of`.
        Ok(unsafe {
            NonNull::slice_from_raw_parts(base.add(range.start as usize), length).as_ref()
        })
    }

    /// The bytes of `range` for writing, every page of which is mapped and not sealed.
    ///
    /// # Errors
    /// As [`Buffer::bytes`], and [`Error::Sealed`] at the first page that is immutable.
    pub fn bytes_mut(&mut self, range: impl Into<ByteRange>) -> Result<&mut [u8], Error> {
        let range = range.into();
        let pages = self.pages_of(range)?;
        self.check_slots(pages, Slots::Writable)?;
        let base = self.base()?;
        let length = (range.end - range.start) as usize;
        // SAFETY: S1 and S2 by `check_slots` and the exclusive borrow of `self`; S4 by `pages_of`.
        Ok(unsafe {
            NonNull::slice_from_raw_parts(base.add(range.start as usize), length).as_mut()
        })
    }

    /// Copies the bytes from `start` on to `bytes`; every page of them is mapped. Works on every
    /// device; where the host cannot see the memory it waits for the device's queue.
    ///
    /// # Errors
    /// As [`Buffer::bytes`], or [`Error::Device`] when the copy fails.
    pub fn read(&self, start: u64, bytes: &mut [u8]) -> Result<(), Error> {
        let range = range_of(start, bytes.len());
        match self.copies() {
            None => bytes.copy_from_slice(self.bytes(range)?),
            Some(copies) => {
                self.check_slots(self.pages_of(range)?, Slots::Readable)?;
                copies.read(self.address(start), bytes)?;
            }
        }
        Ok(())
    }

    /// Copies `bytes` to the bytes from `start` on; every page of them is mapped and not sealed.
    /// Works on every device.
    ///
    /// # Errors
    /// As [`Buffer::bytes_mut`], or [`Error::Device`] when the copy fails; part of the bytes may
    /// have been written then.
    pub fn write(&mut self, start: u64, bytes: &[u8]) -> Result<(), Error> {
        let range = range_of(start, bytes.len());
        match self.copies() {
            None => self.bytes_mut(range)?.copy_from_slice(bytes),
            Some(copies) => {
                self.check_slots(self.pages_of(range)?, Slots::Writable)?;
                let fence = copies.write(self.address(start), bytes)?;
                self.read_until(fence);
            }
        }
        Ok(())
    }

    /// Whether the host sees the memory itself, so that [`Buffer::bytes`] lends it.
    pub fn host_sees(&self) -> bool {
        self.copies().is_none()
    }

    /// Where bytes are copied through, unless the host sees the memory itself.
    pub(crate) fn copies(&self) -> Option<Arc<dyn HostCopies>> {
        match &self.memory.as_ref()?.view {
            HostView::Copies(copies) => Some(Arc::clone(copies)),
            HostView::Pointer(_) => None,
        }
    }

    fn base(&self) -> Result<NonNull<u8>, Error> {
        match self.memory.as_ref().map(|memory| &memory.view) {
            Some(HostView::Pointer(base)) => Ok(*base),
            Some(HostView::Copies(_)) | None => Err(Error::Unsupported {
                device: self.pool().capabilities().name,
                what: "lend its memory to the host; copy with `read` and `write`",
            }),
        }
    }

    pub(crate) fn check_slots(&self, pages: PageRange, wanted: Slots) -> Result<(), Error> {
        let known = self.table.known(pages);
        for (slot, page) in known.iter().zip(pages.iter()) {
            match (slot, wanted) {
                (Slot::Writable(_), _) | (Slot::Sealed(_), Slots::Readable) => {}
                (Slot::Sealed(_), Slots::Writable) => return Err(Error::Sealed { page }),
                (Slot::Hole, _) => return Err(Error::Hole { page }),
                (Slot::Swapped, _) => return Err(Error::Swapped { page }),
            }
        }
        match pages.iter().nth(known.len()) {
            Some(page) => Err(Error::Hole { page }),
            None => Ok(()),
        }
    }
}

fn range_of(start: u64, length: usize) -> ByteRange {
    ByteRange::new(start, start.saturating_add(length as u64))
}

/// What slots must allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Slots {
    /// Reading.
    Readable,
    /// Reading and writing.
    Writable,
}
