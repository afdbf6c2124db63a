//! Events that were missed, for those who ask.

use std::io;
use std::sync::Arc;

use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::time::{sleep, timeout};

use super::hub::NO_CONNECTIONS;
use super::wire::{self, Arrived, Role};
use super::{Asked, MOST_PEERS, PATIENCE};

/// The number behind the last batch: -1 where numbers have a sign.
const END: u64 = u64::MAX;

/// Answers whoever asks, as many at once as there may be.
pub(super) async fn accept(topic: Arc<[u8]>, listener: TcpListener, asking: mpsc::Sender<Asked>) {
    let places = Arc::new(Semaphore::new(MOST_PEERS));
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            sleep(NO_CONNECTIONS).await;
            continue;
        };
        stream.set_nodelay(true).ok();
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
            continue;
        };
        let (topic, asking) = (Arc::clone(&topic), asking.clone());
        tokio::spawn(async move {
            serve(&topic, stream, asking).await.ok();
            drop(place);
        });
    }
}

async fn serve(topic: &[u8], mut stream: TcpStream, asking: mpsc::Sender<Asked>) -> io::Result<()> {
    timeout(PATIENCE, wire::greet(&mut stream, Role::Router)).await??;
    loop {
        let frames = match wire::read(&mut stream).await? {
            Arrived::Message(frames) => frames,
            Arrived::Command(name, asked) if name == b"PING" => {
                let answer = wire::pong(asked.get(2..).unwrap_or_default());
                stream.write_all(&answer).await?;
                continue;
            }
            Arrived::Command(..) => continue,
        };
        let start = match frames.as_slice() {
            [empty, start] if empty.is_empty() => <[u8; 8]>::try_from(start.as_slice()).ok(),
            _ => None,
        };
        // Somebody who speaks otherwise would wait for an answer that does not come.
        let start = start.ok_or(io::ErrorKind::InvalidData)?;
        let (answer, batches) = oneshot::channel();
        let start = u64::from_be_bytes(start);
        let asked = asking.send(Asked { start, answer }).await;
        asked.map_err(|_| io::ErrorKind::BrokenPipe)?;
        for batch in batches.await.unwrap_or_default() {
            let number = batch.number.to_be_bytes();
            let message = wire::message(&[b"", topic, &number, &batch.payload]);
            timeout(PATIENCE, stream.write_all(&message)).await??;
        }
        let end = wire::message(&[b"", b"", &END.to_be_bytes(), b""]);
        timeout(PATIENCE, stream.write_all(&end)).await??;
    }
}
