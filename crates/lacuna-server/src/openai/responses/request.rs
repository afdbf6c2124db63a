//! What a request may say, and that as a [`Chat`].

use lacuna_text::reply::Effort;
use lacuna_text::template::Message;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::chat::{self, Chat, TextOrParts};
use crate::http::error::ApiError;
use crate::http::ignored::Ignored;
use crate::images::{self, Image};
use crate::openai::parameters::Parameters;
use crate::openai::responses::Previous;
use crate::structured::Format;
use crate::structured::tools::{ChoiceWord, ToolChoice};

#[derive(Debug, Deserialize)]
pub(super) struct ResponsesRequest {
    input: TextOrParts<Item>,
    #[serde(default)]
    model: Option<String>,
    #[serde(default)]
    pub(super) instructions: Option<String>,
    #[serde(default)]
    pub(super) previous_response_id: Option<String>,
    #[serde(default)]
    store: Option<bool>,
    #[serde(default)]
    stream: Option<bool>,
    #[serde(default)]
    pub(super) tools: Option<Vec<Value>>,
    #[serde(default)]
    pub(super) tool_choice: Option<Choice>,
    #[serde(default)]
    pub(super) parallel_tool_calls: Option<bool>,
    #[serde(default)]
    pub(super) reasoning: Option<Reasoning>,
    #[serde(default)]
    pub(super) text: Option<TextConfig>,
    #[serde(default)]
    pub(super) max_output_tokens: Option<usize>,
    #[serde(default)]
    pub(super) temperature: Option<f32>,
    #[serde(default)]
    pub(super) top_p: Option<f32>,
    #[serde(default)]
    pub(super) metadata: Option<Map<String, Value>>,
    /// The name under which a cache folder keeps the conversation, as for chats.
    #[serde(default)]
    session: Option<String>,
    #[serde(default)]
    truncation: Option<Truncation>,
    #[serde(default)]
    background: Option<bool>,
    #[serde(default)]
    conversation: Option<Value>,
    #[serde(default)]
    prompt: Option<Value>,
    /// Who asks, and how to find the prompt: without effect, as for chats.
    #[serde(default, rename = "user")]
    _user: Option<Value>,
    #[serde(default, rename = "prompt_cache_key")]
    _prompt_cache_key: Option<Value>,
    #[serde(default, rename = "prompt_cache_retention")]
    _prompt_cache_retention: Option<Value>,
    #[serde(default, rename = "safety_identifier")]
    _safety_identifier: Option<Value>,
    #[serde(default, rename = "service_tier")]
    _service_tier: Option<Value>,
    #[serde(default, rename = "stream_options")]
    _stream_options: Option<StreamOptions>,
}

#[derive(Debug, Deserialize)]
struct StreamOptions {
    /// Padding against traffic analysis, which nobody here sends.
    #[serde(default, rename = "include_obfuscation")]
    _include_obfuscation: Option<bool>,
}

