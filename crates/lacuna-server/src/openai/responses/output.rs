//! A reply as a response: items of thought, text and calls, whole or event by event.
//!
//! The last event of a stream has all of the reply again, so a stream holds its reply as it grows, in
//! memory of the account.

use std::sync::Arc;

use axum::body::Bytes;
use axum::response::Response;
use lacuna_engine::HeldMemory;
use lacuna_text::reply::Effort;
use lacuna_text::template::Message;
use serde::Serialize;
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Map, Value, json};

use crate::app::{App, seconds_now};
use crate::chat::{self, Chat};
use crate::http::body::Bodies;
use crate::http::error::ApiError;
use crate::kept::Conversation;
use crate::openai::logprobs::{Scores, TokenNames};
use crate::openai::responses::files_bytes;
use crate::openai::responses::request::ResponsesRequest;
use crate::reply::events::{EVENT_STREAM, Writer, named};
use crate::reply::streams::Streams;
use crate::reply::whole;
use crate::reply::{Ended, Figures, Finish, Part, Reader};
use crate::sharing::Client;
use crate::structured::calls::Call;

/// What is the same in every part of a reply.
#[derive(Debug)]
pub(super) struct Form {
    id: String,
    created: u64,
    model: Arc<str>,
    client: Client,
    bodies: Bodies,
    echo: Echo,
    /// The conversation so far as JSON, if it is to be kept.
    conversation: Option<Vec<u8>>,
    /// Files of the images in it.
    images: Vec<Bytes>,
    /// For all of that, and of a stream for its reply.
    memory: HeldMemory,
}

/// What the request said, which its reply repeats.
#[derive(Debug, Serialize)]
struct Echo {
    instructions: Option<Box<RawValue>>,
    max_output_tokens: Option<usize>,
    metadata: Box<RawValue>,
    parallel_tool_calls: bool,
    previous_response_id: Option<Box<RawValue>>,
    reasoning: Reasoning,
    temperature: Option<f32>,
    text: Option<Box<RawValue>>,
    tool_choice: Box<RawValue>,
    tools: Box<RawValue>,
    top_p: Option<f32>,
    truncation: &'static str,
}

#[derive(Debug, Serialize)]
struct Reasoning {
    effort: Option<&'static str>,
    summary: (),
}

/// A response, whole or as far as it has come.
#[derive(Serialize)]
struct ResponseText<'a> {
    id: &'a str,
    object: &'static str,
    created_at: u64,
    status: &'static str,
    model: &'a str,
    output: Vec<ItemText<'a>>,
    usage: Option<Value>,
    incomplete_details: Option<Value>,
    error: Option<Value>,
    store: bool,
    #[serde(flatten)]
    echo: &'a Echo,
}

/// A part of the reply.
#[derive(Debug)]
struct Item {
    id: String,
    content: Content,
}

#[derive(Debug)]
enum Content {
    Reasoning(String),
    Message(String),
    Call(Call),
}

/// An item as it is sent.
#[derive(Serialize)]
struct ItemText<'a> {
    id: &'a str,
    status: &'static str,
    #[serde(flatten)]
    content: ContentText<'a>,
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum ContentText<'a> {
    Reasoning {
        summary: [(); 0],
        content: Vec<PartText<'a>>,
    },
    Message {
        role: &'static str,
        content: Vec<PartText<'a>>,
    },
    FunctionCall {
        call_id: &'a str,
        name: &'a str,
        arguments: &'a str,
    },
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum PartText<'a> {
    ReasoningText {
        text: &'a str,
    },
    OutputText {
        text: &'a str,
        annotations: [(); 0],
        logprobs: [(); 0],
    },
}

impl Echo {
    fn new(asked: &ResponsesRequest) -> Result<Self, ApiError> {
        let effort = asked
            .reasoning
            .as_ref()
            .and_then(|reasoning| reasoning.effort);
        Ok(Self {
            instructions: asked.instructions.as_ref().map(raw).transpose()?,
            max_output_tokens: asked.max_output_tokens,
            metadata: raw(asked.metadata.as_ref().unwrap_or(&Map::new()))?,
            parallel_tool_calls: asked.parallel_tool_calls != Some(false),
            previous_response_id: asked.previous_response_id.as_ref().map(raw).transpose()?,
            reasoning: Reasoning {
                effort: effort.map(Effort::name),
                summary: (),
            },
            temperature: asked.temperature,
            text: asked.text.as_ref().map(raw).transpose()?,
            tool_choice: match &asked.tool_choice {
                Some(choice) => raw(choice)?,
                None => raw("auto")?,
            },
            tools: raw(asked.tools.as_deref().unwrap_or_default())?,
            top_p: asked.top_p,
            truncation: "disabled",
        })
    }

