//! A text on its way.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::mem;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use lacuna::Event;
use lacuna::reply::{self, Reader};

use crate::engine::Engine;
use crate::error::LacunaError;

/// Why a text has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, uniffi::Enum)]
pub enum FinishReason {
    /// The model said that it was done.
    EndOfText,
    /// One of the texts came up that were to end it.
    Stop,
    /// It has as many tokens as were asked for.
    MaxTokens,
    /// There is no room for another token.
    ContextFull,
}

impl From<lacuna::FinishReason> for FinishReason {
    fn from(reason: lacuna::FinishReason) -> Self {
        use lacuna::FinishReason as Reason;
        match reason {
            // Nothing here is constrained; if it were, that would be the end of what was asked for.
            Reason::EndOfText | Reason::ConstraintComplete => Self::EndOfText,
            Reason::StopString(_) | Reason::StopToken(_) => Self::Stop,
            Reason::MaxTokens => Self::MaxTokens,
            Reason::ContextFull => Self::ContextFull,
        }
    }
}

/// What a text took.
#[derive(Debug, Clone, Copy, PartialEq, Eq, uniffi::Record)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// Those of them that were computed before.
    pub reused_tokens: u64,
    /// Tokens that were written.
    pub generated_tokens: u64,
}

/// A part of a text.
#[derive(Debug, Clone, PartialEq, Eq, uniffi::Enum)]
pub enum Piece {
    /// What the model thinks before it answers.
    Reasoning {
        /// More of it.
        text: String,
    },
    /// What it says.
    Content {
        /// More of it.
        text: String,
    },
    /// It calls a function.
    Call {
        /// The function's name.
        name: String,
        /// Its arguments as the model wrote them: JSON if all went well.
        arguments: String,
    },
    /// The end, and the last piece.
    End {
        /// Why.
        reason: FinishReason,
        /// What it took.
        usage: Usage,
    },
}

impl From<reply::Piece> for Piece {
    fn from(piece: reply::Piece) -> Self {
        match piece {
            reply::Piece::Reasoning(text) => Self::Reasoning { text },
            reply::Piece::Content(text) => Self::Content { text },
            reply::Piece::Call { name, arguments } => Self::Call { name, arguments },
        }
    }
}

/// The pieces of a text. Dropping or cancelling it frees its pages within a step.
#[derive(uniffi::Object)]
pub struct TextStream {
    state: Mutex<State>,
    /// Whether somebody waits for the next piece.
    read: AtomicBool,
    /// Runs as long as somebody reads.
    _engine: Arc<Engine>,
}

struct State {
    /// None once it has ended or was cancelled.
    stream: Option<lacuna::Stream>,
    reader: Option<Reader>,
    ready: VecDeque<Piece>,
    waiting: Option<Waker>,
}

/// Gives the place of who reads back, also when its task is cancelled.
struct Reading<'a>(&'a AtomicBool);

impl Drop for Reading<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl TextStream {
    pub(crate) fn new(stream: lacuna::Stream, reader: Option<Reader>, engine: Arc<Engine>) -> Self {
        let state = State {
            stream: Some(stream),
            reader,
            ready: VecDeque::new(),
            waiting: None,
        };
        Self {
            state: Mutex::new(state),
            read: AtomicBool::new(false),
            _engine: engine,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[uniffi::export]
impl TextStream {
    /// The next piece; none after the last, and when it was cancelled.
    ///
    /// # Errors
    /// What the text was given up for; [`LacunaError::InUse`] while another task waits for a piece.
    pub async fn next(&self) -> Result<Option<Piece>, LacunaError> {
        if self.read.swap(true, Ordering::Acquire) {
            return Err(LacunaError::in_use("another task is reading this stream"));
        }
        let _reading = Reading(&self.read);
        poll_fn(|context| self.lock().poll(context)).await
    }

    /// The whole text, thoughts left out, once it has ended.
    ///
    /// # Errors
    /// As `next`.
    pub async fn text(&self) -> Result<String, LacunaError> {
        let mut whole = String::new();
        while let Some(piece) = self.next().await? {
            if let Piece::Content { text } = piece {
                whole.push_str(&text);
            }
        }
        Ok(whole)
    }

    /// Ends it. Who waits for a piece finds that there is none.
    pub fn cancel(&self) {
        let mut state = self.lock();
        (state.stream, state.ready) = (None, VecDeque::new());
        let waiting = state.waiting.take();
        drop(state);
        if let Some(waiting) = waiting {
            waiting.wake();
        }
    }
}

impl State {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<Piece>, LacunaError>> {
        loop {
            if let Some(piece) = self.ready.pop_front() {
                return Poll::Ready(Ok(Some(piece)));
            }
            let Some(stream) = &mut self.stream else {
                return Poll::Ready(Ok(None));
            };
            match stream.poll_recv(context) {
                Poll::Pending => {
                    self.waiting = Some(context.waker().clone());
                    return Poll::Pending;
                }
                Poll::Ready(Some(event)) => self.add(event)?,
                Poll::Ready(None) => {
                    self.stream = None;
                    return Poll::Ready(Err(LacunaError::Closed));
                }
            }
        }
    }

    fn add(&mut self, event: Event) -> Result<(), LacunaError> {
        match event {
            Event::Started { .. } | Event::PromptScored(_) => {}
            Event::Token { text, .. } => match &mut self.reader {
                Some(reader) => self
                    .ready
                    .extend(reader.push(&text).into_iter().map(Piece::from)),
                None => self.say(text),
            },
            Event::Finished {
                reason,
                text,
                usage,
                ..
            } => {
                match mem::take(&mut self.reader) {
                    Some(mut reader) => {
                        let rest = reader.finish(&text);
                        self.ready.extend(rest.into_iter().map(Piece::from));
                    }
                    None => self.say(text),
                }
                self.ready.push_back(Piece::End {
                    reason: reason.into(),
                    usage: Usage {
                        prompt_tokens: usage.prompt_tokens as u64,
                        reused_tokens: usage.reused_tokens as u64,
                        generated_tokens: usage.generated_tokens as u64,
                    },
                });
                self.stream = None;
            }
            Event::Failed(failure) => {
                self.stream = None;
                return Err(failure.into());
            }
        }
        Ok(())
    }

    fn say(&mut self, text: String) {
        if !text.is_empty() {
            self.ready.push_back(Piece::Content { text });
        }
    }
}
