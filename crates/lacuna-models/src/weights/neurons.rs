//! Neurons of feed-forward blocks that come to memory as activations turn out not to be zero.
//!
//! `down` is multiplied with activations of which most are exactly zero, and its columns there add nothing. They lie one
//! after another in a file of their own (`columns.rs`). When activations are known, the columns that are needed
//! and not in a slot are asked for, all at once as far as a ring has room, and multiplied with in ascending order, section by
//! section; then they get slots of those that were used longest ago. Sums have the order of the whole matrix's
//! product, so results do not depend on any of it.
//!
//! What a read is still filling belongs to the reader. One that fails is an error of the pass, and the next pass asks
//! anew.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use lacuna_files::Tensors;
use lacuna_files::reader::{Buffer, Extent, FileReader, Finished, Ring};
use lacuna_kernels::ColumnLayout;

use super::columns::{columns_name, scales_name};
use super::fetch::Files;
use super::rows::Slot;
use crate::error::{ForwardError, LoadError, UnreadableWeights};
use crate::plan::{NeuronLru, NeuronSlots, NeuronUse, RUN_BYTES};
use crate::program::MatrixId;

/// What has been asked of neurons since a model was loaded. A block's neuron counts once for a pass, however many of the
/// pass's tokens need it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
pub struct NeuronReads {
    /// Neurons that there are, for each pass.
    pub all: u64,
    /// Those of them that passes needed: whose activations were not zero.
    pub needed: u64,
    /// Those of these that had a slot.
    pub found: u64,
    /// Bytes of the file that were read for the others.
    pub read_bytes: u64,
}

impl NeuronReads {
    /// The part of neurons that passes needed; `None` before the first pass.
    #[must_use]
    pub fn active_share(&self) -> Option<f64> {
        (self.all > 0).then(|| self.needed as f64 / self.all as f64)
    }

    /// The part of needed neurons that had a slot; `None` before the first is needed.
    #[must_use]
    pub fn hit_rate(&self) -> Option<f64> {
        (self.needed > 0).then(|| self.found as f64 / self.needed as f64)
    }

    /// What came after `before`.
    #[must_use]
    pub fn since(&self, before: Self) -> Self {
        Self {
            all: self.all - before.all,
            needed: self.needed - before.needed,
            found: self.found - before.found,
            read_bytes: self.read_bytes - before.read_bytes,
        }
    }
}

/// The same while passes go on.
#[derive(Debug, Default)]
pub(super) struct Counters {
    all: AtomicU64,
    needed: AtomicU64,
    found: AtomicU64,
    read_bytes: AtomicU64,
}

impl Counters {
    pub(super) fn now(&self) -> NeuronReads {
        NeuronReads {
            all: self.all.load(Ordering::Relaxed),
            needed: self.needed.load(Ordering::Relaxed),
            found: self.found.load(Ordering::Relaxed),
            read_bytes: self.read_bytes.load(Ordering::Relaxed),
        }
    }
}

/// Slots are parts of pieces of memory of about so many bytes, which go back to the system as there are fewer: a huge page,
/// where there are as many.
const CHUNK_BYTES: usize = 2 << 20;

/// The neurons of all blocks that have files of them. One pass has them at a time.
#[derive(Debug)]
pub(crate) struct Neurons {
    reader: FileReader,
    ring: Ring,
    blocks: Vec<Block>,
    /// The block of a matrix of the program.
    block_of: HashMap<usize, usize>,
    turn: Turn,
    /// By column of the widest matrix, whether a pass needs it: false between turns.
    needed: Vec<bool>,
    counters: Arc<Counters>,
}

/// Another number of slots, and what memory it takes beyond what there is, by block.
#[derive(Debug)]
pub(super) struct MoreSlots {
    slots: usize,
    chunks: Vec<Vec<Buffer>>,
}

/// The columns of a matrix.
#[derive(Debug)]
struct Block {
    /// The matrix, for errors.
    name: String,
    extent: Extent,
    layout: ColumnLayout,
    scales: Vec<u8>,
    lru: NeuronLru,
    /// Memory of slots, as many in each piece as it holds.
    chunks: Vec<Buffer>,
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
}

/// Columns side by side that are read together.
#[derive(Debug)]
struct Run {
    columns: Range<u32>,
    /// `None` before it is asked for, and when it is over.
    slot: Option<Slot>,
}

