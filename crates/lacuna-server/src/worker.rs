//! What routers ask of the servers behind them, in the forms that vLLM and SGLang have.
//!
//! Only what is known is said: routers take every field as optional.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};

use crate::app::App;

/// `GET /version`.
pub(crate) async fn version() -> Json<Value> {
    Json(json!({"version": env!("CARGO_PKG_VERSION")}))
}

/// `GET /server_info` and `/get_server_info`.
pub(crate) async fn server_info(State(app): State<Arc<App>>) -> Json<Value> {
    let status = app.engine.status();
    // Windows take what they take however long a context is: beside them, or where there is nothing
    // else, whole contexts are the most there can be.
    let groups = status.budget.plan.parts.kv_bytes / status.pages.group.get().max(1);
    let contexts = app
        .max_running()
        .saturating_mul(app.engine.context_tokens());
    Json(json!({
        "version": env!("CARGO_PKG_VERSION"),
        "model_id": &*app.model_name,
        "served_model_name": &*app.model_name,
        "context_length": app.engine.context_tokens(),
        "max_total_tokens": groups
            .saturating_mul(status.pages.group_tokens as u64)
            .min(contexts as u64),
        "max_running_requests": app.max_running(),
        "tp_size": 1,
        "dp_size": 1,
    }))
}

/// `GET /model_info` and `/get_model_info`.
pub(crate) async fn model_info(State(app): State<Arc<App>>) -> Json<Value> {
    let spec = app.model().spec();
    Json(json!({
        "served_model_name": &*app.model_name,
        "model_type": spec.family,
        "is_generation": true,
        "max_context_length": app.engine.context_tokens(),
        "vocab_size": spec.vocabulary,
    }))
}