    fn bytes(&self) -> usize {
        let said = [&self.instructions, &self.previous_response_id, &self.text];
        let said = said.into_iter().flatten();
        let said = said.chain([&self.metadata, &self.tool_choice, &self.tools]);
        said.map(|text| text.get().len()).sum()
    }
}

fn raw(value: &(impl Serialize + ?Sized)) -> Result<Box<RawValue>, ApiError> {
    to_raw_value(value).map_err(unwritable)
}

fn unwritable(error: serde_json::Error) -> ApiError {
    ApiError::internal(format!("the reply could not be written: {error}"))
}

impl Form {
    /// What the request repeats is in memory that is taken here.
    pub(super) fn new(
        app: &App,
        client: Client,
        id: String,
        asked: &ResponsesRequest,
    ) -> Result<Self, ApiError> {
        let echo = Echo::new(asked)?;
        let bodies = app.bodies().clone();
        Ok(Self {
            memory: bodies.try_take(Self::ECHOES * echo.bytes() + Self::BYTES)?,
            id,
            created: seconds_now(),
            model: Arc::clone(&app.model_name),
            client,
            bodies,
            echo,
            conversation: None,
            images: Vec::new(),
        })
    }

    /// What the request said is there once, twice in the first chunk of a stream, which grows by
    /// doubling, and once more as it is sent.
    const ECHOES: usize = 8;
    /// A stream's own fields and small events.
    const BYTES: usize = 8 << 10;

    /// Keeps the conversation so far, to be put with the reply.
    pub(super) fn remember(&mut self, chat: &Chat) -> Result<(), ApiError> {
        // Instructions are for one reply.
        let instructed = usize::from(self.echo.instructions.is_some());
        let conversation = serde_json::to_vec(&chat.messages[instructed..]).map_err(unwritable)?;
        let files = chat.images.iter().map(|image| image.file().cloned());
        self.images = files.collect::<Result<_, _>>()?;
        let bytes = 2 * conversation.len() + files_bytes(&self.images);
        self.memory.merge(self.bodies.try_take(bytes)?);
        self.conversation = Some(conversation);
        Ok(())
    }

    /// Waits for the end and sends everything at once.
    pub(super) async fn send(
        mut self,
        app: &App,
        streams: Streams,
        mut reader: Reader,
    ) -> Result<Response, ApiError> {
        let bodies = app.bodies();
        let (choices, memory) = whole::gather(
            streams,
            &mut reader,
            Scores::of_chat,
            TokenNames::texts(app.model()),
            bodies,
        )
        .await?;
        let mut items = Items::default();
        let mut finish = None;
        for choice in choices {
            items.add(&self.id, Content::Reasoning(choice.reasoning));
            items.add(&self.id, Content::Message(choice.text));
            for call in choice.calls {
                items.add(&self.id, Content::Call(call));
            }
            finish = choice.finish;
        }
        let response = self.finished(&items, finish.as_ref(), &reader.figures);
        let written = memory.write(response).await?;
        self.keep(&items, finish.as_ref(), &reader.figures);
        drop(items);
        Ok(written.respond())
    }

    /// A response of which nothing has come yet, or one that has failed.
    fn begun(&self, status: &'static str, error: Option<&ApiError>) -> ResponseText<'_> {
        ResponseText {
            id: &self.id,
            object: "response",
            created_at: self.created,
            status,
            model: &self.model,
            output: Vec::new(),
            usage: None,
            incomplete_details: None,
            error: error.map(|error| {
                let body = error.body();
                json!({"code": "server_error", "message": body["error"]["message"]})
            }),
            store: self.conversation.is_some(),
            echo: &self.echo,
        }
    }

    fn finished<'a>(
        &'a self,
        items: &'a Items,
        finish: Option<&Finish>,
        figures: &Figures,
    ) -> ResponseText<'a> {
        let status = status(finish);
        ResponseText {
            output: items.0.iter().map(|item| item.text(status)).collect(),
            usage: Some(usage(figures)),
            incomplete_details: (status == INCOMPLETE)
                .then(|| json!({"reason": "max_output_tokens"})),
            ..self.begun(status, None)
        }
    }

    /// Keeps the reply and the conversation with it, if that was asked for and there is memory.
    fn keep(&mut self, items: &Items, finish: Option<&Finish>, figures: &Figures) {
        if self.conversation.is_some()
            && let Ok(kept) = self.kept(items, finish, figures)
        {
            self.bodies.kept().keep(kept);
        }
    }

    fn kept(
        &mut self,
        items: &Items,
        finish: Option<&Finish>,
        figures: &Figures,
    ) -> Result<Conversation, ApiError> {
        let mut messages = self.conversation.take().unwrap_or_default();
        let images = std::mem::take(&mut self.images);
        // The end of the list.
        messages.pop();
        messages.push(b',');
        serde_json::to_writer(&mut messages, &items.message()).map_err(unwritable)?;
        messages.push(b']');
        messages.shrink_to_fit();
        let reply = ResponseText {
            store: true,
            ..self.finished(items, finish, figures)
        };
        let bytes = whole::json_bytes(&reply)?;
        let memory = self.bodies.try_take(Conversation::bytes(
            messages.len() + bytes + files_bytes(&images),
        ))?;
        let mut text = Vec::with_capacity(bytes);
        serde_json::to_writer(&mut text, &reply).map_err(unwritable)?;
        Ok(Conversation {
            id: self.id.clone(),
            client: self.client,
            messages,
            images,
            reply: text,
            memory,
        })
    }
}

