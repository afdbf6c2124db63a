//! A request on its way: what its continuations share, and what each of them has of its own.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use lacuna_kv::Sequence;
use lacuna_kv::prefix::Path;
use lacuna_models::tokenizer::Tokenizer;
use lacuna_models::{LogitRows, Segment};
use tokio::sync::mpsc;

use crate::logprobs;
use crate::request::{Constraint, Refusal, Request};
use crate::request_memory::HeldMemory;
use crate::sampler::{Candidates, Sampler, Sampling};
use crate::stream::{Event, Failure, FinishReason, Stream, TokenLogprobs};
use crate::transcript::Transcript;

use super::schedule::Demand;

/// What all continuations of a request share.
pub(crate) struct Job {
    /// Its place in the order of arrival, once it has been taken.
    pub(crate) id: u64,
    pub(crate) prompt_tokens: usize,
    /// Prompt tokens found in the cache when the request started; `None` before.
    pub(crate) reused_tokens: Option<usize>,
    pub(crate) max_tokens: usize,
    /// Tokens a continuation may have, its prompt included.
    pub(crate) capacity: usize,
    pub(crate) logprobs: Option<usize>,
    pub(crate) arrived: Instant,
    pub(crate) deadline: Option<Instant>,
    pub(crate) pin_prefix: Option<Duration>,
    /// Since when the client has not read enough for another step.
    pub(crate) stalled: Option<Instant>,
    outbox: mpsc::Sender<Event>,
    /// Given back when the request ends.
    _memory: Option<HeldMemory>,
}

/// One continuation: its tokens and everything that decides the next one.
pub(crate) struct Choice {
    pub(crate) number: usize,
    /// The prompt, then what was generated. Empty until the continuation forks off, unless it is the
    /// first, so that a request that waits holds its prompt once.
    pub(crate) tokens: Vec<u32>,
    pub(crate) generated: usize,
    pub(crate) last_token: Option<Instant>,
    sampler: Sampler,
    transcript: Transcript,
    constraint: Option<Box<dyn Constraint>>,
}

/// A continuation that runs, and so has a KV cache.
pub(crate) struct Session {
    pub(crate) choice: Choice,
    pub(crate) sequence: Sequence,
    /// The groups of the prefix cache it uses.
    pub(crate) path: Path,
    /// Tokens to compute in this step.
    pub(crate) scheduled: usize,
    /// What the step chose for it, until it is handed out.
    pub(crate) sampled: Option<Result<Sampled, Failure>>,
    pub(crate) ended: bool,
}

/// A request that waits for its turn, for the first time or again. The first of `choices` has its
/// tokens.
pub(crate) struct Waiting {
    pub(crate) job: Job,
    pub(crate) choices: VecDeque<Choice>,
}

/// A request that has been admitted.
pub(crate) struct Running {
    pub(crate) job: Job,
    pub(crate) sessions: Vec<Session>,
    /// Continuations that fork off the first session once the prompt is computed.
    pub(crate) followers: VecDeque<Choice>,
}

/// Working memory for choosing tokens, for one continuation after the other.
pub(crate) struct Workspace {
    masked: Vec<f32>,
    candidates: Candidates,
}

impl Workspace {
    pub(crate) fn new(vocabulary: usize) -> Self {
        Self {
            masked: Vec::new(),
            candidates: Candidates::new(vocabulary),
        }
    }
}

/// A token and how likely it was.
pub(crate) struct Sampled {
    pub(crate) token: u32,
    pub(crate) logprobs: Option<TokenLogprobs>,
}

/// What a token made of a continuation.
pub(crate) enum Outcome {
    /// It goes on, and this can be shown.
    Continues(String),
    /// It ended with this token, which is part of it.
    EndsWith(String, FinishReason),
    /// It ended before this token.
    EndsBefore(String, FinishReason),
}

impl Waiting {
    /// Most events a client may leave unread before its request pauses.
    const UNREAD_EVENTS: usize = 256;

    /// A job for `request`, and where its events come out.
    pub(crate) fn new(mut request: Request, capacity: usize) -> Result<(Self, Stream), Refusal> {
        let choices = request.choices.get();
        let room = Self::UNREAD_EVENTS.max(2 * Job::events_per_step(choices));
        let (outbox, receiver) = mpsc::channel(room);
        let arrived = Instant::now();
        let job = Job {
            id: 0,
            prompt_tokens: request.prompt.len(),
            reused_tokens: None,
            max_tokens: request.limits.max_tokens.unwrap_or(usize::MAX),
            capacity,
            logprobs: request.logprobs,
            arrived,
            deadline: request
                .deadline
                .and_then(|after| arrived.checked_add(after)),
            pin_prefix: request.pin_prefix,
            stalled: None,
            outbox,
            _memory: request.memory.take(),
        };
        let mut choices = (0..choices)
            .map(|number| Choice::new(number, &request))
            .collect::<Result<VecDeque<_>, _>>()?;
        if let Some(leader) = choices.front_mut() {
            leader.tokens = request.prompt;
        }
        Ok((Self { job, choices }, Stream::new(receiver)))
    }
}

impl Running {
    /// Continuations there are, or will be.
    pub(crate) fn width(&self) -> usize {
        self.sessions.len() + self.followers.len()
    }

