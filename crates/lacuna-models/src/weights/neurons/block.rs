//! The columns of a matrix, and what lies beside each: where they are in the file, which are read together, and the slots of
//! those that stay.

use std::ops::Range;

use lacuna_files::reader::{Buffer, Extent};
use lacuna_kernels::ColumnLayout;

use super::super::rows::Slot;
use crate::plan::{NeuronLayout, NeuronLru, RUN_BYTES};

/// Slots are parts of pieces of memory of about so many bytes, which go back to the system as there are fewer: a huge page,
/// where there are as many.
const CHUNK_BYTES: usize = 2 << 20;

/// The columns of a matrix.
#[derive(Debug)]
pub(super) struct Block {
    /// The matrix, for errors.
    pub(super) name: String,
    pub(super) extent: Extent,
    pub(super) layout: NeuronLayout,
    pub(super) scales: Vec<u8>,
    pub(super) lru: NeuronLru,
    /// Memory of slots, as many in each piece as it holds.
    pub(super) chunks: Vec<Buffer>,
}

/// Columns side by side that are read together.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) columns: Range<u32>,
    /// `None` before it is asked for, and when it is over.
    pub(super) slot: Option<Slot>,
}

impl Block {
    /// The bytes of a column, in the file of columns.
    pub(super) fn offset(&self, column: u32) -> u64 {
        self.extent.range.start + u64::from(column) * self.layout.bytes() as u64
    }

    pub(super) fn extent(&self, run: &Run) -> Extent {
        Extent {
            file: self.extent.file.clone(),
            range: self.offset(run.columns.start)..self.offset(run.columns.end),
        }
    }

    /// Bytes that reading a run takes.
    pub(super) fn run_bytes(&self, run: &Run) -> u64 {
        self.extent(run).buffer_bytes() as u64
    }

    /// Adds a column to what is read, in a run of its own or where that reads no page that would not be read anyway.
    /// Returns which.
    pub(super) fn join(&self, column: u32, runs: &mut Vec<Run>) -> usize {
        const PAGE: u64 = 4096;
        let section = |column: u32| column as usize / ColumnLayout::SECTION;
        if let Some(last) = runs.last_mut() {
            let (start, end) = (
                self.offset(last.columns.start),
                self.offset(last.columns.end),
            );
            let beside = self.offset(column) / PAGE <= end.div_ceil(PAGE);
            let short = self.offset(column + 1) - start <= RUN_BYTES;
            if beside && short && section(last.columns.start) == section(column) {
                last.columns.end = column + 1;
                return runs.len() - 1;
            }
        }
        runs.push(Run {
            columns: column..column + 1,
            slot: None,
        });
        runs.len() - 1
    }

    /// The bytes of a column in what was read with it.
    pub(super) fn in_run<'a>(&self, run: &'a Run, column: u32) -> &'a [u8] {
        let Some(Slot::Read(bytes)) = &run.slot else {
            unreachable!("what is lent has been read")
        };
        let each = self.layout.bytes();
        &bytes[(column - run.columns.start) as usize * each..][..each]
    }

    /// Slots of a chunk.
    pub(super) fn chunk_slots(&self) -> usize {
        (CHUNK_BYTES / self.layout.bytes()).max(1)
    }

    /// Where a slot is: in which chunk, and which bytes of it.
    pub(super) fn place(&self, slot: u32) -> (usize, Range<usize>) {
        let (slot, each) = (slot as usize, self.layout.bytes());
        let start = slot % self.chunk_slots() * each;
        (slot / self.chunk_slots(), start..start + each)
    }

    /// The chunks that `slots` slots take beyond those that are full already.
    pub(super) fn more_chunks(&self, slots: usize) -> std::io::Result<Vec<Buffer>> {
        let (slots, each) = (slots.min(self.layout.neurons()), self.chunk_slots());
        if slots == self.lru.len() {
            return Ok(Vec::new());
        }
        let full = self.lru.len().min(slots) / each;
        let starts = (full * each..slots).step_by(each);
        let sizes = starts.map(|start| each.min(slots - start) * self.layout.bytes());
        sizes.map(Buffer::new).collect()
    }

    /// Has `slots` slots from now on, with `more` chunks that were made for as many.
    pub(super) fn resize(&mut self, slots: usize, more: Vec<Buffer>) {
        let slots = slots.min(self.layout.neurons());
        if slots == self.lru.len() {
            return;
        }
        let full = self.lru.len().min(slots) / self.chunk_slots();
        // What is in a chunk that is not full is read again.
        self.lru.resize(full * self.chunk_slots());
        self.lru.resize(slots);
        self.chunks.truncate(full);
        self.chunks.extend(more);
    }
}