const COMPLETED: &str = "completed";
const INCOMPLETE: &str = "incomplete";

fn status(finish: Option<&Finish>) -> &'static str {
    match finish.map(|finish| finish.reason) {
        Some(Ended::MaxTokens | Ended::ContextFull) => INCOMPLETE,
        _ => COMPLETED,
    }
}

fn usage(figures: &Figures) -> Value {
    let mut details = figures.cached();
    details["cache_write_tokens"] = 0.into();
    json!({
        "input_tokens": figures.prompt_tokens,
        "input_tokens_details": details,
        "output_tokens": figures.generated_tokens,
        "output_tokens_details": {"reasoning_tokens": figures.reasoning_tokens.unwrap_or(0)},
        "total_tokens": figures.prompt_tokens + figures.generated_tokens,
    })
}

/// The parts of a reply in their order.
#[derive(Debug, Default)]
struct Items(Vec<Item>);

impl Items {
    /// Adds a part that is not empty, of the reply with the name `reply`. Text of nothing but white
    /// space, as models write it between a thought and a call, is.
    fn add(&mut self, reply: &str, content: Content) {
        if content.is_empty() {
            return;
        }
        let id = format!("{}-{}-{reply}", content.prefix(), self.0.len());
        self.0.push(Item { id, content });
    }

    /// The reply as a message, as chat templates take it.
    fn message(&self) -> Message {
        let (mut thought, mut said, mut calls) = (String::new(), String::new(), Vec::new());
        for item in &self.0 {
            match &item.content {
                Content::Reasoning(text) => thought += text,
                Content::Message(text) => said += text,
                Content::Call(call) => {
                    let arguments = chat::arguments(call.arguments().to_owned());
                    calls.push(chat::call(
                        Some(call.id().to_owned()),
                        call.name(),
                        arguments,
                    ));
                }
            }
        }
        let mut message = Message::new("assistant", said);
        if !thought.is_empty() {
            let thought = thought.into();
            message.more.insert("reasoning_content".into(), thought);
        }
        if !calls.is_empty() {
            message.more.insert("tool_calls".into(), calls.into());
        }
        message
    }
}

impl Content {
    fn is_empty(&self) -> bool {
        match self {
            Self::Reasoning(text) => text.is_empty(),
            Self::Message(text) => text.trim().is_empty(),
            Self::Call(_) => false,
        }
    }

    /// What the name of an item of this kind begins with.
    fn prefix(&self) -> &'static str {
        match self {
            Self::Reasoning(_) => "rs",
            Self::Message(_) => "msg",
            Self::Call(_) => "fc",
        }
    }

    /// What there is of it as a text that grows, by the part of an event's name.
    fn growing(&self) -> (&'static str, &str) {
        match self {
            Self::Reasoning(text) => ("reasoning_text", text),
            Self::Message(text) => ("output_text", text),
            Self::Call(call) => ("function_call_arguments", call.arguments()),
        }
    }

    /// It as a part of an item's content, with `text` in it; calls have none.
    fn part<'a>(&self, text: &'a str) -> Option<PartText<'a>> {
        match self {
            Self::Reasoning(_) => Some(PartText::ReasoningText { text }),
            Self::Message(_) => Some(PartText::OutputText {
                text,
                annotations: [],
                logprobs: [],
            }),
            Self::Call(_) => None,
        }
    }
}

