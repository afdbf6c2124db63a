//! Rows in a buffer: taking memory for them, writing them, lending them out.

use std::ops::Range;

use lacuna_kernels::{RowLayout, Run, RunMut, View};
use lacuna_pages::device::{Commitment, Location};
use lacuna_pages::{Buffer, ByteLength, Pool};

use crate::cache::to_usize;
use crate::error::KvError;
use crate::geometry::{Layer, Side};
use crate::layout::{Arrangement, Place, Tiles};
use crate::store::{DeviceRows, WriteRun};

/// A buffer of at least `bytes` with memory of one kind behind all of it, which reads as zeros: what an
/// allocator would give.
pub(crate) fn zeroed_buffer(
    pool: &Pool,
    (location, bytes): (Location, usize),
    label: String,
) -> Result<Buffer, KvError> {
    let mut buffer = pool.reserve_at(location, ByteLength::new(bytes as u64), label)?;
    if pool.capabilities().commitment != Commitment::WithReservation {
        let all = 0..to_usize(buffer.reserved());
        buffer.ensure_mapped(all.clone())?;
        // By copies, as the host cannot reach the memory of every device.
        let zeros = vec![0; all.len().min(1 << 20)];
        for start in all.step_by(zeros.len().max(1)) {
            let end = to_usize(buffer.reserved()).min(start + zeros.len());
            buffer.write(start as u64, &zeros[..end - start])?;
        }
    }
    Ok(buffer)
}

/// What a view calls the rows of one side of one layer when it asks where they lie.
pub(super) fn stream(layer: Layer, side: Side) -> usize {
    2 * layer.0 + usize::from(side == Side::Value)
}

/// What [`stream`] was made from.
pub(super) fn layer_and_side(stream: usize) -> (Layer, Side) {
    (Layer(stream / 2), Side::BOTH[stream % 2])
}

/// Rows of one side of one layer in a buffer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rows {
    tiles: Tiles,
    place: Place,
}

impl Rows {
    /// The rows that one side of `layer` reads, and the buffer they are in.
    pub(super) fn of(arrangement: &Arrangement, layer: Layer, side: Side) -> (usize, Self) {
        let place = arrangement.place(layer, side);
        let tiles = arrangement.buffers()[place.buffer].tiles;
        (place.buffer, Self { tiles, place })
    }

    /// Lends `rows`, which memory is behind, to `write`: one run, or one for each tile of several tokens.
    pub(super) fn write(&self, buffer: &mut Buffer, rows: Range<usize>, write: &mut WriteRun<'_>) {
        let Range { start, end } = rows;
        let bytes = buffer
            .bytes_mut(self.tiles.bytes_before(start)..self.tiles.bytes_through(end))
            .expect("rows that are prepared have memory");
        let layout = self.place.layout;
        if self.tiles.tokens == 1 {
            let bytes = &mut bytes[self.place.offset..];
            let rows = 0..rows.len();
            return write(RunMut {
                layout,
                rows,
                bytes,
            });
        }
        let mut row = start;
        for tile in bytes.chunks_exact_mut(self.tiles.bytes) {
            let first = row % self.tiles.tokens;
            let next = end.min(row - first + self.tiles.tokens);
            let bytes = &mut tile[self.place.offset + first * layout.row_stride..];
            let rows = row - start..next - start;
            write(RunMut {
                layout,
                rows,
                bytes,
            });
            row = next;
        }
    }

    /// Where a device has the rows, if they lie at equal distances.
    pub(super) fn on_device(&self, buffer: &Buffer) -> Option<DeviceRows> {
        (self.tiles.tokens == 1).then(|| DeviceRows {
            address: buffer.address(self.place.offset as u64),
            layout: self.place.layout,
        })
    }

    /// Where the elements of a row lie in a run.
    pub(super) fn layout(&self) -> RowLayout {
        self.place.layout
    }

    /// Lends out `rows`, which are one run: tiles of one token lie at equal distances.
    pub(super) fn view<'a>(&self, buffer: &'a Buffer, rows: Range<usize>) -> View<'a> {
        let bytes = buffer
            .bytes(self.tiles.bytes_before(rows.start)..self.tiles.bytes_through(rows.end))
            .expect("rows that are held have memory");
        self.one_run(bytes, rows)
    }

    /// No rows, where there is no buffer yet.
    pub(super) fn empty<'a>(&self) -> View<'a> {
        self.one_run(&[], 0..0)
    }

    fn one_run<'a>(&self, bytes: &'a [u8], rows: Range<usize>) -> View<'a> {
        let run = Run {
            start_row: rows.start,
            rows: rows.len(),
            bytes: bytes.get(self.place.offset..).unwrap_or_default(),
        };
        View::from_runs(self.place.layout, run, &[]).expect("rows lie a tile apart")
    }

    /// The run of the tile that holds `row`.
    pub(super) fn run<'a>(&self, buffer: &'a Buffer, row: usize) -> Run<'a> {
        let start = self.tiles.bytes_before(row);
        let bytes = buffer
            .bytes(start..start + self.tiles.bytes)
            .expect("rows that are held have memory");
        Run {
            start_row: row - row % self.tiles.tokens,
            rows: self.tiles.tokens,
            bytes: &bytes[self.place.offset..],
        }
    }
}
