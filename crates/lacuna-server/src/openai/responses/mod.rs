//! `POST /v1/responses`, and replies that were kept: `GET` and `DELETE /v1/responses/{id}`.

mod output;
mod request;

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::http::{StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use lacuna_engine::{HeldMemory, Request};
use lacuna_text::template::Message;
use serde_json::{Map, Value, json};

use crate::app::{App, Purpose};
use crate::chat::Chat;
use crate::http::body::{self, Arriving, Bodies};
use crate::http::error::ApiError;
use crate::http::extent::Extent;
use crate::http::ignored::Ignored;
use crate::images::{HasImages, Image};
use crate::openai::responses::output::{Form, Stream};
use crate::openai::responses::request::ResponsesRequest;
use crate::reply::{Reader, events};
use crate::sharing::Client;

/// How errors name what clients send, in chats and here.
const NAMES: [(&str, &str); 6] = [
    (
        "{\"type\": \"function\", \"function\": {\"name\", \"parameters\"}}",
        "{\"type\": \"function\", \"name\", \"parameters\"}",
    ),
    (".function.parameters", ".parameters"),
    ("response_format.json_schema.schema", "text.format.schema"),
    ("response_format", "text.format"),
    ("messages", "input"),
    ("max_tokens", "max_output_tokens"),
];

/// What a conversation was before.
#[derive(Default)]
struct Previous {
    messages: Vec<Message>,
    images: Vec<Image>,
}

/// What was asked for.
struct Wanted {
    chat: Chat,
    id: String,
    streamed: bool,
    stored: bool,
    form: Form,
    ignored: Ignored,
    /// For a conversation that was kept.
    memory: Option<HeldMemory>,
}

impl HasImages for Wanted {
    const FIELD: &'static str = "input";

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
    /// For a conversation that was kept.
    memory: Option<HeldMemory>,
}

pub(crate) async fn create(
    State(app): State<Arc<App>>,
    Extension(client): Extension<Client>,
    body: Arriving,
) -> Result<Response, ApiError> {
    let read =
        move |app: &App, object| read(app, client, object).map_err(|error| error.renamed(&NAMES));
    let finish = move |app: &App, wanted| {
        prepare(app, client, wanted).map_err(|error| error.renamed(&NAMES))
    };
    let prepared = app.prepare_shown(body, read, finish).await?;
    let (asked, mut memory) = (prepared.value, prepared.memory);
    if let Some(more) = asked.memory {
        memory.merge(more);
    }
    let streams = app.submit(vec![asked.request], memory).await?;
    let mut response = match asked.streamed {
        true => events::respond(streams, asked.reader, Stream::new(asked.form)).await?,
        false => asked.form.send(&app, streams, asked.reader).await?,
    };
    asked.ignored.attach(&mut response);
    Ok(response)
}

/// `GET /v1/responses/{id}`
pub(crate) async fn kept_one(
    State(bodies): State<Bodies>,
    Extension(client): Extension<Client>,
    Path(id): Path<String>,
    uri: Uri,
) -> Result<Response, ApiError> {
    if uri
        .query()
        .unwrap_or_default()
        .split('&')
        .any(|part| part == "stream=true")
    {
        let message = "a response that was kept is sent whole; leave out `stream`";
        return Err(ApiError::field("stream", message));
    }
    let found = bodies.kept().find(client, &id).ok_or_else(|| gone(&id))?;
    // What is sent is a copy, which the reply holds memory for until it has been.
    let memory = bodies.try_take(found.reply.len())?;
    let text = Bytes::from_owner(Held {
        text: found.reply.clone(),
        _memory: memory,
    });
    let kind = [(header::CONTENT_TYPE, "application/json")];
    Ok((kind, text).into_response())
}

/// `DELETE /v1/responses/{id}`
pub(crate) async fn forget(
    State(bodies): State<Bodies>,
    Extension(client): Extension<Client>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    match bodies.kept().forget(client, &id) {
        true => Ok(Json(
            json!({"id": id, "object": "response", "deleted": true}),
        )),
        false => Err(gone(&id)),
    }
}

fn gone(id: &str) -> ApiError {
    ApiError::new(
        StatusCode::NOT_FOUND,
        "response_not_found",
        format!("there is no response `{id}`, or it is not kept any more"),
    )
}

/// A text, and memory that is held for it.
struct Held {
    text: Vec<u8>,
    _memory: HeldMemory,
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.text
    }
}

fn read(app: &App, client: Client, object: Map<String, Value>) -> Result<Wanted, ApiError> {
    let mut ignored = app.ignored();
    let asked: ResponsesRequest = body::read(object, &mut ignored)?;
    app.check_model(asked.model())?;
    let (previous, memory) = match asked.previous_response_id() {
        None => (Previous::default(), None),
        Some(id) => {
            let (previous, memory) = kept(app, client, id)?;
            (previous, Some(memory))
        }
    };
    let id = app.reply_id("resp");
    let streamed = asked.is_streamed();
    let form = Form::new(app, client, id.clone(), &asked)?;
    let stored = asked.is_stored();
    Ok(Wanted {
        chat: asked.chat(previous, &mut ignored)?,
        id,
        streamed,
        stored,
        form,
        ignored,
        memory,
    })
}

fn prepare(app: &App, client: Client, wanted: Wanted) -> Result<Asked, ApiError> {
    let Wanted {
        chat,
        mut form,
        mut ignored,
        ..
    } = wanted;
    if wanted.stored {
        form.remember(&chat)?;
    }
    let (request, reader) = chat.request(app, client, &wanted.id, &mut ignored)?;
    Ok(Asked {
        request,
        reader,
        streamed: wanted.streamed,
        form,
        ignored,
        memory: wanted.memory,
    })
}

/// The conversation that ended with the reply `id`, and the memory for what becomes of it.
fn kept(app: &App, client: Client, id: &str) -> Result<(Previous, HeldMemory), ApiError> {
    let bodies = app.bodies();
    let conversation = bodies.kept().find(client, id).ok_or_else(|| {
        let message = format!(
            "there is no response `{id}`, or it is not kept any more; send the whole conversation as `input`"
        );
        ApiError::field("previous_response_id", message).with_code("previous_response_not_found")
    })?;
    let mut extent = Extent::default();
    extent.read(&conversation.messages);
    let bytes = Purpose::Conversation.bytes(&extent, &app.encode_limits());
    let images = conversation.images.clone();
    let memory = bodies.try_take(bytes + files_bytes(&images))?;
    let messages = serde_json::from_slice(&conversation.messages)
        .map_err(|error| ApiError::internal(format!("what was kept cannot be read: {error}")))?;
    let images = images.into_iter().map(Image::File).collect();
    Ok((Previous { messages, images }, memory))
}

/// Bytes of files together.
fn files_bytes(files: &[Bytes]) -> usize {
    files.iter().map(Bytes::len).sum()
}
