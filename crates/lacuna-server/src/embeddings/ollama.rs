//! The part of Ollama's interface that is about embeddings.

use std::io::Write;
use std::time::Instant;

use axum::Json;
use axum::response::{IntoResponse, Response};
use lacuna_engine::HeldMemory;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;

use super::request::{Encoding, Request};
use super::{Embeddings, Wanted, room_for_reply};
use crate::http::body::{self, Received};
use crate::http::error::ApiError;
use crate::http::ignored::Ignored;
use crate::ollama::{self, KeepAlive, Served, Serves};

#[derive(Debug, Deserialize)]
struct EmbedRequest {
    model: String,
    /// None, if only the model is asked for, which is there.
    #[serde(default)]
    input: Option<Texts>,
    /// Whether longer texts are cut, which they are unless it is said otherwise.
    #[serde(default)]
    truncate: Option<bool>,
    #[serde(default)]
    dimensions: Option<usize>,
    /// Settings of the machine, and of replies that are written.
    #[serde(default, rename = "options")]
    _options: IgnoredAny,
    #[serde(default)]
    keep_alive: Option<KeepAlive>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a string, or a list of strings")]
enum Texts {
    One(String),
    Many(Vec<String>),
}

/// As clients asked before they could ask for several texts.
#[derive(Debug, Deserialize)]
struct EmbedOneRequest {
    model: String,
    #[serde(default)]
    prompt: String,
    #[serde(default, rename = "options")]
    _options: IgnoredAny,
    #[serde(default)]
    keep_alive: Option<KeepAlive>,
}

impl Embeddings {
    /// The reply to the body of `POST /api/embed`.
    pub(super) fn embed(
        &self,
        received: Received,
        memory: HeldMemory,
        wanted: &Wanted,
    ) -> Result<Response, ApiError> {
        let began = Instant::now();
        let mut ignored = Ignored::new(self.strict_fields);
        let asked: EmbedRequest = body::read(received.object()?, &mut ignored)?;
        self.check_tagged(&asked.model)?;
        ollama::check_keep_alive(asked.keep_alive.as_ref(), self.intake.several, &mut ignored)?;
        let texts = match asked.input {
            None => Vec::new(),
            Some(Texts::One(text)) if text.is_empty() => Vec::new(),
            Some(Texts::One(text)) => vec![text],
            Some(Texts::Many(texts)) => texts,
        };
        let request = Request::of(texts, asked.dimensions, asked.truncate.unwrap_or(true));
        let (mut reply, tokens) =
            self.lists(request, memory, wanted, ("{\"embeddings\":[", "]"))?;
        let name = Value::from(asked.model);
        let total = began.elapsed().as_nanos();
        let written = write!(
            reply,
            ",\"model\":{name},\"total_duration\":{total},\"load_duration\":0,\"prompt_eval_count\":{tokens}}}"
        );
        written.map_err(|error| ApiError::internal(error.to_string()))?;
        Ok(self.reply_of(reply, tokens, &ignored))
    }

    /// The reply to the body of `POST /api/embeddings`.
    pub(super) fn embed_one(
        &self,
        received: Received,
        memory: HeldMemory,
        wanted: &Wanted,
    ) -> Result<Response, ApiError> {
        let mut ignored = Ignored::new(self.strict_fields);
        let asked: EmbedOneRequest = body::read(received.object()?, &mut ignored)?;
        self.check_tagged(&asked.model)?;
        ollama::check_keep_alive(asked.keep_alive.as_ref(), self.intake.several, &mut ignored)?;
        let around = match asked.prompt.is_empty() {
            // A list of nothing is one of no elements as well.
            true => ("{\"embedding\":[", "]}"),
            false => ("{\"embedding\":", "}"),
        };
        let texts = Some(asked.prompt).filter(|prompt| !prompt.is_empty());
        let request = Request::of(texts.into_iter().collect(), None, true);
        let (reply, tokens) = self.lists(request, memory, wanted, around)?;
        Ok(self.reply_of(reply, tokens, &ignored))
    }

    /// Embeddings as lists of numbers, between two texts, in room for some more; and how many tokens there were.
    fn lists(
        &self,
        request: Request,
        mut memory: HeldMemory,
        wanted: &Wanted,
        (before, after): (&str, &str),
    ) -> Result<(Vec<u8>, usize), ApiError> {
        /// What is around all of them, with the name of a model.
        const AROUND: usize = 1024;
        let dimensions = request.dimensions(self.width()?)?;
        let texts = match request.is_empty() {
            true => Vec::new(),
            false => request.texts(&self.model, &self.encoder, &self.encode_limits())?,
        };
        let bytes = texts
            .len()
            .saturating_mul(Encoding::Float.most_bytes(dimensions));
        let mut reply = room_for_reply(&mut memory, bytes.saturating_add(AROUND))?;
        reply.extend_from_slice(before.as_bytes());
        self.each(&texts, dimensions, wanted, |index, embedding| {
            if index > 0 {
                reply.push(b',');
            }
            serde_json::to_writer(&mut reply, embedding)
        })?;
        reply.extend_from_slice(after.as_bytes());
        Ok((reply, texts.iter().map(Vec::len).sum()))
    }

    /// The reply to the body of `POST /api/show`.
    pub(super) fn describe(
        &self,
        received: Received,
        _: HeldMemory,
        _: &Wanted,
    ) -> Result<Response, ApiError> {
        let mut ignored = Ignored::new(self.strict_fields);
        let described = ollama::describe(self, received.object()?, &mut ignored)?;
        let mut response = Json(described).into_response();
        ignored.attach(&mut response);
        Ok(response)
    }
}

impl Serves for Embeddings {
    fn served(&self) -> Served<'_> {
        Served {
            model: &self.model,
            name: &self.model_name,
            started: self.started,
            context_tokens: self.max_tokens(),
            // It has no word for models that score.
            capabilities: self
                .model
                .spec()
                .embedding_width()
                .map_or(Vec::new(), |_| vec!["embedding"]),
        }
    }

    fn check_name(&self, asked: &str) -> Result<(), ApiError> {
        self.check_model(Some(asked))
    }
}
