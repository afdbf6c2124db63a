//! Replies that can be asked for again by their name, each with the conversation that can be gone on with from it.
//!
//! They are kept as JSON in memory of the account of requests: an eighth of it at most, and only while
//! nobody else needs it. The oldest goes first.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use axum::body::Bytes;
use lacuna_engine::HeldMemory;

use crate::sharing::Client;

/// Conversations of all clients, the oldest first. Clones are the same.
#[derive(Debug, Clone)]
pub(crate) struct Kept {
    conversations: Arc<Mutex<VecDeque<Arc<Conversation>>>>,
    /// Bytes of all of them together at most.
    limit: usize,
}

/// A conversation up to and with one reply.
#[derive(Debug)]
pub(crate) struct Conversation {
    /// The reply's.
    pub(crate) id: String,
    /// Nobody else finds it.
    pub(crate) client: Client,
    /// A list of messages, as chat templates take them, in JSON.
    pub(crate) messages: Vec<u8>,
    /// Files of the images that have places in them, in order.
    pub(crate) images: Vec<Bytes>,
    /// The reply as it was sent, in JSON.
    pub(crate) reply: Vec<u8>,
    /// For all of it.
    pub(crate) memory: HeldMemory,
}

impl Conversation {
    /// What one takes beside its texts: its name, and its places in lists.
    const BYTES: usize = 512;

    /// What one with so many bytes of texts takes.
    pub(crate) fn bytes(texts: usize) -> usize {
        texts + Self::BYTES
    }
}

impl Kept {
    /// Conversations in a part of an account of so many bytes.
    pub(crate) fn new(account: u64) -> Self {
        Self {
            conversations: Arc::default(),
            limit: usize::try_from(account / 8).unwrap_or(usize::MAX),
        }
    }

    /// Keeps a conversation, and lets go of the oldest until all of them are within the limit, which
    /// may be this one.
    pub(crate) fn keep(&self, conversation: Conversation) {
        let mut all = self.lock();
        all.push_back(Arc::new(conversation));
        let mut bytes: usize = all.iter().map(|one| one.memory.bytes()).sum();
        while bytes > self.limit
            && let Some(oldest) = all.pop_front()
        {
            bytes -= oldest.memory.bytes();
        }
    }

    pub(crate) fn find(&self, client: Client, id: &str) -> Option<Arc<Conversation>> {
        let all = self.lock();
        let found = all.iter().find(|one| one.client == client && one.id == id);
        found.cloned()
    }

    /// Lets go of one; `false` when it is not kept.
    pub(crate) fn forget(&self, client: Client, id: &str) -> bool {
        let mut all = self.lock();
        let found = all
            .iter()
            .position(|one| one.client == client && one.id == id);
        found.and_then(|index| all.remove(index)).is_some()
    }

    /// Lets go of the oldest, because somebody needs memory; `false` when there is none.
    pub(crate) fn give_way(&self) -> bool {
        self.lock().pop_front().is_some()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, VecDeque<Arc<Conversation>>> {
        let locked = self.conversations.lock();
        locked.unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use lacuna_engine::RequestMemory;
    use lacuna_pages::ByteLength;

    use super::*;

    const ONE: Client = Client(Some(0));
    const TWO: Client = Client(Some(1));

    fn keep(kept: &Kept, account: &RequestMemory, client: Client, id: &str, bytes: usize) {
        kept.keep(Conversation {
            id: id.to_owned(),
            client,
            messages: vec![b' '; bytes],
            images: Vec::new(),
            reply: Vec::new(),
            memory: account.try_take(Conversation::bytes(bytes)).expect("free"),
        });
    }

    #[test]
    fn the_oldest_goes_first_and_nobody_finds_what_is_anothers() {
        let account = RequestMemory::new(ByteLength::new(32 << 10));
        let kept = Kept::new(32 << 10);
        for id in ["a", "b", "c", "d"] {
            keep(&kept, &account, ONE, id, 1000);
            assert!(kept.find(ONE, id).is_some() && kept.find(TWO, id).is_none());
        }
        assert!(kept.find(ONE, "a").is_none() && kept.find(ONE, "b").is_none());
        let held = || account.status().held.get();
        assert_eq!(held(), 2 * 1512);
        // More than all of them may have together: then it is not kept.
        keep(&kept, &account, ONE, "e", 5000);
        assert!(kept.find(ONE, "e").is_none());
        assert_eq!(held(), 0);
        keep(&kept, &account, ONE, "f", 1000);
        assert!(kept.give_way() && !kept.give_way());
        assert_eq!(held(), 0);
        // One that is let go of is, and no other.
        for id in ["g", "h"] {
            keep(&kept, &account, ONE, id, 1000);
        }
        assert!(!kept.forget(TWO, "g") && kept.forget(ONE, "g") && !kept.forget(ONE, "g"));
        assert!(kept.find(ONE, "g").is_none() && kept.find(ONE, "h").is_some());
        assert_eq!(held(), 1512);
    }
}
