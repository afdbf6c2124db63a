//! The scheduler: which requests run, and what each step computes for them.
//!
//! ```text
//! sweep                                                                       Scheduler::sweep
//! admit -> schedule -> prepare -> forward -> sample -> accept                 Scheduler::step
//! ```
//!
//! * **S1** Requests are admitted by priority and then in the order they came, but for two kinds that
//!   let others by: one whose prompt a running request is computing waits for those pages, and one
//!   for which memory is short waits for that, overtaken a bounded number of times.
//! * **S2** `running` is ordered by priority and then from the oldest to the newest, and memory is
//!   taken from the last: the first always goes on.
//! * **S3** A session's path names exactly the groups it has in use; it goes back when the session
//!   ends, whichever way.

mod admission;
mod deliver;
mod device_loss;
mod job;
mod lending;
mod preemption;
mod report;
mod restoring;
mod schedule;
#[cfg(test)]
mod simulation;
mod speculation;
mod swapping;
#[cfg(test)]
pub(crate) mod tests;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use lacuna_kv::KvError;
use lacuna_kv::folder::{CacheFolder, FolderError};
use lacuna_kv::prefix::PrefixCache;
use lacuna_kv::swap::{Rate, Swap};
use lacuna_models::plan::Budget;
use lacuna_models::{ForwardError, Place, Segment};
use lacuna_pages::ByteLength;

use crate::arbiter::kv_share;
use crate::budget::{Pages, Reading};
use crate::engine::Engine;
use crate::error::EngineError;
use crate::request_limits::{CurrentCache, RequestLimits};
use crate::request_memory::RequestMemory;
use crate::runner::{ModelRunner, Pass, Wanted};
use crate::service::ServiceConfig;
use crate::speculation::{Drafter, Pace};
use crate::status::{Counters, Latencies};
use crate::stream::{Event, Failure};
use crate::system::System;
pub(crate) use job::{Job, Restore, Running, Session, Taken, Waiting, Workspace};
pub(crate) use lending::Loan;
pub use lending::{Borrower, LoanRefusal};
use schedule::{Ahead, Demand, StepLimits, keep_images_whole, ration_rows, schedule};

/// Requests under way on one engine.
pub(crate) struct Scheduler {
    engine: Box<dyn ModelRunner>,
    config: ServiceConfig,
    prefix: PrefixCache,
    budget: Budget,
    /// What the system said about memory when it was last asked.
    memory: Reading,
    /// What KV pages may take now.
    kv_limit: u64,
    /// What they may come to, as those know it who take requests.
    kv_most: Arc<AtomicU64>,
    /// The KV cache, as those know it.
    cache: CurrentCache,
    waiting: VecDeque<Waiting>,
    running: Vec<Running>,
    /// Where pages of preempted requests go.
    swap: Option<Swap>,
    /// Failures of it that have been noticed.
    swap_failures: u64,
    /// Until when nothing more goes there, after one.
    swap_paused_until: Option<Instant>,
    /// What has been written of what is put aside, and since when it is no more.
    aside_moved: Option<(u64, Instant)>,
    /// Whether somebody goes without pages in this step because some are being written that will be free.
    waits_for_pages: bool,
    /// Tokens that steps compute in a second while they compute prompts.
    prompt_rate: Rate,
    /// Since when nothing could be computed although nothing else was in the way.
    starved: Option<Instant>,
    tended: Option<Instant>,
    /// When the last pass ended.
    passed: Option<Instant>,
    /// Since when pages may lie idle; `None` once they have been given back to the system.
    idle_since: Option<Instant>,
    /// Since when KV pages could do with so much less that weights are to have it back.
    spare_since: Option<Instant>,
    system: Box<dyn System>,
    /// What requests hold outside the KV cache is taken from it.
    request_memory: RequestMemory,
    /// What others hold of the budget.
    loans: Vec<Loan>,
    /// What steps take, for guesses.
    pace: Pace,
    /// The draft model, if there is one.
    drafter: Option<Drafter>,
    counters: Counters,
    latencies: Latencies,
    workspace: Workspace,
}

