//! Which models are loaded, shrunk and unloaded when, and whose request goes on: a state machine without effects.
//!
//! ```text
//! unloaded -> loading -> loaded <-> changing -> leaving -> unloaded
//! ```
//!
//! [`Arbiter::plan`] says what to do next, [`Arbiter::record`] takes what came of it. One thing is done at a time, so
//! what a load takes is free before it begins.
//!
//! * **A1** The shares of all models, those that are loading and leaving included, come to no more than the room; where
//!   the room itself shrinks, to what there is no way around.
//! * **A2** Whoever asks for a model that is loaded has it at once, unless somebody who came earlier waits for it, or
//!   for room that it takes.
//! * **A3** Those who wait are served in the order they came, as far as they want the same model or the same room.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use lacuna_engine::Needs;

use crate::models::policy::{self, Found, Give, ModelId, Resident, Standing};

/// The models of a server, and who waits for which. `T` is how those who wait are told.
#[derive(Debug)]
pub(crate) struct Arbiter<T> {
    /// Bytes that all models may have together.
    room: u64,
    models: Vec<State>,
    waiting: VecDeque<Waiting<T>>,
    most_waiting: usize,
    /// How long a model stays that nobody uses, if requests say nothing of it.
    keep: Option<Duration>,
    /// Models that take no more requests for now, because somebody who came earlier waits for their room.
    held: Vec<ModelId>,
    /// Models at work that are short of memory.
    short: Vec<ModelId>,
    /// What is being done.
    doing: Option<ModelId>,
}

/// One model.
#[derive(Debug)]
struct State {
    /// None, if its files are no model that runs.
    needs: Option<Needs>,
    phase: Phase,
    /// Requests that use it.
    users: usize,
    /// Counts loads, so that a request that ends is not taken for one of a later load.
    generation: u64,
    used: Option<Instant>,
    keep: Option<Duration>,
    /// Until when requests may end before it is unloaded, if it is to be.
    leaves_by: Option<Instant>,
    loads: u64,
    unloads: u64,
    failure: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Unloaded,
    /// For this share, if it can be.
    Loading(u64),
    Loaded(u64),
    /// From one share to another, of which the larger counts.
    Changing(u64, u64),
    /// Unloaded, with its memory not free yet.
    Leaving(u64),
}

#[derive(Debug)]
struct Waiting<T> {
    id: ModelId,
    wish: Wish,
    reply: T,
}

/// What somebody waits for.
#[derive(Debug, Clone, Copy)]
enum Wish {
    /// The model, which is to stay so long.
    Use(Option<Option<Duration>>),
    /// A share of so much, for a model that is in use.
    Share(u64),
}

/// What to do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// Load a model into a share.
    Load { id: ModelId, share: u64 },
    /// Give a loaded model another share.
    Change { id: ModelId, share: u64 },
    /// Unload a model, and break off what still uses it.
    Unload { id: ModelId },
}

/// What came of a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// It is loaded, and runs with so much at least.
    Loaded { least: u64 },
    /// It could not be loaded.
    Failed { reason: String },
    /// It has this share now.
    Changed { share: u64 },
    /// It is unloaded; its memory is free, or still to come free.
    Unloaded { free: bool },
}

/// What somebody who waited is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Answer {
    /// The model is loaded, for the load of this number.
    Granted(u64),
    /// The model has the share that was asked for, or cannot have it.
    Tried,
    Refused(NotLoaded),
}

/// Why a model is not loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum NotLoaded {
    /// Its files are no model that runs here, or it could not be loaded.
    Failed(String),
    /// It needs more than all models may have.
    TooLarge { needed: u64, room: u64 },
    /// Too many wait.
    QueueFull,
}

/// What becomes of a question.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Asked<T> {
    Answered(T, Answer),
    Waits,
}

/// What is to happen as of now.
#[derive(Debug)]
pub(crate) struct Plan<T> {
    pub(crate) answers: Vec<(ModelId, T, Answer)>,
    pub(crate) step: Option<Step>,
    /// When time alone brings the next thing to do.
    pub(crate) wake: Option<Instant>,
}

