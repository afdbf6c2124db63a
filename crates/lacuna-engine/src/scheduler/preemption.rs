//! Finding memory: pages for the step, and what is given up for them when there are too few.
//!
//! In this order: what a draft model has of sequences, cached groups that nobody uses and resume points, written to files before where that pays, then
//! tables that are lent and not used, then weights, which are read for each pass from then on, then the last of the running requests, which are preempted:
//! computed again later from what the cache still has of them, or brought back from the swap file. Weights get back
//! what KV pages have not needed for a while.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use lacuna_kv::KvError;
use lacuna_kv::prefix::Eviction;
use lacuna_pages::ByteLength;

use super::job::Choice;
use super::swapping::Urgency;
use super::{End, Job, Scheduler, Session, Waiting, sessions};
use crate::arbiter::{Arbiter, TEND_INTERVAL};
use crate::budget::{KvDemand, projected_bytes};
use crate::speculation::Drafter;
use crate::stream::Failure;

impl Scheduler {
    /// How long a request that is alone waits for pages that nobody should have any more: longer than a thread is not
    /// run on a machine with too much to do.
    pub(super) const PAGES_ON_THEIR_WAY: Duration = Duration::from_secs(1);

    /// How long after a pass activations stay in memory when there is nothing to compute: longer than people and
    /// programs pause between two requests of one task, since taking some 20 MB again costs the next prompt about two
    /// milliseconds.
    pub(super) const REST: Duration = Duration::from_secs(1);

    /// How long pages that nobody has stay in memory when there is nothing to compute: taking 64 MiB of them again costs the
    /// next request some 25 milliseconds (`lacuna bench pages`).
    pub(super) const LONG_REST: Duration = Duration::from_secs(10);

    /// Bytes of pages that a session or the cache holds.
    pub(super) fn owned_bytes(&self) -> u64 {
        let ledger = self.engine.kv_cache().ledger();
        ledger.committed.saturating_sub(ledger.idle).get()
    }

    /// Follows the system's memory and the cache's time to live; gives back what only passes need when there are none.
    pub(super) fn tend(&mut self, now: Instant) {
        let due = |last: Instant| now.duration_since(last) >= TEND_INTERVAL;
        if !self.tended.is_none_or(due) {
            return;
        }
        self.tended = Some(now);
        if let Some(time_to_live) = self.config.prefix_cache.time_to_live {
            while self.expire(now, time_to_live) {
                self.idle_since = Some(now);
            }
            if let Some(then) = now.checked_sub(time_to_live) {
                self.take_back_unused_since(then);
            }
        }
        self.memory = self.system.memory(self.lent_bytes());
        let demand = self.kv_demand();
        self.arbiter().follow(demand);
        while self.owned_bytes() > self.kv_limit && self.evict() {}
        let demand = self.kv_demand();
        self.arbiter().give_to_system(demand);
        while self.owned_bytes() > self.kv_limit && self.give_up_one() {}
        let bytes = self.restorable();
        self.arbiter().restore(bytes, now);
        let rested = |last: Instant| now.duration_since(last) >= Self::REST;
        if self.is_idle() && self.passed.is_none_or(rested) && self.holds_activations() {
            self.give_back_activations();
        }
        let rested = |since: Instant| now.duration_since(since) >= Self::LONG_REST;
        if self.is_idle() && self.idle_since.is_some_and(rested) {
            self.engine.kv_cache().pool().trim();
            self.idle_since = None;
        }
    }

