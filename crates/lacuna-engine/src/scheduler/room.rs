//! Finding memory: pages for the step, and what gives way when there are too few.
//!
//! In this order: cached groups that nobody uses, then the newest requests, which are computed again
//! later from what the cache still has of them.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use lacuna_kv::KvError;
use lacuna_pages::ByteLength;

use super::{End, Scheduler, Session, Waiting};
use crate::budget::working_limit;
use crate::stream::Failure;

impl Scheduler {
    /// How often the system is asked how much memory it has, and the cache for what has expired.
    const TEND_INTERVAL: Duration = Duration::from_millis(250);

    /// Bytes of pages that a session or the cache holds.
    pub(super) fn owned_bytes(&self) -> u64 {
        let ledger = self.engine.kv_cache().ledger();
        ledger.committed.saturating_sub(ledger.idle).get()
    }

    /// Follows the system's memory and the cache's time to live.
    pub(super) fn tend(&mut self, now: Instant) {
        let due = |last: Instant| now.duration_since(last) >= Self::TEND_INTERVAL;
        if !self.tended.is_none_or(due) {
            return;
        }
        self.tended = Some(now);
        if let Some(time_to_live) = self.config.prefix_cache.time_to_live {
            while self.prefix.expire(now, time_to_live) {
                self.counters.expired_groups += 1;
            }
        }
        let committed = self.engine.kv_cache().ledger().committed.get();
        let limit = working_limit(
            self.budget.kv,
            committed,
            self.owned_bytes(),
            (self.system)(),
        );
        self.set_limit(limit.max(self.engine.kv_cache().page_bytes() as u64));
        while self.owned_bytes() > self.kv_limit && self.give_way(0) {}
    }

    /// A limit that cannot be set leaves the one there was, which held so far.
    fn set_limit(&mut self, limit: u64) {
        let set = limit == self.kv_limit
            || (self.engine.kv_cache())
                .set_limit(ByteLength::new(limit))
                .is_ok();
        if set {
            self.kv_limit = limit;
        }
    }

    /// Maps the pages the step will write to, for the oldest request first.
    pub(super) fn prepare(&mut self, now: Instant) {
        let mut index = 0;
        while index < self.running.len() {
            for session in 0..self.running[index].sessions.len() {
                self.prepare_session(index, session);
            }
            index += 1;
        }
        self.note_starvation(now);
    }

    fn prepare_session(&mut self, index: usize, session: usize) {
        loop {
            let one = &mut self.running[index].sessions[session];
            let Err(error) = one.sequence.prepare(one.scheduled) else {
                return;
            };
            if !self.make_room(&error, index) {
                self.running[index].sessions[session].scheduled = 0;
                return;
            }
        }
    }

    /// Frees what `error` says is short, without touching requests up to `keep`. Returns whether
    /// anything was freed.
    fn make_room(&mut self, error: &KvError, keep: usize) -> bool {
        let page = self.engine.kv_cache().page_bytes() as u64;
        let short = match error {
            KvError::Pages(lacuna_pages::Error::OutOfPages {
                requested, free, ..
            }) => page * requested.get().saturating_sub(free.get()),
            _ => page,
        };
        let before = self.owned_bytes();
        let mut gave = false;
        while before.saturating_sub(self.owned_bytes()) < short {
            if !self.give_way(keep) {
                return gave;
            }
            gave = true;
        }
        true
    }

    /// Gives up one thing: a cached group, or the newest request after `keep`.
    fn give_way(&mut self, keep: usize) -> bool {
        if self.prefix.evict(Instant::now()) {
            self.counters.evicted_groups += 1;
            return true;
        }
        self.running.len() > keep + 1 && self.preempt_newest()
    }

    /// Takes the newest request's pages; it waits, before all others, to be computed again.
    fn preempt_newest(&mut self) -> bool {
        let Some(running) = self.running.pop() else {
            return false;
        };
        self.counters.preemptions += 1;
        let sessions = running.sessions.into_iter();
        let mut choices: VecDeque<_> = sessions.map(|session| self.let_go(session)).collect();
        choices.extend(running.followers);
        self.waiting.push_front(Waiting {
            job: running.job,
            choices,
        });
        true
    }

    /// When nothing can be computed for want of memory, the newest gives way, and one that is alone
    /// fails: at once if it has all there is, after a while if the system may give some back.
    fn note_starvation(&mut self, now: Instant) {
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
        if !starved {
            self.starved = None;
            return;
        }
        let since = *self.starved.get_or_insert(now);
        if self.running.len() > 1 {
            self.preempt_newest();
        } else if self.kv_limit == self.budget.kv || now - since >= Self::STARVATION {
            let limit = ByteLength::new(self.kv_limit);
            if let Some(running) = self.running.pop() {
                let failure = Failure::OutOfMemory(format!("{limit} of KV cache are not enough"));
                self.close(running, End::Failed(failure));
            }
        }
    }
}
