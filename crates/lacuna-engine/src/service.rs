//! The service: a thread that owns the engine and steps it, and handles to give it work.

use std::collections::VecDeque;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use lacuna_kv::folder::FolderConfig;
use lacuna_kv::swap::SwapConfig;
use lacuna_models::Model;
use lacuna_models::plan::{BudgetTooSmall, Parts};
use lacuna_pages::{ByteLength, Ledger};

use crate::block_feed::BlockWatch;
use crate::engine::{Engine, EngineConfig};
use crate::error::EngineError;
use crate::request::{Refusal, Request};
use crate::request_limits::RequestLimits;
use crate::request_memory::RequestMemory;
use crate::scheduler::{Borrower, Loan, LoanRefusal, Scheduler, Waiting};
use crate::status::{Status, retry_after};
use crate::stream::Stream;

/// How a service is set up.
#[derive(Debug, Clone)]
pub struct ServiceConfig {
    /// The engine under it.
    pub engine: EngineConfig,
    /// Choices that run at once at most. Default 32.
    pub max_running: usize,
    /// Requests that may wait. Default 256.
    pub max_waiting: usize,
    /// Tokens computed in one step at most, over all requests. Each takes activation memory. Default
    /// 256.
    pub max_batched_tokens: usize,
    /// Tokens of prompts computed in one step at most while replies are generated, which wait for
    /// the step. Default 64.
    pub mixed_tokens: usize,
    /// What is kept of finished prompts.
    pub prefix_cache: PrefixCacheConfig,
    /// Where pages go of preempted requests, and without a folder of what the prefix cache would evict, when moving them
    /// takes less time than computing them again. Default none.
    pub swap: Option<SwapConfig>,
    /// How long a request whose events are not read keeps its place. Default 30 s.
    pub unread_patience: Duration,
    /// An account of what requests hold that several services share, and that no budget of theirs has in it. Default
    /// none: the service has one of its own, as [`EngineConfig::request_memory`] says.
    pub shared_requests: Option<RequestMemory>,
    /// Who is told which blocks of prompts can be reused. Default nobody.
    pub blocks: Option<BlockWatch>,
}

impl ServiceConfig {
    /// How the engine is set up for the service's steps. However many choices run, a step gives a
    /// token to as many as it has tokens, and the others have theirs in the next ones.
    #[must_use]
    pub fn engine_config(&self) -> EngineConfig {
        EngineConfig {
            batch_tokens: self.max_batched_tokens,
            sequences: self.max_running.min(self.max_batched_tokens),
            request_memory: match self.shared_requests {
                Some(_) => Some(ByteLength::new(0)),
                None => self.engine.request_memory,
            },
            ..self.engine.clone()
        }
    }
}

/// What is kept of prompts for requests that begin the same way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrefixCacheConfig {
    /// Whether anything is shared and kept at all. Default true.
    pub enabled: bool,
    /// How long an unused page group is kept at most; room is made earlier when it is needed.
    /// Default ten minutes; `None` for no such limit.
    pub time_to_live: Option<Duration>,
    /// A folder in which what is kept outlives the process. Default none. It holds what was said.
    pub folder: Option<FolderConfig>,
}

impl Default for ServiceConfig {
    fn default() -> Self {
        Self {
            engine: EngineConfig::default(),
            max_running: 32,
            max_waiting: 256,
            max_batched_tokens: 256,
            mixed_tokens: 64,
            prefix_cache: PrefixCacheConfig::default(),
            swap: None,
            unread_patience: Duration::from_secs(30),
            shared_requests: None,
            blocks: None,
        }
    }
}

impl Default for PrefixCacheConfig {
    fn default() -> Self {
        Self {
            enabled: true,
            time_to_live: Some(Duration::from_secs(600)),
            folder: None,
        }
    }
}

/// How a service ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Grace {
    /// Requests that were taken may finish for this long; what is left then fails.
    Finish(Duration),
    /// Everything under way fails at once.
    Immediate,
}

/// A running engine: one thread that steps it.
///
/// Dropping it is [`Service::shutdown`] with [`Grace::Immediate`].
#[derive(Debug)]
pub struct Service {
    handle: Handle,
    thread: Option<JoinHandle<()>>,
}

/// Gives a service work and reads its figures. Clones are the same service.
#[derive(Debug, Clone)]
pub struct Handle {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    model: Arc<Model>,
    request_limits: RequestLimits,
    /// The least that the budget can be.
    least: Parts,
    /// What the tables take by which replies are held to grammars.
    constraint_bytes: u64,
    inbox: Mutex<Inbox>,
    wake: Condvar,
}

