//! Chat templates: from messages to the text a model was trained on.
//!
//! Templates are Jinja, run as `apply_chat_template` of `transformers` runs them: blocks are
//! trimmed, `raise_exception`, `strftime_now` and Python's string and dictionary methods exist, and
//! `tojson` writes what `json.dumps` writes. A template comes with a model and is not trusted: its
//! instructions, its recursion and its output are bounded.

mod clock;
mod guard;
mod json;
mod marks;
mod parts;
mod python;
mod system;

use std::borrow::Cow;
use std::sync::OnceLock;
use std::time::SystemTime;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, Error, ErrorKind, State, Value};
use serde::{Deserialize, Serialize};
use serde_json::Map;
use thiserror::Error as ThisError;

use crate::tokenizer::{MarkedText, Seen, Special, StandIns, Tokenizer};

/// Bytes of source; the largest published templates have some 30 kB.
const MAX_SOURCE_BYTES: usize = 1 << 20;
/// Depth of nested blocks, calls and loops together.
const MAX_DEPTH: usize = 100;
/// The name in the environment, and so in messages about lines.
const NAME: &str = "chat_template";

/// A chat template could not be compiled or rendered.
#[derive(Debug, ThisError)]
#[non_exhaustive]
pub enum TemplateError {
    /// It is not Jinja as this crate reads it.
    #[error(
        "the chat template does not compile: {detail}; another one can be given in its place, or \
         the prompt can be given raw"
    )]
    Syntax {
        /// What and where.
        detail: String,
    },

    /// It is larger than any template.
    #[error("the chat template has {bytes} bytes, more than the {limit} that are accepted")]
    TooLarge {
        /// Its size.
        bytes: usize,
        /// The limit.
        limit: usize,
    },

    /// It refuses these messages, in its own words.
    #[error("the chat template refuses the messages: {message}")]
    Raised {
        /// What it gave to `raise_exception`.
        message: String,
    },

    /// It takes more time, text or depth than any template needs.
    #[error(
        "the chat template was stopped: it exceeded the limit on {resource}; a template that needs \
         more is broken or hostile"
    )]
    Limit {
        /// `work` (instructions, and bytes copied) or `recursion`.
        resource: &'static str,
    },

    /// What it is given leaves no character to mark texts with.
    #[error(
        "the messages have every character that could mark where they begin and end; leave some of \
         U+02EF to U+02FF and U+1D800 to U+1D9FF out"
    )]
    Unmarkable,

    /// It failed in some other way.
    #[error("the chat template failed: {detail}")]
    Failed {
        /// What and where.
        detail: String,
    },
}

impl TemplateError {
    /// The same, in the words that are meant.
    fn plain(self, stand_ins: &StandIns) -> TemplateError {
        let plain = |text: String| stand_ins.plain(&text).into_owned();
        match self {
            TemplateError::Raised { message } => TemplateError::Raised {
                message: plain(message),
            },
            TemplateError::Failed { detail } => TemplateError::Failed {
                detail: plain(detail),
            },
            other => other,
        }
    }
}

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant`, `tool`, or what else the template knows.
    pub role: String,
    /// Text, or whatever else the template takes, such as a list of parts.
    #[serde(default)]
    pub content: serde_json::Value,
    /// Everything else, such as `tool_calls` or `reasoning_content`, under its own name.
    #[serde(flatten)]
    pub more: Map<String, serde_json::Value>,
}

impl Message {
    /// A message of plain text.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Message {
        let content = serde_json::Value::String(content.into());
        Message {
            role: role.into(),
            content,
            more: Map::new(),
        }
    }
}

/// Whether the text ends where the model is to answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GenerationPrompt {
    /// It ends with the last message.
    Omit,
    /// It ends with the opening of an answer.
    #[default]
    Add,
}

/// What a template is rendered with.
#[derive(Clone, Debug, Default)]
pub struct Chat<'a> {
    /// The conversation, oldest first.
    pub messages: &'a [Message],
    /// Whether to open an answer.
    pub generation_prompt: GenerationPrompt,
    /// The text of the beginning-of-sequence token.
    pub bos_token: Option<&'a str>,
    /// The text of the end-of-sequence token.
    pub eos_token: Option<&'a str>,
    /// Descriptions of the tools that the model may call.
    pub tools: Option<&'a [serde_json::Value]>,
    /// Further variables, such as `enable_thinking`. The names above win over them.
    pub variables: Map<String, serde_json::Value>,
    /// What `strftime_now` takes for now, in UTC; without it the clock is read.
    pub now: Option<SystemTime>,
}

/// Where a template is from, to be reported to the user.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum TemplateOrigin {
    /// The model brings it, or the user gave it.
    Given,
    /// There is none: the texts of the messages follow one another, each on a new line.
    Concatenation,
}

/// A compiled chat template.
///
/// # Examples
///
/// ```
/// # use lacuna_text::template::{Chat, ChatTemplate, Message, TemplateError};
/// let template = ChatTemplate::compile(
///     "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>",
/// )?;
/// let messages = [Message::new("user", "Hello")];
/// let chat = Chat { messages: &messages, ..Chat::default() };
/// assert_eq!(template.render(&chat)?, "<user>Hello<assistant>");
/// # Ok::<(), TemplateError>(())
/// ```
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Option<Environment<'static>>,
    /// What its source holds that must not be taken for a mark.
    seen: Seen,
    /// Whether it has a place for a system message, once one was given.
    takes_system: OnceLock<bool>,
    /// Whether it writes the text of a message only from a list of parts.
    takes_parts_alone: OnceLock<bool>,
}

