//! Errors as Python has them: `lacuna.errors` makes the exception, of the class that the code stands for.

use std::fmt::Display;
use std::time::Duration;

use lacuna_engine::EngineError;
use lacuna_kv::KvError;
use lacuna_models::{ForwardError, LoadError};
use lacuna_server::StartError;
use lacuna_text::tokenizer::TokenizerError;
use pyo3::prelude::*;

/// What is wrong, and what `lacuna.errors.of` makes a class of.
#[derive(Debug)]
pub(crate) struct Problem {
    code: &'static str,
    message: String,
    param: Option<String>,
    status: u16,
    retry_after: Option<Duration>,
    /// What Python raised itself, in place of all that.
    raised: Option<Box<PyErr>>,
}

impl Problem {
    pub(crate) fn new(code: &'static str, message: impl Display) -> Self {
        Self {
            code,
            message: message.to_string(),
            param: None,
            status: 0,
            retry_after: None,
            raised: None,
        }
    }

    /// An argument that cannot be used.
    pub(crate) fn argument(param: &str, message: impl Display) -> Self {
        Self::new("invalid_value", message).about(param)
    }

    /// The same about an argument.
    pub(crate) fn about(self, param: &str) -> Self {
        Self {
            param: Some(param.to_owned()),
            ..self
        }
    }

    pub(crate) fn is_about(&self, param: &str) -> bool {
        self.param.as_deref() == Some(param)
    }

    /// The same about one of a list, which its message names too.
    pub(crate) fn about_one(self, list: &str, index: usize) -> Self {
        let place = format!("{list}[{index}]");
        let message = format!("`{place}`: {}", self.message);
        Self { message, ..self }.about(&place)
    }

    /// What is wrong with the file of a session, which the error names.
    pub(crate) fn file(error: EngineError) -> Self {
        let problem = Self::from(error);
        match problem.code {
            "invalid_value" => problem.about("path"),
            _ => problem,
        }
    }

    pub(crate) fn closed() -> Self {
        Self::new("closed", "it has been closed; make another")
    }

    /// A model that cannot be loaded, with all that is known of why.
    pub(crate) fn model(error: &(impl Display + ?Sized)) -> Self {
        Self::new("model_error", format_args!("{error:#}"))
    }
}

impl From<lacuna_server::Problem> for Problem {
    fn from(problem: lacuna_server::Problem) -> Self {
        Self {
            code: problem.code,
            message: problem.message,
            param: problem.param,
            status: problem.status,
            retry_after: problem.retry_after,
            raised: None,
        }
    }
}

impl From<StartError> for Problem {
    fn from(error: StartError) -> Self {
        match error {
            StartError::Engine(error) => error.into(),
            StartError::OpenToAll { .. } => Self::argument("host", error),
            StartError::BudgetTooSmall { .. } => Self::new("budget_exceeded", error),
            StartError::Template(_) => Self::model(&error),
            error => Self::new("cannot_start", error),
        }
    }
}

impl From<LoadError> for Problem {
    fn from(error: LoadError) -> Self {
        Self::model(&error)
    }
}

impl From<EngineError> for Problem {
    fn from(error: EngineError) -> Self {
        let code = match &error {
            EngineError::BudgetTooSmall(_)
            | EngineError::MemoryShort { .. }
            | EngineError::ProcessTooLarge { .. }
            | EngineError::LongText { .. } => "budget_exceeded",
            EngineError::Kv(KvError::ContextFull { .. })
            | EngineError::PromptTooLong { .. }
            | EngineError::Forward(ForwardError::TextTooLong { .. })
            | EngineError::Tokenizer(
                TokenizerError::TooLong { .. } | TokenizerError::TooManyTokens { .. },
            ) => "context_length_exceeded",
            EngineError::Kv(_) | EngineError::OutOfMemory(_) | EngineError::Activations(_) => {
                "budget_exceeded"
            }
            EngineError::Forward(
                ForwardError::NoLogits | ForwardError::NoEmbeddings | ForwardError::NoScores,
            ) => "wrong_model",
            EngineError::ServiceEnded => "closed",
            EngineError::NotFinite(_) => "logits_not_finite",
            EngineError::Forward(ForwardError::Lost(_)) => "model_file_lost",
            EngineError::Thread(_) | EngineError::Cpu(_) => "cannot_start",
            _ => "invalid_value",
        };
        Self::new(code, error)
    }
}

impl From<PyErr> for Problem {
    fn from(raised: PyErr) -> Self {
        Self {
            raised: Some(Box::new(raised)),
            ..Self::new("", "")
        }
    }
}

impl From<Problem> for PyErr {
    fn from(problem: Problem) -> Self {
        if let Some(raised) = problem.raised {
            return *raised;
        }
        Python::attach(|py| {
            let made = py.import("lacuna.errors").and_then(|errors| {
                errors.getattr("of")?.call1((
                    problem.code,
                    problem.message.as_str(),
                    problem.param.as_deref(),
                    problem.status,
                    problem.retry_after.map(|after| after.as_secs_f64()),
                ))
            });
            match made {
                Ok(exception) => Self::from_value(exception),
                Err(error) => error,
            }
        })
    }
}
