//! Errors, in the form that clients of each interface expect them in.

use std::borrow::Cow;
use std::collections::TryReserveError;
use std::time::Duration;

use axum::Json;
use axum::extract::Request;
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use lacuna_engine::{ConstraintError, Failure, LoanRefusal, MemoryRefusal, Refusal};
use lacuna_files::LostFile;
use lacuna_models::PromptError;
use lacuna_pages::ByteLength;
use lacuna_text::template::TemplateError;
use lacuna_text::tokenizer::TokenizerError;
use serde_json::{Value, json};

use crate::anthropic;
use crate::http::connections::HEAD_BYTES;
use crate::local::Problem;

/// Bytes of a message that a client is told at most, and of the name of a place in its request. Both hold what clients
/// wrote, which may be as long as a body, and replies like these are in no account: with the escapes of JSON they stay
/// within what is held for a connection.
const MOST_TOLD: usize = 4 << 10;
const MOST_PLACE: usize = 1 << 10;

/// Anthropic's status of a service that cannot do it now.
const OVERLOADED: u16 = 529;

/// Whose clients an error is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Interface {
    /// `{"error": {"message", "type", "param", "code"}}`.
    OpenAi,
    /// `{"type": "error", "error": {"type", "message"}}`.
    Anthropic,
    /// `{"error": message}`.
    Ollama,
}

impl Interface {
    /// The one that `path` belongs to.
    pub(crate) fn of(path: &str) -> Self {
        let is_below = |parent: &str| {
            let rest = path.strip_prefix(parent);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        match path {
            _ if is_below("/v1/messages") => Self::Anthropic,
            _ if path.starts_with("/api/") => Self::Ollama,
            _ => Self::OpenAi,
        }
    }

    /// The one that a request is in: paths of models belong to two, of which clients of Anthropic say that they are.
    fn asked(request: &Request) -> Self {
        let path = request.uri().path();
        let is_shared = path == "/v1/models" || path.starts_with("/v1/models/");
        match is_shared && anthropic::is_spoken(request.headers()) {
            true => Self::Anthropic,
            false => Self::of(path),
        }
    }
}

/// A request that gets no answer, and what its client is told.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ApiError {
    status: StatusCode,
    code: &'static str,
    param: Option<String>,
    message: String,
    retry_after: Option<Duration>,
    /// Memory that was not free, if it failed for that.
    missing: Option<MemoryRefusal>,
}

