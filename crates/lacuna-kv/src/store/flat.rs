//! Buffers reserved for the whole context, with pages behind the part that is used, or behind all of
//! it from the start.
//!
//! The pages of a buffer, from its first to its last:
//!
//! ```text
//! [ released: holes | sealed: shared | own, writable | holes ]
//! 0              released          sealed          mapped
//! ```
//!
//! What is released is each buffer's own affair: a layer with a window passes its rows by.
//!
//! A page is sealed only when all its rows are accepted, so what is written next is never sealed
//! unless the sequence was truncated into a sealed page; [`FlatStore::prepare`] makes that page
//! writable again, by copying it if another sequence still has it.

use std::ops::Range;

use lacuna_kernels::{Run, Runs, View};
use lacuna_pages::device::{Aliasing, BatchCost, Commitment, Location};
use lacuna_pages::{
    Buffer, ByteLength, Error as PagesError, PageRange, Pages, Pool, Request, Share, Source,
    VirtualPage,
};

use super::rows::{Rows, layer_and_side, stream, zeroed_buffer};
use super::{DeviceRows, Store, Usage, Useful, WriteRun};
use crate::cache::to_usize;
use crate::error::KvError;
use crate::geometry::{Keep, Layer, Side};
use crate::layout::{Arrangement, BufferRows, Tiles};
use crate::prefix::{PinnedPages, Pins};

/// When memory is committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Commit {
    /// As rows are prepared.
    OnDemand,
    /// All of it when the store is made, zeroed.
    AtStart,
}

/// Whether pages are mapped before a row needs them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ahead {
    Mapped,
    LeftOut,
}

/// Tokens that have memory once some is mapped, where a call costs as much as many pages: one in so many tokens is enough
/// to hide it, and what lies ahead is still little beside a prompt.
const TOKENS_PER_CALL: usize = 8;

/// The store of `sparse` and `dense`.
#[derive(Debug)]
pub(crate) struct FlatStore {
    pool: Pool,
    arrangement: Arrangement,
    commit: Commit,
    capacity: usize,
    extents: Vec<Extent>,
    copied_bytes: usize,
    zeroed_bytes: usize,
    peak_committed_bytes: usize,
    lost_rows: bool,
}

/// One buffer and the state of its pages, all in bytes from its start and at page boundaries.
#[derive(Debug)]
struct Extent {
    buffer: Buffer,
    tiles: Tiles,
    keep: Keep,
    released: usize,
    sealed: usize,
    mapped: usize,
}

impl Extent {
    fn new(
        pool: &Pool,
        (held, location): (&BufferRows, Location),
        capacity: usize,
        commit: Commit,
    ) -> Result<Self, KvError> {
        let (bytes, label) = (held.bytes(capacity), held.label());
        let buffer = match commit {
            Commit::OnDemand => pool.reserve_at(location, ByteLength::new(bytes as u64), label)?,
            Commit::AtStart => zeroed_buffer(pool, (location, bytes), label)?,
        };
        Ok(Self {
            tiles: held.tiles,
            keep: held.rows.keep,
            released: 0,
            sealed: 0,
            mapped: match commit {
                Commit::OnDemand => 0,
                Commit::AtStart => to_usize(buffer.reserved()),
            },
            buffer,
        })
    }

    /// Whether some of `bytes` have no memory yet or cannot be written.
    fn lacks(&self, bytes: &Range<usize>) -> bool {
        bytes.end > self.mapped || bytes.start < self.sealed
    }

    fn pages(&self, bytes: Range<usize>) -> PageRange {
        let page = self.buffer.pool().page_size().bytes();
        PageRange::of(bytes.start as u64 / page..bytes.end as u64 / page)
    }

    /// The pages of `bytes`, for a call that changes them.
    fn whole_pages(&mut self, bytes: Range<usize>) -> Pages<'_> {
        let pages = self.pages(bytes);
        Pages::new(&mut self.buffer, pages)
    }
}

