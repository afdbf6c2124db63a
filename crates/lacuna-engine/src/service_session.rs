//! Sessions beside a service's requests: computed by its thread, one step of theirs between two of its own, in pages
//! of the same pool and under the same budget.
//!
//! A session is not one of the scheduler's requests. Its pages are found as theirs are: cached groups go first, then
//! weights, then requests, which are computed again later. Nothing takes them away again but the session's own calls,
//! so whoever holds a session holds memory.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use lacuna_kv::KvReport;
use lacuna_kv::saved::Saved;
use lacuna_models::LogitRows;

use crate::engine::Engine;
use crate::error::{self, EngineError};
use crate::request::Limits;
use crate::sampler::{Sampler, Sampling};
use crate::scheduler::Scheduler;
use crate::service::Handle;
use crate::session::Session;
use crate::stream::FinishReason;
use crate::transcript::{Outcome, Transcript};

/// A session that a service computes. Dropping it gives its pages back.
#[derive(Debug)]
pub struct ServiceSession {
    service: Handle,
    /// Of all sessions of this process it alone has this number.
    number: u64,
    /// None once the service has ended while it had it.
    session: Option<Session>,
}

/// How a session goes on, and how far it has come with that.
#[derive(Debug)]
pub struct Continuation {
    /// The number of the session that it was begun for.
    session: u64,
    /// None once it has ended. It is with the service's thread during a step.
    transcript: Option<Transcript>,
}

/// What one step adds to a session's text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// The token, unless it ended the text and is no part of it.
    pub token: Option<u32>,
    /// Text that can be shown now; empty while a character or a possible stop string is unfinished.
    pub text: String,
    /// Why the text has ended, with the last piece.
    pub finish: Option<FinishReason>,
}

impl Handle {
    /// A new, empty session.
    ///
    /// # Errors
    /// [`EngineError`] for address space that cannot be had, and once the service has ended.
    pub fn session(&self) -> Result<ServiceSession, EngineError> {
        let made =
            self.between_steps(|scheduler| engine(scheduler)?.session(Sampling::greedy()))?;
        Ok(self.own(made?))
    }

    /// The session in the file at `path`, and what was noted with it. None of its tokens is computed again.
    ///
    /// # Errors
    /// [`EngineError::Saved`] for a file that is damaged, or of another model or other settings.
    pub fn restore_session(&self, path: &Path) -> Result<(ServiceSession, String), EngineError> {
        let mut saved = Saved::open(path).map_err(error::saved(path))?;
        let note = saved.note.clone();
        let path = path.to_path_buf();
        let restored = self.between_steps(move |scheduler| {
            engine(scheduler)?.restore_session(&mut saved, Sampling::greedy(), &path)
        })?;
        Ok((self.own(restored?), note))
    }

    /// Logits after each of `tokens`, or after the last alone, one row of vocabulary size after another. Other requests
    /// go on between its steps.
    ///
    /// # Errors
    /// [`EngineError`] when there are no tokens, one is out of range, they do not fit the context, or a row is not
    /// finite.
    pub fn logits(&self, tokens: &[u32], after_each: bool) -> Result<Vec<f32>, EngineError> {
        let made = self.logits_while(tokens, after_each, || true);
        made.map(Option::unwrap_or_default)
    }

    /// The same as long as `goes_on` says so, which is asked before each step; `None` once it does not.
    ///
    /// # Errors
    /// As [`Handle::logits`].
    pub fn logits_while(
        &self,
        tokens: &[u32],
        after_each: bool,
        mut goes_on: impl FnMut() -> bool,
    ) -> Result<Option<Vec<f32>>, EngineError> {
        let asked = match after_each {
            true => LogitRows::All,
            false => LogitRows::Last,
        };
        let count = if after_each { tokens.len() } else { 1 };
        let mut logits = Vec::new();
        logits.try_reserve_exact(count.saturating_mul(self.model().spec().vocabulary))?;
        let mut scored = self.session()?;
        scored.extend(tokens);
        scored.check_pending()?;
        while scored.pending()? > 0 {
            if !goes_on() {
                return Ok(None);
            }
            logits = scored.attended(move |session, scheduler| {
                score_step(scheduler, session, asked, &mut logits).map(|()| logits)
            })?;
        }
        Ok(Some(logits))
    }

