//! What a service is doing, as plain figures.

use std::time::Duration;

use lacuna_kv::folder::FolderStatus;
use lacuna_kv::swap::SwapStatus;
use lacuna_models::plan::{Budget, ExpertSlots, NeuronSlots};
use lacuna_models::{ExecutorMemory, ExpertCounts, NeuronReads, RowReads};
use lacuna_pages::{ByteLength, Ledger};

use crate::request_memory::RequestMemoryStatus;
use crate::speculation::Drafts;

/// A device that computes in place of the processor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceStatus {
    /// What its driver calls it.
    pub name: String,
    /// How many of the last layers it computes, and the output with them.
    pub layers: usize,
    /// How many of the first the processor computes beside it.
    pub host_layers: usize,
    /// What it has of the model.
    pub memory: ExecutorMemory,
    /// KV pages in its memory; those of the other layers are the processor's.
    pub kv: ByteLength,
}

/// A service at one moment. Totals are as of the last step; the ledger, the sessions and the cache's
/// figures are of one moment after a step, so that they add up, and may be a tenth of a second older.
#[derive(Debug, Clone, Default)]
pub struct Status {
    /// The pool's byte accounts.
    pub ledger: Ledger,
    /// What may be held, and what is held besides pages.
    pub budget: BudgetStatus,
    /// The device that computes, where that is not the processor.
    pub device: Option<DeviceStatus>,
    /// Sizes that make page counts readable.
    pub pages: PageSizes,
    /// Choices that hold pages, oldest first.
    pub sessions: Vec<SessionStatus>,
    /// Requests that are running.
    pub running: usize,
    /// Requests that wait to run.
    pub waiting: usize,
    /// The prefix cache.
    pub cache: CacheStatus,
    /// Experts of a mixture, where weights are read into memory.
    pub experts: Option<ExpertStatus>,
    /// Neurons that are read one by one.
    pub neurons: Option<NeuronStatus>,
    /// The folder in which the prefix cache outlives the process, if there is one.
    pub folder: Option<FolderStatus>,
    /// The swap file, if there is one.
    pub swap: Option<SwapStatus>,
    /// What of the cache was put aside in files beside it, if there are such.
    pub aside: Option<FolderStatus>,
    /// Requests whose pages are in it, on their way there or back.
    pub swapped: usize,
    /// How rows of tables that are in files have been had.
    pub row_reads: RowReads,
    /// What requests hold outside the KV cache.
    pub request_memory: RequestMemoryStatus,
    /// Totals since the start.
    pub counters: Counters,
    /// Times since the start.
    pub latencies: Latencies,
}

/// The byte budget and what it is made of.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct BudgetStatus {
    /// What was planned.
    pub plan: Budget,
    /// What the process has beyond the plan, which KV pages do not get.
    pub beyond_plan: ByteLength,
    /// What KV pages may take now: their part, or less while the process is beyond its plan or the
    /// system is short of memory.
    pub kv_now: ByteLength,
    /// What holding whole contexts from the start would take for the sessions there are.
    pub dense: ByteLength,
    /// What weights that are read have of it.
    pub weights: WeightMemory,
}

/// Memory of weights that are read from their files, by what it is for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WeightMemory {
    /// Of those that stay.
    pub pinned: ByteLength,
    /// That the others go through in each pass.
    pub ring: ByteLength,
    /// For rows of tables.
    pub rows: ByteLength,
    /// Slots of experts.
    pub experts: ByteLength,
    /// Slots of neurons, and what they take besides.
    pub neurons: ByteLength,
    /// Beside it: bytes of files that each pass reads.
    pub streamed: ByteLength,
}

/// Slots for the experts of a mixture, and what they have been asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertStatus {
    /// How many there are now.
    pub slots: ExpertSlots,
    /// Since the model was loaded.
    pub counts: ExpertCounts,
}

impl ExpertStatus {
    /// What tokens' experts say about slots, in words. `None` before enough of them were asked for, which is
    /// when every slot may have been filled twice.
    #[must_use]
    pub fn finding(&self) -> Option<&'static str> {
        let (slots, counts) = (&self.slots, &self.counts);
        let enough = 2 * (slots.slots * slots.layers) as u64;
        let rate = counts
            .hit_rate()
            .filter(|_| counts.hits + counts.misses >= enough);
        rate.map(|rate| slots.finding(rate))
    }
}

/// Slots for neurons, and what passes have asked of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NeuronStatus {
    /// How many there are now.
    pub slots: NeuronSlots,
    /// Since the model was loaded.
    pub reads: NeuronReads,
}

/// Sizes of pages and page groups.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PageSizes {
    /// Bytes of one page.
    pub page: ByteLength,
    /// Bytes of one page group: one page per buffer that keeps all rows, rounded up where rows straddle
    /// pages; none where all layers have windows.
    pub group: ByteLength,
    /// Tokens of one page group.
    pub group_tokens: usize,
    /// Bytes of one token over all layers.
    pub token: ByteLength,
    /// Bytes that each token more takes for good: of the layers that keep all rows.
    pub kept_token: ByteLength,
    /// Bytes of one session's windows once they are full.
    pub windows: ByteLength,
    /// Bytes of one session's states, and of those that a resume point keeps.
    pub states: ByteLength,
    /// Bytes of one resume point at most: of windows, several may have pages in common.
    pub resume_point: ByteLength,
    /// Buffers of one session.
    pub buffers: usize,
}

