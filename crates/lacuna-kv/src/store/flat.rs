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
    /// Rows before this one have memory in every buffer.
    mapped_rows: usize,
    /// Rows from this one on have no byte in a sealed page.
    writable_from: usize,
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
            mapped_rows: 0,
            writable_from: 0,
            copied_bytes: 0,
            zeroed_bytes: 0,
            peak_committed_bytes: 0,
        };
        store.zeroed_bytes = store.extents.iter().map(|extent| extent.mapped).sum();
        store.count_rows();
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

    /// Puts memory that may be written behind `range` of each buffer, in one batch.
    fn make_writable(&mut self, range: impl Fn(&Extent) -> Range<usize>) -> Result<(), KvError> {
        let page = self.page_bytes();
        let extents = self.extents.iter_mut();
        let mut requests: Vec<Request<'_>> = extents
            .map(|extent| {
                let range = range(extent);
                Request::new(&mut extent.buffer, range)
            })
            .collect();
        let report = self.pool.ensure_writable(&mut requests)?;
        let written: Vec<_> = requests.iter().map(|request| request.range).collect();
        for (extent, range) in self.extents.iter_mut().zip(written) {
            let (start, end) = (range.start as usize, range.end as usize);
            extent.mapped = extent.mapped.max(end.next_multiple_of(page));
            extent.sealed = extent.sealed.min(start / page * page);
        }
        self.copied_bytes += page * report.pages_copied.get() as usize;
        Ok(())
    }

    /// Works out which rows can be written without asking the pool, and the most memory held.
    fn count_rows(&mut self) {
        let committed = self
            .extents
            .iter()
            .map(|extent| extent.mapped - extent.released);
        self.peak_committed_bytes = self.peak_committed_bytes.max(committed.sum());
        let mapped = self
            .extents
            .iter()
            .map(|extent| extent.tiles.tokens_within(extent.mapped));
        self.mapped_rows = mapped.min().unwrap_or(0);
        let sealed = self
            .extents
            .iter()
            .map(|extent| extent.tiles.tokens_touching(extent.sealed));
        self.writable_from = sealed.max().unwrap_or(0);
    }

    /// Detaches `range` of each buffer, in one batch; whole pages, all of them mapped.
    fn unmap(&mut self, range: impl Fn(&Extent) -> Range<usize>) -> Result<(), KvError> {
        let extents = self.extents.iter_mut();
        let mut requests: Vec<Pages<'_>> = extents
            .map(|extent| {
                let range = range(extent);
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
        self.count_rows();
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
        copy.make_writable(|extent| own(extent)..extent.tiles.bytes_through(end).max(own(extent)))?;
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
        let there = rows.end <= self.mapped_rows && rows.start >= self.writable_from;
        if there || rows.is_empty() {
            return Ok(());
        }
        self.make_writable(|extent| {
            extent.tiles.bytes_before(rows.start)..extent.tiles.bytes_through(rows.end)
        })?;
        self.count_rows();
        Ok(())
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
        let page = self.page_bytes();
        let keep = |extent: &Extent| {
            let end = extent.tiles.bytes_through(end).next_multiple_of(page);
            end.max(extent.released).min(extent.mapped)
        };
        if !self.moves()
            || self
                .extents
                .iter()
                .all(|extent| keep(extent) == extent.mapped)
        {
            return Ok(());
        }
        self.unmap(|extent| keep(extent)..extent.mapped)?;
        for extent in &mut self.extents {
            extent.mapped = keep(extent);
            extent.sealed = extent.sealed.min(extent.mapped);
        }
        self.count_rows();
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
        self.unmap(|extent| extent.released..keep(extent))?;
        for extent in &mut self.extents {
            extent.released = keep(extent);
            extent.sealed = extent.sealed.max(extent.released);
        }
        self.count_rows();
        Ok(())
    }

    fn clear(&mut self) -> Result<(), KvError> {
        if self.moves() {
            self.unmap(|extent| extent.released..extent.mapped)?;
            for extent in &mut self.extents {
                (extent.released, extent.sealed, extent.mapped) = (0, 0, 0);
            }
            self.count_rows();
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
        copy.count_rows();
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
