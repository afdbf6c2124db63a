//! What a server of an embedding model answers: `POST /v1/embeddings`, and what every server says of
//! itself.
//!
//! ```text
//! connection -> access -> body -> prepare (parse, tokens, passes) -> reply
//! ```
//!
//! There is no queue besides: as many requests are worked on as there are cores, and take turns every few
//! texts; others wait before their body is parsed. What a request comes to, its reply included, is taken
//! from the account of request memory before.

mod request;

use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use axum::Json;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use lacuna_engine::{Embedder, EngineError, HeldMemory, RequestMemory, shortened};
use lacuna_models::{ForwardError, Model};
use lacuna_text::tokenizer::EncodeLimits;
use serde_json::{Value, json};

use crate::app::{Purpose, seconds_now};
use crate::config::ServerConfig;
use crate::http::body::{self, Bodies, Received};
use crate::http::error::ApiError;
use crate::http::ignored::Ignored;
use crate::preparation::Preparation;
use request::{Encoding, Request};

/// What its handlers share.
#[derive(Debug)]
pub(crate) struct Embeddings {
    model: Arc<Model>,
    model_name: String,
    started: u64,
    strict_fields: bool,
    /// Tokens of a text at most.
    max_tokens: usize,
    /// Elements of an embedding.
    dimensions: usize,
    /// How long a request may take.
    time: Duration,
    bodies: Bodies,
    preparation: Preparation,
    embedder: Mutex<Embedder>,
    /// Whether what is under way is to be given up.
    ending: AtomicBool,
}

/// Texts that are embedded before other requests have a turn.
const TURN: usize = 32;

/// A request that is worked on: whether somebody still waits for its reply, and until when.
struct Wanted {
    client: Weak<()>,
    until: Instant,
}

impl Embeddings {
    pub(crate) fn new(
        embedder: Embedder,
        memory: RequestMemory,
        config: &ServerConfig,
        preparation: Preparation,
    ) -> Self {
        Self {
            model: Arc::clone(embedder.model()),
            model_name: config.model_name.clone(),
            started: seconds_now(),
            strict_fields: config.strict_fields,
            max_tokens: embedder.max_tokens(),
            dimensions: embedder.dimensions(),
            time: config.limits.request,
            bodies: Bodies::new(config.limits.clone(), memory),
            preparation,
            embedder: Mutex::new(embedder),
            ending: AtomicBool::new(false),
        }
    }

    /// The model that is served.
    pub(crate) fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// Gives up what is under way, after the texts that are being embedded.
    pub(crate) fn end(&self) {
        self.ending.store(true, Ordering::Relaxed);
    }

    /// What the tokens of a text may come to.
    fn encode_limits(&self) -> EncodeLimits {
        /// A text of as many tokens as encoders take has some kilobytes.
        const WORKSPACE_BYTES: u64 = 4 << 20;
        let share = self.bodies.memory_limit().get() / 8;
        EncodeLimits {
            tokens: self.max_tokens,
            workspace_bytes: share.min(WORKSPACE_BYTES) as usize,
        }
    }

    fn check_model(&self, asked: Option<&str>) -> Result<(), ApiError> {
        match asked {
            Some(asked) if asked != self.model_name => {
                Err(ApiError::no_model(asked, &self.model_name))
            }
            _ => Ok(()),
        }
    }

    fn card(&self) -> Value {
        json!({
            "id": self.model_name,
            "object": "model",
            "created": self.started,
            "owned_by": "lacuna",
            "max_model_len": self.max_tokens,
        })
    }

    /// The reply to a body, for which `memory` has been taken without what the reply takes.
    fn answer(
        &self,
        received: Received,
        mut memory: HeldMemory,
        wanted: &Wanted,
    ) -> Result<Response, ApiError> {
        let mut ignored = Ignored::new(self.strict_fields);
        let request: Request = body::read(received.object()?, &mut ignored)?;
        self.check_model(request.model.as_deref())?;
        let dimensions = request.dimensions(self.dimensions)?;
        let encoding = request.encoding();
        let limits = self.encode_limits();
        let texts = request.texts(self.model.tokenizer(), &limits)?;
        let most = texts.len().saturating_mul(encoding.most_bytes(dimensions));
        memory.resize(memory.bytes().saturating_add(most))?;
        let mut reply = Vec::new();
        reply.try_reserve_exact(most)?;
        self.write(&mut reply, &texts, (dimensions, encoding), wanted)?;
        let kind = [(header::CONTENT_TYPE, "application/json")];
        let mut response = (kind, reply).into_response();
        ignored.attach(&mut response);
        Ok(response)
    }