impl Neurons {
    /// Those of `uses`, none of them in memory.
    ///
    /// # Errors
    /// When their scales cannot be read, or there is no memory for the ring.
    pub(super) fn new(
        files: &Files,
        mut reader: FileReader,
        columns: &Tensors,
        uses: &[NeuronUse],
        counters: Arc<Counters>,
    ) -> Result<Self, LoadError> {
        let blocks = uses.iter().map(|of| {
            let tensor = columns.require(&columns_name(&of.name))?;
            let extent = files.extent(&tensor, 0..tensor.file_range().len());
            let scales = columns.get(&scales_name(&of.name))?;
            let scales = scales.map(|scales| {
                let extent = files.extent(&scales, 0..scales.file_range().len());
                read_whole(&mut reader, &of.name, extent.ok_or_else(not_a_file)?)
            });
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
        let ring = Ring::new(NeuronSlots::ring_bytes(uses) as usize).map_err(LoadError::Reading)?;
        let numbered = uses.iter().enumerate();
        Ok(Self {
            reader,
            ring,
            blocks,
            block_of: numbered.map(|(block, of)| (of.matrix, block)).collect(),
            turn: Turn::default(),
            needed: vec![false; widest],
            counters,
        })
    }

    /// Whether the columns of a matrix are had here.
    pub(crate) fn has(&self, MatrixId(matrix): MatrixId) -> bool {
        self.block_of.contains_key(&matrix)
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
    }

    /// Begins the product of a matrix with `x`, rows of activations: finds out which columns it takes, and asks for those
    /// that are not there.
    ///
    /// # Panics
    /// For a matrix whose columns are not had here.
    pub(crate) fn begin(&mut self, MatrixId(matrix): MatrixId, x: &[f32]) {
        let number = self.block_of[&matrix];
        let block = &mut self.blocks[number];
        let needed = &mut self.needed[..block.layout.cols()];
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
                let place = match block.lru.find(column) {
                    Some(slot) => {
                        found += 1;
                        Place::Slot(slot)
                    }
                    None => Place::Run(block.join(column, &mut turn.runs)),
                };
                turn.columns.push(column);
                turn.places.push(place);
            }
        }
        let counters = &self.counters;
        let all = block.layout.cols() as u64;
        counters.all.fetch_add(all, Ordering::Relaxed);
        let needed = turn.columns.len() as u64;
        counters.needed.fetch_add(needed, Ordering::Relaxed);
        counters.found.fetch_add(found, Ordering::Relaxed);
        let read = turn
            .runs
            .iter()
            .map(|run| block.extent(run).buffer_bytes() as u64);
        counters.read_bytes.fetch_add(read.sum(), Ordering::Relaxed);
        self.ask();
    }

    /// The next columns that the product takes, in memory; those of the call before are over. `None` when all are.
    ///
    /// # Errors
    /// When some cannot be read.
    pub(crate) fn next(&mut self) -> Result<Option<Lent>, ForwardError> {
        self.end_lent();
        let cols = self.blocks[self.turn.block].layout.cols();
        if self.turn.lent.range.end == cols {
            return Ok(None);
        }
        self.ask();
        let each = self.blocks[self.turn.block].layout.column_bytes();
        let lent = self.turn.following(cols, each, self.ring.bytes() / 2);
        let mut at = lent.runs.start;
        while at < lent.runs.end {
            if !matches!(self.turn.runs[at].slot, Some(Slot::Reading)) {
                at += 1;
                continue;
            }
            let finished = self.reader.wait();
            let Finished { number, result } = finished.expect("a run that was asked for");
            self.turn.runs[number as usize].slot = Some(result.into());
        }
        for run in &self.turn.runs[lent.runs.clone()] {
            if let Some(Slot::Failed(source)) = &run.slot {
                let name = self.blocks[self.turn.block].name.clone();
                let source = source.clone();
                return Err(UnreadableWeights { name, source }.into());
            }
        }
        self.turn.lent = lent.clone();
        Ok(Some(lent))
    }