impl Item {
    fn text(&self, status: &'static str) -> ItemText<'_> {
        let (_, text) = self.content.growing();
        self.with(status, self.content.part(text), text)
    }

    /// The item before anything of it has come.
    fn empty(&self) -> ItemText<'_> {
        self.with("in_progress", None, "")
    }

    fn with<'a>(
        &'a self,
        status: &'static str,
        part: Option<PartText<'a>>,
        arguments: &'a str,
    ) -> ItemText<'a> {
        let content = part.into_iter().collect();
        ItemText {
            id: &self.id,
            status,
            content: match &self.content {
                Content::Reasoning(_) => ContentText::Reasoning {
                    summary: [],
                    content,
                },
                Content::Message(_) => ContentText::Message {
                    role: "assistant",
                    content,
                },
                Content::Call(call) => ContentText::FunctionCall {
                    call_id: call.id(),
                    name: call.name(),
                    arguments,
                },
            },
        }
    }
}

/// A reply as a stream of events.
pub(super) struct Stream {
    form: Form,
    items: Items,
    /// Whether the last item is being written.
    open: bool,
    /// White space that is sent once more text follows it.
    blank: String,
    sequence: u64,
    finish: Option<Finish>,
    /// Bytes of the reply so far.
    bytes: usize,
    /// What memory there was before any of it.
    base: usize,
}

impl Stream {
    /// At the end a text is there as it grew, as a value of an event, and in a chunk in four events,
    /// with escapes and in a text that grows by doubling.
    const COPIES: usize = 32;
    /// Memory is taken for so much of a reply at a time.
    const STEP: usize = 1 << 10;

    pub(super) fn new(form: Form) -> Self {
        Self {
            base: form.memory.bytes(),
            form,
            items: Items::default(),
            open: false,
            blank: String::new(),
            sequence: 0,
            finish: None,
            bytes: 0,
        }
    }

    /// Takes memory for `more` bytes of the reply.
    fn hold(&mut self, more: usize) -> Result<(), ApiError> {
        self.bytes += more;
        let reply = self.bytes.next_multiple_of(Self::STEP) * Self::COPIES;
        let missing = (self.base + reply).saturating_sub(self.form.memory.bytes());
        if missing > 0 {
            let more = self.form.bodies.try_take(missing)?;
            self.form.memory.merge(more);
        }
        Ok(())
    }

    fn event(&mut self, name: &str, fields: impl Serialize, out: &mut String) {
        let event = EventText {
            r#type: name,
            sequence_number: self.sequence,
            fields,
        };
        named(out, name, &event);
        self.sequence += 1;
    }

    /// Begins an item, or goes on with one of its kind.
    fn begin(&mut self, content: Content, out: &mut String) {
        let last = self.items.0.last().filter(|_| self.open);
        let same = |last: &Item| last.content.prefix() == content.prefix();
        if last.is_some_and(same) && !matches!(content, Content::Call(_)) {
            return;
        }
        self.end("completed", out);
        let id = format!(
            "{}-{}-{}",
            content.prefix(),
            self.items.0.len(),
            self.form.id
        );
        self.items.0.push(Item { id, content });
        self.open = true;
        self.last(out, |index, item| {
            let added = json!({"output_index": index, "item": item.empty()});
            let mut events = vec![("response.output_item.added".to_owned(), added)];
            if let Some(part) = item.content.part("") {
                let added = json!({"item_id": item.id, "output_index": index, "content_index": 0, "part": part});
                events.push(("response.content_part.added".to_owned(), added));
            }
            events
        });
    }

    /// Sends events about the last item.
    fn last(
        &mut self,
        out: &mut String,
        events: impl FnOnce(usize, &Item) -> Vec<(String, Value)>,
    ) {
        let Some(item) = self.items.0.last() else {
            return;
        };
        for (name, fields) in events(self.items.0.len() - 1, item) {
            self.event(&name, fields, out);
        }
    }

    fn delta(&mut self, delta: &str, out: &mut String) {
        self.last(out, |index, item| {
            let (kind, _) = item.content.growing();
            let mut fields = json!({"item_id": item.id, "output_index": index, "delta": delta});
            place(&mut fields, &item.content);
            vec![(format!("response.{kind}.delta"), fields)]
        });
    }

