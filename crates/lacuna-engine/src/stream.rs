//! What comes back for a request: events, in order, until every choice is finished.

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use lacuna_files::LostFile;
use lacuna_kv::folder::FolderMiss;
use lacuna_kv::prefix;
use lacuna_models::ForwardError;
use lacuna_pages::DeviceError;
use tokio::sync::mpsc::{self, error::TryRecvError};

use crate::error::{EngineError, NotFinite};
use crate::request::ConstraintError;
use crate::request_memory::HeldMemory;

/// One thing that happened to a request.
#[derive(Debug)]
pub enum Event {
    /// The request is running. First, and once.
    Started {
        /// Tokens of the prompt.
        prompt_tokens: usize,
        /// Those found in the cache.
        reused_tokens: usize,
        /// Why no more were, unless all were that can be.
        miss: Option<Miss>,
        /// Where the prompt leaves what is kept, if it does.
        difference: Option<Difference>,
    },
    /// The next tokens of the prompt have been scored, from its second token on and in order; only
    /// if that was asked for, and before the first token of any choice.
    PromptScored(Vec<PromptToken>),
    /// A choice has one more token.
    Token {
        /// Which choice, from zero.
        choice: usize,
        /// The token.
        token: u32,
        /// Text that can be shown now; empty while a character or a possible stop string is
        /// unfinished.
        text: String,
        /// If asked for.
        logprobs: Option<TokenLogprobs>,
    },
    /// A choice has ended.
    Finished {
        /// Which choice, from zero.
        choice: usize,
        /// Why.
        reason: FinishReason,
        /// Text that was held back until now.
        text: String,
        /// What it took.
        usage: Usage,
    },
    /// The request ended with an error; nothing more comes for any choice.
    Failed(Failure),
}

/// The place in a prompt from which on it is not what is kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// The first token of the prompt in whose place only others are kept, counted from zero: so many agree.
    pub at: usize,
    /// What the prompt says from there on, a few tokens of it. Nothing of what is kept, which may be somebody else's.
    pub text: String,
}

/// Why fewer prompt tokens were found in the cache than could have been.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Miss {
    /// The prefix cache is off.
    Disabled,
    /// No request began like this one.
    Unseen,
    /// What began like this one ended earlier.
    Ended,
    /// What began like this one went on differently.
    Diverged,
    /// It was there and has been evicted for room.
    Evicted,
    /// It was there and was not used for longer than the time to live.
    Expired,
    /// It is there, but not what going on from its end takes: rows of layers with windows, or the states of
    /// layers after just those tokens.
    Passed,
    /// The cache folder, or what was put aside, has it in a file that is damaged.
    FolderDamaged,
    /// The cache folder had it in a file that was removed meanwhile.
    FolderGone,
    /// The cache folder has it in a file that could not be read, or not in time.
    FolderUnreadable,
    /// The cache folder has it, and there was no memory for it.
    FolderMemory,
    /// The store behind the cache folder has something else in its place.
    RemoteDamaged,
    /// The store behind the cache folder failed, or took too long.
    RemoteUnreadable,
    /// The cache folder has nothing but what other weights or settings computed.
    FolderSettings,
}

impl Miss {
    /// The name used in machine-readable output.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Disabled => "disabled",
            Self::Unseen => "unseen",
            Self::Ended => "ended",
            Self::Diverged => "diverged",
            Self::Evicted => "evicted",
            Self::Expired => "expired",
            Self::Passed => "passed",
            Self::FolderDamaged => "folder_damaged",
            Self::FolderGone => "folder_gone",
            Self::FolderUnreadable => "folder_unreadable",
            Self::FolderMemory => "folder_memory",
            Self::RemoteDamaged => "remote_damaged",
            Self::RemoteUnreadable => "remote_unreadable",
            Self::FolderSettings => "folder_settings",
        }
    }
}

impl From<prefix::Miss> for Miss {
    fn from(miss: prefix::Miss) -> Self {
        match miss {
            prefix::Miss::Unseen => Self::Unseen,
            prefix::Miss::Ended => Self::Ended,
            prefix::Miss::Diverged => Self::Diverged,
            prefix::Miss::Evicted => Self::Evicted,
            prefix::Miss::Expired => Self::Expired,
            prefix::Miss::Passed => Self::Passed,
        }
    }
}

impl From<FolderMiss> for Miss {
    fn from(miss: FolderMiss) -> Self {
        match miss {
            FolderMiss::Damaged => Self::FolderDamaged,
            FolderMiss::Gone => Self::FolderGone,
            FolderMiss::Unreadable => Self::FolderUnreadable,
            FolderMiss::NoMemory => Self::FolderMemory,
            FolderMiss::RemoteDamaged => Self::RemoteDamaged,
            FolderMiss::RemoteUnreadable => Self::RemoteUnreadable,
        }
    }
}

/// A token of a prompt and how likely it was.
#[derive(Debug, Clone, PartialEq)]
pub struct PromptToken {
    /// The token.
    pub token: u32,
    /// After all tokens before it.
    pub logprobs: TokenLogprobs,
}

/// Log-probability of a chosen token, by the model's logits as they are before penalties,
/// temperature and constraints.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenLogprobs {
    /// Of the chosen token, or the one that is there in a prompt.
    pub chosen: f32,
    /// Its place among all tokens, from 1 for the likeliest; with others as likely, their last.
    pub rank: usize,
    /// The likeliest tokens, from the likeliest down.
    pub top: Vec<(u32, f32)>,
}

