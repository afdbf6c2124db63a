//! What a server of a model answers that makes a vector of a text, or a score of two: `POST /v1/embeddings`
//! and Ollama's `POST /api/embed`, or `POST /v1/rerank`, and what every server says of itself.
//!
//! ```text
//! connection -> access -> body -> prepare (parse, tokens, passes) -> reply
//! ```
//!
//! There is no queue besides: as many requests are worked on as there are cores, and take turns every few
//! texts; others wait before their body is parsed. What a request comes to, its reply included, is taken
//! from the account of request memory before.

mod ollama;
mod request;
mod rerank;

use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use axum::Json;
use axum::extract::{Path, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use lacuna_engine::{
    Embedder, EmbedderConfig, EngineError, HeldMemory, Reranker, TextEncoder, shortened,
};
use lacuna_models::{ForwardError, Model};
use lacuna_pages::ByteLength;
use lacuna_text::tokenizer::EncodeLimits;
use serde_json::{Value, json};

use crate::app::Purpose;
use crate::config::ServerConfig;
use crate::http::account::Account;
use crate::http::body::{self, Arriving, Received};
use crate::http::error::ApiError;
use crate::http::ignored::Ignored;
use crate::http::probes;
use crate::intake::Intake;
use crate::models::More;
use request::{Encoding, Request};

/// What its handlers share.
#[derive(Debug)]
pub(crate) struct Embeddings {
    model: Arc<Model>,
    model_name: String,
    started: u64,
    strict_fields: bool,
    encoder: TextEncoder,
    aliases: Vec<String>,
    /// How long a request may take.
    time: Duration,
    intake: Intake,
    work: Mutex<Work>,
    /// Whether what is under way is to be given up.
    ending: AtomicBool,
    /// Who knows why it ends, if it is one of several.
    more: Option<More>,
}

/// What computes.
#[derive(Debug)]
pub(crate) enum Work {
    Embed(Embedder),
    Score(Reranker),
}

impl Work {
    /// What `model` is for, set up.
    pub(crate) fn new(model: &Arc<Model>, config: &EmbedderConfig) -> Result<Self, EngineError> {
        match model.spec().judgement() {
            Some(_) => Reranker::new(Arc::clone(model), config).map(Self::Score),
            None => Embedder::new(Arc::clone(model), config).map(Self::Embed),
        }
    }

    fn encoder(&self) -> &TextEncoder {
        match self {
            Self::Embed(embedder) => embedder.encoder(),
            Self::Score(reranker) => reranker.encoder(),
        }
    }
}

/// Texts that are embedded before other requests have a turn.
const TURN: usize = 32;

/// A request that is worked on: whether somebody still waits for its reply, and until when.
struct Wanted {
    client: Weak<()>,
    /// `None` where that is beyond what clocks count to.
    until: Option<Instant>,
}

impl Embeddings {
    pub(crate) fn new(
        model: Arc<Model>,
        work: Work,
        config: &ServerConfig,
        intake: Intake,
    ) -> Self {
        Self {
            model,
            model_name: config.model_name.clone(),
            started: intake.started,
            strict_fields: config.strict_fields,
            encoder: work.encoder().clone(),
            aliases: config.model_aliases.clone(),
            time: config.limits.request,
            intake,
            work: Mutex::new(work),
            ending: AtomicBool::new(false),
            more: None,
        }
    }

    /// The same for one of several models, which is unloaded before the server ends.
    pub(crate) fn with_more(self, more: More) -> Self {
        Self {
            more: Some(more),
            ..self
        }
    }

    /// The model that is served.
    pub(crate) fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// Tokens of a text at most.
    pub(crate) fn max_tokens(&self) -> usize {
        self.encoder.max_tokens()
    }

    /// Computes, when it is this request's turn.
    fn working<T>(
        &self,
        compute: impl FnOnce(&mut Work) -> Result<T, ApiError>,
    ) -> Result<T, ApiError> {
        let work = self.work.lock();
        compute(&mut work.unwrap_or_else(PoisonError::into_inner))
    }

    /// Gives up what is under way, after the texts that are being embedded.
    pub(crate) fn end(&self) {
        self.ending.store(true, Ordering::Relaxed);
    }

    /// What the tokens of a text may come to; how many there may be is the encoder's affair.
    fn encode_limits(&self) -> EncodeLimits {
        /// A text of as many tokens as encoders take has some kilobytes.
        const WORKSPACE_BYTES: u64 = 4 << 20;
        let share = self.intake.bodies.memory_limit().get() / 8;
        EncodeLimits {
            tokens: usize::MAX,
            workspace_bytes: share.min(WORKSPACE_BYTES) as usize,
        }
    }

    fn check_model(&self, asked: Option<&str>) -> Result<(), ApiError> {
        match asked {
            Some(asked)
                if asked != self.model_name && self.aliases.iter().all(|alias| alias != asked) =>
            {
                Err(ApiError::no_model(asked, &self.model_name))
            }
            _ => Ok(()),
        }
    }

    /// Makes `budget` what longer texts are held against.
    pub(crate) fn set_budget(&self, budget: ByteLength) {
        let mut work = self.work.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *work {
            Work::Embed(embedder) => embedder.set_budget(budget),
            Work::Score(reranker) => reranker.set_budget(budget),
        }
    }

    /// Elements of an embedding.
    fn width(&self) -> Result<usize, ApiError> {
        self.model.spec().embedding_width().ok_or_else(|| {
            ApiError::not_supported(
                "the model of this server scores documents and makes no embeddings; send /v1/rerank",
            )
        })
    }

    fn card(&self) -> Value {
        json!({
            "id": self.model_name,
            "object": "model",
            "created": self.started,
            "owned_by": "lacuna",
            "max_model_len": self.max_tokens(),
        })
    }

    /// The reply to a body, for which `memory` has been taken without what the reply takes.
    fn embeddings(
        &self,
        received: Received,
        mut memory: HeldMemory,
        wanted: &Wanted,
    ) -> Result<Response, ApiError> {
        let mut ignored = Ignored::new(self.strict_fields);
        let request: Request = body::read(received.object()?, &mut ignored)?;
        self.check_model(request.model.as_deref())?;
        let dimensions = request.dimensions(self.width()?)?;
        let encoding = request.encoding();
        let texts = request.texts(&self.model, &self.encoder, &self.encode_limits())?;
        let most = texts.len().saturating_mul(encoding.most_bytes(dimensions));
        let mut reply = room_for_reply(&mut memory, most)?;
        let tokens = self.write(&mut reply, &texts, (dimensions, encoding), wanted)?;
        Ok(self.reply_of(reply, tokens, &ignored))
    }

    /// The same to a query and documents.
    fn scores(
        &self,
        received: Received,
        mut memory: HeldMemory,
        wanted: &Wanted,
    ) -> Result<Response, ApiError> {
        let mut ignored = Ignored::new(self.strict_fields);
        let request: rerank::Request = body::read(received.object()?, &mut ignored)?;
        self.check_model(request.model.as_deref())?;
        if self.model.spec().judgement().is_none() {
            return Err(rerank::no_scores());
        }
        let mut reply = room_for_reply(&mut memory, request.most_bytes())?;
        let limits = self.encode_limits();
        let tokens = rerank::write(self, &mut reply, &request, &limits, wanted)?;
        Ok(self.reply_of(reply, tokens, &ignored))
    }

    /// A reply for which so many tokens were computed.
    fn reply_of(&self, reply: Vec<u8>, tokens: usize, ignored: &Ignored) -> Response {
        let kind = [(header::CONTENT_TYPE, "application/json")];
        let mut response = (kind, reply).into_response();
        ignored.attach(&mut response);
        Account::of_texts(&self.model_name, tokens).attach(&mut response);
        response
    }

    /// Writes the embeddings, and returns how many tokens the texts have.
    fn write(
        &self,
        reply: &mut Vec<u8>,
        texts: &[Vec<u32>],
        (dimensions, encoding): (usize, Encoding),
        wanted: &Wanted,
    ) -> Result<usize, ApiError> {
        reply.extend_from_slice(b"{\"object\":\"list\",\"data\":[");
        self.each(texts, dimensions, wanted, |index, embedding| {
            write_one(reply, index, embedding, encoding)
        })?;
        let tokens: usize = texts.iter().map(Vec::len).sum();
        let usage = json!({"prompt_tokens": tokens, "total_tokens": tokens});
        let name = Value::from(self.model_name.as_str());
        let written = write!(reply, "],\"model\":{name},\"usage\":{usage}}}");
        written.map_err(|error| ApiError::internal(error.to_string()))?;
        Ok(tokens)
    }

    /// Calls `write` with the number and the embedding of each text, in their order.
    fn each(
        &self,
        texts: &[Vec<u32>],
        dimensions: usize,
        wanted: &Wanted,
        mut write: impl FnMut(usize, &[f32]) -> Result<(), serde_json::Error>,
    ) -> Result<(), ApiError> {
        let mut index = 0;
        for turn in texts.chunks(TURN) {
            self.check(wanted)?;
            let mut written = Ok(());
            self.working(|work| {
                let Work::Embed(embedder) = work else {
                    unreachable!("a model with embeddings was asked for")
                };
                let embedded = embedder.embed(turn, |embedding| {
                    if written.is_ok() {
                        let cut = shortened(embedding, dimensions);
                        let cut = cut.expect("a number of dimensions that was checked");
                        written = write(index, &cut);
                    }
                    index += 1;
                });
                embedded.map_err(refused)
            })?;
            written.map_err(|error| ApiError::internal(error.to_string()))?;
        }
        Ok(())
    }

    /// Whether to go on.
    fn check(&self, wanted: &Wanted) -> Result<(), ApiError> {
        if self.ending.load(Ordering::Relaxed) {
            let why = self.more.as_ref().map(More::why_ended);
            return Err(why.unwrap_or_else(probes::ending));
        }
        if wanted.client.strong_count() == 0 {
            return Err(ApiError::internal("nobody waits for the reply any more"));
        }
        if wanted.until.is_some_and(|until| Instant::now() >= until) {
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

/// Room for a reply of at most so many bytes, which are taken from the account first.
fn room_for_reply(memory: &mut HeldMemory, most: usize) -> Result<Vec<u8>, ApiError> {
    memory.resize(memory.bytes().saturating_add(most))?;
    let mut reply = Vec::new();
    reply.try_reserve_exact(most)?;
    Ok(reply)
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
        EngineError::Tokenizer(error) => error.into(),
        EngineError::Forward(error @ ForwardError::TokenOutOfRange { .. }) => {
            ApiError::field("input", error.to_string())
        }
        error @ EngineError::LongText { .. } => ApiError::field("input", error.to_string()),
        error => ApiError::internal(error.to_string()),
    }
}

/// `POST /v1/embeddings`
pub(crate) async fn create(
    State(app): State<Arc<Embeddings>>,
    body: Arriving,
) -> Result<Response, ApiError> {
    answer(app, body, Embeddings::embeddings).await
}

/// `POST /api/embed`
pub(crate) async fn embed(
    State(app): State<Arc<Embeddings>>,
    body: Arriving,
) -> Result<Response, ApiError> {
    answer(app, body, Embeddings::embed).await
}

/// `POST /api/embeddings`
pub(crate) async fn embed_one(
    State(app): State<Arc<Embeddings>>,
    body: Arriving,
) -> Result<Response, ApiError> {
    answer(app, body, Embeddings::embed_one).await
}

/// `POST /api/show`
pub(crate) async fn show(
    State(app): State<Arc<Embeddings>>,
    body: Arriving,
) -> Result<Response, ApiError> {
    answer(app, body, Embeddings::describe).await
}

/// `POST /v1/rerank`
pub(crate) async fn rerank(
    State(app): State<Arc<Embeddings>>,
    body: Arriving,
) -> Result<Response, ApiError> {
    answer(app, body, Embeddings::scores).await
}

/// What makes a reply of a body.
type Answer = fn(&Embeddings, Received, HeldMemory, &Wanted) -> Result<Response, ApiError>;

async fn answer(
    app: Arc<Embeddings>,
    body: Arriving,
    answer: Answer,
) -> Result<Response, ApiError> {
    let client = Arc::new(());
    let wanted = Wanted {
        client: Arc::downgrade(&client),
        until: Instant::now().checked_add(app.time),
    };
    let received = app.intake.bodies.receive(body).await?;
    let place = app.intake.preparation.place().await;
    let bytes = Purpose::Text.bytes(&received.extent, &app.encode_limits());
    let memory = app.intake.bodies.take(bytes).await?;
    let working = Arc::clone(&app);
    let work = move || answer(&working, received, memory, &wanted);
    let done = app.intake.preparation.run(place, work).await;
    done.unwrap_or_else(|| Err(ApiError::internal("the texts could not be computed")))
}

/// `GET /`, where others have the page: Ollama's clients ask there whether anybody is there before anything else. Who has
/// no key is told nothing of the model.
pub(crate) async fn greeting() -> &'static str {
    "Lacuna is running. It has no page here: its model does not write.\n"
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
pub(crate) async fn writes_nothing(State(app): State<Arc<Embeddings>>) -> ApiError {
    ApiError::not_supported(match app.model.spec().judgement() {
        None => {
            "the model of this server makes embeddings of texts and cannot write; send /v1/embeddings"
        }
        Some(_) => "the model of this server scores documents and cannot write; send /v1/rerank",
    })
}
