//! Sealing, sharing, pinning and making unique.
//!
//! A page is written by one buffer, sealed when it is full, and from then on mapped, read-only, by
//! as many buffers as like. A buffer that wants to write to it again makes it unique: in place if
//! no one else has it, by copying that one page if someone does.

use super::plan::{Contents, Edit, Plan};
use super::{MapReport, Pages, Pool, Request, Wanted, buffers_of, readers};
use crate::buffer::Buffer;
use crate::device::{Aliasing, FilePart, Location};
use crate::error::Error;
use crate::table::Slot;
use crate::units::{PageCount, PageRange, PhysicalPage, VirtualPage};

/// Where shared pages come from.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    /// Sealed pages of another buffer.
    Buffer(&'a Buffer, PageRange),
    /// Pinned pages, in this order.
    Pins(&'a [PagePin]),
}

/// Sealed pages that are to appear in a second buffer.
#[derive(Debug)]
pub struct Share<'a> {
    /// The pages.
    pub source: Source<'a>,
    /// Where they are to appear; all holes there.
    pub target: &'a mut Buffer,
    /// The first virtual page of `target` that gets one.
    pub at: VirtualPage,
}

/// Keeps one sealed page, whatever becomes of the buffers that map it. Dropping it lets go.
#[derive(Debug)]
pub struct PagePin {
    pool: Pool,
    page: PhysicalPage,
    location: Location,
}

impl PagePin {
    /// The page it keeps.
    pub fn page(&self) -> PhysicalPage {
        self.page
    }
}

impl Clone for PagePin {
    fn clone(&self) -> Self {
        self.pool.lock().books.pin(self.page);
        Self {
            pool: self.pool.clone(),
            ..*self
        }
    }
}

impl Drop for PagePin {
    fn drop(&mut self) {
        let mut state = self.pool.lock();
        state.books.unpin(self.page);
        state.settle();
    }
}

impl Source<'_> {
    /// The number of pages it names, once it is known to be of `pool` and within its buffer.
    fn check(&self, pool: &Pool) -> Result<PageCount, Error> {
        match self {
            Self::Buffer(buffer, pages) => {
                pool.check_pool(buffer)?;
                buffer.check_pages(*pages)?;
                Ok(pages.count())
            }
            Self::Pins(pins) => match pins.iter().all(|pin| pin.pool.is_same(pool)) {
                true => Ok(PageCount::new(pins.len() as u64)),
                false => Err(Error::OtherPool),
            },
        }
    }

    /// Whether all its pages are of one kind, or there is none.
    fn is_at(&self, location: Location) -> bool {
        match self {
            Self::Buffer(buffer, _) => buffer.location == location,
            Self::Pins(pins) => pins.iter().all(|pin| pin.location == location),
        }
    }

    /// The `index`-th page.
    fn page(&self, index: u64) -> Result<PhysicalPage, Error> {
        match self {
            Self::Buffer(buffer, pages) => {
                buffer.sealed_page(VirtualPage::new(pages.start.index() + index))
            }
            Self::Pins(pins) => Ok(pins[index as usize].page),
        }
    }
}

