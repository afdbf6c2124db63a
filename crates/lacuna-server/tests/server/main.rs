//! The server over a real socket, with the demo model.

mod access;
mod anthropic;
mod embeddings;
mod endpoints;
mod events;
mod failures;
mod fields;
mod forged;
mod half_closed;
mod images;
mod limits;
mod local;
mod models;
mod ollama;
mod probes;
mod protocol;
mod refusals;
mod replies;
mod responses;
mod sessions;
mod streams;
mod structured;
mod support;
mod tls;
