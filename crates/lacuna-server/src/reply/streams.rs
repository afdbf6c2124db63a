//! The engine's streams for one reply: one for each of its prompts.

use std::future::poll_fn;
use std::task::{Context, Poll};

use lacuna_engine::{Event, Failure, Stream};

use crate::http::account::Account;
use crate::http::error::ApiError;
use crate::models::More;

/// Events of all prompts as they come. Dropping it cancels what is under way.
#[derive(Debug)]
pub(crate) struct Streams {
    /// `None` for one that has come to its end.
    streams: Vec<Option<Stream>>,
    /// Where to look first, so that every prompt has its turn.
    next: usize,
    /// What the reply comes to.
    account: Account,
    /// Who knows why the model has ended, if it is one of several.
    more: Option<More>,
}

impl Streams {
    pub(crate) fn new(
        streams: impl IntoIterator<Item = Stream>,
        account: Account,
        more: Option<More>,
    ) -> Self {
        Self {
            account,
            more,
            streams: streams.into_iter().map(Some).collect(),
            next: 0,
        }
    }

    pub(crate) fn account(&self) -> &Account {
        &self.account
    }

    /// The next event, with the place of its prompt, or `None` after the last of all.
    ///
    /// # Errors
    /// What failed, of any prompt.
    pub(crate) async fn recv(&mut self) -> Option<Result<(usize, Event), ApiError>> {
        poll_fn(|context| self.poll_recv(context)).await
    }

    /// [`Streams::recv`] for hand-written futures.
    pub(crate) fn poll_recv(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<(usize, Event), ApiError>>> {
        let mut left = false;
        for offset in 0..self.streams.len() {
            let prompt = (self.next + offset) % self.streams.len();
            let Some(stream) = &mut self.streams[prompt] else {
                continue;
            };
            match stream.poll_recv(context) {
                Poll::Ready(Some(event)) => {
                    self.next = prompt + 1;
                    self.account.count(&event);
                    return Poll::Ready(Some(match event {
                        Event::Failed(failure) => Err(self.error(failure)),
                        event => Ok((prompt, event)),
                    }));
                }
                Poll::Ready(None) => self.streams[prompt] = None,
                Poll::Pending => left = true,
            }
        }
        match left {
            true => Poll::Pending,
            false => Poll::Ready(None),
        }
    }

    fn error(&self, failure: Failure) -> ApiError {
        match (failure, &self.more) {
            (Failure::ShuttingDown, Some(more)) => more.why_ended(),
            (failure, _) => failure.into(),
        }
    }
}