impl ApiError {
    pub(crate) fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self {
            status,
            code,
            param: None,
            message: message.into(),
            retry_after: None,
            missing: None,
        }
    }

    /// A field of the request that cannot be used.
    pub(crate) fn field(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self {
            param: Some(param.into()),
            ..Self::new(StatusCode::BAD_REQUEST, "invalid_value", message)
        }
    }

    /// The same about another field.
    pub(crate) fn of(self, param: &str) -> Self {
        Self {
            param: Some(param.to_owned()),
            ..self
        }
    }

    /// The same about a request that holds `held` bytes itself: what would not be free if it were alone never is.
    pub(crate) fn of_holder(self, held: usize) -> Self {
        let Some(MemoryRefusal::Full { needed, limit }) = self.missing else {
            return self;
        };
        let needed = ByteLength::new(needed.get().saturating_add(held as u64));
        match needed > limit {
            true => MemoryRefusal::TooLarge { needed, limit }.into(),
            false => self,
        }
    }

    /// The same with another code.
    pub(crate) fn with_code(self, code: &'static str) -> Self {
        Self { code, ..self }
    }

    /// The same with the names that fields have in another interface: pairs of how OpenAI's chats say it
    /// and how the other does. What is no name at the beginning of a path is looked for anywhere.
    pub(crate) fn renamed(self, names: &[(&str, &str)]) -> Self {
        let begins = |name: &str| name.starts_with(|first: char| first.is_ascii_alphabetic());
        let message =
            names
                .iter()
                .fold(self.message, |message, (name, other)| match begins(name) {
                    true => message.replace(&format!("`{name}"), &format!("`{other}")),
                    false => message.replace(name, other),
                });
        let rename = |param: String| {
            let renamed = names.iter().find_map(|(name, other)| match begins(name) {
                true => param
                    .strip_prefix(name)
                    .map(|rest| format!("{other}{rest}")),
                false => param.contains(name).then(|| param.replace(name, other)),
            });
            renamed.unwrap_or(param)
        };
        Self {
            message,
            param: self.param.map(rename),
            ..self
        }
    }

    /// The model of this server is for something else.
    pub(crate) fn not_supported(message: &str) -> Self {
        Self::new(StatusCode::NOT_FOUND, "not_supported", message)
    }

    /// The service cannot do it now.
    pub(crate) fn unavailable(code: &'static str, message: impl Into<String>) -> Self {
        Self {
            retry_after: Some(Duration::from_secs(1)),
            ..Self::new(StatusCode::SERVICE_UNAVAILABLE, code, message)
        }
    }

    /// Too many wait; the next may try again.
    pub(crate) fn queue_full(message: impl Into<String>) -> Self {
        Self {
            retry_after: Some(Duration::from_secs(1)),
            ..Self::new(StatusCode::TOO_MANY_REQUESTS, "queue_full", message)
        }
    }

    /// A request that does not say which of several models it is for.
    pub(crate) fn which_model(there: &str) -> Self {
        Self::field(
            "model",
            format!("`model` is missing; this server has {there}"),
        )
    }

    /// A model that is none of several.
    pub(crate) fn none_of(asked: &str, there: &str) -> Self {
        Self {
            param: Some("model".to_owned()),
            ..Self::new(
                StatusCode::NOT_FOUND,
                "model_not_found",
                format!("there is no model `{asked}` here; this server has {there}"),
            )
        }
    }

    pub(crate) fn no_model(asked: &str, served: &str) -> Self {
        Self {
            param: Some("model".to_owned()),
            ..Self::new(
                StatusCode::NOT_FOUND,
                "model_not_found",
                format!("there is no model `{asked}` here; this server has `{served}`"),
            )
        }
    }

    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", message)
    }

    /// The same for who is in this process.
    pub(crate) fn into_problem(self) -> Problem {
        Problem {
            status: self.status.as_u16(),
            code: self.code,
            param: self.param,
            message: self.message,
            retry_after: self.retry_after,
        }
    }

    fn kind(&self) -> &'static str {
        match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::FORBIDDEN => "permission_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        }
    }

    /// The status and the kind that Anthropic has for it.
    fn anthropic_kind(&self) -> (StatusCode, &'static str) {
        let kind = match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::FORBIDDEN => "permission_error",
            StatusCode::NOT_FOUND => "not_found_error",
            StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::SERVICE_UNAVAILABLE => {
                let status = StatusCode::from_u16(OVERLOADED).unwrap_or(self.status);
                return (status, "overloaded_error");
            }
            StatusCode::GATEWAY_TIMEOUT => "timeout_error",
            status if status.is_server_error() => "api_error",
            _ => "invalid_request_error",
        };
        (self.status, kind)
    }

    /// The body for clients of `interface`.
    pub(crate) fn body_for(&self, interface: Interface) -> Value {
        match interface {
            Interface::OpenAi => self.body(),
            Interface::Anthropic => json!({
                "type": "error",
                "error": {"type": self.anthropic_kind().1, "message": self.placed_message()},
            }),
            Interface::Ollama => json!({"error": self.placed_message()}),
        }
    }

    /// The message, in interfaces that have no field for the place: with it, where it is one of several of a list.
    fn placed_message(&self) -> Cow<'_, str> {
        let message = abridged(&self.message, MOST_TOLD);
        match &self.param {
            Some(place) if place.contains('[') && !self.message.contains(place) => {
                let place = abridged(place, MOST_PLACE);
                Cow::from(format!("`{place}`: {message}"))
            }
            _ => message,
        }
    }

    /// The response to clients of `interface`.
    fn response_for(&self, interface: Interface) -> Response {
        let status = match interface {
            Interface::OpenAi | Interface::Ollama => self.status,
            Interface::Anthropic => self.anthropic_kind().0,
        };
        let mut response = (status, Json(self.body_for(interface))).into_response();
        let headers = response.headers_mut();
        if let Some(after) = self.retry_after {
            let seconds = after.as_secs().max(1);
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }

    /// The body, which is also what a stream that breaks off sends as its last event.
    pub(crate) fn body(&self) -> Value {
        json!({
            "error": {
                "message": abridged(&self.message, MOST_TOLD),
                "type": self.kind(),
                "param": self.param.as_ref().map(|place| abridged(place, MOST_PLACE)),
                "code": self.code,
            }
        })
    }
}

