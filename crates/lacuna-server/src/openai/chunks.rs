//! A reply as chunks: server-sent events of OpenAI's form.

use serde::Serialize;
use serde_json::{Value, json};

use crate::http::error::ApiError;
use crate::openai::logprobs::TextPlace;
use crate::openai::parameters::UsageChunks;
use crate::openai::reply::{self, ChoiceText, Content, Dialect, Form};
use crate::reply::events::{EVENT_STREAM, Writer, data};
use crate::reply::{Part, Reader};

/// Writes chunks in the form a reply has.
pub(crate) struct Chunks {
    form: Form,
    usage: UsageChunks,
    /// Per choice, where in its text the next token stands.
    places: Vec<TextPlace>,
}

impl Chunks {
    pub(crate) fn new(form: Form, usage: UsageChunks, choices: usize) -> Self {
        Self {
            form,
            usage,
            places: vec![TextPlace::default(); choices],
        }
    }

    fn delta(part: &Part, reader: &Reader) -> Value {
        let mut delta = json!({});
        if !part.reasoning.is_empty() {
            delta["reasoning_content"] = part.reasoning.as_str().into();
        }
        let others = !part.reasoning.is_empty() || !part.calls.is_empty();
        if !part.text.is_empty() || (!others && part.finish.is_none()) {
            delta["content"] = part.text.as_str().into();
        }
        if !part.calls.is_empty() {
            let first = reader.called(part.choice) - part.calls.len();
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
    fn chunk<'a>(&'a self, reader: &Reader, choice: Option<ChoiceText<'a>>) -> Chunk<'a> {
        Chunk {
            id: &self.form.id,
            object: match self.form.dialect {
                Dialect::Chat => "chat.completion.chunk",
                Dialect::Text => "text_completion",
            },
            created: self.form.created,
            model: &self.form.model_name,
            usage: match (self.usage, &choice) {
                (UsageChunks::None, _) => None,
                (UsageChunks::Last, Some(_)) => Some(Value::Null),
                (UsageChunks::Last, None) | (UsageChunks::Every, _) => {
                    Some(reply::usage(&reader.figures))
                }
            },
            choices: choice.into_iter().collect(),
        }
    }
}

impl Writer for Chunks {
    const CONTENT_TYPE: &'static str = EVENT_STREAM;

    /// Chats begin with the role of whoever speaks.
    fn open(&mut self, reader: &Reader, out: &mut String) -> Result<(), ApiError> {
        if self.form.dialect == Dialect::Text {
            return Ok(());
        }
        for index in 0..reader.choices() {
            let delta = json!({"role": "assistant", "content": ""});
            let choice = ChoiceText {
                index,
                content: Content::Delta(delta),
                logprobs: None,
                finish_reason: None,
                stop_reason: None,
                prompt_logprobs: None,
            };
            data(out, &self.chunk(reader, Some(choice)));
        }
        Ok(())
    }

    fn part(&mut self, part: Part, reader: &Reader, out: &mut String) -> Result<(), ApiError> {
        let silent = part.text.is_empty() && part.reasoning.is_empty();
        let shows = !silent || !part.calls.is_empty() || !part.scored.is_empty();
        if !shows && part.finish.is_none() {
            return Ok(());
        }
        let place = std::mem::take(&mut self.places[part.choice]);
        let (logprobs, next) = self.form.scores(&part, place)?;
        self.places[part.choice] = next;
        let choice = ChoiceText {
            index: part.choice,
            content: match self.form.dialect {
                Dialect::Chat => Content::Delta(Self::delta(&part, reader)),
                Dialect::Text => Content::Text(&part.text),
            },
            logprobs,
            finish_reason: part.finish.as_ref().map(reply::finish_reason),
            stop_reason: part.finish.as_ref().map(|finish| &finish.stop),
            prompt_logprobs: None,
        };
        data(out, &self.chunk(reader, Some(choice)));
        Ok(())
    }

    fn close(&mut self, reader: &Reader, out: &mut String) -> Result<(), ApiError> {
        if self.usage != UsageChunks::None {
            data(out, &self.chunk(reader, None));
        }
        out.push_str("data: [DONE]\n\n");
        Ok(())
    }

    fn fail(&mut self, error: &ApiError, out: &mut String) {
        data(out, &error.body());
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
