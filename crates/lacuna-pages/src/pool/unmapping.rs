//! Unmapping, truncating, swapping out and in.
//!
//! An unmap *retires*: on a queue device it takes effect after the readers that
//! [`Buffer::read_until`] told of, and the page is used again only then.

use super::plan::{Contents, Plan};
use super::{Pages, Pool, Wanted, buffers_of};
use crate::buffer::Buffer;
use crate::device::Fence;
use crate::error::{Error, SwapError};
use crate::slices::Slots;
use crate::table::Slot;
use crate::units::{ByteLength, ByteRange, PageCount, PageRange, VirtualPage};

impl Pool {
    /// Detaches pages, all in one device batch, and gives back those that nobody else has. Pages
    /// that are swapped out are forgotten.
    ///
    /// # Errors
    /// [`Error::Hole`] at the first page with nothing to detach, [`Error::PageRange`],
    /// [`Error::OtherPool`], [`Error::OutOfMappings`] or [`Error::Device`]; nothing is detached
    /// then.
    pub fn unmap(&self, requests: &mut [Pages<'_>]) -> Result<(), Error> {
        let mut plan = Plan::default();
        for (target, request) in requests.iter().enumerate() {
            self.check_pool(request.buffer)?;
            request.buffer.check_pages(request.pages)?;
            for page in request.pages.iter() {
                if request.buffer.table.get(page) == Slot::Hole {
                    return Err(Error::Hole { page });
                }
                plan.edits
                    .push(request.buffer.edit(target, page, Slot::Hole));
            }
        }
        self.change(&mut plan, &mut buffers_of(requests)).map(drop)
    }
}

impl Buffer {
    /// Detaches `pages`: [`Pool::unmap`] for one buffer.
    ///
    /// # Errors
    /// As [`Pool::unmap`].
    pub fn unmap(&mut self, pages: PageRange) -> Result<(), Error> {
        self.pool.clone().unmap(&mut [Pages::new(self, pages)])
    }

    /// Detaches every page that lies wholly past the first `length` bytes. The reservation stays as
    /// long as it was.
    ///
    /// # Errors
    /// [`Error::Device`], with nothing detached.
    pub fn truncate(&mut self, length: ByteLength) -> Result<(), Error> {
        let first = self.pool.page_size().pages_for(length).get();
        let pages = PageRange::of(first..self.table.extent().end.index());
        let mut plan = Plan::default();
        let gone = pages
            .iter()
            .filter(|&page| self.table.get(page) != Slot::Hole);
        plan.edits = gone.map(|page| self.edit(0, page, Slot::Hole)).collect();
        self.pool.clone().change(&mut plan, &mut [self]).map(drop)
    }

    /// Says that work reading this buffer runs on the device until `fence`: what is detached or
    /// replaced from now on is so only after it.
    pub fn read_until(&mut self, fence: Fence) {
        self.readers = self.readers.max(fence);
    }

    /// Moves the contents of `pages` to the caller's store and gives the pages back; the addresses
    /// stay reserved, and reading them is an error until [`Buffer::swap_in`]. `store` gets each page
    /// in order.
    ///
    /// # Errors
    /// What `store` returned, or as [`Buffer::bytes`] and [`Pool::unmap`]; no page is detached then.
    pub fn swap_out<E>(
        &mut self,
        pages: PageRange,
        mut store: impl FnMut(VirtualPage, &[u8]) -> Result<(), E>,
    ) -> Result<(), SwapError<E>> {
        self.check_pages(pages)?;
        self.check_slots(pages, Slots::Readable)?;
        let mut scratch = Vec::new();
        for page in pages.iter() {
            let bytes = self.page_bytes(page, &mut scratch)?;
            store(page, bytes).map_err(|source| SwapError::Store { page, source })?;
        }
        Ok(self.swap_out_stored(pages)?)
    }

