//! What becomes of the prefix cache's blocks, on its way from the engine's thread to those who tell others.
//!
//! The engine's thread never waits: what nobody has taken yet is kept as the difference it makes, and that is never more
//! than what was kept and what is. So there is nothing that could overflow.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lacuna_kv::prefix::{Block, BlockChange, BlockHash, Namespace};
use tokio::sync::Notify;

/// Which blocks are told of, and where.
#[derive(Debug, Clone)]
pub struct BlockWatch {
    /// Those of requests in this namespace.
    pub namespace: Namespace,
    /// What is told.
    pub feed: Arc<BlockFeed>,
}

/// Changes that nobody has taken yet.
#[derive(Debug, Default)]
pub struct BlockFeed {
    pending: Mutex<Pending>,
    changed: Notify,
}

/// What has changed between two moments.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NetChange {
    /// What cannot be reused any more; each before the one it comes after.
    pub removed: Vec<BlockHash>,
    /// What can be, after that; each after its parent.
    pub stored: Vec<Arc<Block>>,
}

#[derive(Debug, Default)]
struct Pending {
    removed: InOrder<()>,
    stored: InOrder<Arc<Block>>,
}

/// Blocks in the order they came in, out of which each can be taken.
#[derive(Debug)]
struct InOrder<T> {
    entries: BTreeMap<u64, (BlockHash, T)>,
    places: HashMap<BlockHash, u64>,
    next: u64,
}

impl BlockFeed {
    /// Takes changes up, in the order they happened. Costs a little for each, and waits for nobody.
    pub fn add(&self, changes: Vec<BlockChange>) {
        if changes.is_empty() {
            return;
        }
        let mut pending = self.lock();
        changes.into_iter().for_each(|change| pending.add(change));
        drop(pending);
        self.changed.notify_one();
    }

    /// What has changed since the last call.
    #[must_use]
    pub fn take(&self) -> NetChange {
        let pending = std::mem::take(&mut *self.lock());
        let hashes = pending.removed.entries.into_values();
        let blocks = pending.stored.entries.into_values();
        NetChange {
            removed: hashes.map(|(hash, ())| hash).collect(),
            stored: blocks.map(|(_, block)| block).collect(),
        }
    }

    /// Waits until something has changed since it was last waited for.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }

    fn lock(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pending {
    /// What was taken back before anybody knew of it did not happen.
    fn add(&mut self, change: BlockChange) {
        match change {
            BlockChange::Stored(block) => {
                if !self.removed.cancel(block.hash) {
                    self.stored.push(block.hash, block);
                }
            }
            BlockChange::Removed(hash) => {
                if !self.stored.cancel(hash) {
                    self.removed.push(hash, ());
                }
            }
        }
    }
}

impl<T> InOrder<T> {
    fn push(&mut self, hash: BlockHash, entry: T) {
        self.places.insert(hash, self.next);
        self.entries.insert(self.next, (hash, entry));
        self.next += 1;
    }

    fn cancel(&mut self, hash: BlockHash) -> bool {
        let place = self.places.remove(&hash);
        place
            .and_then(|place| self.entries.remove(&place))
            .is_some()
    }
}

impl<T> Default for InOrder<T> {
    fn default() -> Self {
        Self {
            entries: BTreeMap::new(),
            places: HashMap::new(),
            next: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(hash: u64) -> Arc<Block> {
        Arc::new(Block {
            hash: BlockHash(hash),
            parent: None,
            tokens: [hash as u32; Block::TOKENS],
        })
    }

    fn stored(hash: u64) -> BlockChange {
        BlockChange::Stored(block(hash))
    }

    fn removed(hash: u64) -> BlockChange {
        BlockChange::Removed(BlockHash(hash))
    }

    #[test]
    fn what_is_taken_back_before_it_is_told_did_not_happen() {
        let feed = BlockFeed::default();
        feed.add(vec![stored(1), stored(2), stored(3), removed(2)]);
        let first = feed.take();
        assert_eq!(first.stored, [block(1), block(3)]);
        assert_eq!(first.removed, []);
        feed.add(vec![removed(3), removed(1)]);
        feed.add(vec![stored(1), stored(4)]);
        let second = feed.take();
        assert_eq!(second.removed, [BlockHash(3)]);
        assert_eq!(second.stored, [block(4)]);
        assert_eq!(feed.take(), NetChange::default());
    }

    #[test]
    fn however_much_happens_what_waits_is_no_more_than_the_difference() {
        let feed = BlockFeed::default();
        for _ in 0..1000 {
            feed.add(vec![stored(1), stored(2), removed(2), removed(1)]);
        }
        let pending = feed.lock();
        assert_eq!(
            pending.stored.entries.len() + pending.stored.places.len(),
            0
        );
        assert_eq!(pending.removed.entries.len(), 0);
    }
}
