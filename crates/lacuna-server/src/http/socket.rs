//! What the protocol reads from and writes to: a client's stream, given up when the client stops
//! reading, and never an error without a body.
//!
//! The system retries for a quarter of an hour before it says that a client has vanished; until then
//! the connection would keep its place and what was to be sent.
//!
//! The protocol's buffer grows with a head, whose length the client decides. So what a long one takes
//! is taken from the account of what requests hold before more of it is read.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use lacuna_engine::{HeldMemory, MemoryRefusal, RequestMemory};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;

use crate::http::connections::HEAD_BYTES;
use crate::http::error::unreadable;
use crate::http::peer::Peer;

/// A head up to this length is in what every connection holds.
const SHORT_HEAD_BYTES: usize = 4 << 10;
/// What a longer one takes: the protocol's buffer doubles up to twice the longest head, and is copied
/// when it does.
pub(crate) const LONG_HEAD_MEMORY: usize = 3 * HEAD_BYTES;

/// Fails a write that has made no progress for a time.
#[derive(Debug)]
pub(crate) struct Socket {
    peer: Arc<Peer>,
    head: HeadMemory,
    patience: Duration,
    /// Runs while a write waits.
    waiting: Option<Pin<Box<Sleep>>>,
    /// What is sent in place of a reply that the protocol made up by itself.
    instead: Vec<u8>,
}

impl Socket {
    pub(crate) fn new(peer: Arc<Peer>, patience: Duration, memory: &RequestMemory) -> Self {
        Self {
            peer,
            head: HeadMemory {
                account: memory.clone(),
                held: None,
                taking: None,
            },
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
        self.watch(context, |peer, context| peer.poll_write(context, slices))
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

/// Memory for a head that is longer than most. The buffer stays as long as the connection does, and so
/// does this.
struct HeadMemory {
    account: RequestMemory,
    held: Option<HeldMemory>,
    taking: Option<Taking>,
}

type Taking = Pin<Box<dyn Future<Output = Result<HeldMemory, MemoryRefusal>> + Send>>;

impl std::fmt::Debug for HeadMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HeadMemory")
            .field("held", &self.held)
            .finish_non_exhaustive()
    }
}

impl HeadMemory {
    /// Waits for it once `bytes` of a head have come. How long that may take is limited by the time
    /// for a head.
    fn poll_for(&mut self, bytes: usize, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if bytes < SHORT_HEAD_BYTES || self.held.is_some() {
            return Poll::Ready(Ok(()));
        }
        let taking = self.taking.get_or_insert_with(|| {
            let account = self.account.clone();
            Box::pin(async move { account.take(LONG_HEAD_MEMORY).await })
        });
        let taken = ready!(taking.as_mut().poll(context));
        self.taking = None;
        self.held = Some(taken.map_err(|_| io::ErrorKind::OutOfMemory)?);
        Poll::Ready(Ok(()))
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let bytes = self.peer.head_bytes();
        ready!(self.head.poll_for(bytes, context))?;
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
                peer.poll_write(context, &[IoSlice::new(&instead)])
            });
            let sent = if let Poll::Ready(Ok(sent)) = &written {
                *sent
            } else {
                0
            };
            self.instead.extend_from_slice(&instead[sent..]);
            ready!(written)?;
        }
        ready!(self.watch(context, Peer::poll_flush))?;
        self.peer.set_flushed(true);
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.peer.finish_sending())
    }
}