impl FlatStore {
    pub(crate) fn new(
        pool: &Pool,
        arrangement: &Arrangement,
        commit: Commit,
        capacity: usize,
    ) -> Result<Self, KvError> {
        arrangement.geometry().bytes(capacity.max(1))?;
        let commit = match pool.capabilities().commitment {
            Commitment::WithReservation => Commit::AtStart,
            Commitment::PerPage | Commitment::PerHeap => commit,
        };
        let buffers = arrangement.buffers().iter();
        let extents = buffers.map(|held| {
            let location = arrangement.geometry().location(held.layer);
            Extent::new(pool, (held, location), capacity.max(1), commit)
        });
        let mut store = Self {
            pool: pool.clone(),
            arrangement: arrangement.clone(),
            commit,
            capacity,
            extents: extents.collect::<Result<_, _>>()?,
            copied_bytes: 0,
            zeroed_bytes: 0,
            peak_committed_bytes: 0,
            lost_rows: false,
        };
        store.zeroed_bytes = store.extents.iter().map(|extent| extent.mapped).sum();
        store.note_peak();
        Ok(store)
    }

    fn page_bytes(&self) -> usize {
        to_usize(self.pool.page_size().length())
    }

    /// The bytes of each buffer that are to be writable for `rows` and are not yet.
    fn missing(&self, rows: &Range<usize>, ahead: Ahead) -> Vec<(usize, Range<usize>)> {
        match (self.pool.capabilities().batch_cost, ahead) {
            (BatchCost::Call, Ahead::Mapped) => self.missing_of_many(rows),
            _ => self.missing_of_some(rows, ahead),
        }
    }

    /// Those of all buffers, for some tokens more than `rows` have, if any of them lacks memory for `rows`.
    fn missing_of_many(&self, rows: &Range<usize>) -> Vec<(usize, Range<usize>)> {
        let through = |extent: &Extent, end: usize| {
            let start = extent.tiles.bytes_before(rows.start);
            let end = extent.tiles.bytes_through(end);
            start..end.min(to_usize(extent.buffer.reserved()))
        };
        let lack = |extent: &Extent| extent.lacks(&through(extent, rows.end));
        if !self.extents.iter().any(lack) {
            return Vec::new();
        }
        let end = rows.end + TOKENS_PER_CALL - 1;
        let wanted = self
            .extents
            .iter()
            .map(|extent| (extent, through(extent, end)));
        let missing = wanted
            .enumerate()
            .filter(|(_, (extent, bytes))| extent.lacks(bytes));
        missing.map(|(index, (_, bytes))| (index, bytes)).collect()
    }

    /// Those that must be, of each buffer. A single row, which
    /// is how decoding goes on, also brings the pages whose turn it is ahead of their need, but only
    /// so many more than usual when it has to catch up.
    fn missing_of_some(&self, rows: &Range<usize>, ahead: Ahead) -> Vec<(usize, Range<usize>)> {
        let (page, count) = (self.page_bytes(), self.extents.len());
        let mut spare = match (ahead, rows.len()) {
            (Ahead::Mapped, 1) => {
                1 + 2 * self.arrangement.geometry().bytes_per_token().div_ceil(page)
            }
            _ => 0,
        };
        let mut missing = Vec::new();
        for (index, extent) in self.extents.iter().enumerate() {
            let start = extent.tiles.bytes_before(rows.start);
            let needed = extent.tiles.bytes_through(rows.end);
            let ahead = extent
                .tiles
                .mapped_bytes(extent.keep, rows.end, page, index, count);
            let ahead = ahead.min(to_usize(extent.buffer.reserved()));
            if extent.lacks(&(start..needed)) {
                let end = if spare > 0 { ahead } else { needed };
                missing.push((index, start..end));
            } else if spare > 0 && extent.lacks(&(start..ahead)) {
                missing.push((index, start..ahead));
                spare -= 1;
            }
        }
        missing
    }

