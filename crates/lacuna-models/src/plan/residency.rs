//! Which weights are in memory, and which are read while a pass needs them.
//!
//! A pass uses its matrices in an order that never changes, so nothing has to be guessed: of a cycle
//! longer than memory, keeping a fixed part and reading the rest anew each time is the best that any cache
//! can do, and keeping what was used last is the worst. What is read is spread evenly over the pass, so
//! that the disk is busy while everything else is computed with, and goes through a ring that is read ahead
//! of use, also across the end of a pass. Tables of which a token needs a row are read row by row. Which experts of a
//! mixture a token needs is not known ahead: what all other weights leave goes to slots for them.
//!
//! The plan is a function of the program, the directory of tensors and a number of bytes: the same input
//! gives the same plan.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::{ExpertSlots, NeuronSlots, WeightPlan};

/// How weights come to be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WeightSource {
    /// Where the file is mapped: pages of the system's, which it evicts and reads again as it likes.
    #[default]
    Mmap,
    /// Read into memory of the process, through the page cache.
    Pread,
    /// Read into memory of the process, past the page cache where that is possible.
    Direct,
}

/// What was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WeightMode {
    /// Read directly when there is a budget, which weights are part of then; else mapped, beside it. Mapped, too, are
    /// weights of which the budget does not even hold what a pass reads at once.
    #[default]
    Auto,
    /// This.
    Fixed(WeightSource),
}

impl WeightMode {
    /// What it means where nobody has said how much memory there may be.
    #[must_use]
    pub const fn without_budget(self) -> Self {
        match self {
            Self::Auto => Self::Fixed(WeightSource::Mmap),
            fixed @ Self::Fixed(_) => fixed,
        }
    }
}

impl WeightSource {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Mmap, Self::Pread, Self::Direct];

    /// The name on the command line and in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Mmap => "mmap",
            Self::Pread => "pread",
            Self::Direct => "direct",
        }
    }
}

impl fmt::Display for WeightMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Fixed(source) => source.name(),
        })
    }
}

/// A name that is no way to have weights.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown way to have weights `{0}`; use auto, mmap, pread or direct")]
pub struct UnknownWeightMode(String);

impl FromStr for WeightMode {
    type Err = UnknownWeightMode;

    fn from_str(name: &str) -> Result<Self, UnknownWeightMode> {
        let mut sources = WeightSource::ALL.into_iter();
        match sources.find(|source| source.name() == name) {
            Some(source) => Ok(Self::Fixed(source)),
            None if name == "auto" => Ok(Self::Auto),
            None => Err(UnknownWeightMode(name.to_owned())),
        }
    }
}

/// How much of a matrix an operation needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MatrixAccess {
    /// All of it, for each pass.
    Whole,
    /// The rows of a pass's tokens.
    Rows,
}

/// One use of a matrix by a pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WeightUse {
    /// The tensor it is, or is a part of.
    pub name: String,
    /// Its number among the program's tensors.
    pub(crate) matrix: usize,
    /// The operation that uses it, counted from the first of the pass.
    pub(crate) operation: usize,
    /// How many uses come before it.
    pub(crate) place: usize,
    /// How much it needs.
    pub access: MatrixAccess,
    /// Bytes of all of it.
    pub bytes: u64,
    /// Bytes of a row.
    pub row_bytes: u64,
}

/// A matrix that is not in memory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Streamed {
    /// The tensor it is, or is a part of.
    pub name: String,
    /// Bytes that each pass, or of a table each token, reads.
    pub bytes: u64,
    /// Its number among the program's tensors.
    #[serde(skip)]
    pub(crate) matrix: usize,
}

