//! A server's life: start, serve, finish what is under way, end.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use lacuna_engine::{EngineError, Grace, Handle, Service};
use lacuna_models::Model;
use lacuna_models::template::TemplateError;
use tokio::net::TcpListener;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::app::App;
use crate::config::ServerConfig;
use crate::http::connections;
use crate::http::probes::Probes;
use crate::http::routes::Routers;
use crate::sharing::Sharing;

/// Threads that move bytes; the engine's own compute.
const CONNECTION_THREADS: usize = 2;
/// How long the last bytes of finished requests may take to leave.
const FLUSH: Duration = Duration::from_secs(2);

/// A server that could not be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StartError {
    /// Everyone who reaches the address could use the server.
    #[error(
        "{address} can be reached from other machines; give an API key, or listen on 127.0.0.1"
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
    /// Threads or sockets could not be set up.
    #[error("cannot set up the server: {0}")]
    Runtime(#[source] std::io::Error),
    /// The model's chat template cannot be used.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// The engine could not be started.
    #[error(transparent)]
    Engine(#[from] EngineError),
}

/// A running server. Dropping it ends everything under way at once.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    grace: Duration,
    stop: watch::Sender<bool>,
    connections: JoinHandle<()>,
    service: Service,
    runtime: Runtime,
}

impl Server {
    /// Starts the engine and listens.
    ///
    /// # Errors
    /// [`StartError`]; nothing is left running then.
    pub fn start(model: Arc<Model>, config: ServerConfig) -> Result<Self, StartError> {
        let address = config.address;
        if config.keys.is_empty() && !address.ip().is_loopback() {
            return Err(StartError::OpenToAll { address });
        }
        let runtime = runtime().map_err(StartError::Runtime)?;
        let listen = |source| StartError::Listen { address, source };
        let listener = runtime.block_on(TcpListener::bind(address));
        let listener = listener.map_err(listen)?;
        let address = listener.local_addr().map_err(listen)?;
        let service = Service::start(model, config.service.clone())?;
        let (grace, limits) = (config.grace, config.limits.clone());
        let sharing = Sharing::new(config.share_prefixes).map_err(StartError::Runtime)?;
        let app = Arc::new(App::new(service.handle(), config, sharing)?);
        let (stop, stopped) = watch::channel(false);
        let probes = Probes {
            engine: service.handle(),
            stopping: stopped.clone(),
        };
        let serving = connections::serve(listener, Routers::new(&app, &probes), limits, stopped);
        Ok(Self {
            address,
            grace,
            stop,
            connections: runtime.spawn(serving),
            service,
            runtime,
        })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The engine behind it.
    #[must_use]
    pub fn engine(&self) -> Handle {
        self.service.handle()
    }

    /// Listens for what asks the process to end (SIGINT or SIGTERM): from here on it no longer kills.
    ///
    /// # Errors
    /// [`StartError::Runtime`] when the system does not let it.
    pub fn signals(&self) -> Result<Signals, StartError> {
        let listening = self.runtime.block_on(async { Signals::listen() });
        listening.map_err(StartError::Runtime)
    }

    /// Serves until the first of `signals`, then finishes what is under way. At the second, the
    /// process ends at once.
    pub fn run_until(self, mut signals: Signals) {
        self.runtime.block_on(signals.next());
        let again = self.runtime.spawn(async move {
            signals.next().await;
            std::process::exit(130);
        });
        self.shutdown();
        again.abort();
    }

    /// Takes no more requests, lets those under way finish within the grace time, and ends. Until
    /// they have, probes are answered: the server lives, and is not ready.
    pub fn shutdown(self) {
        // The connections' task holds the other end until it is done.
        self.stop.send_replace(true);
        self.service.shutdown(Grace::Finish(self.grace));
        let flushed = async { tokio::time::timeout(FLUSH, self.connections).await };
        self.runtime.block_on(flushed).ok();
        self.runtime.shutdown_background();
    }
}

/// The threads that move bytes, and those on which requests are prepared.
fn runtime() -> io::Result<Runtime> {
    check_threads()?;
    let runtime = Builder::new_multi_thread()
        .worker_threads(CONNECTION_THREADS)
        .thread_name("lacuna-http")
        // The one made below stays. Without it, a request that comes when the system gives no
        // thread would wait for ever.
        .thread_keep_alive(Duration::MAX)
        .enable_all()
        .build()?;
    runtime.spawn_blocking(|| ());
    Ok(runtime)
}

/// Whether the system gives as many threads at once as the runtime makes, which panics, or waits for
/// ever, when it is given fewer.
fn check_threads() -> io::Result<()> {
    let gate = Mutex::new(());
    thread::scope(|scope| {
        let closed = gate.lock();
        let wait = || drop(gate.lock());
        let made: io::Result<Vec<_>> = (0..=CONNECTION_THREADS)
            .map(|_| thread::Builder::new().spawn_scoped(scope, wait))
            .collect();
        drop(closed);
        made.map(drop)
    })
}

/// What asks the process to end; from [`Server::signals`].
#[cfg(unix)]
pub struct Signals {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
}

#[cfg(unix)]
impl Signals {
    fn listen() -> std::io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// What asks the process to end; from [`Server::signals`].
#[cfg(not(unix))]
pub struct Signals;

#[cfg(not(unix))]
impl Signals {
    fn listen() -> std::io::Result<Self> {
        Ok(Self)
    }

    async fn next(&mut self) {
        tokio::signal::ctrl_c().await.ok();
    }
}
