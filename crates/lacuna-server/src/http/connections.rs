//! Connections: accepted up to a number, read under a time limit, and finished before the end.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};

use crate::config::RequestLimits;
use crate::http::patience::Patient;

/// Bytes of a request's head at most.
const HEAD_BYTES: usize = 64 << 10;
/// How long to wait after the system refused a connection, for want of file descriptors mostly.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// The whole answer to a connection too many; its request is not read.
const FULL: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\n\
content-type: application/json\r\ncontent-length: 123\r\n\r\n\
{\"error\":{\"message\":\"too many connections; try again\",\"type\":\"server_error\",\"param\":null,\"code\":\"too_many_connections\"}}   ";

/// Serves connections until `stop` says so, then lets those there are finish their request.
pub(crate) async fn serve(
    listener: TcpListener,
    router: Router,
    limits: RequestLimits,
    mut stop: watch::Receiver<bool>,
) {
    let places = Arc::new(Semaphore::new(limits.connections));
    let graceful = GracefulShutdown::new();
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(limits.receive)
        .max_buf_size(HEAD_BYTES);
    loop {
        let stream = tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => stream,
                Err(_) => {
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            },
            () = stopped(&mut stop) => break,
        };
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
            refuse(&stream);
            continue;
        };
        // Tokens are small and wanted at once. Where the system refuses, they come later.
        stream.set_nodelay(true).ok();
        let service = TowerToHyperService::new(router.clone());
        let stream = TokioIo::new(Patient::new(stream, limits.send));
        let connection = builder.serve_connection(stream, service);
        let connection = graceful.watch(connection);
        tokio::spawn(async move {
            // A connection that breaks is its client's affair.
            connection.await.ok();
            drop(place);
        });
    }
    drop(listener);
    graceful.shutdown().await;
}

/// Waits until the server is to stop, or is gone.
async fn stopped(stop: &mut watch::Receiver<bool>) {
    stop.wait_for(|stop| *stop).await.ok();
}

/// Says that there is no place, as far as that goes without waiting.
fn refuse(stream: &TcpStream) {
    stream.try_write(FULL).ok();
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
