//! `POST /v1/chat/completions`.

use std::sync::Arc;

use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use lacuna_engine::Request;
use lacuna_text::tokenizer::SpecialText;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::app::{App, Purpose};
use crate::http::body;
use crate::http::error::ApiError;
use crate::openai::fields;
use crate::openai::messages::{self, ChatMessage};
use crate::openai::parameters::{MOST_LOGPROBS, Parameters};
use crate::openai::reply::parts::PartReader;
use crate::openai::reply::{self, Dialect, Form, Note};
use crate::sharing::Client;
use crate::structured::calls::CallReader;
use crate::structured::tools::{ToolChoice, ToolSyntax, Tools};
use crate::structured::{Format, Rule};

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
    response_format: Option<Format>,
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
    body: Body,
) -> Result<Response, ApiError> {
    let work = move |app: &App, object| prepare(app, client, object);
    let prepared = app.prepare(body, Purpose::Conversation, work).await?;
    let (request, form) = prepared.value;
    let streams = app.submit(vec![request], prepared.memory)?;
    reply::send(streams, form).await
}

fn prepare(
    app: &App,
    client: Client,
    mut object: Map<String, Value>,
) -> Result<(Request, Form), ApiError> {
    let mut ignored = app.ignored();
    let parameters = Parameters::take(&mut object, &mut ignored)?;
    if parameters.echoes() {
        return Err(ApiError::field(
            "echo",
            "`echo` is for completions; leave it out",
        ));
    }
    let mut chat: ChatRequest = body::read(object, &mut ignored)?;
    if let Some(tools) = &mut chat.tools {
        fields::take_unknown_of_tools(tools, &mut ignored)?;
    }
    app.check_model(chat.model.as_deref())?;
    let delivery = parameters.delivery()?;
    let logprobs = chat.logprobs()?;
    let once = !app.teaches_tools() || chat.parallel_tool_calls == Some(false);
    let tools = Tools::new(chat.tools.unwrap_or_default(), chat.tool_choice)?.called_once(once);
    let syntax = app.tool_syntax();
    let rule = Rule::new(chat.response_format, &tools, syntax, &mut ignored)?;
    let messages = messages::for_template(chat.messages)?;
    let variables = app.template_variables(chat.chat_template_kwargs, parameters.effort());
    let prompt = app.conversation(&messages, tools.offered(), variables, &app.encode_limits())?;
    let note = Note {
        echo: None,
        first: prompt.tokens.first().copied(),
    };
    let recommended = app.model().recommended_sampling();
    let mut request = parameters.request(prompt.tokens, None, recommended)?;
    let mut reader = prompt.reader;
    match request.limits.special {
        // The markup as it is was asked for. Without it there would be nothing to tell parts by.
        SpecialText::Show if syntax == ToolSyntax::Harmony => reader = None,
        SpecialText::Show => {}
        _ if reader.is_some() => request.limits.special = SpecialText::Mark,
        _ => {}
    }
    request.prefix_namespace = app.sharing.namespace(client, parameters.cache_salt()?);
    request.logprobs = logprobs;
    request.constraint = app.constraint(rule, reader.as_ref())?;
    let id = app.reply_id("chatcmpl");
    let calls = tools
        .are_offered()
        .then(|| CallReader::new(syntax, &tools, &id));
    let requests = std::slice::from_ref(&request);
    let parts = PartReader::new(reader, calls, parameters.includes_reasoning());
    let form = Form::new(app, id, Dialect::Chat { parts }, delivery, requests);
    let form = form.about(vec![note], parameters.prompt_logprobs());
    Ok((request, form.ignoring(ignored)))
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
