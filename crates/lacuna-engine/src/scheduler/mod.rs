//! The scheduler: which requests run, and what each step computes for them.
//!
//! ```text
//! sweep -> admit -> schedule -> prepare -> forward -> sample -> accept        Scheduler::step
//! ```

mod job;
mod schedule;

use std::collections::VecDeque;
use std::time::Instant;

use lacuna_kv::KvError;
use lacuna_models::Segment;

use crate::engine::Engine;
use crate::error::EngineError;
use crate::rules::Rules;
use crate::service::ServiceConfig;
use crate::status::{Counters, Latencies, Status};
use crate::stream::{Event, Failure, Miss, Usage};
pub(crate) use job::{Job, Outcome, Running, Sampled, Session, Waiting};
use schedule::{Demand, StepLimits, schedule};

/// Requests under way on one engine.
pub(crate) struct Scheduler {
    engine: Engine,
    config: ServiceConfig,
    waiting: VecDeque<Waiting>,
    running: Vec<Running>,
    counters: Counters,
    latencies: Latencies,
    masked: Vec<f32>,
}

impl Scheduler {
    pub(crate) fn new(engine: Engine, config: ServiceConfig) -> Self {
        Self {
            engine,
            config,
            waiting: VecDeque::new(),
            running: Vec::new(),
            counters: Counters::default(),
            latencies: Latencies::default(),
            masked: Vec::new(),
        }
    }

    /// Takes a request that has been checked.
    pub(crate) fn enqueue(&mut self, waiting: Waiting) {
        self.counters.requests += 1;
        self.waiting.push_back(waiting);
    }

    /// Requests that wait to run.
    pub(crate) fn waiting_len(&self) -> usize {
        self.waiting.len()
    }

    /// What holds for every request.
    pub(crate) fn rules(&self) -> Rules {
        Rules {
            context_tokens: self.engine.context_tokens(),
            vocabulary: self.engine.model().config().vocabulary,
            max_running: self.config.max_running,
            max_waiting: self.config.max_waiting,
            cache: self.engine.kv_cache().clone(),
        }
    }

    /// Ends every request because the service ends.
    pub(crate) fn fail_all(&mut self) {
        let running = std::mem::take(&mut self.running)
            .into_iter()
            .map(|running| running.job);
        let waiting = std::mem::take(&mut self.waiting)
            .into_iter()
            .map(|waiting| waiting.job);
        let jobs: Vec<Job> = running.chain(waiting).collect();
        for job in jobs {
            self.close(&job, End::Failed(Failure::ShuttingDown));
        }
    }

    /// Figures as of now, the ledger and the queue left out.
    pub(crate) fn status(&self) -> Status {
        Status {
            running: self.running.len(),
            sessions: self.running.iter().flat_map(Running::status).collect(),
            counters: self.counters,
            latencies: self.latencies.clone(),
            ..Status::default()
        }
    }

