//! Guesses in a step: which sessions have tokens guessed, and how many of them are computed.
//!
//! A step that computes prompts has none: its time is theirs. Guesses take rows that the step has to spare, and memory that is
//! there; nothing is evicted, preempted or paused for them.

use std::time::Duration;

use lacuna_kv::KvError;

use super::schedule::Demand;
use super::{Running, Scheduler, Session};
use crate::request_memory::RequestMemory;
use crate::speculation::{Drafter, Pace, Speculator, Wish, has_twice};

impl Scheduler {
    /// From now on has `drafter` guess where sessions' own tokens have no guess.
    pub(super) fn draft_with(&mut self, drafter: Drafter) {
        self.drafter = Some(drafter);
        self.pace = Pace::default().with_draft_model();
    }

    /// Adds guesses to what the sessions compute in this step, as asked for by `demands`: from their own tokens where these
    /// have some that are worth it, and by the draft model for the others.
    pub(super) fn speculate(&mut self, demands: &[Demand]) {
        let Some(sequences) = self.decoding() else {
            return;
        };
        let limits = self.engine.batch_limits();
        let spare = limits
            .tokens
            .min(limits.logit_rows)
            .saturating_sub(sequences);
        let from_history = self.config.engine.most_from_history();
        let by_model = self.drafter.as_ref().map_or(0, Drafter::most);
        let rooms = self.rooms(demands, spare);
        let rooms = self.rooms_to_rewind(rooms, from_history.max(by_model));
        let width = self.drafter.as_ref().and_then(Drafter::features_width);
        let memory = &self.request_memory;
        let mut likely = Vec::new();
        for (session, &room) in super::sessions(&mut self.running).zip(&rooms) {
            session.speculates(
                room.min(from_history.max(by_model)),
                (from_history > 0, width),
                memory,
            );
            likely.push(session.guess(room.min(from_history)));
        }
        let mut counts = self.allot(&likely, sequences, spare);
        if by_model > 0 && self.ask_draft_model(&mut likely, &counts, &rooms) {
            counts = self.allot(&likely, sequences, spare);
        }
        for (session, count) in super::sessions(&mut self.running).zip(counts) {
            session.keep_guesses(count);
        }
    }

    fn allot(&self, likely: &[Vec<f64>], sequences: usize, spare: usize) -> Vec<usize> {
        match likely.iter().all(Vec::is_empty) {
            true => vec![0; likely.len()],
            false => self.pace.allot(likely, sequences, spare),
        }
    }

    /// How many guesses each session has room for, of `spare` rows.
    fn rooms(&self, demands: &[Demand], spare: usize) -> Vec<usize> {
        let mut demands = demands.iter();
        let rooms = self.running.iter().flat_map(|running| {
            let events = running.job.spare_events(running.width());
            let sessions = running.sessions.iter().zip(demands.by_ref());
            let rooms = sessions.map(|(session, demand)| room(session, demand));
            let rooms: Vec<usize> = rooms.map(|room| room.min(events).min(spare)).collect();
            rooms
        });
        rooms.collect()
    }

    /// `rooms`, of which up to `most` are used, but for none where states have no memory to go back with.
    fn rooms_to_rewind(&self, mut rooms: Vec<usize>, most: usize) -> Vec<usize> {
        let cache = self.engine.kv_cache();
        if !cache.geometry().has_states() {
            return rooms;
        }
        let mut wanted = 0;
        let sessions = self.running.iter().flat_map(|running| &running.sessions);
        for (session, room) in sessions.zip(&mut rooms).filter(|(_, room)| **room > 0) {
            let bytes = session.sequence.rewind_bytes_to_take(1 + most.min(*room));
            match cache.geometry().can_rewind() && has_twice(cache, wanted + bytes) {
                true => wanted += bytes,
                false => *room = 0,
            }
        }
        rooms
    }

    /// Has the draft model guess for the sessions that compute no guesses of their own by `counts`, or less likely ones than its
    /// own are, and puts into `likely` how likely they are. Returns whether anything was guessed.
    fn ask_draft_model(
        &mut self,
        likely: &mut [Vec<f64>],
        counts: &[usize],
        rooms: &[usize],
    ) -> bool {
        let Some(drafter) = &mut self.drafter else {
            return false;
        };
        let limits = self.engine.batch_limits();
        let running = self.running.iter().flat_map(|running| &running.sessions);
        let sequences = running.filter(|session| session.scheduled > 0).count();
        let most = limits.tokens.min(limits.logit_rows);
        let kept = likely.iter().zip(counts);
        let kept = kept.map(|(likely, &count)| drafter.kept(likely, count));
        let kept: Vec<usize> = kept.collect();
        let step = self.pace.step((sequences, most), likely, (&kept, counts));
        let (mut wishes, mut places) = (Vec::new(), Vec::new());
        let sessions = self.running.iter_mut().flat_map(|running| {
            let sees = running.job.images.is_empty();
            let sessions = running.sessions.iter_mut();
            sessions.map(move |session| (session, sees))
        });
        for (place, (session, sees)) in sessions.enumerate() {
            if kept[place] > 0 || rooms[place] == 0 || !sees {
                continue;
            }
            if let Some(speculator) = &mut session.speculator {
                places.push(place);
                wishes.push(Wish {
                    tokens: &session.choice.tokens,
                    draft: &session.draft,
                    speculator,
                    sequence: &mut session.sequence,
                    most: rooms[place],
                });
            }
        }
        let system = &self.system;
        let guesses = drafter.guess(&mut wishes, step, &mut self.pace, &|| system.now());
        let mut any = false;
        for (place, guesses) in places.into_iter().zip(guesses) {
            if !guesses.is_empty() {
                (likely[place], any) = (guesses, true);
            }
        }
        any
    }

