//! Which waiting requests start: those that have a place, and memory to compute their prompt.

use lacuna_kv::folder::FolderMiss;
use lacuna_kv::prefix::{self, Namespace, Start};
use lacuna_kv::swap::Phase;
use lacuna_text::tokenizer::Decode;

use super::swapping::Away;
use super::{End, Job, Restore, Running, Scheduler, Session, Waiting, sessions};
use crate::status::retry_after;
use crate::stream::{Difference, Event, Failure, Miss};

/// What becomes of a waiting request now.
enum Verdict {
    Start,
    /// A running request, the donor, is computing what this one begins with.
    WaitForDonor(Donor),
    /// Its prompt needs more memory than is free; one that needs less may go first.
    WaitForMemory,
    /// No place, for this one and those behind it.
    WaitForPlace,
    /// Its pages are on their way to the swap file or from it.
    WaitForFile,
    /// There is room for its pages, of so many bytes, which are in the swap file.
    BringBack(u64),
    /// Its pages in the swap file are of no use without others that are gone.
    Recompute,
}

/// A session that computes what a waiting request begins with.
struct Donor {
    /// Which one, counted over all running requests.
    session: usize,
    /// After how many more of its tokens the request can start.
    tokens: usize,
}

impl Scheduler {
    /// How many requests are looked at behind the first one that waits for memory: looking costs a
    /// hash per page group of each of their prompts, in every step.
    const LOOKED_AT: usize = 8;

    /// Starts waiting requests, in order, while there are places and memory; of those that have to
    /// wait, no more stay than the queue is long.
    pub(super) fn admit(&mut self) {
        let donors = self.start_waiting();
        self.refuse_beyond_queue(donors);
    }

    /// Starts what can start. One that waits for memory lets others by that find enough, but not for
    /// ever. Returns how many of those that never ran wait for nothing but what a running request is computing, or what is
    /// read back.
    fn start_waiting(&mut self) -> usize {
        let mut donors = 0;
        sessions(&mut self.running).for_each(|session| session.awaited = None);
        let (mut index, mut end) = (0, usize::MAX);
        // Those before `index` that wait for memory.
        let mut short: Vec<usize> = Vec::new();
        while index < self.waiting.len().min(end) {
            if self.waiting[index].away.is_none() && self.waits_for_folder(index) {
                donors += 1;
                index += 1;
                continue;
            }
            let waiting = &self.waiting[index];
            if !short.iter().all(|&at| self.waiting[at].lets_by(waiting)) {
                break;
            }
            match self.judge(waiting) {
                Verdict::WaitForPlace => break,
                Verdict::WaitForDonor(donor) => {
                    donors += 1;
                    self.note_awaited(&donor);
                    index += 1;
                }
                Verdict::WaitForFile => index += 1,
                Verdict::BringBack(bytes) => {
                    self.begin_returning(index, bytes);
                    index += 1;
                }
                Verdict::Recompute => self.forget_away(index),
                // There may be enough now.
                Verdict::WaitForMemory if self.take_back() => {}
                Verdict::WaitForMemory => {
                    if short.is_empty() {
                        end = index + 1 + Self::LOOKED_AT;
                    }
                    short.push(index);
                    index += 1;
                }
                Verdict::Start if self.start_at(index) => {
                    end = end.saturating_sub(1);
                    for &at in &short {
                        self.waiting[at].overtaken += 1;
                    }
                }
                Verdict::Start => break,
            }
        }
        donors
    }

    /// Refuses the last of the waiting requests that are too many for the queue, `donors` of them
    /// aside. Whether a request finds memory is not known when it comes, so one that came while places
    /// were free can turn out to be one too many. Those that have run already stay.
    fn refuse_beyond_queue(&mut self, donors: usize) {
        let never_ran = |waiting: &Waiting| waiting.job.reused_tokens.is_none();
        let queued = self.waiting.iter().filter(|one| never_ran(one)).count();
        let excess = queued.saturating_sub(self.config.max_waiting.saturating_add(donors));
        let retry_after = retry_after(&self.latencies, self.config.max_running);
        for _ in 0..excess {
            let last = self.waiting.iter().rposition(never_ran);
            if let Some(waiting) = last.and_then(|index| self.waiting.remove(index)) {
                let failure = Failure::QueueFull { retry_after };
                self.count_end(&waiting.job, End::Failed(failure));
            }
        }
    }

