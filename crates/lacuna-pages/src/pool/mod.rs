//! The pool: one device, one page size, one byte limit, and every operation on its buffers.

mod allocator;
mod books;
mod config;
mod heap;
mod plan;
mod reclaim;
mod sharing;
mod state;
mod unmapping;
mod verify;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub(crate) use allocator::BufferId;
pub use config::{PoolConfig, Recycle};
pub(crate) use plan::Contents;
use plan::Plan;
pub use sharing::{PagePin, Share, Source};
use state::State;
pub(crate) use state::Wanted;
pub use verify::BrokenInvariant;

use crate::buffer::Buffer;
use crate::device::{Capabilities, Commitment, Device, Fence, FenceState, Location, Patience};
use crate::error::Error;
use crate::ledger::Ledger;
use crate::table::Slot;
use crate::units::{ByteLength, ByteRange, PageCount, PageRange, PageSize};

/// Physical pages under one byte limit. A handle: clones are the same pool, and any thread may use
/// them; calls that change something take turns.
///
/// ```
/// # use lacuna_pages::{ByteLength, DenseDevice, Pool, PoolConfig, Request};
/// let pool = Pool::new(DenseDevice::new(), PoolConfig::default())?;
/// let mut buffer = pool.reserve(ByteLength::mebibytes(1), "layer 0 keys")?;
/// pool.ensure_mapped(&mut [Request::new(&mut buffer, 0..4096)])?;
/// buffer.bytes_mut(0..4096)?.fill(7);
/// assert_eq!(buffer.bytes(4090..4096)?, [7; 6]);
/// # Ok::<(), lacuna_pages::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Pool {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    capabilities: Capabilities,
    page_size: PageSize,
    state: Mutex<State>,
}

/// A byte range of a buffer that is to have memory behind it.
#[derive(Debug)]
pub struct Request<'a> {
    /// The buffer.
    pub buffer: &'a mut Buffer,
    /// The bytes that will be touched.
    pub range: ByteRange,
}

impl<'a> Request<'a> {
    /// `range` of `buffer`.
    pub fn new(buffer: &'a mut Buffer, range: impl Into<ByteRange>) -> Self {
        Self {
            buffer,
            range: range.into(),
        }
    }
}

/// Whole pages of a buffer that something is to be done with.
#[derive(Debug)]
pub struct Pages<'a> {
    /// The buffer.
    pub buffer: &'a mut Buffer,
    /// The pages.
    pub pages: PageRange,
}

impl<'a> Pages<'a> {
    /// `pages` of `buffer`.
    pub fn new(buffer: &'a mut Buffer, pages: PageRange) -> Self {
        Self { buffer, pages }
    }
}

/// What a call mapped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MapReport {
    /// Pages mapped by the call; zero means that the device was not asked for anything.
    pub pages_mapped: PageCount,
    /// Those of them that hold a copy of a shared page that was to be written.
    pub pages_copied: PageCount,
    /// When the mappings are there for the device's queue; always reached on immediate devices.
    pub fence: Fence,
}

impl Pool {
    /// Makes a pool on `device`. It holds no memory until something is mapped.
    ///
    /// # Errors
    /// [`Error::UnsupportedPageSize`] or [`Error::Config`].
    pub fn new(device: impl Device + 'static, config: PoolConfig) -> Result<Self, Error> {
        let capabilities = device.capabilities().clone();
        config.validate(&capabilities)?;
        let page_size = config.page_size;
        let state = Mutex::new(State::new(Box::new(device), config));
        Ok(Self {
            shared: Arc::new(Shared {
                capabilities,
                page_size,
                state,
            }),
        })
    }

    /// The pool's page size.
    pub fn page_size(&self) -> PageSize {
        self.shared.page_size
    }

    /// Bytes in which memory comes where it does not come by the page.
    pub fn heap_bytes(&self) -> ByteLength {
        self.lock().config.heap_bytes
    }

    /// What the pool's device can do.
    pub fn capabilities(&self) -> &Capabilities {
        &self.shared.capabilities
    }

    /// Changes the byte limit. One below what is committed holds at once for everything new, and is
    /// met as pages come free: idle memory is given back now, [`Ledger::owed`] says what is left.
    ///
    /// # Errors
    /// [`Error::Config`] for a limit below one page.
    pub fn set_limit(&self, limit: Option<ByteLength>) -> Result<(), Error> {
        config::validate_limit(limit, self.page_size())?;
        let mut state = self.lock();
        state.config.limit = limit;
        state.settle();
        Ok(())
    }

    /// Waits for retired pages, gives all idle memory back to the system, and empty heaps with it.
    pub fn trim(&self) {
        self.lock().trim();
    }

    /// Looks at a fence of the device, or waits for it.
    ///
    /// # Errors
    /// [`Error::Device`] when it will never be reached.
    pub fn wait(&self, fence: Fence, patience: Patience) -> Result<FenceState, Error> {
        Ok(self.lock().device.wait(fence, patience)?)
    }

    /// The accounts as they are now. Costs a lock and a copy.
    pub fn ledger(&self) -> Ledger {
        self.lock().ledger()
    }

    /// Whether the device is gone, and with it what all pages held: open another, and a pool on it.
    pub fn is_lost(&self) -> bool {
        self.lock().device.is_lost()
    }

