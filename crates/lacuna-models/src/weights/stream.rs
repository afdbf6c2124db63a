//! Matrices that files are read for: those that stay in memory, those that each pass reads, and tables of which
//! a token's rows are read.
//!
//! The order of use is that of the program, so what comes next is known, also across the end of a pass. An
//! operation waits for its matrices, computes from the ring, and gives their places back; reads go on
//! meanwhile. What a read is still filling belongs to the reader.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lacuna_files::Progress;
use lacuna_files::reader::{Buffer, Extent, FileReader, Finished, Loaded, ReadError, Ring};

use super::experts::{Counters, ExpertCounts, Experts};
use super::fetch::{Files, MakeDevice};
use super::neurons::{self, NeuronReads, Neurons};
use super::rows::{ROWS_AHEAD, RowReads, Rows, Slot, Table};
use super::{Beside, Weight};
use crate::error::{ForwardError, LoadError, UnreadableWeights};
use crate::plan::{Residency, WeightPlan};
use crate::program::MatrixId;

/// The matrices of a model that files are read for. One pass has them at a time.
pub(crate) struct Streams {
    /// How they are read, for people.
    reading: String,
    /// Memory as placed.
    bytes: AtomicU64,
    experts: Arc<Counters>,
    neurons: Arc<neurons::Counters>,
    stream: Mutex<Stream>,
}

impl Streams {
    /// Those that `plan` has uses of, none of them in memory.
    pub(super) fn new(
        files: &Files,
        beside: Beside<'_>,
        weights: &[Weight],
        plan: &WeightPlan,
        device: Option<MakeDevice<'_>>,
    ) -> Result<Self, LoadError> {
        let matrices = plan.uses.iter().filter_map(|of| {
            let Weight::Matrix(linear) = &weights[of.matrix] else {
                return None;
            };
            let matrix = Matrix {
                name: of.name.clone(),
                extent: files.extent(&linear.tensor, linear.bytes())?,
                row_bytes: linear.row_bytes(),
                place: Place::Read,
            };
            Some((of.matrix, matrix))
        });
        let reader = files.reader(device)?;
        let counters = Arc::new(Counters::default());
        let experts = match &plan.experts[..] {
            [] => None,
            uses => {
                let (reader, counters) = (files.reader(device)?, Arc::clone(&counters));
                Some(Experts::new(files, reader, weights, uses, counters))
            }
        };
        let neuron_counters = Arc::new(neurons::Counters::default());
        let neurons = match beside.columns {
            Some(columns) if !plan.neurons.is_empty() => {
                let (reader, counters) = (files.reader(device)?, Arc::clone(&neuron_counters));
                let tensors = (columns, beside.predictors);
                let neurons = Neurons::new(files, reader, tensors, &plan.neurons, counters)?;
                Some(neurons)
            }
            _ => None,
        };
        let method = files.method().map_or("", |method| method.name());
        Ok(Self {
            reading: format!("{method} by {}", reader.device()),
            bytes: AtomicU64::new(0),
            experts: counters,
            neurons: neuron_counters,
            stream: Mutex::new(Stream {
                matrices: matrices.collect(),
                pieces: Vec::new(),
                ring: ring(0)?,
                reader,
                first: 0,
                next: 0,
                slots: VecDeque::new(),
                rows: Rows::new(files.reader(device)?, ring(0)?),
                expected: Vec::new(),
                experts,
                neurons,
            }),
        })
    }

    /// How they are read, for people.
    pub(crate) fn reading(&self) -> &str {
        &self.reading
    }