    fn own(&self, session: Session) -> ServiceSession {
        static SESSIONS: AtomicU64 = AtomicU64::new(0);
        ServiceSession {
            service: self.clone(),
            number: SESSIONS.fetch_add(1, Ordering::Relaxed),
            session: Some(session),
        }
    }
}

impl ServiceSession {
    /// Every token so far, computed or not.
    #[must_use]
    pub fn tokens(&self) -> &[u32] {
        self.session.as_ref().map_or(&[], Session::tokens)
    }

    /// Tokens that are not computed yet.
    ///
    /// # Errors
    /// [`EngineError::ServiceEnded`].
    pub fn pending(&self) -> Result<usize, EngineError> {
        let session = self.session.as_ref().ok_or(EngineError::ServiceEnded)?;
        Ok(session.pending())
    }

    /// Where the session's KV bytes are.
    ///
    /// # Errors
    /// [`EngineError::ServiceEnded`].
    pub fn kv(&self) -> Result<KvReport, EngineError> {
        let session = self.session.as_ref().ok_or(EngineError::ServiceEnded)?;
        Ok(session.kv())
    }

    /// Appends tokens, to be computed when the session goes on.
    pub fn extend(&mut self, tokens: &[u32]) {
        if let Some(session) = &mut self.session {
            session.extend(tokens);
        }
    }

    /// Keeps the first `len` tokens and gives the pages of the others back, as [`Session::truncate`] does. Returns how
    /// many of them need not be computed again.
    ///
    /// # Errors
    /// [`EngineError::Kv`] when the device refuses; the session is unchanged then.
    pub fn truncate(&mut self, len: usize) -> Result<usize, EngineError> {
        self.attended(move |session, _| Ok(session.truncate(len)?))
    }

    /// Another session of the same tokens, which shares this one's pages until one of the two writes to them.
    ///
    /// # Errors
    /// [`EngineError::Kv`] when memory or address space cannot be had; this session is unchanged then.
    pub fn fork(&mut self) -> Result<Self, EngineError> {
        let fork = self.attended(|session, scheduler| {
            let sampler = Sampler::new(Sampling::greedy())?;
            loop {
                match session.fork(sampler.clone()) {
                    Err(error) if scheduler.make_room_beside(&error) => {}
                    fork => return Ok(fork?),
                }
            }
        })?;
        Ok(self.service.own(fork))
    }

    /// Writes the session to the file at `path`, with `note`. What was there stays if that fails. The service's steps
    /// wait for it.
    ///
    /// # Errors
    /// [`EngineError::Saved`].
    pub fn save(&mut self, note: &str, path: &Path) -> Result<(), EngineError> {
        let (note, path) = (note.to_owned(), path.to_path_buf());
        self.attended(move |session, scheduler| {
            engine(scheduler)?.save_session(session, &note, &path)
        })
    }

    /// Begins to go on after the session's tokens, of which at least one must be pending.
    ///
    /// # Errors
    /// [`EngineError::EmptyPrompt`], [`EngineError::PromptTooLong`], or [`EngineError::Sampling`].
    pub fn begin(
        &mut self,
        sampling: Sampling,
        limits: &Limits,
    ) -> Result<Continuation, EngineError> {
        self.check_pending()?;
        let session = self.session.as_mut().ok_or(EngineError::ServiceEnded)?;
        *session.sampler_mut() = Sampler::new(sampling)?;
        let transcript = Transcript::new(limits, session.tokens().len(), session.capacity());
        Ok(Continuation {
            session: self.number,
            transcript: Some(transcript),
        })
    }