impl ChatTemplate {
    /// Compiles a template.
    pub fn compile(source: &str) -> Result<ChatTemplate, TemplateError> {
        let bytes = source.len();
        if bytes > MAX_SOURCE_BYTES {
            return Err(TemplateError::TooLarge {
                bytes,
                limit: MAX_SOURCE_BYTES,
            });
        }
        let syntax = |error: Error| TemplateError::Syntax {
            detail: error.to_string(),
        };
        let mut environment = environment().map_err(syntax)?;
        let mut seen = Seen::default();
        seen.candidates_in(source);
        let source = without_generation_marks(source).into_owned();
        guard::check_source(&source, environment.syntax()).map_err(syntax)?;
        environment
            .add_template_owned(NAME, source)
            .map_err(syntax)?;
        guard::finish(&mut environment).map_err(syntax)?;
        Ok(ChatTemplate {
            environment: Some(environment),
            seen,
            takes_system: OnceLock::new(),
            takes_parts_alone: OnceLock::new(),
        })
    }

    /// The stand-in for a model that brings no template; see [`TemplateOrigin::Concatenation`].
    pub fn concatenation() -> ChatTemplate {
        ChatTemplate {
            environment: None,
            seen: Seen::default(),
            takes_system: OnceLock::new(),
            takes_parts_alone: OnceLock::new(),
        }
    }

    /// The template that a model brings, or the stand-in.
    pub fn of(tokenizer: &Tokenizer) -> Result<ChatTemplate, TemplateError> {
        tokenizer
            .chat_template()
            .map_or_else(|| Ok(Self::concatenation()), Self::compile)
    }

    /// Where the template is from.
    pub fn origin(&self) -> TemplateOrigin {
        match self.environment {
            Some(_) => TemplateOrigin::Given,
            None => TemplateOrigin::Concatenation,
        }
    }

    /// How its output is to be encoded.
    ///
    /// A template writes its special tokens as text; [`render_marked`](Self::render_marked) tells
    /// them from what messages say.
    pub fn special(&self) -> Special {
        match self.origin() {
            TemplateOrigin::Given => Special::RENDERED,
            TemplateOrigin::Concatenation => Special::PROMPT,
        }
    }

    /// The text for a conversation.
    ///
    /// Where the template has no place for a system message, that is put before the first message of
    /// the user, a blank line between them.
    pub fn render(&self, chat: &Chat) -> Result<String, TemplateError> {
        match &self.environment {
            None => Ok(concatenate(chat.messages)),
            Some(environment) => {
                let given = given(chat, &self.placed(environment, chat));
                guard::render(environment, variables(chat, given, &StandIns::default()))
            }
        }
    }

    /// The messages as the template takes them: with none at the front that it has no place for, and their texts in parts
    /// where it would leave others out.
    fn placed<'a>(
        &self,
        environment: &Environment<'static>,
        chat: &Chat<'a>,
    ) -> Cow<'a, [Message]> {
        let render = |messages: &[Message]| {
            let probe = Chat {
                messages,
                bos_token: chat.bos_token,
                eos_token: chat.eos_token,
                ..Chat::default()
            };
            let given = given(&probe, messages);
            guard::render(environment, variables(&probe, given, &StandIns::default()))
        };
        let mut placed = Cow::Borrowed(chat.messages);
        let has_place = || system::has_place(render);
        if system::leads(chat.messages) && !self.takes_system.get_or_init(has_place) {
            placed = Cow::Owned(system::folded(chat.messages));
        }
        let alone = || parts::are_taken_alone(render);
        if parts::lack(&placed) && *self.takes_parts_alone.get_or_init(alone) {
            placed.to_mut().iter_mut().for_each(parts::wrap);
        }
        placed
    }

    /// The text for a conversation, of which `tokenizer` will take only the template's own words
    /// for special tokens: what messages, tools and variables say is text, whatever it looks like.
    pub fn render_marked(
        &self,
        chat: &Chat,
        tokenizer: &Tokenizer,
    ) -> Result<MarkedText, TemplateError> {
        let Some(environment) = &self.environment else {
            let text = concatenate(chat.messages);
            return Ok(MarkedText::new(text, StandIns::default(), self.special()));
        };
        let mut given = given(chat, &self.placed(environment, chat));
        let stand_ins = marks::mark(tokenizer.marker(), &self.seen, &mut given)?;
        let text = guard::render(environment, variables(chat, given, &stand_ins))
            .map_err(|error| error.plain(&stand_ins))?;
        Ok(MarkedText::new(text, stand_ins, self.special()))
    }
}