    /// The matrices, for a pass that begins.
    pub(crate) fn begin(&self) -> MutexGuard<'_, Stream> {
        let mut stream = self.stream();
        stream.begin();
        stream
    }

    /// Says which tokens come after those of the next pass, as far as that is known. Their rows are read during it.
    pub(crate) fn expect(&self, tokens: &[u32]) {
        let expected = &mut self.stream().expected;
        expected.clear();
        expected.extend(tokens.iter().take(ROWS_AHEAD));
    }

    /// How rows of tables have been had. A pass under way is waited for.
    pub(crate) fn row_reads(&self) -> RowReads {
        self.stream().rows.reads()
    }

    /// Brings matrices where `residency` has them. Memory of those that leave goes back to the system when those that
    /// come are there.
    ///
    /// # Errors
    /// When one that is to be in memory cannot be read, or there is no memory for the ring. All is as before then.
    pub(crate) fn place(
        &self,
        residency: &Residency,
        progress: &mut dyn Progress,
    ) -> Result<(), LoadError> {
        self.stream().place(residency, progress)?;
        self.bytes
            .store(residency.memory_bytes(), Ordering::Relaxed);
        Ok(())
    }

    /// Memory that is theirs, as they were placed last.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// What experts' slots have been asked for.
    pub(crate) fn expert_counts(&self) -> ExpertCounts {
        self.experts.now()
    }

    /// What neurons have been asked for.
    pub(crate) fn neuron_reads(&self) -> NeuronReads {
        self.neurons.now()
    }

    fn stream(&self) -> MutexGuard<'_, Stream> {
        self.stream.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Streams {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Streams")
            .field("reading", &self.reading)
            .finish_non_exhaustive()
    }
}

fn ring(bytes: u64) -> Result<Ring, LoadError> {
    let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
    Ring::new(bytes).map_err(LoadError::Reading)
}

/// One matrix.
#[derive(Debug)]
struct Matrix {
    name: String,
    extent: Extent,
    row_bytes: usize,
    place: Place,
}

/// Where a matrix is.
#[derive(Debug)]
enum Place {
    /// In memory, from load to end.
    Held(Loaded),
    /// In the file: it is read, whole or by rows, when it is used.
    Read,
}

/// Extents that are read at once while matrices are brought into memory: enough to keep a disk busy between two
/// of them.
const EXTENTS_AT_ONCE: usize = 4;

/// What a pass reads, and how far it is.
///
/// ```text
/// pieces, again and again:  ... | released | lent | read | being read | not asked for ...
///                                          first                      next
/// ```
#[derive(Debug)]
pub(crate) struct Stream {
    /// By their numbers among the program's tensors.
    matrices: HashMap<usize, Matrix>,
    /// Those that a pass reads, in order of use.
    pieces: Vec<usize>,
    ring: Ring,
    reader: FileReader,
    /// The first use that is not over, counted over all passes since reading began.
    first: u64,
    /// The first use that nothing is read for.
    next: u64,
    /// What there is for the uses from the one to the other.
    slots: VecDeque<Slot>,
    rows: Rows,
    /// Tokens of a later pass.
    expected: Vec<u32>,
    /// Those of a mixture.
    experts: Option<Experts>,
    /// Those whose activations are mostly zero.
    neurons: Option<Neurons>,
}

impl Stream {
    /// Begins with the first piece. A pass that ended in the middle leaves what was read for its rest.
    fn begin(&mut self) {
        let pieces = self.pieces.len().max(1) as u64;
        if !self.first.is_multiple_of(pieces) {
            self.forget();
        }
        if let Some(experts) = &mut self.experts {
            experts.settle();
        }
        if let Some(neurons) = &mut self.neurons {
            neurons.settle();
        }
        self.read_ahead();
    }

    /// The experts of a mixture, if files are read for them.
    pub(crate) fn experts(&mut self) -> Option<&mut Experts> {
        self.experts.as_mut()
    }

    /// Columns of matrices whose activations are mostly zero, if there is a file of them.
    pub(crate) fn neurons(&mut self) -> Option<&mut Neurons> {
        self.neurons.as_mut()
    }

    /// Drops what was read ahead.
    fn forget(&mut self) {
        self.reader.abandon();
        self.slots.clear();
        (self.first, self.next) = (0, 0);
    }