/// Why a generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FinishReason {
    /// The model said it was done.
    EndOfText,
    /// The stop string of that place in [`crate::Limits::stop`] came up.
    StopString(usize),
    /// That token of [`crate::Limits::stop_tokens`] came up.
    StopToken(u32),
    /// As many tokens as asked for.
    MaxTokens,
    /// No room for another token.
    ContextFull,
    /// The text conforms to its constraint and nothing may follow.
    ConstraintComplete,
}

impl FinishReason {
    /// The name used in machine-readable output.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::EndOfText => "end_of_text",
            Self::StopString(_) => "stop_string",
            Self::StopToken(_) => "stop_token",
            Self::MaxTokens => "max_tokens",
            Self::ContextFull => "context_full",
            Self::ConstraintComplete => "constraint_complete",
        }
    }
}

/// What one choice took, in tokens and in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Those of them that were found in the cache.
    pub reused_tokens: usize,
    /// Tokens generated, an end-of-text token left out.
    pub generated_tokens: usize,
    /// From [`Event::Started`] until the prompt had been computed and the first token was there, or it was
    /// clear that there is none. What the request waited before is not in it.
    pub prompt_time: Duration,
    /// From then on until the choice ended.
    pub generation_time: Duration,
}

/// Why a request that had been taken could not be finished.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// The request's deadline passed.
    #[error("the request took longer than its deadline allows")]
    Deadline,
    /// It found no place or memory, and as many requests as may wait do so already.
    #[error("too many requests wait; try again in {} s", retry_after.as_secs().max(1))]
    QueueFull {
        /// When a place is likely to be free.
        retry_after: Duration,
    },
    /// Events were not read for too long.
    #[error("the reply was not read for too long")]
    Unread,
    /// Even alone, the request finds no memory to continue.
    #[error("out of memory: {0}")]
    OutOfMemory(String),
    /// The text cannot be made to conform.
    #[error(transparent)]
    Constraint(#[from] ConstraintError),
    /// The model's output is of no use.
    #[error(transparent)]
    NotFinite(#[from] NotFinite),
    /// A file of the model was lost while it was in use.
    #[error(transparent)]
    LostFile(#[from] LostFile),
    /// The device that computes was lost, and with it what it had computed.
    #[error(
        "the device that computes was lost while it worked on this request; send it again, for which the device is opened again"
    )]
    DeviceLost,
    /// It was lost before, and cannot be opened again.
    #[error(
        "the device that computes was lost and cannot be opened again ({0}); restart the server when the device is there, or without it"
    )]
    NoDevice(String),
    /// The model could not be run.
    #[error("{0}")]
    Engine(String),
    /// The service stopped before the request was done.
    #[error("the service is shutting down")]
    ShuttingDown,
    /// The service's thread ended before the request was done, by a panic.
    #[error("the engine stopped before the reply was finished; start the service again")]
    ServiceEnded,
}

impl From<&EngineError> for Failure {
    fn from(error: &EngineError) -> Self {
        match error {
            EngineError::Forward(ForwardError::Lost(lost)) => Self::LostFile(lost.clone()),
            EngineError::Forward(ForwardError::Device(DeviceError::Lost)) => Self::DeviceLost,
            EngineError::NotFinite(error) => Self::NotFinite(*error),
            error => Self::Engine(error.to_string()),
        }
    }
}

/// Events of one request. Dropping it cancels the request within a step.
#[derive(Debug)]
pub struct Stream {
    receiver: mpsc::Receiver<Event>,
    /// Choices whose end has not come; none after a failure.
    unfinished: usize,
    /// Events that are not read are a part of it, even if the request has ended.
    _memory: Option<Arc<HeldMemory>>,
}

impl Stream {
    /// Of a request with so many choices.
    pub(crate) fn new(
        receiver: mpsc::Receiver<Event>,
        choices: usize,
        memory: Option<Arc<HeldMemory>>,
    ) -> Self {
        Self {
            receiver,
            unfinished: choices,
            _memory: memory,
        }
    }

    /// The next event, or `None` after the last.
    pub async fn recv(&mut self) -> Option<Event> {
        let received = self.receiver.recv().await;
        self.noted(received)
    }

    /// [`Stream::recv`] for hand-written futures.
    pub fn poll_recv(&mut self, context: &mut Context<'_>) -> Poll<Option<Event>> {
        let received = self.receiver.poll_recv(context);
        received.map(|event| self.noted(event))
    }

    /// The next event, or `None` after the last, blocking this thread until it is there.
    ///
    /// # Panics
    /// When called from within an asynchronous task.
    pub fn blocking_recv(&mut self) -> Option<Event> {
        let received = self.receiver.blocking_recv();
        self.noted(received)
    }

    /// The next event if there is one now.
    pub fn try_recv(&mut self) -> Option<Event> {
        match self.receiver.try_recv() {
            Ok(event) => self.noted(Some(event)),
            Err(TryRecvError::Empty) => None,
            Err(TryRecvError::Disconnected) => self.noted(None),
        }
    }

    /// The event, or a failure where nothing comes any more although something has to: the thread that sent is gone.
    fn noted(&mut self, event: Option<Event>) -> Option<Event> {
        match &event {
            Some(Event::Finished { .. }) => self.unfinished = self.unfinished.saturating_sub(1),
            Some(Event::Failed(_)) => self.unfinished = 0,
            None if self.unfinished > 0 => {
                self.unfinished = 0;
                return Some(Event::Failed(Failure::ServiceEnded));
            }
            _ => {}
        }
        event
    }
}
