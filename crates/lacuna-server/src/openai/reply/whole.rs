//! A reply that is sent whole: gathered in memory of the account, and written once.
//!
//! How long it becomes is for the client and the model to say, so memory is taken from the account
//! as it grows, and held until the last byte has left. Log-probabilities, of which one token may have
//! twenty, are gathered as text: as values they would take ten times as much.

use std::collections::TryReserveError;
use std::io;

use axum::body::{Body, Bytes};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use lacuna_engine::{Event, HeldMemory};
use lacuna_pages::ByteLength;
use serde::Serialize;
use serde_json::Value;
use serde_json::value::RawValue;

use super::{
    ChoiceText, Content, Dialect, Finish, Form, Message, Part, Prompted, Reader, broken_off,
};
use crate::http::body::Bodies;
use crate::http::error::ApiError;
use crate::openai::logprobs::{PromptScores, Scores, ScoresText};
use crate::openai::streams::Streams;
use crate::structured::calls::Call;

/// Memory for one reply.
struct ReplyMemory<'a> {
    bodies: &'a Bodies,
    held: Option<HeldMemory>,
    /// Bytes that the request itself holds for its reply.
    free: usize,
}

/// One choice as far as it has come.
#[derive(Debug)]
struct Gathered {
    reasoning: String,
    text: String,
    calls: Vec<Call>,
    scores: Scores,
    finish: Option<Finish>,
}

#[derive(Serialize)]
struct Whole<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: Vec<ChoiceText<'a>>,
    usage: Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<&'a RawValue>,
}

/// Waits for the end and sends everything at once.
pub(super) async fn respond(mut streams: Streams, form: &Form) -> Result<Response, ApiError> {
    let mut reader = form.reader();
    let mut memory = ReplyMemory::new(form);
    let choice = || Gathered::new(&form.dialect);
    let mut gathered: Vec<Gathered> = std::iter::repeat_with(choice)
        .take(form.choices())
        .collect();
    let mut bytes = 0;
    while !reader.is_finished() {
        let (prompt, event) = streams.recv().await.ok_or_else(broken_off)?;
        bytes += text_bytes(&event);
        if let Some(part) = reader.read(prompt, event)? {
            let choice = &mut gathered[part.choice];
            let before = choice.scores.bytes();
            choice.append(part, form)?;
            bytes += choice.scores.bytes() - before;
        }
        memory.cover(ReplyMemory::GROWING * bytes).await?;
    }
    let (body, memory) = write(form, gathered, &reader, bytes, memory).await?;
    // What the engine held for the prompt's scores is in the reply now.
    drop(streams);
    let json = [(header::CONTENT_TYPE, "application/json")];
    let body = Bytes::from_owner(Sent {
        body,
        _memory: memory,
    });
    Ok((json, Body::from(body)).into_response())
}

/// The reply's bytes, and the memory for them, until the last has been handed to the system.
struct Sent {
    body: Vec<u8>,
    _memory: Option<HeldMemory>,
}

impl AsRef<[u8]> for Sent {
    fn as_ref(&self) -> &[u8] {
        &self.body
    }
}

/// The reply as JSON, in memory that is held for it.
async fn write(
    form: &Form,
    mut gathered: Vec<Gathered>,
    reader: &Reader,
    bytes: usize,
    mut memory: ReplyMemory<'_>,
) -> Result<(Vec<u8>, Option<HeldMemory>), ApiError> {
    let scores: Vec<_> = gathered
        .iter_mut()
        .map(|choice| std::mem::take(&mut choice.scores).close())
        .collect();
    let prompts = form.prompt_scores(reader)?;
    let whole = form.whole(&gathered, scores, &prompts, reader);
    let mut length = Length(0);
    serde_json::to_writer(&mut length, &whole).map_err(unwritable)?;
    memory.cover(bytes + length.0).await?;
    let mut body = Vec::new();
    body.try_reserve_exact(length.0)?;
    serde_json::to_writer(&mut body, &whole).map_err(unwritable)?;
    drop(whole);
    drop((gathered, prompts));
    Ok((body, memory.keep(length.0)))
}

fn unwritable(error: impl std::error::Error) -> ApiError {
    ApiError::internal(format!("the reply could not be written: {error}"))
}

/// Counts what is written to it.
struct Length(usize);

impl io::Write for Length {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 += bytes.len();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Bytes of text that an event adds.
fn text_bytes(event: &Event) -> usize {
    match event {
        Event::Token { text, .. } | Event::Finished { text, .. } => text.len(),
        _ => 0,
    }
}

impl<'a> ReplyMemory<'a> {
    /// A text that grows by doubling takes three times its length at the moment it is copied.
    const GROWING: usize = 3;
    /// Taken at a time, so that not every token asks, and that there is always some in advance: what
    /// one token adds is less.
    const STEP: usize = 32 << 10;
    /// What each choice's share of the request's own memory has for the text of its reply.
    const FREE: usize = 4 << 10;