    /// Whether no request is left.
    pub(crate) fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }

    /// One step over everything that can go on. Returns whether anything was computed.
    pub(crate) fn step(&mut self) -> bool {
        self.sweep(Instant::now());
        self.admit();
        self.schedule();
        self.prepare();
        match self.forward_and_sample() {
            Ok(samples) => self.accept(samples),
            Err(error) => self.fail_scheduled(&error),
        }
    }

    /// Lets go of requests that are cancelled, overdue or unread.
    fn sweep(&mut self, now: Instant) {
        for index in (0..self.running.len()).rev() {
            let running = &mut self.running[index];
            running.job.stalled = match running.job.has_room(running.width()) {
                true => None,
                false => running.job.stalled.or(Some(now)),
            };
            if let Some(end) = end_of(&running.job, now, &self.config) {
                let running = self.running.remove(index);
                self.close(&running.job, end);
            }
        }
        for index in (0..self.waiting.len()).rev() {
            if let Some(end) = end_of(&self.waiting[index].job, now, &self.config)
                && let Some(waiting) = self.waiting.remove(index)
            {
                self.close(&waiting.job, end);
            }
        }
    }

    fn close(&mut self, job: &Job, end: End) {
        match end {
            End::Cancelled => self.counters.cancelled += 1,
            End::Failed(failure) => {
                self.counters.failed += 1;
                job.send(Event::Failed(failure));
            }
        }
    }

    /// Starts waiting requests while there are places.
    fn admit(&mut self) {
        while let Some(next) = self.waiting.front() {
            let places: usize = self.running.iter().map(Running::width).sum();
            if places + next.choices.len() > self.config.max_running {
                return;
            }
            let Some(waiting) = self.waiting.pop_front() else {
                return;
            };
            match self.start(waiting) {
                Ok(running) => self.running.push(running),
                Err((job, error)) => {
                    self.close(&job, End::Failed(Failure::OutOfMemory(error.to_string())));
                }
            }
        }
    }

    fn start(&mut self, waiting: Waiting) -> Result<Running, (Job, KvError)> {
        let Waiting { mut job, choices } = waiting;
        let mut sessions = Vec::new();
        for choice in choices {
            match self.engine.sequence() {
                Ok(sequence) => sessions.push(Session::new(choice, sequence)),
                Err(error) => return Err((job, error)),
            }
        }
        if job.reused_tokens.is_none() {
            job.reused_tokens = Some(0);
            self.counters.prompt_tokens += job.prompt_tokens as u64;
            self.latencies.queue.observe(job.arrived.elapsed());
            job.send(Event::Started {
                prompt_tokens: job.prompt_tokens,
                reused_tokens: 0,
                miss: Some(Miss::Disabled),
            });
        }
        Ok(Running {
            job,
            sessions,
            followers: Vec::new(),
        })
    }

    /// Decides what this step computes.
    fn schedule(&mut self) {
        let limits = self.engine.batch_limits();
        let limits = StepLimits {
            tokens: limits.tokens.min(self.config.step_tokens),
            rows: limits.logit_rows,
        };
        let demands: Vec<Demand> = self.running.iter().flat_map(Running::demands).collect();
        let counts = schedule(&demands, limits, self.counters.steps as usize);
        for (session, count) in sessions(&mut self.running).zip(counts) {
            session.scheduled = count;
        }
    }

    /// Maps the pages the step will write to.
    fn prepare(&mut self) {
        for session in scheduled(&mut self.running) {
            if session.sequence.prepare(session.scheduled).is_err() {
                session.scheduled = 0;
            }
        }
    }

    /// Runs the batch and picks a token for every session that has come to its end.
    fn forward_and_sample(&mut self) -> Result<Vec<Result<Sampled, Failure>>, EngineError> {
        let mut segments: Vec<Segment<'_>> =
            scheduled(&mut self.running).map(Session::segment).collect();
        if segments.is_empty() {
            return Ok(Vec::new());
        }
        self.counters.steps += 1;
        let vocabulary = self.engine.model().config().vocabulary;
        let logits = self.engine.forward(&mut segments)?;
        let mut rows = logits.chunks_exact(vocabulary);
        let mut samples = Vec::new();
        for running in &mut self.running {
            for session in running
                .sessions
                .iter_mut()
                .filter(|session| session.gets_token())
            {
                let row = rows
                    .next()
                    .expect("one row for each session that gets a token");
                let logprobs = running.job.logprobs;
                samples.push(session.choice.sample(row, logprobs, &mut self.masked));
            }
        }
        Ok(samples)
    }

    /// Makes the computed rows valid and hands the chosen tokens out.
    fn accept(&mut self, samples: Vec<Result<Sampled, Failure>>) -> bool {
        let mut samples = samples.into_iter();
        let mut computed = false;
        let mut kept = Vec::with_capacity(self.running.len());
        for mut running in std::mem::take(&mut self.running) {
            let mut failure = None;
            for session in running
                .sessions
                .iter_mut()
                .filter(|session| session.scheduled > 0)
            {
                computed = true;
                let gets_token = session.gets_token();
                session
                    .sequence
                    .accept(std::mem::take(&mut session.scheduled));
                if !gets_token {
                    continue;
                }
                let sample = samples
                    .next()
                    .expect("one for each session that gets a token");
                let taken =
                    sample.and_then(|sampled| take(&self.engine, &running.job, session, sampled));
                note_token(&mut self.latencies, &running.job, session);
                match taken {
                    Ok(true) => {}
                    Ok(false) => session.ended = true,
                    Err(error) => failure = Some(error),
                }
                self.counters.generated_tokens += 1;
            }
            running.sessions.retain(|session| !session.ended);
            if let Some(failure) = failure {
                self.close(&running.job, End::Failed(failure));
            } else if running.width() == 0 {
                self.counters.finished += 1;
                self.latencies
                    .end_to_end
                    .observe(running.job.arrived.elapsed());
            } else {
                kept.push(running);
            }
        }
        self.running = kept;
        computed
    }

    /// The model refused the batch: what was in it fails, the rest goes on.
    fn fail_scheduled(&mut self, error: &EngineError) -> bool {
        let (failed, kept) = std::mem::take(&mut self.running)
            .into_iter()
            .partition(|running| running.sessions.iter().any(|session| session.scheduled > 0));
        self.running = kept;
        let failed: Vec<Running> = failed;
        for running in failed {
            self.close(
                &running.job,
                End::Failed(Failure::Engine(error.to_string())),
            );
        }
        true
    }
}

/// How a request ends before its choices do.
enum End {
    Cancelled,
    Failed(Failure),
}

/// Whether and why `job` is over as of `now`.
fn end_of(job: &Job, now: Instant, config: &ServiceConfig) -> Option<End> {
    let unread = |since: Instant| now.duration_since(since) > config.unread_patience;
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

fn scheduled(running: &mut [Running]) -> impl Iterator<Item = &mut Session> {
    sessions(running).filter(|session| session.scheduled > 0)
}

/// Takes note of how long the session's next token took.
fn note_token(latencies: &mut Latencies, job: &Job, session: &mut Session) {
    let now = Instant::now();
    match session.choice.last_token.replace(now) {
        None => latencies.first_token.observe(now - job.arrived),
        Some(last) => latencies.inter_token.observe(now - last),
    }
}

/// Gives a sampled token to its session and its client; whether the session goes on.
fn take(
    engine: &Engine,
    job: &Job,
    session: &mut Session,
    sampled: Sampled,
) -> Result<bool, Failure> {
    let choice = &mut session.choice;
    let (token, number) = (sampled.token, choice.number);
    let capacity = session.sequence.capacity();
    let outcome = choice.advance(token, job.max_tokens, capacity, engine.model().tokenizer())?;
    let event = |text| Event::Token {
        choice: number,
        token,
        text,
        logprobs: sampled.logprobs,
    };
    let (text, reason) = match outcome {
        Outcome::Continues(text) => {
            job.send(event(text));
            return Ok(true);
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
        usage: Usage {
            prompt_tokens: job.prompt_tokens,
            reused_tokens: job.reused_tokens.unwrap_or(0),
            generated_tokens: choice.generated,
        },
    });
    Ok(false)
}
