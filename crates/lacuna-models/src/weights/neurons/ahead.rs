//! Columns that are asked for before it is known that they are needed: of those that a block's predictor names and that
//! have no slot, the likeliest.
//!
//! Most of what is needed has a slot, so most of what is named and has none is not needed: a predictor that misses little
//! names a lot. A read in vain keeps the disk from others, so a column is asked for only if its score exceeds what turned
//! out, block by block, to be needed every other time.
//!
//! They are read by the reader and in the order of everything else, into a ring of their own. When activations are
//! known, what is needed of them is multiplied with and gets slots like any column; what is not is dropped, also what
//! comes only later. A read that fails is asked for once more when its column turns out to be needed.

use std::collections::HashMap;

use lacuna_files::reader::{Buffer, FileReader, ReadError, Ring};
use lacuna_files::{Tensor, Tensors};
use lacuna_kernels::Cpu;

use super::super::rows::Slot;
use super::block::{Block, Run};
use crate::error::LoadError;
use crate::plan::{AHEAD_NEURONS, NeuronUse, PREDICTED_ROWS};
use crate::predictors::{Predictor, Workspace, bias_name, margin_name, narrow_name, wide_name};
use crate::program::VectorId;

/// The predictors of blocks, and what was asked for because of the last that was used.
#[derive(Debug)]
pub(super) struct Ahead {
    /// By the norm that each is given, with the number of its block.
    predictors: HashMap<usize, (usize, Predictor)>,
    ring: Ring,
    work: Workspace,
    /// Counts how often something was foretold, from 1 on, so that reads of another time are told apart.
    turn: u32,
    /// The block that was foretold last, until its product begins.
    block: Option<usize>,
    /// By block, what a score must exceed.
    margins: Vec<f32>,
    /// By column, the highest score of a row.
    scores: Vec<f32>,
    /// By column, whether it was asked for.
    asked: Vec<bool>,
    /// The columns that are asked for, in ascending order.
    wanted: Vec<u32>,
    /// What is read of these, in ascending order.
    runs: Vec<Run>,
    /// How many of them have been asked for: those for which the ring had room.
    begun: usize,
    /// By run, what became of it.
    books: Vec<Books>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Books {
    /// Whether a column of it is needed.
    is_needed: bool,
    /// Whether it was asked for once more.
    is_again: bool,
}

/// What is found out about what was foretold of a block.
pub(super) struct Foretold<'a> {
    ahead: &'a mut Ahead,
    block: usize,
    /// The first run that does not end before the columns that have been asked about.
    at: usize,
    right: u64,
    asked_right: u64,
    /// Columns without a slot that are needed.
    missing: u64,
}

/// How good it was.
pub(super) struct Outcome {
    pub(super) named: u64,
    pub(super) right: u64,
    pub(super) asked: u64,
    pub(super) asked_right: u64,
    pub(super) wasted_bytes: u64,
}

/// The part of what is asked for that is to be needed. A read that was in vain costs what one saves that was not.
const NEEDED: f32 = 0.5;

/// How much a margin, in logits, changes for what was needed less often than that; how much it falls when something was
/// missing and nothing had been asked for; and the most that it is.
const GAIN: f32 = 1.0;
const PROBE: f32 = 0.05;
const MOST_MARGIN: f32 = 30.0;

/// The number of a read that belongs to a turn, 0 for those that are known to be needed.
fn number(turn: u32, run: usize) -> u64 {
    u64::from(turn) << 32 | run as u64
}

/// The turn and the run of a read's number.
pub(super) fn turn_and_run(number: u64) -> (u32, usize) {
    ((number >> 32) as u32, number as u32 as usize)
}