    /// Sessions that have one token each computed, if nothing else is.
    fn decoding(&self) -> Option<usize> {
        let sessions = self.running.iter().flat_map(|running| &running.sessions);
        let mut scheduled = sessions.filter(|session| session.scheduled > 0);
        let count = scheduled.clone().count();
        // One of a prompt may be computed alone, where a step has no more for it.
        let decodes = |session: &Session| session.pending() == 1;
        scheduled.all(decodes).then_some(count)
    }

    /// Takes note of how long a pass took, of one token and its guesses for each of `sequences`.
    pub(super) fn note_pace(&mut self, sequences: Option<usize>, rows: usize, time: Duration) {
        let Some(sequences) = sequences else {
            return;
        };
        let sessions = self.running.iter().flat_map(|running| &running.sessions);
        let tokens = sessions.map(|session| session.sampled.len()).sum();
        self.pace.observe(sequences, rows, tokens, time);
    }
}

/// Tokens that a session can have guessed: not past a place where the step must end, or its text's last token, behind which
/// its context may end.
fn room(session: &Session, demand: &Demand) -> usize {
    if session.scheduled == 0 || session.choice.is_scored() {
        return 0;
    }
    let tokens = session.choice.most_tokens();
    let step = demand.stop.unwrap_or(tokens).min(tokens);
    step.saturating_sub(1)
}

impl Session {
    /// Takes up what the model has made of the step's tokens, `[tokens, width]`, for its head.
    pub(super) fn hear(
        &mut self,
        features: &[f32],
        (from_history, width): (bool, usize),
        memory: &RequestMemory,
    ) {
        let goes_on = usize::from(!self.choice.is_scored() && self.choice.most_tokens() > 1);
        self.speculates(goes_on, (from_history, Some(width)), memory);
        if let Some(speculator) = &mut self.speculator {
            speculator.hear(self.sequence.len(), features);
        }
    }

    /// Has what guesses its tokens, if up to `most` are to be guessed, from its own or only by others, of which a head takes
    /// features of `width` elements. What that takes comes from `memory`; without it nothing is guessed.
    fn speculates(
        &mut self,
        most: usize,
        (from_history, width): (bool, Option<usize>),
        memory: &RequestMemory,
    ) {
        if most == 0 || self.speculator.is_some() {
            return;
        }
        let tokens = self.choice.tokens.len();
        let tokens = tokens.saturating_add(self.choice.most_tokens());
        let tokens = from_history.then(|| tokens.min(self.sequence.capacity()));
        let held = memory.try_take(Speculator::bytes(tokens, width)).ok();
        self.speculator = held.map(|held| Speculator::new(tokens, width, Some(held)));
    }

    /// Guesses up to `most` tokens after the pending one from those before it, and says how likely each is right together
    /// with those before it.
    fn guess(&mut self, most: usize) -> Vec<f64> {
        let tokens = &self.choice.tokens;
        let speculator = self.speculator.as_mut().filter(|_| most > 0);
        speculator.map_or_else(Vec::new, |speculator| speculator.guess(tokens, most))
    }

    /// Has the first `count` guesses computed with what is scheduled.
    fn keep_guesses(&mut self, count: usize) {
        if let Some(speculator) = &mut self.speculator {
            speculator.keep(count);
            self.scheduled += speculator.guesses().len();
        }
    }

    /// Computes no guesses in this step. Returns whether there were any.
    pub(super) fn drop_guesses(&mut self) -> bool {
        let count = self.guesses().len();
        if let Some(speculator) = &mut self.speculator {
            speculator.keep(0);
        }
        self.scheduled = self.scheduled.saturating_sub(count);
        count > 0
    }

    /// Finds memory for what the step computes.
    ///
    /// # Errors
    /// As [`Sequence::prepare`](lacuna_kv::Sequence::prepare).
    pub(super) fn prepare(&mut self) -> Result<(), KvError> {
        match self.guesses() {
            [] => self.sequence.prepare(self.scheduled),
            _ => self.sequence.prepare_to_rewind(self.scheduled),
        }
    }

    /// Gives back what states would go back with, and with it the guesses of this step. Returns whether there was any.
    pub(super) fn give_up_rewinding(&mut self) -> bool {
        if self.sequence.is_to_be_rewound() {
            self.drop_guesses();
            if self.sequence.prepare(self.scheduled).is_err() {
                self.scheduled = 0;
            }
        }
        self.sequence.release_rewind_memory() > 0
    }

    /// What is guessed to follow the pending token in this step.
    pub(super) fn guesses(&self) -> &[u32] {
        self.speculator.as_ref().map_or(&[], Speculator::guesses)
    }
}

impl Running {
    /// Forgets what was guessed for a step.
    pub(super) fn drop_guesses(&mut self) {
        for session in &mut self.sessions {
            session.drop_guesses();
        }
    }
}
