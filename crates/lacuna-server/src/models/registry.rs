//! The models of a server, and the one thread that loads, shrinks and unloads them.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use lacuna_engine::{Accounting, Grace, RequestMemory};
use lacuna_pages::{ByteLength, ProcessMemory, return_freed_memory};
use tokio::sync::oneshot;

use crate::http::error::ApiError;
use crate::http::probes::ending;
use crate::models::arbiter::{Answer, Arbiter, Asked, ModelStatus, NotLoaded, Outcome, Step};
use crate::models::card::Card;
use crate::models::loaded::{Leaving, Loaded, Settings};
use crate::models::policy::ModelId;
use crate::models::{ModelEntry, ModelPath};
use crate::server::mebibytes;

/// The models of a server. Dropping it ends them at once.
#[derive(Debug)]
pub(crate) struct Registry {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// Finds models, and has them loaded. Clones are the same.
#[derive(Debug, Clone)]
pub(crate) struct Models(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    models: Vec<Known>,
    settings: Settings,
    state: Mutex<State>,
    wake: Condvar,
}

/// A model that may be loaded.
#[derive(Debug)]
pub(crate) struct Known {
    pub(crate) entry: ModelEntry,
    /// Or why its files are none.
    pub(crate) card: Result<Card, String>,
}

#[derive(Debug)]
struct State {
    arbiter: Arbiter<Reply>,
    loaded: Vec<Option<Arc<Loaded>>>,
    leaving: Vec<(ModelId, Leaving)>,
    /// Bytes that the process may commit.
    budget: u64,
    /// Bytes of them that are no model's: the program's, and what requests hold.
    base: u64,
    /// Bytes that the process has beyond what was planned, which models do not get.
    beyond_plan: u64,
    looked: Option<Instant>,
    closing: bool,
}

/// Where the answer for somebody who waits goes.
type Reply = oneshot::Sender<Result<Lease, ApiError>>;

/// A model that somebody uses. It stays loaded until this is dropped, unless it is unloaded by force.
#[derive(Debug)]
pub(crate) struct Lease {
    shared: Arc<Shared>,
    id: ModelId,
    generation: u64,
    pub(crate) loaded: Arc<Loaded>,
}

/// Asks for more memory for a model that is loaded, and knows why it has ended.
#[derive(Debug, Clone)]
pub(crate) struct More {
    /// Weak, because what it belongs to is among the models.
    shared: Weak<Shared>,
    id: ModelId,
}

/// What all models together have and may have.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Room {
    pub(crate) budget: u64,
    pub(crate) base: u64,
    pub(crate) beyond_plan: u64,
    pub(crate) room: u64,
    pub(crate) taken: u64,
}

/// How often the process is looked at while a model is loaded.
const LOOK: Duration = Duration::from_millis(250);
/// How soon to look again for memory that is to come free.
const LEAVING_LOOK: Duration = Duration::from_millis(20);

impl Registry {
    /// None of `models` is loaded yet. `base` of the `budget` is no model's.
    ///
    /// # Errors
    /// When the system gives no thread.
    pub(crate) fn start(
        models: Vec<Known>,
        settings: Settings,
        (budget, base): (u64, u64),
        keep: Option<Duration>,
    ) -> std::io::Result<Self> {
        let needs = models.iter().map(|known| match &known.card {
            Ok(card) => Ok(card.needs),
            Err(reason) => Err(reason.clone()),
        });
        let most_waiting = settings.config.service.max_waiting;
        let state = State {
            arbiter: Arbiter::new(budget.saturating_sub(base), needs, most_waiting, keep),
            loaded: models.iter().map(|_| None).collect(),
            leaving: Vec::new(),
            budget,
            base,
            beyond_plan: 0,
            looked: None,
            closing: false,
        };
        let shared = Arc::new(Shared {
            models,
            settings,
            state: Mutex::new(state),
            wake: Condvar::new(),
        });
        let running = Arc::clone(&shared);
        let thread = thread::Builder::new().name("lacuna-models".to_owned());
        let thread = thread.spawn(move || running.run())?;
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }

