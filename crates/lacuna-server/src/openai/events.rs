//! A reply as a stream of server-sent events, one for each token that has something to show.
//!
//! Dropping the body, as happens when the client goes away, drops the engine's stream and so
//! cancels the request.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::Body;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use lacuna_engine::Event;
use serde::Serialize;
use serde_json::{Value, json};

use crate::http::error::ApiError;
use crate::openai::parameters::UsageChunks;
use crate::openai::reply::{ChoiceText, Content, Dialect, Form, Part, Reader, broken_off};
use crate::openai::streams::Streams;

struct Events {
    streams: Streams,
    /// Events that were waited for before the stream began.
    waiting: VecDeque<(usize, Event)>,
    chunks: Chunks,
    ended: bool,
}

/// Writes chunks in the form a reply has.
struct Chunks {
    form: Form,
    reader: Reader,
    usage: UsageChunks,
    /// Per choice, the character at which its next token begins.
    offsets: Vec<usize>,
}

/// Starts the stream once the first token is there, so that what fails before is still an error
/// with its own status.
pub(crate) async fn respond(
    mut streams: Streams,
    form: Form,
    usage: UsageChunks,
) -> Result<Response, ApiError> {
    let mut waiting = VecDeque::new();
    loop {
        let (prompt, event) = streams.recv().await.ok_or_else(broken_off)?;
        if let Event::Failed(failure) = event {
            return Err(failure.into());
        }
        let begins = matches!(event, Event::Token { .. } | Event::Finished { .. });
        waiting.push_back((prompt, event));
        if begins {
            break;
        }
    }
    let chunks = Chunks {
        reader: form.reader(),
        offsets: vec![0; form.choices()],
        form,
        usage,
    };
    let events = Events {
        streams,
        waiting,
        chunks,
        ended: false,
    };
    let headers = [
        (header::CONTENT_TYPE, "text/event-stream"),
        (header::CACHE_CONTROL, "no-cache"),
    ];
    Ok((headers, Body::from_stream(events)).into_response())
}

impl futures_core::Stream for Events {
    type Item = Result<String, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        while !this.ended {
            let event = match this.waiting.pop_front() {
                Some(event) => Some(event),
                None => std::task::ready!(this.streams.poll_recv(context)),
            };
            let mut out = String::new();
            this.ended = this.chunks.write(event, &mut out);
            if !out.is_empty() {
                return Poll::Ready(Some(Ok(out)));
            }
        }
        Poll::Ready(None)
    }
}

impl Chunks {
    /// Writes what `event` adds, and says whether it was the last.
    fn write(&mut self, event: Option<(usize, Event)>, out: &mut String) -> bool {
        let opens = matches!(event, Some((_, Event::Started { .. })));
        let read = event
            .ok_or_else(broken_off)
            .and_then(|(prompt, event)| self.reader.read(prompt, event));
        if opens {
            self.open(out);
        }
        match read.and_then(|part| self.part(part, out)) {
            Ok(()) => {}
            Err(error) => {
                data(out, &error.body());
                return true;
            }
        }
        if !self.reader.is_finished() {
            return false;
        }
        if self.usage != UsageChunks::None {
            data(out, &self.chunk(None));
        }
        out.push_str("data: [DONE]\n\n");
        true
    }

    /// Chats begin with the role of whoever speaks.
    fn open(&self, out: &mut String) {
        if matches!(self.form.dialect, Dialect::Text) {
            return;
        }
        for index in 0..self.form.choices() {
            let delta = json!({"role": "assistant", "content": ""});
            let choice = ChoiceText {
                index,
                content: Content::Delta(delta),
                logprobs: None,
                finish_reason: None,
                stop_reason: None,
                prompt_logprobs: None,
            };
            data(out, &self.chunk(Some(choice)));
        }
    }

    fn part(&mut self, part: Option<Part>, out: &mut String) -> Result<(), ApiError> {
        let Some(part) = part else { return Ok(()) };
        let silent = part.text.is_empty() && part.reasoning.is_empty();
        let shows = !silent || !part.calls.is_empty() || !part.scored.is_empty();
        if !shows && part.finish.is_none() {
            return Ok(());
        }
        let offset = &mut self.offsets[part.choice];
        let (logprobs, next) = self.form.scores(&part, *offset)?;
        *offset = next;
        let choice = ChoiceText {
            index: part.choice,
            content: match self.form.dialect {
                Dialect::Chat { .. } => Content::Delta(self.delta(&part)),
                Dialect::Text => Content::Text(&part.text),
            },
            logprobs,
            finish_reason: part.finish.as_ref().map(|finish| finish.reason),
            stop_reason: part.finish.as_ref().map(|finish| &finish.stop),
            prompt_logprobs: None,
        };
        data(out, &self.chunk(Some(choice)));
        Ok(())
    }

    fn delta(&self, part: &Part) -> Value {
        let mut delta = json!({});
        if !part.reasoning.is_empty() {
            delta["reasoning_content"] = part.reasoning.as_str().into();
        }
        let others = !part.reasoning.is_empty() || !part.calls.is_empty();
        if !part.text.is_empty() || (!others && part.finish.is_none()) {
            delta["content"] = part.text.as_str().into();
        }
        if !part.calls.is_empty() {
            let first = self.reader.called(part.choice) - part.calls.len();
            let calls = part.calls.iter().enumerate();
            delta["tool_calls"] = calls
                .map(|(offset, call)| {
                    let mut call = call.json();
                    call["index"] = (first + offset).into();
                    call
                })
                .collect();
        }
        delta
    }

    /// An event's JSON: of one choice, or the last one, which has the figures alone.
    fn chunk<'a>(&'a self, choice: Option<ChoiceText<'a>>) -> Chunk<'a> {
        let figures = || self.reader.figures.json();
        Chunk {
            id: &self.form.id,
            object: match self.form.dialect {
                Dialect::Chat { .. } => "chat.completion.chunk",
                Dialect::Text => "text_completion",
            },
            created: self.form.created,
            model: &self.form.model_name,
            usage: match (self.usage, &choice) {
                (UsageChunks::None, _) => None,
                (UsageChunks::Last, Some(_)) => Some(Value::Null),
                (UsageChunks::Last, None) | (UsageChunks::Every, _) => Some(figures()),
            },
            choices: choice.into_iter().collect(),
        }
    }
}

#[derive(Serialize)]
struct Chunk<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: Vec<ChoiceText<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Value>,
}

/// One event. JSON has no line feeds of its own, so it is one line.
fn data(out: &mut String, value: &impl Serialize) {
    let json = serde_json::to_string(value);
    out.push_str("data: ");
    out.push_str(&json.unwrap_or_else(|_| unreachable!("every key is a text")));
    out.push_str("\n\n");
}
