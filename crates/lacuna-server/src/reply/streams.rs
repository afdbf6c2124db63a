//! The engine's streams for one reply: one for each of its prompts.

use std::future::poll_fn;
use std::task::{Context, Poll};

use lacuna_engine::{Event, Stream};

use crate::http::account::Account;

/// Events of all prompts as they come. Dropping it cancels what is under way.
#[derive(Debug)]
pub(crate) struct Streams {
    /// `None` for one that has come to its end.
    streams: Vec<Option<Stream>>,
    /// Where to look first, so that every prompt has its turn.
    next: usize,
    /// What the reply comes to.
    account: Account,
}

impl Streams {
    pub(crate) fn new(streams: impl IntoIterator<Item = Stream>, account: Account) -> Self {
        Self {
            account,
            streams: streams.into_iter().map(Some).collect(),
            next: 0,
        }
    }

    pub(crate) fn account(&self) -> &Account {
        &self.account
    }

    /// The next event, with the place of its prompt, or `None` after the last of all.
    pub(crate) async fn recv(&mut self) -> Option<(usize, Event)> {
        poll_fn(|context| self.poll_recv(context)).await
    }

    /// [`Streams::recv`] for hand-written futures.
    pub(crate) fn poll_recv(&mut self, context: &mut Context<'_>) -> Poll<Option<(usize, Event)>> {
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
                    return Poll::Ready(Some((prompt, event)));
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
}
