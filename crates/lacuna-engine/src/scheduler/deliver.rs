//! After the batch: pages are entered into the prefix cache, choices fork off, tokens go out.

use std::time::Instant;

use lacuna_kv::KvError;
use lacuna_kv::prefix::PrefixCache;

use super::job::Choice;
use super::{End, Job, Running, Scheduler, Session, Taken, Waiting};
use crate::status::Latencies;
use crate::stream::{Event, Usage};
use crate::transcript::Outcome;

impl Scheduler {
    /// Lets others have what has been computed: full groups enter the prefix cache, and
    /// choices fork off a prompt that is complete.
    pub(super) fn share(&mut self, now: Instant) {
        for running in &mut self.running {
            if self.config.prefix_cache.enabled {
                // Rows that led to a token that could not be chosen are of no use to others.
                let useful =
                    |session: &&mut Session| !matches!(session.sampled.last(), Some(Err(_)));
                for session in running.sessions.iter_mut().filter(useful) {
                    let (path, tokens) = (&mut session.path, &session.choice.tokens);
                    // A group that cannot be sealed is not shared; its rows are as good as before.
                    self.prefix
                        .grow(path, &mut session.sequence, tokens, now)
                        .ok();
                    self.prefix.write(path, tokens, false);
                }
            }
            pin_prompt(&mut self.prefix, running, now);
            let reuse = self.config.prefix_cache.enabled;
            fork_followers(&mut self.prefix, running, reuse);
        }
    }

    /// Hands sampled tokens out, and ends what is complete.
    pub(super) fn deliver(&mut self, now: Instant) {
        for index in (0..self.running.len()).rev() {
            let mut running = self.running.remove(index);
            let mut failure = None;
            for session in &mut running.sessions {
                match session.choice.take_scored() {
                    Ok(scored) if scored.is_empty() => {}
                    Ok(scored) => running.job.send(Event::PromptScored(scored)),
                    Err(error) => failure = Some(error),
                }
                for taken in std::mem::take(&mut session.sampled) {
                    match taken {
                        Ok(taken) => {
                            let (counters, latencies) = (&mut self.counters, &mut self.latencies);
                            if !matches!(taken.outcome, Outcome::EndsBefore(..)) {
                                counters.generated_tokens += 1;
                                note_token(latencies, &running.job, session, now);
                            }
                            session.ended = hand_out(&running.job, session, taken, now);
                        }
                        Err(error) => failure = Some(error),
                    }
                }
            }
            match failure {
                Some(failure) => self.close(running, End::Failed(failure)),
                None => self.keep_unfinished(index, running),
            }
        }
    }

    /// Puts a request back without its ended sessions, if any choice is left.
    fn keep_unfinished(&mut self, index: usize, mut running: Running) {
        let (ended, left): (Vec<_>, Vec<_>) = std::mem::take(&mut running.sessions)
            .into_iter()
            .partition(|session| session.ended);
        for session in ended {
            let ended = self.let_go(session);
            if let Some(next) = running.followers.front_mut() {
                next.begin(&ended.tokens[..running.job.prompt_tokens]);
            }
        }
        running.sessions = left;
        if running.width() == 0 {
            self.close(running, End::Finished);
        } else if running.sessions.is_empty() {
            // The session they were to fork off has ended before there was memory for it.
            self.enqueue(Waiting::again(running.job, running.followers));
        } else {
            self.running.insert(index, running);
        }
    }
}

/// Pins the prompt's groups once they are complete, if that was asked for.
fn pin_prompt(prefix: &mut PrefixCache, running: &mut Running, now: Instant) {
    let Running { job, sessions, .. } = running;
    let Some((leader, time)) = sessions.first_mut().zip(job.pin_prefix) else {
        return;
    };
    if leader.sequence.len() >= job.prompt_tokens {
        prefix.pin(&mut leader.path, job.prompt_tokens, now, time);
        job.pin_prefix = None;
    }
}

/// Starts the choices that fork off the first session, once that has the prompt. They compute
/// the prompt's last token again, for logits of their own. Where it cannot be gone back to, because windows
/// have passed rows or layers keep a state, they start from what is kept.
fn fork_followers(prefix: &mut PrefixCache, running: &mut Running, reuse: bool) {
    let Running {
        job,
        sessions,
        followers,
    } = running;
    let mut forked = Vec::new();
    let Some(leader) = sessions.first_mut() else {
        return;
    };
    while let Some(mut choice) = followers.pop_front() {
        let tokens = choice.fork_position(job.prompt_tokens);
        if leader.sequence.len() < tokens {
            followers.push_front(choice);
            break;
        }
        choice.begin(&leader.choice.tokens[..job.prompt_tokens]);
        let capacity = leader.sequence.capacity();
        let start = match leader.sequence.share_prefix(tokens) {
            Ok(sequence) => Ok((sequence, prefix.fork(&leader.path, tokens))),
            Err(KvError::StatePassed { .. } | KvError::StateSpent | KvError::Released { .. }) => {
                let start = match reuse {
                    true => prefix.start(job.namespace, &choice.tokens, capacity),
                    false => prefix.start_apart(capacity),
                };
                start.map(|start| (start.sequence, start.path))
            }
            Err(error) => Err(error),
        };
        let Ok((sequence, path)) = start else {
            // There is no memory for the copied tail now; it is tried again after the next step.
            followers.push_front(choice);
            break;
        };
        forked.push(Session::new(choice, sequence, path));
    }
    sessions.extend(forked);
}

/// Takes note of how long the session's next token took.
fn note_token(latencies: &mut Latencies, job: &Job, session: &mut Session, now: Instant) {
    session.choice.first_token.get_or_insert(now);
    match session.choice.last_token.replace(now) {
        None => latencies.first_token.observe(now - job.arrived),
        Some(last) => latencies.inter_token.observe(now - last),
    }
}

/// Gives a token that its session has taken up to the client. Returns whether the choice ends with it.
fn hand_out(job: &Job, session: &Session, taken: Taken, now: Instant) -> bool {
    let Taken { sampled, outcome } = taken;
    let number = session.choice.number;
    let event = |text| Event::Token {
        choice: number,
        token: sampled.token,
        text,
        logprobs: sampled.logprobs,
    };
    let (text, reason) = match outcome {
        Outcome::Continues(text) => {
            job.send(event(text));
            return false;
        }
        Outcome::EndsWith(text, reason) => {
            job.send(event(text));
            (String::new(), reason)
        }
        Outcome::EndsBefore(text, reason) => (text, reason),
    };
    job.send(Event::Finished {
        choice: number,
        reason,
        text,
        usage: usage(job, &session.choice, now),
    });
    true
}

/// What a choice that ends now took.
fn usage(job: &Job, choice: &Choice, now: Instant) -> Usage {
    let started = job.started.unwrap_or(now);
    let first_token = choice.first_token.unwrap_or(now);
    Usage {
        prompt_tokens: job.prompt_tokens,
        reused_tokens: job.reused_tokens.unwrap_or(0),
        generated_tokens: choice.generated,
        prompt_time: first_token.duration_since(started),
        generation_time: now.duration_since(first_token),
    }
}
