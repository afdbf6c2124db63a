//! KV events: which blocks of prompts this server holds, told to routers that send requests where their prompts are.
//!
//! ```text
//! engine -> BlockFeed -> Events (numbers, what is kept) -> Hub -> subscribers      --kv-events
//!                               '--------------------------------> replays         --kv-events-replay
//! ```
//!
//! Over ZeroMQ, in the form of vLLM's events. A thread of its own does all of it, and neither the engine nor connections
//! ever wait for it: what a subscriber does not read in time ends its connection, and one that comes, or comes
//! back, is told everything anew.

mod address;
mod hub;
mod message;
mod replay;
mod stream;
mod wire;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use lacuna_engine::BlockFeed;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep_until};

pub use address::{EventAddress, NoEventAddress};
use hub::Hub;
use stream::{Batch, Events};

/// Where KV events are told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvEventsConfig {
    /// Where subscribers connect to (a PUB socket). They get tokens of prompts, and need no key.
    pub address: SocketAddr,
    /// What events are published under; routers that take one source for each worker want it empty.
    pub topic: String,
    /// Where events that were missed can be asked for (a ROUTER socket).
    pub replay: Option<SocketAddr>,
}

/// Subscribers there may be at once, and replays under way: routers, of which there are few.
const MOST_PEERS: usize = 32;
/// How long a peer may take to say what it is, and to take a message.
const PATIENCE: Duration = Duration::from_secs(30);
/// How often everything is told at most, however often somebody subscribes.
const TELL_ALL_INTERVAL: Duration = Duration::from_secs(1);

/// A peer that asks for events from a number on.
struct Asked {
    start: u64,
    answer: oneshot::Sender<Vec<Batch>>,
}

/// Tells what `feed` brings, until it is dropped.
pub(crate) async fn serve(
    feed: Arc<BlockFeed>,
    topic: String,
    subscribers: TcpListener,
    replays: Option<TcpListener>,
) {
    let topic: Arc<[u8]> = topic.into_bytes().into();
    // One is enough to know that somebody is new.
    let (newcomers, mut new) = mpsc::channel(1);
    let (asking, mut asked) = mpsc::channel(MOST_PEERS);
    let hub = Arc::new(Hub::new(Arc::clone(&topic), newcomers));
    tokio::spawn(hub::accept(Arc::clone(&hub), subscribers));
    if let Some(listener) = replays {
        tokio::spawn(replay::accept(topic, listener, asking));
    }
    let mut events = Events::default();
    let mut told_all = Instant::now() - TELL_ALL_INTERVAL;
    let (mut is_due, mut waiting) = (false, Vec::<oneshot::Sender<Vec<Batch>>>::new());
    loop {
        tokio::select! {
            () = feed.changed() => hub.publish(events.follow(feed.take())),
            Some(()) = new.recv() => is_due = true,
            () = sleep_until(told_all + TELL_ALL_INTERVAL), if is_due => {
                (is_due, told_all) = (false, Instant::now());
                hub.publish(events.follow(feed.take()));
                let all = events.tell_all();
                for answer in waiting.drain(..) {
                    answer.send(all.clone()).ok();
                }
                hub.publish(all);
            }
            Some(Asked { start, answer }) = asked.recv() => match events.from(start) {
                Some(batches) => drop(answer.send(batches)),
                None => {
                    is_due = true;
                    waiting.push(answer);
                }
            }
        }
    }
}
