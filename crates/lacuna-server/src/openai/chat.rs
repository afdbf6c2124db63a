//! `POST /v1/chat/completions`.

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::response::Response;
use lacuna_engine::Request;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::app::{App, Purpose};
use crate::chat::Chat;
use crate::http::body::{self, Arriving};
use crate::http::error::ApiError;
use crate::http::ignored::Ignored;
use crate::images::{HasImages, Image};
use crate::openai::fields;
use crate::openai::messages::{self, ChatMessage};
use crate::openai::parameters::{MOST_LOGPROBS, Parameters};
use crate::openai::reply::{self, Dialect, Form};
use crate::openai::tokens::{self, Rendered};
use crate::reply::Reader;
use crate::sharing::Client;
use crate::structured::Format;
use crate::structured::tools::ToolChoice;

#[derive(Debug, Deserialize)]
struct ChatRequest {
    messages: Vec<ChatMessage>,
    #[serde(default)]
    model: Option<String>,
    #[serde(default)]
    logprobs: Option<bool>,
    #[serde(default)]
    top_logprobs: Option<usize>,
    #[serde(default)]
    tools: Option<Vec<Value>>,
    #[serde(default)]
    tool_choice: Option<ToolChoice>,
    /// Whether one reply may call several tools, or one several times.
    #[serde(default)]
    parallel_tool_calls: Option<bool>,
    /// Further variables of the chat template, such as `enable_thinking`.
    #[serde(default)]
    chat_template_kwargs: Option<Map<String, Value>>,
}

pub(crate) async fn complete(
    State(app): State<Arc<App>>,
    Extension(client): Extension<Client>,
    body: Arriving,
) -> Result<Response, ApiError> {
    let read = |app: &App, object| {
        let mut ignored = app.ignored();
        let chat = read(app, object, &mut ignored)?;
        Ok(Asked { chat, ignored })
    };
    let finish = move |app: &App, asked| prepare(app, client, asked);
    let prepared = app.prepare_shown(body, read, finish).await?;
    let (request, reader, form) = prepared.value;
    let streams = app.submit(vec![request], prepared.memory).await?;
    reply::send(streams, reader, form).await
}

/// A chat, and what was said with it without effect.
struct Asked {
    chat: Chat,
    ignored: Ignored,
}

impl HasImages for Asked {
    fn images(&mut self) -> &mut [Image] {
        self.chat.images()
    }
}

fn prepare(
    app: &App,
    client: Client,
    Asked { chat, mut ignored }: Asked,
) -> Result<(Request, Reader, Form), ApiError> {
    let parameters = &chat.parameters;
    let id = app.reply_id("chatcmpl");
    let form = Form::new(app, id.clone(), Dialect::Chat, parameters.delivery()?)
        .scoring_prompts(parameters.prompt_logprobs())
        .naming_ids(parameters.return_tokens_as_token_ids == Some(true));
    let (request, reader) = chat.request(app, client, &id, &mut ignored)?;
    Ok((request, reader, form.ignoring(ignored)))
}

/// `POST /v1/chat/completions/render`: the tokens of the prompt, of which nothing is computed.
pub(crate) async fn render(
    State(app): State<Arc<App>>,
    body: Arriving,
) -> Result<Response, ApiError> {
    let work = |app: &App, object| {
        let mut ignored = app.ignored();
        let chat = read(app, object, &mut ignored)?;
        let token_ids = chat.tokens(app)?;
        Ok((Rendered { token_ids }, ignored))
    };
    tokens::reply(app.prepare(body, Purpose::Tokens, work).await?)
}

fn read(
    app: &App,
    mut object: Map<String, Value>,
    ignored: &mut Ignored,
) -> Result<Chat, ApiError> {
    let parameters = Parameters::take(&mut object, ignored)?;
    if parameters.echoes() {
        return Err(ApiError::field(
            "echo",
            "`echo` is for completions; leave it out",
        ));
    }
    let format = Format::take(&mut object, ignored)?;
    let mut chat: ChatRequest = body::read(object, ignored)?;
    if let Some(tools) = &mut chat.tools {
        fields::take_unknown_of_tools(tools, ignored)?;
    }
    app.check_model(chat.model.as_deref())?;
    let logprobs = chat.logprobs()?;
    let (messages, images) = messages::for_template(chat.messages)?;
    Ok(Chat {
        logprobs,
        messages,
        images,
        tools: chat.tools.unwrap_or_default(),
        tool_choice: chat.tool_choice,
        one_call: chat.parallel_tool_calls == Some(false),
        format,
        variables: chat.chat_template_kwargs,
        parameters,
        pin_prefix: None,
    })
}

impl ChatRequest {
    fn logprobs(&self) -> Result<Option<usize>, ApiError> {
        let wanted = self.logprobs == Some(true);
        match self.top_logprobs {
            Some(1..) if !wanted => Err(ApiError::field(
                "top_logprobs",
                "`top_logprobs` needs `logprobs: true`",
            )),
            Some(top) if top > MOST_LOGPROBS => Err(ApiError::field(
                "top_logprobs",
                format!("`top_logprobs` is {top}, expected 0 to {MOST_LOGPROBS}"),
            )),
            top => Ok(wanted.then_some(top.unwrap_or(0))),
        }
    }
}