    /// Ends the item that is being written, if there is one.
    fn end(&mut self, status: &'static str, out: &mut String) {
        if !std::mem::take(&mut self.open) {
            return;
        }
        self.last(out, |index, item| {
            let (kind, text) = item.content.growing();
            let mut done = json!({"item_id": item.id, "output_index": index});
            let name = match item.content {
                Content::Call(_) => "arguments",
                _ => "text",
            };
            done[name] = text.into();
            if let Content::Call(call) = &item.content {
                done["name"] = call.name().into();
            }
            place(&mut done, &item.content);
            let mut events = vec![(format!("response.{kind}.done"), done)];
            if let Some(part) = item.content.part(text) {
                let done = json!({"item_id": item.id, "output_index": index, "content_index": 0, "part": part});
                events.push(("response.content_part.done".to_owned(), done));
            }
            let done = json!({"output_index": index, "item": item.text(status)});
            events.push(("response.output_item.done".to_owned(), done));
            events
        });
    }

    fn think(&mut self, thought: &str, out: &mut String) {
        self.begin(Content::Reasoning(String::new()), out);
        if let Some(Item {
            content: Content::Reasoning(text),
            ..
        }) = self.items.0.last_mut()
        {
            text.push_str(thought);
        }
        self.delta(thought, out);
    }

    fn say(&mut self, said: &str, out: &mut String) {
        let speaks = self.open
            && matches!(self.items.0.last(), Some(item) if item.content.prefix() == "msg");
        self.blank += said;
        if !speaks && self.blank.trim().is_empty() {
            return;
        }
        let said = std::mem::take(&mut self.blank);
        self.begin(Content::Message(String::new()), out);
        if let Some(Item {
            content: Content::Message(text),
            ..
        }) = self.items.0.last_mut()
        {
            text.push_str(&said);
        }
        self.delta(&said, out);
    }

    fn call(&mut self, call: Call, out: &mut String) {
        self.blank.clear();
        let arguments = call.arguments().to_owned();
        self.begin(Content::Call(call), out);
        self.delta(&arguments, out);
    }
}

/// Where in an item a text is.
fn place(fields: &mut Value, content: &Content) {
    if matches!(content, Content::Call(_)) {
        return;
    }
    fields["content_index"] = 0.into();
    if matches!(content, Content::Message(_)) {
        fields["logprobs"] = json!([]);
    }
}

#[derive(Serialize)]
struct EventText<'a, T> {
    r#type: &'a str,
    sequence_number: u64,
    #[serde(flatten)]
    fields: T,
}

/// The fields of an event about the response itself.
#[derive(Serialize)]
struct About<'a> {
    response: ResponseText<'a>,
}

impl Writer for Stream {
    const CONTENT_TYPE: &'static str = EVENT_STREAM;

    fn open(&mut self, _: &Reader, out: &mut String) -> Result<(), ApiError> {
        for name in ["response.created", "response.in_progress"] {
            let event = EventText {
                r#type: name,
                sequence_number: self.sequence,
                fields: About {
                    response: self.form.begun("in_progress", None),
                },
            };
            named(out, name, &event);
            self.sequence += 1;
        }
        Ok(())
    }

    fn part(&mut self, part: Part, _: &Reader, out: &mut String) -> Result<(), ApiError> {
        let calls = part
            .calls
            .iter()
            .map(|call| call.arguments().len() + CALL_BYTES);
        self.hold(part.reasoning.len() + part.text.len() + calls.sum::<usize>())?;
        if !part.reasoning.is_empty() {
            self.think(&part.reasoning, out);
        }
        if !part.text.is_empty() {
            self.say(&part.text, out);
        }
        for call in part.calls {
            self.call(call, out);
        }
        self.finish = part.finish.or(self.finish.take());
        Ok(())
    }

    fn close(&mut self, reader: &Reader, out: &mut String) -> Result<(), ApiError> {
        let finish = self.finish.take();
        let status = status(finish.as_ref());
        self.end(status, out);
        let name = match status {
            INCOMPLETE => "response.incomplete",
            _ => "response.completed",
        };
        let response = self
            .form
            .finished(&self.items, finish.as_ref(), &reader.figures);
        let event = EventText {
            r#type: name,
            sequence_number: self.sequence,
            fields: About { response },
        };
        named(out, name, &event);
        self.form
            .keep(&self.items, finish.as_ref(), &reader.figures);
        Ok(())
    }

    fn fail(&mut self, error: &ApiError, out: &mut String) {
        let event = EventText {
            r#type: "response.failed",
            sequence_number: self.sequence,
            fields: About {
                response: self.form.begun("failed", Some(error)),
            },
        };
        named(out, "response.failed", &event);
    }
}

/// What a call has beside its arguments, in each of its events.
const CALL_BYTES: usize = 512;
