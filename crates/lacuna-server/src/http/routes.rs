//! Which path leads where.

use std::sync::Arc;

use axum::Router;
use axum::extract::FromRef;
use axum::http::{Method, StatusCode, Uri};
use axum::routing::{get, post};

use crate::app::App;
use crate::embeddings::{self, Embeddings};
use crate::http::body::Bodies;
use crate::http::doors::{self, Doors};
use crate::http::error::{self, ApiError};
use crate::http::probes::{self, Probes};
use crate::http::{absent, access};
use crate::models::front::{self, Front};
use crate::openai::{chat, completion, models, responses, tokens};
use crate::{anthropic, memory, metrics, ollama, page, sessions, worker};

/// What answers, by how the server is.
#[derive(Debug, Clone)]
pub(crate) struct Routers {
    /// Everything there is.
    pub(crate) all: Router,
    /// Probes and metrics alone, while all places for connections are taken.
    pub(crate) full: Router,
    /// Probes and metrics alone, while the server is ending.
    pub(crate) ending: Router,
}

impl Routers {
    pub(crate) fn new(app: &Arc<App>, probes: &Probes) -> Self {
        let all = writing()
            .merge(kept())
            .route("/api/version", get(ollama::version))
            .route("/api/tags", get(ollama::list::<App>))
            .route("/api/ps", get(ollama::running::<App>))
            .route("/api/show", post(ollama::show))
            .route("/v1/models", get(models::list))
            .route("/v1/models/{*name}", get(models::one))
            .route("/v1/sessions", get(sessions::list))
            .route(
                "/v1/sessions/{name}",
                get(sessions::one).delete(sessions::remove),
            )
            .route("/memory", get(memory::map).post(memory::set))
            .route("/version", get(worker::version))
            .route("/server_info", get(worker::server_info))
            .route("/get_server_info", get(worker::server_info))
            .route("/model_info", get(worker::model_info))
            .route("/get_model_info", get(worker::model_info))
            .merge(page::routes());
        let measured = || Router::new().route("/metrics", get(metrics::text));
        Self::of(all, measured, app, &app.doors(), probes)
    }

    /// Those of a server of a model that makes embeddings or scores.
    pub(crate) fn of_embeddings(app: &Arc<Embeddings>, doors: &Doors, probes: &Probes) -> Self {
        let all = pooling()
            .route("/", get(embeddings::greeting))
            .route("/api/version", get(ollama::version))
            .route("/api/tags", get(ollama::list::<Embeddings>))
            .route("/api/ps", get(ollama::running::<Embeddings>))
            .route("/api/show", post(embeddings::show))
            .route("/v1/models", get(embeddings::models))
            .route("/v1/models/{*name}", get(embeddings::model));
        Self::of(all, Router::new, app, doors, probes)
    }

    /// Those of a server of several models, which have handlers of their own beside it: [`of_writer`], [`of_pooler`].
    pub(crate) fn of_models(front: &Arc<Front>, doors: &Doors, probes: &Probes) -> Self {
        let asked = WRITING.iter().chain(&POOLING);
        let all = asked.fold(Router::new(), |router, path| {
            router.route(path, post(front::dispatch))
        });
        let all = all
            .merge(kept())
            .route("/api/version", get(ollama::version))
            .route("/api/tags", get(front::tags))
            .route("/api/ps", get(front::running))
            .route("/api/show", post(front::show))
            .route("/v1/models", get(front::list))
            .route("/v1/models/{*name}", get(front::one))
            .route("/models", get(front::list))
            .route("/models/load", post(front::load))
            .route("/models/unload", post(front::unload))
            .route("/memory", get(front::memory).post(front::set_memory))
            .route("/version", get(worker::version))
            .route("/server_info", get(front::server_info))
            .route("/get_server_info", get(front::server_info))
            .merge(page::routes());
        let measured = || Router::new().route("/metrics", get(front::metrics));
        Self::of(all, measured, front, doors, probes)
    }

    /// `all`, and what is answered at all times besides: `always` and probes.
    fn of<A: Send + Sync + 'static>(
        all: Router<Arc<A>>,
        always: impl Fn() -> Router<Arc<A>>,
        app: &Arc<A>,
        doors: &Doors,
        probes: &Probes,
    ) -> Self {
        let too_many = || async {
            let message = "too many connections; try again";
            ApiError::unavailable("too_many_connections", message)
        };
        let ending = || async { probes::ending() };
        let finish = |router: Router<Arc<A>>| finish(router.merge(always()), app, doors, probes);
        Self {
            all: finish(all.fallback(nowhere)),
            full: finish(Router::new().fallback(too_many)),
            ending: finish(Router::new().fallback(ending)),
        }
    }
}