/// A model, as others are told of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ModelStatus {
    pub(crate) state: &'static str,
    /// Bytes of the room that it holds.
    pub(crate) share: u64,
    pub(crate) needs: Option<Needs>,
    pub(crate) users: usize,
    /// When it is unloaded if nobody uses it until then.
    pub(crate) expires: Option<Instant>,
    pub(crate) loads: u64,
    pub(crate) unloads: u64,
    /// Why it could not be loaded when that was tried last.
    pub(crate) failure: Option<String>,
}

impl State {
    fn share(&self) -> u64 {
        match self.phase {
            Phase::Unloaded => 0,
            Phase::Loading(share) | Phase::Loaded(share) | Phase::Leaving(share) => share,
            Phase::Changing(from, to) => from.max(to),
        }
    }

    /// Whether a request can use it at once: also while it gets more.
    fn is_ready(&self) -> bool {
        let loaded = match self.phase {
            Phase::Loaded(_) => true,
            Phase::Changing(from, to) => from <= to,
            Phase::Unloaded | Phase::Loading(_) | Phase::Leaving(_) => false,
        };
        loaded && self.leaves_by.is_none()
    }
}

impl<T> Arbiter<T> {
    /// None of the models with these needs is loaded. Those who wait are `most_waiting` at most, and a model stays for
    /// `keep` when nobody uses it.
    pub(crate) fn new(
        room: u64,
        needs: impl IntoIterator<Item = Result<Needs, String>>,
        most_waiting: usize,
        keep: Option<Duration>,
    ) -> Self {
        let state = |needs: Result<Needs, String>| {
            let (needs, failure) = match needs {
                Ok(needs) => (Some(needs), None),
                Err(reason) => (None, Some(reason)),
            };
            State {
                needs,
                phase: Phase::Unloaded,
                users: 0,
                generation: 0,
                used: None,
                keep,
                leaves_by: None,
                loads: 0,
                unloads: 0,
                failure,
            }
        };
        Self {
            room,
            models: needs.into_iter().map(state).collect(),
            waiting: VecDeque::new(),
            most_waiting,
            keep,
            held: Vec::new(),
            short: Vec::new(),
            doing: None,
        }
    }

    /// Asks for a model, which stays for `keep` from its last use on if that is said.
    pub(crate) fn ask(
        &mut self,
        id: ModelId,
        keep: Option<Option<Duration>>,
        now: Instant,
        reply: T,
    ) -> Asked<T> {
        let before = |one: &Waiting<T>| one.id == id && matches!(one.wish, Wish::Use(_));
        let first = !self.waiting.iter().any(before);
        if first && self.models[id.0].is_ready() && !self.held.contains(&id) {
            return Asked::Answered(reply, self.grant(id, keep, now));
        }
        if let (None, Some(reason)) = (self.models[id.0].needs, &self.models[id.0].failure) {
            let refused = NotLoaded::Failed(reason.clone());
            return Asked::Answered(reply, Answer::Refused(refused));
        }
        if self.waiting.len() >= self.most_waiting {
            return Asked::Answered(reply, Answer::Refused(NotLoaded::QueueFull));
        }
        let wish = Wish::Use(keep);
        self.waiting.push_back(Waiting { id, wish, reply });
        Asked::Waits
    }

    /// Asks for a larger share for a model that is in use, of what is free and what others have when they are idle. Returns
    /// whether that is answered: too many may wait.
    pub(crate) fn want(&mut self, id: ModelId, share: u64, reply: T) -> bool {
        let takes = self.waiting.len() < self.most_waiting;
        if takes {
            let wish = Wish::Share(share);
            self.waiting.push_back(Waiting { id, wish, reply });
        }
        takes
    }

    /// A request that had a model is over.
    pub(crate) fn release(&mut self, id: ModelId, generation: u64, now: Instant) {
        let model = &mut self.models[id.0];
        if model.generation == generation && model.users > 0 {
            model.users -= 1;
            model.used = Some(now);
        }
    }