/// Where weights are while a model runs.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct Residency {
    /// How they come there.
    pub source: WeightSource,
    /// Memory of weights that stay, in whole pages.
    pub pinned_bytes: u64,
    /// Memory of the ring that the others go through.
    pub ring_bytes: u64,
    /// Memory that rows of tables are read into.
    pub row_bytes: u64,
    /// Bytes of the file that a pass reads.
    pub streamed_bytes: u64,
    /// The matrices that a pass reads, in the order in which it uses them.
    pub streamed: Vec<Streamed>,
    /// The tables that are read row by row.
    pub tables: Vec<Streamed>,
    /// Memory for experts, which come to it as tokens choose them; `None` where there are none.
    pub experts: Option<ExpertSlots>,
    /// Memory for neurons, which come to it as activations turn out not to be zero; `None` without a file of them.
    pub neurons: Option<NeuronSlots>,
}

/// Speeds from which the time of a pass follows, in bytes per second.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rates {
    /// At which one token's weights are computed with when they are in memory.
    pub memory: u64,
    /// At which files are read.
    pub disk: u64,
}

/// Whole pages are read, so a matrix takes the rest of its first and last ones too.
const PAGE: u64 = 4096;

/// Matrices below this are kept first: reading one costs a call, however small.
const SMALL: u64 = 1 << 20;

/// What is read ahead beyond the operation under way, at most and as a share of memory: at 5 GB a second 32 MiB
/// are six milliseconds, longer than the operations of a token take. More would be better spent on weights that stay.
const AHEAD: u64 = 32 << 20;
const AHEAD_SHARE: u64 = 32;

/// Rows of tables that there is memory for: those of a pass and of the next one, and of the passes before, whose tokens
/// often come again.
const ROWS_KEPT: u64 = 512;

/// Memory of so many bytes of a file, wherever in it they begin.
pub(crate) const fn held(bytes: u64) -> u64 {
    (bytes + PAGE - 1).next_multiple_of(PAGE)
}

/// A matrix that may be streamed.
struct Candidate<'a> {
    of: &'a WeightUse,
    /// What its operation reads in all.
    operation_bytes: u64,
    /// Whether it is.
    is_streamed: bool,
}

impl Residency {
    /// Weights that are used where files are mapped, or in the memory that stands in for files.
    #[must_use]
    pub fn mapped() -> Self {
        Self::default()
    }

    /// Of `weights`, as many as possible in `room` bytes of memory, or all without such a bound. Where the room
    /// does not do, this is what takes the least.
    #[must_use]
    pub fn plan(weights: &WeightPlan, source: WeightSource, room: Option<u64>) -> Self {
        if source == WeightSource::Mmap || !weights.in_files {
            return Self::mapped();
        }
        let all = Self::with_streamed(weights, source, &[], 0);
        let all = all.with_slots(weights, u64::MAX);
        let room = match room {
            Some(room) if all.memory_bytes() > room => room,
            _ => return all,
        };
        let planned = all.in_room(weights, room);
        planned.unwrap_or_else(|| all.streaming_most(weights))
    }

    /// The same with as many slots as `room` bytes hold beside everything else: for experts, two at least, and of what
    /// these leave for neurons.
    fn with_slots(&self, weights: &WeightPlan, room: u64) -> Self {
        let others = self.memory_bytes() - self.slot_bytes();
        let room = room.saturating_sub(others);
        let experts = ExpertSlots::within(&weights.experts, room);
        let left = room.saturating_sub(experts.map_or(0, |experts| experts.bytes));
        Self {
            experts,
            neurons: NeuronSlots::within(&weights.neurons, left),
            ..self.clone()
        }
    }

    /// The same with less memory for experts and neurons, or where that does not do, more that is streamed, so that it fits `room`.
    /// An expert is read for some tokens, and a matrix for all, so matrices stay for longer.
    fn in_room(&self, weights: &WeightPlan, room: u64) -> Option<Self> {
        let fewer = self.with_slots(weights, room.min(self.memory_bytes()));
        match fewer.memory_bytes() <= room {
            true => Some(fewer),
            false => fewer.streaming(weights, room),
        }
    }

