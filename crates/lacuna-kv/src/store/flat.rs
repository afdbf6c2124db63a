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
//! A page is sealed only when all its rows are accepted, so what is written next is never sealed
//! unless the sequence was truncated into a sealed page; [`FlatStore::prepare`] makes that page
//! writable again, by copying it if another sequence still has it.

use std::ops::Range;

use lacuna_kernels::{Cpu, Run, Runs, View};
use lacuna_pages::device::{Aliasing, Commitment};
use lacuna_pages::{Buffer, ByteLength, PageRange, Pages, Pool, Request, Share, Source};

use super::rows::{Rows, layer_and_side, stream, zeroed_buffer};
use super::{Store, Usage};
use crate::cache::to_usize;
use crate::error::KvError;
use crate::geometry::{Geometry, Layer, Side};
use crate::layout::{Layout, Tiles};

/// When memory is committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Commit {
    /// As rows are prepared.
    OnDemand,
    /// All of it when the store is made, zeroed.
    AtStart,
}

/// The store of `sparse` and `dense`.
#[derive(Debug)]
pub(crate) struct FlatStore {
    pool: Pool,
    geometry: Geometry,
    layout: Layout,
    commit: Commit,
    capacity: usize,
    extents: Vec<Extent>,
    copied_bytes: usize,
    zeroed_bytes: usize,
    peak_committed_bytes: usize,
}

/// One buffer and the state of its pages, all in bytes from its start and at page boundaries.
#[derive(Debug)]
struct Extent {
    buffer: Buffer,
    tiles: Tiles,
    released: usize,
    sealed: usize,
    mapped: usize,
}

impl Extent {
    fn new(
        pool: &Pool,
        tiles: Tiles,
        bytes: usize,
        commit: Commit,
        label: String,
    ) -> Result<Self, KvError> {
        let buffer = match commit {
            Commit::OnDemand => pool.reserve(ByteLength::new(bytes as u64), label)?,
            Commit::AtStart => zeroed_buffer(pool, bytes, label)?,
        };
        Ok(Self {
            tiles,
            released: 0,
            sealed: 0,
            mapped: match commit {
                Commit::OnDemand => 0,
                Commit::AtStart => to_usize(buffer.reserved()),
            },
            buffer,
        })
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
        geometry: Geometry,
        layout: Layout,
        commit: Commit,
        capacity: usize,
    ) -> Result<Self, KvError> {
        geometry.bytes(capacity.max(1))?;
        let commit = match pool.capabilities().commitment {
            Commitment::WithReservation => Commit::AtStart,
            Commitment::PerPage | Commitment::PerHeap => commit,
        };
        let extents = layout.tiles(&geometry).enumerate().map(|(index, tiles)| {
            let bytes = tiles.bytes_through(capacity.max(1));
            Extent::new(pool, tiles, bytes, commit, layout.label(index))
        });
        let mut store = Self {
            pool: pool.clone(),
            geometry,
            layout,
            commit,
            capacity,
            extents: extents.collect::<Result<_, _>>()?,
            copied_bytes: 0,
            zeroed_bytes: 0,
            peak_committed_bytes: 0,
        };
        store.zeroed_bytes = store.extents.iter().map(|extent| extent.mapped).sum();
        store.note_peak();
        Ok(store)
    }

    fn rows(&self, layer: Layer, side: Side) -> (usize, Rows) {
        let place = self.layout.place(&self.geometry, layer, side);
        let tiles = self.extents[place.buffer].tiles;
        (place.buffer, Rows::new(&self.geometry, side, tiles, place))
    }

    fn page_bytes(&self) -> usize {
        to_usize(self.pool.page_size().length())
    }

    /// Puts memory that may be written behind `range` of each buffer, in one batch of those that lack
    /// any. Allocates nothing when none does.
    fn make_writable(
        &mut self,
        range: impl Fn(usize, &Extent) -> Range<usize>,
    ) -> Result<(), KvError> {
        let lacks = |extent: &Extent, range: &Range<usize>| {
            !range.is_empty() && (range.end > extent.mapped || range.start < extent.sealed)
        };
        let mut requests = Vec::new();
        for (index, extent) in self.extents.iter_mut().enumerate() {
            let range = range(index, extent);
            if lacks(extent, &range) {
                requests.push(Request::new(&mut extent.buffer, range));
            }
        }
        if requests.is_empty() {
            return Ok(());
        }
        let report = self.pool.ensure_writable(&mut requests)?;
        let page = self.page_bytes();
        for (index, extent) in self.extents.iter_mut().enumerate() {
            let range = range(index, extent);
            if lacks(extent, &range) {
                extent.mapped = extent.mapped.max(range.end.next_multiple_of(page));
                extent.sealed = extent.sealed.min(range.start / page * page);
            }
        }
        self.copied_bytes += page * report.pages_copied.get() as usize;
        self.note_peak();
        Ok(())
    }

    /// How far the buffer at `index` has memory when `tokens` tokens are prepared.
    fn mapped_bytes(&self, tokens: usize) -> impl Fn(usize, &Extent) -> usize + use<> {
        let (page, count) = (self.page_bytes(), self.extents.len());
        move |index, extent| {
            let bytes = extent.tiles.mapped_bytes(tokens, page, index, count);
            bytes.min(to_usize(extent.buffer.reserved()))
        }
    }

    fn note_peak(&mut self) {
        let committed = self
            .extents
            .iter()
            .map(|extent| extent.mapped - extent.released);
        self.peak_committed_bytes = self.peak_committed_bytes.max(committed.sum());
    }

