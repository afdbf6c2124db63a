//! `GET /health` and `GET /ready`: what asks whether the server lives, and whether to send it work.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use lacuna_engine::Handle;
use lacuna_models::Model;
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::http::error::ApiError;

/// What the probes look at.
#[derive(Debug, Clone)]
pub(crate) struct Probes {
    /// The one model there is. Of several, one that fails leaves the server as well as before.
    pub(crate) model: Option<Arc<Model>>,
    /// What computes, if it is a thread of its own that can end.
    pub(crate) engine: Option<Handle>,
    /// Whether the server is to end.
    pub(crate) stopping: watch::Receiver<bool>,
}

/// Whether the process does what it is there for; one that does not should be started anew. A
/// server that is ending is well.
pub(crate) async fn health(State(probes): State<Probes>) -> Result<Json<Value>, ApiError> {
    if !*probes.stopping.borrow() {
        probes.check_engine()?;
    }
    Ok(Json(json!({"status": "ok"})))
}

/// Whether new requests are taken. A full queue is no reason to say no: requests are told when to
/// come back, and other servers would only be the next to fill.
pub(crate) async fn ready(State(probes): State<Probes>) -> Result<Json<Value>, ApiError> {
    if *probes.stopping.borrow() {
        return Err(ending());
    }
    probes.check_engine()?;
    Ok(Json(json!({"status": "ready"})))
}

impl Probes {
    fn check_engine(&self) -> Result<(), ApiError> {
        if self
            .engine
            .as_ref()
            .is_some_and(|engine| !engine.is_alive())
        {
            return Err(ApiError::unavailable(
                "engine_stopped",
                "the engine has stopped after an error; restart the server",
            ));
        }
        match &self.model {
            Some(model) => model.files().check().map_err(|lost| ApiError::from(&lost)),
            None => Ok(()),
        }
    }
}

/// What is answered while the server is ending.
pub(crate) fn ending() -> ApiError {
    ApiError::unavailable("shutting_down", "the server is ending")
}