/// An item of any kind: which fields it has depends on that.
#[derive(Debug, Deserialize)]
struct Item {
    /// A message, if it is left out.
    #[serde(default, rename = "type")]
    kind: Option<String>,
    #[serde(default)]
    role: Option<Role>,
    #[serde(default)]
    content: Option<TextOrParts<Part>>,
    #[serde(default)]
    summary: Option<Vec<Part>>,
    #[serde(default)]
    call_id: Option<String>,
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    arguments: Option<String>,
    #[serde(default)]
    output: Option<TextOrParts<Part>>,
    /// What comes with replies, and back with them.
    #[serde(default, rename = "id")]
    _id: Option<Value>,
    #[serde(default, rename = "status")]
    _status: Option<Value>,
    #[serde(default, rename = "phase")]
    _phase: Option<Value>,
    #[serde(default, rename = "encrypted_content")]
    _encrypted_content: Option<Value>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Role {
    #[serde(alias = "developer")]
    System,
    User,
    Assistant,
}

#[derive(Debug, Deserialize)]
struct Part {
    #[serde(rename = "type")]
    kind: PartKind,
    #[serde(default)]
    text: Option<String>,
    #[serde(default)]
    refusal: Option<String>,
    /// The address of an image, as a text.
    #[serde(default)]
    image_url: Option<String>,
    /// Encoders here take images in one size.
    #[serde(default, rename = "detail")]
    _detail: Option<String>,
    #[serde(default, rename = "annotations")]
    _annotations: Option<Value>,
    #[serde(default, rename = "logprobs")]
    _logprobs: Option<Value>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
enum PartKind {
    #[serde(alias = "text")]
    InputText,
    OutputText,
    ReasoningText,
    SummaryText,
    Refusal,
    InputImage,
    InputFile,
    InputAudio,
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(
    untagged,
    expecting = "expected none, auto, required, or a function by its name"
)]
pub(super) enum Choice {
    Word(ChoiceWord),
    Function(ChosenFunction),
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum ChosenFunction {
    Function { name: String },
}

#[derive(Debug, Deserialize)]
pub(super) struct Reasoning {
    #[serde(default)]
    pub(super) effort: Option<Effort>,
}

#[derive(Debug, Deserialize, Serialize)]
pub(super) struct TextConfig {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    format: Option<TextFormat>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    verbosity: Option<String>,
}

#[derive(Debug, Deserialize, Serialize)]
struct TextFormat {
    #[serde(rename = "type")]
    kind: FormatKind,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    description: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    schema: Option<Value>,
    /// Schemas are always followed strictly.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    strict: Option<bool>,
}

#[derive(Debug, Clone, Copy, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
enum FormatKind {
    Text,
    JsonObject,
    JsonSchema,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Truncation {
    Auto,
    Disabled,
}

impl ResponsesRequest {
    pub(super) fn model(&self) -> Option<&str> {
        self.model.as_deref()
    }

    pub(super) fn previous_response_id(&self) -> Option<&str> {
        self.previous_response_id.as_deref()
    }

    pub(super) fn is_streamed(&self) -> bool {
        self.stream == Some(true)
    }

    /// Whether the reply is to be gone on with by its name.
    pub(super) fn is_stored(&self) -> bool {
        self.store != Some(false)
    }

    /// `previous` is what the conversation was before.
    pub(super) fn chat(self, previous: Previous, ignored: &mut Ignored) -> Result<Chat, ApiError> {
        self.check(ignored)?;
        let format = self.text.and_then(|text| text.format);
        let Previous {
            mut messages,
            mut images,
        } = previous;
        messages.extend(read(self.input, &mut images, ignored)?);
        if messages.is_empty() {
            return Err(ApiError::field(
                "input",
                "`input` is empty; send a text or an item",
            ));
        }
        if let Some(instructions) = self.instructions {
            messages.insert(0, Message::new("system", instructions));
        }
        Ok(Chat {
            messages,
            images,
            tools: tools(self.tools.unwrap_or_default(), ignored)?,
            tool_choice: self.tool_choice.map(Choice::read),
            one_call: self.parallel_tool_calls == Some(false),
            format: format.map(TextFormat::read).transpose()?.flatten(),
            parameters: Parameters {
                session: self.session,
                max_completion_tokens: self.max_output_tokens,
                temperature: self.temperature,
                top_p: self.top_p,
                reasoning_effort: self.reasoning.and_then(|reasoning| reasoning.effort),
                ..Parameters::default()
            }
            .checked()?,
            ..Chat::default()
        })
    }

