//! What goes wrong, by what an app can do about it.

use std::fmt::Display;
use std::time::Duration;

use lacuna::{EngineError, Failure, LoadError, PromptError, Refusal};

/// Why something could not be done. The messages say what to do.
#[derive(Debug, Clone, PartialEq, thiserror::Error, uniffi::Error)]
pub enum LacunaError {
    /// The model cannot be found, read, or used for this.
    #[error("{reason}")]
    Model {
        /// For people.
        reason: String,
    },
    /// Memory is short: of the budget, or of the system.
    #[error("{reason}")]
    BudgetExceeded {
        /// For people.
        reason: String,
    },
    /// The prompt does not fit the context.
    #[error("{reason}")]
    ContextTooLong {
        /// For people.
        reason: String,
    },
    /// As much waits as may.
    #[error("{reason}")]
    Busy {
        /// For people.
        reason: String,
        /// Seconds after which there is likely to be a place.
        retry_after_seconds: f64,
    },
    /// An argument or a setting is none that can be used.
    #[error("{reason}")]
    InvalidValue {
        /// For people.
        reason: String,
    },
    /// The file of a session is damaged, or of another model or other settings; or it cannot be written.
    #[error("{reason}")]
    SavedSession {
        /// For people.
        reason: String,
    },
    /// Somebody else reads this stream or uses this session at the moment.
    #[error("{reason}")]
    InUse {
        /// For people.
        reason: String,
    },
    /// The engine has been shut down.
    #[error("the engine has been shut down; open another")]
    Closed,
    /// The model's numbers cannot be computed, or a thread cannot be started.
    #[error("{reason}")]
    Failed {
        /// For people.
        reason: String,
    },
}

impl LacunaError {
    pub(crate) fn model(error: impl Display) -> Self {
        let reason = error.to_string();
        Self::Model { reason }
    }

    pub(crate) fn budget(error: impl Display) -> Self {
        let reason = error.to_string();
        Self::BudgetExceeded { reason }
    }

    pub(crate) fn context(error: impl Display) -> Self {
        let reason = error.to_string();
        Self::ContextTooLong { reason }
    }

    pub(crate) fn value(error: impl Display) -> Self {
        let reason = error.to_string();
        Self::InvalidValue { reason }
    }

    pub(crate) fn in_use(reason: &str) -> Self {
        let reason = reason.to_owned();
        Self::InUse { reason }
    }

    pub(crate) fn failed(error: impl Display) -> Self {
        let reason = error.to_string();
        Self::Failed { reason }
    }

    fn busy(error: impl Display, retry_after: Duration) -> Self {
        Self::Busy {
            reason: error.to_string(),
            retry_after_seconds: retry_after.as_secs_f64(),
        }
    }
}

impl From<LoadError> for LacunaError {
    fn from(error: LoadError) -> Self {
        Self::model(error)
    }
}

impl From<PromptError> for LacunaError {
    fn from(error: PromptError) -> Self {
        Self::value(error)
    }
}

impl From<EngineError> for LacunaError {
    fn from(error: EngineError) -> Self {
        match &error {
            EngineError::Kv(lacuna::KvError::ContextFull { .. })
            | EngineError::PromptTooLong { .. } => Self::context(error),
            EngineError::BudgetTooSmall(_)
            | EngineError::MemoryShort { .. }
            | EngineError::ProcessTooLarge { .. }
            | EngineError::LongText { .. }
            | EngineError::Kv(_)
            | EngineError::OutOfMemory(_)
            | EngineError::Activations(_) => Self::budget(error),
            EngineError::Forward(_) => Self::model(error),
            EngineError::Saved { .. } => Self::SavedSession {
                reason: error.to_string(),
            },
            EngineError::ServiceEnded => Self::Closed,
            EngineError::NotFinite(_) | EngineError::Thread(_) | EngineError::Cpu(_) => {
                Self::failed(error)
            }
            _ => Self::value(error),
        }
    }
}

impl From<Refusal> for LacunaError {
    fn from(refusal: Refusal) -> Self {
        match refusal {
            Refusal::QueueFull { retry_after, .. } => Self::busy(refusal, retry_after),
            Refusal::TooLarge { .. } | Refusal::Memory(_) => Self::budget(refusal),
            Refusal::PromptTooLong { .. } => Self::context(refusal),
            Refusal::LostFile(_) => Self::model(refusal),
            Refusal::ShuttingDown => Self::Closed,
            refusal => Self::value(refusal),
        }
    }
}

impl From<Failure> for LacunaError {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::QueueFull { retry_after } => Self::busy(failure, retry_after),
            Failure::OutOfMemory(_) => Self::budget(failure),
            Failure::LostFile(_) => Self::model(failure),
            Failure::ShuttingDown | Failure::ServiceEnded => Self::Closed,
            failure => Self::failed(failure),
        }
    }
}