/// A text of `most` bytes or little more: of a longer one the beginning and the end, which say what is wrong and what there
/// is instead.
fn abridged(text: &str, most: usize) -> Cow<'_, str> {
    if text.len() <= most {
        return Cow::from(text);
    }
    let begin = text.floor_char_boundary(most / 2);
    let end = text.ceil_char_boundary(text.len() - most / 2);
    Cow::from(format!("{} ... {}", &text[..begin], &text[end..]))
}

impl IntoResponse for ApiError {
    /// For clients of OpenAI, until [`speak`] knows whose they are.
    fn into_response(self) -> Response {
        let mut response = self.response_for(Interface::OpenAi);
        response.extensions_mut().insert(self);
        response
    }
}

/// Says errors of all kinds, whoever found them, in the form of the interface that was asked.
pub(crate) async fn speak(request: Request, next: Next) -> Response {
    let interface = Interface::asked(&request);
    let mut response = next.run(request).await;
    let error = response.extensions_mut().remove::<ApiError>();
    match error {
        Some(error) if interface != Interface::OpenAi => error.response_for(interface),
        _ => response,
    }
}

/// In place of `reply`, if it is the protocol's own to a head it cannot read, which has no body: one
/// that says what is wrong, as every other error does. Every other reply with such a status has a
/// body.
pub(crate) fn unreadable(reply: &[u8]) -> Option<Vec<u8>> {
    let head = std::str::from_utf8(reply).ok()?.strip_suffix("\r\n\r\n")?;
    let line = head.strip_prefix("HTTP/1.1 ")?.lines().next()?;
    head.lines().find(|line| *line == "content-length: 0")?;
    let (code, message) = match line.get(..3)? {
        "400" => (
            "invalid_http",
            "the request is not valid HTTP/1.1".to_owned(),
        ),
        "414" => (
            "head_too_large",
            "the request's target is too long".to_owned(),
        ),
        "431" => (
            "head_too_large",
            format!("the request's head has more than 100 lines or {HEAD_BYTES} bytes"),
        ),
        _ => return None,
    };
    let error = ApiError::new(StatusCode::BAD_REQUEST, code, message);
    let body = error.body().to_string();
    let length = body.len();
    let reply = format!(
        "HTTP/1.1 {line}\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {length}\r\n\r\n{body}"
    );
    Some(reply.into_bytes())
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> Self {
        let message = refusal.to_string();
        let bad = |code, param: &str| Self {
            param: Some(param.to_owned()),
            ..Self::new(StatusCode::BAD_REQUEST, code, message.clone())
        };
        match &refusal {
            Refusal::QueueFull { retry_after, .. } => Self {
                retry_after: Some(*retry_after),
                ..Self::new(StatusCode::TOO_MANY_REQUESTS, "queue_full", message)
            },
            Refusal::Memory(refusal) => (*refusal).into(),
            Refusal::LostFile(lost) => lost.into(),
            Refusal::ShuttingDown => Self::unavailable("shutting_down", message),
            Refusal::PromptTooLong { .. } => bad("context_length_exceeded", "prompt"),
            Refusal::TooLarge { .. } => bad("budget_exceeded", "max_tokens"),
            Refusal::EmptyPrompt | Refusal::TokenOutOfRange { .. } => {
                bad("invalid_value", "prompt")
            }
            Refusal::SettingOutOfRange { setting, .. } => bad("invalid_value", setting),
            Refusal::MinTokens { .. } => bad("invalid_value", "min_tokens"),
            Refusal::TooManyChoices { .. } => bad("invalid_value", "n"),
            Refusal::TooManyLogprobs { .. } => bad("invalid_value", "logprobs"),
            Refusal::Sampling(error) => bad("invalid_value", error.setting),
            _ => Self::new(StatusCode::BAD_REQUEST, "refused", message),
        }
    }
}

impl From<LoanRefusal> for ApiError {
    fn from(refusal: LoanRefusal) -> Self {
        let message = refusal.to_string();
        match refusal {
            LoanRefusal::BudgetTooSmall { .. } => {
                Self::new(StatusCode::BAD_REQUEST, "budget_exceeded", message)
            }
            LoanRefusal::ServiceEnded => Self::unavailable("shutting_down", message),
            _ => Self::unavailable("out_of_memory", message),
        }
    }
}