    /// Puts memory that may be written behind `ranges` of the buffers at their indices, which ascend,
    /// in one batch.
    fn make_writable(&mut self, ranges: &[(usize, Range<usize>)]) -> Result<(), KvError> {
        if ranges.is_empty() {
            return Ok(());
        }
        let mut extents = self.extents.iter_mut().enumerate();
        let mut requests = Vec::with_capacity(ranges.len());
        for (index, range) in ranges {
            let extent = extents.find(|(other, _)| other == index);
            let (_, extent) = extent.expect("indices of buffers, ascending");
            requests.push(Request::new(&mut extent.buffer, range.clone()));
        }
        let report = self.pool.ensure_writable(&mut requests);
        let report = self.note_lost(report)?;
        let page = self.page_bytes();
        for (index, range) in ranges {
            let extent = &mut self.extents[*index];
            extent.mapped = extent.mapped.max(range.end.next_multiple_of(page));
            extent.sealed = extent.sealed.min(range.start / page * page);
        }
        self.copied_bytes += page * report.pages_copied.get() as usize;
        self.note_peak();
        Ok(())
    }

    /// Takes note of a change that failed and could not be undone: its pages are holes now.
    fn note_lost<T>(&mut self, result: Result<T, PagesError>) -> Result<T, KvError> {
        self.lost_rows |= matches!(result, Err(PagesError::Undo { .. }));
        Ok(result?)
    }

    fn note_peak(&mut self) {
        let committed = self
            .extents
            .iter()
            .map(|extent| extent.mapped - extent.released);
        self.peak_committed_bytes = self.peak_committed_bytes.max(committed.sum());
    }

    /// Detaches `range` of each buffer, in one batch; whole pages, all of them mapped.
    fn unmap(&mut self, range: impl Fn(&Extent) -> Range<usize>) -> Result<(), KvError> {
        let extents = self.extents.iter_mut();
        let mut requests: Vec<Pages<'_>> = extents
            .filter_map(|extent| {
                let range = range(extent);
                (!range.is_empty()).then(|| extent.whole_pages(range))
            })
            .collect();
        let unmapped = self.pool.unmap(&mut requests);
        self.note_lost(unmapped)
    }

    /// Whether pages are attached and detached at all.
    fn moves(&self) -> bool {
        self.commit == Commit::OnDemand
    }

    /// Whole pages of `extent` that hold only rows before `end`, as a length from its start.
    fn whole(&self, extent: &Extent, end: usize) -> usize {
        let page = self.page_bytes();
        extent.tiles.bytes_before(end) / page * page
    }

    /// The bytes of the pages of `extent` with rows that the token after `rows` others sees.
    fn needed(&self, extent: &Extent, rows: usize) -> Range<usize> {
        let page = self.page_bytes();
        let start = self.whole(extent, extent.keep.first_seen(rows));
        let end = extent.tiles.bytes_through(rows).next_multiple_of(page);
        start..end.max(start)
    }

    /// Seals the pages that hold only rows before the `end` of each buffer, in one batch.
    fn seal_before(&mut self, end: impl Fn(&Extent) -> usize) -> Result<(), KvError> {
        let ends = self
            .extents
            .iter()
            .map(|extent| self.whole(extent, end(extent)));
        let ends: Vec<usize> = ends.collect();
        let extents = self.extents.iter_mut().zip(&ends);
        let mut unsealed: Vec<Pages<'_>> = extents
            .filter(|(extent, end)| extent.sealed < **end)
            .map(|(extent, &end)| extent.whole_pages(extent.sealed..end))
            .collect();
        if unsealed.is_empty() {
            return Ok(());
        }
        let sealed = self.pool.seal(&mut unsealed);
        self.note_lost(sealed)?;
        for (extent, end) in self.extents.iter_mut().zip(ends) {
            extent.sealed = extent.sealed.max(end);
        }
        Ok(())
    }

    /// Maps the pages of `copy` that hold only rows before `end` to the same memory as this store's.
    fn share(&mut self, copy: &mut Self, end: usize) -> Result<(), KvError> {
        self.seal_before(|_| end)?;
        let whole = |extent: &Extent| extent.released..self.whole(extent, end).max(extent.released);
        let pairs = self.extents.iter().zip(&mut copy.extents);
        let mut shares: Vec<Share<'_>> = pairs
            .map(|(from, to)| {
                let pages = from.pages(whole(from));
                Share {
                    source: Source::Buffer(&from.buffer, pages),
                    target: &mut to.buffer,
                    at: pages.start,
                }
            })
            .collect();
        self.pool.share(&mut shares)?;
        for (from, to) in self.extents.iter().zip(&mut copy.extents) {
            let end = whole(from).end;
            (to.sealed, to.mapped) = (end, end);
        }
        Ok(())
    }