    /// Goes on by one token, or by the next chunk of a prompt: then the piece is empty. `None` after the last piece.
    ///
    /// # Errors
    /// [`EngineError`] from the step; the session is as it was before it, and can go on when what was in the way is
    /// gone. [`EngineError::OtherSession`] for what was begun for another.
    pub fn advance(&mut self, how: &mut Continuation) -> Result<Option<Piece>, EngineError> {
        if how.session != self.number {
            return Err(EngineError::OtherSession);
        }
        let Some(mut transcript) = how.transcript.take() else {
            return Ok(None);
        };
        if !transcript.wants_tokens() {
            let (text, reason) = transcript.end(FinishReason::MaxTokens);
            return Ok(Some(Piece {
                token: None,
                text,
                finish: Some(reason),
            }));
        }
        let (stepped, transcript) = self.attended(move |session, scheduler| {
            Ok((step(scheduler, session, &transcript), transcript))
        })?;
        let transcript = how.transcript.insert(transcript);
        let Some(token) = stepped? else {
            return Ok(Some(Piece {
                token: None,
                text: String::new(),
                finish: None,
            }));
        };
        let tokenizer = self.service.model().tokenizer();
        let (token, text, finish) = match transcript.advance(tokenizer, token, false)? {
            Outcome::Continues(text) => (Some(token), text, None),
            Outcome::EndsWith(text, reason) => (Some(token), text, Some(reason)),
            Outcome::EndsBefore(text, reason) => (None, text, Some(reason)),
        };
        if finish.is_some() {
            how.transcript = None;
        }
        Ok(Some(Piece {
            token,
            text,
            finish,
        }))
    }

    fn check_pending(&self) -> Result<(), EngineError> {
        let session = self.session.as_ref().ok_or(EngineError::ServiceEnded)?;
        let (prompt, context) = (session.tokens().len(), session.capacity());
        if session.pending() == 0 {
            Err(EngineError::EmptyPrompt)
        } else if prompt > context {
            Err(EngineError::PromptTooLong { prompt, context })
        } else {
            Ok(())
        }
    }

    /// What `work` makes of the session on the service's thread.
    fn attended<T: Send + 'static>(
        &mut self,
        work: impl FnOnce(&mut Session, &mut Scheduler) -> Result<T, EngineError> + Send + 'static,
    ) -> Result<T, EngineError> {
        let mut session = self.session.take().ok_or(EngineError::ServiceEnded)?;
        let (session, done) = self.service.between_steps(move |scheduler| {
            let done = work(&mut session, scheduler);
            (session, done)
        })?;
        self.session = Some(session);
        done
    }
}

/// The engine that the scheduler steps: services have no other.
fn engine(scheduler: &mut Scheduler) -> Result<&mut Engine, EngineError> {
    scheduler.engine().ok_or(EngineError::ServiceEnded)
}

/// One step of `session`, for which room is made.
fn step(
    scheduler: &mut Scheduler,
    session: &mut Session,
    transcript: &Transcript,
) -> Result<Option<u32>, EngineError> {
    let limit = engine(scheduler)?.score_limit(LogitRows::Last);
    prepare(scheduler, session, limit)?;
    engine(scheduler)?.step_once(session, transcript)
}

/// The same for rows of logits, which are appended to `logits`.
fn score_step(
    scheduler: &mut Scheduler,
    session: &mut Session,
    asked: LogitRows,
    logits: &mut Vec<f32>,
) -> Result<(), EngineError> {
    let limit = engine(scheduler)?.score_limit(asked);
    prepare(scheduler, session, limit)?;
    engine(scheduler)?.score_step(session, asked, |row| logits.extend_from_slice(row))
}

/// Finds pages for the next step of up to `limit` tokens. The engine's own way to find them would take memory of
/// weights past the scheduler's books.
fn prepare(
    scheduler: &mut Scheduler,
    session: &mut Session,
    limit: usize,
) -> Result<(), EngineError> {
    session.recover()?;
    let (chunk, _) = session.schedule(limit);
    loop {
        match session.sequence.prepare(chunk.len()) {
            Err(error) if scheduler.make_room_beside(&error) => {}
            prepared => return Ok(prepared?),
        }
    }
}
