//! Subscribers, and what goes to each of them.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};

use super::stream::Batch;
use super::wire::{self, Arrived, Role};
use super::{MOST_PEERS, PATIENCE};

/// Messages that a subscriber may be behind. More would take memory for somebody who may have gone; and everything is
/// told anew to one that comes back.
const BEHIND: usize = 256;

/// How long to wait when the system has no more connections.
pub(super) const NO_CONNECTIONS: Duration = Duration::from_millis(100);

/// Who has subscribed.
#[derive(Debug)]
pub(super) struct Hub {
    topic: Arc<[u8]>,
    subscribers: Mutex<Vec<Subscriber>>,
    /// Told when somebody subscribes.
    newcomers: mpsc::Sender<()>,
}

#[derive(Debug)]
struct Subscriber {
    outgoing: mpsc::Sender<Arc<[u8]>>,
    /// Subscriptions of it that the topic begins with.
    wanted: Arc<AtomicUsize>,
}

impl Hub {
    pub(super) fn new(topic: Arc<[u8]>, newcomers: mpsc::Sender<()>) -> Self {
        Self {
            topic,
            subscribers: Mutex::default(),
            newcomers,
        }
    }

    /// Sends to everybody who wants them. Whoever is too far behind is let go of.
    pub(super) fn publish(&self, batches: Vec<Batch>) {
        for batch in batches {
            let number = batch.number.to_be_bytes();
            let message: Arc<[u8]> = wire::message(&[&self.topic, &number, &batch.payload]).into();
            self.lock().retain(|subscriber| {
                let wanted = subscriber.wanted.load(Ordering::Relaxed) > 0;
                !wanted || subscriber.outgoing.try_send(Arc::clone(&message)).is_ok()
            });
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Subscriber>> {
        self.subscribers
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes somebody up, unless there are too many.
    fn join(&self, outgoing: &mpsc::Sender<Arc<[u8]>>) -> Option<Arc<AtomicUsize>> {
        let mut subscribers = self.lock();
        subscribers.retain(|subscriber| !subscriber.outgoing.is_closed());
        let wanted = Arc::default();
        (subscribers.len() < MOST_PEERS).then(|| {
            subscribers.push(Subscriber {
                outgoing: outgoing.clone(),
                wanted: Arc::clone(&wanted),
            });
            wanted
        })
    }

    /// Whether a subscription to what begins with `prefix` is one to the topic.
    fn covers(&self, prefix: &[u8]) -> bool {
        self.topic.starts_with(prefix)
    }
}

/// Takes subscribers up as they come.
pub(super) async fn accept(hub: Arc<Hub>, listener: TcpListener) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                // A batch is small and the next request may depend on it: it does not wait to be sent with others.
                stream.set_nodelay(true).ok();
                tokio::spawn(serve(Arc::clone(&hub), stream));
            }
            Err(_) => sleep(NO_CONNECTIONS).await,
        }
    }
}

async fn serve(hub: Arc<Hub>, mut stream: TcpStream) {
    let (outgoing, waiting) = mpsc::channel(BEHIND);
    let Some(wanted) = hub.join(&outgoing) else {
        return;
    };
    let greeted = timeout(PATIENCE, wire::greet(&mut stream, Role::Publisher)).await;
    if !matches!(greeted, Ok(Ok(()))) {
        return;
    }
    let (reading, writing) = stream.into_split();
    let answers = outgoing.downgrade();
    // Only the hub holds it from here on, so that whoever is let go of has an end.
    drop(outgoing);
    tokio::select! {
        _ = listen(&hub, &wanted, answers, reading) => {}
        _ = send(waiting, writing) => {}
    }
}

/// Follows what a subscriber wants.
async fn listen(
    hub: &Hub,
    wanted: &AtomicUsize,
    answers: mpsc::WeakSender<Arc<[u8]>>,
    mut stream: impl AsyncRead + Unpin,
) -> io::Result<()> {
    loop {
        let (wants, prefix) = match wire::read(&mut stream).await? {
            Arrived::Message(frames) => {
                match frames.first().and_then(|frame| frame.split_first()) {
                    Some((0, prefix)) => (false, prefix.to_vec()),
                    Some((1, prefix)) => (true, prefix.to_vec()),
                    _ => continue,
                }
            }
            Arrived::Command(name, prefix) if name == b"SUBSCRIBE" => (true, prefix),
            Arrived::Command(name, prefix) if name == b"CANCEL" => (false, prefix),
            Arrived::Command(name, asked) if name == b"PING" => {
                // A time to live of two bytes, and what is to come back.
                let answer = wire::pong(asked.get(2..).unwrap_or_default()).into();
                answers
                    .upgrade()
                    .and_then(|answers| answers.try_send(answer).ok());
                continue;
            }
            Arrived::Command(..) => continue,
        };
        if !hub.covers(&prefix) {
            continue;
        }
        match wants {
            true => {
                wanted.fetch_add(1, Ordering::Relaxed);
                // Full means that it is known already that somebody is new.
                hub.newcomers.try_send(()).ok();
            }
            false => {
                let fewer = |wanted: usize| Some(wanted.saturating_sub(1));
                wanted
                    .fetch_update(Ordering::Relaxed, Ordering::Relaxed, fewer)
                    .ok();
            }
        }
    }
}

async fn send(
    mut waiting: mpsc::Receiver<Arc<[u8]>>,
    mut stream: impl AsyncWrite + Unpin,
) -> io::Result<()> {
    while let Some(message) = waiting.recv().await {
        timeout(PATIENCE, stream.write_all(&message)).await??;
    }
    Ok(())
}