/// Something that the service's thread does between two steps.
type Work = Box<dyn FnOnce(&mut Scheduler) + Send>;

#[derive(Default)]
struct Inbox {
    arrivals: VecDeque<Waiting>,
    work: Vec<Work>,
    requests: u64,
    refused: u64,
    /// Requests that wait to run, these arrivals included.
    waiting: usize,
    /// Choices that run, as of the last step.
    places_taken: usize,
    closing: Option<Grace>,
    /// What the process may commit from the next step on.
    budget: Option<u64>,
    /// Whether the thread has ended, for whatever reason.
    ended: bool,
    status: Status,
}

impl std::fmt::Debug for Inbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inbox")
            .field("waiting", &self.waiting)
            .field("closing", &self.closing)
            .finish_non_exhaustive()
    }
}

impl Service {
    /// Sets the engine up and starts its thread.
    ///
    /// # Errors
    /// [`EngineError`] when a setting is out of range, the budget is too small to run anything, or
    /// the system refuses memory or threads.
    pub fn start(model: Arc<Model>, config: ServiceConfig) -> Result<Self, EngineError> {
        let engine = Engine::new(Arc::clone(&model), &config.engine_config())?;
        let least = engine.plan().least_while_running();
        let constraint_bytes = engine.plan().program.constraint_bytes;
        let scheduler = Scheduler::new(engine, config)?;
        let shared = Arc::new(Shared {
            model,
            least,
            constraint_bytes,
            request_limits: scheduler.request_limits(),
            inbox: Mutex::new(Inbox {
                status: scheduler.status(),
                ..Inbox::default()
            }),
            wake: Condvar::new(),
        });
        let thread = {
            let shared = Arc::clone(&shared);
            std::thread::Builder::new()
                .name("lacuna-engine".to_owned())
                .spawn(move || run(&shared, scheduler))
                .map_err(EngineError::Thread)?
        };
        Ok(Self {
            handle: Handle { shared },
            thread: Some(thread),
        })
    }

    /// A handle to give to clients.
    #[must_use]
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Takes no more requests, ends those there are as `grace` says, and stops the thread. Blocks
    /// until all of it is done.
    pub fn shutdown(mut self, grace: Grace) {
        self.close(grace);
    }

    fn close(&mut self, grace: Grace) {
        self.handle.end(grace);
        if let Some(thread) = self.thread.take() {
            // The thread's panic has been reported where it happened.
            thread.join().ok();
        }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        if self.thread.is_some() {
            self.close(Grace::Immediate);
        }
    }
}

impl Handle {
    /// Takes a request up, to run when its turn comes.
    ///
    /// # Errors
    /// [`Refusal`]; nothing is held for the request then.
    pub fn submit(&self, mut request: Request) -> Result<Stream, Refusal> {
        let request_limits = &self.shared.request_limits;
        let whole = self.model().files().check().map_err(Refusal::from);
        let checked = whole.and_then(|()| request_limits.check(&request));
        let checked =
            checked.and_then(|capacity| request_limits.hold(&mut request).map(|()| capacity));
        let made = checked.and_then(|capacity| Waiting::new(request, capacity, Instant::now()));
        let mut inbox = self.shared.lock();
        let taken =
            made.and_then(|(waiting, stream)| inbox.take(waiting, request_limits).map(|()| stream));
        inbox.refused += u64::from(taken.is_err());
        drop(inbox);
        if taken.is_ok() {
            self.shared.wake.notify_all();
        }
        taken
    }

    /// Whether a request could be taken if nothing else ran: what can never run is refused, and nothing is taken.
    ///
    /// # Errors
    /// [`Refusal`], as [`Handle::submit`] has it.
    pub fn check(&self, request: &Request) -> Result<(), Refusal> {
        self.shared.request_limits.check(request).map(drop)
    }

    /// What the service is doing.
    #[must_use]
    pub fn status(&self) -> Status {
        let inbox = self.shared.lock();
        let mut status = inbox.status.clone();
        status.waiting = inbox.waiting;
        status.request_memory = self.shared.request_limits.request_memory.status();
        status.counters.requests = inbox.requests;
        status.counters.refused = inbox.refused;
        status
    }

    /// Makes `budget` what the process may commit, from the next step on. What there is too much of goes: idle pages,
    /// cached groups that nobody uses, weights, which are read for each pass then, and in the end the last requests,
    /// which are computed again when there is memory for them. No answer changes.
    ///
    /// # Errors
    /// [`BudgetTooSmall`] with the least that works.
    pub fn set_budget(&self, budget: ByteLength) -> Result<(), BudgetTooSmall> {
        let (budget, needed) = (budget.get(), self.shared.least);
        if budget < needed.bytes() {
            return Err(BudgetTooSmall { budget, needed });
        }
        self.shared.lock().budget = Some(budget);
        self.shared.wake.notify_all();
        Ok(())
    }

