//! The client at the other end, and whether it is still there while its reply is computed.
//!
//! A client that goes away and one that has only finished sending (`shutdown` of its writing side)
//! look alike at first: from both comes the end of the stream. The first is to be cancelled at once,
//! the second to get its reply. What tells them apart is how their system takes the next bytes: those
//! of a closed connection are answered with a reset.
//!
//! ```text
//! the end of the stream comes
//!   while a reply is still computed      `100 Continue` is such bytes: clients skip it before a reply
//!   while one is streamed                a comment is, which is no event; its next token would come late
//!   either, over HTTP/1.0                an urgent byte is, which systems keep out of what is read (not over TLS)
//!   while one is sent whole              it is such bytes itself
//!   between two requests                 the protocol closes the connection
//! a reset comes                          the connection is dropped, and so the request
//! ```
//!
//! Whoever never sends an end finds no trace of this. Where a client's machine has vanished, the
//! system's keep-alive probes find out (`KEEP_ALIVE`).

use std::future::{pending, poll_fn};
use std::io::{self, IoSlice};
use std::net::Shutdown;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, Request, Response, Version, header};
use hyper::body::{Frame, Incoming, SizeHint};
use hyper_util::service::TowerToHyperService;
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{Interest, ReadBuf};
use tokio::net::TcpStream;

use crate::http::tls::{Come, Session};

/// Asks whether anyone is there: the one interim response that every client must be able to skip,
/// whether it expects it or not (RFC 9110, 15.2.1). Some libraries skip no other.
const INTERIM: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";
/// The same within a stream of events: a chunk with a comment, between two chunks of the reply.
const COMMENT: &[u8] = b"3\r\n:\n\n\r\n";
/// The same for HTTP/1.0, which knows neither. It is sent as TCP's urgent data: a system keeps it out
/// of the stream that its programs read, unless they ask for it there (`SO_OOBINLINE`).
const URGENT: &[u8] = b"\n";
/// The type of a reply that comments can be put into.
const EVENT_STREAM: HeaderValue = HeaderValue::from_static("text/event-stream");
/// A connection over which nothing comes is probed after this time, and given up when three probes
/// in turn, a third of it apart, are not answered. A system forgets a connection that a process of
/// its own has closed after a minute (Linux), and answers a probe with a reset from then on.
const KEEP_ALIVE: Duration = Duration::from_secs(30);

/// How long to go on reading from a connection that is over. Closing it with bytes unread would make
/// the system reset it, and take a refusal away from a client that is still sending its body.
const LINGER: Duration = Duration::from_secs(2);

/// A connection's stream, and how far the protocol on it is. All of it is used by one task.
#[derive(Debug)]
pub(crate) struct Peer {
    stream: TcpStream,
    /// What makes records of all that is sent, if the connection is one over TLS.
    session: Option<Session>,
    /// Everything of the replies so far has been handed to the system.
    flushed: AtomicBool,
    /// What may be sent now, as a [`Question`].
    question: AtomicU8,
    /// Some request has come.
    asked: AtomicBool,
    /// Bytes of the request's head so far, or [`BODY`].
    head_bytes: AtomicUsize,
}

/// Instead of the length of a head: what comes is a body.
const BODY: usize = usize::MAX;
/// Bytes read at a time: fewer than the protocol has room for at first, or it would make more.
const READ_BYTES: usize = 4 << 10;

/// What may be sent, between two messages, to find out whether the client is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Question {
    /// Nothing: no reply is due, or it is not one that anything can be put into.
    None,
    /// [`INTERIM`]: a request of HTTP/1.1 has come, and nothing of its reply is there yet.
    Interim,
    /// [`COMMENT`]: its reply is a stream of events.
    Comment,
    /// [`URGENT`]: a request of HTTP/1.0 has come, and no whole reply to it is being sent.
    Urgent,
}

impl Peer {
    /// A client that may leave bytes unread for `send` (where the system can be told so).
    pub(super) fn new(stream: TcpStream, session: Option<Session>, send: Duration) -> Arc<Self> {
        // Tokens are small and wanted at once. Where the system refuses this or what follows, tokens
        // and news of lost clients come later.
        stream.set_nodelay(true).ok();
        let socket = SockRef::from(&stream);
        let probes = TcpKeepalive::new().with_time(KEEP_ALIVE);
        #[cfg(any(target_os = "linux", target_os = "android", target_os = "macos"))]
        let probes = probes.with_interval(KEEP_ALIVE / 3).with_retries(3);
        socket.set_tcp_keepalive(&probes).ok();
        #[cfg(any(target_os = "linux", target_os = "android"))]
        socket.set_tcp_user_timeout(Some(send)).ok();
        #[cfg(not(any(target_os = "linux", target_os = "android")))]
        let _ = send;
        Arc::new(Self {
            stream,
            session,
            flushed: AtomicBool::new(true),
            question: AtomicU8::new(Question::None as u8),
            asked: AtomicBool::new(false),
            head_bytes: AtomicUsize::new(0),
        })
    }