    /// The same with so many bytes of memory less at least, if that can be: what is streamed stays so, and more is.
    /// Nothing that is not in memory comes there.
    #[must_use]
    pub fn less(&self, weights: &WeightPlan, bytes: u64) -> Option<Self> {
        match self.memory_bytes().checked_sub(bytes)? {
            _ if bytes == 0 => Some(self.clone()),
            _ if self.is_mapped() => None,
            room => self.in_room(weights, room),
        }
    }

    /// Bytes of memory by which there can be less.
    #[must_use]
    pub fn to_spare(&self, weights: &WeightPlan) -> u64 {
        if self.is_mapped() {
            return 0;
        }
        let least = self.streaming_most(weights).memory_bytes();
        self.memory_bytes().saturating_sub(least)
    }

    /// The same in up to so many bytes of memory more, if that brings weights back: what is in memory stays there, and
    /// of what is streamed as much as possible is kept from now on. What that leaves goes to experts.
    #[must_use]
    pub fn more(&self, weights: &WeightPlan, bytes: u64) -> Option<Self> {
        if self.is_whole(weights) {
            return None;
        }
        let room = self.memory_bytes().saturating_add(bytes);
        let all = Self {
            experts: self.experts,
            neurons: self.neurons,
            ..Self::with_streamed(weights, self.source, &[], 0)
        };
        let more = match all.memory_bytes() <= room {
            true => all,
            false => {
                let mut candidates = all.candidates(weights);
                candidates.retain(|it| self.streams(it.of.matrix));
                let fewer = all.fitting(weights, &candidates, room);
                let fewer = fewer.filter(|it| it.streamed_bytes < self.streamed_bytes);
                fewer.unwrap_or_else(|| self.clone())
            }
        };
        let more = more.with_slots(weights, room);
        (more != *self).then_some(more)
    }

    /// Whether all weights are in memory that can be.
    #[must_use]
    pub fn is_whole(&self, weights: &WeightPlan) -> bool {
        let all = self.with_slots(weights, u64::MAX);
        let slots = (all.experts, all.neurons);
        self.is_mapped() || (self.streamed.is_empty() && (self.experts, self.neurons) == slots)
    }

    /// What is streamed here, and as much more as it takes to fit `room`.
    fn streaming(&self, weights: &WeightPlan, room: u64) -> Option<Self> {
        self.fitting(weights, &self.candidates(weights), room)
    }

