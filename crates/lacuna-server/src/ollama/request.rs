//! What requests may say, and that as a [`Chat`].

use lacuna_engine::Request;
use lacuna_text::reply::Effort;
use lacuna_text::template::Message;
use lacuna_text::tokenizer::{AddSpecial, ParseSpecial, Special};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::app::App;
use crate::chat::{self, Chat};
use crate::http::error::ApiError;
use crate::http::ignored::Ignored;
use crate::images::{self, HasImages, Image};
use crate::ollama::{KeepAlive, Serves, check_keep_alive};
use crate::openai::fields;
use crate::openai::parameters::{OneOrMany, Parameters};
use crate::reply::parts::PartReader;
use crate::reply::{Note, Reader};
use crate::sharing::Client;
use crate::structured::Format;

#[derive(Debug, Deserialize)]
pub(super) struct ChatRequest {
    model: String,
    #[serde(default)]
    messages: Option<Vec<ChatMessage>>,
    #[serde(default)]
    tools: Option<Vec<Value>>,
    #[serde(default)]
    stream: Option<bool>,
    #[serde(default)]
    format: Option<Value>,
    #[serde(default)]
    options: Option<Options>,
    #[serde(default)]
    think: Option<Think>,
    #[serde(default)]
    keep_alive: Option<KeepAlive>,
}

#[derive(Debug, Deserialize)]
pub(super) struct GenerateRequest {
    model: String,
    #[serde(default)]
    prompt: Option<String>,
    #[serde(default)]
    system: Option<String>,
    /// Whether the prompt is the model's text as it is.
    #[serde(default)]
    raw: Option<bool>,
    #[serde(default)]
    stream: Option<bool>,
    #[serde(default)]
    format: Option<Value>,
    #[serde(default)]
    options: Option<Options>,
    #[serde(default)]
    think: Option<Think>,
    #[serde(default)]
    keep_alive: Option<KeepAlive>,
    #[serde(default)]
    suffix: Option<String>,
    #[serde(default)]
    template: Option<String>,
    #[serde(default)]
    context: Option<Vec<Value>>,
    #[serde(default)]
    images: Option<Vec<String>>,
}

#[derive(Debug, Deserialize)]
struct ChatMessage {
    role: Role,
    #[serde(default)]
    content: Option<String>,
    #[serde(default)]
    thinking: Option<String>,
    #[serde(default)]
    images: Option<Vec<String>>,
    #[serde(default)]
    tool_calls: Option<Vec<ToolCall>>,
    #[serde(default)]
    tool_name: Option<String>,
    #[serde(default)]
    tool_call_id: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Role {
    System,
    User,
    Assistant,
    Tool,
}

#[derive(Debug, Deserialize)]
struct ToolCall {
    #[serde(default)]
    id: Option<String>,
    function: Function,
}

#[derive(Debug, Deserialize)]
struct Function {
    name: String,
    #[serde(default)]
    arguments: Map<String, Value>,
    #[serde(default, rename = "index")]
    _index: Option<u32>,
}

/// Settings that a model may have elsewhere too; those of the machine are not a request's to say here.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Options {
    /// The name under which a cache folder keeps the conversation: here, because clients send no other fields of their own.
    session: Option<String>,
    num_predict: Option<i64>,
    num_ctx: Option<usize>,
    temperature: Option<f32>,
    top_k: Option<i64>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    repeat_penalty: Option<f32>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    seed: Option<i64>,
    stop: Option<OneOrMany>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(untagged, expecting = "expected true, false, or low, medium or high")]
enum Think {
    Switch(bool),
    Effort(Effort),
}

/// What is to be done.
#[derive(Debug)]
pub(super) struct Wanted {
    pub(super) work: Work,
    pub(super) streamed: bool,
}

#[derive(Debug)]
pub(super) enum Work {
    /// Nothing: it is asked that the model be loaded, which it is, or unloaded, which it will be.
    None {
        unloads: bool,
    },
    Chat(Box<Chat>),
    /// A text is continued as it is.
    Raw(String, Box<Parameters>),
}

/// Settings that chats and prompts share.
struct Settings {
    options: Option<Options>,
    format: Option<Value>,
    think: Option<Think>,
}

