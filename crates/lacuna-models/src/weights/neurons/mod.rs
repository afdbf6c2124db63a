//! Neurons of feed-forward blocks that come to memory as activations turn out not to be zero.
//!
//! `down` is multiplied with activations of which most are exactly zero, and its columns there add nothing. They lie one
//! after another in a file of their own (`columns.rs`), and where gates decide, each with the row of `up` that makes its
//! activation. When activations, or gates, are known, the columns that are needed and not in a slot are asked for, all at once as far as a ring has room, and multiplied with in ascending order, section by
//! section; then they get slots of those that were used longest ago. Sums have the order of the whole matrix's
//! product, so results do not depend on any of it.
//!
//! Where there is a predictor of a block, what it names is asked for before that, while what makes the activations is
//! computed (`ahead.rs`).
//!
//! What a read is still filling belongs to the reader. One that fails is an error of the pass, and the next pass asks
//! anew.

mod ahead;
mod block;
mod reads;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use lacuna_files::reader::{Buffer, FileReader, Finished, Ring};
use lacuna_files::{Tensor, Tensors};
use lacuna_kernels::{ColumnLayout, Columns, Cpu, Matrix};

use self::ahead::Ahead;
use self::block::{Block, Run};
use super::columns::{neurons_name, scales_name};
use super::fetch::Files;
use super::rows::Slot;
use crate::error::{ForwardError, LoadError, UnreadableWeights};
use crate::plan::{NeuronLayout, NeuronLru, NeuronSlots, NeuronUse};
use crate::program::{MatrixId, VectorId};

pub(super) use reads::Counters;
pub use reads::NeuronReads;

/// The neurons of all blocks that have files of them. One pass has them at a time.
#[derive(Debug)]
pub(crate) struct Neurons {
    reader: FileReader,
    ring: Ring,
    blocks: Vec<Block>,
    /// The block of a matrix of the program.
    block_of: HashMap<usize, usize>,
    turn: Turn,
    /// What is foretold of the next block, where there are predictors.
    ahead: Option<Ahead>,
    /// By column of the widest matrix, whether a pass needs it: false between turns.
    needed: Vec<bool>,
    /// Rows that are brought together to be multiplied with.
    gathered: Vec<u8>,
    counters: Arc<Counters>,
}

/// Another number of slots, and what memory it takes beyond what there is, by block.
#[derive(Debug)]
pub(super) struct MoreSlots {
    slots: usize,
    chunks: Vec<Vec<Buffer>>,
}

/// A product under way.
#[derive(Debug, Default)]
struct Turn {
    block: usize,
    /// The columns that are needed, in ascending order, and where each is.
    columns: Vec<u32>,
    places: Vec<Place>,
    /// What is read, in ascending order; none reaches over the end of a section.
    runs: Vec<Run>,
    /// How many of them have been asked for.
    begun: usize,
    /// What is computed with: columns of the matrix, some of `columns`, and some of `runs`. All before is over.
    lent: Lent,
}

/// A part of a turn.
#[derive(Debug, Clone, Default)]
pub(crate) struct Lent {
    /// Of the matrix's columns.
    pub(crate) range: Range<usize>,
    /// Of those that are needed.
    needed: Range<usize>,
    runs: Range<usize>,
}

#[derive(Debug, Clone, Copy)]
enum Place {
    Slot(u32),
    Run(usize),
    /// A run that was asked for ahead of time.
    Ahead(usize),
}

