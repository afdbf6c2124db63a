//! Preempted requests whose pages wait in a swap file: moved there when that costs less than computing them again.
//!
//! ```text
//!   preempted           room again            there
//! ------------> away ----------------> back ---------> running
//!                | the file fails, or is slow    | it fails
//!                +-------------------------------+------> waiting, to be computed again
//! ```
//!
//! Pages come free as they are written, the last tokens' first. Whoever lacks them waits for that, and takes part in
//! no step meanwhile; the others go on. A file that does not move for a while is given up, and with it the pages.
//!
//! What the cache would evict is put aside in files of its own by the same measure, within the same limit
//! ([`PrefixCache::put_aside`](lacuna_kv::prefix::PrefixCache::put_aside)), and comes back as from a cache folder.

use std::time::{Duration, Instant};

use lacuna_kv::prefix::{Eviction, Moving, Path, Pins};
use lacuna_kv::swap::{Phase, Swap, Swapped};

use super::job::Choice;
use super::{Job, Running, Scheduler, Session, Waiting};

/// Pages of a waiting request that are in the swap file, on their way there or back.
pub(crate) struct Away {
    pub(crate) image: Swapped,
    /// The groups that it still has, or has again.
    pub(crate) path: Path,
    /// What had moved when that was last looked at, and since when it is no more.
    moved: u64,
    since: Instant,
}

/// What is known about what moving pages costs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Rates {
    /// Bytes a second.
    pub(crate) write: Option<f64>,
    pub(crate) read: Option<f64>,
    /// Tokens a second.
    pub(crate) compute: Option<f64>,
}

impl Rates {
    /// Whether writing and reading takes less time than computing. What was never seen is not believed.
    pub(crate) fn favor(&self, moving: Moving) -> bool {
        let (Some(write), Some(read), Some(compute)) = (self.write, self.read, self.compute) else {
            return false;
        };
        let moved = moving.written_bytes as f64 / write + moving.read_bytes as f64 / read;
        moved < moving.tokens as f64 / compute
    }
}

/// When memory is needed that a request is preempted for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Urgency {
    /// When its pages have been written.
    Soon,
    /// At once: the system is short of it.
    Now,
}

impl Scheduler {
    /// How long the file may take for a piece before what it has is computed again: somebody waits for the memory.
    const PATIENCE: Duration = Duration::from_secs(2);
    /// How long nothing is moved after a failure: a disk does not get room or well sooner, and each try costs time.
    const PAUSE: Duration = Duration::from_secs(60);

    pub(super) fn swap_rates(&self) -> Option<Rates> {
        let status = self.swap.as_ref()?.status();
        Some(Rates {
            write: status.write_rate.per_second(),
            read: status.read_rate.per_second(),
            compute: self.prompt_rate.per_second(),
        })
    }

    /// Begins to move the pages of a preempted request to the file, if that pays, and returns it as it was otherwise.
    /// One whose pages are lost on the way waits without them.
    pub(super) fn send_away(&mut self, mut running: Running) -> Option<Running> {
        let now = self.system.now();
        let paused = self.is_swap_paused(now);
        // Choices that fork off have pages in common, which a swapped one would take twice.
        let alone = running.sessions.len() == 1 && running.followers.is_empty();
        let Some(rates) = self.swap_rates().filter(|_| alone && !paused) else {
            return Some(running);
        };
        let group = self.prefix.grain().group_tokens().get();
        let Some(mut session) = running.sessions.pop() else {
            return Some(running);
        };
        let shared = self.prefix.shared_groups(&session.path);
        let bytes = session.sequence.report().committed_bytes as u64;
        let bytes = bytes.saturating_sub(shared as u64 * self.prefix.grain().group_bytes());
        let tokens = session.sequence.len() - shared * group;
        let moving = Moving {
            written_bytes: bytes,
            read_bytes: bytes,
            tokens,
        };
        let Some(swap) = (self.swap.as_ref()).filter(|_| rates.favor(moving)) else {
            running.sessions.push(session);
            return Some(running);
        };
        let room = swap.room_for(&session.sequence, group);
        self.prefix.give_aside_room(room);
        let image = match swap.leave(session.sequence, shared * group, group) {
            Ok(image) => image,
            Err(Some(sequence)) => {
                session.sequence = *sequence;
                running.sessions.push(session);
                return Some(running);
            }
            Err(None) => {
                self.prefix.leave(session.path, now);
                self.wait_again(running.job, session.choice, None);
                return None;
            }
        };
        // It comes back without the resume points that follow it, whose pages are free at once.
        let mut path = session.path;
        let groups = path.groups().len();
        self.prefix.leave_after(&mut path, groups, now);
        let away = Away {
            image,
            path,
            moved: 0,
            since: now,
        };
        self.wait_again(running.job, session.choice, Some(away));
        None
    }