    /// What is streamed here, and as many more of `candidates` as it takes to fit `room`.
    fn fitting(
        &self,
        weights: &WeightPlan,
        candidates: &[Candidate<'_>],
        room: u64,
    ) -> Option<Self> {
        let ahead = AHEAD.min(room / AHEAD_SHARE).next_multiple_of(PAGE);
        [ahead, 0].into_iter().find_map(|ahead| {
            let plans = largest_operations(candidates)
                .into_iter()
                .map(|largest| self.with_more(weights, candidates, largest, (room, ahead)));
            let fits = plans.filter(|plan| plan.memory_bytes() <= room);
            fits.min_by_key(|plan| (plan.streamed_bytes, plan.memory_bytes()))
        })
    }

    /// What takes the least memory of all that streams what is streamed here.
    fn streaming_most(&self, weights: &WeightPlan) -> Self {
        self.with_slots(weights, 0).with_most_streamed(weights)
    }

    fn with_most_streamed(&self, weights: &WeightPlan) -> Self {
        let candidates = self.candidates(weights);
        let plans = largest_operations(&candidates)
            .into_iter()
            .map(|largest| self.with_more(weights, &candidates, largest, (0, 0)));
        let least = plans.min_by_key(Self::memory_bytes);
        least.unwrap_or_else(|| self.clone())
    }

    /// What is streamed here, and as much more as it takes to fit `room`, or all, of operations that read `largest`
    /// bytes or less; with a ring that holds `ahead` bytes more than an operation.
    ///
    /// What an operation reads must lie in the ring at once, so it may be that the largest cost more ring than they
    /// save, and stay instead.
    fn with_more(
        &self,
        weights: &WeightPlan,
        candidates: &[Candidate<'_>],
        largest: u64,
        (room, ahead): (u64, u64),
    ) -> Self {
        let may = |it: &&Candidate<'_>| it.is_streamed || it.operation_bytes <= largest;
        let may: Vec<&Candidate<'_>> = candidates.iter().filter(may).collect();
        let operation = may.iter().map(|it| it.operation_bytes).max().unwrap_or(0);
        // Ranges of the ring are contiguous, so at its end a matrix's bytes may be of no use.
        let piece = may.iter().map(|it| held(it.of.bytes)).max().unwrap_or(0);
        let ring = operation + piece + ahead;
        let streamed = may.iter().filter(|it| it.is_streamed).map(|it| it.of);
        let mut streamed: Vec<&WeightUse> = streamed.collect();
        let with = |streamed: &[&WeightUse]| Self {
            experts: self.experts,
            neurons: self.neurons,
            ..Self::with_streamed(weights, self.source, streamed, ring)
        };
        let before = with(&streamed);
        let excess = before.memory_bytes().saturating_sub(room);
        streamed.extend(spread(&may, excess));
        streamed.sort_by_key(|it| it.place);
        with(&streamed)
    }

    /// The matrices that products read whole and that are used once, in order of use.
    fn candidates<'a>(&self, weights: &'a WeightPlan) -> Vec<Candidate<'a>> {
        let whole = |it: &&WeightUse| it.access == MatrixAccess::Whole;
        let uses = || weights.uses.iter().filter(whole);
        let once = |of: &&WeightUse| uses().filter(|it| it.matrix == of.matrix).count() == 1;
        let candidate = |of: &'a WeightUse| {
            let together = uses().filter(|it| it.operation == of.operation);
            Candidate {
                of,
                operation_bytes: together.map(|it| held(it.bytes)).sum(),
                is_streamed: self.streams(of.matrix),
            }
        };
        uses().filter(once).map(candidate).collect()
    }

    /// All weights but `streamed`, experts and neurons in memory.
    fn with_streamed(
        weights: &WeightPlan,
        source: WeightSource,
        streamed: &[&WeightUse],
        ring_bytes: u64,
    ) -> Self {
        let is_streamed = |matrix: usize| streamed.iter().any(|it| it.matrix == matrix);
        let multiplied = |matrix: usize| {
            let mut uses = weights.uses.iter();
            uses.any(|it| it.matrix == matrix && it.access == MatrixAccess::Whole)
        };
        let by_row = |it: &&WeightUse| {
            let stays = match multiplied(it.matrix) {
                true => !is_streamed(it.matrix),
                false => source != WeightSource::Direct,
            };
            it.access == MatrixAccess::Rows && !stays
        };
        let mut tables: Vec<Streamed> = Vec::new();
        for table in weights.uses.iter().filter(by_row) {
            if tables.iter().all(|known| known.matrix != table.matrix) {
                tables.push(Streamed {
                    name: table.name.clone(),
                    bytes: table.row_bytes,
                    matrix: table.matrix,
                });
            }
        }
        let read = |matrix| is_streamed(matrix) || tables.iter().any(|it| it.matrix == matrix);
        let stays = weights.matrices().filter(|it| !read(it.matrix));
        let pinned_bytes = stays.map(|it| held(it.bytes)).sum::<u64>() + weights.other_bytes();
        let row = tables.iter().map(|table| held(table.bytes)).max();
        let streamed = streamed.iter().map(|it| Streamed {
            name: it.name.clone(),
            bytes: it.bytes,
            matrix: it.matrix,
        });
        let streamed: Vec<Streamed> = streamed.collect();
        Self {
            source,
            pinned_bytes,
            ring_bytes,
            row_bytes: ROWS_KEPT * row.unwrap_or(0),
            streamed_bytes: streamed.iter().map(|it| it.bytes).sum(),
            streamed,
            tables,
            experts: None,
            neurons: NeuronSlots::of(&weights.neurons, 0),
        }
    }

    /// Bytes of memory in all.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        let beside_slots = self.neurons.map_or(0, |neurons| neurons.fixed_bytes);
        self.pinned_bytes + self.ring_bytes + self.row_bytes + beside_slots + self.slot_bytes()
    }

    fn slot_bytes(&self) -> u64 {
        let neurons = self.neurons.map_or(0, |neurons| neurons.bytes);
        self.experts.map_or(0, |experts| experts.bytes) + neurons
    }

    /// Whether weights are used where files are mapped.
    #[must_use]
    pub fn is_mapped(&self) -> bool {
        self.source == WeightSource::Mmap
    }

    /// Whether each pass reads the program's matrix of this number.
    fn streams(&self, matrix: usize) -> bool {
        self.streamed.iter().any(|it| it.matrix == matrix)
    }

    /// Whether the program's matrix of this number stays in memory.
    pub(crate) fn is_pinned(&self, matrix: usize) -> bool {
        let mut read = self.streamed.iter().chain(&self.tables);
        read.all(|it| it.matrix != matrix)
    }

    /// Seconds that one token takes at least. Computing and reading what every pass reads go on at the same time, so it
    /// is the longer of the two; what is read is written to memory before it is computed with, and so passes there twice. Experts are asked for when it is known which, and waited for. `hits` is the part of
    /// them that is found in memory; without, [`ExpertSlots::expected_hits`].
    #[must_use]
    pub fn seconds_per_token(&self, active_bytes: u64, rates: Rates, hits: Option<f64>) -> f64 {
        let disk = rates.disk.max(1) as f64;
        let passing = active_bytes + self.streamed_bytes;
        let computing = passing as f64 / rates.memory.max(1) as f64;
        let reading = self.streamed_bytes as f64 / disk;
        let experts = self.experts.as_ref().map_or(0.0, |slots| {
            let hits = hits.unwrap_or_else(|| slots.expected_hits());
            slots.bytes_per_token(hits) / disk
        });
        computing.max(reading) + experts
    }
}