impl Neurons {
    /// Those of `uses`, none of them in memory.
    ///
    /// # Errors
    /// When their scales cannot be read, or there is no memory for the ring.
    pub(super) fn new(
        files: &Files,
        mut reader: FileReader,
        (columns, predictors): (&Tensors, Option<&Tensors>),
        uses: &[NeuronUse],
        counters: Arc<Counters>,
    ) -> Result<Self, LoadError> {
        let blocks = uses.iter().map(|of| {
            let tensor = columns.require(&neurons_name(of))?;
            let extent = files.extent(&tensor, 0..tensor.file_range().len());
            let scales = columns.get(&scales_name(&of.name))?;
            let scales = scales.map(|scales| read_whole(&mut reader, files, &scales));
            Ok(Block {
                name: of.name.clone(),
                extent: extent.ok_or_else(not_a_file)?,
                layout: of.layout,
                scales: scales.transpose()?.unwrap_or_default(),
                lru: NeuronLru::new(0, of.neurons()),
                chunks: Vec::new(),
            })
        });
        let blocks = blocks.collect::<Result<Vec<_>, LoadError>>()?;
        let widest = uses.iter().map(NeuronUse::neurons).max().unwrap_or(0);
        let ring = |bytes| Ring::new(bytes as usize).map_err(LoadError::Reading);
        let predictors = predictors.filter(|_| uses.iter().any(|of| of.predictor.is_some()));
        let ahead = predictors.map(|tensors| {
            let mut read = |tensor: &Tensor| read_whole(&mut reader, files, tensor);
            let ring = ring(NeuronSlots::ahead_bytes(uses))?;
            Ahead::new(ring, tensors, uses, &mut read)
        });
        let ahead = ahead.transpose()?;
        let numbered = uses.iter().enumerate();
        Ok(Self {
            reader,
            ring: ring(NeuronSlots::ring_bytes(uses))?,
            blocks,
            block_of: numbered.map(|(block, of)| (of.matrix, block)).collect(),
            turn: Turn::default(),
            ahead,
            needed: vec![false; widest],
            gathered: vec![0; NeuronSlots::gathered_bytes(uses) as usize],
            counters,
        })
    }

    /// Whether the columns of a matrix are had here.
    pub(crate) fn has(&self, MatrixId(matrix): MatrixId) -> bool {
        self.block_of.contains_key(&matrix)
    }

    /// Whether what is multiplied with the gates before a matrix lies beside its columns.
    pub(crate) fn has_rows(&self, MatrixId(matrix): MatrixId) -> bool {
        let block = self.block_of.get(&matrix);
        block.is_some_and(|block| self.blocks[*block].layout.rows.is_some())
    }

    /// Address space for as many slots in each block, which takes no memory yet.
    ///
    /// # Errors
    /// When there is none.
    pub(super) fn room_for(&self, slots: usize) -> std::io::Result<MoreSlots> {
        let more = self.blocks.iter().map(|block| block.more_chunks(slots));
        let chunks = more.collect::<std::io::Result<_>>()?;
        Ok(MoreSlots { slots, chunks })
    }

    /// Changes how many slots each block has; memory of those that go is given back at once.
    pub(super) fn resize(&mut self, MoreSlots { slots, chunks }: MoreSlots) {
        self.settle();
        for (block, more) in self.blocks.iter_mut().zip(chunks) {
            block.resize(slots, more);
        }
    }

    /// Ends what a pass has left in the middle.
    pub(super) fn settle(&mut self) {
        self.reader.abandon();
        self.turn = Turn::default();
        if let Some(ahead) = &mut self.ahead {
            ahead.forget();
        }
    }

    /// Whether a block is foretold from what a norm leaves, in a pass of so many rows.
    pub(crate) fn predicts(&self, VectorId(norm): VectorId, rows: usize) -> bool {
        let ahead = self.ahead.as_ref();
        ahead.is_some_and(|ahead| ahead.predicts(norm, rows))
    }

    /// Asks for those columns of the next block that are likely to be needed and have no slot: `x`, rows of what the norm has
    /// left.
    ///
    /// # Panics
    /// For a norm that nothing is foretold from.
    pub(crate) fn expect(&mut self, cpu: &Cpu, VectorId(norm): VectorId, x: &[f32]) {
        // What an earlier block was asked for in vain gives its place in the ring back.
        self.advance();
        let ahead = self.ahead.as_mut().expect("whoever calls has seen it");
        let read = ahead.begin(cpu, norm, x, &self.blocks, &mut self.reader);
        self.counters.read_bytes.add(read);
    }