    /// What is lent.
    pub(crate) fn lent(&self) -> LentColumns<'_> {
        LentColumns {
            block: &self.blocks[self.turn.block],
            turn: &self.turn,
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
        for at in lent.needed.clone() {
            let Place::Run(run) = places[at] else {
                continue;
            };
            let bytes = block.in_run(&runs[run], columns[at]);
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

impl Block {
    /// The bytes of a column, in the file of columns.
    fn offset(&self, column: u32) -> u64 {
        self.extent.range.start + u64::from(column) * self.layout.column_bytes() as u64
    }

    fn extent(&self, run: &Run) -> Extent {
        Extent {
            file: self.extent.file.clone(),
            range: self.offset(run.columns.start)..self.offset(run.columns.end),
        }
    }

    /// Adds a column to what is read, in a run of its own or where that reads no page that would not be read anyway.
    /// Returns which.
    fn join(&self, column: u32, runs: &mut Vec<Run>) -> usize {
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
    fn in_run<'a>(&self, run: &'a Run, column: u32) -> &'a [u8] {
        let Some(Slot::Read(bytes)) = &run.slot else {
            unreachable!("what is lent has been read")
        };
        let each = self.layout.column_bytes();
        &bytes[(column - run.columns.start) as usize * each..][..each]
    }

    /// Slots of a chunk.
    fn chunk_slots(&self) -> usize {
        (CHUNK_BYTES / self.layout.column_bytes()).max(1)
    }

    /// Where a slot is: in which chunk, and which bytes of it.
    fn place(&self, slot: u32) -> (usize, Range<usize>) {
        let (slot, each) = (slot as usize, self.layout.column_bytes());
        let start = slot % self.chunk_slots() * each;
        (slot / self.chunk_slots(), start..start + each)
    }

    /// The chunks that `slots` slots take beyond those that are full already.
    fn more_chunks(&self, slots: usize) -> std::io::Result<Vec<Buffer>> {
        let (slots, each) = (slots.min(self.layout.cols()), self.chunk_slots());
        if slots == self.lru.len() {
            return Ok(Vec::new());
        }
        let full = self.lru.len().min(slots) / each;
        let starts = (full * each..slots).step_by(each);
        let sizes = starts.map(|start| each.min(slots - start) * self.layout.column_bytes());
        sizes.map(Buffer::new).collect()
    }

    /// Has `slots` slots from now on, with `more` chunks that were made for as many.
    fn resize(&mut self, slots: usize, more: Vec<Buffer>) {
        let slots = slots.min(self.layout.cols());
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

/// Columns that are computed with.
pub(crate) struct LentColumns<'a> {
    block: &'a Block,
    turn: &'a Turn,
}

impl<'a> LentColumns<'a> {
    pub(crate) fn layout(&self) -> ColumnLayout {
        self.block.layout
    }

    pub(crate) fn scales(&self) -> &'a [u8] {
        &self.block.scales
    }

    /// Their numbers, in ascending order.
    pub(crate) fn numbers(&self) -> &'a [u32] {
        &self.turn.columns[self.turn.lent.needed.clone()]
    }

    /// The bytes of one, by its place among them.
    pub(crate) fn bytes(&self, at: usize) -> &'a [u8] {
        let at = self.turn.lent.needed.start + at;
        match self.turn.places[at] {
            Place::Slot(slot) => {
                let (chunk, range) = self.block.place(slot);
                &self.block.chunks[chunk][range]
            }
            Place::Run(run) => self
                .block
                .in_run(&self.turn.runs[run], self.turn.columns[at]),
        }
    }
}

/// The file of columns was opened from a path, so it can be read.
fn not_a_file() -> LoadError {
    LoadError::Reading(std::io::ErrorKind::Unsupported.into())
}

