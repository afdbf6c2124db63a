//! Request bodies: received within limits of size and time, and read into types that say which
//! field is wrong.

use std::sync::Arc;

use axum::body::Body;
use axum::http::StatusCode;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::config::RequestLimits;
use crate::http::error::ApiError;

/// Receives bodies so that all of them together stay within a number of bytes.
#[derive(Debug, Clone)]
pub(crate) struct Bodies {
    limits: RequestLimits,
    /// One permit per byte.
    room: Arc<Semaphore>,
}

/// A body, and its share of the room for all of them.
#[derive(Debug)]
pub(crate) struct Received {
    bytes: Vec<u8>,
    _room: Option<OwnedSemaphorePermit>,
}

impl Bodies {
    pub(crate) fn new(limits: RequestLimits) -> Self {
        let bytes = limits.all_bodies_bytes.min(u32::MAX as usize);
        Self {
            limits,
            room: Arc::new(Semaphore::new(bytes)),
        }
    }

    /// The whole body.
    pub(crate) async fn receive(&self, body: Body) -> Result<Received, ApiError> {
        tokio::time::timeout(self.limits.receive, self.collect(body))
            .await
            .map_err(|_| {
                ApiError::new(
                    StatusCode::REQUEST_TIMEOUT,
                    "timeout",
                    format!("the body took longer than {:?}", self.limits.receive),
                )
            })?
    }

    async fn collect(&self, body: Body) -> Result<Received, ApiError> {
        let limit = self.limits.body_bytes;
        let mut body = body.into_data_stream();
        let mut received = Received {
            bytes: Vec::new(),
            _room: None,
        };
        while let Some(chunk) = next(&mut body).await {
            let chunk = chunk.map_err(|error| {
                ApiError::new(
                    StatusCode::BAD_REQUEST,
                    "incomplete_body",
                    format!("the body could not be read to its end: {error}"),
                )
            })?;
            if received.bytes.len() + chunk.len() > limit {
                return Err(too_large(limit));
            }
            received.hold(self.reserve(chunk.len())?);
            received.bytes.extend_from_slice(&chunk);
        }
        Ok(received)
    }

    fn reserve(&self, bytes: usize) -> Result<OwnedSemaphorePermit, ApiError> {
        let permits = u32::try_from(bytes).unwrap_or(u32::MAX);
        let room = Arc::clone(&self.room).try_acquire_many_owned(permits);
        room.map_err(|_| {
            ApiError::unavailable(
                "bodies_full",
                "too many request bodies are being received; try again in a second",
            )
        })
    }
}

impl Received {
    fn hold(&mut self, room: OwnedSemaphorePermit) {
        match &mut self._room {
            Some(held) => held.merge(room),
            none => *none = Some(room),
        }
    }

    /// The JSON object in it.
    pub(crate) fn object(&self) -> Result<Map<String, Value>, ApiError> {
        serde_json::from_slice(&self.bytes).map_err(|error| {
            ApiError::new(
                StatusCode::BAD_REQUEST,
                "invalid_json",
                format!("the body is not a JSON object: {error}"),
            )
        })
    }
}

/// `object` as a `T`; fields it does not know are errors.
pub(crate) fn read<T: DeserializeOwned>(object: Map<String, Value>) -> Result<T, ApiError> {
    serde_path_to_error::deserialize(Value::Object(object)).map_err(|error| {
        let path = error.path().to_string();
        let message = error.into_inner().to_string();
        if path == "." {
            ApiError::new(StatusCode::BAD_REQUEST, "invalid_value", message)
        } else {
            ApiError::field(path.clone(), format!("`{path}`: {message}"))
        }
    })
}

fn too_large(limit: usize) -> ApiError {
    ApiError::new(
        StatusCode::PAYLOAD_TOO_LARGE,
        "body_too_large",
        format!("the body has more than the {limit} bytes that are accepted"),
    )
}

/// The next item of a stream.
async fn next<S: futures_core::Stream + Unpin>(stream: &mut S) -> Option<S::Item> {
    std::future::poll_fn(|context| std::pin::Pin::new(&mut *stream).poll_next(context)).await
}