impl Ahead {
    /// The predictors that `uses` say there are, read by `read`.
    ///
    /// # Errors
    /// When one cannot be read.
    pub(super) fn new(
        ring: Ring,
        tensors: &Tensors,
        uses: &[NeuronUse],
        read: &mut dyn FnMut(&Tensor) -> Result<Vec<u8>, LoadError>,
    ) -> Result<Self, LoadError> {
        let (mut predictors, mut margins) = (HashMap::new(), vec![0.0; uses.len()]);
        for (block, of) in uses.iter().enumerate() {
            let Some(used) = of.predictor else {
                continue;
            };
            let mut part = |name: String| read(&tensors.require(&name)?);
            let predictor = Predictor::new(
                (used.width, used.rank),
                part(narrow_name(&of.name))?,
                part(wide_name(&of.name))?,
                [&part(bias_name(&of.name))?, &part(margin_name(&of.name))?],
            );
            margins[block] = predictor.margin;
            let VectorId(norm) = used.norm;
            predictors.insert(norm, (block, predictor));
        }
        Ok(Self {
            predictors,
            ring,
            work: Workspace::default(),
            turn: 0,
            block: None,
            margins,
            scores: Vec::new(),
            asked: Vec::new(),
            wanted: Vec::new(),
            runs: Vec::new(),
            begun: 0,
            books: Vec::new(),
        })
    }

    pub(super) fn predicts(&self, norm: usize, rows: usize) -> bool {
        rows <= PREDICTED_ROWS && self.predictors.contains_key(&norm)
    }

    /// Forgets what was foretold. What is still read is dropped when it comes.
    pub(super) fn forget(&mut self) {
        self.block = None;
        self.runs.clear();
        self.begun = 0;
    }

    /// Asks for what the predictor of `norm` names. Returns bytes that are read for it.
    ///
    /// # Panics
    /// Without such a predictor.
    pub(super) fn begin(
        &mut self,
        cpu: &Cpu,
        norm: usize,
        x: &[f32],
        blocks: &[Block],
        reader: &mut FileReader,
    ) -> u64 {
        self.forget();
        self.turn = self.turn.checked_add(1).unwrap_or(1);
        let (number_of, predictor) = &self.predictors[&norm];
        let (number_of, block) = (*number_of, &blocks[*number_of]);
        self.scores.clear();
        self.scores.resize(predictor.neurons(), f32::NEG_INFINITY);
        let rows = predictor.scores(cpu, x, &mut self.work);
        for row in rows.chunks_exact(predictor.neurons()) {
            let both = self.scores.iter_mut().zip(row);
            both.for_each(|(highest, score)| *highest = highest.max(*score));
        }
        self.choose(self.margins[number_of], block);
        for column in &self.wanted {
            block.join(*column, &mut self.runs);
        }
        self.block = Some(number_of);
        self.books.clear();
        self.books.resize(self.runs.len(), Books::default());
        let mut read = 0;
        for run in &mut self.runs {
            let extent = block.extent(run);
            let bytes = extent.buffer_bytes();
            // What there is no room for is asked for when it is needed.
            let Some(buffer) = self.ring.take(bytes) else {
                break;
            };
            reader.queue(number(self.turn, self.begun), extent, buffer);
            run.slot = Some(Slot::Reading);
            read += bytes as u64;
            self.begun += 1;
        }
        reader.submit();
        read
    }

    /// Chooses what is asked for: what exceeds a margin and has no slot, and of too many the likeliest.
    fn choose(&mut self, margin: f32, block: &Block) {
        let Self {
            scores,
            wanted,
            asked,
            ..
        } = self;
        wanted.clear();
        let likely = (0..)
            .zip(&*scores)
            .filter(|(column, score)| **score >= margin && !block.lru.holds(*column));
        wanted.extend(likely.map(|(column, _)| column));
        if wanted.len() > AHEAD_NEURONS {
            let score = |column: &u32| scores[*column as usize];
            wanted.select_nth_unstable_by(AHEAD_NEURONS, |a, b| {
                score(b).total_cmp(&score(a)).then(a.cmp(b))
            });
            wanted.truncate(AHEAD_NEURONS);
            wanted.sort_unstable();
        }
        asked.clear();
        asked.resize(scores.len(), false);
        for column in &*wanted {
            asked[*column as usize] = true;
        }
    }