    /// Starts the waiting request at `index`. Returns whether it could.
    fn start_at(&mut self, index: usize) -> bool {
        let Some(waiting) = self.waiting.remove(index) else {
            return false;
        };
        let later = self.start(waiting);
        let started = later.is_none();
        if let Some(later) = later {
            self.enqueue(later);
        }
        started
    }

    /// A prompt is as urgent as the shortest request that waits for it.
    fn note_awaited(&mut self, donor: &Donor) {
        if let Some(session) = sessions(&mut self.running).nth(donor.session) {
            let end = session.sequence.len() + donor.tokens;
            self.prefix.keep_resumable(&mut session.path, end);
            let sooner = session
                .awaited
                .map_or(donor.tokens, |other| other.min(donor.tokens));
            session.awaited = Some(sooner);
        }
    }

    /// Choices that run, or will without waiting again.
    pub(crate) fn places_taken(&self) -> usize {
        let running = self.running.iter().map(Running::width);
        running.sum::<usize>() + self.coming_back()
    }

    fn judge(&self, waiting: &Waiting) -> Verdict {
        let is_out = |away: &Away| away.image.progress().phase == Phase::Out;
        if !waiting.away.as_ref().is_none_or(is_out) {
            return Verdict::WaitForFile;
        }
        if self.places_taken() + waiting.choices.len() > self.config.max_running {
            return Verdict::WaitForPlace;
        }
        if let Some(away) = &waiting.away {
            return self.judge_away(waiting, away);
        }
        let Some(leader) = waiting.choices.front() else {
            return Verdict::Start;
        };
        let (namespace, tokens) = (waiting.job.namespace, leader.reusable_tokens());
        let reusable = self.reusable(namespace, tokens);
        if let Some(donor) = self.donor(namespace, tokens, reusable.tokens) {
            return Verdict::WaitForDonor(donor);
        }
        let needed = self.bytes_to_start(waiting, reusable.tokens);
        let free = self.free_for_admission(reusable.unused_groups);
        match self.running.is_empty() || needed <= free {
            true => Verdict::Start,
            false => Verdict::WaitForMemory,
        }
    }

    fn judge_away(&self, waiting: &Waiting, away: &Away) -> Verdict {
        let Some((needed, unused)) = self.needs_to_return(waiting, away) else {
            return Verdict::Recompute;
        };
        // One after the other; what is alone and does not fit is computed as far as it does.
        let alone = self.running.is_empty() && !self.is_freeing();
        let fits = alone || needed <= self.free_for_admission(unused);
        match fits && !self.is_returning() {
            true => Verdict::BringBack(needed),
            false => Verdict::WaitForMemory,
        }
    }