impl Scheduler {
    /// How long a request waits for memory that the system keeps from a service that has nothing
    /// else to give up.
    const STARVATION: Duration = Duration::from_secs(20);
    /// Tokens that the rate of computing is over: some prompts.
    const PROMPT_WINDOW: f64 = 16384.0;
    /// Tokens of a step from which on it says how fast prompts are computed; fewer say how fast weights are read.
    pub(crate) const PROMPT_STEP: usize = 16;

    /// A scheduler over an engine of its own.
    ///
    /// # Errors
    /// [`EngineError::Kv`] when the limit cannot be set, [`EngineError::OutOfMemory`], [`EngineError::Folder`].
    pub(crate) fn new(mut engine: Engine, mut config: ServiceConfig) -> Result<Self, EngineError> {
        config.engine = config.engine.for_model(engine.model().spec());
        let (budget, host) = (*engine.budget(), engine.host());
        let drafter = engine.take_drafter();
        let stores = Stores::open(&engine, &config)?;
        let mut scheduler = Self::over(Box::new(engine), budget, config, Box::new(host))?;
        if let Some(drafter) = drafter {
            scheduler.draft_with(drafter);
        }
        scheduler.keep_in(stores);
        Ok(scheduler)
    }

    /// From now on keeps pages in `stores` too.
    fn keep_in(&mut self, stores: Stores) {
        self.swap = stores.swap;
        let prefix = empty_prefix(&*self.engine, &self.config);
        self.prefix = match stores.folder {
            Some(folder) => prefix.with_folder(folder),
            None => prefix,
        };
    }

    /// A scheduler over any model, on any system.
    ///
    /// # Errors
    /// [`EngineError::Kv`] when the limit cannot be set.
    pub(crate) fn over(
        engine: Box<dyn ModelRunner>,
        budget: Budget,
        config: ServiceConfig,
        system: Box<dyn System>,
    ) -> Result<Self, EngineError> {
        let memory = system.memory(0);
        let kv_limit = kv_share(&budget, memory).max(engine.kv_cache().page_bytes() as u64);
        engine.kv_cache().set_limit(ByteLength::new(kv_limit))?;
        let prefix = empty_prefix(&*engine, &config);
        let workspace = Workspace::new(engine.vocabulary(), engine.tokenizer())?;
        let request_memory = config.shared_requests.clone();
        let request_memory = request_memory
            .unwrap_or_else(|| RequestMemory::new(ByteLength::new(budget.parts.request_bytes)));
        let scheduler = Self {
            kv_limit,
            kv_most: Arc::default(),
            cache: CurrentCache::new(engine.kv_cache().clone()),
            memory,
            engine,
            config,
            prefix,
            budget,
            waiting: VecDeque::new(),
            running: Vec::new(),
            swap: None,
            swap_failures: 0,
            swap_paused_until: None,
            aside_moved: None,
            waits_for_pages: false,
            prompt_rate: Rate::over(Self::PROMPT_WINDOW),
            starved: None,
            tended: None,
            passed: None,
            idle_since: None,
            spare_since: None,
            system,
            request_memory,
            loans: Vec::new(),
            pace: Pace::default(),
            drafter: None,
            counters: Counters::default(),
            latencies: Latencies::default(),
            workspace,
        };
        scheduler
            .kv_most
            .store(scheduler.kv_share(), Ordering::Relaxed);
        Ok(scheduler)
    }

    /// The engine, unless a model without arithmetic is in its place.
    pub(crate) fn engine(&mut self) -> Option<&mut Engine> {
        self.engine.engine()
    }

    /// What holds for every request.
    pub(crate) fn request_limits(&self) -> RequestLimits {
        RequestLimits {
            context_tokens: self.engine.context_tokens(),
            vocabulary: self.engine.vocabulary(),
            image_width: self.engine.image_width(),
            images_whole: self.engine.keeps_images_whole(),
            max_running: self.config.max_running,
            max_waiting: self.config.max_waiting,
            kv_bytes: Arc::clone(&self.kv_most),
            pages: self.pages(),
            cache: self.cache.clone(),
            request_memory: self.request_memory.clone(),
        }
    }

