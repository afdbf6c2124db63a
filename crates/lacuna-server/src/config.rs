//! How a server is set up.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use lacuna_engine::ServiceConfig;

use crate::events::KvEventsConfig;
use crate::http::doors::Origin;
use crate::http::log::AccessLog;
use crate::http::tls::Tls;
#[cfg(feature = "image-addresses")]
use crate::images::addresses::ImageHost;
use crate::keys::ApiKeys;
use crate::normalization::Normalization;

/// How a server is set up.
#[derive(Debug, Clone)]
pub struct ServerConfig {
    /// Address to listen on; port 0 takes any that is free. Default `127.0.0.1:8080`.
    pub address: SocketAddr,
    /// What clients are shown that the server is the one they mean; connections are over TLS then. Default nothing.
    pub tls: Option<Tls>,
    /// Name the model is served under. Default `model`.
    pub model_name: String,
    /// Further names that requests may have for it. Default none.
    pub model_aliases: Vec<String>,
    /// Keys of which a client must present one. Without any, only a loopback address is accepted.
    pub keys: ApiKeys,
    /// Whether all keys share computed prompts. Each can then find out, by `cached_tokens` and by
    /// time, how prompts of the others begin. Default false.
    pub share_prefixes: bool,
    /// What a client may ask for.
    pub limits: RequestLimits,
    /// Whether what would be ignored in a request is refused instead. Default no.
    pub strict_fields: bool,
    /// Sites whose pages may use the server, each with the rights of whoever has the page open. Default none.
    pub cors_origins: Vec<Origin>,
    /// Where it is written what was asked. Default nowhere.
    pub access_log: Option<AccessLog>,
    /// Hosts that images are fetched from whose addresses requests give. Default none: such requests are refused.
    #[cfg(feature = "image-addresses")]
    pub image_hosts: Vec<ImageHost>,
    /// What is changed of conversations before they are written as prompts. Default nothing.
    pub normalization: Normalization,
    /// The engine.
    pub service: ServiceConfig,
    /// Where it is told which blocks of prompts are held; of a server of one model that writes. All API keys then share
    /// computed prompts, which needs `share_prefixes` if there are several. Default nowhere.
    pub kv_events: Option<KvEventsConfig>,
    /// How long requests under way may still take once the server is to end. Default 30 s.
    pub grace: Duration,
}

/// What clients may ask for, apart from what the engine's budget allows.
#[derive(Debug, Clone)]
pub struct RequestLimits {
    /// Bytes of a request body. Default 4 MiB.
    pub body_bytes: usize,
    /// How long a request waits for [`lacuna_engine::EngineConfig::request_memory`] that others hold before it is
    /// refused. Default 10 s.
    pub memory_wait: Duration,
    /// How long a request's head, and then its body, may take to arrive. Default 30 s.
    pub receive: Duration,
    /// How long a client may leave bytes unread before its connection is given up. Default 60 s.
    pub send: Duration,
    /// How long a request may take in all. Default ten minutes.
    pub request: Duration,
    /// Connections at once. Default 1,024.
    pub connections: usize,
}

impl ServerConfig {
    /// Whether `asked` is a name of the model.
    pub(crate) fn is_model(&self, asked: &str) -> bool {
        asked == self.model_name || self.model_aliases.iter().any(|alias| alias == asked)
    }
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            address: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 8080),
            tls: None,
            model_name: "model".to_owned(),
            model_aliases: Vec::new(),
            keys: ApiKeys::default(),
            share_prefixes: false,
            limits: RequestLimits::default(),
            strict_fields: false,
            cors_origins: Vec::new(),
            access_log: None,
            #[cfg(feature = "image-addresses")]
            image_hosts: Vec::new(),
            normalization: Normalization::default(),
            service: ServiceConfig::default(),
            kv_events: None,
            grace: Duration::from_secs(30),
        }
    }
}

impl Default for RequestLimits {
    fn default() -> Self {
        Self {
            body_bytes: 4 << 20,
            memory_wait: Duration::from_secs(10),
            receive: Duration::from_secs(30),
            send: Duration::from_secs(60),
            request: Duration::from_secs(600),
            connections: 1024,
        }
    }
}
