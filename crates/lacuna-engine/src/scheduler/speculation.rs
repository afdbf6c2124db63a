//! Guesses in a step: which sessions have tokens guessed, and how many of them are computed.
//!
//! A step that computes prompts has none: its time is theirs. Guesses take rows that the step has to spare, and memory that is
//! there; nothing is evicted, preempted or paused for them.

use std::time::Duration;

use super::schedule::Demand;
use super::{Running, Scheduler, Session};
use crate::request_memory::RequestMemory;
use crate::speculation::Speculator;

impl Scheduler {
    /// Adds guesses to what the sessions compute in this step, as asked for by `demands`.
    pub(super) fn speculate(&mut self, demands: &[Demand]) {
        let most = self.config.engine.most_drafts();
        // What a state has taken up it cannot give back, so a wrong guess would be in it for good.
        if most == 0 || self.engine.kv_cache().geometry().has_states() {
            return;
        }
        let Some(sequences) = self.decoding() else {
            return;
        };
        let limits = self.engine.batch_limits();
        let spare = limits
            .tokens
            .min(limits.logit_rows)
            .saturating_sub(sequences);
        let memory = &self.request_memory;
        let mut likely = Vec::new();
        let mut demands = demands.iter();
        for running in &mut self.running {
            let events = running.job.spare_events(running.width());
            for (session, demand) in running.sessions.iter_mut().zip(&mut demands) {
                let most = most.min(spare).min(events).min(room(session, demand));
                likely.push(session.guess(most, memory));
            }
        }
        let counts = match likely.iter().all(Vec::is_empty) {
            true => vec![0; likely.len()],
            false => self.pace.allot(&likely, sequences, spare),
        };
        for (session, count) in super::sessions(&mut self.running).zip(counts) {
            session.keep_guesses(count);
        }
    }

    /// Sessions that have one token each computed, if nothing else is.
    fn decoding(&self) -> Option<usize> {
        let sessions = self.running.iter().flat_map(|running| &running.sessions);
        let mut scheduled = sessions.filter(|session| session.scheduled > 0);
        let decodes = |session: &Session| session.scheduled == 1 && session.pending() == 1;
        let count = scheduled.clone().count();
        (count > 0 && scheduled.all(decodes)).then_some(count)
    }

    /// Takes note of how long a pass took, of one token and its guesses for each of `sequences`.
    pub(super) fn note_pace(&mut self, sequences: Option<usize>, rows: usize, time: Duration) {
        let Some(sequences) = sequences.filter(|_| self.config.engine.most_drafts() > 0) else {
            return;
        };
        let sessions = self.running.iter().flat_map(|running| &running.sessions);
        let tokens = sessions.map(|session| session.sampled.len()).sum();
        self.pace.observe(sequences, rows, tokens, time);
    }
}

/// Tokens that a session can have guessed: not past a place where the step must end, its context, or its text's last token.
fn room(session: &Session, demand: &Demand) -> usize {
    if session.scheduled == 0 || session.choice.is_scored() {
        return 0;
    }
    let context = session.sequence.capacity() - session.sequence.len();
    let step = demand.stop.unwrap_or(usize::MAX).min(context);
    let tokens = session.choice.most_tokens();
    step.min(tokens).saturating_sub(1)
}

impl Session {
    /// Guesses up to `most` tokens after the pending one, and says how likely each is right together with those before it.
    /// What that takes comes from `memory`; without it nothing is guessed.
    fn guess(&mut self, most: usize, memory: &RequestMemory) -> Vec<f64> {
        if most == 0 {
            return Vec::new();
        }
        if self.speculator.is_none() {
            let tokens = self.choice.tokens.len();
            let tokens = tokens.saturating_add(self.choice.most_tokens());
            let tokens = tokens.min(self.sequence.capacity());
            let held = memory.try_take(Speculator::bytes(tokens)).ok();
            self.speculator = held.map(|held| Speculator::new(tokens, Some(held)));
        }
        let tokens = &self.choice.tokens;
        let speculator = self.speculator.as_mut();
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
