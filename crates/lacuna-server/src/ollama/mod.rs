//! The interface of Ollama, over the one model there is: chats, prompts, and what it tells of models. Embeddings
//! are in [`crate::embeddings`].
//!
//! Streams are lines of JSON. A model is loaded as long as the server runs, so there is nothing that
//! `keep_alive` could shorten.

mod keep_alive;
mod models;
mod reply;
mod request;

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use lacuna_engine::Request;
use serde_json::{Map, Value};

pub(crate) use keep_alive::{KeepAlive, check_keep_alive, span_seconds};
pub(crate) use models::{
    Served, Serves, describe, details, list, parameters, running, show, version,
};

use crate::app::{App, Purpose};
use crate::http::body::{self, Arriving};
use crate::http::error::ApiError;
use crate::http::ignored::Ignored;
use crate::ollama::reply::{Form, Kind, Lines};
use crate::ollama::request::{ChatRequest, GenerateRequest, Wanted};
use crate::reply::{Reader, events};
use crate::sharing::Client;

/// How errors name what clients send, in OpenAI's interface and in this one.
const NAMES: [(&str, &str); 8] = [
    ("response_format.json_schema.schema", "format"),
    ("response_format", "format"),
    ("max_tokens", "options.num_predict"),
    ("repetition_penalty", "options.repeat_penalty"),
    ("presence_penalty", "options.presence_penalty"),
    ("frequency_penalty", "options.frequency_penalty"),
    ("temperature", "options.temperature"),
    ("chat_template_kwargs", "think"),
];

/// A request that is ready to run.
struct Asked {
    /// None, if only the model was asked for, which is there.
    work: Option<(Request, Reader)>,
    streamed: bool,
    form: Form,
    ignored: Ignored,
}

/// `POST /api/chat`
pub(crate) async fn chat(
    State(app): State<Arc<App>>,
    Extension(client): Extension<Client>,
    body: Arriving,
) -> Result<Response, ApiError> {
    let form = Form::new(&app, Kind::Chat);
    let work = move |app: &App, object| {
        let mut ignored = app.ignored();
        let asked: ChatRequest = body::read(object, &mut ignored)?;
        prepare(app, client, asked.wanted(app, &mut ignored)?, form, ignored)
    };
    answer(&app, body, work).await
}

/// `POST /api/generate`
pub(crate) async fn generate(
    State(app): State<Arc<App>>,
    Extension(client): Extension<Client>,
    body: Arriving,
) -> Result<Response, ApiError> {
    let form = Form::new(&app, Kind::Generate);
    let work = move |app: &App, object| {
        let mut ignored = app.ignored();
        let asked: GenerateRequest = body::read(object, &mut ignored)?;
        prepare(app, client, asked.wanted(app, &mut ignored)?, form, ignored)
    };
    answer(&app, body, work).await
}

async fn answer(
    app: &Arc<App>,
    body: Arriving,
    work: impl FnOnce(&App, Map<String, Value>) -> Result<Asked, ApiError> + Send + 'static,
) -> Result<Response, ApiError> {
    let work = move |app: &App, object| work(app, object).map_err(|error| error.renamed(&NAMES));
    let prepared = app.prepare(body, Purpose::Conversation, work).await?;
    let asked = prepared.value;
    let mut response = match asked.work {
        None => Json(asked.form.loaded()).into_response(),
        Some((request, reader)) => {
            let streams = app.submit(vec![request], prepared.memory).await?;
            match asked.streamed {
                true => events::respond(streams, reader, Lines::new(asked.form)).await?,
                false => asked.form.send(app, streams, reader).await?,
            }
        }
    };
    asked.ignored.attach(&mut response);
    Ok(response)
}

fn prepare(
    app: &App,
    client: Client,
    wanted: Wanted,
    form: Form,
    mut ignored: Ignored,
) -> Result<Asked, ApiError> {
    let id = app.reply_id("call");
    let work = match wanted.work {
        request::Work::None => None,
        request::Work::Chat(chat) => Some(chat.request(app, client, &id, &mut ignored)?),
        request::Work::Raw(prompt, parameters) => {
            Some(request::continued(app, client, &prompt, &parameters)?)
        }
    };
    Ok(Asked {
        work,
        streamed: wanted.streamed,
        form,
        ignored,
    })
}
