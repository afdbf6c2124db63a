//! Buffers in one piece that are replaced by longer ones when they are full: every row is copied.

use std::ops::Range;

use lacuna_kernels::View;
use lacuna_pages::device::Location;
use lacuna_pages::{Buffer, Pool};

use super::rows::{Rows, zeroed_buffer};
use super::{Store, Usage, Useful, WriteRun};
use crate::cache::to_usize;
use crate::error::KvError;
use crate::geometry::{Layer, Side};
use crate::growth::GrowthSchedule;
use crate::layout::{Arrangement, BufferRows};

/// The store of `grow`.
#[derive(Debug)]
pub(crate) struct GrowStore {
    pool: Pool,
    arrangement: Arrangement,
    schedule: GrowthSchedule,
    capacity: usize,
    /// K and V of layer 0, then of layer 1, and so on.
    pieces: Vec<Piece>,
    usage: Usage,
}

/// One side of one layer.
#[derive(Debug)]
struct Piece {
    held: BufferRows,
    /// None before the first row.
    buffer: Option<Buffer>,
    cells: usize,
}

impl Piece {
    fn committed(&self) -> usize {
        self.buffer.as_ref().map_or(0, committed)
    }

    /// The bytes of the first `rows` rows.
    fn rows(&self, rows: usize) -> &[u8] {
        match &self.buffer {
            Some(buffer) => buffer
                .bytes(0..self.held.bytes(rows))
                .expect("a piece has memory throughout"),
            None => &[],
        }
    }
}

fn committed(buffer: &Buffer) -> usize {
    to_usize(buffer.reserved())
}

impl GrowStore {
    pub(crate) fn new(
        pool: &Pool,
        arrangement: &Arrangement,
        schedule: GrowthSchedule,
        capacity: usize,
    ) -> Result<Self, KvError> {
        arrangement.geometry().bytes(capacity)?;
        let pieces = arrangement.buffers().iter().map(|&held| Piece {
            held,
            buffer: None,
            cells: 0,
        });
        Ok(Self {
            pool: pool.clone(),
            arrangement: arrangement.clone(),
            schedule,
            capacity,
            pieces: pieces.collect(),
            usage: Usage::default(),
        })
    }

    /// A longer buffer for `piece`, counted beside everything held and `besides`.
    fn longer(&mut self, piece: usize, cells: usize, besides: usize) -> Result<Buffer, KvError> {
        let held = &self.pieces[piece].held;
        let buffer = zeroed_buffer(&self.pool, (Location::Own, held.bytes(cells)), held.label())?;
        let new = committed(&buffer);
        let held: usize = self.pieces.iter().map(Piece::committed).sum();
        let usage = &mut self.usage;
        usage.zeroed_bytes += new;
        usage.peak_committed_bytes = usage.peak_committed_bytes.max(held + besides + new);
        Ok(buffer)
    }

    /// Replaces every piece in turn, so that only one exists twice at a time.
    fn replace_in_turn(&mut self, rows: &Range<usize>, cells: usize) -> Result<(), KvError> {
        for index in 0..self.pieces.len() {
            if self.pieces[index].cells >= rows.end {
                continue;
            }
            let mut buffer = self.longer(index, cells, 0)?;
            let piece = &mut self.pieces[index];
            let old = piece.rows(rows.start);
            buffer.bytes_mut(0..old.len())?.copy_from_slice(old);
            self.usage.copied_bytes += old.len();
            (piece.buffer, piece.cells) = (Some(buffer), cells);
        }
        Ok(())
    }

