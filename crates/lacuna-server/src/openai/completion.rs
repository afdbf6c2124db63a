//! `POST /v1/completions`.

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::response::Response;
use lacuna_engine::Request;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::app::{App, Purpose};
use crate::http::body::{self, Arriving};
use crate::http::error::ApiError;
use crate::http::ignored::Ignored;
use crate::openai::parameters::{MOST_LOGPROBS, Parameters};
use crate::openai::prompts::{Prompt, Prompts};
use crate::openai::reply::{self, Dialect, Form};
use crate::openai::tokens::{self, Rendered};
use crate::reply::parts::PartReader;
use crate::reply::{Note, Reader};
use crate::sharing::Client;
use crate::structured::tools::{ToolSyntax, Tools};
use crate::structured::{Format, Rule};

/// Tokens of a reply that sets no bound, as OpenAI has it.
const DEFAULT_TOKENS: usize = 16;

#[derive(Debug, Deserialize)]
struct CompletionRequest {
    prompt: Prompts,
    #[serde(default)]
    model: Option<String>,
    #[serde(default)]
    logprobs: Option<Logprobs>,
}

/// A number; routers know chats, too, and send `false` for none.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a number")]
enum Logprobs {
    Top(usize),
    Asked(bool),
}

pub(crate) async fn complete(
    State(app): State<Arc<App>>,
    Extension(client): Extension<Client>,
    body: Arriving,
) -> Result<Response, ApiError> {
    let work = move |app: &App, object| prepare(app, client, object);
    let prepared = app.prepare(body, Purpose::Text, work).await?;
    let (requests, reader, form) = prepared.value;
    let streams = app.submit(requests, prepared.memory).await?;
    reply::send(streams, reader, form).await
}

/// The requests that a completion's fields come to, for who reads their events without a reply.
pub(crate) fn requests(app: &App, object: Map<String, Value>) -> Result<Vec<Request>, ApiError> {
    prepare(app, Client(None), object).map(|(requests, ..)| requests)
}

fn prepare(
    app: &App,
    client: Client,
    object: Map<String, Value>,
) -> Result<(Vec<Request>, Reader, Form), ApiError> {
    let mut ignored = app.ignored();
    let (parameters, format, completion) = read(app, object, &mut ignored)?;
    let delivery = parameters.delivery()?;
    app.check_choices(parameters.choices())?;
    let logprobs = completion.logprobs.map_or(Ok(None), Logprobs::top)?;
    let rule = Rule::new(format, &Tools::default(), ToolSyntax::Bare, &mut ignored)?;
    let constraint = app.constraint(rule, None)?;
    let namespace = app.sharing.namespace(client, parameters.cache_salt()?);
    let session = app.session(client, parameters.session.as_deref())?;
    let prompts = completion.prompt.read(app, app.most_requests())?;
    if session.is_some() && prompts.len() != 1 {
        let message = "a `session` is one conversation; send its prompt alone";
        return Err(ApiError::field("session", message));
    }
    let (mut requests, mut notes) = (Vec::new(), Vec::new());
    for prompt in prompts {
        notes.push(Note {
            echo: match parameters.echoes() {
                true => Some(prompt.text(app)?),
                false => None,
            },
            first: prompt.tokens.first().copied(),
        });
        let recommended = app.model().recommended_sampling();
        let mut request = parameters.request(prompt.tokens, Some(DEFAULT_TOKENS), recommended)?;
        request.prefix_namespace = namespace;
        request.session.clone_from(&session);
        request.logprobs = logprobs;
        let echoed = logprobs.filter(|_| parameters.echoes());
        request.prompt_logprobs = request.prompt_logprobs.max(echoed);
        request.constraint = constraint.as_ref().map(|constraint| constraint.fork());
        requests.push(request);
    }
    let reader = Reader::new(requests.first(), &notes, PartReader::none());
    let form = Form::new(app, app.reply_id("cmpl"), Dialect::Text, delivery)
        .scoring_prompts(parameters.prompt_logprobs())
        .naming_ids(parameters.return_tokens_as_token_ids == Some(true));
    Ok((requests, reader, form.ignoring(ignored)))
}

/// `POST /v1/completions/render`: the tokens of each prompt, of which nothing is computed.
pub(crate) async fn render(
    State(app): State<Arc<App>>,
    body: Arriving,
) -> Result<Response, ApiError> {
    let work = |app: &App, object| {
        let mut ignored = app.ignored();
        let (.., completion) = read(app, object, &mut ignored)?;
        let rendered = |prompt: Prompt| match prompt.tokens.is_empty() {
            true => Err(ApiError::field("prompt", "a prompt has no tokens")),
            false => Ok(Rendered {
                token_ids: prompt.tokens,
            }),
        };
        // They take no place.
        let prompts = completion.prompt.read(app, usize::MAX)?.into_iter();
        let prompts: Vec<Rendered> = prompts.map(rendered).collect::<Result<_, _>>()?;
        Ok((prompts, ignored))
    };
    tokens::reply(app.prepare(body, Purpose::Tokens, work).await?)
}

fn read(
    app: &App,
    mut object: Map<String, Value>,
    ignored: &mut Ignored,
) -> Result<(Parameters, Option<Format>, CompletionRequest), ApiError> {
    let parameters = Parameters::take(&mut object, ignored)?;
    // As for chats; OpenAI itself has it only there.
    let format = Format::take(&mut object, ignored)?;
    let completion: CompletionRequest = body::read(object, ignored)?;
    app.check_model(completion.model.as_deref())?;
    Ok((parameters, format, completion))
}

impl Logprobs {
    fn top(self) -> Result<Option<usize>, ApiError> {
        match self {
            Self::Asked(false) => Ok(None),
            Self::Top(top) if top <= MOST_LOGPROBS => Ok(Some(top)),
            Self::Top(_) | Self::Asked(true) => Err(ApiError::field(
                "logprobs",
                format!("`logprobs` must be 0 to {MOST_LOGPROBS}"),
            )),
        }
    }
}
