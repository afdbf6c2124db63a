//! A buffer: reserved address space and its page table.

use crate::device::{Address, Fence, HostView, Location, SpaceId};
use crate::error::Error;
use crate::ledger::BufferLedger;
use crate::pool::{BufferId, Contents, Pool, Wanted};
use crate::slices::HostMemory;
use crate::table::{Slot, Table};
use crate::units::{ByteLength, ByteRange, PageCount, PageRange, VirtualPage};

/// A contiguous range of address space whose pages come and go underneath.
///
/// Dropping it gives its pages and its address space back; pages that others map or pin stay.
#[derive(Debug)]
pub struct Buffer {
    pub(crate) pool: Pool,
    pub(crate) id: BufferId,
    pub(crate) space: SpaceId,
    pub(crate) location: Location,
    pub(crate) table: Table,
    pub(crate) memory: Option<HostMemory>,
    pub(crate) readers: Fence,
    label: String,
}

impl Buffer {
    pub(crate) fn new(
        pool: Pool,
        (id, space, location): (BufferId, SpaceId, Location),
        pages: PageCount,
        view: Option<HostView>,
        label: String,
    ) -> Self {
        let memory = view.map(HostMemory::new);
        let table = Table::new(pages);
        Self {
            pool,
            id,
            space,
            location,
            table,
            memory,
            readers: Fence::DONE,
            label,
        }
    }

    /// The name given when it was reserved.
    pub fn label(&self) -> &str {
        &self.label
    }

    /// The pool it belongs to.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// The device's name for the byte at `offset`, for work that is submitted to the device itself.
    pub fn address(&self, offset: u64) -> Address {
        Address {
            space: self.space,
            offset,
        }
    }

    /// Of which kind its pages are.
    pub fn location(&self) -> Location {
        self.location
    }

    /// How many bytes are reserved: what was asked for, rounded up to pages.
    pub fn reserved(&self) -> ByteLength {
        self.pool.page_size().bytes_of(self.table.pages())
    }

    /// How many pages are reserved.
    pub fn pages(&self) -> PageCount {
        self.table.pages()
    }

    /// How many pages from the start on are the same memory in `other`, which neither writes: sealed pages that both map.
    pub fn pages_in_common(&self, other: &Self) -> PageCount {
        if !self.pool.is_same(&other.pool) {
            return PageCount::new(0);
        }
        let [mine, others] = [self, other].map(|buffer| buffer.table.known(buffer.table.extent()));
        let pairs = mine.iter().zip(others);
        let common =
            pairs.take_while(|(mine, other)| mine == other && matches!(mine, Slot::Sealed(_)));
        PageCount::new(common.count() as u64)
    }

    /// The buffer's accounts as they are now.
    pub fn ledger(&self) -> BufferLedger {
        self.pool.lock().books.buffer_ledger(self.id)
    }

    /// Puts memory behind `range`: [`Pool::ensure_mapped`] for one buffer.
    ///
    /// # Errors
    /// As [`Pool::ensure_mapped`].
    pub fn ensure_mapped(
        &mut self,
        range: impl Into<ByteRange>,
    ) -> Result<crate::MapReport, Error> {
        let pool = self.pool.clone();
        pool.ensure_mapped(&mut [crate::Request::new(self, range)])
    }

    /// Counts the holes in `range`.
    pub(crate) fn count_missing(&self, range: ByteRange) -> Result<u64, Error> {
        let pages = self.pages_of(range)?;
        let known = self.table.known(pages);
        let mut mapped = 0;
        for (slot, page) in known.iter().zip(pages.iter()) {
            match slot {
                Slot::Swapped => return Err(Error::Swapped { page }),
                Slot::Hole => {}
                Slot::Writable(_) | Slot::Sealed(_) => mapped += 1,
            }
        }
        Ok(pages.count().get() - mapped)
    }

    pub(crate) fn wanted(&self, target: usize, page: VirtualPage, contents: Contents) -> Wanted {
        let from = self.table.get(page);
        Wanted {
            target,
            buffer: self.id,
            space: self.space,
            page,
            from,
            contents,
        }
    }

    /// The pages that `range` touches, if it lies within the buffer.
    pub(crate) fn pages_of(&self, range: ByteRange) -> Result<PageRange, Error> {
        let reserved = self.reserved();
        if range.start > range.end || range.end > reserved.get() {
            return Err(Error::ByteRange { range, reserved });
        }
        Ok(self.pool.page_size().pages_touching(range))
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let slots = self.table.known(self.table.extent());
        let pages = slots.iter().filter_map(|slot| slot.page()).collect();
        self.pool
            .lock()
            .release(self.id, self.space, pages, self.readers);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_pools_and_pins_go_between_threads() {
        fn shared<T: Send + Sync>() {}
        shared::<Buffer>();
        shared::<Pool>();
        shared::<crate::PagePin>();
    }
}
