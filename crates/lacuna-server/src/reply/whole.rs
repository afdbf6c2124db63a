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

use super::{Finish, Part, Reader, broken_off};
use crate::http::body::Bodies;
use crate::http::error::ApiError;
use crate::openai::logprobs::{Scores, TokenNames};
use crate::reply::streams::Streams;
use crate::structured::calls::Call;

/// One choice as far as it has come.
#[derive(Debug, Default)]
pub(crate) struct Gathered {
    pub(crate) reasoning: String,
    pub(crate) text: String,
    pub(crate) calls: Vec<Call>,
    pub(crate) scores: Scores,
    pub(crate) finish: Option<Finish>,
}

/// Memory for one reply.
#[derive(Debug)]
pub(crate) struct ReplyMemory {
    bodies: Bodies,
    held: Option<HeldMemory>,
    /// Bytes that the request itself holds for its reply.
    free: usize,
    /// Bytes that have been gathered.
    gathered: usize,
    /// What the engine holds for the prompt's scores, until they are written.
    streams: Streams,
}

/// Waits for the end of all choices, of which `scores` says how their tokens are scored.
pub(crate) async fn gather(
    streams: Streams,
    reader: &mut Reader,
    scores: impl Fn() -> Scores,
    names: TokenNames<'_>,
    bodies: &Bodies,
) -> Result<(Vec<Gathered>, ReplyMemory), ApiError> {
    let mut memory = ReplyMemory {
        bodies: bodies.clone(),
        held: None,
        free: ReplyMemory::FREE * reader.choices(),
        gathered: 0,
        streams,
    };
    let choice = || Gathered {
        scores: scores(),
        ..Gathered::default()
    };
    let choices = std::iter::repeat_with(choice).take(reader.choices());
    let mut choices: Vec<Gathered> = choices.collect();
    while !reader.is_finished() {
        let (prompt, event) = memory.streams.recv().await.ok_or_else(broken_off)??;
        memory.gathered += text_bytes(&event);
        if let Some(part) = reader.read(prompt, event)? {
            let choice = &mut choices[part.choice];
            let before = choice.scores.bytes();
            choice.append(part, names)?;
            memory.gathered += choice.scores.bytes() - before;
        }
        memory.cover(ReplyMemory::GROWING * memory.gathered).await?;
    }
    Ok((choices, memory))
}

/// A reply as JSON, and the memory for it.
pub(crate) struct Written {
    body: Vec<u8>,
    memory: ReplyMemory,
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

impl Written {
    /// The response, once what it was written from has been given back.
    pub(crate) fn respond(self) -> Response {
        let json = [(header::CONTENT_TYPE, "application/json")];
        let account = self.memory.streams.account().clone();
        let body = Bytes::from_owner(Sent {
            _memory: self.memory.keep(self.body.len()),
            body: self.body,
        });
        let mut response = (json, Body::from(body)).into_response();
        account.attach(&mut response);
        response
    }
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

/// Bytes of `value` as JSON.
pub(crate) fn json_bytes(value: &impl Serialize) -> Result<usize, ApiError> {
    let mut length = Length(0);
    serde_json::to_writer(&mut length, value).map_err(unwritable)?;
    Ok(length.0)
}

/// Bytes of text that an event adds.
fn text_bytes(event: &Event) -> usize {
    match event {
        Event::Token { text, .. } | Event::Finished { text, .. } => text.len(),
        _ => 0,
    }
}

impl ReplyMemory {
    /// A text that grows by doubling takes three times its length at the moment it is copied.
    const GROWING: usize = 3;
    /// Taken at a time, so that not every token asks, and that there is always some in advance: what
    /// one token adds is less.
    const STEP: usize = 32 << 10;
    /// What each choice's share of the request's own memory has for the text of its reply.
    const FREE: usize = 4 << 10;

    /// The reply `whole` as JSON, in memory that is held for it.
    pub(crate) async fn write(mut self, whole: impl Serialize) -> Result<Written, ApiError> {
        let length = json_bytes(&whole)?;
        self.cover(self.gathered + length).await?;
        let mut body = Vec::new();
        body.try_reserve_exact(length)?;
        serde_json::to_writer(&mut body, &whole).map_err(unwritable)?;
        Ok(Written { body, memory: self })
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
    fn append(&mut self, part: Part, names: TokenNames<'_>) -> Result<(), TryReserveError> {
        self.reasoning.try_reserve(part.reasoning.len())?;
        self.reasoning += &part.reasoning;
        self.text.try_reserve(part.text.len())?;
        self.text += &part.text;
        self.calls.extend(part.calls);
        for scored in &part.scored {
            self.scores.push(names, scored)?;
        }
        self.finish = part.finish.or(self.finish.take());
        Ok(())
    }
}