    /// Has a model unloaded: when nobody uses it any more, or at `by`. Returns whether it is loaded.
    pub(crate) fn unload(&mut self, id: ModelId, by: Instant) -> bool {
        let model = &mut self.models[id.0];
        let loaded = matches!(model.phase, Phase::Loaded(_) | Phase::Changing(..));
        if loaded {
            let sooner = model.leaves_by.map_or(by, |other| other.min(by));
            model.leaves_by = Some(sooner);
        }
        loaded
    }

    /// Another room, as the budget or the process beside the models change.
    pub(crate) fn set_room(&mut self, room: u64) {
        self.room = room;
    }

    /// Which models at work could do with more.
    pub(crate) fn set_short(&mut self, short: Vec<ModelId>) {
        self.short = short;
    }

    /// The memory of a model that was unloaded has come free.
    pub(crate) fn is_gone(&mut self, id: ModelId) {
        if let Phase::Leaving(_) = self.models[id.0].phase {
            self.models[id.0].phase = Phase::Unloaded;
        }
    }

    /// Lets go of those who do not wait any more.
    pub(crate) fn retain(&mut self, waits: impl Fn(&T) -> bool) {
        self.waiting.retain(|waiting| waits(&waiting.reply));
    }

    /// Everybody who waits, who is to be told that nothing comes.
    pub(crate) fn drain(&mut self) -> Vec<T> {
        self.waiting
            .drain(..)
            .map(|waiting| waiting.reply)
            .collect()
    }

    /// What to do now. A step that is returned is begun, and everything else waits for [`Arbiter::record`].
    pub(crate) fn plan(&mut self, now: Instant) -> Plan<T> {
        let (mut answers, mut wanted) = (Vec::new(), None);
        if self.doing.is_none() {
            self.held.clear();
        }
        let waiting = std::mem::take(&mut self.waiting);
        for one in waiting {
            match self.serve(&one, now, &mut wanted) {
                Some(answer) => answers.push((one.id, one.reply, answer)),
                None => self.waiting.push_back(one),
            }
        }
        let step = match self.doing {
            Some(_) => None,
            None => self.next(now, wanted),
        };
        if let Some(step) = step {
            self.begin(step, now);
        }
        let wake = self.wake();
        Plan {
            answers,
            step,
            wake,
        }
    }

    /// What somebody who waits is told, if anything. `wanted` is what the first of those whose model is not loaded makes
    /// of the room.
    fn serve(
        &mut self,
        one: &Waiting<T>,
        now: Instant,
        wanted: &mut Option<Step>,
    ) -> Option<Answer> {
        let model = &self.models[one.id.0];
        let keep = match one.wish {
            Wish::Share(share) => return self.enlarge(one.id, share, wanted),
            Wish::Use(keep) => keep,
        };
        if model.is_ready() && !self.held.contains(&one.id) {
            return Some(self.grant(one.id, keep, now));
        }
        if model.phase != Phase::Unloaded {
            return None;
        }
        // Somebody who came earlier is making room, or will when a step is over.
        let busy = self.doing.is_some() || wanted.is_some() || !self.held.is_empty();
        let needs = model.needs.filter(|_| !busy)?;
        match policy::find(self.room, &self.residents(), &needs) {
            Found::Never => Some(Answer::Refused(NotLoaded::TooLarge {
                needed: needs.least,
                room: self.room,
            })),
            Found::Later { on } => {
                self.held = on;
                None
            }
            Found::Share { bytes, gives } => {
                let load = Step::Load {
                    id: one.id,
                    share: bytes,
                };
                *wanted = Some(gives.first().map_or(load, |&give| step_of(give)));
                self.held = gives.iter().map(|give| give.id).collect();
                None
            }
        }
    }

