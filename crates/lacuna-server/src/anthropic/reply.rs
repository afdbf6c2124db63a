//! A reply as a message of blocks: thoughts, text, and uses of tools.

use std::sync::Arc;

use axum::response::Response;
use lacuna_engine::Miss;
use serde::Serialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use crate::app::App;
use crate::http::error::{ApiError, Interface};
use crate::openai::logprobs::{Scores, TokenNames};
use crate::reply::events::{EVENT_STREAM, Writer, named};
use crate::reply::streams::Streams;
use crate::reply::whole::{self, Gathered};
use crate::reply::{Ended, Figures, Finish, Part, Reader};
use crate::structured::calls::Call;

/// Thoughts are signed elsewhere, so that nobody can make them up. Here nothing depends on it, but
/// clients drop thoughts that have no signature.
const SIGNATURE: &str = "unsigned";

/// What is the same in every part of a reply.
#[derive(Debug)]
pub(super) struct Form {
    id: String,
    model: Arc<str>,
}

/// A whole message, or what a stream begins with.
#[derive(Serialize)]
struct Message<'a> {
    id: &'a str,
    r#type: &'static str,
    role: &'static str,
    model: &'a str,
    content: Vec<Block<'a>>,
    stop_reason: Option<&'static str>,
    stop_sequence: Option<&'a str>,
    usage: Value,
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Block<'a> {
    Thinking {
        thinking: &'a str,
        signature: &'static str,
    },
    Text {
        text: &'a str,
    },
    ToolUse {
        id: &'a str,
        name: &'a str,
        input: &'a RawValue,
    },
}

impl Form {
    pub(super) fn new(app: &App, id: String) -> Self {
        Self {
            id,
            model: Arc::clone(&app.model_name),
        }
    }

    /// Waits for the end and sends everything at once.
    pub(super) async fn send(
        &self,
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
            return Err(ApiError::internal("a message is one choice"));
        };
        let content = content(choice)?;
        let message = self.message(content, choice.finish.as_ref(), &reader.figures);
        let written = memory.write(message).await?;
        drop(choices);
        Ok(written.respond())
    }

    fn message<'a>(
        &'a self,
        content: Vec<Block<'a>>,
        finish: Option<&'a Finish>,
        figures: &Figures,
    ) -> Message<'a> {
        let (stop_reason, stop_sequence) = finish.map_or((None, None), stop);
        Message {
            id: &self.id,
            r#type: "message",
            role: "assistant",
            model: &self.model,
            content,
            stop_reason,
            stop_sequence,
            usage: usage(figures),
        }
    }
}

/// Text of nothing but white space, as models write it between a thought and a call, is left out.
fn content(choice: &Gathered) -> Result<Vec<Block<'_>>, ApiError> {
    let thought = (!choice.reasoning.is_empty()).then_some(Block::Thinking {
        thinking: &choice.reasoning,
        signature: SIGNATURE,
    });
    let said = (!choice.text.trim().is_empty()).then_some(Block::Text { text: &choice.text });
    let mut content: Vec<Block<'_>> = thought.into_iter().chain(said).collect();
    for call in &choice.calls {
        content.push(Block::ToolUse {
            id: call.id(),
            name: call.name(),
            input: serde_json::from_str(call.arguments())
                .map_err(|_| ApiError::internal("a call's arguments are JSON"))?,
        });
    }
    Ok(content)
}

/// Tokens of the prompt are counted apart by whether they were found in the prefix cache.
fn usage(figures: &Figures) -> Value {
    json!({
        "cache_miss": figures.miss.map(Miss::name),
        "cache_difference": figures.difference(),
        "input_tokens": figures.prompt_tokens - figures.reused_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": figures.reused_tokens,
        "output_tokens": figures.generated_tokens,
    })
}

/// Why a reply ended, and the stop sequence that came up.
fn stop(finish: &Finish) -> (Option<&'static str>, Option<&str>) {
    let sequence = finish.stop.as_str();
    let reason = match finish.reason {
        Ended::MaxTokens => "max_tokens",
        Ended::ContextFull => "model_context_window_exceeded",
        Ended::Calls => "tool_use",
        Ended::Stop if sequence.is_some() => "stop_sequence",
        Ended::Stop => "end_turn",
    };
    (Some(reason), sequence)
}

