//! Which path leads where.

use std::sync::Arc;

use axum::Router;
use axum::http::{Method, StatusCode, Uri};
use axum::routing::{get, post};

use crate::app::App;
use crate::http::access;
use crate::http::error::ApiError;
use crate::openai::{chat, completion, models, tokens};
use crate::{memory, metrics, page};

pub(crate) fn router(app: Arc<App>) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(chat::complete))
        .route("/v1/completions", post(completion::complete))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*name}", get(models::one))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .route("/health", get(models::health))
        .route("/metrics", get(metrics::text))
        .route("/memory", get(memory::map))
        .merge(page::routes())
        .fallback(nowhere)
        .method_not_allowed_fallback(not_so)
        .layer(axum::middleware::from_fn_with_state(
            Arc::clone(&app),
            access::guard,
        ))
        .with_state(app)
}

async fn nowhere(uri: Uri) -> ApiError {
    ApiError::new(
        StatusCode::NOT_FOUND,
        "not_found",
        format!("there is nothing at `{}`", uri.path()),
    )
}

async fn not_so(method: Method, uri: Uri) -> ApiError {
    ApiError::new(
        StatusCode::METHOD_NOT_ALLOWED,
        "method_not_allowed",
        format!("`{}` does not take {method}", uri.path()),
    )
}