    /// Whether `other` is a handle to the same pool.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }

    /// The state behind the lock. A panic under the lock is a broken invariant; the books are
    /// changed in infallible steps only, so they are still the best account there is.
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.shared
            .state
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Reserves address space for `length` bytes, rounded up to pages. Costs no memory, except on
    /// a dense device, where it takes all of it. `label` names the buffer in debug output.
    ///
    /// # Errors
    /// [`Error::Length`] for no bytes or more than an address can reach; [`Error::OutOfPages`] on
    /// a dense device; [`Error::Device`] when the system has no address space left.
    pub fn reserve(&self, length: ByteLength, label: impl Into<String>) -> Result<Buffer, Error> {
        self.reserve_at(Location::Own, length, label)
    }

    /// [`Pool::reserve`] for pages of one kind: of a [`SplitDevice`](crate::SplitDevice) also the host's.
    ///
    /// # Errors
    /// As [`Pool::reserve`]; [`Error::Device`] where there is no memory of that kind.
    pub fn reserve_at(
        &self,
        location: Location,
        length: ByteLength,
        label: impl Into<String>,
    ) -> Result<Buffer, Error> {
        let pages = self.page_size().pages_for(length);
        let fits = pages.get().checked_mul(self.page_size().bytes());
        if length == ByteLength::ZERO || fits.is_none_or(|bytes| bytes > i64::MAX as u64) {
            return Err(Error::Length { length });
        }
        let mut state = self.lock();
        let (id, space) = state.reserve(location, pages)?;
        let view = state.device.host_view(space);
        drop(state);
        let place = (id, space, location);
        let mut buffer = Buffer::new(self.clone(), place, pages, view, label.into());
        if self.capabilities().commitment == Commitment::WithReservation {
            self.map_everything(&mut buffer)?;
        }
        Ok(buffer)
    }

    /// Enters the pages of a buffer that came with all its memory.
    fn map_everything(&self, buffer: &mut Buffer) -> Result<MapReport, Error> {
        let pages = PageRange::of(0..buffer.pages().get());
        let wanted = |page| buffer.wanted(0, page, Contents::AsIs);
        let wanted: Vec<Wanted> = pages.iter().map(wanted).collect();
        self.map_fresh(&wanted, &mut [buffer])
    }

    /// Puts memory behind every byte of every request, all in one device batch. Pages already
    /// there cost nothing, not even the lock; when all are, nothing is allocated either.
    ///
    /// # Errors
    /// [`Error::OutOfPages`] when the limit leaves too few pages for all of them,
    /// [`Error::ByteRange`], [`Error::Swapped`], [`Error::OtherPool`], [`Error::OutOfMappings`] or
    /// [`Error::Device`]; nothing is mapped then.
    pub fn ensure_mapped(&self, requests: &mut [Request<'_>]) -> Result<MapReport, Error> {
        let mut missing = 0;
        for request in requests.iter() {
            self.check_pool(request.buffer)?;
            missing += request.buffer.count_missing(request.range)?;
        }
        if missing == 0 {
            return Ok(MapReport::default());
        }
        let mut wanted = Vec::with_capacity(missing as usize);
        for (target, request) in requests.iter().enumerate() {
            let pages = self.page_size().pages_touching(request.range);
            let holes = pages
                .iter()
                .filter(|&page| request.buffer.table.get(page) == Slot::Hole);
            wanted.extend(holes.map(|page| request.buffer.wanted(target, page, Contents::Zeroed)));
        }
        let mut targets: Vec<&mut Buffer> = requests
            .iter_mut()
            .map(|request| &mut *request.buffer)
            .collect();
        self.map_fresh(&wanted, &mut targets)
    }

    fn map_fresh(
        &self,
        wanted: &[Wanted],
        targets: &mut [&mut Buffer],
    ) -> Result<MapReport, Error> {
        let mut plan = Plan::default();
        let mut state = self.lock();
        state.plan_fresh(&mut plan, wanted)?;
        let readers = readers(targets);
        let fence = state.execute(&mut plan, targets, readers)?;
        Ok(MapReport {
            pages_mapped: PageCount::new(wanted.len() as u64),
            pages_copied: PageCount::ZERO,
            fence,
        })
    }

    /// Brings about a plan that takes no new pages.
    fn change(&self, plan: &mut Plan, targets: &mut [&mut Buffer]) -> Result<Fence, Error> {
        if plan.edits.is_empty() {
            return Ok(Fence::DONE);
        }
        let mut state = self.lock();
        let fence = state.execute(plan, targets, readers(targets))?;
        state.settle();
        Ok(fence)
    }

    fn check_pool(&self, buffer: &Buffer) -> Result<(), Error> {
        if buffer.pool.is_same(self) {
            Ok(())
        } else {
            Err(Error::OtherPool)
        }
    }
}

fn buffers_of<'a>(requests: &'a mut [Pages<'_>]) -> Vec<&'a mut Buffer> {
    requests
        .iter_mut()
        .map(|request| &mut *request.buffer)
        .collect()
}

/// When all readers of `targets` are done.
fn readers(targets: &[&mut Buffer]) -> Fence {
    targets
        .iter()
        .map(|buffer| buffer.readers)
        .max()
        .unwrap_or_default()
}
