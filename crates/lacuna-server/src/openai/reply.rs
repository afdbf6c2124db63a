//! From a request's events to its reply: what is the same whether it is sent whole or as a stream.

use std::sync::Arc;

use axum::Json;
use axum::response::{IntoResponse, Response};
use lacuna_engine::{Event, FinishReason, Request, Stream};
use lacuna_models::Model;
use serde_json::{Value, json};

use crate::app::{App, seconds_now};
use crate::http::error::ApiError;
use crate::http::ignored::Ignored;
use crate::openai::events;
use crate::openai::logprobs::{self, Scored};
use crate::openai::parameters::Delivery;
use crate::structured::calls::{Call, CallReader, Piece};

/// Which of the two interfaces the reply is for.
#[derive(Debug, Clone)]
pub(crate) enum Dialect {
    /// Chats, with what finds tool calls in the text when tools are offered.
    Chat { calls: Option<CallReader> },
    /// Completions.
    Text,
}

/// What is the same in every part of a reply.
#[derive(Debug)]
pub(crate) struct Form {
    pub(crate) id: String,
    pub(crate) created: u64,
    pub(crate) model_name: Arc<str>,
    pub(crate) dialect: Dialect,
    delivery: Delivery,
    choices: usize,
    model: Arc<Model>,
    ignored: Ignored,
}

/// What an event adds to one choice.
#[derive(Debug, Default)]
pub(crate) struct Part {
    pub(crate) choice: usize,
    pub(crate) text: String,
    pub(crate) calls: Vec<Call>,
    pub(crate) scored: Vec<Scored>,
    pub(crate) finish: Option<&'static str>,
}

/// Tokens of a reply.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Figures {
    prompt_tokens: usize,
    reused_tokens: usize,
    generated_tokens: usize,
}

/// Turns events into parts.
#[derive(Debug)]
pub(crate) struct Reader {
    choices: Vec<Option<CallReader>>,
    unfinished: usize,
    called: Vec<usize>,
    pub(crate) figures: Figures,
}

/// Sends the reply to a request as its form says.
pub(crate) async fn send(stream: Stream, form: Form) -> Result<Response, ApiError> {
    let ignored = form.ignored.clone();
    let mut response = match form.delivery {
        Delivery::Whole => Json(collect(stream, &form).await?).into_response(),
        Delivery::Stream { usage } => events::respond(stream, form, usage).await?,
    };
    ignored.attach(&mut response);
    Ok(response)
}

/// Waits for the end and puts the parts together.
async fn collect(mut stream: Stream, form: &Form) -> Result<Value, ApiError> {
    let mut reader = form.reader();
    let mut whole: Vec<Part> = (0..form.choices).map(Part::of).collect();
    while !reader.is_finished() {
        let event = stream.recv().await.ok_or_else(broken_off)?;
        if let Some(part) = reader.read(event)? {
            whole[part.choice].append(part);
        }
    }
    Ok(form.whole(&whole, reader.figures))
}

/// The engine went away before the request was done.
pub(crate) fn broken_off() -> ApiError {
    ApiError::internal("the engine stopped before the reply was finished")
}

impl Part {
    fn of(choice: usize) -> Self {
        Self {
            choice,
            ..Self::default()
        }
    }

    fn append(&mut self, other: Self) {
        self.text += &other.text;
        self.calls.extend(other.calls);
        self.scored.extend(other.scored);
        self.finish = other.finish.or(self.finish);
    }
}

impl Reader {
    /// What `event` adds. Choices are checked against the request's number.
    pub(crate) fn read(&mut self, event: Event) -> Result<Option<Part>, ApiError> {
        let part = match event {
            Event::Started { .. } => return Ok(None),
            Event::Failed(failure) => return Err(failure.into()),
            Event::Token {
                choice,
                token,
                text,
                logprobs,
            } => {
                let mut part = Part::of(choice);
                part.scored
                    .extend(logprobs.map(|logprobs| Scored { token, logprobs }));
                self.add(&mut part, |reader| reader.push(&text), &text);
                part
            }
            Event::Finished {
                choice,
                reason,
                text,
                usage,
            } => {
                let mut part = Part::of(choice);
                self.add(&mut part, |reader| reader.finish(&text), &text);
                part.finish = Some(self.finish_reason(choice, reason));
                self.figures.prompt_tokens = usage.prompt_tokens;
                self.figures.reused_tokens = usage.reused_tokens;
                self.figures.generated_tokens += usage.generated_tokens;
                self.unfinished -= 1;
                part
            }
        };
        Ok(Some(part))
    }