    pub(crate) fn models(&self) -> Models {
        Models(Arc::clone(&self.shared))
    }

    /// Loads nothing more, lets what is under way finish as `grace` says, and ends.
    pub(crate) fn shutdown(mut self, grace: Grace) {
        self.close(grace);
    }

    fn close(&mut self, grace: Grace) {
        let Some(thread) = self.thread.take() else {
            return;
        };
        self.shared.lock().closing = true;
        self.shared.wake.notify_all();
        // Its panic, if there was one, was reported where it happened.
        thread.join().ok();
        let until = match grace {
            Grace::Finish(within) => Instant::now().checked_add(within),
            Grace::Immediate => Some(Instant::now()),
        };
        // Nobody gets a model any more, and those who have one give it back when their reply has left.
        while self.shared.is_used() && until.is_none_or(|until| Instant::now() < until) {
            thread::sleep(LEAVING_LOOK);
        }
        let loaded: Vec<_> = self
            .shared
            .lock()
            .loaded
            .iter_mut()
            .map(Option::take)
            .collect();
        for one in loaded.into_iter().flatten() {
            one.end();
        }
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        self.close(Grace::Immediate);
    }
}

impl Models {
    /// All that there are.
    pub(crate) fn known(&self) -> impl Iterator<Item = (ModelId, &Known)> {
        let known = self.0.models.iter().enumerate();
        known.map(|(index, known)| (ModelId(index), known))
    }

    pub(crate) fn get(&self, id: ModelId) -> &Known {
        &self.0.models[id.0]
    }

    /// The model that is asked for by this name, exactly: names are never taken for paths.
    pub(crate) fn find(&self, name: &str) -> Option<ModelId> {
        let is = |known: &Known| {
            known.entry.name == name || known.entry.aliases.iter().any(|alias| alias == name)
        };
        let found = self.0.models.iter().position(is);
        found.map(ModelId)
    }

    /// A model, once it is loaded. It stays for `keep` when nobody uses it any more, if that is said.
    pub(crate) async fn lease(
        &self,
        id: ModelId,
        keep: Option<Option<Duration>>,
    ) -> Result<Lease, ApiError> {
        let (reply, answer) = oneshot::channel();
        let asked = {
            let mut state = self.0.lock();
            if state.closing {
                return Err(ending());
            }
            let asked = state.arbiter.ask(id, keep, Instant::now(), reply);
            match asked {
                Asked::Answered(_, answer) => Some(self.0.dress(&state, id, answer)),
                Asked::Waits => None,
            }
        };
        if let Some(answered) = asked {
            return answered;
        }
        self.0.wake.notify_all();
        let within = self.0.settings.config.limits.request;
        match tokio::time::timeout(within, answer).await {
            Ok(Ok(answered)) => answered,
            // The thread has gone.
            Ok(Err(_)) => Err(ending()),
            Err(_) => {
                self.0.wake.notify_all();
                Err(ApiError::new(
                    StatusCode::GATEWAY_TIMEOUT,
                    "timeout",
                    format!(
                        "the model `{}` was not loaded within {within:?}, because others were at work",
                        self.get(id).entry.name
                    ),
                ))
            }
        }
    }

    /// Has a model unloaded, once nobody uses it, or after `within`. Returns whether it is loaded.
    pub(crate) fn unload(&self, id: ModelId, within: Duration) -> bool {
        let now = Instant::now();
        // Too far away to be a time is never, as far as requests last.
        let by = now
            .checked_add(within)
            .unwrap_or(now + Duration::from_secs(86_400));
        let loaded = self.0.lock().arbiter.unload(id, by);
        self.0.wake.notify_all();
        loaded
    }

