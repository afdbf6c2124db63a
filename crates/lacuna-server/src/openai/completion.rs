//! `POST /v1/completions`.

use std::sync::Arc;

use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::response::Response;
use lacuna_engine::Request;
use lacuna_models::tokenizer::Special;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::app::{App, Purpose};
use crate::http::body;
use crate::http::error::ApiError;
use crate::openai::parameters::Parameters;
use crate::openai::reply::{self, Dialect, Form};
use crate::sharing::Client;
use crate::structured::tools::{ToolSyntax, Tools};
use crate::structured::{Format, Rule};

/// Tokens of a reply that sets no bound, as OpenAI has it.
const DEFAULT_TOKENS: usize = 16;
/// Alternatives per token at most.
const MOST_LOGPROBS: usize = 20;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct CompletionRequest {
    prompt: Prompt,
    #[serde(default)]
    model: Option<String>,
    #[serde(default)]
    logprobs: Option<usize>,
    /// As for chats; OpenAI itself has it only there.
    #[serde(default)]
    response_format: Option<Format>,
}

#[derive(Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "expected a string, a list of token ids, or a list of one of these"
)]
enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
    Texts(Vec<String>),
    Lists(Vec<Vec<u32>>),
}

pub(crate) async fn complete(
    State(app): State<Arc<App>>,
    Extension(client): Extension<Client>,
    body: Body,
) -> Result<Response, ApiError> {
    let work = move |app: &App, object| prepare(app, client, object);
    let prepared = app.prepare(body, Purpose::Text, work).await?;
    let (request, form) = prepared.value;
    let stream = app.submit(request, prepared.memory)?;
    reply::send(stream, form).await
}

fn prepare(
    app: &App,
    client: Client,
    mut object: Map<String, Value>,
) -> Result<(Request, Form), ApiError> {
    let mut ignored = app.ignored();
    let parameters = Parameters::take(&mut object)?;
    let completion: CompletionRequest = body::read(object)?;
    app.check_model(completion.model.as_deref())?;
    let delivery = parameters.delivery()?;
    if completion.logprobs.is_some_and(|top| top > MOST_LOGPROBS) {
        return Err(ApiError::field(
            "logprobs",
            format!("`logprobs` must be 0 to {MOST_LOGPROBS}"),
        ));
    }
    let rule = Rule::new(
        completion.response_format,
        &Tools::default(),
        ToolSyntax::Bare,
        &mut ignored,
    )?;
    let prompt = completion.prompt.tokens(app)?;
    let mut request = parameters.request(prompt, Some(DEFAULT_TOKENS))?;
    request.prefix_namespace = app.sharing.namespace(client, parameters.cache_salt()?);
    request.logprobs = completion.logprobs;
    request.constraint = app.constraint(rule)?;
    let form = Form::new(app, app.reply_id("cmpl"), Dialect::Text, delivery, &request);
    Ok((request, form.ignoring(ignored)))
}

impl Prompt {
    fn tokens(self, app: &App) -> Result<Vec<u32>, ApiError> {
        let encode = |text: &str| app.model().tokenizer().encode(text, Special::PROMPT);
        match self {
            Self::Text(text) => Ok(encode(&text)?),
            Self::Tokens(tokens) => Ok(tokens),
            Self::Texts(texts) => Ok(encode(&only(texts)?)?),
            Self::Lists(lists) => only(lists),
        }
    }
}

fn only<T>(mut prompts: Vec<T>) -> Result<T, ApiError> {
    match (prompts.pop(), prompts.len()) {
        (Some(prompt), 0) => Ok(prompt),
        _ => Err(ApiError::field(
            "prompt",
            "one prompt per request; send several requests, they are computed together",
        )),
    }
}