    fn is_swap_paused(&self, now: Instant) -> bool {
        self.swap_paused_until.is_some_and(|until| now < until)
    }

    /// Makes room by what is needed least of the cache, which is written before if it may be of use again and that
    /// pays: then there is room a little later.
    pub(super) fn put_aside(&mut self) -> Eviction {
        let now = self.system.now();
        let rates = self.swap_rates().filter(|_| !self.is_swap_paused(now));
        let Some(rates) = rates else {
            return match self.evict() {
                true => Eviction::Evicted,
                false => Eviction::Nothing,
            };
        };
        let before = self.kept();
        let made = self.prefix.put_aside(now, |moving| rates.favor(moving));
        self.count_evicted(before);
        match made {
            // What is on its way somewhere is left.
            Eviction::Nothing if self.evict() => Eviction::Evicted,
            made => made,
        }
    }

    /// Gives up a cached group that has not been used for `time_to_live`, with those before it that nothing can
    /// be resumed at any more. Returns whether there was one.
    pub(super) fn expire(&mut self, now: Instant, time_to_live: Duration) -> bool {
        let rates = self.swap_rates().filter(|_| !self.is_swap_paused(now));
        let pays = |moving| rates.is_some_and(|rates| rates.favor(moving));
        let (groups, _) = self.kept();
        let any = self.prefix.expire(now, time_to_live, pays);
        self.counters.expired_groups += (groups - self.kept().0) as u64;
        any
    }

    /// A disk that takes too long for what is put aside is not waited for: it is let go of, and for a while nothing is
    /// moved.
    fn follow_aside(&mut self, now: Instant) {
        let Some(moved) = self.prefix.aside_progress() else {
            self.aside_moved = None;
            return;
        };
        let (before, since) = *self.aside_moved.get_or_insert((moved, now));
        if before != moved {
            self.aside_moved = Some((moved, now));
        } else if now.duration_since(since) >= Self::PATIENCE && !self.is_swap_paused(now) {
            self.swap_paused_until = Some(now + Self::PAUSE);
            self.prefix.give_up_writing();
        }
    }

    fn wait_again(&mut self, job: Job, choice: Choice, away: Option<Away>) {
        let waiting = Waiting::again(job, [choice].into());
        self.enqueue(Waiting { away, ..waiting });
    }

    /// Follows what the file does: groups whose pages are written are let go of, what is back runs, and what failed or
    /// takes too long is to be computed again.
    pub(super) fn follow_swaps(&mut self) {
        let now = self.system.now();
        self.follow_aside(now);
        let group = self.prefix.grain().group_tokens().get();
        for index in (0..self.waiting.len()).rev() {
            let Some(away) = &mut self.waiting[index].away else {
                continue;
            };
            let progress = away.image.progress();
            if progress.moved != away.moved {
                (away.moved, away.since) = (progress.moved, now);
            }
            let overdue = now.duration_since(away.since) >= Self::PATIENCE;
            match progress.phase {
                Phase::Leaving { kept_tokens } => {
                    let kept = kept_tokens / group;
                    self.prefix.leave_after(&mut away.path, kept, now);
                    if overdue {
                        self.lose_away(index);
                    }
                }
                Phase::Out => self.prefix.leave_after(&mut away.path, 0, now),
                Phase::Returning { .. } if overdue => self.lose_away(index),
                Phase::Returning { .. } => {}
                Phase::Back => self.run_returned(index),
                Phase::Failed => self.forget_failed(index),
            }
        }
    }