    /// What the process may commit from now on. Models give way as they can.
    ///
    /// # Errors
    /// The least there is, if that is more: the largest model alone.
    pub(crate) fn set_budget(&self, budget: u64) -> Result<(), u64> {
        let cards = self
            .0
            .models
            .iter()
            .filter_map(|known| known.card.as_ref().ok());
        let largest = cards.map(|card| card.needs.least).max();
        let mut state = self.0.lock();
        let least = state.base + largest.unwrap_or(0);
        if budget < least {
            return Err(least);
        }
        state.budget = budget;
        state.looked = None;
        drop(state);
        self.0.wake.notify_all();
        Ok(())
    }

    /// How a model is, and what answers for it if it is loaded.
    pub(crate) fn status(&self, id: ModelId) -> (ModelStatus, Option<Arc<Loaded>>) {
        let state = self.0.lock();
        (state.arbiter.status(id), state.loaded[id.0].clone())
    }

    pub(crate) fn room(&self) -> Room {
        let state = self.0.lock();
        let (room, taken) = state.arbiter.room();
        Room {
            budget: state.budget,
            base: state.base,
            beyond_plan: state.beyond_plan,
            room,
            taken,
        }
    }

    /// What those are told who ask for a model that is none.
    pub(crate) fn not_loaded(&self, id: ModelId, reason: &str) -> ApiError {
        self.0.refusal(id, NotLoaded::Failed(reason.to_owned()))
    }

    /// The account of what requests hold.
    pub(crate) fn requests(&self) -> &RequestMemory {
        &self.0.settings.requests
    }
}

impl More {
    /// Has the model's engine given a budget of so many bytes, if it can have them once others are done. Requests are
    /// refused by what there is then.
    pub(crate) async fn ask(&self, budget: ByteLength) {
        let Some(shared) = self.shared.upgrade() else {
            return;
        };
        let (reply, answer) = oneshot::channel();
        {
            let mut state = shared.lock();
            let Some(loaded) = &state.loaded[self.id.0] else {
                return;
            };
            let share = loaded.share_of(budget.get());
            if state.closing || !state.arbiter.want(self.id, share, reply) {
                return;
            }
        }
        shared.wake.notify_all();
        let within = shared.settings.config.limits.request;
        drop(shared);
        tokio::time::timeout(within, answer).await.ok();
    }

