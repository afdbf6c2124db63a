//! The interfaces within the process: a request goes the way that it goes over HTTP, but for the socket.
//!
//! For programs that have a model and want conversations as clients of OpenAI have them (templates, tools, structured
//! output), or their fields, without a port. A server can listen beside it, over the same engine.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{Request as HttpRequest, Version, header};
use axum::response::Response;
use futures_core::Stream as _;
use hyper::service::Service as _;
use hyper_util::service::TowerToHyperService;
use lacuna_engine::{Failure, Grace, Handle, Refusal, Request, Service, Stream};
use lacuna_models::Model;
use serde_json::{Map, Value};
use tokio::sync::{mpsc, watch};

use crate::app::App;
use crate::config::ServerConfig;
use crate::http::error::ApiError;
use crate::http::routes::Routers;
use crate::keys::ApiKeys;
use crate::openai::completion;
use crate::server::{self, Connections, FLUSH, StartError};

/// Parts of a reply that may wait to be read: as many as a few tokens make. The engine itself keeps more of a reply
/// that is not read.
const UNREAD_PARTS: usize = 16;

/// A service with the interfaces over it. Dropping it ends everything under way at once.
#[derive(Debug)]
pub struct Local {
    service: Service,
    config: ServerConfig,
    app: Arc<App>,
    router: Router,
    runtime: tokio::runtime::Handle,
    /// Kept as long as probes may ask whether the server is ending.
    _stop: watch::Sender<bool>,
    /// In a lock, since only one thread at a time may wait for its end, which nobody does here before the last.
    _connections: Mutex<Connections>,
}

/// Why a request was refused, or broke off, as an error reply would say it.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{message}")]
pub struct Problem {
    /// The status that an HTTP reply has.
    pub status: u16,
    /// What kind of problem it is, in one word of the interface.
    pub code: &'static str,
    /// The field it is about.
    pub param: Option<String>,
    /// What is wrong and what to do.
    pub message: String,
    /// When to try again.
    pub retry_after: Option<Duration>,
}

impl From<Refusal> for Problem {
    fn from(refusal: Refusal) -> Self {
        ApiError::from(refusal).into_problem()
    }
}

impl From<Failure> for Problem {
    fn from(failure: Failure) -> Self {
        ApiError::from(failure).into_problem()
    }
}

/// A part of a reply: its head, once, and then its body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReplyPart {
    /// What the reply is.
    Head {
        /// The status.
        status: u16,
        /// Names and values, those left out that are not text.
        headers: Vec<(String, String)>,
    },
    /// The next bytes of the body.
    Body(Vec<u8>),
}

/// A reply on its way. Dropping it cancels the request within a step.
#[derive(Debug)]
pub struct LocalReply {
    parts: mpsc::Receiver<ReplyPart>,
}

impl LocalReply {
    /// The next part, or `None` after the last.
    pub fn poll_recv(&mut self, context: &mut Context<'_>) -> Poll<Option<ReplyPart>> {
        self.parts.poll_recv(context)
    }

    /// The next part, or `None` after the last, blocking this thread until it is there.
    ///
    /// # Panics
    /// When called from within an asynchronous task.
    pub fn blocking_recv(&mut self) -> Option<ReplyPart> {
        self.parts.blocking_recv()
    }
}

impl Local {
    /// Starts the engine.
    ///
    /// # Errors
    /// [`StartError`]; nothing is left running then.
    pub fn start(model: Arc<Model>, config: ServerConfig) -> Result<Self, StartError> {
        let runtime = server::runtime().map_err(StartError::Runtime)?;
        let service = Service::start(model, config.service.clone())?;
        // Who is in the process needs no key.
        let mine = ServerConfig {
            keys: ApiKeys::default(),
            ..config.clone()
        };
        let app = Arc::new(server::app(service.handle(), mine)?);
        let (stop, stopped) = watch::channel(false);
        let router = Routers::new(&app, &server::probes(service.handle(), &stopped)).all;
        let handle = runtime.handle().clone();
        let connections = Connections::start("lacuna-local", runtime, std::future::pending());
        Ok(Self {
            service,
            config,
            app,
            router,
            runtime: handle,
            _stop: stop,
            _connections: Mutex::new(connections.map_err(StartError::Runtime)?),
        })
    }