    fn write(
        &self,
        reply: &mut Vec<u8>,
        texts: &[Vec<u32>],
        (dimensions, encoding): (usize, Encoding),
        wanted: &Wanted,
    ) -> Result<(), ApiError> {
        reply.extend_from_slice(b"{\"object\":\"list\",\"data\":[");
        let mut index = 0;
        for turn in texts.chunks(TURN) {
            self.check(wanted)?;
            let mut written = Ok(());
            let embedder = self.embedder.lock();
            let mut embedder = embedder.unwrap_or_else(PoisonError::into_inner);
            let embedded = embedder.embed(turn, |embedding| {
                if written.is_ok() {
                    let cut = shortened(embedding, dimensions);
                    let cut = cut.expect("a number of dimensions that was checked");
                    written = write_one(reply, index, &cut, encoding);
                }
                index += 1;
            });
            drop(embedder);
            embedded.map_err(refused)?;
            written.map_err(|error| ApiError::internal(error.to_string()))?;
        }
        let tokens: usize = texts.iter().map(Vec::len).sum();
        let usage = json!({"prompt_tokens": tokens, "total_tokens": tokens});
        let name = Value::from(self.model_name.as_str());
        let written = write!(reply, "],\"model\":{name},\"usage\":{usage}}}");
        written.map_err(|error| ApiError::internal(error.to_string()))
    }

    /// Whether to go on.
    fn check(&self, wanted: &Wanted) -> Result<(), ApiError> {
        if self.ending.load(Ordering::Relaxed) {
            return Err(crate::http::probes::ending());
        }
        if wanted.client.strong_count() == 0 {
            return Err(ApiError::internal("nobody waits for the reply any more"));
        }
        if Instant::now() >= wanted.until {
            return Err(ApiError::new(
                StatusCode::GATEWAY_TIMEOUT,
                "timeout",
                format!(
                    "the request took longer than {:?}; send fewer texts",
                    self.time
                ),
            ));
        }
        Ok(())
    }
}

fn write_one(
    reply: &mut Vec<u8>,
    index: usize,
    embedding: &[f32],
    encoding: Encoding,
) -> Result<(), serde_json::Error> {
    let comma = if index == 0 { "" } else { "," };
    let begin = format!("{comma}{{\"object\":\"embedding\",\"index\":{index},\"embedding\":");
    reply.extend_from_slice(begin.as_bytes());
    match encoding {
        Encoding::Float => serde_json::to_writer(&mut *reply, embedding)?,
        Encoding::Base64 => {
            let bytes: Vec<u8> = embedding.iter().flat_map(|it| it.to_le_bytes()).collect();
            reply.push(b'"');
            reply.extend_from_slice(BASE64_STANDARD.encode(bytes).as_bytes());
            reply.push(b'"');
        }
    }
    reply.push(b'}');
    Ok(())
}

/// What the embedder says, as clients are told it. Texts were checked before, but for their tokens.
fn refused(error: EngineError) -> ApiError {
    match error {
        EngineError::Forward(ForwardError::Lost(lost)) => (&lost).into(),
        EngineError::Forward(error @ ForwardError::TokenOutOfRange { .. }) => {
            ApiError::field("input", error.to_string())
        }
        error => ApiError::internal(error.to_string()),
    }
}

/// `POST /v1/embeddings`
pub(crate) async fn create(
    State(app): State<Arc<Embeddings>>,
    body: Body,
) -> Result<Response, ApiError> {
    let client = Arc::new(());
    let wanted = Wanted {
        client: Arc::downgrade(&client),
        until: Instant::now() + app.time,
    };
    let received = app.bodies.receive(body).await?;
    let place = app.preparation.place().await;
    let bytes = Purpose::Text.bytes(&received.extent, &app.encode_limits());
    let memory = app.bodies.take(bytes).await?;
    let working = Arc::clone(&app);
    let work = move || working.answer(received, memory, &wanted);
    let done = app.preparation.run(place, work).await;
    done.unwrap_or_else(|| Err(ApiError::internal("the texts could not be embedded")))
}

/// `GET /v1/models`
pub(crate) async fn models(State(app): State<Arc<Embeddings>>) -> Json<Value> {
    Json(json!({"object": "list", "data": [app.card()]}))
}

/// `GET /v1/models/{name}`
pub(crate) async fn model(
    State(app): State<Arc<Embeddings>>,
    Path(name): Path<String>,
) -> Result<Json<Value>, ApiError> {
    app.check_model(Some(&name))?;
    Ok(Json(app.card()))
}

/// What models that write are asked for.
pub(crate) async fn writes_nothing() -> ApiError {
    let message =
        "the model of this server makes embeddings of texts and cannot write; send /v1/embeddings";
    ApiError::new(StatusCode::NOT_FOUND, "not_supported", message)
}
