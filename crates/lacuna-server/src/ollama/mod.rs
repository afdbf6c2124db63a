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
    Served, Serves, describe, details, list, modified, parameters, running, show, version,
};

use crate::app::App;
use crate::http::body::{self, Arriving};
use crate::http::error::ApiError;
use crate::http::ignored::Ignored;
use crate::images::{HasImages, Image};
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

/// What was asked for, and what was said with it without effect.
struct Read {
    wanted: Wanted,
    ignored: Ignored,
}

impl HasImages for Read {
    fn images(&mut self) -> &mut [Image] {
        self.wanted.images()
    }
}

/// What is to be done, once that is ready.
enum Work {
    /// Nothing, as [`request::Work::None`].
    None {
        unloads: bool,
    },
    Reply(Box<(Request, Reader)>),
}

/// A request that is ready to run.
struct Asked {
    work: Work,
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
    let read = |app: &App, object, ignored: &mut Ignored| {
        let asked: ChatRequest = body::read(object, ignored)?;
        asked.wanted(app, ignored)
    };
    answer(&app, body, client, form, read).await
}

/// `POST /api/generate`
pub(crate) async fn generate(
    State(app): State<Arc<App>>,
    Extension(client): Extension<Client>,
    body: Arriving,
) -> Result<Response, ApiError> {
    let form = Form::new(&app, Kind::Generate);
    let read = |app: &App, object, ignored: &mut Ignored| {
        let asked: GenerateRequest = body::read(object, ignored)?;
        asked.wanted(app, ignored)
    };
    answer(&app, body, client, form, read).await
}

async fn answer(
    app: &Arc<App>,
    body: Arriving,
    client: Client,
    form: Form,
    read: impl FnOnce(&App, Map<String, Value>, &mut Ignored) -> Result<Wanted, ApiError>
    + Send
    + 'static,
) -> Result<Response, ApiError> {
    let read = move |app: &App, object| {
        let mut ignored = app.ignored();
        let wanted = read(app, object, &mut ignored).map_err(|error| error.renamed(&NAMES))?;
        Ok(Read { wanted, ignored })
    };
    let finish = move |app: &App, read| {
        prepare(app, client, read, form).map_err(|error| error.renamed(&NAMES))
    };
    let prepared = app.prepare_shown(body, read, finish).await?;
    let asked = prepared.value;
    let mut response = match asked.work {
        Work::None { unloads } => Json(asked.form.without_reply(unloads)).into_response(),
        Work::Reply(work) => {
            let (request, reader) = *work;
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
    Read {
        wanted,
        mut ignored,
    }: Read,
    form: Form,
) -> Result<Asked, ApiError> {
    let id = app.reply_id("call");
    let work = match wanted.work {
        request::Work::None { unloads } => Work::None { unloads },
        request::Work::Chat(chat) => {
            Work::Reply(Box::new(chat.request(app, client, &id, &mut ignored)?))
        }
        request::Work::Raw(prompt, parameters) => Work::Reply(Box::new(request::continued(
            app,
            client,
            &prompt,
            &parameters,
        )?)),
    };
    Ok(Asked {
        work,
        streamed: wanted.streamed,
        form,
        ignored,
    })
}