    /// The budget with which a request could be taken that is too large for the one there is; `None` for one that is not.
    #[must_use]
    pub fn budget_for(&self, request: &Request) -> Option<ByteLength> {
        let Err(Refusal::TooLarge { needed, budget }) = self.shared.request_limits.check(request)
        else {
            return None;
        };
        let current = self.shared.lock().status.budget.plan.budget_bytes?;
        let more = needed.get().saturating_sub(budget.get());
        Some(ByteLength::new(current.saturating_add(more)))
    }

    /// The least that [`Handle::set_budget`] takes.
    #[must_use]
    pub fn least_budget(&self) -> ByteLength {
        ByteLength::new(self.shared.least.bytes())
    }

    /// Whether the last [`Handle::set_budget`] has been carried out: `budget` is what is kept to, and no more pages are
    /// held than it leaves.
    #[must_use]
    pub fn keeps_to(&self, budget: ByteLength) -> bool {
        let inbox = self.shared.lock();
        let (pending, told) = (inbox.budget.is_some(), &inbox.status.budget);
        let (current, limit) = (told.plan.budget_bytes, told.kv_now);
        drop(inbox);
        !pending && current == Some(budget.get()) && self.ledger().committed <= limit
    }

    /// Bytes of the process's anonymous memory that are this service's KV pages or weights that are read, which
    /// change places as it runs. The other parts of its budget are what it was set up with.
    #[must_use]
    pub fn anonymous_bytes(&self) -> u64 {
        self.shared.request_limits.cache.get().anonymous_bytes() + self.model().placed_bytes()
    }

    /// Makes memory of the budget `borrower`'s, for the tables of the vocabulary by which replies are held to grammars. KV
    /// pages and weights have as much less until it is given back: they ask for it when they are short, and when nobody has
    /// used it for as long as the prefix cache keeps what nobody uses. Blocks until the step under way is over.
    ///
    /// # Errors
    /// [`LoanRefusal`]; `borrower` is dropped then.
    pub fn lend_for_constraints(
        &self,
        borrower: impl Borrower + 'static,
    ) -> Result<(), LoanRefusal> {
        let loan = Loan {
            bytes: self.shared.constraint_bytes,
            borrower: Box::new(borrower),
        };
        self.between_steps(|scheduler| scheduler.lend(loan))
            .map_err(|_| LoanRefusal::ServiceEnded)?
    }

    /// Asks the service to end as [`Service::shutdown`] does, and does not wait until it has.
    pub fn end(&self, grace: Grace) {
        self.shared.lock().closing = Some(grace);
        self.shared.wake.notify_all();
    }

    /// Has `work` done by the service's thread before its next step, and waits for it.
    ///
    /// # Errors
    /// [`EngineError::ServiceEnded`] when there is no next step; `work` is dropped then.
    pub(crate) fn between_steps<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Scheduler) -> T + Send + 'static,
    ) -> Result<T, EngineError> {
        let (done, result) = sync_channel(1);
        let work = Box::new(move |scheduler: &mut Scheduler| {
            // Who asked waits for it, unless its thread was ended.
            done.send(work(scheduler)).ok();
        });
        let mut inbox = self.shared.lock();
        if inbox.closing.is_some() {
            return Err(EngineError::ServiceEnded);
        }
        inbox.work.push(work);
        drop(inbox);
        self.shared.wake.notify_all();
        result.recv().map_err(|_| EngineError::ServiceEnded)
    }

    /// Whether the service's thread runs. It ends with a shutdown, and with a panic.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        !self.shared.lock().ended
    }

    /// The KV pool's byte accounts as of now, where [`Handle::status`] has them as of a step.
    #[must_use]
    pub fn ledger(&self) -> Ledger {
        self.shared.request_limits.cache.get().ledger()
    }

    /// The account of what requests hold, for what is taken before they are submitted.
    #[must_use]
    pub fn request_memory(&self) -> &RequestMemory {
        &self.shared.request_limits.request_memory
    }

    /// The model that is served.
    #[must_use]
    pub fn model(&self) -> &Arc<Model> {
        &self.shared.model
    }

    /// Tokens that a prompt and what follows it may have together.
    #[must_use]
    pub fn context_tokens(&self) -> usize {
        self.shared.request_limits.context_tokens
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inbox {
    fn take(
        &mut self,
        mut waiting: Waiting,
        request_limits: &RequestLimits,
    ) -> Result<(), Refusal> {
        if self.closing.is_some() {
            return Err(Refusal::ShuttingDown);
        }
        // Limits that nobody reaches are a way to say that there is none.
        let free = (request_limits.max_running).saturating_sub(self.places_taken);
        if self.waiting >= request_limits.max_waiting.saturating_add(free) {
            return Err(Refusal::QueueFull {
                waiting: self.waiting,
                retry_after: retry_after(&self.status.latencies, request_limits.max_running),
            });
        }
        waiting.job.id = self.requests;
        self.requests += 1;
        self.waiting += 1;
        self.arrivals.push_back(waiting);
        Ok(())
    }
}

/// Says that nothing more is taken, however the thread ends.
struct Closed<'a>(&'a Shared);