/// A reply as a stream of events.
pub(super) struct Stream {
    form: Form,
    /// The block that is being written.
    open: Option<Open>,
    /// Blocks that have been begun.
    blocks: usize,
    /// White space that is sent once more text follows it.
    blank: String,
    finish: Option<Finish>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Open {
    Thinking,
    Text,
    ToolUse,
}

impl Stream {
    pub(super) fn new(form: Form) -> Self {
        Self {
            form,
            open: None,
            blocks: 0,
            blank: String::new(),
            finish: None,
        }
    }

    fn begin(&mut self, open: Open, block: &Value, out: &mut String) {
        self.end(out);
        self.open = Some(open);
        let event =
            json!({"type": "content_block_start", "index": self.blocks, "content_block": block});
        named(out, "content_block_start", &event);
        self.blocks += 1;
    }

    /// What is added to the last block that was begun.
    fn delta(&self, delta: &Value, out: &mut String) {
        let index = self.blocks - 1;
        let event = json!({"type": "content_block_delta", "index": index, "delta": delta});
        named(out, "content_block_delta", &event);
    }

    /// Ends the block that is being written, if there is one.
    fn end(&mut self, out: &mut String) {
        match self.open.take() {
            None => return,
            Some(Open::Thinking) => {
                let signature = json!({"type": "signature_delta", "signature": SIGNATURE});
                self.delta(&signature, out);
            }
            Some(Open::Text | Open::ToolUse) => {}
        }
        let event = json!({"type": "content_block_stop", "index": self.blocks - 1});
        named(out, "content_block_stop", &event);
    }

    fn think(&mut self, thought: &str, out: &mut String) {
        if self.open != Some(Open::Thinking) {
            let block = json!({"type": "thinking", "thinking": "", "signature": ""});
            self.begin(Open::Thinking, &block, out);
        }
        self.delta(&json!({"type": "thinking_delta", "thinking": thought}), out);
    }

    fn say(&mut self, text: &str, out: &mut String) {
        if self.open != Some(Open::Text) {
            self.blank += text;
            if self.blank.trim().is_empty() {
                return;
            }
            self.begin(Open::Text, &json!({"type": "text", "text": ""}), out);
            let text = std::mem::take(&mut self.blank);
            self.delta(&json!({"type": "text_delta", "text": text}), out);
        } else {
            self.delta(&json!({"type": "text_delta", "text": text}), out);
        }
    }

    fn call(&mut self, call: &Call, out: &mut String) {
        self.blank.clear();
        let block = json!({"type": "tool_use", "id": call.id(), "name": call.name(), "input": {}});
        self.begin(Open::ToolUse, &block, out);
        let delta = json!({"type": "input_json_delta", "partial_json": call.arguments()});
        self.delta(&delta, out);
    }
}

impl Writer for Stream {
    const CONTENT_TYPE: &'static str = EVENT_STREAM;

    fn open(&mut self, reader: &Reader, out: &mut String) -> Result<(), ApiError> {
        let message = self.form.message(Vec::new(), None, &reader.figures);
        let message = json!({"type": "message_start", "message": message});
        named(out, "message_start", &message);
        named(out, "ping", &json!({"type": "ping"}));
        Ok(())
    }

    fn part(&mut self, part: Part, _: &Reader, out: &mut String) -> Result<(), ApiError> {
        if !part.reasoning.is_empty() {
            self.think(&part.reasoning, out);
        }
        if !part.text.is_empty() {
            self.say(&part.text, out);
        }
        for call in &part.calls {
            self.call(call, out);
        }
        self.finish = part.finish.or(self.finish.take());
        Ok(())
    }

    fn close(&mut self, reader: &Reader, out: &mut String) -> Result<(), ApiError> {
        self.end(out);
        let (reason, sequence) = self.finish.as_ref().map_or((None, None), stop);
        let event = json!({
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": sequence},
            "usage": usage(&reader.figures),
        });
        named(out, "message_delta", &event);
        named(out, "message_stop", &json!({"type": "message_stop"}));
        Ok(())
    }

    fn fail(&mut self, error: &ApiError, out: &mut String) {
        named(out, "error", &error.body_for(Interface::Anthropic));
    }
}