    /// Where something cannot be read, all is as before.
    fn place(
        &mut self,
        residency: &Residency,
        progress: &mut dyn Progress,
    ) -> Result<(), LoadError> {
        // Before anything changes: that there is no address space for them is all that can go wrong where nothing is
        // read. They take no memory yet, while the ring there was is full of what has been read ahead.
        let before = ring(self.ring.bytes() as u64)?;
        let (after, row_ring) = (ring(residency.ring_bytes)?, ring(residency.row_bytes)?);
        let slots = self.neurons.as_ref().zip(residency.neurons);
        let slots = slots.map(|(neurons, slots)| neurons.room_for(slots.slots));
        let slots = slots.transpose().map_err(LoadError::Reading)?;
        self.forget();
        self.ring = before;
        let stays = |number: usize| residency.is_pinned(number);
        let matrices = self.matrices.iter();
        let wanted =
            matrices.filter(|(number, it)| stays(**number) && matches!(it.place, Place::Read));
        // In the order of the file, which is mostly that of the program.
        let mut wanted: Vec<usize> = wanted.map(|(number, _)| *number).collect();
        wanted.sort_unstable();
        for (number, loaded) in self.read(&wanted, progress)? {
            if let Some(matrix) = self.matrices.get_mut(&number) {
                matrix.place = Place::Held(loaded);
            }
        }
        for (number, matrix) in &mut self.matrices {
            if !stays(*number) {
                matrix.place = Place::Read;
            }
        }
        if let (Some(neurons), Some(slots)) = (&mut self.neurons, slots) {
            neurons.resize(slots);
        }
        self.ring = after;
        self.rows.replace(row_ring);
        self.pieces = residency.streamed.iter().map(|it| it.matrix).collect();
        if let (Some(experts), Some(slots)) = (&mut self.experts, residency.experts) {
            experts.resize(slots.slots);
        }
        Ok(())
    }

    /// Reads matrices into memory of their own.
    fn read(
        &mut self,
        wanted: &[usize],
        progress: &mut dyn Progress,
    ) -> Result<Vec<(usize, Loaded)>, LoadError> {
        let (mut begun, mut read) = (0, Vec::with_capacity(wanted.len()));
        while read.len() < wanted.len() {
            while begun < wanted.len() && begun < read.len() + EXTENTS_AT_ONCE {
                let matrix = &self.matrices[&wanted[begun]];
                let extent = matrix.extent.clone();
                match Buffer::new(extent.buffer_bytes()) {
                    Ok(buffer) => self.reader.begin(wanted[begun] as u64, extent, buffer),
                    Err(error) => {
                        self.reader.abandon();
                        return Err(matrix.unreadable(extent.refused(&error)).into());
                    }
                }
                begun += 1;
            }
            let finished = self.reader.wait();
            let Finished { number, result } = finished.expect("an extent that was begun");
            match result {
                Ok(loaded) => {
                    progress.advance(loaded.len() as u64);
                    read.push((number as usize, loaded));
                }
                Err(error) => {
                    self.reader.abandon();
                    let matrix = &self.matrices[&(number as usize)];
                    return Err(matrix.unreadable(error).into());
                }
            }
        }
        Ok(read)
    }

    /// Waits until what an operation uses of `matrices` is there.
    ///
    /// # Errors
    /// When a part of it cannot be read.
    pub(crate) fn lend(&mut self, matrices: &[MatrixId]) -> Result<(), ForwardError> {
        let wanted = self.count(matrices);
        for index in 0..wanted {
            while self
                .slots
                .get(index)
                .is_none_or(|slot| matches!(slot, Slot::Reading))
            {
                match self.reader.wait() {
                    Some(finished) => self.take(finished),
                    None => self.read_ahead(),
                }
                assert!(
                    self.slots.len() > index,
                    "the ring holds what an operation uses"
                );
            }
        }
        let failed = self
            .slots
            .iter()
            .take(wanted)
            .position(|slot| matches!(slot, Slot::Failed(_)));
        match failed {
            None => Ok(()),
            Some(index) => {
                let piece = self.piece(self.first + index as u64);
                let Slot::Failed(source) = &self.slots[index] else {
                    unreachable!("it was found so")
                };
                let matrix = &self.matrices[&piece];
                Err(matrix.unreadable(source.clone()).into())
            }
        }
    }