    /// Refuses what would change the reply elsewhere.
    fn check(&self, ignored: &mut Ignored) -> Result<(), ApiError> {
        let unsupported = [
            ("background", self.background == Some(true)),
            ("conversation", self.conversation.is_some()),
            ("prompt", self.prompt.is_some()),
        ];
        for (field, asked) in unsupported {
            if asked {
                let message = format!("`{field}` is not supported by this server; leave it out");
                return Err(ApiError::field(field, message));
            }
        }
        if self.max_output_tokens == Some(0) {
            let message = "`max_output_tokens` must be at least 1";
            return Err(ApiError::field("max_output_tokens", message));
        }
        match self.truncation {
            Some(Truncation::Auto) => ignored.note("truncation"),
            _ => Ok(()),
        }
    }
}

impl Choice {
    fn read(self) -> ToolChoice {
        match self {
            Self::Word(word) => ToolChoice::Word(word),
            Self::Function(ChosenFunction::Function { name }) => ToolChoice::of_tool(name),
        }
    }
}

impl TextFormat {
    fn read(self) -> Result<Option<Format>, ApiError> {
        match (self.kind, self.schema) {
            (FormatKind::Text, _) => Ok(None),
            (FormatKind::JsonObject, _) => Ok(Some(Format::of_schema(json!({"type": "object"})))),
            (FormatKind::JsonSchema, Some(schema)) => Ok(Some(Format::of_schema(schema))),
            (FormatKind::JsonSchema, None) => Err(ApiError::field(
                "text.format.schema",
                "`text.format.schema` is missing",
            )),
        }
    }
}

/// The functions among the tools. Those that the service would run are left out and named.
fn tools(tools: Vec<Value>, ignored: &mut Ignored) -> Result<Vec<Value>, ApiError> {
    const KNOWN: [&str; 4] = ["name", "description", "parameters", "strict"];
    let mut read = Vec::with_capacity(tools.len());
    for (index, tool) in tools.into_iter().enumerate() {
        let field = format!("tools[{index}]");
        let Value::Object(mut fields) = tool else {
            let message = format!("`{field}` must be an object");
            return Err(ApiError::field(field, message));
        };
        if fields.remove("type").as_ref().and_then(Value::as_str) != Some("function") {
            ignored.note(&field)?;
            continue;
        }
        for name in fields.keys().filter(|name| !KNOWN.contains(&name.as_str())) {
            ignored.note(&format!("{field}.{name}"))?;
        }
        fields.retain(|name, value| KNOWN.contains(&name.as_str()) && !value.is_null());
        read.push(json!({"type": "function", "function": fields}));
    }
    Ok(read)
}

/// Items as messages, whose images join `shown`. What one reply was made of, its thoughts, its text and its calls, are items of
/// their own; templates take them as one message.
fn read(
    input: TextOrParts<Item>,
    shown: &mut Vec<Image>,
    ignored: &mut Ignored,
) -> Result<Vec<Message>, ApiError> {
    let items = match input {
        TextOrParts::Text(text) => return Ok(vec![Message::new("user", text)]),
        TextOrParts::Parts(items) => items,
    };
    let mut messages: Vec<Message> = Vec::new();
    // Whether the last message is of the assistant, and only thought so far.
    let mut thought_last = false;
    for (index, item) in items.into_iter().enumerate() {
        let field = format!("input[{index}]");
        let thought_before = std::mem::take(&mut thought_last);
        match item.kind.as_deref() {
            None | Some("message") => {
                let role = needed(item.role, &field, "role")?;
                let content = needed(item.content, &field, "content")?;
                let content = said(content, &format!("{field}.content"), shown)?;
                match messages.last_mut() {
                    Some(last) if thought_before && matches!(role, Role::Assistant) => {
                        last.content = content;
                    }
                    _ => {
                        let mut message = Message::new(role.name(), "");
                        message.content = content;
                        messages.push(message);
                    }
                }
            }
            Some("reasoning") => {
                let mut message = Message::new("assistant", "");
                let thought = item.thought(&field)?;
                if !thought.is_empty() {
                    let thought = thought.into();
                    message.more.insert("reasoning_content".into(), thought);
                    messages.push(message);
                    thought_last = true;
                }
            }
            Some("function_call") => {
                let name = needed(item.name, &field, "name")?;
                let arguments = needed(item.arguments, &field, "arguments")?;
                let id = needed(item.call_id, &field, "call_id")?;
                let call = chat::call(Some(id), &name, chat::arguments(arguments));
                add_call(&mut messages, call);
            }
            Some("function_call_output") => {
                let id = needed(item.call_id, &field, "call_id")?;
                let output = needed(item.output, &field, "output")?;
                let text = text(output, &format!("{field}.output"))?;
                let mut message = Message::new("tool", text);
                message.more.insert("tool_call_id".into(), id.into());
                messages.push(message);
            }
            Some("item_reference") => {
                let message = format!(
                    "`{field}` refers to an item, but items are not kept; send it, or `previous_response_id`"
                );
                return Err(ApiError::field(field, message));
            }
            Some(_) => ignored.note(&field)?,
        }
    }
    Ok(messages)
}

/// Adds a call to the assistant's message that it belongs to.
fn add_call(messages: &mut Vec<Message>, call: Value) {
    if messages.last().is_none_or(|last| last.role != "assistant") {
        messages.push(Message::new("assistant", ""));
    }
    if let Some(last) = messages.last_mut() {
        let calls = last.more.entry("tool_calls").or_insert_with(|| json!([]));
        if let Value::Array(calls) = calls {
            calls.push(call);
        }
    }
}

impl Role {
    fn name(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
        }
    }
}

impl Item {
    /// What was thought, or what it was summed up as.
    fn thought(self, field: &str) -> Result<String, ApiError> {
        match self.content {
            Some(content) => text(content, &format!("{field}.content")),
            None => {
                let summary = TextOrParts::Parts(self.summary.unwrap_or_default());
                text(summary, &format!("{field}.summary"))
            }
        }
    }
}

/// What a message says: one text, or parts where images are among them, which join `shown`.
fn said(
    content: TextOrParts<Part>,
    field: &str,
    shown: &mut Vec<Image>,
) -> Result<Value, ApiError> {
    let parts = match content {
        TextOrParts::Text(text) => return Ok(text.into()),
        TextOrParts::Parts(parts) => parts.into_iter().enumerate(),
    };
    let parts = parts.map(|(place, part)| {
        let field = format!("{field}[{place}]");
        match part.kind {
            PartKind::InputImage => {
                let address = needed(part.image_url, &field, "image_url")?;
                shown.push(images::of_address(&address, &format!("{field}.image_url"))?);
                Ok(images::place())
            }
            _ => part.text(&field).map(images::text),
        }
    });
    Ok(images::content(parts.collect::<Result<_, ApiError>>()?))
}

impl Part {
    fn text(self, field: &str) -> Result<String, ApiError> {
        match self.kind {
            PartKind::InputImage => {
                let message = format!("`{field}` is an image; images are taken in messages alone");
                Err(ApiError::field(field, message))
            }
            PartKind::InputFile | PartKind::InputAudio => {
                let message =
                    format!("`{field}` is a file or sound, which this server does not take");
                Err(ApiError::field(field, message))
            }
            PartKind::Refusal => needed(self.refusal, field, "refusal"),
            _ => needed(self.text, field, "text"),
        }
    }
}

/// A text of parts that are texts all of them.
fn text(content: TextOrParts<Part>, field: &str) -> Result<String, ApiError> {
    let parts = match content {
        TextOrParts::Text(text) => return Ok(text),
        TextOrParts::Parts(parts) => parts.into_iter().enumerate(),
    };
    let texts = parts.map(|(place, part)| part.text(&format!("{field}[{place}]")));
    Ok(texts.collect::<Result<Vec<_>, _>>()?.join("\n"))
}

fn needed<T>(value: Option<T>, item: &str, name: &str) -> Result<T, ApiError> {
    value.ok_or_else(|| {
        let field = format!("{item}.{name}");
        ApiError::field(field.clone(), format!("`{field}` is missing"))
    })
}