    /// Detaches `range` of each buffer, in one batch; whole pages, all of them mapped.
    fn unmap(&mut self, range: impl Fn(usize, &Extent) -> Range<usize>) -> Result<(), KvError> {
        let extents = self.extents.iter_mut().enumerate();
        let mut requests: Vec<Pages<'_>> = extents
            .map(|(index, extent)| {
                let range = range(index, extent);
                extent.whole_pages(range)
            })
            .collect();
        Ok(self.pool.unmap(&mut requests)?)
    }

    /// Whether pages are attached and detached at all.
    fn moves(&self) -> bool {
        self.commit == Commit::OnDemand
    }

    /// Maps the pages of `copy` that hold only rows before `end` to the same memory as this store's.
    fn share(&mut self, copy: &mut Self, end: usize) -> Result<(), KvError> {
        let page = self.page_bytes();
        let whole = |extent: &Extent| {
            let end = extent.tiles.bytes_before(end) / page * page;
            extent.released..end.max(extent.released)
        };
        let extents = self.extents.iter_mut();
        let mut unsealed: Vec<Pages<'_>> = extents
            .map(|extent| {
                let range = whole(extent);
                extent.whole_pages(extent.sealed.clamp(range.start, range.end)..range.end)
            })
            .collect();
        self.pool.seal(&mut unsealed)?;
        for extent in &mut self.extents {
            extent.sealed = extent.sealed.max(whole(extent).end);
        }
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
        let mapped = copy.mapped_bytes(end);
        copy.make_writable(|index, extent| own(extent)..mapped(index, extent))?;
        for (from, to) in self.extents.iter().zip(&mut copy.extents) {
            let start = own(to);
            let end = from.tiles.bytes_through(end).max(start);
            to.buffer
                .bytes_mut(start..end)?
                .copy_from_slice(from.buffer.bytes(start..end)?);
            copy.copied_bytes += end - start;
        }
        Ok(())
    }
}

impl Runs for FlatStore {
    fn run(&self, stream: usize, row: usize) -> Run<'_> {
        let (layer, side) = layer_and_side(stream);
        let (extent, place) = self.rows(layer, side);
        place.run(&self.extents[extent].buffer, row)
    }
}

impl Store for FlatStore {
    fn prepare(&mut self, rows: Range<usize>) -> Result<(), KvError> {
        if rows.is_empty() {
            return Ok(());
        }
        let start = |extent: &Extent| extent.tiles.bytes_before(rows.start);
        let mapped = self.mapped_bytes(rows.end);
        let ahead = self.make_writable(|index, extent| start(extent)..mapped(index, extent));
        // What is mapped ahead must not cost a token its place.
        ahead.or_else(|_| {
            self.make_writable(|_, extent| start(extent)..extent.tiles.bytes_through(rows.end))
        })
    }

    fn write(&mut self, cpu: &Cpu, layer: Layer, side: Side, start: usize, rows: &[f32]) {
        let (extent, place) = self.rows(layer, side);
        place.write(cpu, &mut self.extents[extent].buffer, start, rows);
    }

    fn view(&self, layer: Layer, side: Side, rows: Range<usize>) -> View<'_> {
        let (extent, place) = self.rows(layer, side);
        match self.layout.tile_tokens() {
            1 => place.view(&self.extents[extent].buffer, rows),
            _ => View::gather(place.layout(), rows, self, stream(layer, side)),
        }
    }

    fn truncate(&mut self, end: usize) -> Result<(), KvError> {
        let (page, mapped) = (self.page_bytes(), self.mapped_bytes(end));
        let keep = |index, extent: &Extent| {
            let needed = extent.tiles.bytes_through(end).next_multiple_of(page);
            let end = match extent.sealed > needed {
                // A sealed page is no page mapped ahead: it could not be written.
                true => needed,
                false => mapped(index, extent),
            };
            end.max(extent.released).min(extent.mapped)
        };
        let spare = |(index, extent): (usize, &Extent)| keep(index, extent) < extent.mapped;
        if !self.moves() || !self.extents.iter().enumerate().any(spare) {
            return Ok(());
        }
        self.unmap(|index, extent| keep(index, extent)..extent.mapped)?;
        for (index, extent) in self.extents.iter_mut().enumerate() {
            extent.mapped = keep(index, extent);
            extent.sealed = extent.sealed.min(extent.mapped);
        }
        Ok(())
    }

    fn release_before(&mut self, start: usize) -> Result<(), KvError> {
        let page = self.page_bytes();
        let keep = |extent: &Extent| {
            let start = extent.tiles.bytes_before(start) / page * page;
            start.max(extent.released)
        };
        if !self.moves()
            || self
                .extents
                .iter()
                .all(|extent| keep(extent) == extent.released)
        {
            return Ok(());
        }
        self.unmap(|_, extent| extent.released..keep(extent))?;
        for extent in &mut self.extents {
            extent.released = keep(extent);
            extent.sealed = extent.sealed.max(extent.released);
        }
        Ok(())
    }

    fn clear(&mut self) -> Result<(), KvError> {
        if self.moves() {
            self.unmap(|_, extent| extent.released..extent.mapped)?;
            for extent in &mut self.extents {
                (extent.released, extent.sealed, extent.mapped) = (0, 0, 0);
            }
        }
        Ok(())
    }

    fn duplicate(&mut self, rows: Range<usize>) -> Result<Box<dyn Store>, KvError> {
        let mut copy = Self::new(
            &self.pool,
            self.geometry,
            self.layout,
            self.commit,
            self.capacity,
        )?;
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