impl Drop for Closed<'_> {
    fn drop(&mut self) {
        let mut inbox = self.0.lock();
        inbox.closing.get_or_insert(Grace::Immediate);
        inbox.arrivals.clear();
        inbox.work.clear();
        inbox.waiting = 0;
        inbox.ended = true;
    }
}

/// How old the page map and the cache's figures may be while steps follow each other.
const STATUS_AGE: Duration = Duration::from_millis(100);
/// How soon to look again when nothing can be computed although there are requests.
const STALL: Duration = Duration::from_millis(20);
/// How soon to look again when there is nothing to do but what time brings.
const TENDING: Duration = Duration::from_secs(1);

/// The engine's thread.
fn run(shared: &Shared, mut scheduler: Scheduler) {
    let _closed = Closed(shared);
    let mut published: Option<Instant> = None;
    let mut give_up: Option<Option<Instant>> = None;
    let mut stalled = false;
    loop {
        let closing = receive(shared, &mut scheduler, stalled);
        match closing {
            None => {}
            Some(_) if scheduler.is_idle() => break,
            Some(Grace::Immediate) => scheduler.fail_all(),
            Some(Grace::Finish(after)) => {
                let now = Instant::now();
                // A time that clocks do not count to is never over.
                let until = *give_up.get_or_insert_with(|| now.checked_add(after));
                if until.is_some_and(|until| now >= until) {
                    scheduler.fail_all();
                }
            }
        }
        if scheduler.sweep() {
            // What they held is free for as long as the step takes; so it is told before.
            publish(shared, &scheduler, &mut published);
        }
        stalled = !scheduler.step();
        scheduler.tell_of_blocks();
        publish(shared, &scheduler, &mut published);
    }
}

/// Publishes the totals after every step, and the rest of the figures now and then.
fn publish(shared: &Shared, scheduler: &Scheduler, published: &mut Option<Instant>) {
    let old = published.is_none_or(|at| at.elapsed() >= STATUS_AGE);
    let all = (old || scheduler.is_idle()).then(|| scheduler.status());
    let mut inbox = shared.lock();
    inbox.waiting = inbox.arrivals.len() + scheduler.waiting_len();
    inbox.places_taken = scheduler.places_taken();
    match all {
        Some(all) => {
            *published = Some(Instant::now());
            inbox.status = all;
        }
        None => scheduler.totals(&mut inbox.status),
    }
}

/// Takes arrivals over, waiting for one while there is nothing to do.
fn receive(shared: &Shared, scheduler: &mut Scheduler, stalled: bool) -> Option<Grace> {
    let mut inbox = shared.lock();
    let nothing = |inbox: &mut Inbox| {
        inbox.arrivals.is_empty()
            && inbox.work.is_empty()
            && inbox.closing.is_none()
            && inbox.budget.is_none()
    };
    let patience = match scheduler.is_idle() {
        true if scheduler.needs_tending() => TENDING,
        true => Duration::MAX,
        false if stalled => STALL,
        false => Duration::ZERO,
    };
    if patience > Duration::ZERO {
        let waited = shared.wake.wait_timeout_while(inbox, patience, nothing);
        inbox = waited.unwrap_or_else(PoisonError::into_inner).0;
    }
    for waiting in inbox.arrivals.drain(..) {
        scheduler.enqueue(waiting);
    }
    inbox.waiting = scheduler.waiting_len();
    let (closing, budget) = (inbox.closing, inbox.budget.take());
    let work = std::mem::take(&mut inbox.work);
    drop(inbox);
    if let Some(budget) = budget {
        scheduler.set_budget(budget);
    }
    if closing.is_none() && !work.is_empty() {
        scheduler.revive().ok();
        work.into_iter().for_each(|work| work(scheduler));
    }
    closing
}