    /// Whether somebody who wants a larger share for a model waits for it no more. It comes from what is free and from
    /// others when they are idle. Where somebody waits for this model to be idle, neither would ever end.
    fn enlarge(&mut self, id: ModelId, share: u64, wanted: &mut Option<Step>) -> Option<Answer> {
        let own = self.models[id.0].share();
        let (ready, room) = (self.models[id.0].is_ready(), self.room.checked_sub(own));
        let (Some(room), true) = (room.filter(|_| ready), share > own) else {
            return Some(Answer::Tried);
        };
        if self.held.contains(&id) {
            return Some(Answer::Tried);
        }
        if self.doing.is_some() || wanted.is_some() || !self.held.is_empty() {
            return None;
        }
        let (more, mut others) = (share - own, self.residents());
        others.retain(|other| other.id != id);
        let needs = Needs {
            least: more,
            working: more,
            most: more,
            program: 0,
        };
        match policy::find(room, &others, &needs) {
            Found::Share { gives, .. } => {
                let grow = Step::Change { id, share };
                *wanted = Some(gives.first().map_or(grow, |&give| step_of(give)));
                self.held = gives.iter().map(|give| give.id).collect();
                None
            }
            Found::Later { on } => {
                self.held = on;
                None
            }
            Found::Never => Some(Answer::Tried),
        }
    }

    fn grant(&mut self, id: ModelId, keep: Option<Option<Duration>>, now: Instant) -> Answer {
        let model = &mut self.models[id.0];
        model.users += 1;
        model.used = Some(now);
        model.keep = keep.unwrap_or(self.keep);
        Answer::Granted(model.generation)
    }

    fn next(&self, now: Instant, wanted: Option<Step>) -> Option<Step> {
        let residents = self.residents();
        let first = |gives: Vec<Give>| gives.first().map(|&give| step_of(give));
        let leaves = || {
            let over = |by: Instant| now >= by;
            let leaves = |model: &State| {
                matches!(model.phase, Phase::Loaded(_))
                    && model
                        .leaves_by
                        .is_some_and(|by| model.users == 0 || over(by))
            };
            let found = self.models.iter().position(leaves);
            found.map(|index| Step::Unload { id: ModelId(index) })
        };
        let loads = || wanted.filter(|&step| self.has_room(step));
        let expires = || {
            let expired = policy::expired(&residents, now);
            expired.first().map(|&id| Step::Unload { id })
        };
        leaves()
            .or_else(|| first(policy::relieve(self.room, &residents)))
            .or_else(loads)
            .or_else(expires)
            .or_else(|| first(policy::grow(self.room, &residents, &self.short)))
    }

    /// Whether the memory for it has come free.
    fn has_room(&self, step: Step) -> bool {
        match step {
            Step::Load { share, .. } => policy::taken(&self.residents()) + share <= self.room,
            Step::Change { id, share } => {
                let more = share.saturating_sub(self.models[id.0].share());
                more == 0 || policy::taken(&self.residents()) + more <= self.room
            }
            Step::Unload { .. } => true,
        }
    }

    fn begin(&mut self, step: Step, now: Instant) {
        let (Step::Load { id, .. } | Step::Change { id, .. } | Step::Unload { id }) = step;
        let model = &mut self.models[id.0];
        self.doing = Some(id);
        // One that was never loaded has not been used before.
        model.used.get_or_insert(now);
        if let Step::Change { .. } = step {
            self.short.retain(|&short| short != id);
        }
        model.phase = match step {
            Step::Load { share, .. } => Phase::Loading(share),
            Step::Change { share, .. } => Phase::Changing(model.share(), share),
            Step::Unload { .. } => Phase::Leaving(model.share()),
        };
    }

