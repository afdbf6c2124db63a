//! Connections: accepted up to a number, read under a time limit, and finished before the end.
//!
//! Beyond the places there are a few spare ones, so that a server with all places taken, or one that
//! is ending, can still say how it is. On a spare place one request is answered, and only probes get
//! more than a refusal. The newest connection takes the place of the oldest: what comes and asks is
//! answered, and what comes and waits is soon pushed out.
//!
//! What connections take is a part of what requests may hold together, in an account of its own: long
//! heads, before they are read, wait for each other and not for bodies.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use lacuna_engine::RequestMemory;
use lacuna_pages::ByteLength;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, oneshot, watch};

use crate::config::RequestLimits;
use crate::http::peer::{Peer, Watched};
use crate::http::routes::Routers;
use crate::http::socket::{LONG_HEAD_MEMORY, Socket};
use crate::http::tls::Tls;

/// Bytes of a request's head at most.
pub(crate) const HEAD_BYTES: usize = 32 << 10;
/// What a connection takes of the account: measured, 20 KiB of state and buffers while nothing has been
/// sent, and 28 with a part of a head.
const CONNECTION_BYTES: usize = 32 << 10;
/// What one over TLS takes beside: its keys, and records that are not whole or not sent yet.
const TLS_BYTES: usize = 48 << 10;
/// How long to wait after the system refused a connection, for want of file descriptors mostly.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Spare places. A probe is answered unless this many connections come between it and its request.
const SPARE: usize = 16;
/// How long a connection keeps a spare place in any case: many that come at once are all answered, one
/// after another, which takes a fraction of this each.
const SPARE_KEPT: Duration = Duration::from_millis(50);
/// How long connections that are there when the server begins to end have to begin a request: one that
/// came a moment before has sent it, and would be closed without a reply.
const LAST_REQUESTS: Duration = Duration::from_millis(50);
/// How long a request's head may take on a spare place.
const SPARE_RECEIVE: Duration = Duration::from_secs(5);
/// Open files that are not connections: the model, what pages are made of, the runtime.
const OTHER_FILES: u64 = 128;
/// The whole answer to a connection too many; its request is not read.
const FULL: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\n\
content-type: application/json\r\ncontent-length: 123\r\n\r\n\
{\"error\":{\"message\":\"too many connections; try again\",\"type\":\"server_error\",\"param\":null,\"code\":\"too_many_connections\"}}   ";

/// Where connections come in.
#[derive(Debug)]
pub(crate) struct Entrance {
    pub(crate) listener: TcpListener,
    /// What clients are shown, if connections are over TLS.
    pub(crate) tls: Option<Tls>,
}

impl Entrance {
    /// The next client, which may leave bytes unread for `send`.
    async fn accept(&self, send: Duration) -> Arc<Peer> {
        loop {
            let Ok((stream, _)) = self.listener.accept().await else {
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            };
            // Refused only for settings that cannot be, which are the same for all connections.
            if let Ok(session) = self.tls.as_ref().map(Tls::session).transpose() {
                return Peer::new(stream, session, send);
            }
        }
    }

    /// What a connection takes of the account.
    fn connection_bytes(&self) -> usize {
        CONNECTION_BYTES + self.tls.as_ref().map_or(0, |_| TLS_BYTES)
    }
}

/// Serves connections until `stop` says so, then lets those there are finish their request.
pub(crate) async fn serve(
    entrance: Entrance,
    routers: Routers,
    limits: RequestLimits,
    memory: RequestMemory,
    mut stop: watch::Receiver<bool>,
) {
    let places = Arc::new(Semaphore::new(places(limits.connections)));
    let graceful = GracefulShutdown::new();
    let protocol = protocol(limits.receive);
    let mut spare = Spare::new(&limits, &memory);
    let connection_bytes = entrance.connection_bytes();
    loop {
        let peer = tokio::select! {
            peer = entrance.accept(limits.send) => peer,
            () = stopped(&mut stop) => break,
        };
        let place = Arc::clone(&places).try_acquire_owned().ok();
        let held = place.and_then(|place| Some((place, memory.try_take(connection_bytes).ok()?)));
        let Some(held) = held else {
            spare.serve(peer, routers.full.clone()).await;
            continue;
        };
        let socket = Socket::new(Arc::clone(&peer), limits.send, &memory);
        let connection = connection(&protocol, socket, &peer, routers.all.clone());
        let connection = graceful.watch(connection);
        tokio::spawn(async move {
            until_gone(connection, &peer).await;
            drop(held);
        });
    }
    let finished = async {
        tokio::time::sleep(LAST_REQUESTS).await;
        graceful.shutdown().await;
    };
    tokio::pin!(finished);
    loop {
        tokio::select! {
            () = &mut finished => break,
            peer = entrance.accept(limits.send) => spare.serve(peer, routers.ending.clone()).await,
        }
    }
}

/// How requests are read.
fn protocol(receive: Duration) -> http1::Builder {
    let mut protocol = http1::Builder::new();
    protocol
        .timer(TokioTimer::new())
        .header_read_timeout(receive)
        .max_buf_size(HEAD_BYTES)
        // The buffer may grow past its bound by what one read brings.
        .max_header_size(HEAD_BYTES)
        // The end of what a client sends is not the end of its interest; see `peer`.
        .half_close(true);
    protocol
}

/// The requests of one connection, one after another.
fn connection(
    protocol: &http1::Builder,
    socket: Socket,
    peer: &Arc<Peer>,
    router: Router,
) -> http1::Connection<TokioIo<Socket>, Watched> {
    let service = Watched::new(router, Arc::clone(peer));
    protocol.serve_connection(TokioIo::new(socket), service)
}

/// Runs a connection to its end. One that breaks is its client's affair.
async fn until_gone<T>(connection: impl Future<Output = T>, peer: &Peer) {
    tokio::select! {
        // The protocol first, because it may change what the other looks at.
        biased;
        _ = connection => peer.linger().await,
        () = peer.gone() => {}
    }
}

/// Waits until the server is to stop, or is gone.
async fn stopped(stop: &mut watch::Receiver<bool>) {
    stop.wait_for(|stop| *stop).await.ok();
}

/// The spare places.
struct Spare {
    protocol: http1::Builder,
    send: Duration,
    memory: RequestMemory,
    /// The oldest first.
    taken: VecDeque<SparePlace>,
}

/// A spare place that is taken.
struct SparePlace {
    since: Instant,
    /// Ends its connection when dropped, and is closed when that has ended.
    end: oneshot::Sender<()>,
}

impl Spare {
    fn new(limits: &RequestLimits, memory: &RequestMemory) -> Self {
        let mut protocol = protocol(limits.receive.min(SPARE_RECEIVE));
        protocol.keep_alive(false);
        Self {
            protocol,
            send: limits.send,
            memory: memory.clone(),
            taken: VecDeque::with_capacity(SPARE),
        }
    }

    /// Until there is a place. The oldest connection gives its up, once it has had time for a request.
    async fn make_room(&mut self) {
        self.taken.retain(|place| !place.end.is_closed());
        if self.taken.len() < SPARE {
            return;
        }
        if let Some(oldest) = self.taken.front_mut() {
            let left = SPARE_KEPT.saturating_sub(oldest.since.elapsed());
            tokio::time::timeout(left, oldest.end.closed()).await.ok();
        }
        self.taken.retain(|place| !place.end.is_closed());
        while self.taken.len() >= SPARE {
            self.taken.pop_front();
        }
    }

    async fn serve(&mut self, peer: Arc<Peer>, router: Router) {
        self.make_room().await;
        let (end, pushed_out) = oneshot::channel();
        let since = Instant::now();
        self.taken.push_back(SparePlace { since, end });
        let socket = Socket::new(Arc::clone(&peer), self.send, &self.memory);
        let connection = connection(&self.protocol, socket, &peer, router);
        tokio::spawn(async move {
            tokio::select! {
                () = until_gone(connection, &peer) => {}
                _ = pushed_out => peer.turn_away(FULL),
            }
        });
    }
}

/// Connections that are in what the program takes by itself: it was measured with so many.
const MEASURED_CONNECTIONS: usize = 32;

/// The account of so many connections through `entrance`: what the program has for them, and of what requests may hold
/// a quarter, or less if that is enough. Long heads get what other connections leave.
pub(crate) fn account(
    requests: &RequestMemory,
    entrance: &Entrance,
    connections: usize,
) -> RequestMemory {
    let measured = (MEASURED_CONNECTIONS * CONNECTION_BYTES) as u64;
    let enough = connections.saturating_mul(entrance.connection_bytes()) as u64;
    let enough = enough.saturating_add(LONG_HEAD_MEMORY as u64);
    let more = enough.saturating_sub(measured);
    let part = requests.split_off(more.min(requests.limit().get() / 4));
    RequestMemory::new(ByteLength::new(part.limit().get() + measured))
}

/// Connections that can be had at once: those `asked` for, or as many as the system lets the process
/// open files. Raises the process's own limit if need be, up to what it may.
#[cfg(unix)]
fn places(asked: usize) -> usize {
    use rustix::process::{Resource, getrlimit, setrlimit};

    let others = OTHER_FILES + SPARE as u64;
    let needed = (asked as u64).saturating_add(others);
    let mut limit = getrlimit(Resource::Nofile);
    if limit.current.is_some_and(|current| current < needed) {
        limit.current = Some(limit.maximum.map_or(needed, |most| most.min(needed)));
        setrlimit(Resource::Nofile, limit).ok();
    }
    let open = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let room = open.saturating_sub(others).max(1);
    asked.min(usize::try_from(room).unwrap_or(usize::MAX))
}

#[cfg(not(unix))]
fn places(asked: usize) -> usize {
    asked
}

#[cfg(test)]
mod tests {
    use super::FULL;

    #[test]
    fn the_answer_to_a_connection_too_many_is_whole() {
        let text = std::str::from_utf8(FULL).expect("text");
        let (head, body) = text.split_once("\r\n\r\n").expect("a head and a body");
        assert!(
            head.contains(&format!("content-length: {}", body.len())),
            "{}",
            body.len()
        );
        let body: serde_json::Value = serde_json::from_str(body).expect("JSON");
        assert_eq!(body["error"]["code"], "too_many_connections");
    }
}