    /// Copies to `copy` the bytes of rows before `end` that it does not share.
    fn copy_rest(&self, copy: &mut Self, end: usize) -> Result<(), KvError> {
        let own = |extent: &Extent| extent.sealed.max(extent.released);
        let missing = copy.extents.iter().map(|extent| {
            let start = own(extent);
            start..extent.tiles.bytes_through(end).max(start)
        });
        let missing: Vec<_> = missing.enumerate().collect();
        copy.make_writable(&missing)?;
        let mut staged = Vec::new();
        for (from, to) in self.extents.iter().zip(&mut copy.extents) {
            let start = own(to);
            let end = from.tiles.bytes_through(end).max(start);
            match from.buffer.host_sees() {
                true => to
                    .buffer
                    .bytes_mut(start..end)?
                    .copy_from_slice(from.buffer.bytes(start..end)?),
                // At most a page of each buffer where pages are shared, through memory that the host sees.
                false => {
                    staged.resize(end - start, 0);
                    from.buffer.read(start as u64, &mut staged)?;
                    to.buffer.write(start as u64, &staged)?;
                }
            }
            copy.copied_bytes += end - start;
        }
        Ok(())
    }
}

impl Runs for FlatStore {
    fn run(&self, stream: usize, row: usize) -> Run<'_> {
        let (layer, side) = layer_and_side(stream);
        let (extent, place) = Rows::of(&self.arrangement, layer, side);
        place.run(&self.extents[extent].buffer, row)
    }
}

impl Store for FlatStore {
    fn prepare(&mut self, rows: Range<usize>) -> Result<(), KvError> {
        if rows.is_empty() || self.lost_rows {
            return Ok(());
        }
        let missing = self.missing(&rows, Ahead::Mapped);
        match self.make_writable(&missing) {
            Ok(()) => Ok(()),
            // Another try would put fresh memory where rows were.
            Err(error) if self.lost_rows => Err(error),
            Err(_) => {
                // What is mapped ahead must not cost a token its place.
                let missing = self.missing(&rows, Ahead::LeftOut);
                self.make_writable(&missing)
            }
        }
    }

    fn write(&mut self, layer: Layer, side: Side, rows: Range<usize>, write: &mut WriteRun<'_>) {
        let (extent, place) = Rows::of(&self.arrangement, layer, side);
        place.write(&mut self.extents[extent].buffer, rows, write);
    }