    fn new(form: &'a Form) -> Self {
        Self {
            bodies: &form.bodies,
            held: None,
            free: Self::FREE * form.choices(),
        }
    }

    /// Takes what is missing of `bytes`, waiting for it as long as a request may.
    async fn cover(&mut self, bytes: usize) -> Result<(), ApiError> {
        let held = self.held.as_ref().map_or(0, HeldMemory::bytes);
        if bytes <= held + self.free {
            return Ok(());
        }
        let wanted = (bytes - self.free).next_multiple_of(Self::STEP) + Self::STEP;
        // The other half is for requests to go on with.
        let limit = ByteLength::new(self.bodies.memory_limit().get() / 2);
        if wanted as u64 > limit.get() {
            return Err(ApiError::new(
                StatusCode::PAYLOAD_TOO_LARGE,
                "reply_too_large",
                format!(
                    "the reply takes more than {limit}, half of the memory that requests may hold together; \
                     ask for a stream, or for fewer tokens, choices or log-probabilities"
                ),
            ));
        }
        let more = self.bodies.take(wanted - held).await?;
        match &mut self.held {
            Some(held) => held.merge(more),
            none => *none = Some(more),
        }
        Ok(())
    }

    /// What is needed for `bytes` and no more.
    fn keep(self, bytes: usize) -> Option<HeldMemory> {
        let mut held = self.held?;
        Some(held.split(bytes))
    }
}

impl Gathered {
    fn new(dialect: &Dialect) -> Self {
        Self {
            reasoning: String::new(),
            text: String::new(),
            calls: Vec::new(),
            scores: match dialect {
                Dialect::Chat { .. } => Scores::of_chat(),
                Dialect::Text => Scores::of_text(),
            },
            finish: None,
        }
    }

    fn append(&mut self, part: Part, form: &Form) -> Result<(), TryReserveError> {
        self.reasoning.try_reserve(part.reasoning.len())?;
        self.reasoning += &part.reasoning;
        self.text.try_reserve(part.text.len())?;
        self.text += &part.text;
        self.calls.extend(part.calls);
        for scored in &part.scored {
            self.scores.push(&form.model, scored)?;
        }
        self.finish = part.finish.or(self.finish.take());
        Ok(())
    }
}

impl Form {
    /// For each prompt its scores, if they are wanted beside the reply.
    fn prompt_scores(
        &self,
        reader: &Reader,
    ) -> Result<Vec<Option<Box<RawValue>>>, TryReserveError> {
        let Some(top) = self.prompt_logprobs else {
            return Ok(vec![None; self.prompts.len()]);
        };
        let one = |prompt: &Prompted| {
            let mut scores = PromptScores::new(top);
            for scored in &prompt.scored {
                scores.push(&self.model, scored)?;
            }
            Ok(Some(scores.close()))
        };
        reader.prompts.iter().map(one).collect()
    }

    fn whole<'a>(
        &'a self,
        gathered: &'a [Gathered],
        scores: Vec<Option<ScoresText>>,
        prompts: &'a [Option<Box<RawValue>>],
        reader: &Reader,
    ) -> Whole<'a> {
        let chat = matches!(self.dialect, Dialect::Chat { .. });
        let choices = gathered.iter().zip(scores).enumerate();
        let choices = choices.map(|(index, (choice, logprobs))| ChoiceText {
            index,
            content: match chat {
                true => Content::Message(choice.message()),
                false => Content::Text(&choice.text),
            },
            logprobs,
            finish_reason: choice.finish.as_ref().map(|finish| finish.reason),
            stop_reason: choice.finish.as_ref().map(|finish| &finish.stop),
            prompt_logprobs: match chat {
                true => None,
                false => prompts[index / self.choices].as_deref(),
            },
        });
        Whole {
            id: &self.id,
            object: if chat {
                "chat.completion"
            } else {
                "text_completion"
            },
            created: self.created,
            model: &self.model_name,
            choices: choices.collect(),
            usage: reader.figures.json(),
            prompt_logprobs: match prompts {
                [prompt] if chat => prompt.as_deref(),
                _ => None,
            },
        }
    }
}

impl Gathered {
    fn message(&self) -> Message<'_> {
        let shown = self.calls.is_empty() || !self.text.is_empty();
        Message {
            role: "assistant",
            content: shown.then_some(self.text.as_str()),
            reasoning_content: &self.reasoning,
            refusal: (),
            tool_calls: self.calls.iter().map(Call::json).collect(),
        }
    }
}