    /// The bytes of a matrix that is in memory or has been lent; `None` for one that no file is read for.
    pub(crate) fn bytes(&self, MatrixId(number): MatrixId) -> Option<&[u8]> {
        match &self.matrices.get(&number)?.place {
            Place::Held(bytes) => Some(bytes),
            Place::Read => {
                let mut uses = (self.first..).zip(&self.slots);
                match uses.find(|(index, _)| self.piece(*index) == number) {
                    Some((_, Slot::Read(bytes))) => Some(bytes),
                    _ => unreachable!("a matrix that was not lent"),
                }
            }
        }
    }

    /// Ends an operation's use of `matrices`, or passes them over.
    ///
    /// Also where none of them was read: a disk has only so much under way, and whoever computes is the one that gives it
    /// more.
    pub(crate) fn release(&mut self, matrices: &[MatrixId]) {
        let released = self.count(matrices);
        if released > 0 {
            self.slots.drain(..released.min(self.slots.len()));
            self.first += released as u64;
            self.next = self.next.max(self.first);
        }
        while let Some(finished) = self.reader.poll() {
            self.take(finished);
        }
        if released > 0 {
            self.read_ahead();
        }
    }

    /// Whether a matrix is in the file, so that its rows are read one by one.
    pub(crate) fn reads(&self, MatrixId(number): MatrixId) -> bool {
        let matrix = self.matrices.get(&number);
        matrix.is_some_and(|matrix| matches!(matrix.place, Place::Read))
    }

    /// Reads `rows` of a table, and gives each to `each` with its index.
    ///
    /// # Errors
    /// When a row cannot be read.
    ///
    /// # Panics
    /// For a table that is in memory.
    pub(crate) fn rows(
        &mut self,
        MatrixId(number): MatrixId,
        rows: &[u32],
        each: impl FnMut(usize, &[u8]),
    ) -> Result<(), ForwardError> {
        let table = &self.matrices[&number];
        let read = self.rows.each(table.rows(number), rows, each);
        Ok(read.map_err(|source| table.unreadable(source))?)
    }

    /// Begins to read the rows of a table that the tokens need that come next, by `row`.
    pub(crate) fn rows_ahead(&mut self, MatrixId(number): MatrixId, row: impl Fn(u32) -> u32) {
        let next: Vec<u32> = self.expected.iter().map(|&token| row(token)).collect();
        self.rows.ahead(self.matrices[&number].rows(number), &next);
    }

    /// How many of `matrices` are read in each pass. They are the next ones, since a pass goes in the order of its
    /// program.
    fn count(&self, matrices: &[MatrixId]) -> usize {
        let read = || matrices.iter().filter(|matrix| self.reads(**matrix));
        debug_assert!(
            read()
                .zip(self.first..)
                .all(|(MatrixId(number), next)| self.piece(next) == *number),
            "operations go in order"
        );
        read().count()
    }

    /// The matrix of a use.
    fn piece(&self, of: u64) -> usize {
        self.pieces[(of % self.pieces.len() as u64) as usize]
    }

    /// Asks for what comes next, as far as the ring has room; never for a piece twice.
    fn read_ahead(&mut self) {
        while self.slots.len() < self.pieces.len() {
            let extent = &self.matrices[&self.piece(self.next)].extent;
            let Some(buffer) = self.ring.take(extent.buffer_bytes()) else {
                return;
            };
            self.reader.begin(self.next, extent.clone(), buffer);
            self.slots.push_back(Slot::Reading);
            self.next += 1;
        }
    }

    /// Enters what has been read. What a pass has gone past already is dropped.
    fn take(&mut self, Finished { number, result }: Finished) {
        let index = number.checked_sub(self.first);
        let slot = index.and_then(|index| self.slots.get_mut(index as usize));
        if let Some(slot) = slot {
            *slot = result.into();
        }
    }
}

impl Matrix {
    /// Its rows, of the program's matrix of this number.
    fn rows(&self, number: usize) -> Table<'_> {
        Table {
            number,
            extent: &self.extent,
            row_bytes: self.row_bytes,
        }
    }

    fn unreadable(&self, source: ReadError) -> UnreadableWeights {
        UnreadableWeights {
            name: self.name.clone(),
            source,
        }
    }
}