    /// Fills a second cache of `cells` beside the first, piece by piece through a staging buffer.
    fn replace_all(&mut self, rows: &Range<usize>, cells: usize) -> Result<(), KvError> {
        let largest = self
            .pieces
            .iter()
            .map(|piece| piece.rows(rows.start).len())
            .max();
        let mut staging = match largest.unwrap_or(0) {
            0 => None,
            bytes => Some(zeroed_buffer(
                &self.pool,
                (Location::Own, bytes),
                "staging".to_owned(),
            )?),
        };
        let mut besides = staging.as_ref().map_or(0, committed);
        let mut longer = Vec::with_capacity(self.pieces.len());
        for index in 0..self.pieces.len() {
            let buffer = self.longer(index, cells, besides)?;
            besides += committed(&buffer);
            longer.push(buffer);
        }
        for (piece, mut buffer) in self.pieces.iter_mut().zip(longer) {
            if let Some(staging) = &mut staging {
                let old = piece.rows(rows.start);
                let staged = staging.bytes_mut(0..old.len())?;
                staged.copy_from_slice(old);
                buffer.bytes_mut(0..staged.len())?.copy_from_slice(staged);
                self.usage.copied_bytes += staged.len();
            }
            (piece.buffer, piece.cells) = (Some(buffer), cells);
        }
        Ok(())
    }
}

impl Store for GrowStore {
    fn prepare(&mut self, rows: Range<usize>) -> Result<(), KvError> {
        let cells = self
            .pieces
            .iter()
            .map(|piece| piece.cells)
            .min()
            .unwrap_or(0);
        if rows.end <= cells {
            return Ok(());
        }
        let (capacity, cell_bytes) = (self.capacity, self.arrangement.geometry().bytes_per_token());
        let wanted = self
            .schedule
            .cells(cells, rows.clone(), capacity, cell_bytes);
        match self.schedule {
            GrowthSchedule::Mlx => self.replace_in_turn(&rows, wanted)?,
            GrowthSchedule::DoubleLinear { .. } => self.replace_all(&rows, wanted)?,
        }
        self.usage.resizes += usize::from(cells > 0);
        Ok(())
    }

    fn write(&mut self, layer: Layer, side: Side, rows: Range<usize>, write: &mut WriteRun<'_>) {
        let (piece, place) = Rows::of(&self.arrangement, layer, side);
        if let Some(buffer) = &mut self.pieces[piece].buffer {
            place.write(buffer, rows, write);
        }
    }

    fn view(&self, layer: Layer, side: Side, rows: Range<usize>) -> View<'_> {
        let (piece, place) = Rows::of(&self.arrangement, layer, side);
        match &self.pieces[piece].buffer {
            Some(buffer) => place.view(buffer, rows),
            None => place.empty(),
        }
    }

    /// Memory stays: a piece never gets shorter.
    fn truncate(&mut self, _: usize) -> Result<(), KvError> {
        Ok(())
    }

    /// Memory stays: a piece begins with row 0.
    fn release(&mut self, _: Useful) -> Result<(), KvError> {
        Ok(())
    }

    /// Memory stays, for the rows to come.
    fn clear(&mut self) -> Result<(), KvError> {
        Ok(())
    }

    fn duplicate(&mut self, rows: Range<usize>) -> Result<Box<dyn Store>, KvError> {
        let mut copy = Self::new(&self.pool, &self.arrangement, self.schedule, self.capacity)?;
        copy.prepare(0..rows.end)?;
        for (from, to) in self.pieces.iter().zip(&mut copy.pieces) {
            let held = from.rows(rows.end);
            if let Some(buffer) = &mut to.buffer {
                buffer.bytes_mut(0..held.len())?.copy_from_slice(held);
                copy.usage.copied_bytes += held.len();
            }
        }
        Ok(Box::new(copy))
    }

    fn buffers(&self) -> Vec<&Buffer> {
        let buffers = self.pieces.iter().map(|piece| piece.buffer.as_ref());
        buffers.flatten().collect()
    }

    fn usage(&self) -> Usage {
        let committed_bytes = self.pieces.iter().map(Piece::committed).sum();
        Usage {
            reserved_bytes: committed_bytes,
            committed_bytes,
            ..self.usage
        }
    }
}
