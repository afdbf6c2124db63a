//! Somebody who knows of the prefix cache only what is told of its blocks.

use std::collections::BTreeSet;

use lacuna_kv::prefix::{Block, BlockChange, KnownBlocks, Medium, Namespace, PrefixCache};

use crate::block_feed::{BlockFeed, NetChange};

/// What two listeners know: one who is told of everything, and one who asks now and then what has changed.
#[derive(Default)]
pub(super) struct Listeners {
    attentive: Known,
    casual: Known,
    feed: BlockFeed,
    steps: u64,
    /// Blocks they were told of.
    pub(super) stored: u64,
    pub(super) removed: u64,
}

/// What is in memory, and what is in files.
#[derive(Default)]
struct Known {
    memory: KnownBlocks,
    disk: KnownBlocks,
}

impl Known {
    fn of(&mut self, medium: Medium) -> &mut KnownBlocks {
        match medium {
            Medium::Memory => &mut self.memory,
            Medium::Disk => &mut self.disk,
        }
    }
}

impl Listeners {
    /// The casual one asks after so many steps.
    const INTERVAL: u64 = 7;

    /// Tells them what has happened, and compares what they know with what can be reused.
    pub(super) fn listen(&mut self, prefix: &mut PrefixCache) {
        let changes = prefix.take_block_changes();
        for change in &changes {
            match change {
                BlockChange::Stored(medium, block) => {
                    self.stored += u64::from(*medium == Medium::Memory);
                    let known = self.attentive.of(*medium);
                    assert!(known.store(block), "news, after its parent");
                }
                BlockChange::Removed(medium, hash) => {
                    self.removed += u64::from(*medium == Medium::Memory);
                    assert!(self.attentive.of(*medium).remove(*hash), "it was stored");
                }
            }
        }
        self.feed.add(changes);
        self.steps += 1;
        let reusable = reusable(prefix);
        let known = &self.attentive;
        assert_eq!(known.memory.prefixes(), reusable, "every change was told");
        if self.steps.is_multiple_of(Self::INTERVAL) {
            let NetChange { removed, stored } = self.feed.take();
            for (medium, hash) in removed {
                assert!(self.casual.of(medium).remove(hash));
            }
            for (medium, block) in stored {
                assert!(self.casual.of(medium).store(&block));
            }
            for medium in [Medium::Memory, Medium::Disk] {
                let prefixes = self.attentive.of(medium).prefixes();
                let known = self.casual.of(medium).prefixes();
                assert_eq!(known, prefixes, "every difference was told");
            }
        }
    }
}

/// Every whole number of blocks that some prompt would be given of what is kept, by asking for all there is.
fn reusable(prefix: &PrefixCache) -> BTreeSet<Vec<u32>> {
    let sequences = prefix.tree().sequences();
    let common = sequences.filter(|(namespace, _)| *namespace == Namespace::COMMON);
    let mut reusable = BTreeSet::new();
    for (namespace, mut tokens) in common {
        tokens.push(u32::MAX);
        let (_, held) = prefix.find(namespace, &tokens);
        for end in (Block::TOKENS..=held).step_by(Block::TOKENS) {
            reusable.insert(tokens[..end].to_vec());
        }
    }
    reusable
}