/// The environment of `apply_chat_template`.
fn environment() -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_syntax(
        SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build()?,
    );
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_recursion_limit(MAX_DEPTH);
    guard::install(&mut environment);
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    environment.add_function("joiner", minijinja_contrib::globals::joiner);
    Ok(environment)
}

/// Removes the `generation` marks, which only training uses, together with what trimming would.
fn without_generation_marks(source: &str) -> Cow<'_, str> {
    if !source.contains("generation") {
        return Cow::Borrowed(source);
    }
    let mut result = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(len) = rest[start + 2..].find("%}") else {
            break;
        };
        let end = start + 2 + len + 2;
        let inner = rest[start + 2..end - 2].trim_matches(['-', '+']).trim();
        result.push_str(&rest[..start]);
        match inner {
            "generation" | "endgeneration" => {
                // An `if` that always holds is trimmed exactly as the mark would be.
                let mark = rest[start..end].replace(
                    inner,
                    if inner == "generation" {
                        "if true"
                    } else {
                        "endif"
                    },
                );
                result.push_str(&mark);
            }
            _ => result.push_str(&rest[start..end]),
        }
        rest = &rest[end..];
    }
    result.push_str(rest);
    Cow::Owned(result)
}

/// The variables that others have written.
fn given(chat: &Chat, messages: &[Message]) -> Map<String, serde_json::Value> {
    let mut all = chat.variables.clone();
    let messages = messages
        .iter()
        .filter_map(|message| serde_json::to_value(message).ok());
    all.insert("messages".to_owned(), messages.collect());
    let tools = chat
        .tools
        .map_or(serde_json::Value::Null, |tools| tools.to_vec().into());
    all.insert("tools".to_owned(), tools);
    // Templates ask whether there are documents, and the reference hands them none.
    all.entry("documents").or_insert(serde_json::Value::Null);
    all
}

/// All variables: those, and ours.
fn variables(chat: &Chat, given: Map<String, serde_json::Value>, stand_ins: &StandIns) -> Value {
    let mut all = given;
    let add = chat.generation_prompt == GenerationPrompt::Add;
    all.insert("add_generation_prompt".to_owned(), add.into());
    for (name, token) in [("bos_token", chat.bos_token), ("eos_token", chat.eos_token)] {
        if let Some(token) = token {
            all.insert(name.to_owned(), token.into());
        }
    }
    all.insert(marks::VARIABLE.to_owned(), stand_ins.pairs().into());
    let now = clock::seconds(chat.now.unwrap_or_else(SystemTime::now));
    all.insert(clock::VARIABLE.to_owned(), now.into());
    Value::from(Serde(all))
}

/// The stand-in for a template: every text, one to a line.
fn concatenate(messages: &[Message]) -> String {
    let texts: Vec<Cow<str>> = messages
        .iter()
        .map(|message| text_of(&message.content))
        .collect();
    texts.join("\n")
}

/// The text of a message's content; of a list of parts, the texts of its parts.
fn text_of(content: &serde_json::Value) -> Cow<'_, str> {
    match content {
        serde_json::Value::String(text) => Cow::Borrowed(text),
        serde_json::Value::Array(parts) => parts
            .iter()
            .filter_map(|part| part.get("text")?.as_str())
            .collect::<String>()
            .into(),
        _ => Cow::Borrowed(""),
    }
}

/// Marks an error as the template's own, since the library's errors carry no type of ours.
#[derive(Debug, ThisError)]
#[error("{0}")]
struct Raised(String);

fn raise_exception(message: Value) -> Result<Value, Error> {
    let message = message.to_string();
    let error = Error::new(ErrorKind::InvalidOperation, message.clone());
    Err(error.with_source(Raised(message)))
}

fn strftime_now(state: &State, format: &str) -> Result<String, Error> {
    let seconds = state
        .lookup(clock::VARIABLE)
        .and_then(|now| i64::try_from(now).ok());
    clock::format(seconds.unwrap_or_default(), format)
}

/// What a library's error says in our terms.
fn failed(error: &Error) -> TemplateError {
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        if let Some(Raised(message)) = cause.downcast_ref() {
            return TemplateError::Raised {
                message: message.clone(),
            };
        }
        source = cause.source();
    }
    match error.kind() {
        ErrorKind::OutOfFuel => TemplateError::Limit { resource: "work" },
        _ if error
            .detail()
            .is_some_and(|detail| detail.contains("recursion limit")) =>
        {
            TemplateError::Limit {
                resource: "recursion",
            }
        }
        _ => TemplateError::Failed {
            detail: error.to_string(),
        },
    }
}