/// What operations of `candidates` read, each number once, the least first.
fn largest_operations(candidates: &[Candidate<'_>]) -> Vec<u64> {
    let mut sizes: Vec<u64> = candidates.iter().map(|it| it.operation_bytes).collect();
    sizes.sort_unstable();
    sizes.dedup();
    sizes
}

/// Of `may`, which are in order of use, matrices that take at least `bytes` bytes of memory together, or all of them;
/// none that is streamed already.
///
/// They are the first ones of an order that has nothing to do with how many are wanted, so less memory only adds to
/// what is streamed. In that order each one lies far from those before it: the bits of its place in the pass, the last
/// first (van der Corput's sequence). Small ones come after all others.
fn spread<'a>(may: &[&Candidate<'a>], bytes: u64) -> Vec<&'a WeightUse> {
    let (large, small): (Vec<_>, Vec<_>) = may.iter().copied().partition(|it| it.of.bytes >= SMALL);
    let (mut sum, mut chosen) = (0, Vec::new());
    let order = apart(&large).chain(apart(&small));
    for candidate in order.filter(|it| !it.is_streamed) {
        if sum >= bytes {
            break;
        }
        sum += held(candidate.of.bytes);
        chosen.push(candidate.of);
    }
    chosen
}

/// All of `of`, each far from those before it.
fn apart<'a, 'b>(of: &[&'b Candidate<'a>]) -> impl Iterator<Item = &'b Candidate<'a>> {
    let bits = of.len().next_power_of_two().trailing_zeros();
    let mut order: Vec<usize> = (0..of.len()).collect();
    order.sort_by_key(|&place| (place as u32).reverse_bits() >> (32 - bits.max(1)));
    let found: Vec<_> = order.into_iter().map(|place| of[place]).collect();
    found.into_iter()
}