    /// Bytes of a head that have been read and can be told from those of a body: whatever has been read
    /// since the last body ended.
    pub(super) fn head_bytes(&self) -> usize {
        match self.head_bytes.load(Ordering::Relaxed) {
            BODY => 0,
            bytes => bytes,
        }
    }

    /// Resolves when the client is gone. To be polled after the protocol, by the same task.
    pub(crate) async fn gone(&self) {
        tokio::select! {
            _ = self.stream.ready(Interest::ERROR) => {}
            () = self.cannot_be_asked() => {}
        }
    }

    /// Asks a client that has finished sending whether it is there; what it answers is an error of
    /// the stream. Resolves when it has left so much unread that it cannot even be asked.
    async fn cannot_be_asked(&self) {
        let question = poll_fn(|context| self.poll_finished_sending(context)).await;
        match self.ask(question) {
            Ok(true) => pending().await,
            // Bytes are on their way to it already: they ask.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => pending().await,
            Ok(false) | Err(_) => {}
        }
    }

    /// Sends it, as far as that goes without waiting, and says whether all of it went.
    fn ask(&self, question: Question) -> io::Result<bool> {
        let urgent = || SockRef::from(&self.stream).send_out_of_band(URGENT);
        Ok(match question {
            Question::None => true,
            Question::Interim => self.try_write(&[IoSlice::new(INTERIM)])? == INTERIM.len(),
            Question::Comment => self.try_write(&[IoSlice::new(COMMENT)])? == COMMENT.len(),
            Question::Urgent => self.stream.try_io(Interest::WRITABLE, urgent)? == URGENT.len(),
        })
    }

    /// What to ask once the end of the stream has come and no message is half sent.
    ///
    /// Nothing needs to wake the task when the question or what is sent changes: the protocol changes
    /// them, in this task.
    fn poll_finished_sending(&self, context: &mut Context<'_>) -> Poll<Question> {
        let asked = self.question.load(Ordering::Relaxed);
        let all = [Question::Interim, Question::Comment, Question::Urgent];
        let question = all.into_iter().find(|&question| question as u8 == asked);
        let Some(question) = question.filter(|_| self.is_flushed()) else {
            return Poll::Pending;
        };
        match ready!(self.poll_come(context)) {
            Come::End => Poll::Ready(question),
            // More of this request, or the next one; an error wakes the other half of `gone`.
            Come::Bytes | Come::Nothing => Poll::Pending,
        }
    }

