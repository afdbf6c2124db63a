//! What becomes of the prefix cache's blocks, on its way from the engine's thread to those who tell others.
//!
//! The engine's thread never waits: what nobody has taken yet is kept as the difference it makes, and that is never more
//! than what was kept and what is. So there is nothing that could overflow.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use lacuna_kv::prefix::{Block, BlockChange, BlockHash, Medium, Namespace};
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
    /// What cannot be reused from there any more; of each medium, each before the one it comes after.
    pub removed: Vec<(Medium, BlockHash)>,
    /// What can be, after that; of each medium, each after its parent.
    pub stored: Vec<(Medium, Arc<Block>)>,
}

#[derive(Debug, Default)]
struct Pending {
    removed: InOrder<()>,
    stored: InOrder<Arc<Block>>,
}

/// Blocks in the order they came in, out of which each can be taken.
#[derive(Debug)]
struct InOrder<T> {
    entries: BTreeMap<u64, ((Medium, BlockHash), T)>,
    places: HashMap<(Medium, BlockHash), u64>,
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
        let removed = pending.removed.entries.into_values();
        let stored = pending.stored.entries.into_values();
        NetChange {
            removed: removed.map(|(place, ())| place).collect(),
            stored: stored.map(|((medium, _), block)| (medium, block)).collect(),
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
            BlockChange::Stored(medium, block) => {
                let place = (medium, block.hash);
                if !self.removed.cancel(place) {
                    self.stored.push(place, block);
                }
            }
            BlockChange::Removed(medium, hash) => {
                if !self.stored.cancel((medium, hash)) {
                    self.removed.push((medium, hash), ());
                }
            }
        }
    }
}

impl<T> InOrder<T> {
    fn push(&mut self, place: (Medium, BlockHash), entry: T) {
        self.places.insert(place, self.next);
        self.entries.insert(self.next, (place, entry));
        self.next += 1;
    }

    fn cancel(&mut self, place: (Medium, BlockHash)) -> bool {
        let number = self.places.remove(&place);
        number
            .and_then(|number| self.entries.remove(&number))
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
        BlockChange::Stored(Medium::Memory, block(hash))
    }

    fn removed(hash: u64) -> BlockChange {
        BlockChange::Removed(Medium::Memory, BlockHash(hash))
    }

    fn in_memory(hash: u64) -> (Medium, Arc<Block>) {
        (Medium::Memory, block(hash))
    }

    #[test]
    fn what_is_taken_back_before_it_is_told_did_not_happen() {
        let feed = BlockFeed::default();
        feed.add(vec![stored(1), stored(2), stored(3), removed(2)]);
        let first = feed.take();
        assert_eq!(first.stored, [in_memory(1), in_memory(3)]);
        assert_eq!(first.removed, []);
        feed.add(vec![removed(3), removed(1)]);
        feed.add(vec![stored(1), stored(4)]);
        let second = feed.take();
        assert_eq!(second.removed, [(Medium::Memory, BlockHash(3))]);
        assert_eq!(second.stored, [in_memory(4)]);
        assert_eq!(feed.take(), NetChange::default());
    }

    #[test]
    fn a_block_comes_to_each_medium_and_leaves_it_by_itself() {
        let feed = BlockFeed::default();
        let on_disk = |change| match change {
            BlockChange::Stored(_, block) => BlockChange::Stored(Medium::Disk, block),
            BlockChange::Removed(_, hash) => BlockChange::Removed(Medium::Disk, hash),
        };
        feed.add(vec![stored(1), on_disk(stored(1)), removed(1)]);
        let change = feed.take();
        assert_eq!(change.stored, [(Medium::Disk, block(1))]);
        assert_eq!(change.removed, []);
        feed.add(vec![stored(1), on_disk(removed(1))]);
        let change = feed.take();
        assert_eq!(change.stored, [in_memory(1)]);
        assert_eq!(change.removed, [(Medium::Disk, BlockHash(1))]);
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
