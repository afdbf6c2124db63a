//! What the protocol reads from and writes to: a client's stream, given up when the client stops
//! reading, and never an error without a body.
//!
//! The system retries for a quarter of an hour before it says that a client has vanished; until then
//! the connection would keep its place and what was to be sent.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;

use crate::http::error::unreadable;
use crate::http::peer::Peer;

/// Fails a write that has made no progress for a time.
#[derive(Debug)]
pub(crate) struct Socket {
    peer: Arc<Peer>,
    patience: Duration,
    /// Runs while a write waits.
    waiting: Option<Pin<Box<Sleep>>>,
    /// What is sent in place of a reply that the protocol made up by itself.
    instead: Vec<u8>,
}

impl Socket {
    pub(crate) fn new(peer: Arc<Peer>, patience: Duration) -> Self {
        Self {
            peer,
            patience,
            waiting: None,
            instead: Vec::new(),
        }
    }

    fn poll_send(
        &mut self,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if let ([reply], true) = (slices, self.peer.is_flushed())
            && let Some(instead) = unreadable(reply)
        {
            // Sent when the protocol flushes, which it does before it closes the connection.
            self.instead = instead;
            return Poll::Ready(Ok(reply.len()));
        }
        self.peer.set_flushed(false);
        self.watch(context, |peer, context| {
            peer.poll_write(context, |stream| stream.try_write_vectored(slices))
        })
    }

    fn watch<T>(
        &mut self,
        context: &mut Context<'_>,
        write: impl FnOnce(&Peer, &mut Context<'_>) -> Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        let written = write(&self.peer, context);
        if written.is_ready() {
            self.waiting = None;
            return written;
        }
        let patience = self.patience;
        let waiting = self
            .waiting
            .get_or_insert_with(|| Box::pin(tokio::time::sleep(patience)));
        let over = waiting.as_mut().poll(context);
        over.map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.peer.poll_read(context, buffer)
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_send(context, &[IoSlice::new(bytes)])
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_send(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// The protocol calls this when it has nothing left to write.
    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.instead.is_empty() {
            let instead = std::mem::take(&mut self.instead);
            let written = self.watch(context, |peer, context| {
                peer.poll_write(context, |stream| stream.try_write(&instead))
            });
            let sent = if let Poll::Ready(Ok(sent)) = &written {
                *sent
            } else {
                0
            };
            self.instead.extend_from_slice(&instead[sent..]);
            ready!(written)?;
        }
        self.peer.set_flushed(true);
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.peer.finish_sending())
    }
}
