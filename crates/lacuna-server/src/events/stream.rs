//! What is told, in numbered batches, and what is kept of it for those who missed some.

use std::collections::VecDeque;
use std::sync::Arc;

use lacuna_engine::NetChange;
use lacuna_kv::prefix::KnownBlocks;

use super::message::{self, Event};

/// Blocks in one batch: some tens of kilobytes at most, where routers take megabytes.
const BATCH_BLOCKS: usize = 256;
/// What is kept of batches. Whoever missed more is told everything, which is as good.
const KEPT_BYTES: usize = 1 << 20;

/// Batches of events in the order of their numbers.
#[derive(Debug)]
pub(super) struct Events {
    next: u64,
    known: KnownBlocks,
    kept: VecDeque<Batch>,
    kept_bytes: usize,
    most_kept_bytes: usize,
}

/// Events that go out together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Batch {
    pub(super) number: u64,
    pub(super) payload: Arc<[u8]>,
}

impl Default for Events {
    fn default() -> Self {
        Self {
            next: 0,
            known: KnownBlocks::default(),
            kept: VecDeque::new(),
            kept_bytes: 0,
            most_kept_bytes: KEPT_BYTES,
        }
    }
}

impl Events {
    /// The batches that tell of a change.
    pub(super) fn follow(&mut self, change: NetChange) -> Vec<Batch> {
        for hash in &change.removed {
            let known = self.known.remove(*hash);
            debug_assert!(known, "what is removed was stored");
        }
        for block in &change.stored {
            let follows = self.known.store(block);
            debug_assert!(follows, "a parent comes first");
        }
        let removed = change.removed.chunks(BATCH_BLOCKS);
        let removed = removed.map(|hashes| vec![Event::removed(hashes)]);
        let stored = change.stored.chunks(BATCH_BLOCKS).map(Event::stored);
        let batches: Vec<Vec<Event>> = removed.chain(stored).collect();
        batches.iter().map(|events| self.add(events)).collect()
    }

    /// The batches that tell everything, to whoever may know anything: nothing is held, and then what is.
    pub(super) fn tell_all(&mut self) -> Vec<Batch> {
        let blocks = self.known.in_order();
        let mut batches = vec![vec![Event::AllBlocksCleared {}]];
        for (index, blocks) in blocks.chunks(BATCH_BLOCKS).enumerate() {
            match index {
                // With the first of them, so that there is no moment at which nothing seems to be held.
                0 => batches[0].extend(Event::stored(blocks)),
                _ => batches.push(Event::stored(blocks)),
            }
        }
        batches.iter().map(|events| self.add(events)).collect()
    }

    /// The batches from number `start` on; `None` when not all of them are kept.
    pub(super) fn from(&self, start: u64) -> Option<Vec<Batch>> {
        let first = self.kept.front().map_or(self.next, |batch| batch.number);
        let batches = self.kept.iter().filter(|batch| batch.number >= start);
        (start >= first).then(|| batches.cloned().collect())
    }

    fn add(&mut self, events: &[Event]) -> Batch {
        let batch = Batch {
            number: self.next,
            payload: message::batch(events).into(),
        };
        self.next += 1;
        self.kept_bytes += batch.payload.len();
        self.kept.push_back(batch.clone());
        while self.kept_bytes > self.most_kept_bytes {
            let oldest = self.kept.pop_front();
            self.kept_bytes -= oldest.map_or(0, |oldest| oldest.payload.len());
        }
        batch
    }
}

#[cfg(test)]
mod tests {
    use lacuna_kv::prefix::{Block, BlockHash};
    use serde_json::{Value, json};

    use super::*;

    fn block(number: u64, parent: Option<u64>) -> Arc<Block> {
        Arc::new(Block {
            hash: BlockHash(number),
            parent: parent.map(BlockHash),
            tokens: [number as u32; Block::TOKENS],
        })
    }

    fn stored(blocks: impl IntoIterator<Item = (u64, Option<u64>)>) -> NetChange {
        let blocks = blocks.into_iter();
        NetChange {
            stored: blocks
                .map(|(number, parent)| block(number, parent))
                .collect(),
            removed: Vec::new(),
        }
    }