    /// What has come that the protocol has not read. Of an error of the stream, nothing.
    fn poll_come(&self, context: &mut Context<'_>) -> Poll<Come> {
        let Some(session) = &self.session else {
            let mut byte = [0];
            let peeked = self.stream.poll_peek(context, &mut ReadBuf::new(&mut byte));
            return Poll::Ready(match ready!(peeked) {
                Ok(0) => Come::End,
                Ok(_) => Come::Bytes,
                Err(_) => Come::Nothing,
            });
        };
        // What is received meanwhile stays where the protocol finds it.
        while session.come() == Come::Nothing {
            match ready!(self.poll_receive(session, context)) {
                Ok(()) => {}
                // What follows a broken record cannot be read either.
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                    return Poll::Ready(Come::End);
                }
                Err(_) => return Poll::Ready(Come::Nothing),
            }
        }
        Poll::Ready(session.come())
    }

    /// Receives once, when something has come.
    fn poll_receive(&self, session: &Session, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            ready!(self.stream.poll_read_ready(context))?;
            match session.receive(&self.stream) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                received => return Poll::Ready(received),
            }
        }
    }

    /// Sends `reply`, as far as that goes without waiting, to a client that has asked nothing yet.
    pub(crate) fn turn_away(&self, reply: &[u8]) {
        let can_be_told = self.session.as_ref().is_none_or(Session::is_ready);
        if can_be_told && !self.asked.load(Ordering::Relaxed) {
            self.try_write(&[IoSlice::new(reply)]).ok();
        }
    }

    /// Waits until the client has closed a connection that is over, as long as that is worth it.
    pub(crate) async fn linger(&self) {
        self.finish_sending().ok();
        tokio::time::timeout(LINGER, self.discard()).await.ok();
    }

    /// Reads until nothing more can come.
    async fn discard(&self) {
        let mut discarded = vec![0; 1 << 14];
        while self.stream.readable().await.is_ok() {
            match self.stream.try_read(&mut discarded) {
                Ok(0) => return,
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => return,
                Ok(_) | Err(_) => {}
            }
        }
    }

    fn may_be_asked(&self, question: Question) {
        self.question.store(question as u8, Ordering::Relaxed);
    }

    pub(super) fn is_flushed(&self) -> bool {
        self.flushed.load(Ordering::Relaxed)
    }

    pub(super) fn set_flushed(&self, flushed: bool) {
        self.flushed.store(flushed, Ordering::Relaxed);
    }

    pub(super) fn poll_read(
        &self,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let room = buffer.remaining().min(READ_BYTES);
        let read = ready!(self.poll_bytes(context, buffer.initialize_unfilled_to(room)))?;
        buffer.advance(read);
        if self.head_bytes.load(Ordering::Relaxed) != BODY {
            self.head_bytes.fetch_add(read, Ordering::Relaxed);
        }
        Poll::Ready(Ok(()))
    }

    fn poll_bytes(&self, context: &mut Context<'_>, buffer: &mut [u8]) -> Poll<io::Result<usize>> {
        loop {
            let read = match &self.session {
                None => {
                    ready!(self.stream.poll_read_ready(context))?;
                    self.stream.try_read(buffer)
                }
                Some(session) => match session.read(buffer) {
                    Some(read) => read,
                    None => {
                        ready!(self.poll_receive(session, context))?;
                        continue;
                    }
                },
            };
            match read {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                read => return Poll::Ready(read),
            }
        }
    }

    /// Writes once the system takes bytes.
    pub(super) fn poll_write(
        &self,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        loop {
            ready!(self.stream.poll_write_ready(context))?;
            match self.try_write(slices) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                written => return Poll::Ready(written),
            }
        }
    }

    /// Hands the system what it has not taken of what was written.
    pub(super) fn poll_flush(&self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Some(session) = &self.session else {
            return Poll::Ready(Ok(()));
        };
        loop {
            match session.try_flush(&self.stream) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                flushed => return Poll::Ready(flushed),
            }
            ready!(self.stream.poll_write_ready(context))?;
        }
    }

    fn try_write(&self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match &self.session {
            None => self.stream.try_write_vectored(slices),
            Some(session) => session.try_write(&self.stream, slices),
        }
    }

    pub(super) fn finish_sending(&self) -> io::Result<()> {
        if let Some(session) = &self.session {
            session.say_farewell(&self.stream);
        }
        SockRef::from(&self.stream).shutdown(Shutdown::Write)
    }
}

/// A router that says when a request comes and when its reply begins.
#[derive(Debug, Clone)]
pub(super) struct Watched {
    router: TowerToHyperService<Router>,
    peer: Arc<Peer>,
}

impl Watched {
    pub(super) fn new(router: Router, peer: Arc<Peer>) -> Self {
        Self {
            router: TowerToHyperService::new(router),
            peer,
        }
    }
}

impl hyper::service::Service<Request<Incoming>> for Watched {
    type Response = Response<Body>;
    type Error = std::convert::Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        let peer = Arc::clone(&self.peer);
        peer.asked.store(true, Ordering::Relaxed);
        let (before, within) = match request.version() {
            Version::HTTP_11 => (Question::Interim, Question::Comment),
            // A byte beside the records of TLS would break them.
            _ if peer.session.is_some() => (Question::None, Question::None),
            _ => (Question::Urgent, Question::Urgent),
        };
        peer.may_be_asked(before);
        peer.head_bytes.store(BODY, Ordering::Relaxed);
        let receiver = Arc::clone(&peer);
        let reply = self.router.call(request.map(|body| {
            Body::new(Received {
                body,
                peer: receiver,
            })
        }));
        Box::pin(async move {
            let reply = reply.await?;
            let events = reply.headers().get(header::CONTENT_TYPE) == Some(&EVENT_STREAM);
            if !events {
                peer.may_be_asked(Question::None);
                return Ok(reply);
            }
            peer.may_be_asked(within);
            Ok(reply.map(|body| Body::new(Events { body, peer })))
        })
    }
}

/// The body of a request. When it is dropped, the next head begins.
struct Received {
    body: Incoming,
    peer: Arc<Peer>,
}

impl Drop for Received {
    fn drop(&mut self) {
        self.peer.head_bytes.store(0, Ordering::Relaxed);
    }
}

impl hyper::body::Body for Received {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The body of a stream of events, which ends the time for comments when it ends.
struct Events {
    body: Body,
    peer: Arc<Peer>,
}

impl Drop for Events {
    /// The protocol lets go of a body before it writes the last chunk, which nothing may follow.
    fn drop(&mut self) {
        self.peer.may_be_asked(Question::None);
    }
}

impl hyper::body::Body for Events {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