    /// Takes what has been read by now, so that the reader goes on with what waits.
    pub(crate) fn advance(&mut self) {
        if self.ahead.as_ref().is_some_and(Ahead::is_reading) {
            while let Some(finished) = self.reader.poll() {
                self.take(finished);
            }
        }
    }

    /// Enters what has been read; what was foretold of an earlier block is dropped.
    fn take(&mut self, Finished { number, result }: Finished) {
        let runs = match ahead::turn_and_run(number) {
            (0, run) => self.turn.runs.get_mut(run),
            (turn, run) => self.ahead.as_mut().and_then(|ahead| ahead.run(turn, run)),
        };
        if let Some(run) = runs {
            run.slot = Some(result.into());
        }
    }

    /// Begins the product of a matrix with `x`, rows of activations: finds out which columns it takes, and asks for those
    /// that are not there.
    ///
    /// # Panics
    /// For a matrix whose columns are not had here.
    pub(crate) fn begin(&mut self, MatrixId(matrix): MatrixId, x: &[f32]) {
        self.advance();
        let number = self.block_of[&matrix];
        let block = &mut self.blocks[number];
        let mut ahead = self.ahead.as_mut().and_then(|it| it.of_block(number));
        let needed = &mut self.needed[..block.layout.neurons()];
        for row in x.chunks_exact(needed.len()) {
            for (needed, x) in needed.iter_mut().zip(row) {
                *needed |= *x != 0.0;
            }
        }
        let turn = &mut self.turn;
        turn.block = number;
        turn.begun = 0;
        turn.lent = Lent::default();
        turn.columns.clear();
        turn.places.clear();
        turn.runs.clear();
        block.lru.begin();
        let mut found = 0;
        for (column, needed) in (0..).zip(needed) {
            if std::mem::take(needed) {
                let place = match (block.lru.find(column), &mut ahead) {
                    (Some(slot), ahead) => {
                        found += 1;
                        if let Some(ahead) = ahead {
                            ahead.has(column);
                        }
                        Place::Slot(slot)
                    }
                    (None, ahead) => match ahead.as_mut().and_then(|it| it.needs(column)) {
                        Some(run) => Place::Ahead(run),
                        None => Place::Run(block.join(column, &mut turn.runs)),
                    },
                };
                turn.columns.push(column);
                turn.places.push(place);
            }
        }
        let counters = &self.counters;
        counters.all.add(block.layout.neurons() as u64);
        let needed = turn.columns.len() as u64;
        counters.needed.add(needed);
        counters.found.add(found);
        let read = turn.runs.iter().map(|run| block.run_bytes(run));
        counters.read_bytes.add(read.sum());
        if let Some(guess) = ahead.map(|it| it.outcome(block)) {
            counters.predicted.add(guess.named);
            counters.predicted_right.add(guess.right);
            counters.predicted_needed.add(needed);
            counters.ahead.add(guess.asked);
            counters.ahead_needed.add(guess.asked_right);
            counters.wasted_bytes.add(guess.wasted_bytes);
        }
        self.ask();
    }

    /// The next columns that the product takes, in memory; those of the call before are over. `None` when all are.
    ///
    /// # Errors
    /// When some cannot be read.
    pub(crate) fn next(&mut self) -> Result<Option<Lent>, ForwardError> {
        self.end_lent();
        let layout = self.blocks[self.turn.block].layout;
        let (cols, each) = (layout.neurons(), layout.bytes());
        if self.turn.lent.range.end == cols {
            return Ok(None);
        }
        self.ask();
        let lent = self.turn.following(cols, each, self.ring.bytes() / 2);
        for at in lent.needed.clone() {
            self.wait_for(at)?;
        }
        self.turn.lent = lent.clone();
        Ok(Some(lent))
    }

