//! A reply as a stream, one event or more for each token that has something to show.
//!
//! Dropping the body, as happens when the client goes away, drops the engine's stream and so
//! cancels the request.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::Body;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use lacuna_engine::Event;
use serde::Serialize;

use crate::http::error::ApiError;
use crate::reply::streams::Streams;
use crate::reply::{Part, Reader, broken_off};

/// Server-sent events.
pub(crate) const EVENT_STREAM: &str = "text/event-stream";

/// How an interface writes a reply as it comes.
pub(crate) trait Writer: Send + Unpin + 'static {
    /// What a reply of this kind is.
    const CONTENT_TYPE: &'static str;

    /// What a reply begins with. The prompt's figures are known.
    ///
    /// # Errors
    /// [`ApiError`] when what it takes cannot be had, as for everything that is written.
    fn open(&mut self, reader: &Reader, out: &mut String) -> Result<(), ApiError>;

    /// What one event of the engine adds.
    ///
    /// # Errors
    /// As [`Writer::open`].
    fn part(&mut self, part: Part, reader: &Reader, out: &mut String) -> Result<(), ApiError>;

    /// What a reply ends with, once every choice is finished.
    ///
    /// # Errors
    /// As [`Writer::open`].
    fn close(&mut self, reader: &Reader, out: &mut String) -> Result<(), ApiError>;

    /// What a reply that breaks off ends with.
    fn fail(&mut self, error: &ApiError, out: &mut String);
}

struct Events<W> {
    streams: Streams,
    /// Events that were waited for before the stream began.
    waiting: VecDeque<(usize, Event)>,
    reader: Reader,
    writer: W,
    ended: bool,
}

/// Starts the stream once the first token is there, so that what fails before is still an error
/// with its own status.
pub(crate) async fn respond<W: Writer>(
    mut streams: Streams,
    reader: Reader,
    writer: W,
) -> Result<Response, ApiError> {
    let mut waiting = VecDeque::new();
    loop {
        let (prompt, event) = streams.recv().await.ok_or_else(broken_off)??;
        let begins = matches!(event, Event::Token { .. } | Event::Finished { .. });
        waiting.push_back((prompt, event));
        if begins {
            break;
        }
    }
    let account = streams.account().clone();
    let events = Events {
        streams,
        waiting,
        reader,
        writer,
        ended: false,
    };
    let headers = [
        (header::CONTENT_TYPE, W::CONTENT_TYPE),
        (header::CACHE_CONTROL, "no-cache"),
    ];
    let mut response = (headers, Body::from_stream(events)).into_response();
    account.attach(&mut response);
    Ok(response)
}

impl<W: Writer> futures_core::Stream for Events<W> {
    type Item = Result<String, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        while !this.ended {
            let event = match this.waiting.pop_front() {
                Some(event) => Some(Ok(event)),
                None => std::task::ready!(this.streams.poll_recv(context)),
            };
            let mut out = String::new();
            if let Err(error) = this.write(event, &mut out) {
                this.writer.fail(&error, &mut out);
                this.ended = true;
            }
            if !out.is_empty() {
                return Poll::Ready(Some(Ok(out)));
            }
        }
        Poll::Ready(None)
    }
}

impl<W: Writer> Events<W> {
    /// Writes what `event` adds.
    fn write(
        &mut self,
        event: Option<Result<(usize, Event), ApiError>>,
        out: &mut String,
    ) -> Result<(), ApiError> {
        let (prompt, event) = event.ok_or_else(broken_off)??;
        let opens = matches!(event, Event::Started { .. });
        let part = self.reader.read(prompt, event)?;
        if opens {
            self.writer.open(&self.reader, out)?;
        }
        if let Some(part) = part {
            self.writer.part(part, &self.reader, out)?;
        }
        if self.reader.is_finished() {
            self.writer.close(&self.reader, out)?;
            self.ended = true;
        }
        Ok(())
    }
}

/// One server-sent event. JSON has no line feeds of its own, so it is one line.
pub(crate) fn data(out: &mut String, value: &impl Serialize) {
    out.push_str("data: ");
    json(out, value);
    out.push_str("\n\n");
}

/// A server-sent event that has a name besides.
pub(crate) fn named(out: &mut String, name: &str, value: &impl Serialize) {
    out.push_str("event: ");
    out.push_str(name);
    out.push('\n');
    data(out, value);
}

/// A value as JSON on one line.
pub(crate) fn json(out: &mut String, value: &impl Serialize) {
    let json = serde_json::to_string(value);
    out.push_str(&json.unwrap_or_else(|_| unreachable!("every key is a text")));
}
