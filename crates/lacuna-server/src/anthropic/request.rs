//! What a request may say, and that as a [`Chat`].

use std::time::Duration;

use lacuna_text::reply::Effort;
use lacuna_text::template::Message;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::chat::{self, Chat, TextOrParts};
use crate::http::error::ApiError;
use crate::http::ignored::Ignored;
use crate::images::{self, Image};
use crate::openai::parameters::{OneOrMany, Parameters};
use crate::structured::Format;
use crate::structured::tools::{ChoiceWord, ToolChoice};

#[derive(Debug, Deserialize)]
pub(super) struct MessagesRequest {
    messages: Vec<MessageParam>,
    #[serde(default)]
    model: Option<String>,
    #[serde(default)]
    max_tokens: Option<usize>,
    #[serde(default)]
    system: Option<TextOrParts<Block>>,
    #[serde(default)]
    tools: Option<Vec<Tool>>,
    #[serde(default)]
    tool_choice: Option<Choice>,
    #[serde(default)]
    thinking: Option<Thinking>,
    #[serde(default)]
    output_config: Option<OutputConfig>,
    /// As it was called before it went into `output_config`.
    #[serde(default)]
    output_format: Option<OutputFormat>,
    #[serde(default)]
    stop_sequences: Option<Vec<String>>,
    #[serde(default)]
    temperature: Option<f32>,
    #[serde(default)]
    top_p: Option<f32>,
    #[serde(default)]
    top_k: Option<i64>,
    #[serde(default)]
    stream: Option<bool>,
    #[serde(default)]
    cache_control: Option<CacheControl>,
    /// The name under which a cache folder keeps the conversation, as for OpenAI's chats.
    #[serde(default)]
    session: Option<String>,
    /// Who asks, and in which queue: without effect.
    #[serde(default, rename = "metadata")]
    _metadata: Option<Value>,
    #[serde(default, rename = "service_tier")]
    _service_tier: Option<Value>,
}

