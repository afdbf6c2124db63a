//! Text from a session: steps until an end, turned into characters and cut at stop strings.

use std::time::{Duration, Instant};

use crate::engine::{Engine, Taken};
use crate::error::EngineError;
use crate::request::Limits;
use crate::session::Session;
use crate::stream::FinishReason;
use crate::transcript::{Outcome, Transcript};

/// Times of a generation.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Timing {
    /// Prompt tokens that had to be computed, those found in the cache left out.
    pub computed_prompt_tokens: usize,
    /// From the start to the first token.
    pub first_token: Duration,
    /// From the first token to the last.
    pub decode: Duration,
    /// Tokens that followed the first.
    pub decoded_tokens: usize,
}

impl Timing {
    /// Prompt tokens per second.
    #[must_use]
    pub fn prefill_tokens_per_second(&self) -> f64 {
        rate(self.computed_prompt_tokens, self.first_token)
    }

    /// Generated tokens per second after the first.
    #[must_use]
    pub fn decode_tokens_per_second(&self) -> f64 {
        rate(self.decoded_tokens, self.decode)
    }
}

fn rate(tokens: usize, time: Duration) -> f64 {
    if time.is_zero() {
        0.0
    } else {
        tokens as f64 / time.as_secs_f64()
    }
}

/// A generation under way: the session's pending tokens are its prompt.
pub struct Generation<'a> {
    engine: &'a mut Engine,
    session: &'a mut Session,
    transcript: Transcript,
    finish: Option<FinishReason>,
    /// What the last step gave, until it is handed out.
    taken: Vec<Taken>,
    generated: Vec<u32>,
    started: Instant,
    timing: Timing,
}

impl<'a> Generation<'a> {
    /// Starts after the session's tokens.
    ///
    /// # Errors
    /// [`EngineError::EmptyPrompt`] without pending tokens, [`EngineError::PromptTooLong`] when they
    /// do not fit the context, [`EngineError::OtherEngine`] for a session that another engine made.
    pub fn new(
        engine: &'a mut Engine,
        session: &'a mut Session,
        limits: Limits,
    ) -> Result<Self, EngineError> {
        engine.check_owns(session)?;
        let (prompt, context) = (session.tokens().len(), session.capacity());
        let pending = session.pending();
        if pending == 0 {
            return Err(EngineError::EmptyPrompt);
        }
        if prompt > context {
            return Err(EngineError::PromptTooLong { prompt, context });
        }
        let timing = Timing {
            computed_prompt_tokens: pending,
            first_token: Duration::ZERO,
            decode: Duration::ZERO,
            decoded_tokens: 0,
        };
        Ok(Self {
            engine,
            session,
            transcript: Transcript::new(&limits, prompt, context),
            finish: None,
            taken: Vec::new(),
            generated: Vec::new(),
            started: Instant::now(),
            timing,
        })
    }

    /// The next piece of text, or `None` after the end: that of a token, or of several where some were guessed. It is
    /// empty after every step of a long prompt, so that whoever has enough can stop there, too.
    ///
    /// # Errors
    /// [`EngineError`] from the step; the text so far stands.
    pub fn next_piece(&mut self) -> Result<Option<String>, EngineError> {
        if self.finish.is_some() {
            return Ok(None);
        }
        if !self.transcript.wants_tokens() {
            let (shown, reason) = self.transcript.end(FinishReason::MaxTokens);
            self.finish = Some(reason);
            return Ok(Some(shown));
        }
        self.step()?;
        let mut piece = String::new();
        for (place, (token, outcome)) in std::mem::take(&mut self.taken).into_iter().enumerate() {
            let outcome = match outcome {
                Ok(outcome) => outcome,
                Err(error) if place == 0 => return Err(error.into()),
                Err(error) => {
                    // What came before it is handed out first.
                    self.taken.push((token, Err(error)));
                    break;
                }
            };
            if !matches!(outcome, Outcome::EndsBefore(..)) {
                self.generated.push(token);
            }
            match outcome {
                Outcome::Continues(shown) => piece += &shown,
                Outcome::EndsWith(shown, reason) | Outcome::EndsBefore(shown, reason) => {
                    self.finish = Some(reason);
                    piece += &shown;
                }
            }
        }
        Ok(Some(piece))
    }

    /// A step: a part of the prompt, or a token, or several of which all but one were guessed; none where an error is
    /// still to be told.
    fn step(&mut self) -> Result<(), EngineError> {
        if !self.taken.is_empty() {
            return Ok(());
        }
        let (transcript, taken) = (&mut self.transcript, &mut self.taken);
        self.engine.step_with(self.session, transcript, taken)?;
        if self.taken.is_empty() {
            return Ok(());
        }
        let (now, mut tokens) = (self.started.elapsed(), self.taken.len());
        if self.timing.first_token.is_zero() {
            self.timing.first_token = now;
            tokens -= 1;
        }
        self.timing.decoded_tokens += tokens;
        self.timing.decode = now - self.timing.first_token;
        Ok(())
    }

    /// Why it ended, once it has.
    #[must_use]
    pub fn finish_reason(&self) -> Option<FinishReason> {
        self.finish
    }

    /// Tokens generated so far, an end-of-text token left out.
    #[must_use]
    pub fn tokens(&self) -> &[u32] {
        &self.generated
    }

    /// Times so far.
    #[must_use]
    pub fn timing(&self) -> Timing {
        self.timing
    }

    /// The session being continued.
    #[must_use]
    pub fn session(&self) -> &Session {
        self.session
    }
}