    /// [`Buffer::swap_out`] of `pages` whose contents the caller has in its store already.
    ///
    /// # Errors
    /// As [`Buffer::bytes`] and [`Pool::unmap`]; no page is detached then.
    pub fn swap_out_stored(&mut self, pages: PageRange) -> Result<(), Error> {
        self.check_pages(pages)?;
        self.check_slots(pages, Slots::Readable)?;
        let mut plan = Plan::default();
        let edits = pages.iter().map(|page| self.edit(0, page, Slot::Swapped));
        plan.edits = edits.collect();
        let pool = self.pool.clone();
        pool.change(&mut plan, &mut [self])?;
        pool.lock().books.counts.pages_swapped_out += pages.count().get();
        Ok(())
    }

    /// Gives swapped-out `pages` memory again, at the same addresses, and has `store` fill each
    /// page in order.
    ///
    /// # Errors
    /// What `store` returned, [`Error::NotSwapped`] at the first page that was not swapped out, or
    /// as [`Pool::ensure_mapped`]; all pages are swapped out as before then.
    pub fn swap_in<E>(
        &mut self,
        pages: PageRange,
        mut store: impl FnMut(VirtualPage, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), SwapError<E>> {
        self.check_pages(pages)?;
        let stays = |&page: &VirtualPage| self.table.get(page) != Slot::Swapped;
        if let Some(page) = pages.iter().find(stays) {
            return Err(Error::NotSwapped { page }.into());
        }
        let pool = self.pool.clone();
        let wanted: Vec<Wanted> = pages
            .iter()
            .map(|page| self.wanted(0, page, Contents::AsIs))
            .collect();
        pool.map_fresh(&wanted, &mut [self])?;
        for page in pages.iter() {
            if let Err(error) = self.fill_page(page, &mut store) {
                self.swap_out_again(pages);
                return Err(error);
            }
        }
        pool.lock().books.counts.pages_swapped_in += pages.count().get();
        Ok(())
    }

    /// A page's bytes: in place where the host sees them, else copied to `scratch`.
    fn page_bytes<'a>(
        &'a self,
        page: VirtualPage,
        scratch: &'a mut Vec<u8>,
    ) -> Result<&'a [u8], Error> {
        let range = self.bytes_of(page);
        if self.copies().is_none() {
            return self.bytes(range);
        }
        scratch.resize(range.length().get() as usize, 0);
        self.read(range.start, scratch)?;
        Ok(scratch)
    }

    /// Has `store` fill a page, in place where the host sees it.
    fn fill_page<E>(
        &mut self,
        page: VirtualPage,
        store: &mut impl FnMut(VirtualPage, &mut [u8]) -> Result<(), E>,
    ) -> Result<(), SwapError<E>> {
        let range = self.bytes_of(page);
        let refused = |source| SwapError::Store { page, source };
        if self.copies().is_none() {
            return store(page, self.bytes_mut(range)?).map_err(refused);
        }
        let mut bytes = vec![0; range.length().get() as usize];
        store(page, &mut bytes).map_err(refused)?;
        Ok(self.write(range.start, &bytes)?)
    }

    /// Takes pages that could not be filled away again. If even that fails, the pages are set
    /// aside: what matters is that nobody reads them as if they held something.
    fn swap_out_again(&mut self, pages: PageRange) {
        let mut plan = Plan::default();
        plan.edits = pages
            .iter()
            .map(|page| self.edit(0, page, Slot::Swapped))
            .collect();
        let edits = plan.edits.clone();
        let pool = self.pool.clone();
        if pool.change(&mut plan, &mut [self]).is_err() {
            pool.lock().force(&edits, self);
        }
    }

    fn bytes_of(&self, page: VirtualPage) -> ByteRange {
        let size = self.pool.page_size();
        let start = size.offset_of(page);
        ByteRange::new(start, start + size.bytes())
    }

    pub(crate) fn check_pages(&self, range: PageRange) -> Result<(), Error> {
        let reserved: PageCount = self.table.pages();
        if range.start > range.end || range.end.index() > reserved.get() {
            return Err(Error::PageRange { range, reserved });
        }
        Ok(())
    }
}
