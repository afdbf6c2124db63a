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

use crate::buffer::Buffer;
use crate::error::Error;
use crate::table::Slot;
use crate::units::{ByteRange, PageRange};

/// Where the host sees a buffer.
#[derive(Debug)]
pub(crate) struct HostMemory {
    base: NonNull<u8>,
}

// SAFETY: the pointer is used only through a borrow of its buffer, as S1 to S3 have it, and memory
// mapped into a process is the same for all its threads.
unsafe impl Send for HostMemory {}
// SAFETY: as above; a shared borrow only ever reads (S3).
unsafe impl Sync for HostMemory {}

impl HostMemory {
    pub(crate) fn new(base: NonNull<u8>) -> Self {
        Self { base }
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
        let memory = self.host_memory()?;
        let length = (range.end - range.start) as usize;
        // SAFETY: S1 and S3 by `check_slots` and the borrow of `self`; S4 by `pages_of`.
        Ok(unsafe {
            NonNull::slice_from_raw_parts(memory.base.add(range.start as usize), length).as_ref()
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
        let memory = self.host_memory()?;
        let length = (range.end - range.start) as usize;
        // SAFETY: S1 and S2 by `check_slots` and the exclusive borrow of `self`; S4 by `pages_of`.
        Ok(unsafe {
            NonNull::slice_from_raw_parts(memory.base.add(range.start as usize), length).as_mut()
        })
    }

    fn host_memory(&self) -> Result<&HostMemory, Error> {
        let device = self.pool().capabilities().name;
        self.memory.as_ref().ok_or(Error::Unsupported {
            device,
            what: "be read by the host",
        })
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

/// What slots must allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Slots {
    /// Reading.
    Readable,
    /// Reading and writing.
    Writable,
}