fn read_whole(reader: &mut FileReader, name: &str, extent: Extent) -> Result<Vec<u8>, LoadError> {
    let buffer = Buffer::new(extent.buffer_bytes()).map_err(|error| extent.refused(&error));
    let read = buffer.and_then(|buffer| {
        reader.begin(0, extent, buffer);
        let done = reader.wait();
        done.expect("an extent that was begun is finished").result
    });
    let read = read.map_err(|source| UnreadableWeights {
        name: name.to_owned(),
        source,
    })?;
    Ok(read.to_vec())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use lacuna_files::reader::faults::{Fault, FaultyDevice};
    use lacuna_files::reader::{Caching, ReadThreads};
    use lacuna_files::{ModelFiles, gguf};
    use lacuna_kernels::{Activations, Columns, Cpu, CpuConfig, DType, Matrix};
    use proptest::prelude::*;

    use super::*;
    use crate::weights::columns;

    const ROWS: usize = 64;
    /// Two blocks: of several sections, and of less than one.
    const COLS: [usize; 2] = [1600, 96];
    const NAMES: [&str; 2] = ["a.weight", "b.weight"];

    /// Two matrices in a file, and their columns in another.
    struct Subject {
        files: ModelFiles,
        columns: Tensors,
        uses: Vec<NeuronUse>,
        _folder: tempfile::TempDir,
    }

    impl Subject {
        fn new(dtype: DType) -> Self {
            let folder = tempfile::tempdir().expect("a folder");
            let path = folder.path().join("model.gguf");
            write(dtype, &path);
            let files = ModelFiles::open(&path).expect("a valid file");
            let layouts = NAMES.iter().zip(COLS).map(|(name, cols)| {
                let layout = ColumnLayout::new(dtype, ROWS, cols).expect("whole groups");
                ((*name).to_owned(), layout)
            });
            let layouts: Vec<_> = layouts.collect();
            let path = folder.path().join("columns");
            columns::make(&files, &path, "content", &layouts, &mut ()).expect("it is written");
            let columns = columns::open(&path, "content", &layouts).expect("what was written");
            assert!(columns::open(&path, "other content", &layouts).is_none());
            assert!(columns::open(&path, "content", &layouts[..1]).is_some());
            let uses = layouts.into_iter().enumerate();
            let uses = uses.map(|(matrix, (name, layout))| NeuronUse {
                name,
                matrix,
                layout,
            });
            Self {
                uses: uses.collect(),
                files,
                columns,
                _folder: folder,
            }
        }

        fn neurons(&self, slots: usize, every: u64, fault: Fault) -> Neurons {
            let files = Files::open([&self.columns].into_iter(), Caching::Avoided);
            let files = files.expect("they open");
            let counters = Arc::new(Counters::default());
            let threads = ReadThreads::new().expect("threads");
            let device = FaultyDevice::new(Box::new(threads), every, fault);
            let reader = FileReader::with(Box::new(ReadThreads::new().expect("threads")));
            let neurons = Neurons::new(&files, reader, &self.columns, &self.uses, counters);
            let mut neurons = neurons.expect("they are there");
            neurons.reader = FileReader::with(Box::new(device));
            place(&mut neurons, slots);
            neurons
        }

        fn matrix(&self, matrix: usize) -> lacuna_files::Tensor {
            let tensor = self.files.tensors().require(NAMES[matrix]);
            tensor.expect("it was written")
        }

        fn whole(&self, cpu: &Cpu, matrix: usize, x: &[f32]) -> Vec<f32> {
            let tensor = self.matrix(matrix);
            let (cols, tokens) = (COLS[matrix], x.len() / COLS[matrix]);
            let w = Matrix::new(tensor.dtype(), ROWS, cols, tensor.bytes()).expect("its shape");
            let bytes = Activations::storage_bytes(tokens, cols).unwrap_or(0);
            let mut storage = vec![0u64; bytes.div_ceil(8)];
            let mut out = vec![0.0; tokens * ROWS];
            let x = cpu.activations(x, tokens, cols, bytemuck::cast_slice_mut(&mut storage));
            cpu.matmul(&mut out, &x, &w);
            out
        }
    }

    fn write(dtype: DType, path: &Path) {
        let mut header = gguf::Writer::new();
        for (name, cols) in NAMES.iter().zip(COLS) {
            header
                .tensor(name, dtype, &[ROWS, cols])
                .expect("whole blocks");
        }
        let mut body = header.begin(Vec::new()).expect("room in memory");
        for (name, cols) in NAMES.iter().zip(COLS) {
            let bytes = ROWS * dtype.row_bytes(cols).expect("whole blocks");
            // Below every exponent of all ones, and no two columns alike.
            let bytes: Vec<u8> = (0..bytes)
                .map(|at| (at * 31 + at / 255) as u8 & 0x3B)
                .collect();
            body.tensor(name, &bytes).expect("as declared");
        }
        std::fs::write(path, body.finish().expect("whole")).expect("room for it");
    }

    fn place(neurons: &mut Neurons, slots: usize) {
        let more = neurons.room_for(slots).expect("address space");
        neurons.resize(more);
    }

    fn product(
        neurons: &mut Neurons,
        cpu: &Cpu,
        matrix: usize,
        x: &[f32],
    ) -> Result<Vec<f32>, ForwardError> {
        let mut out = vec![f32::NAN; x.len() / COLS[matrix] * ROWS];
        neurons.begin(MatrixId(matrix), x);
        while let Some(lent) = neurons.next()? {
            let there = neurons.lent();
            let columns = Columns {
                layout: there.layout(),
                scales: there.scales(),
                range: lent.range,
                numbers: there.numbers(),
                bytes: |at: usize| there.bytes(at),
            };
            cpu.matmul_columns(&mut out, x, &columns);
        }
        Ok(out)
    }

    /// Activations of which about one in `every` is not zero.
    fn sparse(matrix: usize, tokens: usize, every: usize, seed: usize) -> Vec<f32> {
        let number = |at: usize| (at * 2_654_435_761 + seed * 40_503) >> 7;
        let value = |at| match number(at) % every {
            0 => (number(at + 7) % 1000) as f32 / 500.0 - 0.9,
            _ => 0.0,
        };
        (0..tokens * COLS[matrix]).map(value).collect()
    }

    fn bits(values: &[f32]) -> Vec<u32> {
        values.iter().map(|value| value.to_bits()).collect()
    }

    #[test]
    fn neurons_that_tokens_needed_shortly_before_are_not_read_again() {
        let subject = Subject::new(DType::F16);
        let cpu = Cpu::new(CpuConfig::default()).expect("threads");
        let mut neurons = subject.neurons(100, 1, Fault::Delay);
        let mut x = vec![0.0; COLS[0]];
        x[3] = 1.0;
        x[700] = -2.0;
        x[1599] = 0.5;
        product(&mut neurons, &cpu, 0, &x).expect("it is read");
        let first = neurons.counters.now();
        assert_eq!((first.all, first.needed, first.found), (1600, 3, 0));
        assert_eq!(first.read_bytes, 3 * 4096, "a page each");
        x[4] = 1.0;
        product(&mut neurons, &cpu, 0, &x).expect("it is read");
        let second = neurons.counters.now().since(first);
        assert_eq!(
            (second.needed, second.found, second.read_bytes),
            (4, 3, 4096)
        );
        assert_eq!(second.hit_rate(), Some(0.75));
        // Fewer slots than a pass takes: those that are there are found again, and no more.
        place(&mut neurons, 2);
        for _ in 0..2 {
            product(&mut neurons, &cpu, 0, &x).expect("it is read");
        }
        let before = neurons.counters.now();
        product(&mut neurons, &cpu, 0, &x).expect("it is read");
        assert_eq!(neurons.counters.now().since(before).found, 2);
    }

    #[test]
    fn a_neuron_that_cannot_be_read_is_an_error_of_its_pass_alone() {
        let subject = Subject::new(DType::Q8_0);
        let cpu = Cpu::new(CpuConfig::default()).expect("threads");
        let x = sparse(0, 2, 9, 1);
        let expected = bits(&subject.whole(&cpu, 0, &x));
        let mut neurons = subject.neurons(64, 40, Fault::Fail);
        let mut failed = 0;
        for _ in 0..12 {
            neurons.settle();
            match product(&mut neurons, &cpu, 0, &x) {
                Ok(found) => assert_eq!(bits(&found), expected),
                Err(error) => {
                    failed += 1;
                    let text = error.to_string();
                    assert!(text.contains("a.weight") && text.contains("the disk is broken"));
                }
            }
        }
        assert!(failed > 0 && failed < 12, "{failed} passes failed");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        /// Whatever is in memory, and in whatever order reads end, a product is that with the whole matrix.
        #[test]
        fn products_are_those_of_the_whole_matrix(
            passes in prop::collection::vec((0usize..2, 1usize..20, 1usize..60, 0usize..1000), 1..6),
            slots in 0usize..1700,
            other in 0usize..1700,
            which in 0usize..3,
            of in 0usize..5,
        ) {
            let types = [DType::F32, DType::F16, DType::Bf16, DType::Q8_0, DType::Q4_0];
            let subject = Subject::new(types[of]);
            let fault = [Fault::Shorten, Fault::Delay, Fault::Reorder][which];
            let cpu = Cpu::new(CpuConfig::default()).expect("threads");
            let mut neurons = subject.neurons(slots, 2, fault);
            for (index, (matrix, tokens, every, seed)) in passes.into_iter().enumerate() {
                if index == 2 {
                    place(&mut neurons, other);
                }
                let x = sparse(matrix, tokens, every, seed);
                let found = product(&mut neurons, &cpu, matrix, &x);
                let found = found.expect("whole reads");
                prop_assert_eq!(bits(&found), bits(&subject.whole(&cpu, matrix, &x)));
            }
        }
    }
}
