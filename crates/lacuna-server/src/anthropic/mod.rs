//! The interface of Anthropic: `POST /v1/messages` and `POST /v1/messages/count_tokens`.
//!
//! A request is read into a [`Chat`] and its reply written from the same parts as everyone's. What an
//! agent says of itself to the service, and not to the model, never reaches the prompt, so that it
//! cannot keep one conversation from sharing the computed prompt of another.

mod reply;
mod request;

use std::sync::Arc;

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use lacuna_engine::Request;
use serde_json::{Map, Value, json};

use crate::anthropic::reply::{Form, Stream};
use crate::anthropic::request::MessagesRequest;
use crate::app::{App, Purpose};
use crate::chat::Chat;
use crate::date;
use crate::http::body::{self, Arriving};
use crate::http::error::ApiError;
use crate::http::ignored::Ignored;
use crate::images::{HasImages, Image};
use crate::reply::{Reader, events};
use crate::sharing::Client;

/// The header that says how a client speaks.
const VERSION: &str = "anthropic-version";
/// The ways of speaking there are. The later one takes settings of sampling out, which are taken here
/// all the same, and leaves what is sent as it was.
const KNOWN_VERSIONS: [&str; 2] = ["2023-06-01", "2026-10-21"];

/// How errors name what clients send, in OpenAI's interface and in this one.
const NAMES: [(&str, &str); 5] = [
    (
        "{\"type\": \"function\", \"function\": {\"name\", \"parameters\"}}",
        "{\"name\", \"input_schema\"}",
    ),
    (".function.parameters", ".input_schema"),
    (
        "response_format.json_schema.schema",
        "output_config.format.schema",
    ),
    ("response_format", "output_config.format"),
    ("chat_template_kwargs", "thinking"),
];

/// What was asked for.
struct Wanted {
    chat: Chat,
    streamed: bool,
    ignored: Ignored,
}

impl HasImages for Wanted {
    fn images(&mut self) -> &mut [Image] {
        self.chat.images()
    }
}

/// A request that is ready to run.
struct Asked {
    request: Request,
    reader: Reader,
    streamed: bool,
    form: Form,
    ignored: Ignored,
}

pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Extension(client): Extension<Client>,
    headers: HeaderMap,
    body: Arriving,
) -> Result<Response, ApiError> {
    check_version(&headers)?;
    let read = |app: &App, object| read(app, object).map_err(|error| error.renamed(&NAMES));
    let finish = move |app: &App, wanted| {
        prepare(app, client, wanted).map_err(|error| error.renamed(&NAMES))
    };
    let prepared = app.prepare_shown(body, read, finish).await?;
    let asked = prepared.value;
    let streams = app.submit(vec![asked.request], prepared.memory).await?;
    let mut response = match asked.streamed {
        true => events::respond(streams, asked.reader, Stream::new(asked.form)).await?,
        false => asked.form.send(&app, streams, asked.reader).await?,
    };
    asked.ignored.attach(&mut response);
    Ok(response)
}

/// How many tokens a prompt has. Nothing is computed.
pub(crate) async fn count_tokens(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    body: Arriving,
) -> Result<Response, ApiError> {
    check_version(&headers)?;
    let work = |app: &App, object| count(app, object).map_err(|error| error.renamed(&NAMES));
    let prepared = app.prepare(body, Purpose::Tokens, work).await?;
    let (tokens, ignored) = prepared.value;
    let mut response = Json(json!({"input_tokens": tokens})).into_response();
    ignored.attach(&mut response);
    Ok(response)
}

/// Whether a request is from a client of this interface, where paths are others' too.
pub(crate) fn is_spoken(headers: &HeaderMap) -> bool {
    headers.contains_key(VERSION)
}

/// The one model there is, as a list.
pub(crate) fn models(app: &App) -> Value {
    let name = &*app.model_name;
    json!({"data": [model(app)], "has_more": false, "first_id": name, "last_id": name})
}

/// The one model there is.
pub(crate) fn model(app: &App) -> Value {
    json!({
        "type": "model",
        "id": &*app.model_name,
        "display_name": &*app.model_name,
        "created_at": date::text(app.started, 0),
        "max_input_tokens": app.engine.context_tokens(),
    })
}

/// Clients that leave it out are served.
fn check_version(headers: &HeaderMap) -> Result<(), ApiError> {
    match headers.get(VERSION) {
        Some(version) if KNOWN_VERSIONS.iter().all(|known| version != known) => Err(ApiError::new(
            StatusCode::BAD_REQUEST,
            "invalid_version",
            format!("`{VERSION}` must be {}", KNOWN_VERSIONS.join(" or ")),
        )),
        _ => Ok(()),
    }
}

fn read(app: &App, object: Map<String, Value>) -> Result<Wanted, ApiError> {
    let mut ignored = app.ignored();
    let asked: MessagesRequest = body::read(object, &mut ignored)?;
    app.check_model(asked.model())?;
    Ok(Wanted {
        streamed: asked.is_streamed(),
        chat: asked.chat(&mut ignored)?,
        ignored,
    })
}

fn prepare(app: &App, client: Client, wanted: Wanted) -> Result<Asked, ApiError> {
    let id = app.reply_id("msg");
    let mut ignored = wanted.ignored;
    let (request, reader) = wanted.chat.request(app, client, &id, &mut ignored)?;
    Ok(Asked {
        request,
        reader,
        streamed: wanted.streamed,
        form: Form::new(app, id),
        ignored,
    })
}

fn count(app: &App, object: Map<String, Value>) -> Result<(usize, Ignored), ApiError> {
    let mut ignored = app.ignored();
    let asked: MessagesRequest = body::read(object, &mut ignored)?;
    app.check_model(asked.model())?;
    let tokens = asked.chat_to_count(&mut ignored)?.tokens(app)?;
    Ok((tokens.len(), ignored))
}