/// One choice and its pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionStatus {
    /// The request, numbered from the service's start.
    pub request: u64,
    /// Which choice of it.
    pub choice: usize,
    /// What it is doing.
    pub phase: Phase,
    /// Tokens in the KV cache.
    pub cached_tokens: usize,
    /// Tokens in all, those still to be computed included.
    pub tokens: usize,
    /// Tokens of its prompt.
    pub prompt_tokens: usize,
    /// Those of them that were found in the cache when it first started.
    pub reused_tokens: usize,
    /// The first token of the prompt in whose place only others were kept then, counted from zero.
    pub differs_at: Option<usize>,
    /// Bytes of the rows that are of use to it, those it shares with others included.
    pub rows: ByteLength,
    /// Bytes of its states, those it shares with others included.
    pub states: ByteLength,
    /// Bytes mapped for it that hold no row yet.
    pub slack: ByteLength,
    /// Page groups from the first on, runs of the same state together.
    pub groups: Vec<GroupRun>,
}

/// What a running choice is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Its prompt is being computed.
    Prefill,
    /// It generates.
    Decode,
    /// Its client does not read; it does not go on.
    Stalled,
}

/// Page groups of one state, next to each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GroupRun {
    /// Their state.
    pub state: GroupState,
    /// How many.
    pub groups: usize,
}

/// Whose the pages of a group are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GroupState {
    /// Mapped by more than one session.
    Shared,
    /// Mapped by this session, and kept by the prefix cache after it.
    Cached,
    /// This session's alone.
    Unique,
    /// The last group, filled in part: its rest is slack.
    Partial,
}

/// The prefix cache at one moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CacheStatus {
    /// Page groups it holds.
    pub groups: usize,
    /// Those that no session uses.
    pub unused_groups: usize,
    /// Those that are pinned.
    pub pinned_groups: usize,
    /// Resume points, where layers have windows or keep states: ends of groups that a request can go on from.
    pub resume_points: usize,
}

/// Totals since the service's start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Requests taken.
    pub requests: u64,
    /// Requests whose choices all ended.
    pub finished: u64,
    /// Requests cancelled by their client.
    pub cancelled: u64,
    /// Requests that failed.
    pub failed: u64,
    /// Requests not taken.
    pub refused: u64,
    /// Times a request gave its pages up for an older one.
    pub preemptions: u64,
    /// Steps made.
    pub steps: u64,
    /// Tokens of prompts that were taken up, those reused included.
    pub prompt_tokens: u64,
    /// Tokens of prompts found in the cache.
    pub reused_tokens: u64,
    /// Tokens generated.
    pub generated_tokens: u64,
    /// What has come of guessed tokens.
    pub drafts: Drafts,
    /// Page groups evicted for room.
    pub evicted_groups: u64,
    /// Resume points evicted for room: pages of windows, and states.
    pub evicted_resume_points: u64,
    /// Page groups given up after their time to live.
    pub expired_groups: u64,
}

/// Times since the service's start.
#[derive(Debug, Clone, Default)]
pub struct Latencies {
    /// From submission to the first token.
    pub first_token: Histogram,
    /// Between tokens of one choice.
    pub inter_token: Histogram,
    /// From submission to the end.
    pub end_to_end: Histogram,
    /// From submission to running.
    pub queue: Histogram,
}

/// When the queue will have moved by one, at the rate requests have been served so far.
pub(crate) fn retry_after(latencies: &Latencies, max_running: usize) -> Duration {
    let served = &latencies.end_to_end;
    let mean = served.sum().as_secs_f64() / served.count().max(1) as f64;
    let seconds = mean / max_running as f64;
    Duration::from_secs_f64(seconds.clamp(1.0, 60.0))
}

/// Counts of durations by upper bound.
#[derive(Debug, Clone, Default)]
pub struct Histogram {
    counts: [u64; Self::BOUNDS.len() + 1],
    sum: Duration,
}

impl Histogram {
    /// Upper bounds in seconds, rising; one more count is for everything above.
    pub const BOUNDS: [f64; 18] = [
        0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
        30.0, 60.0, 300.0,
    ];

    pub(crate) fn observe(&mut self, time: Duration) {
        let seconds = time.as_secs_f64();
        let slot = Self::BOUNDS.partition_point(|&bound| bound < seconds);
        self.counts[slot] += 1;
        self.sum += time;
    }

    /// Durations per bound, each counted once; the last count is for those above every bound.
    #[must_use]
    pub fn counts(&self) -> &[u64] {
        &self.counts
    }

    /// Durations observed.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Their sum.
    #[must_use]
    pub fn sum(&self) -> Duration {
        self.sum
    }
}