    /// Adds text to a part, through what looks for calls in it if anything does.
    fn add(
        &mut self,
        part: &mut Part,
        read: impl FnOnce(&mut CallReader) -> Vec<Piece>,
        text: &str,
    ) {
        let Some(reader) = &mut self.choices[part.choice] else {
            part.text += text;
            return;
        };
        for piece in read(reader) {
            match piece {
                Piece::Text(text) => part.text += &text,
                Piece::Call(call) => part.calls.push(call),
            }
        }
        self.called[part.choice] += part.calls.len();
    }

    fn finish_reason(&self, choice: usize, reason: FinishReason) -> &'static str {
        match reason {
            FinishReason::MaxTokens | FinishReason::ContextFull => "length",
            _ if self.called[choice] > 0 => "tool_calls",
            _ => "stop",
        }
    }

    /// Calls that choice has made so far.
    pub(crate) fn called(&self, choice: usize) -> usize {
        self.called[choice]
    }

    pub(crate) fn is_finished(&self) -> bool {
        self.unfinished == 0
    }
}

impl Figures {
    pub(crate) fn json(self) -> Value {
        json!({
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.generated_tokens,
            "total_tokens": self.prompt_tokens + self.generated_tokens,
            "prompt_tokens_details": {"cached_tokens": self.reused_tokens},
        })
    }
}

impl Form {
    pub(crate) fn new(
        app: &App,
        id: String,
        dialect: Dialect,
        delivery: Delivery,
        request: &Request,
    ) -> Self {
        Self {
            id,
            created: seconds_now(),
            model_name: Arc::clone(&app.model_name),
            dialect,
            delivery,
            choices: request.choices.get(),
            model: Arc::clone(app.model()),
            ignored: Ignored::default(),
        }
    }

    /// The same, for a request of which that has no effect.
    pub(crate) fn ignoring(self, ignored: Ignored) -> Self {
        Self { ignored, ..self }
    }

    pub(crate) fn reader(&self) -> Reader {
        let calls = match &self.dialect {
            Dialect::Chat { calls } => calls.clone(),
            Dialect::Text => None,
        };
        Reader {
            choices: vec![calls; self.choices],
            unfinished: self.choices,
            called: vec![0; self.choices],
            figures: Figures::default(),
        }
    }

    pub(crate) fn choices(&self) -> usize {
        self.choices
    }

    fn whole(&self, parts: &[Part], figures: Figures) -> Value {
        let (object, choices): (_, Vec<Value>) = match self.dialect {
            Dialect::Chat { .. } => (
                "chat.completion",
                parts.iter().map(|part| self.message(part)).collect(),
            ),
            Dialect::Text => (
                "text_completion",
                parts.iter().map(|part| self.text(part, 0).0).collect(),
            ),
        };
        json!({
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": &*self.model_name,
            "choices": choices,
            "usage": figures.json(),
        })
    }

    fn message(&self, part: &Part) -> Value {
        let calls: Vec<Value> = part.calls.iter().map(|call| call.json()).collect();
        let content = (calls.is_empty() || !part.text.is_empty()).then_some(&part.text);
        let mut message = json!({"role": "assistant", "content": content, "refusal": null});
        if !calls.is_empty() {
            message["tool_calls"] = Value::Array(calls);
        }
        json!({
            "index": part.choice,
            "message": message,
            "logprobs": self.chat_logprobs(part),
            "finish_reason": part.finish,
        })
    }

    pub(crate) fn chat_logprobs(&self, part: &Part) -> Option<Value> {
        (!part.scored.is_empty()).then(|| logprobs::for_chat(&self.model, &part.scored))
    }

    /// A part of a completion whose text begins at character `offset`, and where the next one does.
    pub(crate) fn text(&self, part: &Part, offset: usize) -> (Value, usize) {
        let (scores, next) = if part.scored.is_empty() {
            (Value::Null, offset)
        } else {
            logprobs::for_text(&self.model, &part.scored, offset)
        };
        let choice = json!({
            "index": part.choice,
            "text": part.text,
            "logprobs": scores,
            "finish_reason": part.finish,
        });
        (choice, next)
    }
}