impl From<TryReserveError> for ApiError {
    fn from(_: TryReserveError) -> Self {
        let message = "the system has no memory for the request; try again in a moment";
        Self::unavailable("out_of_memory", message)
    }
}

impl From<MemoryRefusal> for ApiError {
    fn from(refusal: MemoryRefusal) -> Self {
        let message = refusal.to_string();
        match refusal {
            MemoryRefusal::TooLarge { .. } => {
                Self::new(StatusCode::PAYLOAD_TOO_LARGE, "request_too_large", message)
            }
            MemoryRefusal::Full { .. } => Self {
                missing: Some(refusal),
                ..Self::unavailable("request_memory_full", message)
            },
        }
    }
}

impl From<&LostFile> for ApiError {
    /// Names the file without its folder, which is nobody's business. There is no time after which
    /// to try again.
    fn from(lost: &LostFile) -> Self {
        let name = lost.path.file_name().unwrap_or_default().to_string_lossy();
        let message = format!(
            "the model's file `{name}` has become shorter or unreadable while it was in use; the server has to be started again with a whole one"
        );
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "model_file_lost", message)
    }
}

impl From<Failure> for ApiError {
    fn from(failure: Failure) -> Self {
        let message = failure.to_string();
        match failure {
            Failure::QueueFull { retry_after } => Self {
                retry_after: Some(retry_after),
                ..Self::new(StatusCode::TOO_MANY_REQUESTS, "queue_full", message)
            },
            Failure::Deadline => Self::new(StatusCode::GATEWAY_TIMEOUT, "timeout", message),
            Failure::Unread => Self::new(StatusCode::REQUEST_TIMEOUT, "unread", message),
            Failure::OutOfMemory(_) => Self::unavailable("out_of_memory", message),
            Failure::LostFile(lost) => (&lost).into(),
            Failure::DeviceLost | Failure::NoDevice(_) => Self::unavailable("device_lost", message),
            Failure::ShuttingDown => Self::unavailable("shutting_down", message),
            Failure::ServiceEnded => crate::reply::broken_off(),
            Failure::NotFinite(_) => Self::new(
                StatusCode::INTERNAL_SERVER_ERROR,
                "logits_not_finite",
                message,
            ),
            Failure::Constraint(ConstraintError::Memory(refusal)) => Self {
                message,
                ..refusal.into()
            },
            Failure::Constraint(ConstraintError::NotFollowed(_)) => Self {
                param: Some("response_format".to_owned()),
                ..Self::new(StatusCode::BAD_REQUEST, "constraint_failed", message)
            },
            _ => Self::internal(message),
        }
    }
}

impl From<TemplateError> for ApiError {
    fn from(error: TemplateError) -> Self {
        let refused = |message: String| Self {
            code: "template_failed",
            ..Self::field("messages", message)
        };
        match error {
            TemplateError::Syntax { .. } | TemplateError::TooLarge { .. } => {
                Self::internal("the model's chat template cannot be used")
            }
            TemplateError::Raised { message } => refused(format!(
                "the model's chat template refuses these messages, in its own words: {message}"
            )),
            TemplateError::Failed { .. } => refused(
                "the model's chat template fails on these messages; it may not know one of their \
                 roles, their order, or a variable of `chat_template_kwargs`"
                    .to_owned(),
            ),
            error => refused(error.to_string()),
        }
    }
}

impl From<PromptError> for ApiError {
    fn from(error: PromptError) -> Self {
        match error {
            PromptError::Template(error) => error.into(),
            error => Self::field("messages", error.to_string()),
        }
    }
}

impl From<TokenizerError> for ApiError {
    fn from(error: TokenizerError) -> Self {
        if let TokenizerError::OutOfMemory(refused) = error {
            return refused.into();
        }
        let too_long = matches!(
            error,
            TokenizerError::TooLong { .. } | TokenizerError::TooManyTokens { .. }
        );
        let message = match &error {
            TokenizerError::PreTokenizer { .. } => {
                "the model's tokenizer gives up on this text; send it in smaller parts".to_owned()
            }
            error => error.to_string(),
        };
        let refused = Self::field("prompt", message);
        match too_long {
            true => Self {
                code: "context_length_exceeded",
                ..refused
            },
            false => refused,
        }
    }
}