#[derive(Debug, Deserialize)]
struct MessageParam {
    role: Role,
    content: TextOrParts<Block>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Role {
    User,
    Assistant,
    System,
}

/// A block of any kind: which fields it has depends on that.
#[derive(Debug, Deserialize)]
struct Block {
    #[serde(rename = "type")]
    kind: BlockKind,
    #[serde(default)]
    text: Option<String>,
    #[serde(default)]
    thinking: Option<String>,
    #[serde(default)]
    id: Option<String>,
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    input: Option<Map<String, Value>>,
    #[serde(default)]
    tool_use_id: Option<String>,
    #[serde(default)]
    content: Option<TextOrParts<Block>>,
    #[serde(default)]
    is_error: Option<bool>,
    #[serde(default)]
    source: Option<Source>,
    #[serde(default)]
    cache_control: Option<CacheControl>,
    /// What comes with replies, and back with them.
    #[serde(default, rename = "signature")]
    _signature: Option<Value>,
    #[serde(default, rename = "citations")]
    _citations: Option<Value>,
    #[serde(default, rename = "data")]
    _data: Option<Value>,
    #[serde(default, rename = "caller")]
    _caller: Option<Value>,
}

/// Where an image is.
#[derive(Debug, Deserialize)]
struct Source {
    #[serde(rename = "type")]
    kind: String,
    #[serde(default)]
    data: Option<String>,
    /// Files say it themselves.
    #[serde(default, rename = "media_type")]
    _media_type: Option<String>,
    #[serde(default)]
    url: Option<String>,
    #[serde(default, rename = "file_id")]
    _file_id: Option<Value>,
}

impl Source {
    fn image(self, field: &str) -> Result<Image, ApiError> {
        match self.kind.as_str() {
            "base64" => {
                let data = needed(self.data, field, "data")?;
                images::of_base64(&data, &format!("{field}.data"))
            }
            "url" => {
                let address = needed(self.url, field, "url")?;
                images::of_address(&address, &format!("{field}.url"))
            }
            kind => {
                let message = format!(
                    "`{field}` is of the type `{kind}`: this server has no files; send the image itself, as `base64`"
                );
                Err(ApiError::field(field, message))
            }
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum BlockKind {
    Text,
    Thinking,
    RedactedThinking,
    ToolUse,
    ToolResult,
    Image,
    Document,
}

#[derive(Debug, Deserialize)]
struct Tool {
    /// A tool of the client's own has none, or `custom`.
    #[serde(default, rename = "type")]
    kind: Option<String>,
    name: String,
    #[serde(default)]
    description: Option<String>,
    #[serde(default)]
    input_schema: Option<Value>,
    /// Schemas are always followed strictly.
    #[serde(default, rename = "strict")]
    _strict: Option<bool>,
    #[serde(default)]
    cache_control: Option<CacheControl>,
}

#[derive(Debug, Deserialize)]
struct Choice {
    #[serde(rename = "type")]
    kind: ChoiceKind,
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    disable_parallel_tool_use: Option<bool>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
enum ChoiceKind {
    Auto,
    Any,
    Tool,
    None,
}

#[derive(Debug, Deserialize)]
struct Thinking {
    #[serde(rename = "type")]
    kind: ThinkingKind,
    #[serde(default)]
    budget_tokens: Option<usize>,
    #[serde(default)]
    display: Option<Display>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum ThinkingKind {
    Enabled,
    Adaptive,
    Disabled,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Display {
    /// Thoughts are sent. Here they are never shortened.
    Summarized,
    Omitted,
}

#[derive(Debug, Deserialize)]
struct OutputConfig {
    #[serde(default)]
    effort: Option<Effort>,
    #[serde(default)]
    format: Option<OutputFormat>,
}

#[derive(Debug, Deserialize)]
struct OutputFormat {
    #[serde(rename = "type")]
    _kind: OutputKind,
    schema: Value,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum OutputKind {
    JsonSchema,
}

#[derive(Debug, Deserialize)]
struct CacheControl {
    #[serde(rename = "type")]
    _kind: Ephemeral,
    #[serde(default)]
    ttl: TimeToLive,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Ephemeral {
    Ephemeral,
}

#[derive(Debug, Clone, Copy, Default, Deserialize)]
enum TimeToLive {
    #[default]
    #[serde(rename = "5m")]
    Minutes,
    #[serde(rename = "1h")]
    Hour,
}

/// Where a request says how many tokens may be thought.
const BUDGET: &str = "thinking.budget_tokens";
/// The least `budget_tokens`, as Anthropic has it.
const LEAST_BUDGET: usize = 1024;
/// Claude Code tells the service with it who pays. It differs between conversations, and in some
/// versions between turns; to the model it says nothing.
const BILLING_HEADER: &str = "x-anthropic-billing-header:";

impl MessagesRequest {
    pub(super) fn model(&self) -> Option<&str> {
        self.model.as_deref()
    }

    pub(super) fn is_streamed(&self) -> bool {
        self.stream == Some(true)
    }

    pub(super) fn chat(self, ignored: &mut Ignored) -> Result<Chat, ApiError> {
        let most = self.max_tokens.filter(|&most| most > 0).ok_or_else(|| {
            ApiError::field("max_tokens", "`max_tokens` is needed, and at least 1")
        })?;
        if let Some(thinking) = &self.thinking {
            thinking.check(most)?;
        }
        self.chat_to_count(ignored)
    }

    /// The same, where nothing is written, so that it need not be said how much may be.
    pub(super) fn chat_to_count(self, ignored: &mut Ignored) -> Result<Chat, ApiError> {
        let pin_prefix = self.time_to_live().map(TimeToLive::duration);
        let thinks = self.thinking.as_ref().is_some_and(Thinking::is_on);
        let told = self.thinking.as_ref().is_some_and(Thinking::is_told);
        let budget = self.thinking.as_ref().and_then(Thinking::budget);
        let output = self.output_config;
        let (effort, format) = output.map_or((None, None), |it| (it.effort, it.format));
        let format = format.or(self.output_format);
        let choice = self.tool_choice;
        let one_call = choice
            .as_ref()
            .and_then(|choice| choice.disable_parallel_tool_use);
        let (messages, images) = messages(self.system, self.messages)?;
        Ok(Chat {
            messages,
            images,
            tools: tools(self.tools.unwrap_or_default(), ignored)?,
            tool_choice: choice.map(Choice::read).transpose()?,
            one_call: one_call == Some(true),
            format: format.map(|format| Format::of_schema(format.schema)),
            variables: Some(thinking_variables(thinks)),
            parameters: Parameters {
                session: self.session,
                max_tokens: self.max_tokens,
                temperature: self.temperature,
                top_p: self.top_p,
                top_k: self.top_k,
                stop: self.stop_sequences.map(OneOrMany::Many),
                reasoning_effort: effort,
                include_reasoning: Some(told),
                thinking_token_budget: budget,
                budget_field: Some(BUDGET),
                ..Parameters::default()
            }
            .checked()?,
            logprobs: None,
            pin_prefix,
        })
    }

    /// The longest that anything is to be kept. Whatever part of the prompt that is said of, all of it
    /// is: the rest begins with it.
    fn time_to_live(&self) -> Option<TimeToLive> {
        let tools = self.tools.iter().flatten();
        let tools = tools.filter_map(|tool| tool.cache_control.as_ref());
        let system = self.system.iter();
        let contents = system.chain(self.messages.iter().map(|message| &message.content));
        let blocks = contents.flat_map(TextOrParts::parts);
        let blocks = blocks.filter_map(|block| block.cache_control.as_ref());
        let all = self.cache_control.iter().chain(tools).chain(blocks);
        all.map(|control| control.ttl)
            .max_by_key(|ttl| ttl.duration())
    }
}

/// The switches that templates have. Without `thinking`, a model that can be kept from it is.
fn thinking_variables(thinks: bool) -> Map<String, Value> {
    let switches = ["enable_thinking", "thinking"];
    let set = |name: &str| (name.to_owned(), thinks.into());
    switches.into_iter().map(set).collect()
}

impl TimeToLive {
    fn duration(self) -> Duration {
        Duration::from_secs(match self {
            Self::Minutes => 5 * 60,
            Self::Hour => 60 * 60,
        })
    }
}

impl Thinking {
    fn is_on(&self) -> bool {
        self.kind != ThinkingKind::Disabled
    }

    fn is_told(&self) -> bool {
        self.is_on() && self.display != Some(Display::Omitted)
    }

    /// Refuses a budget that is none.
    fn check(&self, max_tokens: usize) -> Result<(), ApiError> {
        let field = BUDGET;
        match (self.kind, self.budget_tokens) {
            (ThinkingKind::Enabled, None) => Err(ApiError::field(
                field,
                format!("`{field}` is needed with `enabled`"),
            )),
            (ThinkingKind::Enabled, Some(budget))
                if budget < LEAST_BUDGET || budget >= max_tokens =>
            {
                Err(ApiError::field(
                    field,
                    format!(
                        "`{field}` is {budget}, expected {LEAST_BUDGET} or more, and less than `max_tokens`, {max_tokens}"
                    ),
                ))
            }
            _ => Ok(()),
        }
    }

    /// Tokens that may be thought.
    fn budget(&self) -> Option<i64> {
        self.budget_tokens
            .filter(|_| self.is_on())
            .and_then(|tokens| tokens.try_into().ok())
    }
}

impl Choice {
    fn read(self) -> Result<ToolChoice, ApiError> {
        Ok(match (self.kind, self.name) {
            (ChoiceKind::Auto, _) => ToolChoice::Word(ChoiceWord::Auto),
            (ChoiceKind::Any, _) => ToolChoice::Word(ChoiceWord::Required),
            (ChoiceKind::None, _) => ToolChoice::Word(ChoiceWord::None),
            (ChoiceKind::Tool, Some(name)) => ToolChoice::of_tool(name),
            (ChoiceKind::Tool, None) => {
                let message = "`tool_choice.name` is needed with `tool`";
                return Err(ApiError::field("tool_choice.name", message));
            }
        })
    }
}

/// The tools of the client's own. Those that the service would run, or whose schema it would know, are
/// left out and named.
fn tools(tools: Vec<Tool>, ignored: &mut Ignored) -> Result<Vec<Value>, ApiError> {
    let mut read = Vec::with_capacity(tools.len());
    for (index, tool) in tools.into_iter().enumerate() {
        if tool.kind.as_deref().is_some_and(|kind| kind != "custom") {
            ignored.note(&format!("tools[{index}]"))?;
            continue;
        }
        let schema = tool.input_schema.ok_or_else(|| {
            let field = format!("tools[{index}].input_schema");
            ApiError::field(field.clone(), format!("`{field}` is missing"))
        })?;
        let mut function = json!({"name": tool.name, "parameters": schema});
        if let Some(description) = tool.description {
            function["description"] = description.into();
        }
        read.push(json!({"type": "function", "function": function}));
    }
    Ok(read)
}

/// The messages as the template takes them.
fn messages(
    system: Option<TextOrParts<Block>>,
    messages: Vec<MessageParam>,
) -> Result<(Vec<Message>, Vec<Image>), ApiError> {
    if !matches!(messages.last(), Some(last) if !matches!(last.role, Role::Assistant)) {
        return Err(ApiError::field(
            "messages",
            "`messages` must end with one of the user: replies are not begun by the client here",
        ));
    }
    let (mut read, mut shown) = (Vec::new(), Vec::new());
    if let Some(system) = system {
        let text = texts(system, "system", |text| !text.starts_with(BILLING_HEADER))?;
        if !text.is_empty() {
            read.push(Message::new("system", text));
        }
    }
    for (index, message) in messages.into_iter().enumerate() {
        let field = format!("messages[{index}].content");
        match (message.role, message.content) {
            (Role::User, TextOrParts::Text(text)) => read.push(Message::new("user", text)),
            (Role::User, TextOrParts::Parts(blocks)) => {
                from_user(blocks, &field, &mut read, &mut shown)?;
            }
            (Role::System, content) => {
                read.push(Message::new("system", texts(content, &field, |_| true)?));
            }
            (Role::Assistant, TextOrParts::Text(text)) => {
                read.push(Message::new("assistant", text));
            }
            (Role::Assistant, TextOrParts::Parts(blocks)) => {
                read.push(from_assistant(blocks, &field)?);
            }
        }
    }
    Ok((read, shown))
}

/// Results of tools, texts and images, in their order; images join `shown`.
fn from_user(
    blocks: Vec<Block>,
    field: &str,
    read: &mut Vec<Message>,
    shown: &mut Vec<Image>,
) -> Result<(), ApiError> {
    let mut said: Vec<Value> = Vec::new();
    let say = |said: &mut Vec<Value>, read: &mut Vec<Message>| {
        if !said.is_empty() {
            let mut message = Message::new("user", "");
            message.content = images::content(std::mem::take(said));
            read.push(message);
        }
    };
    let empty = blocks.is_empty();
    for (place, block) in blocks.into_iter().enumerate() {
        let field = format!("{field}[{place}]");
        match block.kind {
            BlockKind::Text => said.push(images::text(needed(block.text, &field, "text")?)),
            BlockKind::Image => {
                let source = needed(block.source, &field, "source")?;
                shown.push(source.image(&format!("{field}.source"))?);
                said.push(images::place());
            }
            BlockKind::ToolResult => {
                say(&mut said, read);
                read.push(block.result(&field)?);
            }
            kind => return Err(misplaced(kind, &field)),
        }
    }
    if empty {
        said.push(images::text(String::new()));
    }
    say(&mut said, read);
    Ok(())
}

/// What was thought, said and called, as one message.
fn from_assistant(blocks: Vec<Block>, field: &str) -> Result<Message, ApiError> {
    let (mut thoughts, mut said, mut calls) = (Vec::new(), Vec::new(), Vec::new());
    for (place, block) in blocks.into_iter().enumerate() {
        let field = format!("{field}[{place}]");
        match block.kind {
            BlockKind::Text => said.push(needed(block.text, &field, "text")?),
            BlockKind::Thinking => thoughts.push(needed(block.thinking, &field, "thinking")?),
            // Nobody here can read it.
            BlockKind::RedactedThinking => {}
            BlockKind::ToolUse => {
                let id = needed(block.id, &field, "id")?;
                let name = needed(block.name, &field, "name")?;
                let input = needed(block.input, &field, "input")?;
                calls.push(chat::call(Some(id), &name, input.into()));
            }
            kind => return Err(misplaced(kind, &field)),
        }
    }
    let mut message = Message::new("assistant", said.join("\n"));
    if !thoughts.is_empty() {
        let thoughts = thoughts.join("\n").into();
        message.more.insert("reasoning_content".into(), thoughts);
    }
    if !calls.is_empty() {
        message.more.insert("tool_calls".into(), calls.into());
    }
    Ok(message)
}

impl Block {
    fn result(self, field: &str) -> Result<Message, ApiError> {
        let id = needed(self.tool_use_id, field, "tool_use_id")?;
        let text = match self.content {
            None => String::new(),
            Some(content) => texts(content, &format!("{field}.content"), |_| true)?,
        };
        // Templates have no place for it.
        let text = match self.is_error {
            Some(true) => format!("Error: {text}"),
            _ => text,
        };
        let mut message = Message::new("tool", text);
        message.more.insert("tool_call_id".into(), id.into());
        Ok(message)
    }
}

/// A text, or those blocks of one that `is_kept`, which must be texts all of them.
fn texts(
    content: TextOrParts<Block>,
    field: &str,
    is_kept: impl Fn(&str) -> bool,
) -> Result<String, ApiError> {
    let blocks = match content {
        TextOrParts::Text(text) => return Ok(text),
        TextOrParts::Parts(blocks) => blocks.into_iter().enumerate(),
    };
    let texts = blocks.map(|(place, block)| {
        let field = format!("{field}[{place}]");
        match block.kind {
            BlockKind::Text => needed(block.text, &field, "text"),
            kind => Err(misplaced(kind, &field)),
        }
    });
    let mut texts = texts.collect::<Result<Vec<_>, _>>()?;
    texts.retain(|text| is_kept(text));
    Ok(texts.join("\n"))
}

fn needed<T>(value: Option<T>, block: &str, name: &str) -> Result<T, ApiError> {
    value.ok_or_else(|| {
        let field = format!("{block}.{name}");
        ApiError::field(field.clone(), format!("`{field}` is missing"))
    })
}

fn misplaced(kind: BlockKind, field: &str) -> ApiError {
    let message = match kind {
        BlockKind::Image | BlockKind::Document => {
            format!(
                "`{field}` is an image or a document: images are taken in messages of the user, beside results, and \
                 documents not at all"
            )
        }
        _ => format!("`{field}` is of a type that does not belong there"),
    };
    ApiError::field(field, message)
}