    /// What each session would like to compute; nothing while the client does not read.
    pub(crate) fn demands(&self) -> impl Iterator<Item = Demand> {
        let stalled = self.job.stalled.is_some();
        self.sessions.iter().map(move |session| Demand {
            pending: if stalled { 0 } else { session.pending() },
        })
    }
}

impl Job {
    /// Events that a step may give a request of `choices` continuations.
    const fn events_per_step(choices: usize) -> usize {
        2 * choices + 2
    }

    /// Whether the client reads, so that another step's events find room.
    pub(crate) fn has_room(&self, choices: usize) -> bool {
        self.outbox.capacity() >= Self::events_per_step(choices)
    }

    /// Whether the client has gone.
    pub(crate) fn is_cancelled(&self) -> bool {
        self.outbox.is_closed()
    }

    /// Passes an event on. One that finds the channel closed has no reader any more, and the
    /// request is swept out before the next step.
    pub(crate) fn send(&self, event: Event) {
        debug_assert!(
            self.outbox.capacity() > 0 || self.outbox.is_closed(),
            "room was checked before the step"
        );
        self.outbox.try_send(event).ok();
    }
}

impl Choice {
    fn new(number: usize, request: &Request) -> Result<Self, Refusal> {
        let sampling = Sampling {
            seed: request.sampling.seed.wrapping_add(number as u64),
            ..request.sampling.clone()
        };
        Ok(Self {
            number,
            tokens: Vec::new(),
            generated: 0,
            last_token: None,
            sampler: Sampler::new(sampling)?,
            transcript: Transcript::new(request.limits.stop.iter().cloned()),
            constraint: request
                .constraint
                .as_ref()
                .map(|constraint| constraint.fork()),
        })
    }

    /// Gives a continuation its prompt, unless it has been under way before.
    pub(crate) fn begin(&mut self, prompt: &[u32]) {
        if self.tokens.is_empty() {
            self.tokens = prompt.to_vec();
        }
    }

    /// Picks the next token from its row of logits.
    pub(crate) fn sample(
        &mut self,
        logits: &[f32],
        logprobs: Option<usize>,
        workspace: &mut Workspace,
    ) -> Result<Sampled, Failure> {
        let Workspace { masked, candidates } = workspace;
        let token = match &mut self.constraint {
            None => self.sampler.sample(logits, &self.tokens, candidates),
            Some(constraint) => {
                masked.clear();
                masked.extend_from_slice(logits);
                constraint.mask(masked)?;
                self.sampler.sample(masked, &self.tokens, candidates)
            }
        };
        let logprobs = logprobs.map(|top| logprobs::of(logits, token, top));
        Ok(Sampled { token, logprobs })
    }

    /// Takes the token up. `capacity` is the number of tokens there is room for.
    pub(crate) fn advance(
        &mut self,
        token: u32,
        max_tokens: usize,
        capacity: usize,
        tokenizer: &Tokenizer,
    ) -> Result<Outcome, Failure> {
        if tokenizer.is_end_of_generation(token) {
            return Ok(Outcome::EndsBefore(
                self.transcript.finish(),
                self.reason(FinishReason::EndOfText),
            ));
        }
        if let Some(constraint) = &mut self.constraint {
            constraint.accept(token)?;
        }
        self.tokens.push(token);
        self.generated += 1;
        let shown = self.transcript.push(tokenizer, token);
        let shown = shown.map_err(|error| Failure::Engine(error.to_string()))?;
        Ok(match self.end(max_tokens, capacity) {
            None => Outcome::Continues(shown),
            Some(reason) => {
                let shown = shown + &self.transcript.finish();
                Outcome::EndsWith(shown, self.reason(reason))
            }
        })
    }

    fn end(&self, max_tokens: usize, capacity: usize) -> Option<FinishReason> {
        let complete = self
            .constraint
            .as_ref()
            .is_some_and(|constraint| constraint.is_complete());
        if self.transcript.stopped() {
            Some(FinishReason::StopString)
        } else if complete {
            Some(FinishReason::ConstraintComplete)
        } else if self.generated >= max_tokens {
            Some(FinishReason::MaxTokens)
        } else if self.tokens.len() > capacity {
            Some(FinishReason::ContextFull)
        } else {
            None
        }
    }

    /// The reason to give: a stop string that only came up with the last text takes precedence.
    fn reason(&self, reason: FinishReason) -> FinishReason {
        match self.transcript.stopped() {
            true => FinishReason::StopString,
            false => reason,
        }
    }
}

impl Session {
    pub(crate) fn new(choice: Choice, sequence: Sequence, path: Path) -> Self {
        Self {
            choice,
            sequence,
            path,
            scheduled: 0,
            sampled: None,
            ended: false,
        }
    }

    /// Tokens that are not in the KV cache yet; at least one.
    pub(crate) fn pending(&self) -> usize {
        self.choice.tokens.len() - self.sequence.len()
    }

    /// The tokens of this step.
    pub(crate) fn segment(&mut self) -> Segment<'_> {
        let logits = match self.gets_token() {
            true => LogitRows::Last,
            false => LogitRows::None,
        };
        let start = self.sequence.len();
        Segment {
            tokens: &self.choice.tokens[start..start + self.scheduled],
            sequence: &mut self.sequence,
            logits,
        }
    }

    /// Whether this step computes everything up to the last token, so that the next can be chosen.
    pub(crate) fn gets_token(&self) -> bool {
        self.scheduled > 0 && self.scheduled == self.pending()
    }
}