    /// Takes what came of the step that was begun, and returns who is told of it.
    pub(crate) fn record(&mut self, outcome: Outcome, now: Instant) -> Vec<(ModelId, T, Answer)> {
        let Some(id) = self.doing.take() else {
            return Vec::new();
        };
        let model = &mut self.models[id.0];
        match outcome {
            Outcome::Loaded { least } => {
                model.phase = Phase::Loaded(model.share());
                (model.loads, model.generation) = (model.loads + 1, model.generation + 1);
                (model.users, model.used, model.failure) = (0, Some(now), None);
                model.leaves_by = None;
                if let Some(needs) = &mut model.needs {
                    // What was planned was for a model that is not loaded; this is.
                    needs.least = needs.least.max(least);
                    needs.working = needs.working.max(needs.least);
                }
            }
            Outcome::Changed { share } => model.phase = Phase::Loaded(share),
            Outcome::Unloaded { free } => {
                model.unloads += 1;
                (model.users, model.leaves_by) = (0, None);
                // Whoever still has it has one of a load that is over.
                model.generation += 1;
                if free {
                    model.phase = Phase::Unloaded;
                }
            }
            Outcome::Failed { reason } => {
                model.phase = Phase::Unloaded;
                model.failure = Some(reason.clone());
                return self.refuse(id, &NotLoaded::Failed(reason));
            }
        }
        Vec::new()
    }

    /// Tells everybody who waits for a model that it does not come.
    fn refuse(&mut self, id: ModelId, why: &NotLoaded) -> Vec<(ModelId, T, Answer)> {
        let waiting = std::mem::take(&mut self.waiting);
        let (refused, rest): (VecDeque<_>, VecDeque<_>) =
            waiting.into_iter().partition(|one| one.id == id);
        self.waiting = rest;
        let refused = refused.into_iter();
        refused
            .map(|one| (one.id, one.reply, Answer::Refused(why.clone())))
            .collect()
    }

    fn wake(&self) -> Option<Instant> {
        let leaves = self.models.iter().filter_map(|model| model.leaves_by);
        let expires = policy::next_expiry(&self.residents());
        leaves.chain(expires).min()
    }

    /// The models that hold something.
    fn residents(&self) -> Vec<Resident> {
        let resident = |(index, model): (usize, &State)| {
            let needs = model.needs?;
            let standing = match model.phase {
                Phase::Unloaded => return None,
                Phase::Leaving(_) => Standing::Leaving,
                // Loading ones have somebody who waits for them; changing ones are being seen to.
                Phase::Loading(_) | Phase::Changing(..) => Standing::Busy,
                Phase::Loaded(_) if model.users > 0 => Standing::Busy,
                Phase::Loaded(_) => Standing::Idle,
            };
            Some(Resident {
                id: ModelId(index),
                needs,
                share: model.share(),
                standing,
                used: model.used?,
                keep: model.keep,
            })
        };
        self.models
            .iter()
            .enumerate()
            .filter_map(resident)
            .collect()
    }

    /// The share that a model has while it is given another.
    pub(crate) fn changes_from(&self, id: ModelId) -> u64 {
        match self.models[id.0].phase {
            Phase::Changing(from, _) => from,
            _ => self.models[id.0].share(),
        }
    }

    /// How a model is.
    pub(crate) fn status(&self, id: ModelId) -> ModelStatus {
        let model = &self.models[id.0];
        let residents = self.residents();
        let own = residents.iter().find(|it| it.id == id);
        ModelStatus {
            state: match model.phase {
                Phase::Unloaded => "unloaded",
                Phase::Loading(_) => "loading",
                // Replies under way may still end.
                Phase::Loaded(_) | Phase::Changing(..) if model.leaves_by.is_some() => "unloading",
                Phase::Loaded(_) | Phase::Changing(..) => "loaded",
                Phase::Leaving(_) => "unloading",
            },
            share: model.share(),
            needs: model.needs,
            users: model.users,
            expires: own.and_then(|it| it.used.checked_add(it.keep?)),
            loads: model.loads,
            unloads: model.unloads,
            failure: model.failure.clone(),
        }
    }

    /// Bytes that all models may have together, and those that they have.
    pub(crate) fn room(&self) -> (u64, u64) {
        let taken = self.models.iter().map(State::share).sum();
        (self.room, taken)
    }
}

fn step_of(give: Give) -> Step {
    let Give { id, keeps } = give;
    match keeps {
        Some(share) => Step::Change { id, share },
        None => Step::Unload { id },
    }
}

#[cfg(test)]
mod tests;