    /// Nothing is left of the pages of the waiting request at `index`: the file has failed, or memory was short.
    fn forget_failed(&mut self, index: usize) {
        match self.has_swap_failed() {
            true => self.lose_away(index),
            false => self.forget_away(index),
        }
    }

    /// The file does not do what it should: the waiting request at `index` is computed again, and for a while nothing
    /// is moved.
    fn lose_away(&mut self, index: usize) {
        self.swap_paused_until = Some(self.system.now() + Self::PAUSE);
        self.forget_away(index);
    }

    /// Whether the file has failed since it was asked last.
    fn has_swap_failed(&mut self) -> bool {
        let status = self.swap.as_ref().map(Swap::status);
        let failures = status.map_or(0, |status| status.failed_writes + status.failed_reads);
        std::mem::replace(&mut self.swap_failures, failures) < failures
    }

    /// Lets go of the pages of the waiting request at `index`, wherever they are.
    pub(super) fn forget_away(&mut self, index: usize) {
        if let Some(away) = self.waiting[index].away.take() {
            self.prefix.leave(away.path, self.system.now());
        }
    }

    /// Goes on with the waiting request at `index`, whose pages are back.
    fn run_returned(&mut self, index: usize) {
        let Some(mut waiting) = self.waiting.remove(index) else {
            return;
        };
        let sequence = waiting.away.as_ref().and_then(|away| away.image.take());
        let choice = waiting.choices.pop_front();
        let (Some(sequence), Some(away), Some(choice)) = (sequence, waiting.away, choice) else {
            unreachable!("what is back has a sequence and a choice it is of");
        };
        self.run_sessions(Running {
            sessions: vec![Session::new(choice, sequence, away.path)],
            followers: waiting.choices,
            job: waiting.job,
        });
    }

    /// Whether pages are being written that will be free then.
    pub(super) fn is_freeing(&self) -> bool {
        let aside =
            !self.is_swap_paused(self.system.now()) && self.prefix.aside_progress().is_some();
        let leaving = |away: &Away| matches!(away.image.progress().phase, Phase::Leaving { .. });
        aside || self.away().any(leaving)
    }

    pub(super) fn is_returning(&self) -> bool {
        self.away()
            .any(|away| matches!(away.image.progress().phase, Phase::Returning { .. }))
    }

    /// Choices that run as soon as their pages are back.
    pub(super) fn coming_back(&self) -> usize {
        let phases = self.away().map(|away| away.image.progress().phase);
        let coming = phases.filter(|phase| matches!(phase, Phase::Returning { .. } | Phase::Back));
        coming.count()
    }

    /// Pages that are elsewhere.
    pub(super) fn away(&self) -> impl Iterator<Item = &Away> {
        self.waiting
            .iter()
            .filter_map(|waiting| waiting.away.as_ref())
    }

    /// Bytes of pages that are promised to what is being read.
    pub(super) fn returning_bytes(&self) -> u64 {
        let bytes = self.away().map(|away| match away.image.progress().phase {
            Phase::Returning { bytes_left } => bytes_left,
            _ => 0,
        });
        bytes.sum()
    }

    /// Takes the pages back of what is being written, and of what the file has written, read or lost since somebody
    /// looked: memory is needed at once. Returns whether there was anything.
    pub(super) fn give_up_freeing(&mut self) -> bool {
        (0..self.waiting.len()).any(|index| self.give_up_away(index))
    }

    /// Takes what the waiting request at `index` has in memory, unless it is being read. Returns whether that was anything.
    fn give_up_away(&mut self, index: usize) -> bool {
        let now = self.system.now();
        let Some(away) = &mut self.waiting[index].away else {
            return false;
        };
        match away.image.progress().phase {
            Phase::Returning { .. } => return false,
            Phase::Out => {
                let groups = away.path.groups().len();
                self.prefix.leave_after(&mut away.path, 0, now);
                return groups > 0;
            }
            Phase::Leaving { .. } | Phase::Back => self.forget_away(index),
            Phase::Failed => self.forget_failed(index),
        }
        true
    }