impl ChatRequest {
    pub(super) fn wanted(self, app: &App, ignored: &mut Ignored) -> Result<Wanted, ApiError> {
        app.check_tagged(&self.model)?;
        let unloads = check_keep_alive(self.keep_alive.as_ref(), app.is_unloaded(), ignored)?;
        let streamed = self.stream != Some(false);
        let messages = self.messages.unwrap_or_default();
        if messages.is_empty() {
            return Ok(Wanted::nothing(unloads));
        }
        let mut tools = self.tools.unwrap_or_default();
        fields::take_unknown_of_tools(&mut tools, ignored)?;
        let settings = Settings {
            options: self.options,
            format: self.format,
            think: self.think,
        };
        let (messages, images) = read(messages)?;
        let chat = Chat {
            tools,
            images,
            ..settings.chat(app, messages)?
        };
        Ok(Wanted {
            work: Work::Chat(Box::new(chat)),
            streamed,
        })
    }
}

impl GenerateRequest {
    pub(super) fn wanted(self, app: &App, ignored: &mut Ignored) -> Result<Wanted, ApiError> {
        app.check_tagged(&self.model)?;
        let unloads = check_keep_alive(self.keep_alive.as_ref(), app.is_unloaded(), ignored)?;
        self.check()?;
        let streamed = self.stream != Some(false);
        let Some(prompt) = self.prompt.filter(|prompt| !prompt.is_empty()) else {
            return Ok(Wanted::nothing(unloads));
        };
        let settings = Settings {
            options: self.options,
            format: self.format,
            think: self.think,
        };
        let work = match self.raw {
            Some(true) => {
                if settings
                    .format
                    .as_ref()
                    .is_some_and(|format| !is_empty(format))
                {
                    let message = "`format` is for prompts that are not `raw`; leave it out";
                    return Err(ApiError::field("format", message));
                }
                let options = settings.options.unwrap_or_default();
                Work::Raw(prompt, Box::new(options.parameters(app)?))
            }
            _ => {
                let system = self.system.filter(|system| !system.is_empty());
                let system = system.map(|system| Message::new("system", system));
                let (mut asked, mut images) = (Message::new("user", prompt), Vec::new());
                show(&mut asked, self.images, "images", &mut images)?;
                let messages = system.into_iter().chain([asked]);
                Work::Chat(Box::new(Chat {
                    images,
                    ..settings.chat(app, messages.collect())?
                }))
            }
        };
        Ok(Wanted { work, streamed })
    }

    /// Refuses what would change the reply elsewhere.
    fn check(&self) -> Result<(), ApiError> {
        let set = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
        let some = |list: &Option<Vec<Value>>| list.as_ref().is_some_and(|list| !list.is_empty());
        let has_images = (self.images.as_ref()).is_some_and(|images| !images.is_empty());
        for (field, asked) in [
            ("suffix", set(&self.suffix)),
            ("template", set(&self.template)),
            ("context", some(&self.context)),
            ("images", self.raw == Some(true) && has_images),
        ] {
            if asked {
                let message = format!("`{field}` is not supported by this server; leave it out");
                return Err(ApiError::field(field, message));
            }
        }
        Ok(())
    }
}

impl HasImages for Wanted {
    fn images(&mut self) -> &mut [Image] {
        match &mut self.work {
            Work::Chat(chat) => chat.images(),
            Work::None { .. } | Work::Raw(..) => &mut [],
        }
    }
}

impl Wanted {
    fn nothing(unloads: bool) -> Self {
        Self {
            work: Work::None { unloads },
            streamed: false,
        }
    }
}

impl Settings {
    fn chat(self, app: &App, messages: Vec<Message>) -> Result<Chat, ApiError> {
        let options = self.options.unwrap_or_default();
        let mut parameters = options.parameters(app)?;
        let mut variables = Map::new();
        if let Some(think) = self.think {
            let on = !matches!(think, Think::Switch(false) | Think::Effort(Effort::None));
            for switch in ["enable_thinking", "thinking"] {
                variables.insert(switch.to_owned(), on.into());
            }
            parameters.include_reasoning = Some(on);
            if let Think::Effort(effort) = think {
                parameters.reasoning_effort = Some(effort);
            }
        }
        Ok(Chat {
            messages,
            format: self.format.map(format).transpose()?.flatten(),
            variables: Some(variables),
            parameters,
            ..Chat::default()
        })
    }
}

fn is_empty(format: &Value) -> bool {
    format.is_null() || format.as_str() == Some("")
}