    /// Waits until one of the columns that are needed is there, by its place among them.
    fn wait_for(&mut self, at: usize) -> Result<(), ForwardError> {
        loop {
            let run = match (self.turn.places[at], &mut self.ahead) {
                (Place::Slot(_), _) => return Ok(()),
                (Place::Run(run), _) => &self.turn.runs[run],
                (Place::Ahead(run), Some(ahead)) => {
                    // What was in vain ahead of time is asked for as if it had not been.
                    let block = &self.blocks[self.turn.block];
                    let read = ahead.retry(run, block, &mut self.reader);
                    self.counters.read_bytes.add(read.map_err(|source| {
                        let name = block.name.clone();
                        UnreadableWeights { name, source }
                    })?);
                    &ahead.runs()[run]
                }
                (Place::Ahead(_), None) => unreachable!("places are of what there is"),
            };
            match &run.slot {
                Some(Slot::Failed(source)) => {
                    let name = self.blocks[self.turn.block].name.clone();
                    let source = source.clone();
                    return Err(UnreadableWeights { name, source }.into());
                }
                Some(Slot::Reading) => {
                    let finished = self.reader.wait();
                    self.take(finished.expect("a run that was asked for"));
                }
                Some(Slot::Read(_)) => return Ok(()),
                None => unreachable!("what is waited for has been asked for"),
            }
        }
    }

    /// Brings rows of the neurons that are lent together, some at a time, and gives them to `each` with their numbers.
    ///
    /// # Panics
    /// For a matrix beside whose columns there are none.
    pub(crate) fn each_rows(&mut self, mut each: impl FnMut(&[u32], &Matrix<'_>)) {
        let mut gathered = std::mem::take(&mut self.gathered);
        let there = self.lent();
        let layout = there.block.layout;
        let (dtype, elements) = layout.rows.expect("whoever calls has seen them");
        let numbers = there.numbers();
        for start in (0..numbers.len()).step_by(NeuronLayout::ROWS_AT_ONCE) {
            let some = start..numbers.len().min(start + NeuronLayout::ROWS_AT_ONCE);
            let bytes = &mut gathered[..some.len() * layout.row_bytes()];
            let rows = bytes.chunks_exact_mut(layout.row_bytes());
            for (at, row) in some.clone().zip(rows) {
                row.copy_from_slice(there.row(at));
            }
            let rows = Matrix::new(dtype, some.len(), elements, bytes);
            each(&numbers[some], &rows.expect("as many bytes as rows have"));
        }
        self.gathered = gathered;
    }

    /// What is lent.
    pub(crate) fn lent(&self) -> LentColumns<'_> {
        LentColumns {
            block: &self.blocks[self.turn.block],
            turn: &self.turn,
            ahead: self.ahead.as_ref().map_or(&[], Ahead::runs),
        }
    }

    /// Asks for what comes next, as far as the ring has room.
    fn ask(&mut self) {
        let block = &self.blocks[self.turn.block];
        while let Some(run) = self.turn.runs.get_mut(self.turn.begun) {
            let extent = block.extent(run);
            let Some(buffer) = self.ring.take(extent.buffer_bytes()) else {
                break;
            };
            self.reader.queue(self.turn.begun as u64, extent, buffer);
            run.slot = Some(Slot::Reading);
            self.turn.begun += 1;
        }
        self.reader.submit();
    }

    /// Gives columns that were read slots, and their places in the ring back.
    fn end_lent(&mut self) {
        let Turn {
            block,
            columns,
            places,
            runs,
            lent,
            ..
        } = &mut self.turn;
        let block = &mut self.blocks[*block];
        let ahead = self.ahead.as_ref().map_or(&[][..], Ahead::runs);
        for at in lent.needed.clone() {
            let run = match places[at] {
                Place::Slot(_) => continue,
                Place::Run(run) => &runs[run],
                Place::Ahead(run) => &ahead[run],
            };
            let bytes = block.in_run(run, columns[at]);
            if let Some(slot) = block.lru.admit(columns[at]) {
                let (chunk, range) = block.place(slot);
                block.chunks[chunk][range].copy_from_slice(bytes);
            }
        }
        for run in &mut runs[lent.runs.clone()] {
            run.slot = None;
        }
    }
}

