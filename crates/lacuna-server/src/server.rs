//! A server's life: start, serve, finish what is under way, end.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;
use std::time::Duration;

use lacuna_engine::{
    BlockFeed, BlockWatch, EmbedderConfig, EngineError, Grace, Handle, RequestMemory, Service,
};
use lacuna_kv::prefix::Namespace;
use lacuna_models::Model;
use lacuna_models::plan::mebibytes_that_hold;
use lacuna_pages::ByteLength;
use lacuna_text::template::TemplateError;
use tokio::net::TcpListener;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{oneshot, watch};

use crate::app::App;
use crate::config::ServerConfig;
use crate::embeddings::{Embeddings, Work};
use crate::events::{self, KvEventsConfig};
use crate::http::connections::{self, Entrance};
use crate::http::doors::Doors;
use crate::http::probes::Probes;
use crate::http::routes::Routers;
use crate::intake::Intake;
use crate::sharing::Sharing;

/// How long the last bytes of finished requests may take to leave, and then what is left to end.
pub(crate) const FLUSH: Duration = Duration::from_secs(2);

/// The thread that serves connections.
pub(crate) const HTTP_THREAD: &str = "lacuna-http";

/// A server that could not be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// Everyone who reaches the address could use the server.
    #[error(
        "{address} can be reached from other machines; give an API key, listen on 127.0.0.1, or open it to all if a network policy or a proxy decides who may"
    )]
    OpenToAll {
        /// The address asked for.
        address: SocketAddr,
    },
    /// The address is in use, or not this machine's.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// The address asked for.
        address: SocketAddr,
        /// What the system says.
        source: std::io::Error,
    },
    /// Events say what one prompt cache holds, and there are several.
    #[error(
        "KV events tell of prompts that all clients share, and {keys} API keys share none; let them share prefixes, or use one key"
    )]
    NotShared {
        /// API keys there are.
        keys: usize,
    },
    /// Threads or sockets could not be set up.
    #[error("cannot set up the server: {0}")]
    Runtime(#[source] std::io::Error),
    /// The model's chat template cannot be used.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// The engine could not be started.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// One of several models cannot be served.
    #[error("cannot serve `{name}`: {reason}")]
    Model {
        /// The model's name.
        name: String,
        /// Why not.
        reason: String,
    },
    /// The budget does not hold one of several models, even if it is the only one loaded.
    #[error(
        "a budget of {} is too small for `{name}`: it needs {} when no other model is loaded",
        mebibytes(budget.get()), mebibytes_that_hold(needed.get())
    )]
    BudgetTooSmall {
        /// The model's name.
        name: String,
        /// What there is.
        budget: ByteLength,
        /// What there would have to be.
        needed: ByteLength,
    },
}

/// `bytes` for people.
pub(crate) fn mebibytes(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / (1u64 << 20) as f64)
}

/// A running server. Dropping it ends everything under way at once.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    grace: Duration,
    stop: watch::Sender<bool>,
    service: Service,
    connections: Connections,
    events: Option<KvEvents>,
}

/// KV events being told.
#[derive(Debug)]
struct KvEvents {
    address: SocketAddr,
    replay: Option<SocketAddr>,
    _telling: Connections,
}

impl KvEvents {
    /// Listens, and sets the server up to tell of blocks.
    fn start(events: KvEventsConfig, config: &mut ServerConfig) -> Result<Self, StartError> {
        let keys = config.keys.iter().count();
        if keys > 1 && !config.share_prefixes {
            return Err(StartError::NotShared { keys });
        }
        // One key shares with nobody else, so its prompts may be everybody's.
        config.share_prefixes = true;
        let runtime = runtime().map_err(StartError::Runtime)?;
        let bind = |address| bind(&runtime, address);
        let (subscribers, address) = bind(events.address)?;
        let replays = events.replay.map(bind).transpose()?;
        let (replays, replay) = replays.unzip();
        let feed = Arc::new(BlockFeed::default());
        config.service.blocks = Some(BlockWatch {
            namespace: Namespace::COMMON,
            feed: Arc::clone(&feed),
        });
        let telling = events::serve(feed, events.topic, subscribers, replays);
        let telling = Connections::start("lacuna-events", runtime, telling);
        Ok(Self {
            address,
            replay,
            _telling: telling.map_err(StartError::Runtime)?,
        })
    }
}