    /// Gives the pages back that are being read, which stay in the file. Returns whether there were any.
    pub(super) fn cancel_returning(&mut self) -> bool {
        let now = self.system.now();
        for waiting in &mut self.waiting {
            if let Some(away) = &mut waiting.away
                && away.image.retreat()
            {
                self.prefix.leave_after(&mut away.path, 0, now);
                return true;
            }
        }
        false
    }

    /// What the waiting request at `index` needs to come back, beside what is in memory of it: bytes, and groups there
    /// that nobody uses. `None` when what it shared is gone, so that it cannot.
    pub(super) fn needs_to_return(&self, waiting: &Waiting, away: &Away) -> Option<(u64, usize)> {
        let grain = self.prefix.grain();
        let group = grain.group_tokens().get();
        let leader = waiting.choices.front()?;
        let tokens = &leader.tokens[..away.image.tokens()];
        let (groups, unused) = self.prefix.in_memory(waiting.job.namespace, tokens);
        let bytes = away.image.bytes_to_return(groups * group) + grain.bytes(group);
        (groups * group >= away.image.shared_tokens()).then_some((bytes, unused))
    }

    /// Begins to bring the pages of the waiting request at `index` back, which are `bytes`, unless what makes room
    /// for them is still being written.
    pub(super) fn begin_returning(&mut self, index: usize, bytes: u64) {
        let group = self.prefix.grain().group_tokens().get();
        let waiting = &mut self.waiting[index];
        let (Some(away), Some(leader)) = (&mut waiting.away, waiting.choices.front()) else {
            return;
        };
        // The last piece may have been written after `follow_swaps` looked.
        let now = self.system.now();
        self.prefix.leave_after(&mut away.path, 0, now);
        let tokens = &leader.tokens[..away.image.tokens()];
        let groups = self.prefix.rejoin(&mut away.path, tokens);
        (away.moved, away.since) = (away.image.progress().moved, now);
        if !self.make_room(bytes) {
            if let Some(away) = &mut self.waiting[index].away {
                self.prefix
                    .leave_after(&mut away.path, 0, self.system.now());
            }
            return;
        }
        let lack = (self.owned_bytes() + bytes).saturating_sub(self.kv_limit);
        self.arbiter().take(lack);
        if let Some(away) = &self.waiting[index].away {
            let pins: Vec<&Pins> = self.prefix.pins_of(&away.path);
            away.image.begin_return(&pins, groups * group);
        }
    }

    /// Puts aside what is needed least until `bytes` more fit, as far as there is something. Returns whether that is
    /// done: what is written is waited for.
    pub(super) fn make_room(&mut self, bytes: u64) -> bool {
        while self.owned_bytes() + bytes > self.kv_limit {
            match self.put_aside() {
                Eviction::Evicted => {}
                Eviction::Writing => return false,
                Eviction::Nothing => break,
            }
        }
        true
    }

    /// What a waiting request has elsewhere goes with it.
    pub(super) fn discard(&mut self, waiting: &mut Waiting) {
        if let Some(away) = waiting.away.take() {
            self.prefix.leave(away.path, self.system.now());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_moved_when_that_takes_less_time_than_computing() {
        let rates = Rates {
            write: Some(1e9),
            read: Some(2e9),
            compute: Some(500.0),
        };
        let moving = |bytes, tokens| Moving {
            written_bytes: bytes,
            read_bytes: bytes,
            tokens,
        };
        // 1.5 s against 2 s, and against 1.
        assert!(rates.favor(moving(1_000_000_000, 1000)));
        assert!(!rates.favor(moving(1_000_000_000, 500)));
        // What is in the file already is only read: 0.5 s against 1.
        let written = Moving {
            written_bytes: 0,
            ..moving(1_000_000_000, 500)
        };
        assert!(rates.favor(written));
        for unknown in [
            Rates {
                write: None,
                ..rates
            },
            Rates {
                read: None,
                ..rates
            },
            Rates {
                compute: None,
                ..rates
            },
        ] {
            assert!(!unknown.favor(moving(1, 1000)));
        }
    }
}