    /// Whether something may be on its way.
    pub(super) fn is_reading(&self) -> bool {
        self.turn > 0
    }

    /// A run of a turn, if that is the last.
    pub(super) fn run(&mut self, turn: u32, run: usize) -> Option<&mut Run> {
        match turn == self.turn {
            true => self.runs.get_mut(run),
            false => None,
        }
    }

    pub(super) fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// What was foretold of a block whose activations are known now. What was foretold of another is forgotten.
    pub(super) fn of_block(&mut self, block: usize) -> Option<Foretold<'_>> {
        match self.block.take() == Some(block) {
            true => Some(Foretold {
                ahead: self,
                block,
                at: 0,
                right: 0,
                asked_right: 0,
                missing: 0,
            }),
            false => {
                self.forget();
                None
            }
        }
    }

    /// Asks once more for a run that failed. Returns bytes that are read for it.
    ///
    /// # Errors
    /// When there is no memory to read into: the ring may be full of others.
    pub(super) fn retry(
        &mut self,
        run: usize,
        block: &Block,
        reader: &mut FileReader,
    ) -> Result<u64, ReadError> {
        let (books, of) = (&mut self.books[run], &mut self.runs[run]);
        if books.is_again || !matches!(of.slot, Some(Slot::Failed(_))) {
            return Ok(0);
        }
        books.is_again = true;
        let extent = block.extent(of);
        let bytes = extent.buffer_bytes();
        let buffer = Buffer::new(bytes).map_err(|error| extent.refused(&error))?;
        reader.begin(number(self.turn, run), extent, buffer);
        of.slot = Some(Slot::Reading);
        Ok(bytes as u64)
    }
}

impl Foretold<'_> {
    /// Says that a column is needed that has a slot.
    pub(super) fn has(&mut self, column: u32) {
        self.right += u64::from(self.ahead.scores[column as usize] >= 0.0);
    }

    /// Says that a column is needed that has no slot; those before it have been asked about. Returns the run that it is read
    /// in, if there is one.
    pub(super) fn needs(&mut self, column: u32) -> Option<usize> {
        self.has(column);
        self.missing += 1;
        let begun = &self.ahead.runs[..self.ahead.begun];
        while begun.get(self.at)?.columns.end <= column {
            self.at += 1;
        }
        let run = &begun[self.at];
        if !run.columns.contains(&column) {
            return None;
        }
        self.asked_right += u64::from(self.ahead.asked[column as usize]);
        self.ahead.books[self.at].is_needed = true;
        Some(self.at)
    }

    /// How good it was, when all columns that are needed have been asked about; what is asked for the next time depends on
    /// it.
    pub(super) fn outcome(self, block: &Block) -> Outcome {
        let ahead = self.ahead;
        let begun = ahead.runs[..ahead.begun].iter().zip(&ahead.books);
        let wasted = begun.filter(|(_, books)| !books.is_needed);
        let wasted_bytes = wasted.map(|(run, _)| block.run_bytes(run)).sum();
        let end = ahead
            .begun
            .checked_sub(1)
            .map(|last| ahead.runs[last].columns.end);
        let asked = ahead.wanted.partition_point(|column| Some(*column) < end);
        let margin = &mut ahead.margins[self.block];
        *margin += match (asked, self.missing) {
            (0, 0) => 0.0,
            (0, _) => -PROBE,
            (asked, _) => GAIN * (NEEDED - self.asked_right as f32 / asked as f32),
        };
        *margin = margin.clamp(0.0, MOST_MARGIN);
        let named = ahead.scores.iter().filter(|score| **score >= 0.0);
        Outcome {
            named: named.count() as u64,
            right: self.right,
            asked: asked as u64,
            asked_right: self.asked_right,
            wasted_bytes,
        }
    }
}