    /// How pages are counted.
    fn pages(&self) -> Pages {
        Pages {
            grain: self.prefix.grain().clone(),
            step_tokens: self.engine.batch_limits().tokens,
        }
    }

    /// What KV pages may come to while the system has plenty, and weights give way to them.
    fn kv_share(&self) -> u64 {
        kv_share(&self.budget, self.memory) + self.engine.weights_to_spare()
    }

    /// Takes a request that has been checked, or that has to wait again.
    pub(crate) fn enqueue(&mut self, waiting: Waiting) {
        let place = self
            .waiting
            .binary_search_by_key(&waiting.job.rank(), |other| other.job.rank())
            .unwrap_or_else(|place| place);
        self.waiting.insert(place, waiting);
    }

    /// Requests that wait to run.
    pub(crate) fn waiting_len(&self) -> usize {
        self.waiting.len()
    }

    /// Whether no request is left.
    pub(crate) fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }

    /// Whether time may change something: end what the prefix cache holds or what is lent, give idle pages back, move weights, which follow what memory the
    /// system has also while nobody asks for anything, or end the memory of activations.
    pub(crate) fn needs_tending(&self) -> bool {
        let weights_move = self.engine.weights_to_spare() > 0 || !self.engine.has_all_weights();
        !self.prefix.tree().is_empty()
            || weights_move
            || self.holds_activations()
            || self.idle_since.is_some()
            || !self.loans.is_empty()
    }

    /// Whether activations of earlier passes are still in memory, the draft model's among them.
    fn holds_activations(&self) -> bool {
        let drafter = self.drafter.as_ref();
        self.engine.holds_activations() || drafter.is_some_and(Drafter::holds_activations)
    }

    /// Gives the memory of activations back to the system.
    fn give_back_activations(&mut self) {
        self.engine.give_back_activations();
        if let Some(drafter) = &mut self.drafter {
            drafter.give_back_activations();
        }
    }

    /// Tells those who are to know what has become of blocks since the last call.
    pub(crate) fn tell_of_blocks(&mut self) {
        if let Some(watch) = &self.config.blocks {
            watch.feed.add(self.prefix.take_block_changes());
        }
    }

    /// One step over everything that can go on. Returns whether anything was computed.
    pub(crate) fn step(&mut self) -> bool {
        let now = self.system.now();
        if self.engine.has_lost_device() {
            return self.go_on_after_loss();
        }
        self.follow_swaps();
        self.tend(now);
        self.admit();
        self.schedule();
        self.prepare(now);
        if self.has_lost_files() {
            return self.give_up_files();
        }
        if self.engine.has_lost_device() {
            return self.go_on_after_loss();
        }
        match self.forward_and_sample() {
            Ok(()) => self.accept(),
            Err(_) if self.engine.has_lost_device() => self.go_on_after_loss(),
            Err(_) if self.has_lost_files() => self.give_up_files(),
            Err(error) => self.fail_scheduled(&error),
        }
    }

    /// Lets go of requests that are cancelled, overdue or unread: before every step, so that none is
    /// computed for nobody. Returns whether there were any.
    pub(crate) fn sweep(&mut self) -> bool {
        let (now, before) = (self.system.now(), self.running.len() + self.waiting.len());
        for index in (0..self.running.len()).rev() {
            let running = &mut self.running[index];
            running.job.stalled = match running.job.has_room(running.width()) {
                true => None,
                false => running.job.stalled.or(Some(now)),
            };
            if let Some(end) = end_of(&running.job, now, self.config.unread_patience) {
                let running = self.running.remove(index);
                self.close(running, end);
            }
        }
        for index in (0..self.waiting.len()).rev() {
            let end = end_of(&self.waiting[index].job, now, self.config.unread_patience);
            if let Some(end) = end
                && let Some(mut waiting) = self.waiting.remove(index)
            {
                self.discard(&mut waiting);
                self.count_end(&waiting.job, end);
            }
        }
        self.running.len() + self.waiting.len() < before
    }

    /// Ends a running request and gives its pages back.
    fn close(&mut self, running: Running, end: End) {
        for session in running.sessions {
            self.let_go(session);
        }
        self.count_end(&running.job, end);
    }

    /// Gives a session's pages back; what it computed may stay in the prefix cache.
    fn let_go(&mut self, mut session: Session) -> job::Choice {
        let now = self.system.now();
        // Without a resume point at its end it is gone on with from an earlier one.
        self.prefix
            .finish(&mut session.path, &mut session.sequence, now)
            .ok();
        self.prefix
            .write(&mut session.path, &session.choice.tokens, true);
        if let Some(id) = &session.choice.session {
            self.prefix.keep_session(&session.path, id);
        }
        drop(session.sequence);
        self.prefix.leave(session.path, now);
        session.choice
    }

    fn count_end(&mut self, job: &Job, end: End) {
        match end {
            End::Finished => {
                self.counters.finished += 1;
                let took = self.system.now().duration_since(job.arrived);
                self.latencies.end_to_end.observe(took);
            }
            End::Cancelled => self.counters.cancelled += 1,
            End::Failed(failure) => {
                self.counters.failed += 1;
                job.send(Event::Failed(failure));
            }
        }
    }

    /// Ends every request because the service ends.
    pub(crate) fn fail_all(&mut self) {
        for running in std::mem::take(&mut self.running) {
            self.close(running, End::Failed(Failure::ShuttingDown));
        }
        for mut waiting in std::mem::take(&mut self.waiting) {
            self.discard(&mut waiting);
            self.count_end(&waiting.job, End::Failed(Failure::ShuttingDown));
        }
    }

    /// Decides what this step computes.
    fn schedule(&mut self) {
        let limits = self.engine.batch_limits();
        let demands = |running| Running::demands(running, &self.prefix);
        let mut demands: Vec<Demand> = self.running.iter().flat_map(demands).collect();
        self.running.iter_mut().for_each(Running::drop_guesses);
        let rows = ration_rows(&mut demands, limits.logit_rows);
        let limits = StepLimits {
            tokens: limits.tokens,
            rows,
            mixed: self.config.mixed_tokens.max(1),
        };
        let mut counts = schedule(&demands, limits, self.counters.steps as usize);
        if self.engine.keeps_images_whole() {
            let images: Vec<Ahead<'_>> = (self.running.iter())
                .flat_map(|running| running.sessions.iter().map(move |it| (running, it)))
                .map(|(running, session)| Ahead {
                    images: &running.job.images,
                    start: session.sequence.len(),
                })
                .collect();
            keep_images_whole(&mut counts, &images, limits.tokens);
        }
        for (session, count) in sessions(&mut self.running).zip(counts) {
            session.scheduled = count;
        }
        self.speculate(&demands);
    }

    /// Runs the batch and picks a token for every session that has come to its end, and more as long as they are those
    /// that were guessed.
    fn forward_and_sample(&mut self) -> Result<(), EngineError> {
        // What is read for them is read meanwhile.
        let expected = self.expected();
        self.engine.expect(&expected);
        let wanted = self.running.iter().flat_map(|running| {
            let logprobs = running.job.logprobs;
            let sessions = running.sessions.iter();
            sessions.filter_map(move |session| session.wanted(logprobs))
        });
        let wanted = wanted.max().unwrap_or(Wanted::Likeliest);
        let mut segments: Vec<Segment<'_>> = (self.running.iter_mut())
            .flat_map(|running| {
                let images = &*running.job.images;
                let sessions = running.sessions.iter_mut();
                sessions.map(move |session| (session, images))
            })
            .filter(|(session, _)| session.scheduled > 0)
            .map(|(session, images)| session.segment(images))
            .collect();
        if segments.is_empty() {
            return Ok(());
        }
        self.counters.steps += 1;
        let pages = self.engine.kv_cache().pool().clone();
        let tokens: usize = segments.iter().map(|segment| segment.tokens.len()).sum();
        let prompts = tokens - segments.len() >= Self::PROMPT_STEP;
        let sequences = segments.len();
        let begun = self.system.now();
        let Pass {
            mut rows,
            mut features,
            tokenizer,
        } = self.engine.forward_for(&mut segments, wanted)?;
        let ended = self.system.now();
        let time = ended.duration_since(begun);
        self.passed = Some(ended);
        self.idle_since = Some(ended);
        if prompts {
            self.prompt_rate.observe(tokens as f64, time);
        }
        if pages.has_lost_files() {
            // Some of the rows were zeros.
            return Err(KvError::RowsLost.into());
        }
        // Of one token each, and of guesses.
        let mut decodes = true;
        let hears = self.drafter.as_ref().and_then(Drafter::features_width);
        let from_history = self.config.engine.most_from_history() > 0;
        for running in &mut self.running {
            let logprobs = running.job.logprobs;
            let sees = !running.job.images.is_empty();
            for session in &mut running.sessions {
                if let Some(width) = hears {
                    let (own, rest) = features.split_at(session.scheduled * width);
                    features = rest;
                    if !sees && session.scheduled > 0 {
                        session.hear(own, (from_history, width), &self.request_memory);
                    }
                }
                let (own, rest) = rows.split_at(session.logit_rows());
                rows = rest;
                let start = session.sequence.len();
                decodes &= session.scheduled == 0 || session.is_decoding();
                session.choice.score(start, own.logits());
                if session.gets_token() {
                    session.sample(own, logprobs, tokenizer, &mut self.workspace);
                }
            }
        }
        let time = time + self.rewind();
        self.note_pace(decodes.then_some(sequences), tokens, time);
        Ok(())
    }

    /// Takes the states of sequences whose guesses were wrong back to their last token. Returns how long that took.
    fn rewind(&mut self) -> Duration {
        let rewound = sessions(&mut self.running).filter(|session| session.scheduled > 0);
        let mut rewound: Vec<Segment<'_>> = rewound.filter_map(Session::rewound).collect();
        if rewound.is_empty() {
            return Duration::ZERO;
        }
        let begun = self.system.now();
        // Where it cannot be, they are spent, and the next step starts their requests again.
        self.engine.rewind(&mut rewound).ok();
        self.system.now().duration_since(begun)
    }

    /// Tokens of prompts that the next steps compute.
    fn expected(&self) -> Vec<u32> {
        let sessions = self.running.iter().flat_map(|running| &running.sessions);
        let scheduled = sessions.filter(|session| session.scheduled > 0);
        let next = scheduled.flat_map(|session| {
            let next = session.sequence.len() + session.scheduled;
            session.choice.tokens.get(next..).unwrap_or_default()
        });
        next.copied().take(MOST_EXPECTED).collect()
    }

    /// Makes the computed rows valid, shares them, and hands the chosen tokens out. Returns whether
    /// anything was computed.
    fn accept(&mut self) -> bool {
        let now = self.system.now();
        let mut computed = false;
        for session in sessions(&mut self.running).filter(|session| session.scheduled > 0) {
            computed = true;
            let rows = session.settle(&mut self.counters.drafts);
            session.sequence.accept(rows);
        }
        self.share(now);
        for session in sessions(&mut self.running) {
            // What a device does not take back now, the next step offers again.
            session.sequence.release_passed().ok();
        }
        self.deliver(now);
        computed
    }

    /// The model refused the batch: what was in it fails, or the one request that the refusal is about,
    /// and the rest goes on. Of that, what the pass has computed counts for nothing; where it changed the
    /// states of layers, the next step starts a request again.
    fn fail_scheduled(&mut self, error: &EngineError) -> bool {
        let culprit = self.culprit(error);
        for index in (0..self.running.len()).rev() {
            let scheduled = |session: &Session| session.scheduled > 0;
            let fails = match culprit {
                Some(culprit) => index == culprit,
                None => self.running[index].sessions.iter().any(scheduled),
            };
            if fails {
                let running = self.running.remove(index);
                self.close(running, End::Failed(Failure::from(error)));
            }
        }
        for session in sessions(&mut self.running) {
            session.drop_guesses();
            session.scheduled = 0;
        }
        true
    }

    /// The running request in whose rows a pass found a value that is not finite.
    fn culprit(&self, error: &EngineError) -> Option<usize> {
        let &EngineError::Forward(ForwardError::NotFinite { place, row }) = error else {
            return None;
        };
        let rows = |session: &Session| match place {
            Place::Logits => session.logit_rows(),
            _ => session.scheduled,
        };
        let mut before = 0;
        self.running.iter().position(|running| {
            before += running.sessions.iter().map(rows).sum::<usize>();
            row < before
        })
    }
}

