//! HTTP over the engine: the interfaces of OpenAI, Anthropic and Ollama, metrics, the memory map and a web page.
//!
//! ```text
//! connection -> access -> body -> prepare (parse, template, tokens, grammar) -> engine -> reply
//! ```
//!
//! Everything before the engine is bounded: connections, bytes of a body, the time it may take, and
//! how many requests are prepared at once. What follows is bounded by the engine's budget. A client
//! that goes away drops its stream, and the engine gives its pages back within a step.
//!
//! [`Local`] answers the same requests within the process, without a socket.
//!
//! ```no_run
//! use std::sync::Arc;
//!
//! # fn serve(model: Arc<lacuna_models::Model>) -> Result<(), Box<dyn std::error::Error>> {
//! let server = lacuna_server::Server::start(model, lacuna_server::ServerConfig::default())?;
//! let signals = lacuna_server::Signals::listen()?;
//! println!("http://{}", server.address());
//! signals.wait();
//! server.shutdown();
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod anthropic;
mod app;
mod chat;
mod config;
mod conversation;
mod date;
mod embeddings;
mod events;
mod http;
mod images;
mod intake;
mod kept;
mod keys;
mod local;
mod memory;
mod metrics;
mod models;
mod normalization;
mod ollama;
mod openai;
mod page;
mod preparation;
mod reply;
mod server;
mod sessions;
mod sharing;
mod signals;
mod structured;
mod worker;

pub use config::{RequestLimits, ServerConfig};
pub use events::{EventAddress, KvEventsConfig, NoEventAddress};
pub use http::doors::{NoOrigin, Origin};
pub use http::log::AccessLog;
pub use http::tls::{Tls, TlsError};
#[cfg(feature = "image-addresses")]
pub use images::addresses::{ImageHost, NoImageHost};
pub use keys::{ApiKeys, KeyFileError, KeyProblem};
pub use local::{Listener, Local, LocalReply, Problem, ReplyPart};
pub use models::{ModelEntry, ModelPath, ModelServer, ModelsConfig, keep_alive};
pub use normalization::{Normalization, PatternError};
pub use server::{EmbeddingServer, Server, StartError};
pub use signals::Signals;