fn format(format: Value) -> Result<Option<Format>, ApiError> {
    match format {
        format if is_empty(&format) => Ok(None),
        Value::String(word) if word == "json" => {
            Ok(Some(Format::of_schema(json!({"type": "object"}))))
        }
        schema @ Value::Object(_) => Ok(Some(Format::of_schema(schema))),
        _ => Err(ApiError::field(
            "format",
            "`format` must be `json` or a JSON schema",
        )),
    }
}

impl Options {
    fn parameters(self, app: &App) -> Result<Parameters, ApiError> {
        let context = app.engine.context_tokens();
        if let Some(asked) = self.num_ctx.filter(|&asked| asked > context) {
            let field = "options.num_ctx";
            let message = format!(
                "`{field}` is {asked}, but this server was started with contexts of {context} tokens"
            );
            return Err(ApiError::field(field, message));
        }
        Parameters {
            session: self.session,
            // Zero and below: until the model ends or the context is full.
            max_tokens: (self.num_predict.filter(|most| *most > 0))
                .and_then(|most| usize::try_from(most).ok()),
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repeat_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            seed: self.seed,
            stop: self.stop,
            ..Parameters::default()
        }
        .checked()
    }
}

/// The messages as the template takes them. Calls have no names here, but templates want some, by which
/// results belong to them: they are counted.
fn read(messages: Vec<ChatMessage>) -> Result<(Vec<Message>, Vec<Image>), ApiError> {
    let (mut calls, mut shown) = (0, Vec::new());
    let mut unanswered: Vec<(String, String)> = Vec::new();
    let messages = messages.into_iter().enumerate();
    let messages = messages.map(|(index, message)| {
        let text = message.content.unwrap_or_default();
        let mut read = Message::new(message.role.name(), text);
        let field = format!("messages[{index}].images");
        show(&mut read, message.images, &field, &mut shown)?;
        if let Some(thinking) = message.thinking.filter(|thinking| !thinking.is_empty()) {
            read.more
                .insert("reasoning_content".into(), thinking.into());
        }
        let made = message.tool_calls.unwrap_or_default().into_iter();
        let made = made.map(|made| {
            let id = made.id.unwrap_or_else(|| format!("call{calls:05}"));
            calls += 1;
            let name = made.function.name;
            let call = chat::call(Some(id.clone()), &name, made.function.arguments.into());
            unanswered.push((name, id));
            call
        });
        let made: Vec<Value> = made.collect();
        if !made.is_empty() {
            read.more.insert("tool_calls".into(), made.into());
        }
        if message.role == Role::Tool {
            let name = message.tool_name.as_deref();
            let first = unanswered
                .iter()
                .position(|(called, _)| name.is_none_or(|name| name == called));
            let answered = first.map(|first| unanswered.remove(first).1);
            if let Some(id) = message.tool_call_id.or(answered) {
                read.more.insert("tool_call_id".into(), id.into());
            }
            if let Some(name) = message.tool_name {
                read.more.insert("name".into(), name.into());
            }
        }
        Ok(read)
    });
    let messages = messages.collect::<Result<_, ApiError>>()?;
    Ok((messages, shown))
}

/// Puts images, which are base64, before a message's text, and behind `shown`.
fn show(
    message: &mut Message,
    given: Option<Vec<String>>,
    field: &str,
    shown: &mut Vec<Image>,
) -> Result<(), ApiError> {
    let given = given.unwrap_or_default();
    if given.is_empty() {
        return Ok(());
    }
    let mut parts = vec![images::place(); given.len()];
    if let Value::String(text) = message.content.take() {
        parts.push(images::text(text));
    }
    message.content = images::content(parts);
    for (place, encoded) in given.iter().enumerate() {
        shown.push(images::of_base64(encoded, &format!("{field}[{place}]"))?);
    }
    Ok(())
}

impl Role {
    fn name(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }
}

/// The request that continues `prompt` as it is.
pub(super) fn continued(
    app: &App,
    client: Client,
    prompt: &str,
    parameters: &Parameters,
) -> Result<(Request, Reader), ApiError> {
    let special = Special {
        add: AddSpecial::Yes,
        parse: ParseSpecial::Yes,
    };
    let tokenizer = app.model().tokenizer();
    let tokens = tokenizer.encode_within(prompt, special, &app.encode_limits())?;
    let mut request = parameters.request(tokens, None, app.model().recommended_sampling())?;
    request.prefix_namespace = app.sharing.namespace(client, None);
    request.session = app.session(client, parameters.session.as_deref())?;
    let reader = Reader::new(Some(&request), &[Note::default()], PartReader::none());
    Ok((request, reader))
}