    /// The parts of the budget that change places.
    pub(super) fn arbiter(&mut self) -> Arbiter<'_> {
        Arbiter {
            engine: &mut *self.engine,
            budget: &mut self.budget,
            memory: &mut self.memory,
            kv_limit: &mut self.kv_limit,
            spare_since: &mut self.spare_since,
        }
    }

    /// Bytes of KV pages that weights could have, if nobody waits for memory.
    pub(super) fn restorable(&mut self) -> u64 {
        if !self.waiting.is_empty() {
            return 0;
        }
        let used = (self.owned_bytes() + self.promised_bytes()).max(self.first_needs());
        self.arbiter().restorable(used)
    }

    /// Makes `bytes` what the process may commit from now on. What there is too much of goes in the order in which
    /// memory is found for a step; what there is more of is for KV pages, and weights get it back as they get theirs.
    pub(crate) fn set_budget(&mut self, bytes: u64) {
        // What has come back from the swap file by now runs, and gives way in its turn.
        self.follow_swaps();
        if self.owned_bytes() + self.budget.parts.read_weight_bytes > self.room(bytes) {
            self.take_back();
        }
        self.divide(bytes);
        // The first request, too: it is computed again, and fails if it cannot fit. What the cache keeps of it goes as well.
        while self.owned_bytes() > self.kv_limit
            && (self.give_up_one() || self.preempt_last(Urgency::Now))
        {}
    }

    /// What a budget of `bytes` has for KV pages and weights together.
    pub(super) fn room(&self, bytes: u64) -> u64 {
        let parts = &self.budget.parts;
        bytes.saturating_sub(parts.besides_kv() - parts.read_weight_bytes)
    }

    /// Makes `bytes` what the process may commit, of which what is lent stays lent and the first request keeps its pages.
    pub(super) fn divide(&mut self, bytes: u64) {
        let room = self.room(bytes);
        while self.owned_bytes() + self.budget.parts.read_weight_bytes > room && self.evict() {}
        let page = self.engine.kv_cache().page_bytes() as u64;
        let used = self.owned_bytes().max(self.first_needs()).max(page);
        let wanted = used.max(self.engine.kv_to_begin_with(bytes).min(room));
        let excess = (self.budget.parts.read_weight_bytes + wanted).saturating_sub(room);
        let excess = excess.min(self.engine.weights_to_spare());
        self.arbiter().spare(excess);
        self.budget.budget_bytes = Some(bytes);
        let kv_bytes = room.saturating_sub(self.budget.parts.read_weight_bytes);
        self.budget = self.budget.with_kv(kv_bytes);
        self.tell_most();
        self.tended = None;
        self.tend(self.system.now());
    }

    /// Tells those who take requests what KV pages may come to: what is lent is theirs again when nobody uses it.
    pub(super) fn tell_most(&self) {
        let most = self.kv_share().saturating_add(self.lent_bytes());
        self.kv_most.store(most, Ordering::Relaxed);
    }

    pub(super) fn kv_demand(&self) -> KvDemand {
        KvDemand {
            share: self.kv_share(),
            committed: self.engine.kv_cache().ledger().committed.get(),
            in_use: self.owned_bytes(),
            first: self.first_needs(),
            mapped: self.budget.mapped_weight_bytes + self.engine.kv_cache().ledger().file.get(),
        }
    }

    /// Bytes of pages with which the first request goes on, or the first that waits begins: its
    /// tokens so far and a group more for each choice, as if nothing were cached.
    pub(super) fn first_needs(&self) -> u64 {
        match (self.running.first(), self.waiting.front()) {
            (Some(first), _) => {
                let choices = first.sessions.iter().map(|session| &session.choice);
                self.needs(&first.job, choices.chain(&first.followers))
            }
            (None, Some(first)) => self.needs(&first.job, first.choices.iter()),
            (None, None) => 0,
        }
    }

    fn needs<'a>(&self, job: &Job, choices: impl Iterator<Item = &'a Choice>) -> u64 {
        let lengths = choices.map(|choice| choice.tokens.len());
        let (count, longest) = lengths.fold((0, job.prompt_tokens), |(count, longest), length| {
            (count + 1, longest.max(length))
        });
        let (cache, pages) = (self.engine.kv_cache(), self.pages());
        let context = self.engine.context_tokens();
        let tokens = (longest + pages.grain.group_tokens().get()).min(context);
        let shared = projected_bytes(&pages, job.prompt_tokens, tokens, count);
        // What takes whole contexts, or copies to grow, needs at least this for one sequence.
        shared.max(cache.sequence_peak_bytes(context, tokens))
    }

    /// Maps the pages the step will write to, for the first request first.
    pub(super) fn prepare(&mut self, now: Instant) {
        let (mut index, mut shortage) = (0, None);
        self.waits_for_pages = false;
        while index < self.running.len() {
            for session in 0..self.running[index].sessions.len() {
                shortage = self.prepare_session(index, session).err().or(shortage);
            }
            let restarts =
                |session: &Session| session.sequence.has_lost_rows() || session.sequence.is_spent();
            match self.running[index].sessions.iter().any(restarts) {
                true => self.preempt(index, Urgency::Now),
                false => index += 1,
            }
        }
        self.note_starvation(now, shortage.as_ref());
    }

    /// # Errors
    /// Why the session gets no pages in this step although everything after it was given up.
    fn prepare_session(&mut self, index: usize, session: usize) -> Result<(), KvError> {
        loop {
            let one = &mut self.running[index].sessions[session];
            let Err(error) = one.prepare() else {
                return Ok(());
            };
            if one.drop_guesses() {
                continue;
            }
            let restarts = matches!(error, KvError::RowsLost | KvError::StateSpent);
            let lost = self.has_lost_files() || self.engine.has_lost_device();
            let found = !restarts && !lost && self.find_pages(index, &error);
            if !found {
                self.running[index].sessions[session].scheduled = 0;
                return Err(error);
            }
        }
    }

    /// Finds memory for the request at `index`. What is being written comes free, and may be enough.
    pub(super) fn find_pages(&mut self, index: usize, shortage: &KvError) -> bool {
        if self.give_up_guessing() {
            return true;
        }
        match self.put_aside() {
            Eviction::Evicted => true,
            Eviction::Nothing if self.take_back() || self.take_from_weights(shortage) => true,
            Eviction::Nothing if !self.is_freeing() => self.preempt_after(index, Urgency::Soon),
            // It may be there before this step ends.
            Eviction::Writing | Eviction::Nothing => {
                self.waits_for_pages = true;
                false
            }
        }
    }

    /// Makes room for a session that is none of the scheduler's own, which lacked pages as `shortage` says: in the usual
    /// order, and of the running requests the first, too, which would fail otherwise for what it does not know of.
    /// Returns whether there was anything to give up.
    pub(crate) fn make_room_beside(&mut self, shortage: &KvError) -> bool {
        is_limit(shortage)
            && (self.evict()
                || self.take_back()
                || self.take_from_weights(shortage)
                || self.give_up_freeing()
                || self.preempt_last(Urgency::Now))
    }

    /// Gives up one thing at once: a cached group, a resume point, what is lent and not used, what is on its way to the swap
    /// file or has just come from it, or the last request but the first.
    fn give_up_one(&mut self) -> bool {
        self.evict()
            || self.take_back()
            || self.give_up_freeing()
            || self.preempt_after(0, Urgency::Now)
    }

    /// Takes the memory of weights for the pages that a session lacks, as far as the system has some.
    pub(super) fn take_from_weights(&mut self, shortage: &KvError) -> bool {
        let KvError::Pages(lacuna_pages::Error::OutOfPages { requested, .. }) = shortage else {
            return false;
        };
        let bytes = requested.get() * self.engine.kv_cache().page_bytes() as u64;
        self.arbiter().take(bytes)
    }

    /// Gives up what a draft model has of one sequence, which goes on without its guesses: nothing else costs so little.
    pub(super) fn give_up_draft(&mut self) -> bool {
        self.drafter.as_mut().is_some_and(Drafter::give_up_one)
    }

    /// Gives up what one sequence is guessed for with: what a draft model has of it, or what its states go back with.
    pub(super) fn give_up_guessing(&mut self) -> bool {
        self.give_up_draft() || {
            let sessions = self.running.iter_mut().rev();
            let mut sessions = sessions.flat_map(|running| running.sessions.iter_mut().rev());
            sessions.any(Session::give_up_rewinding)
        }
    }

    /// Bytes of pages with which states go back from wrong guesses.
    pub(super) fn rewind_bytes(&self) -> u64 {
        let sessions = self.running.iter().flat_map(|running| &running.sessions);
        sessions
            .map(|session| session.sequence.rewind_memory())
            .sum()
    }

    /// Bytes of pages that a draft model has.
    pub(super) fn draft_bytes(&self) -> u64 {
        self.drafter.as_ref().map_or(0, Drafter::bytes)
    }

    /// Gives up a draft, a cached group or a resume point, or takes pages back that are on their way to a cache folder, from
    /// it, or from the swap file.
    pub(super) fn evict(&mut self) -> bool {
        if self.give_up_guessing() {
            return true;
        }
        let (before, owned) = (self.kept(), self.owned_bytes());
        if !self.prefix.evict(self.system.now()) {
            return self.prefix.give_up_writing()
                || self.cancel_restoring()
                || self.cancel_returning();
        }
        self.count_evicted(before);
        if self.owned_bytes() == owned {
            // They may be pages that wait to be written.
            self.prefix.give_up_writing();
        }
        true
    }

    /// Groups and resume points that the cache has.
    pub(super) fn kept(&self) -> (usize, usize) {
        (self.prefix.tree().len(), self.prefix.tree().resume_points())
    }

    /// Counts what has left since the cache had so many.
    pub(super) fn count_evicted(&mut self, (groups, points): (usize, usize)) {
        let (groups_left, points_left) = self.kept();
        self.counters.evicted_groups += (groups - groups_left) as u64;
        self.counters.evicted_resume_points += (points - points_left) as u64;
    }

    /// Whether a file of the cache folder that is mapped cannot be read any more.
    pub(super) fn has_lost_files(&self) -> bool {
        self.engine.kv_cache().pool().has_lost_files()
    }

    /// Lets go of all pages, because some are of a file that cannot be read any more: what runs is computed again.
    /// Somebody has cut a file of the cache folder, or its disk fails; that is too rare to tell whose pages they are.
    pub(super) fn give_up_files(&mut self) -> bool {
        sessions(&mut self.running).for_each(|session| session.scheduled = 0);
        while self.preempt_last(Urgency::Now) {}
        while self.cancel_returning() || self.give_up_freeing() {}
        while self.evict() {}
        true
    }

    fn preempt_after(&mut self, keep: usize, urgency: Urgency) -> bool {
        self.running.len() > keep + 1 && self.preempt_last(urgency)
    }

    /// Takes the pages of the last request. Returns whether there was one.
    pub(super) fn preempt_last(&mut self, urgency: Urgency) -> bool {
        let last = self.running.len().checked_sub(1);
        last.map(|last| self.preempt(last, urgency)).is_some()
    }

    /// Takes a request's pages; it waits, in its old place, to be computed again, or for its pages to come back.
    fn preempt(&mut self, index: usize, urgency: Urgency) {
        let mut running = self.running.remove(index);
        self.counters.preemptions += 1;
        if urgency == Urgency::Soon {
            running = match self.send_away(running) {
                None => return,
                Some(running) => running,
            };
        }
        let sessions = running.sessions.into_iter();
        let mut choices: VecDeque<_> = sessions.map(|session| self.let_go(session)).collect();
        choices.extend(running.followers);
        self.enqueue(Waiting::again(running.job, choices));
    }

    /// When nothing can be computed for want of memory, the last request is preempted, and one that is
    /// alone fails: in one of the next steps if it has all there is, after a while if the system may give some back.
    fn note_starvation(&mut self, now: Instant, shortage: Option<&KvError>) {
        let idle = |session: &Session| session.scheduled == 0;
        let starved = self
            .running
            .iter()
            .any(|running| running.job.stalled.is_none())
            && self
                .running
                .iter()
                .flat_map(|running| &running.sessions)
                .all(idle);
        if !starved || self.waits_for_pages {
            self.starved = None;
            return;
        }
        if self.running.len() > 1 {
            self.preempt_last(Urgency::Soon);
            self.starved = None;
            return;
        }
        let Some(since) = self.starved else {
            // A thread that writes to the folder may have let go of pages since they were asked for, so that there
            // was nothing to evict and there is room: they are asked for once more.
            self.starved = Some(now);
            return;
        };
        let refused = shortage.filter(|error| !is_limit(error));
        let final_word = refused.is_none() && self.kv_limit >= self.budget.parts.kv_bytes;
        let patience = match final_word {
            // A thread of the folder or of the swap file that is not run just then may hold pages that were taken back,
            // or the device may still be at work on some.
            true if self.swap.is_some() || self.prefix.has_folder() || self.has_retiring() => {
                Self::PAGES_ON_THEIR_WAY
            }
            true => Duration::ZERO,
            false => Self::STARVATION,
        };
        if now.duration_since(since) < patience
            || (final_word && (self.share_again() || self.take_back_from_waiting()))
        {
            return;
        }
        let why = refused.map_or_else(
            || {
                format!(
                    "{} of KV cache are not enough",
                    ByteLength::new(self.kv_limit)
                )
            },
            ToString::to_string,
        );
        if let Some(running) = self.running.pop() {
            self.close(running, End::Failed(Failure::OutOfMemory(why)));
        }
        // Whoever runs next has not waited for anything yet.
        self.starved = None;
    }
}

impl Scheduler {
    /// Whether the device has yet to be done with pages that nobody has any more.
    fn has_retiring(&self) -> bool {
        self.engine.kv_cache().ledger().retiring.get() > 0
    }

    /// The request that is alone may have pages of its own of groups that the cache has too, because they came in
    /// another way while it computed them. It starts again from those of the cache. Returns whether it does; not
    /// twice without a token more.
    pub(super) fn share_again(&mut self) -> bool {
        let apart = self.engine.kv_cache().ledger().pinned_only.get();
        let Some(running) = self.running.first_mut().filter(|_| apart > 0) else {
            return false;
        };
        let tokens = running
            .sessions
            .iter()
            .map(|session| session.sequence.len());
        let tokens = tokens.sum();
        if tokens <= running.job.shared_at {
            return false;
        }
        running.job.shared_at = tokens;
        self.preempt_last(Urgency::Now)
    }
}

/// Whether the pool's limit is what stood in the way, and not the system.
fn is_limit(error: &KvError) -> bool {
    matches!(
        error,
        KvError::Pages(lacuna_pages::Error::OutOfPages { .. })
    )
}