    fn view(&self, layer: Layer, side: Side, rows: Range<usize>) -> View<'_> {
        let (extent, place) = Rows::of(&self.arrangement, layer, side);
        match self.arrangement.layout().tile_tokens() {
            1 => place.view(&self.extents[extent].buffer, rows),
            _ => View::gather(place.layout(), rows, self, stream(layer, side)),
        }
    }

    fn flat_rows(&self, layer: Layer, side: Side) -> Option<(&Buffer, Tiles)> {
        let extent = &self.extents[self.arrangement.place(layer, side).buffer];
        (extent.tiles.tokens == 1).then_some((&extent.buffer, extent.tiles))
    }

    fn device_rows(&self, layer: Layer, side: Side) -> Option<DeviceRows> {
        let (extent, place) = Rows::of(&self.arrangement, layer, side);
        let buffer = &self.extents[extent].buffer;
        place.on_device(buffer)
    }

    fn truncate(&mut self, end: usize) -> Result<(), KvError> {
        let page = self.page_bytes();
        let keep = |extent: &Extent| {
            let end = extent.tiles.bytes_through(end).next_multiple_of(page);
            end.max(extent.released).min(extent.mapped)
        };
        let same = |extent: &Extent| keep(extent) == extent.mapped;
        if !self.moves() || self.extents.iter().all(same) {
            return Ok(());
        }
        self.unmap(|extent| keep(extent)..extent.mapped)?;
        for extent in &mut self.extents {
            extent.mapped = keep(extent);
            extent.sealed = extent.sealed.min(extent.mapped);
        }
        Ok(())
    }

    fn release(&mut self, useful: Useful) -> Result<(), KvError> {
        let page = self.page_bytes();
        let keep = |extent: &Extent| {
            let first = useful.first_row(extent.keep);
            let start = extent.tiles.bytes_before(first) / page * page;
            start.max(extent.released)
        };
        let same = |extent: &Extent| keep(extent) == extent.released;
        if !self.moves() || self.lost_rows || self.extents.iter().all(same) {
            return Ok(());
        }
        self.unmap(|extent| extent.released..keep(extent))?;
        for extent in &mut self.extents {
            extent.released = keep(extent);
            extent.sealed = extent.sealed.max(extent.released);
        }
        Ok(())
    }

    fn fewest_tokens(&self, first: usize) -> usize {
        let fewest = self.extents.iter().map(|extent| {
            let gone = extent.tiles.tokens_through(extent.released);
            match extent.keep {
                Keep::Window(window) if gone > first => gone + window.get() - 1,
                Keep::All | Keep::Window(_) => 0,
            }
        });
        fewest.max().unwrap_or(0)
    }

    fn clear(&mut self) -> Result<(), KvError> {
        if self.moves() {
            self.unmap(|extent| extent.released..extent.mapped)?;
            for extent in &mut self.extents {
                (extent.released, extent.sealed, extent.mapped) = (0, 0, 0);
            }
        }
        Ok(())
    }

    fn duplicate(&mut self, rows: Range<usize>) -> Result<Box<dyn Store>, KvError> {
        let mut copy = Self::new(&self.pool, &self.arrangement, self.commit, self.capacity)?;
        if self.moves() {
            for (from, to) in self.extents.iter().zip(&mut copy.extents) {
                (to.released, to.sealed, to.mapped) = (from.released, from.released, from.released);
            }
        }
        if self.moves() && self.pool.capabilities().aliasing == Aliasing::Shared {
            self.share(&mut copy, rows.end)?;
        }
        self.copy_rest(&mut copy, rows.end)?;
        Ok(Box::new(copy))
    }

    fn pin(&mut self, rows: &dyn Fn(Keep) -> Range<usize>) -> Result<Option<Pins>, KvError> {
        let pages = |store: &Self, extent: &Extent| {
            let rows = rows(extent.keep);
            store.whole(extent, rows.start)..store.whole(extent, rows.end)
        };
        let gone = |extent: &Extent| {
            let pages = pages(self, extent);
            !pages.is_empty() && pages.start < extent.released
        };
        let shares = self.moves() && self.pool.capabilities().aliasing == Aliasing::Shared;
        if !shares || self.extents.iter().any(gone) {
            return Ok(None);
        }
        self.seal_before(|extent| rows(extent.keep).end)?;
        let page = self.page_bytes();
        let pins = self.extents.iter().map(|extent| {
            let bytes = pages(self, extent);
            let first = (bytes.start / page) as u64;
            let pins = match bytes.is_empty() {
                true => Vec::new(),
                false => extent.buffer.pin(extent.pages(bytes))?,
            };
            Ok(PinnedPages { first, pins })
        });
        Ok(Some(Pins::new(pins.collect::<Result<_, PagesError>>()?)))
    }

    fn adopt(
        &mut self,
        groups: &[&Pins],
        window: Option<&Pins>,
        rows: usize,
    ) -> Result<(), KvError> {
        if groups.is_empty() {
            return Ok(());
        }
        let page = self.page_bytes();
        let extents = self.extents.iter().enumerate();
        let all: Vec<PinnedPages> = extents
            .map(|(index, extent)| {
                // Only the page that the next row is written to may be sealed, and none behind it.
                let end = extent.tiles.bytes_through(rows).div_ceil(page);
                Pins::of_extent(groups, window, index).cut_at(end as u64)
            })
            .collect();
        let mut shares: Vec<Share<'_>> = self
            .extents
            .iter_mut()
            .zip(&all)
            .filter(|(_, pages)| !pages.pins.is_empty())
            .map(|(extent, pages)| Share {
                source: Source::Pins(&pages.pins),
                target: &mut extent.buffer,
                at: VirtualPage::new(pages.first),
            })
            .collect();
        self.pool.share(&mut shares)?;
        for (extent, pages) in self.extents.iter_mut().zip(&all) {
            let end = pages.end() as usize * page;
            (extent.released, extent.sealed, extent.mapped) =
                (pages.first as usize * page, end, end);
        }
        self.note_peak();
        Ok(())
    }

    fn mapped_pages(&self) -> Option<Vec<PageRange>> {
        let mapped = |extent: &Extent| extent.pages(extent.released..extent.mapped);
        let moves = self.moves() && !self.lost_rows;
        moves.then(|| self.extents.iter().map(mapped).collect())
    }

    fn needed_pages(&self, rows: usize) -> Option<Vec<PageRange>> {
        let needed = |extent: &Extent| extent.pages(self.needed(extent, rows));
        let moves = self.moves() && !self.lost_rows;
        moves.then(|| self.extents.iter().map(needed).collect())
    }

    fn buffer_rows(&self) -> &[BufferRows] {
        self.arrangement.buffers()
    }

    fn make_needed(&mut self, rows: usize) -> Result<(), KvError> {
        let extents = self.extents.iter();
        let needed: Vec<_> = extents.map(|extent| self.needed(extent, rows)).collect();
        for (extent, needed) in self.extents.iter_mut().zip(&needed) {
            let start = needed.start;
            (extent.released, extent.sealed, extent.mapped) = (start, start, start);
        }
        self.make_writable(&needed.into_iter().enumerate().collect::<Vec<_>>())
    }

    fn first_pages(&self, row: usize) -> Vec<u64> {
        let page = self.page_bytes();
        let first = |extent: &Extent| match extent.keep {
            Keep::All => self.whole(extent, row).max(extent.released) / page,
            Keep::Window(_) => extent.released / page,
        };
        let first = self.extents.iter().map(first);
        first.map(|page| page as u64).collect()
    }

    fn buffer_mut(&mut self, index: usize) -> Option<&mut Buffer> {
        Some(&mut self.extents.get_mut(index)?.buffer)
    }

    fn come_back(&mut self, groups: &[&Pins], moved: usize, row: usize) -> Result<(), KvError> {
        let (from, to) = (self.first_pages(moved), self.first_pages(row));
        let extents = self.extents.iter_mut().zip(from.iter().zip(&to));
        let mut forgotten: Vec<Pages<'_>> = extents
            .filter(|(_, (from, to))| from < to)
            .map(|(extent, (&from, &to))| Pages::new(&mut extent.buffer, PageRange::of(from..to)))
            .collect();
        if !forgotten.is_empty() {
            let unmapped = self.pool.unmap(&mut forgotten);
            self.note_lost(unmapped)?;
        }
        let extents = 0..self.extents.len();
        let all: Vec<PinnedPages> = extents
            .map(|index| match groups {
                [] => PinnedPages::default(),
                groups => Pins::of_extent(groups, None, index),
            })
            .collect();
        let mut shares: Vec<Share<'_>> = self
            .extents
            .iter_mut()
            .zip(&all)
            .filter(|(_, pages)| !pages.pins.is_empty())
            .map(|(extent, pages)| Share {
                source: Source::Pins(&pages.pins),
                target: &mut extent.buffer,
                at: VirtualPage::new(pages.first),
            })
            .collect();
        if !shares.is_empty() {
            self.pool.share(&mut shares)?;
        }
        let page = self.page_bytes();
        for (extent, first) in self.extents.iter_mut().zip(to) {
            extent.sealed = first as usize * page;
        }
        Ok(())
    }

    fn has_lost_rows(&self) -> bool {
        self.lost_rows
    }

    fn buffers(&self) -> Vec<&Buffer> {
        self.extents.iter().map(|extent| &extent.buffer).collect()
    }

    fn usage(&self) -> Usage {
        let mut usage = Usage {
            peak_committed_bytes: self.peak_committed_bytes,
            copied_bytes: self.copied_bytes,
            zeroed_bytes: self.zeroed_bytes,
            ..Usage::default()
        };
        for extent in &self.extents {
            let ledger = extent.buffer.ledger();
            usage.reserved_bytes += to_usize(ledger.reserved);
            usage.committed_bytes += to_usize(ledger.mapped);
            usage.shared_bytes += to_usize(ledger.shared);
        }
        usage
    }
}