    pub(super) fn reusable(&self, namespace: Namespace, tokens: &[u32]) -> Reusable {
        if !self.config.prefix_cache.enabled {
            return Reusable::default();
        }
        let (found, tokens) = self.prefix.find(namespace, tokens);
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

    /// The running session of the same namespace that is about to have at least a group more of
    /// `tokens` than `held`, and soonest. Waiting for another namespace's would tell how it begins.
    fn donor(&self, namespace: Namespace, tokens: &[u32], held: usize) -> Option<Donor> {
        if !self.config.prefix_cache.enabled {
            return None;
        }
        let group = self.prefix.grain().group_tokens().get();
        let running = self.running.iter();
        let sessions = running.flat_map(|running| {
            let job = &running.job;
            let computes = job.stalled.is_none() && job.namespace == namespace;
            running
                .sessions
                .iter()
                .map(move |session| (session, computes))
        });
        let donors = sessions
            .enumerate()
            .filter_map(|(index, (session, computes))| {
                if !computes || session.pending() <= 1 {
                    return None;
                }
                let theirs = session.choice.tokens.iter();
                let common = theirs.zip(tokens).take_while(|(a, b)| a == b).count();
                let groups = common.min(tokens.len() - 1) / group;
                let (common, whole) = (groups * group, self.prefix.grain().whole_tokens(groups));
                let donates = common >= held + group && session.sequence.len() < whole;
                donates.then(|| Donor {
                    session: index,
                    tokens: common - session.sequence.len(),
                })
            });
        donors.min_by_key(|donor| donor.tokens)
    }

    /// Bytes of new pages until every choice has its first token, and a group more. Only whole
    /// groups are shared: the pages of one that matches in part are copied.
    pub(super) fn bytes_to_start(&self, waiting: &Waiting, held: usize) -> u64 {
        let (grain, step) = (self.prefix.grain(), self.engine.batch_limits().tokens);
        let group = grain.group_tokens().get();
        let to_go = |from: usize, tokens: usize| {
            grain.new_bytes(from / group * group, tokens + group, step)
        };
        let prompt = waiting.job.prompt_tokens;
        let mut choices = waiting
            .choices
            .iter()
            .map(|choice| choice.tokens.len().max(prompt));
        let leader = choices.next().map_or(0, |tokens| to_go(held, tokens));
        leader + choices.map(|tokens| to_go(prompt - 1, tokens)).sum::<u64>()
    }

    /// Bytes that are free or can be had by evicting, or of weights, beyond what running requests are promised. Of
    /// the unused groups, `kept` are to be used.
    pub(super) fn free_for_admission(&self, kept: usize) -> u64 {
        let grain = self.prefix.grain();
        let evictable = (self.prefix.tree().unused() - kept) as u64 * grain.group_bytes()
            + self.resume_points_bytes();
        let evictable = evictable + self.draft_bytes() + self.rewind_bytes();
        let there = self.kv_limit + evictable + self.engine.weights_to_spare();
        there.saturating_sub(self.owned_bytes() + self.promised_bytes())
    }

    /// Bytes of pages that running requests are promised beyond those they have: for the rest of their prompts and
    /// a group each.
    pub(super) fn promised_bytes(&self) -> u64 {
        let grain = self.prefix.grain();
        let group = grain.group_tokens().get();
        (self.running.iter())
            .map(|running| {
                let sessions = running.sessions.iter();
                let sessions = sessions.map(|session| {
                    let end = session.choice.tokens.len() + group;
                    let held = grain.bytes(session.sequence.len());
                    let state = session.sequence.state_bytes_to_take() as u64;
                    let state = if session.sequence.is_empty() {
                        0
                    } else {
                        state
                    };
                    grain.bytes(end).saturating_sub(held) + state
                });
                let followers = 2 * running.followers.len() as u64 * grain.bytes(group);
                sessions.sum::<u64>() + followers
            })
            .sum::<u64>()
            + self.restoring_bytes()
            + self.returning_bytes()
    }

    /// Bytes of resume points, about: pages of windows of several of them are one, and running requests use
    /// some.
    pub(super) fn resume_points_bytes(&self) -> u64 {
        let (tree, grain) = (self.prefix.tree(), self.prefix.grain());
        let pinned = self.engine.kv_cache().ledger().pinned.get();
        let groups = tree.len() as u64 * grain.group_bytes();
        let windows = tree.unused_resume_points() as u64 * grain.resume_bytes();
        windows.min(pinned.saturating_sub(groups))
    }

    /// Starts a request, for the first time or again, from what the prefix cache has of it. Gives it
    /// back when it has to wait for address space or mappings that others have.
    fn start(&mut self, waiting: Waiting) -> Option<Waiting> {
        let Some(leader) = waiting.choices.front() else {
            self.count_end(&waiting.job, End::Finished);
            return None;
        };
        let capacity = self.engine.context_tokens();
        let start = loop {
            let start = match self.config.prefix_cache.enabled {
                true => {
                    let tokens = leader.reusable_tokens();
                    self.prefix.start(waiting.job.namespace, tokens, capacity)
                }
                false => self.prefix.start_apart(capacity),
            };
            // Where whole contexts are taken from the start, they are not to wait for what is there for guesses.
            if start.is_ok() || !self.give_up_guessing() {
                break start;
            }
        };
        match start {
            Ok(start) => self.run(waiting, start),
            Err(_) if self.has_lost_files() => {
                self.give_up_files();
                // The folder is asked again, and finds what is damaged.
                return Some(Waiting {
                    restore: Restore::Unasked,
                    ..waiting
                });
            }
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
            folder_miss,
            ..
        } = waiting;
        let reused = start.sequence.len();
        if job.reused_tokens.is_none() {
            let miss = start.miss.map(|miss| self.why(miss, folder_miss));
            // What a folder has of it and could not give goes on like the prompt.
            let differs_at = start.differs_at.filter(|_| folder_miss.is_none());
            let prompt = choices.front().map_or(&[][..], |leader| &leader.tokens);
            let difference = differs_at.map(|at| self.difference(prompt, at));
            self.announce(&mut job, reused, miss, difference);
        }
        let leader = choices.pop_front();
        let leader = leader.map(|choice| Session::new(choice, start.sequence, start.path));
        let running = Running {
            sessions: leader.into_iter().collect(),
            followers: choices,
            job,
        };
        self.run_sessions(running);
    }

    pub(super) fn run_sessions(&mut self, running: Running) {
        let place = self
            .running
            .binary_search_by_key(&running.job.rank(), |other| other.job.rank())
            .unwrap_or_else(|place| place);
        self.running.insert(place, running);
    }

    /// Why a prompt was not found to its end. What the folder had of it goes before what memory has.
    fn why(&self, miss: prefix::Miss, folder: Option<FolderMiss>) -> Miss {
        match (folder, miss) {
            (Some(folder), _) => folder.into(),
            (None, prefix::Miss::Unseen) if self.prefix.has_only_others() => Miss::FolderSettings,
            (None, miss) => miss.into(),
        }
    }

    /// The place `at` of a prompt, with what it says from there on. What is kept there instead may be somebody
    /// else's, and is not told.
    fn difference(&self, prompt: &[u32], at: usize) -> Difference {
        /// Enough to know the place by, and few enough for a line.
        const TOLD_TOKENS: usize = 8;
        let rest = prompt.get(at..).unwrap_or_default();
        let told = &rest[..rest.len().min(TOLD_TOKENS)];
        let tokenizer = self.engine.tokenizer();
        Difference {
            at,
            text: tokenizer.decode(told, Decode::MARKUP).unwrap_or_default(),
        }
    }

    fn announce(
        &mut self,
        job: &mut Job,
        reused_tokens: usize,
        miss: Option<Miss>,
        difference: Option<Difference>,
    ) {
        job.reused_tokens = Some(reused_tokens);
        job.differs_at = difference.as_ref().map(|difference| difference.at);
        self.counters.prompt_tokens += job.prompt_tokens as u64;
        self.counters.reused_tokens += reused_tokens as u64;
        let now = self.system.now();
        job.started = Some(now);
        self.latencies
            .queue
            .observe(now.duration_since(job.arrived));
        job.send(Event::Started {
            prompt_tokens: job.prompt_tokens,
            reused_tokens,
            miss: match self.config.prefix_cache.enabled {
                true => miss,
                false => Some(Miss::Disabled),
            },
            difference,
        });
    }
}

/// What the cache has of a prompt.
#[derive(Default)]
pub(super) struct Reusable {
    pub(super) tokens: usize,
    /// Groups of it that nobody uses, and that will be in use then.
    pub(super) unused_groups: usize,
}