    /// Its events, and that the rest of it is as it should be.
    fn events(batch: &Batch) -> Vec<Value> {
        let (seconds, events, rank): (f64, Vec<Value>, u32) =
            rmp_serde::from_slice(&batch.payload).expect("MessagePack");
        assert!(seconds > 1e9);
        assert_eq!(rank, 0);
        events
    }

    fn numbers(batches: &[Batch]) -> Vec<u64> {
        batches.iter().map(|batch| batch.number).collect()
    }

    #[test]
    fn blocks_that_follow_each_other_are_one_event_and_removals_come_first() {
        let mut events_of = Events::default();
        let first = events_of.follow(stored([(1, None), (2, Some(1)), (9, Some(1))]));
        assert_eq!(numbers(&first), [0]);
        let tokens = |number: u32| vec![number; Block::TOKENS];
        let event = |hashes: &[u64], parent: Option<u64>, tokens: Vec<u32>| {
            json!({
                "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent,
                "token_ids": tokens, "block_size": 16, "lora_id": null, "medium": "GPU",
                "lora_name": null,
            })
        };
        let expected = [
            event(&[1, 2], None, [tokens(1), tokens(2)].concat()),
            event(&[9], Some(1), tokens(9)),
        ];
        assert_eq!(events(&first[0]), expected);
        let change = NetChange {
            removed: vec![BlockHash(9), BlockHash(2)],
            ..stored([(3, Some(1))])
        };
        let second = events_of.follow(change);
        assert_eq!(numbers(&second), [1, 2]);
        let removed = json!({"type": "BlockRemoved", "block_hashes": [9, 2], "medium": "GPU"});
        assert_eq!(events(&second[0]), [removed]);
        assert_eq!(events(&second[1]), [event(&[3], Some(1), tokens(3))]);
        assert_eq!(events_of.follow(NetChange::default()), []);
        let all = events_of.tell_all();
        assert_eq!(numbers(&all), [3]);
        let cleared = json!({"type": "AllBlocksCleared"});
        let rest = event(&[1, 3], None, [tokens(1), tokens(3)].concat());
        assert_eq!(events(&all[0]), [cleared, rest]);
    }

    #[test]
    fn who_missed_some_gets_those_unless_they_are_more_than_is_kept() {
        let mut events_of = Events {
            // Three of them.
            most_kept_bytes: 450,
            ..Events::default()
        };
        assert_eq!(events_of.from(0), Some(vec![]), "there is none");
        let told: Vec<Batch> = (0..4)
            .flat_map(|number: u64| events_of.follow(stored([(number, number.checked_sub(1))])))
            .collect();
        assert_eq!(events_of.from(2).as_deref(), Some(&told[2..]));
        assert_eq!(events_of.from(4), Some(vec![]));
        assert_eq!(events_of.from(u64::MAX), Some(vec![]));
        assert_eq!(events_of.from(0), None, "the first is not kept any more");
        let all = events_of.tell_all();
        assert_eq!(numbers(&all), [4]);
        assert_eq!(events(&all[0]).len(), 2, "cleared, and one run");
    }

    #[test]
    fn a_large_cache_is_told_in_batches_of_a_bounded_size() {
        let mut events_of = Events::default();
        let chain = (0..1000).map(|number: u64| (number, number.checked_sub(1)));
        let told = events_of.follow(stored(chain));
        assert_eq!(told.len(), 4);
        let all = events_of.tell_all();
        assert_eq!(numbers(&all), [4, 5, 6, 7]);
        assert!(all.iter().all(|batch| batch.payload.len() < 1 << 16));
        let removed = NetChange {
            removed: (0..1000).rev().map(BlockHash).collect(),
            ..NetChange::default()
        };
        assert_eq!(events_of.follow(removed).len(), 4);
        assert_eq!(events(&events_of.tell_all()[0]).len(), 1, "nothing is held");
    }
}
