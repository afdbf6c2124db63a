//! Rows in a buffer: taking memory for them, writing them, lending them out.

use std::ops::Range;

use lacuna_kernels::{Cpu, Run, View};
use lacuna_pages::device::Commitment;
use lacuna_pages::{Buffer, ByteLength, Pool};

use crate::cache::to_usize;
use crate::error::KvError;
use crate::geometry::{Geometry, Side};
use crate::layout::{Place, Tiles};

/// A buffer of at least `bytes` with memory behind all of it, which reads as zeros: what an
/// allocator would give.
pub(super) fn zeroed_buffer(pool: &Pool, bytes: usize, label: String) -> Result<Buffer, KvError> {
    let mut buffer = pool.reserve(ByteLength::new(bytes as u64), label)?;
    if pool.capabilities().commitment != Commitment::WithReservation {
        let all = 0..to_usize(buffer.reserved());
        buffer.ensure_mapped(all.clone())?;
        buffer.bytes_mut(all)?.fill(0);
    }
    Ok(buffer)
}

/// Rows of one side of one layer in a buffer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rows {
    pub(super) geometry: Geometry,
    pub(super) side: Side,
    pub(super) tiles: Tiles,
    /// Where the layer's rows begin in a tile.
    pub(super) offset: usize,
}

impl Rows {
    pub(super) fn new(geometry: &Geometry, side: Side, tiles: Tiles, place: Place) -> Self {
        Self {
            geometry: *geometry,
            side,
            tiles,
            offset: place.offset,
        }
    }

    /// Writes `rows` from row `start` on, which memory is behind.
    pub(super) fn write(&self, cpu: &Cpu, buffer: &mut Buffer, start: usize, rows: &[f32]) {
        let element = self.geometry.element(self.side);
        let width = self.geometry.row_elements();
        let row_bytes = self.geometry.row_bytes(self.side);
        let end = start + rows.len() / width;
        let bytes = buffer
            .bytes_mut(self.tiles.bytes_before(start)..self.tiles.bytes_through(end))
            .expect("rows that are prepared have memory");
        if self.tiles.bytes == row_bytes {
            return cpu.store_rows(element, bytes, rows);
        }
        let tiles = bytes.chunks_exact_mut(self.tiles.bytes);
        for (tile, row) in tiles.zip(rows.chunks_exact(width)) {
            cpu.store_rows(element, &mut tile[self.offset..][..row_bytes], row);
        }
    }

    /// Lends `rows` out.
    pub(super) fn view<'a>(&self, buffer: &'a Buffer, rows: Range<usize>) -> View<'a> {
        let bytes = buffer
            .bytes(self.tiles.bytes_before(rows.start)..self.tiles.bytes_through(rows.end))
            .expect("rows that are held have memory");
        self.lend(bytes, rows)
    }

    /// No rows, where there is no buffer yet.
    pub(super) fn empty<'a>(&self) -> View<'a> {
        self.lend(&[], 0..0)
    }

    fn lend<'a>(&self, bytes: &'a [u8], rows: Range<usize>) -> View<'a> {
        let run = Run {
            start_row: 0,
            rows: rows.len(),
            bytes: bytes.get(self.offset..).unwrap_or_default(),
        };
        let element = self.geometry.element(self.side);
        View::from_runs(
            element,
            self.geometry.row_elements(),
            self.tiles.bytes,
            run,
            &[],
        )
        .expect("rows lie a tile apart")
    }
}