impl Pool {
    /// Makes pages immutable, so that they can be shared and pinned. Sealing twice is no error.
    ///
    /// # Errors
    /// [`Error::Hole`] or [`Error::Swapped`] at the first page without memory,
    /// [`Error::PageRange`], [`Error::OtherPool`], [`Error::OutOfMappings`] or [`Error::Device`];
    /// nothing is sealed then.
    pub fn seal(&self, requests: &mut [Pages<'_>]) -> Result<(), Error> {
        let mut plan = Plan::default();
        for (target, request) in requests.iter().enumerate() {
            self.check_pool(request.buffer)?;
            request.buffer.check_pages(request.pages)?;
            for page in request.pages.iter() {
                match request.buffer.mapped_slot(page)? {
                    Slot::Writable(physical) => {
                        let to = Slot::Sealed(physical);
                        plan.edits.push(request.buffer.edit(target, page, to));
                    }
                    _ => continue,
                }
            }
        }
        self.change(&mut plan, &mut buffers_of(requests)).map(drop)
    }

    /// Maps sealed pages into further buffers, all in one device batch. Costs no memory.
    ///
    /// # Errors
    /// [`Error::Unsupported`] on devices without aliasing; [`Error::NotSealed`], [`Error::Hole`] or
    /// [`Error::Swapped`] for the first source page that cannot be shared; [`Error::Occupied`] or
    /// [`Error::Swapped`] for the first target page that is no hole; [`Error::PageRange`],
    /// [`Error::OtherLocation`], [`Error::OtherPool`], [`Error::OutOfMappings`] or [`Error::Device`]. Nothing is mapped then.
    pub fn share(&self, requests: &mut [Share<'_>]) -> Result<MapReport, Error> {
        self.check_aliasing("share a page between two buffers")?;
        let mut plan = Plan::default();
        for (target, request) in requests.iter().enumerate() {
            self.plan_share(&mut plan, target, request)?;
        }
        let pages_mapped = PageCount::new(plan.edits.len() as u64);
        let mut targets: Vec<&mut Buffer> = requests
            .iter_mut()
            .map(|request| &mut *request.target)
            .collect();
        let fence = self.change(&mut plan, &mut targets)?;
        Ok(MapReport {
            pages_mapped,
            pages_copied: PageCount::ZERO,
            fence,
        })
    }

    fn plan_share(&self, plan: &mut Plan, target: usize, request: &Share<'_>) -> Result<(), Error> {
        self.check_pool(request.target)?;
        let count = request.source.check(self)?.get();
        if !request.source.is_at(request.target.location) {
            return Err(Error::OtherLocation);
        }
        let start = request.at.index();
        let range = PageRange::of(start..start.saturating_add(count));
        request.target.check_pages(range)?;
        for (index, page) in range.iter().enumerate() {
            match request.target.table.get(page) {
                Slot::Hole => {}
                Slot::Swapped => return Err(Error::Swapped { page }),
                Slot::Writable(_) | Slot::Sealed(_) => return Err(Error::Occupied { page }),
            }
            let to = Slot::Sealed(request.source.page(index as u64)?);
            plan.edits.push(request.target.edit(target, page, to));
        }
        Ok(())
    }

    /// Takes whole pages of a file as sealed pages, each pinned once, without reading them. They count like any other
    /// page under the limit, and are copied when they are to be written to.
    ///
    /// # Errors
    /// [`Error::Unsupported`] or [`Error::Device`] where they cannot be mapped as they are, and have to be copied;
    /// [`Error::OutOfPages`], and [`Error::Length`] for less than a page. Nothing has changed then.
    pub fn open_file(&self, part: FilePart) -> Result<Vec<PagePin>, Error> {
        self.check_aliasing("map a file into buffers")?;
        let pages = self.lock().open_heap(part)?.into_iter();
        let pin = |page| PagePin {
            pool: self.clone(),
            page,
            location: Location::Own,
        };
        Ok(pages.map(pin).collect())
    }

    /// Whether a file of which pages are taken has become shorter or could not be read: what was read of them since is
    /// of no use then, and they are to be let go of. Costs a system call for each such file.
    pub fn has_lost_files(&self) -> bool {
        let state = self.lock();
        state.books.allocator.file() > 0 && state.device.has_lost_files()
    }

    /// Makes pages writable again, all in one device batch: a page that someone else maps or pins
    /// is copied, one that no one else has is unsealed, one that is not sealed is left alone.
    /// [`MapReport::pages_mapped`] counts the copies.
    ///
    /// # Errors
    /// [`Error::OutOfPages`] when the limit leaves too few pages for the copies; otherwise as
    /// [`Pool::seal`]. Nothing is changed then.
    pub fn make_unique(&self, requests: &mut [Pages<'_>]) -> Result<MapReport, Error> {
        let mut sealed = Vec::new();
        for (target, request) in requests.iter().enumerate() {
            self.check_pool(request.buffer)?;
            request.buffer.check_pages(request.pages)?;
            for page in request.pages.iter() {
                if let Slot::Sealed(_) = request.buffer.mapped_slot(page)? {
                    sealed.push((target, page));
                }
            }
        }
        self.make_writable(&mut buffers_of(requests), &sealed)
    }

    /// Makes every byte of every request writable, all in one device batch: holes get memory and
    /// sealed pages are made unique, as [`Pool::ensure_mapped`] and [`Pool::make_unique`] do it.
    /// Pages that are writable already cost nothing, not even the lock.
    ///
    /// # Errors
    /// [`Error::OutOfPages`] when the limit leaves too few pages for all of them,
    /// [`Error::ByteRange`], [`Error::Swapped`], [`Error::OtherPool`], [`Error::OutOfMappings`] or
    /// [`Error::Device`]; nothing is changed then.
    pub fn ensure_writable(&self, requests: &mut [Request<'_>]) -> Result<MapReport, Error> {
        let mut changed = Vec::new();
        for (target, request) in requests.iter().enumerate() {
            self.check_pool(request.buffer)?;
            for page in request.buffer.pages_of(request.range)?.iter() {
                match request.buffer.table.get(page) {
                    Slot::Writable(_) => {}
                    Slot::Hole | Slot::Sealed(_) => changed.push((target, page)),
                    Slot::Swapped => return Err(Error::Swapped { page }),
                }
            }
        }
        let mut targets: Vec<&mut Buffer> = match changed.is_empty() {
            true => Vec::new(),
            false => requests
                .iter_mut()
                .map(|request| &mut *request.buffer)
                .collect(),
        };
        self.make_writable(&mut targets, &changed)
    }

    /// Makes the named pages of `targets`, holes or sealed, writable.
    fn make_writable(
        &self,
        targets: &mut [&mut Buffer],
        pages: &[(usize, VirtualPage)],
    ) -> Result<MapReport, Error> {
        if pages.is_empty() {
            return Ok(MapReport::default());
        }
        let mut plan = Plan::default();
        let mut state = self.lock();
        let mut fresh: Vec<Wanted> = Vec::new();
        for &(target, page) in pages {
            let buffer = &*targets[target];
            match buffer.table.get(page) {
                Slot::Sealed(physical) if state.books.can_be_unsealed(physical) => {
                    plan.edits
                        .push(buffer.edit(target, page, Slot::Writable(physical)));
                }
                Slot::Sealed(_) => fresh.push(buffer.wanted(target, page, Contents::Copied)),
                _ => fresh.push(buffer.wanted(target, page, Contents::Zeroed)),
            }
        }
        state.plan_fresh(&mut plan, &fresh)?;
        let readers = readers(targets);
        let fence = state.execute(&mut plan, targets, readers)?;
        state.settle();
        let copied = fresh
            .iter()
            .filter(|want| want.contents == Contents::Copied);
        Ok(MapReport {
            pages_mapped: PageCount::new(fresh.len() as u64),
            pages_copied: PageCount::new(copied.count() as u64),
            fence,
        })
    }

    pub(crate) fn check_aliasing(&self, what: &'static str) -> Result<(), Error> {
        match self.capabilities().aliasing {
            Aliasing::Shared => Ok(()),
            Aliasing::Unsupported => Err(Error::Unsupported {
                device: self.capabilities().name,
                what,
            }),
        }
    }
}

impl Buffer {
    /// Makes `pages` immutable: [`Pool::seal`] for one buffer.
    ///
    /// # Errors
    /// As [`Pool::seal`].
    pub fn seal(&mut self, pages: PageRange) -> Result<(), Error> {
        self.pool.clone().seal(&mut [Pages::new(self, pages)])
    }

    /// Maps sealed `pages` of `source` into this buffer from `at` on: [`Pool::share`] for one
    /// buffer.
    ///
    /// # Errors
    /// As [`Pool::share`].
    pub fn share_from(
        &mut self,
        source: &Self,
        pages: PageRange,
        at: VirtualPage,
    ) -> Result<MapReport, Error> {
        let source = Source::Buffer(source, pages);
        self.pool.clone().share(&mut [Share {
            source,
            target: self,
            at,
        }])
    }

    /// Makes `pages` writable again: [`Pool::make_unique`] for one buffer.
    ///
    /// # Errors
    /// As [`Pool::make_unique`].
    pub fn make_unique(&mut self, pages: PageRange) -> Result<MapReport, Error> {
        self.pool
            .clone()
            .make_unique(&mut [Pages::new(self, pages)])
    }

    /// Keeps sealed `pages` beyond the life of this buffer, one pin each.
    ///
    /// # Errors
    /// [`Error::Unsupported`] on devices without aliasing, where a page goes with its buffer;
    /// [`Error::NotSealed`], [`Error::Hole`] or [`Error::Swapped`] at the first page that cannot be
    /// pinned, [`Error::PageRange`]; nothing is pinned then.
    pub fn pin(&self, pages: PageRange) -> Result<Vec<PagePin>, Error> {
        self.pool.check_aliasing("keep a page without its buffer")?;
        self.check_pages(pages)?;
        let physical: Vec<PhysicalPage> = pages
            .iter()
            .map(|page| self.sealed_page(page))
            .collect::<Result<_, _>>()?;
        let mut state = self.pool.lock();
        let pin = |page| {
            state.books.pin(page);
            PagePin {
                pool: self.pool.clone(),
                page,
                location: self.location,
            }
        };
        Ok(physical.into_iter().map(pin).collect())
    }

    fn sealed_page(&self, page: VirtualPage) -> Result<PhysicalPage, Error> {
        match self.mapped_slot(page)? {
            Slot::Sealed(physical) => Ok(physical),
            _ => Err(Error::NotSealed { page }),
        }
    }

    /// The slot of a page that has memory behind it.
    pub(crate) fn mapped_slot(&self, page: VirtualPage) -> Result<Slot, Error> {
        match self.table.get(page) {
            Slot::Hole => Err(Error::Hole { page }),
            Slot::Swapped => Err(Error::Swapped { page }),
            slot => Ok(slot),
        }
    }

    pub(crate) fn edit(&self, target: usize, page: VirtualPage, to: Slot) -> Edit {
        let from = self.table.get(page);
        Edit {
            target,
            space: self.space,
            page,
            from,
            to,
            contents: Contents::AsIs,
        }
    }
}