/// What a model that writes is asked for by name.
const WRITING: [&str; 11] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/responses",
    "/api/chat",
    "/api/generate",
    "/v1/chat/completions/render",
    "/v1/completions/render",
    "/tokenize",
    "/detokenize",
];

fn writing() -> Router<Arc<App>> {
    Router::new()
        .route("/v1/chat/completions", post(chat::complete))
        .route("/v1/completions", post(completion::complete))
        .route("/v1/messages", post(anthropic::create))
        .route("/v1/messages/count_tokens", post(anthropic::count_tokens))
        .route("/v1/responses", post(responses::create))
        .route("/api/chat", post(ollama::chat))
        .route("/api/generate", post(ollama::generate))
        .route("/v1/chat/completions/render", post(chat::render))
        .route("/v1/completions/render", post(completion::render))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
}

/// What a model that makes embeddings or scores is asked for by name.
const POOLING: [&str; 6] = [
    "/v1/embeddings",
    "/v1/rerank",
    // As Cohere's clients and text-embeddings-inference's call it.
    "/v2/rerank",
    "/rerank",
    "/api/embed",
    "/api/embeddings",
];

fn pooling() -> Router<Arc<Embeddings>> {
    let writes = || post(embeddings::writes_nothing);
    Router::new()
        .route("/v1/embeddings", post(embeddings::create))
        .route("/v1/rerank", post(embeddings::rerank))
        .route("/v2/rerank", post(embeddings::rerank))
        .route("/rerank", post(embeddings::rerank))
        .route("/api/embed", post(embeddings::embed))
        .route("/api/embeddings", post(embeddings::embed_one))
        .route("/v1/chat/completions", writes())
        .route("/v1/messages", writes())
        .route("/v1/responses", writes())
        .route("/api/chat", writes())
        .route("/api/generate", writes())
        .route("/v1/completions", writes())
}

/// Replies that are kept, whichever model they are of.
fn kept<A>() -> Router<A>
where
    A: Clone + Send + Sync + 'static,
    Bodies: FromRef<A>,
{
    Router::new().route(
        "/v1/responses/{id}",
        get(responses::kept_one).delete(responses::forget),
    )
}

/// What one of several models that writes answers, once it is known to be asked for.
pub(crate) fn of_writer(app: &Arc<App>) -> Router {
    writing().fallback(not_by_it).with_state(Arc::clone(app))
}

/// The same of one that makes embeddings or scores.
pub(crate) fn of_pooler(app: &Arc<Embeddings>) -> Router {
    pooling().fallback(not_by_it).with_state(Arc::clone(app))
}

async fn not_by_it(uri: Uri) -> ApiError {
    let message = match absent::purpose(uri.path()) {
        Some(purpose) => format!("this model does not {purpose}; name another"),
        None => format!(
            "this model answers nothing at `{}`; name another",
            uri.path()
        ),
    };
    ApiError::new(StatusCode::NOT_FOUND, "not_supported", message)
}

/// Adds what is the same for all of them.
fn finish<A: Send + Sync + 'static>(
    router: Router<Arc<A>>,
    app: &Arc<A>,
    doors: &Doors,
    probes: &Probes,
) -> Router {
    let probe_routes = Router::new()
        .route("/health", get(probes::health))
        .route("/ready", get(probes::ready))
        .with_state(probes.clone());
    router
        .merge(probe_routes)
        .method_not_allowed_fallback(not_so)
        .layer(axum::middleware::from_fn_with_state(
            doors.clone(),
            access::guard,
        ))
        .layer(axum::middleware::from_fn(error::speak))
        .layer(axum::middleware::from_fn_with_state(
            doors.clone(),
            doors::pass,
        ))
        .with_state(Arc::clone(app))
}

async fn nowhere(uri: Uri) -> ApiError {
    let path = uri.path();
    let (code, message) = match absent::purpose(path) {
        Some(purpose) => ("not_supported", format!("this server does not {purpose}")),
        None => ("not_found", format!("there is nothing at `{path}`")),
    };
    ApiError::new(StatusCode::NOT_FOUND, code, message)
}

async fn not_so(method: Method, uri: Uri) -> ApiError {
    ApiError::new(
        StatusCode::METHOD_NOT_ALLOWED,
        "method_not_allowed",
        format!("`{}` does not take {method}", uri.path()),
    )
}