impl Turn {
    /// Of `cols` columns of `each` bytes the sections after those that are lent whose runs have all begun: one at least,
    /// and no more than `bytes` of the ring, so that others are read meanwhile, unless they are the last.
    fn following(&self, cols: usize, each: usize, bytes: usize) -> Lent {
        let start = self.lent.range.end;
        let mut lent = Lent {
            range: start..start,
            needed: self.lent.needed.end..self.lent.needed.end,
            runs: self.lent.runs.end..self.lent.runs.end,
        };
        let mut read = 0;
        while lent.range.end < cols {
            let end = cols.min(lent.range.end + ColumnLayout::SECTION);
            let before = |column: u32| (column as usize) < end;
            let rest = &self.runs[lent.runs.end..];
            let runs = rest.partition_point(|run| before(run.columns.start));
            let sizes = rest[..runs].iter().map(|run| run.columns.len() * each);
            read += sizes.sum::<usize>();
            let begun = lent.runs.end + runs <= self.begun;
            let first = lent.range.is_empty();
            assert!(begun || !first, "the ring holds what a section takes");
            if !begun || !(first || read <= bytes || self.begun == self.runs.len()) {
                break;
            }
            let rest = &self.columns[lent.needed.end..];
            lent.needed.end += rest.partition_point(|column| before(*column));
            lent.runs.end += runs;
            lent.range.end = end;
        }
        lent
    }
}

/// Columns that are computed with.
#[derive(Clone, Copy)]
pub(crate) struct LentColumns<'a> {
    block: &'a Block,
    turn: &'a Turn,
    ahead: &'a [Run],
}

impl<'a> LentColumns<'a> {
    /// The columns of `range`, as a product takes them.
    pub(crate) fn columns(self, range: Range<usize>) -> Columns<'a, impl Fn(usize) -> &'a [u8]> {
        let layout = self.block.layout.columns;
        Columns {
            layout,
            scales: &self.block.scales,
            range,
            numbers: self.numbers(),
            bytes: move |at| &self.neuron(at)[..layout.column_bytes()],
        }
    }

    /// Their numbers, in ascending order.
    fn numbers(self) -> &'a [u32] {
        &self.turn.columns[self.turn.lent.needed.clone()]
    }

    /// The row beside one, by its place among them.
    fn row(self, at: usize) -> &'a [u8] {
        let layout = &self.block.layout;
        &self.neuron(at)[layout.columns.column_bytes()..][..layout.row_bytes()]
    }

    /// All bytes of one.
    fn neuron(self, at: usize) -> &'a [u8] {
        let at = self.turn.lent.needed.start + at;
        match self.turn.places[at] {
            Place::Slot(slot) => {
                let (chunk, range) = self.block.place(slot);
                &self.block.chunks[chunk][range]
            }
            Place::Run(run) => self
                .block
                .in_run(&self.turn.runs[run], self.turn.columns[at]),
            Place::Ahead(run) => self.block.in_run(&self.ahead[run], self.turn.columns[at]),
        }
    }
}

/// The file of columns was opened from a path, so it can be read.
fn not_a_file() -> LoadError {
    LoadError::Reading(std::io::ErrorKind::Unsupported.into())
}

/// All bytes of a tensor that is in a file.
fn read_whole(
    reader: &mut FileReader,
    files: &Files,
    tensor: &Tensor,
) -> Result<Vec<u8>, LoadError> {
    let extent = files.extent(tensor, 0..tensor.file_range().len());
    let extent = extent.ok_or_else(not_a_file)?;
    let buffer = Buffer::new(extent.buffer_bytes()).map_err(|error| extent.refused(&error));
    let read = buffer.and_then(|buffer| {
        reader.begin(0, extent, buffer);
        let done = reader.wait();
        done.expect("an extent that was begun is finished").result
    });
    let read = read.map_err(|source| UnreadableWeights {
        name: tensor.name().to_owned(),
        source,
    })?;
    Ok(read.to_vec())
}