/// A prefix cache with nothing in it.
fn empty_prefix(engine: &dyn ModelRunner, config: &ServiceConfig) -> PrefixCache {
    let message_ends = engine.tokenizer().end_of_generation().collect();
    let prefix = PrefixCache::new(engine.kv_cache().clone()).with_message_ends(message_ends);
    match &config.blocks {
        Some(watch) => prefix.watched(watch.namespace),
        None => prefix,
    }
}

/// Where pages are kept beside memory.
struct Stores {
    swap: Option<Swap>,
    folder: Option<CacheFolder>,
}

impl Stores {
    /// Those that `config` asks for.
    ///
    /// # Errors
    /// [`EngineError::Folder`], [`EngineError::Swap`].
    fn open(engine: &Engine, config: &ServiceConfig) -> Result<Self, EngineError> {
        let cache = engine.kv_cache();
        let folder = match &config.prefix_cache.folder {
            Some(folder) if config.prefix_cache.enabled => {
                let refused = |source| FolderError::Io {
                    path: folder.path.clone(),
                    source,
                };
                let fingerprint = engine.fingerprint(&folder.path).map_err(refused)?;
                Some(CacheFolder::open(folder.clone(), cache, fingerprint)?)
            }
            _ => None,
        };
        let swap = config.swap.as_ref();
        let swap = swap.map(|swap| Swap::open(swap, cache)).transpose()?;
        let aside = match (&folder, &config.swap, &swap) {
            // A folder has what would be evicted already.
            // Rows in memory of two kinds cannot be kept in files without their sequence.
            (None, Some(file), Some(swap))
                if config.prefix_cache.enabled && cache.geometry().host_layers() == 0 =>
            {
                let (folder, room) = (file.folder.clone(), swap.room());
                Some(CacheFolder::open_unnamed(folder, room, cache, None)?)
            }
            _ => None,
        };
        Ok(Self {
            swap,
            folder: folder.or(aside),
        })
    }
}

/// Tokens of prompts that are looked ahead at: what is read ahead of them is less.
const MOST_EXPECTED: usize = 256;

/// How a request ends.
enum End {
    Finished,
    Cancelled,
    Failed(Failure),
}

/// Whether and why `job` is over as of `now`.
fn end_of(job: &Job, now: Instant, unread_patience: Duration) -> Option<End> {
    let unread = |since: Instant| now.duration_since(since) >= unread_patience;
    if job.is_cancelled() {
        Some(End::Cancelled)
    } else if job.deadline.is_some_and(|deadline| now >= deadline) {
        Some(End::Failed(Failure::Deadline))
    } else if job.stalled.is_some_and(unread) {
        Some(End::Failed(Failure::Unread))
    } else {
        None
    }
}

fn sessions(running: &mut [Running]) -> impl Iterator<Item = &mut Session> {
    running.iter_mut().flat_map(|running| &mut running.sessions)
}