    /// The engine behind it.
    #[must_use]
    pub fn engine(&self) -> Handle {
        self.service.handle()
    }

    /// Answers a request as the server does.
    ///
    /// # Errors
    /// [`Problem`] for a method or path that is none.
    pub fn call(&self, method: &str, path: &str, body: Vec<u8>) -> Result<LocalReply, Problem> {
        let request = HttpRequest::builder()
            .method(method)
            .uri(path)
            // The one that needs no name of a host.
            .version(Version::HTTP_10)
            .header(header::CONTENT_TYPE, "application/json")
            .body(Body::from(body));
        let request =
            request.map_err(|error| ApiError::field("path", error.to_string()).into_problem())?;
        let (sender, parts) = mpsc::channel(UNREAD_PARTS);
        let router = TowerToHyperService::new(self.router.clone());
        self.runtime.spawn(async move {
            let answered = async {
                let Ok(response) = router.call(request).await;
                pass_on(response, &sender).await;
            };
            tokio::select! {
                () = answered => {}
                () = sender.closed() => {}
            }
        });
        Ok(LocalReply { parts })
    }

    /// The requests to the engine that the fields of a completion come to, one for each prompt: what they may say is
    /// what `POST /v1/completions` takes, but that nothing is written as a reply.
    ///
    /// # Errors
    /// [`Problem`], with the name of the field that is wrong.
    pub fn requests(&self, fields: Map<String, Value>) -> Result<Vec<Request>, Problem> {
        completion::requests(&self.app, fields).map_err(ApiError::into_problem)
    }

    /// Whether the engine could take a request if nothing else ran.
    ///
    /// # Errors
    /// [`Problem`] for one that can never run.
    pub fn check(&self, request: &Request) -> Result<(), Problem> {
        Ok(self.service.handle().check(request)?)
    }

    /// Hands a request to the engine.
    ///
    /// # Errors
    /// [`Problem`]; nothing is held for the request then.
    pub fn submit(&self, request: Request) -> Result<Stream, Problem> {
        Ok(self.service.handle().submit(request)?)
    }

    /// Serves the same engine at `address`, to whoever presents one of `keys`.
    ///
    /// # Errors
    /// [`StartError`]; nothing is left listening then.
    pub fn listen(&self, address: SocketAddr, keys: ApiKeys) -> Result<Listener, StartError> {
        let config = ServerConfig {
            address,
            keys,
            ..self.config.clone()
        };
        let (runtime, listener, address) = server::listen(&config)?;
        let (stop, connections) = server::serve(self.engine(), config, runtime, listener)?;
        Ok(Listener {
            address,
            stop,
            connections,
        })
    }

    /// Takes no more requests and ends those under way as `grace` says. It does not wait for that; dropping it does.
    pub fn end(&self, grace: Grace) {
        self.service.handle().end(grace);
    }
}

/// A server over the engine of a [`Local`]. Dropping it ends its connections at once, and leaves the engine.
#[derive(Debug)]
pub struct Listener {
    address: SocketAddr,
    stop: watch::Sender<bool>,
    connections: Connections,
}

impl Listener {
    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Takes no more connections, and lets the requests under way finish within `grace`.
    pub fn shutdown(self, grace: Duration) {
        self.stop.send_replace(true);
        self.connections.wait(grace.max(FLUSH));
    }
}

/// Sends a response on, until it ends or nobody wants it.
async fn pass_on(response: Response, sender: &mpsc::Sender<ReplyPart>) {
    let (head, body) = response.into_parts();
    let text = |(name, value): (&header::HeaderName, &header::HeaderValue)| {
        let value = value.to_str().ok()?;
        Some((name.as_str().to_owned(), value.to_owned()))
    };
    let head = ReplyPart::Head {
        status: head.status.as_u16(),
        headers: head.headers.iter().filter_map(text).collect(),
    };
    if sender.send(head).await.is_err() {
        return;
    }
    let mut body = std::pin::pin!(body.into_data_stream());
    // A body that breaks off is told of by its own last event.
    while let Some(Ok(bytes)) =
        std::future::poll_fn(|context| body.as_mut().poll_next(context)).await
    {
        if sender.send(ReplyPart::Body(bytes.into())).await.is_err() {
            return;
        }
    }
}
