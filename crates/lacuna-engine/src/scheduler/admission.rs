//! Which waiting requests start: those that have a place, and memory to compute their prompt.

use lacuna_kv::prefix::{self, Grain, Start};

use super::{End, Job, Running, Scheduler, Session, Waiting};
use crate::stream::{Event, Failure, Miss};

/// What becomes of a waiting request now.
enum Verdict {
    Start,
    /// A running request is computing what this one begins with.
    WaitForDonor,
    /// No place or no memory, for this one and those behind it.
    Wait,
}

impl Scheduler {
    /// Starts waiting requests, in order, while there are places and memory.
    pub(super) fn admit(&mut self) {
        let mut index = 0;
        while index < self.waiting.len() {
            match self.judge(&self.waiting[index]) {
                Verdict::Wait => break,
                Verdict::WaitForDonor => index += 1,
                Verdict::Start => {
                    let Some(waiting) = self.waiting.remove(index) else {
                        return;
                    };
                    if let Some(later) = self.start(waiting) {
                        self.waiting.insert(index, later);
                        return;
                    }
                }
            }
        }
    }

    fn judge(&self, waiting: &Waiting) -> Verdict {
        let places: usize = self.running.iter().map(Running::width).sum();
        if places + waiting.choices.len() > self.config.max_running {
            return Verdict::Wait;
        }
        let Some(leader) = waiting.choices.front() else {
            return Verdict::Start;
        };
        let reusable = self.reusable(&leader.tokens);
        if self.donor_will_have_more(&leader.tokens, reusable.tokens) {
            return Verdict::WaitForDonor;
        }
        let needed = self.bytes_to_start(waiting, reusable.tokens);
        let free = self.free_for_admission(reusable.unused_groups);
        match self.running.is_empty() || needed <= free {
            true => Verdict::Start,
            false => Verdict::Wait,
        }
    }

    fn reusable(&self, tokens: &[u32]) -> Reusable {
        if !self.config.prefix_cache.enabled {
            return Reusable::default();
        }
        let (found, tokens) = self.prefix.find(tokens);
        let unused = |id| {
            self.prefix
                .tree()
                .get(id)
                .is_some_and(|(_, users)| users == 0)
        };
        Reusable {
            tokens,
            unused_groups: found.groups.into_iter().filter(|&id| unused(id)).count(),
        }
    }

    /// Whether a running request is about to have at least a group more of `tokens` than `held`.
    fn donor_will_have_more(&self, tokens: &[u32], held: usize) -> bool {
        let group = self.prefix.grain().group_tokens().get();
        if !self.config.prefix_cache.enabled {
            return false;
        }
        let running = self
            .running
            .iter()
            .filter(|running| running.job.stalled.is_none());
        let mut donors = running
            .flat_map(|running| &running.sessions)
            .filter(|session| session.pending() > 1);
        donors.any(|session| {
            let theirs = session.choice.tokens.iter();
            let common = theirs.zip(tokens).take_while(|(a, b)| a == b).count();
            let common = common.min(tokens.len() - 1) / group * group;
            common >= held + group && session.sequence.len() < common
        })
    }

    /// Bytes of new pages until every continuation has its first token, and a group more.
    fn bytes_to_start(&self, waiting: &Waiting, held: usize) -> u64 {
        let grain = self.prefix.grain();
        let to_go =
            |tokens: usize, from: usize| grown(grain, from, tokens + grain.group_tokens().get());
        let prompt = waiting.job.prompt_tokens;
        let mut choices = waiting.choices.iter().map(|choice| choice.tokens.len());
        let leader = choices.next().map_or(0, |tokens| to_go(tokens, held));
        leader
            + choices
                .map(|tokens| to_go(tokens, prompt.min(tokens) - 1))
                .sum::<u64>()
    }

    /// Bytes that are free or can be had by evicting, beyond what running requests are promised:
    /// the rest of their prompts and a group each. Of the unused groups, `kept` are to be used.
    fn free_for_admission(&self, kept: usize) -> u64 {
        let grain = self.prefix.grain();
        let group = grain.group_tokens().get();
        let promised: u64 = (self.running.iter())
            .map(|running| {
                let sessions = running.sessions.iter();
                let sessions = sessions.map(|session| {
                    let end = session.choice.tokens.len() + group;
                    grown(grain, session.sequence.len(), end)
                });
                let followers = running.followers.len() as u64 * grown(grain, 0, group);
                sessions.sum::<u64>() + followers
            })
            .sum();
        let evictable = (self.prefix.tree().unused() - kept) as u64 * grain.bytes(group);
        (self.kv_limit + evictable).saturating_sub(self.owned_bytes() + promised)
    }

    /// Starts a request, for the first time or again, from what the prefix cache has of it. Gives it
    /// back when it has to wait for address space or mappings that others have.
    fn start(&mut self, waiting: Waiting) -> Option<Waiting> {
        let Some(leader) = waiting.choices.front() else {
            self.count_end(&waiting.job, End::Finished);
            return None;
        };
        let capacity = self.engine.context_tokens();
        let start = match self.config.prefix_cache.enabled {
            true => self.prefix.start(&leader.tokens, capacity),
            false => self.prefix.start_apart(capacity),
        };
        match start {
            Ok(start) => self.run(waiting, start),
            Err(_) if !self.running.is_empty() => return Some(waiting),
            Err(error) => {
                let failure = Failure::OutOfMemory(error.to_string());
                self.count_end(&waiting.job, End::Failed(failure));
            }
        }
        None
    }

    fn run(&mut self, waiting: Waiting, start: Start) {
        let Waiting {
            mut job,
            mut choices,
        } = waiting;
        let reused = start.sequence.len();
        if job.reused_tokens.is_none() {
            self.announce(&mut job, reused, start.miss);
        }
        let leader = choices.pop_front();
        let leader = leader.map(|choice| Session::new(choice, start.sequence, start.path));
        let running = Running {
            sessions: leader.into_iter().collect(),
            followers: choices,
            job,
        };
        let id = running.job.id;
        let place = self.running.partition_point(|other| other.job.id < id);
        self.running.insert(place, running);
    }

    fn announce(&mut self, job: &mut Job, reused_tokens: usize, miss: Option<prefix::Miss>) {
        job.reused_tokens = Some(reused_tokens);
        self.counters.prompt_tokens += job.prompt_tokens as u64;
        self.counters.reused_tokens += reused_tokens as u64;
        self.latencies.queue.observe(job.arrived.elapsed());
        job.send(Event::Started {
            prompt_tokens: job.prompt_tokens,
            reused_tokens,
            miss: match self.config.prefix_cache.enabled {
                true => miss.map(Miss::from),
                false => Some(Miss::Disabled),
            },
        });
    }
}

/// What the cache has of a prompt.
#[derive(Default)]
struct Reusable {
    tokens: usize,
    /// Groups of it that nobody uses, and that will be in use then.
    unused_groups: usize,
}

/// Bytes of pages that a sequence of `from` tokens takes on its way to `to`.
fn grown(grain: &Grain, from: usize, to: usize) -> u64 {
    grain.bytes(to).saturating_sub(grain.bytes(from))
}