    /// What those are told whose request was under way when the model ended.
    pub(crate) fn why_ended(&self) -> ApiError {
        match self.shared.upgrade() {
            Some(shared) if !shared.lock().closing => ApiError::unavailable(
                "model_unloaded",
                "the model was unloaded before the reply was finished; send the request again, which has it loaded again",
            ),
            _ => ending(),
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state
            .arbiter
            .release(self.id, self.generation, Instant::now());
        drop(state);
        self.shared.wake.notify_all();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a request has a model.
    fn is_used(&self) -> bool {
        let state = self.lock();
        let mut all = (0..self.models.len()).map(ModelId);
        all.any(|id| state.arbiter.status(id).users > 0)
    }

    /// An answer as those who asked have it. To be dropped or sent without the lock.
    fn dress(
        self: &Arc<Self>,
        state: &State,
        id: ModelId,
        answer: Answer,
    ) -> Result<Lease, ApiError> {
        match answer {
            Answer::Granted(generation) => match &state.loaded[id.0] {
                Some(loaded) => Ok(Lease {
                    shared: Arc::clone(self),
                    id,
                    generation,
                    loaded: Arc::clone(loaded),
                }),
                None => Err(ApiError::internal("a model that is loaded is not there")),
            },
            // Whoever asked for more looks at what there is.
            Answer::Tried => Err(ApiError::internal("nobody asked for the model")),
            Answer::Refused(why) => Err(self.refusal(id, why)),
        }
    }

    fn refusal(&self, id: ModelId, why: NotLoaded) -> ApiError {
        let name = &self.models[id.0].entry.name;
        match why {
            NotLoaded::QueueFull => {
                ApiError::queue_full("too many requests wait for models; try again")
            }
            NotLoaded::TooLarge { needed, room } => ApiError::new(
                StatusCode::SERVICE_UNAVAILABLE,
                "model_too_large",
                format!(
                    "the model `{name}` needs {}, and all models of this server may have {}; raise its budget",
                    mebibytes(needed),
                    mebibytes(room)
                ),
            ),
            NotLoaded::Failed(reason) => ApiError::new(
                StatusCode::INTERNAL_SERVER_ERROR,
                "model_load_failed",
                format!(
                    "the model `{name}` cannot be loaded: {}",
                    self.public(id, &reason)
                ),
            ),
        }
    }

    /// A reason without the folder that the model is in, which is nobody's business.
    fn public(&self, id: ModelId, reason: &str) -> String {
        let ModelPath::Path(path) = &self.models[id.0].entry.source else {
            return reason.to_owned();
        };
        match path.parent().map(|folder| folder.display().to_string()) {
            Some(folder) if !folder.is_empty() => reason.replace(&format!("{folder}/"), ""),
            _ => reason.to_owned(),
        }
    }

    /// The thread's life.
    fn run(self: Arc<Self>) {
        loop {
            let mut state = self.lock();
            if state.closing {
                let waiting = state.arbiter.drain();
                drop(state);
                for reply in waiting {
                    reply.send(Err(ending())).ok();
                }
                return;
            }
            let now = Instant::now();
            self.look(&mut state, now);
            state.arbiter.retain(|reply| !reply.is_closed());
            let plan = state.arbiter.plan(now);
            let answers = self.dressed(&state, plan.answers);
            if answers.is_empty() && plan.step.is_none() {
                self.wait(state, plan.wake, now);
                continue;
            }
            let begun = plan.step.map(|step| self.begin(&mut state, step));
            drop(state);
            send(answers);
            if let Some(begun) = begun {
                self.finish(begun);
            }
        }
    }

    /// Until somebody comes, or time brings something to do.
    fn wait(&self, state: MutexGuard<'_, State>, wake: Option<Instant>, now: Instant) {
        let quiet = state.loaded.iter().all(Option::is_none);
        let look = match state.leaving.is_empty() {
            true if quiet => Duration::MAX,
            true => LOOK,
            false => LEAVING_LOOK,
        };
        let due = wake.map_or(Duration::MAX, |wake| wake.saturating_duration_since(now));
        match look.min(due) {
            Duration::MAX => drop(self.wake.wait(state)),
            patience => drop(self.wake.wait_timeout(state, patience)),
        }
    }

    /// Looks at what has become of models, and at what the process holds.
    fn look(&self, state: &mut State, now: Instant) {
        let (gone, left): (Vec<_>, Vec<_>) = std::mem::take(&mut state.leaving)
            .into_iter()
            .partition(|(_, leaving)| leaving.is_gone());
        state.leaving = left;
        if !gone.is_empty() {
            return_freed_memory();
        }
        for (id, _) in gone {
            state.arbiter.is_gone(id);
        }
        let due = state
            .looked
            .is_none_or(|looked| now.saturating_duration_since(looked) >= LOOK);
        if !due {
            return;
        }
        state.looked = Some(now);
        let (mut floating, mut planned, mut short) = (0, state.base, Vec::new());
        for (index, loaded) in state.loaded.iter().enumerate() {
            let Some(loaded) = loaded else {
                continue;
            };
            let id = ModelId(index);
            let status = state.arbiter.status(id);
            let (apart, own) = loaded.anonymous(status.share);
            (floating, planned) = (floating + apart, planned + own);
            if !loaded.is_well() {
                // The next request has it loaded anew.
                state.arbiter.unload(id, now);
            }
            let working = status.needs.map_or(0, |needs| needs.working);
            if status.users > 0 && loaded.is_short(status.share, working) {
                short.push(id);
            }
        }
        // What leaves is in its share, and not in any plan.
        let leaving = state.leaving.iter();
        planned += leaving
            .map(|(id, _)| state.arbiter.status(*id).share)
            .sum::<u64>();
        let process = match self.settings.config.service.engine.accounting {
            Accounting::Measured => ProcessMemory::read(),
            Accounting::Planned => None,
        };
        let held = process.map_or(0, |process| process.anonymous.get());
        state.beyond_plan = held.saturating_sub(floating).saturating_sub(planned);
        let room = state.budget.saturating_sub(state.base + state.beyond_plan);
        state.arbiter.set_room(room);
        state.arbiter.set_short(short);
    }

    fn dressed(
        self: &Arc<Self>,
        state: &State,
        answers: Vec<(ModelId, Reply, Answer)>,
    ) -> Vec<(Reply, Result<Lease, ApiError>)> {
        let dress = |(id, reply, answer)| (reply, self.dress(state, id, answer));
        answers.into_iter().map(dress).collect()
    }

    /// What a step is done with.
    fn begin(&self, state: &mut State, step: Step) -> Begun {
        match step {
            Step::Load { id, share } => Begun::Load { id, share },
            Step::Change { id, share } => Begun::Change {
                from: state.arbiter.changes_from(id),
                to: share,
                loaded: state.loaded[id.0].clone(),
            },
            Step::Unload { id } => Begun::Unload {
                id,
                loaded: state.loaded[id.0].take(),
            },
        }
    }

    /// Does a step, and records what came of it.
    fn finish(self: &Arc<Self>, begun: Begun) {
        let (outcome, change) = match begun {
            Begun::Load { id, share } => match self.load(id, share) {
                Ok(loaded) => {
                    let least = loaded.least();
                    let loaded = Some(Arc::new(loaded));
                    (Outcome::Loaded { least }, Change::Loaded(id, loaded))
                }
                Err(reason) => (Outcome::Failed { reason }, Change::None),
            },
            Begun::Change { from, to, loaded } => {
                let share = loaded.map_or(to, |loaded| loaded.set_share(from, to));
                (Outcome::Changed { share }, Change::None)
            }
            Begun::Unload { id, loaded } => {
                let leaving = loaded.map(Loaded::unload);
                let leaving = leaving.filter(|leaving| !leaving.is_gone());
                let free = leaving.is_none();
                (Outcome::Unloaded { free }, Change::Leaves(id, leaving))
            }
        };
        let mut state = self.lock();
        match change {
            Change::Loaded(id, loaded) => state.loaded[id.0] = loaded,
            Change::Leaves(id, leaving) => {
                state.leaving.extend(leaving.map(|leaving| (id, leaving)));
            }
            Change::None => {}
        }
        let answers = state.arbiter.record(outcome, Instant::now());
        let answers = self.dressed(&state, answers);
        drop(state);
        send(answers);
    }

    fn load(self: &Arc<Self>, id: ModelId, share: u64) -> Result<Loaded, String> {
        let Known { entry, card } = &self.models[id.0];
        let card = card.as_ref().map_err(Clone::clone)?;
        let more = More {
            shared: Arc::downgrade(self),
            id,
        };
        let load = || Loaded::load(&self.settings, entry, card, (share, more));
        // Nothing is left half changed: what was being loaded is gone with it.
        let loaded = catch_unwind(AssertUnwindSafe(load));
        loaded.unwrap_or_else(|_| Err("loading it failed for an unknown reason".to_owned()))
    }
}

/// A step that is being done.
enum Begun {
    Load {
        id: ModelId,
        share: u64,
    },
    Change {
        from: u64,
        to: u64,
        loaded: Option<Arc<Loaded>>,
    },
    Unload {
        id: ModelId,
        loaded: Option<Arc<Loaded>>,
    },
}

/// What it has changed.
enum Change {
    None,
    Loaded(ModelId, Option<Arc<Loaded>>),
    Leaves(ModelId, Option<Leaving>),
}

/// Without the lock: who does not wait any more gives its lease back at once.
fn send(answers: Vec<(Reply, Result<Lease, ApiError>)>) {
    for (reply, answer) in answers {
        reply.send(answer).ok();
    }
}