impl Server {
    /// Starts the engine and listens.
    ///
    /// # Errors
    /// [`StartError`]; nothing is left running then.
    pub fn start(model: Arc<Model>, mut config: ServerConfig) -> Result<Self, StartError> {
        let (runtime, entrance, address) = listen(&config)?;
        let events = config.kv_events.take();
        let events = events.map(|events| KvEvents::start(events, &mut config));
        let events = events.transpose()?;
        let service = Service::start(model, config.service.clone())?;
        let grace = config.grace;
        let (stop, connections) = serve(service.handle(), config, runtime, entrance)?;
        Ok(Self {
            address,
            grace,
            stop,
            service,
            connections,
            events,
        })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where KV events are told and where they are replayed, as far as they are.
    #[must_use]
    pub fn kv_events(&self) -> (Option<SocketAddr>, Option<SocketAddr>) {
        let events = self.events.as_ref();
        (
            events.map(|events| events.address),
            events.and_then(|events| events.replay),
        )
    }

    /// The engine behind it.
    #[must_use]
    pub fn engine(&self) -> Handle {
        self.service.handle()
    }

    /// Takes no more requests, lets those under way finish within the grace time, and ends. Until
    /// they have, probes are answered: the server lives, and is not ready.
    pub fn shutdown(self) {
        // The connections' thread holds the other end until it is done.
        self.stop.send_replace(true);
        self.service.shutdown(Grace::Finish(self.grace));
        self.connections.wait(FLUSH);
    }
}

/// Serves what comes in at `entrance` with `engine`, until the sender says so.
pub(crate) fn serve(
    engine: Handle,
    config: ServerConfig,
    runtime: Runtime,
    entrance: Entrance,
) -> Result<(watch::Sender<bool>, Connections), StartError> {
    let limits = config.limits.clone();
    let memory = connections::account(engine.request_memory(), &entrance, limits.connections);
    let app = Arc::new(app(engine.clone(), config)?);
    let (stop, stopped) = watch::channel(false);
    let routers = Routers::new(&app, &probes(engine, &stopped));
    let serving = connections::serve(entrance, routers, limits, memory, stopped);
    let connections = Connections::start(HTTP_THREAD, runtime, serving);
    let connections = connections.map_err(StartError::Runtime)?;
    Ok((stop, connections))
}

/// What handlers share that answer with `engine`.
pub(crate) fn app(engine: Handle, config: ServerConfig) -> Result<App, StartError> {
    let folder = config.service.prefix_cache.folder.as_ref();
    let folder = folder.map(|folder| folder.path.as_path());
    let sharing = Sharing::new(config.share_prefixes, &config.keys, folder);
    let sharing = sharing.map_err(StartError::Runtime)?;
    let requests = engine.request_memory().clone();
    let intake = Intake::start(&config.limits, requests).map_err(StartError::Runtime)?;
    Ok(App::new(engine, config, sharing, intake)?)
}

/// What probes are answered by.
pub(crate) fn probes(engine: Handle, stopping: &watch::Receiver<bool>) -> Probes {
    Probes {
        model: Some(Arc::clone(engine.model())),
        engine: Some(engine),
        stopping: stopping.clone(),
    }
}

/// A running server of a model that makes embeddings, or scores pairs of texts. Dropping it ends everything under way at once.
#[derive(Debug)]
pub struct EmbeddingServer {
    address: SocketAddr,
    grace: Duration,
    stop: watch::Sender<bool>,
    app: Arc<Embeddings>,
    connections: Connections,
}

impl EmbeddingServer {
    /// Sets the model up and listens. Of the engine's settings, threads, budget and what follows from them,
    /// tokens in a pass and the check of values count.
    ///
    /// # Errors
    /// [`StartError`]; nothing is left running then.
    pub fn start(model: Arc<Model>, config: ServerConfig) -> Result<Self, StartError> {
        let (runtime, entrance, address) = listen(&config)?;
        let embedder = EmbedderConfig::of(&config.service.engine_config());
        let memory = RequestMemory::new(embedder.requests);
        let work = Work::new(&model, &embedder)?;
        let connections = connections::account(&memory, &entrance, config.limits.connections);
        let intake = Intake::start(&config.limits, memory).map_err(StartError::Runtime)?;
        let app = Arc::new(Embeddings::new(Arc::clone(&model), work, &config, intake));
        let (stop, stopped) = watch::channel(false);
        let probes = Probes {
            model: Some(model),
            engine: None,
            stopping: stopped.clone(),
        };
        let routers = Routers::of_embeddings(&app, &Doors::of(&config), &probes);
        let serving = connections::serve(entrance, routers, config.limits, connections, stopped);
        Ok(Self {
            address,
            grace: config.grace,
            stop,
            app,
            connections: Connections::start(HTTP_THREAD, runtime, serving)
                .map_err(StartError::Runtime)?,
        })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The model it serves.
    #[must_use]
    pub fn model(&self) -> &Arc<Model> {
        self.app.model()
    }

    /// Tokens that a text may have.
    #[must_use]
    pub fn max_tokens(&self) -> usize {
        self.app.max_tokens()
    }

    /// Takes no more requests, lets those under way finish within the grace time, and ends.
    pub fn shutdown(self) {
        self.stop.send_replace(true);
        self.connections.wait(self.grace);
        self.app.end();
        self.connections.wait(FLUSH);
    }
}

/// What connections are served by, and where they come in.
pub(crate) fn listen(config: &ServerConfig) -> Result<(Runtime, Entrance, SocketAddr), StartError> {
    let address = config.address;
    let nobody = config.keys.is_empty() && !config.keys.is_open_to_all();
    if nobody && !address.ip().is_loopback() {
        return Err(StartError::OpenToAll { address });
    }
    let runtime = runtime().map_err(StartError::Runtime)?;
    let (listener, address) = bind(&runtime, address)?;
    let tls = config.tls.clone();
    Ok((runtime, Entrance { listener, tls }, address))
}

fn bind(runtime: &Runtime, address: SocketAddr) -> Result<(TcpListener, SocketAddr), StartError> {
    let failed = |source| StartError::Listen { address, source };
    let listener = runtime.block_on(TcpListener::bind(address));
    let listener = listener.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    Ok((listener, address))
}

/// The thread that serves connections. It moves bytes; the engine's threads compute. Dropping it ends
/// them all.
#[derive(Debug)]
pub(crate) struct Connections {
    /// Dropped to end the thread.
    keep: Option<oneshot::Sender<()>>,
    /// Closed when it has ended.
    ended: Receiver<()>,
}

impl Connections {
    pub(crate) fn start(
        name: &str,
        runtime: Runtime,
        serving: impl Future<Output = ()> + Send + 'static,
    ) -> io::Result<Self> {
        let (keep, dropped) = oneshot::channel::<()>();
        let (end, ended) = sync_channel(0);
        let run = move || {
            let _end = end;
            runtime.block_on(async {
                tokio::select! {
                    () = serving => {}
                    _ = dropped => {}
                }
            });
            // Connections end with it, and so do their requests.
            drop(runtime);
        };
        thread::Builder::new().name(name.to_owned()).spawn(run)?;
        Ok(Self {
            keep: Some(keep),
            ended,
        })
    }

    /// Waits until the last bytes have left, if they do in that time.
    pub(crate) fn wait(&self, most: Duration) {
        self.ended.recv_timeout(most).ok();
    }
}

impl Drop for Connections {
    fn drop(&mut self) {
        drop(self.keep.take());
        self.wait(FLUSH);
    }
}

/// What connections are served by: nothing but the thread that runs it. It makes no threads of its
/// own, which would panic, or wait for ever, where the system refuses one.
pub(crate) fn runtime() -> io::Result<Runtime> {
    Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .build()
}
