//! Who has the memory of a budget: KV pages, or weights that are read into memory.
//!
//! KV pages take from weights what they come to need; what the system runs short of is taken from both, and from weights
//! when all pages are in use; and weights get back what pages have not needed for a while. What leaves memory is read
//! for each pass from then on, so no result changes. The rules are the same for a service and for sessions that are
//! stepped one by one.

use std::time::{Duration, Instant};

use lacuna_models::plan::Budget;
use lacuna_pages::ByteLength;

use crate::budget::{KvDemand, Reading, restorable_bytes, weights_beyond, working_limit};
use crate::runner::ModelRunner;

/// How often the system is asked how much memory it has.
pub(crate) const TEND_INTERVAL: Duration = Duration::from_millis(250);

/// How long KV pages must have been too many before weights get some of their memory: who asks next in a
/// conversation asks soon, and would take it away again.
pub(crate) const SPARE_PATIENCE: Duration = Duration::from_secs(2);

/// Weights that are brought back together, at most: the step that waits for them takes an eighth of a second
/// longer where a disk reads 2 GB a second.
pub(crate) const RESTORED_AT_ONCE: u64 = 256 << 20;

/// The parts of a budget that change places, and all that decides about them.
pub(crate) struct Arbiter<'a> {
    pub(crate) engine: &'a mut dyn ModelRunner,
    pub(crate) budget: &'a mut Budget,
    /// What the system said when it was last asked; what weights have given back since is part of it.
    pub(crate) memory: &'a mut Reading,
    /// What KV pages may take now.
    pub(crate) kv_limit: &'a mut u64,
    /// Since when KV pages could do with so much less that weights are to have it.
    pub(crate) spare_since: &'a mut Option<Instant>,
}

impl Arbiter<'_> {
    /// Makes the limit of KV pages what their share and the system allow.
    pub(crate) fn follow(&mut self, demand: KvDemand) {
        let own = kv_share(self.budget, *self.memory);
        let limit = working_limit(demand, *self.memory).min(own);
        let page = self.engine.kv_cache().page_bytes() as u64;
        self.set_limit(limit.max(page));
    }

    /// Gives the system what it lacks beside KV pages that are in use, out of weights, as far as they can be done without.
    pub(crate) fn give_to_system(&mut self, demand: KvDemand) {
        let beyond = weights_beyond(demand, *self.memory).min(self.engine.weights_to_spare());
        if beyond > 0 {
            let freed = self.spare(beyond);
            let available = &mut self.memory.available;
            *available = available.map(|available| available + freed);
            self.follow(demand);
        }
    }

    /// Makes memory of weights the part of KV pages. Returns how much that is: `bytes` or more, or nothing.
    pub(crate) fn spare(&mut self, bytes: u64) -> u64 {
        // Weights leave many at a time, so for nothing some would go, too.
        if bytes == 0 {
            return 0;
        }
        let freed = self.engine.spare_weights(bytes);
        self.budget.parts.read_weight_bytes -= freed;
        self.budget.parts.kv_bytes += freed;
        freed
    }

    /// Takes `bytes` of memory of weights for pages, as far as there are. Returns whether there were any.
    pub(crate) fn take(&mut self, bytes: u64) -> bool {
        if self.engine.weights_to_spare() == 0 {
            return false;
        }
        let freed = self.spare(bytes);
        self.set_limit(*self.kv_limit + freed);
        freed > 0
    }

    /// Lets KV pages have all of their share, whatever the system has. Returns whether that is more.
    pub(crate) fn take_share(&mut self) -> bool {
        let (before, share) = (*self.kv_limit, kv_share(self.budget, *self.memory));
        self.set_limit(share.max(before));
        *self.kv_limit > before
    }

    /// Bytes of KV pages that weights could have while `used` bytes of pages are in use and promised.
    pub(crate) fn restorable(&self, used: u64) -> u64 {
        if self.engine.has_all_weights() {
            return 0;
        }
        let share = kv_share(self.budget, *self.memory).min(*self.kv_limit);
        let budget = self.budget.budget_bytes.unwrap_or(u64::MAX);
        let spare = restorable_bytes(share, used, self.engine.kv_to_begin_with(budget));
        spare.min(RESTORED_AT_ONCE)
    }

    /// Gives weights `bytes` of KV pages back, once these have been too many for a while.
    pub(crate) fn restore(&mut self, bytes: u64, now: Instant) {
        if bytes == 0 {
            *self.spare_since = None;
            return;
        }
        let since = *self.spare_since.get_or_insert(now);
        if now.duration_since(since) < SPARE_PATIENCE {
            return;
        }
        // While weights are read, the memory is not for pages any more.
        let limit = *self.kv_limit;
        self.set_limit(limit - bytes);
        if self.engine.kv_cache().ledger().committed.get() > limit - bytes {
            // A device that still has to take pages back.
            self.set_limit(limit);
            return;
        }
        let before = self.budget.parts.read_weight_bytes;
        let after = self.engine.restore_weights(bytes);
        let parts = &mut self.budget.parts;
        parts.kv_bytes = parts.kv_bytes + before - after;
        parts.read_weight_bytes = after;
        self.set_limit(limit + before - after);
        if after == before {
            *self.spare_since = None;
        }
    }

    /// A limit that cannot be set leaves the one there was, which held so far.
    pub(crate) fn set_limit(&mut self, limit: u64) {
        let set = limit == *self.kv_limit
            || (self.engine.kv_cache())
                .set_limit(ByteLength::new(limit))
                .is_ok();
        if set {
            *self.kv_limit = limit;
        }
    }
}

/// The part of KV pages, less what the process has beyond the plan for its other parts.
pub(crate) fn kv_share(budget: &Budget, memory: Reading) -> u64 {
    budget.parts.kv_bytes.saturating_sub(memory.beyond_plan)
}
