//! A reply as lines of JSON, or as one.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::response::Response;
use serde::Serialize;
use serde_json::value::RawValue;

use crate::app::App;
use crate::date;
use crate::http::error::{ApiError, Interface};
use crate::openai::logprobs::{Scores, TokenNames};
use crate::reply::events::{Writer, json};
use crate::reply::streams::Streams;
use crate::reply::{Ended, Figures, Finish, Part, Reader, whole};
use crate::structured::calls::Call;

/// Which of the two forms a reply has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Chat,
    Generate,
}

/// What is the same in every part of a reply, and when it was asked for.
#[derive(Debug)]
pub(super) struct Form {
    model: Arc<str>,
    kind: Kind,
    asked: Instant,
}

/// A reply, or what a part adds to it.
#[derive(Serialize)]
pub(super) struct Line<'a> {
    model: &'a str,
    created_at: String,
    #[serde(flatten)]
    said: Said<'a>,
    done: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    done_reason: Option<&'static str>,
    #[serde(flatten)]
    figures: Option<FiguresText>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Said<'a> {
    Chat {
        message: Message<'a>,
    },
    Generate {
        response: &'a str,
        #[serde(skip_serializing_if = "str::is_empty")]
        thinking: &'a str,
    },
}

#[derive(Serialize)]
struct Message<'a> {
    role: &'static str,
    content: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    thinking: &'a str,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<CallText<'a>>,
}

#[derive(Serialize)]
struct CallText<'a> {
    id: &'a str,
    function: FunctionText<'a>,
}

#[derive(Serialize)]
struct FunctionText<'a> {
    name: &'a str,
    arguments: &'a RawValue,
}

/// Tokens, and nanoseconds.
#[derive(Serialize)]
struct FiguresText {
    total_duration: u64,
    load_duration: u64,
    prompt_eval_count: usize,
    prompt_eval_duration: u64,
    eval_count: usize,
    eval_duration: u64,
}

impl Form {
    /// A reply to a request that comes now.
    pub(super) fn new(app: &App, kind: Kind) -> Self {
        Self {
            model: Arc::clone(&app.model_name),
            kind,
            asked: Instant::now(),
        }
    }

    /// That the model is there, or goes.
    pub(super) fn without_reply(&self, unloads: bool) -> Line<'_> {
        Line {
            done: true,
            done_reason: Some(if unloads { "unload" } else { "load" }),
            ..self.line("", "", Vec::new())
        }
    }

    /// Waits for the end and sends everything at once.
    pub(super) async fn send(
        self,
        app: &App,
        streams: Streams,
        mut reader: Reader,
    ) -> Result<Response, ApiError> {
        let bodies = app.bodies();
        let gathered = whole::gather(
            streams,
            &mut reader,
            Scores::of_chat,
            TokenNames::texts(app.model()),
            bodies,
        )
        .await?;
        let (choices, memory) = gathered;
        let [choice] = choices.as_slice() else {
            return Err(ApiError::internal("a reply is one choice"));
        };
        let calls = calls(&choice.calls)?;
        let line = Line {
            done: true,
            done_reason: choice.finish.as_ref().map(done_reason),
            figures: Some(self.figures(&reader.figures)),
            ..self.line(&choice.reasoning, &choice.text, calls)
        };
        let written = memory.write(line).await?;
        drop(choices);
        Ok(written.respond())
    }

    fn line<'a>(
        &'a self,
        thinking: &'a str,
        content: &'a str,
        tool_calls: Vec<CallText<'a>>,
    ) -> Line<'a> {
        Line {
            model: &self.model,
            created_at: date::now(),
            said: match self.kind {
                Kind::Chat => Said::Chat {
                    message: Message {
                        role: "assistant",
                        content,
                        thinking,
                        tool_calls,
                    },
                },
                Kind::Generate => Said::Generate {
                    response: content,
                    thinking,
                },
            },
            done: false,
            done_reason: None,
            figures: None,
        }
    }

    fn figures(&self, figures: &Figures) -> FiguresText {
        let nanoseconds = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        FiguresText {
            total_duration: nanoseconds(self.asked.elapsed()),
            // The model is there already.
            load_duration: 0,
            prompt_eval_count: figures.prompt_tokens,
            prompt_eval_duration: nanoseconds(figures.prompt_time),
            eval_count: figures.generated_tokens,
            // Of one token it is none, and clients divide by it.
            eval_duration: nanoseconds(figures.generation_time).max(1),
        }
    }
}

fn done_reason(finish: &Finish) -> &'static str {
    match finish.reason {
        Ended::MaxTokens | Ended::ContextFull => "length",
        Ended::Calls | Ended::Stop => "stop",
    }
}

fn calls(calls: &[Call]) -> Result<Vec<CallText<'_>>, ApiError> {
    let calls = calls.iter().map(|call| {
        let arguments = serde_json::from_str(call.arguments());
        Ok(CallText {
            id: call.id(),
            function: FunctionText {
                name: call.name(),
                arguments: arguments
                    .map_err(|_| ApiError::internal("a call's arguments are JSON"))?,
            },
        })
    });
    calls.collect()
}

/// A reply as a stream of lines.
pub(super) struct Lines {
    form: Form,
    finish: Option<Finish>,
}

impl Lines {
    pub(super) fn new(form: Form) -> Self {
        Self { form, finish: None }
    }
}

fn write(line: &impl Serialize, out: &mut String) {
    json(out, line);
    out.push('\n');
}

impl Writer for Lines {
    const CONTENT_TYPE: &'static str = "application/x-ndjson";

    fn open(&mut self, _: &Reader, _: &mut String) -> Result<(), ApiError> {
        Ok(())
    }

    fn part(&mut self, part: Part, _: &Reader, out: &mut String) -> Result<(), ApiError> {
        let calls = calls(&part.calls)?;
        let shows = !part.text.is_empty() || !part.reasoning.is_empty() || !calls.is_empty();
        if shows {
            write(&self.form.line(&part.reasoning, &part.text, calls), out);
        }
        self.finish = part.finish.or(self.finish.take());
        Ok(())
    }

    fn close(&mut self, reader: &Reader, out: &mut String) -> Result<(), ApiError> {
        let line = Line {
            done: true,
            done_reason: self.finish.as_ref().map(done_reason),
            figures: Some(self.form.figures(&reader.figures)),
            ..self.form.line("", "", Vec::new())
        };
        write(&line, out);
        Ok(())
    }

    fn fail(&mut self, error: &ApiError, out: &mut String) {
        write(&error.body_for(Interface::Ollama), out);
    }
}
