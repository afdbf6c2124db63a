//! What is told, in numbered batches, and what is kept of it for those who missed some.

use std::collections::VecDeque;
use std::sync::Arc;

use lacuna_engine::NetChange;
use lacuna_kv::prefix::{Block, KnownBlocks, Medium};

use super::message::{self, Event};

/// Blocks in one batch: some tens of kilobytes at most, where routers take megabytes.
const BATCH_BLOCKS: usize = 256;
/// What is kept of batches. Whoever missed more is told everything, which is as good.
const KEPT_BYTES: usize = 1 << 20;

/// Batches of events in the order of their numbers.
#[derive(Debug)]
pub(super) struct Events {
    next: u64,
    memory: KnownBlocks,
    disk: KnownBlocks,
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
            memory: KnownBlocks::default(),
            disk: KnownBlocks::default(),
            kept: VecDeque::new(),
            kept_bytes: 0,
            most_kept_bytes: KEPT_BYTES,
        }
    }
}

impl Events {
    /// The batches that tell of a change.
    pub(super) fn follow(&mut self, change: NetChange) -> Vec<Batch> {
        for &(medium, hash) in &change.removed {
            let known = self.known(medium).remove(hash);
            debug_assert!(known, "what is removed was stored");
        }
        let mut stored = self.still_held(&change);
        for (medium, block) in &change.stored {
            let follows = self.known(*medium).store(block);
            debug_assert!(follows, "a parent comes first");
        }
        stored.extend(change.stored);
        let removed = change.removed.chunks(BATCH_BLOCKS).map(Event::removed);
        let stored = stored.chunks(BATCH_BLOCKS).map(Event::stored);
        let batches: Vec<Vec<Event>> = removed.chain(stored).collect();
        batches.iter().map(|events| self.add(events)).collect()
    }

    /// The batches that tell everything, to whoever may know anything: nothing is held, and then what is.
    pub(super) fn tell_all(&mut self) -> Vec<Batch> {
        let of = |medium, known: &KnownBlocks| {
            let blocks = known.in_order().into_iter();
            blocks.map(move |block| (medium, block))
        };
        let memory = of(Medium::Memory, &self.memory);
        let blocks: Vec<_> = memory.chain(of(Medium::Disk, &self.disk)).collect();
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

    fn known(&mut self, medium: Medium) -> &mut KnownBlocks {
        match medium {
            Medium::Memory => &mut self.memory,
            Medium::Disk => &mut self.disk,
        }
    }

    /// What left one medium and is in the other, each after its parent. It is told of once more: to a router that does
    /// not tell media apart a block that was removed is gone, and to one that does this is no news.
    fn still_held(&self, change: &NetChange) -> Vec<(Medium, Arc<Block>)> {
        let removed = change.removed.iter().rev();
        let other = removed.filter_map(|&(medium, hash)| {
            let (other, known) = match medium {
                Medium::Memory => (Medium::Disk, &self.disk),
                Medium::Disk => (Medium::Memory, &self.memory),
            };
            known.get(hash).map(|block| (other, Arc::clone(block)))
        });
        other.collect()
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
    use lacuna_kv::prefix::BlockHash;
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
                .map(|(number, parent)| (Medium::Memory, block(number, parent)))
                .collect(),
            removed: Vec::new(),
        }
    }

    fn removed(hashes: impl IntoIterator<Item = u64>) -> Vec<(Medium, BlockHash)> {
        let hashes = hashes.into_iter();
        hashes
            .map(|hash| (Medium::Memory, BlockHash(hash)))
            .collect()
    }

    /// The same on disk.
    fn on_disk(change: NetChange) -> NetChange {
        let (stored, removed) = (change.stored.into_iter(), change.removed.into_iter());
        NetChange {
            stored: stored.map(|(_, block)| (Medium::Disk, block)).collect(),
            removed: removed.map(|(_, hash)| (Medium::Disk, hash)).collect(),
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
            removed: removed([9, 2]),
            ..stored([(3, Some(1))])
        };
        let second = events_of.follow(change);
        assert_eq!(numbers(&second), [1, 2]);
        let event_of_removal =
            json!({"type": "BlockRemoved", "block_hashes": [9, 2], "medium": "GPU"});
        assert_eq!(events(&second[0]), [event_of_removal]);
        assert_eq!(events(&second[1]), [event(&[3], Some(1), tokens(3))]);
        assert_eq!(events_of.follow(NetChange::default()), []);
        let all = events_of.tell_all();
        assert_eq!(numbers(&all), [3]);
        let cleared = json!({"type": "AllBlocksCleared"});
        let rest = event(&[1, 3], None, [tokens(1), tokens(3)].concat());
        assert_eq!(events(&all[0]), [cleared, rest]);
    }

    /// What is removed from one medium and is still in the other, and in what order a router that does not tell them apart
    /// gets to hear of it: it ends up with what is held.
    #[test]
    fn what_leaves_memory_and_is_on_disk_is_told_of_once_more() {
        let mut events_of = Events::default();
        let chain = || stored([(1, None), (2, Some(1)), (3, Some(2))]);
        let on_media = |batches: &[Batch]| -> Vec<(String, String, Vec<u64>)> {
            let all = batches.iter().flat_map(events);
            let of = |event: Value| {
                let text = |name: &str| event[name].as_str().unwrap_or_default().to_owned();
                let hashes = serde_json::from_value(event["block_hashes"].clone());
                (text("type"), text("medium"), hashes.unwrap_or_default())
            };
            all.map(of).collect()
        };
        let event = |kind: &str, medium: &str, hashes: &[u64]| {
            (kind.to_owned(), medium.to_owned(), hashes.to_vec())
        };
        events_of.follow(chain());
        let written = events_of.follow(on_disk(stored([(1, None), (2, Some(1))])));
        assert_eq!(on_media(&written), [event("BlockStored", "DISK", &[1, 2])]);
        let evicted = events_of.follow(NetChange {
            removed: removed([3, 2, 1]),
            ..NetChange::default()
        });
        assert_eq!(
            on_media(&evicted),
            [
                event("BlockRemoved", "GPU", &[3, 2, 1]),
                event("BlockStored", "DISK", &[1, 2]),
            ]
        );
        let restored = events_of.follow(stored([(1, None)]));
        assert_eq!(on_media(&restored), [event("BlockStored", "GPU", &[1])]);
        let cleared = events_of.follow(on_disk(NetChange {
            removed: removed([2, 1]),
            ..NetChange::default()
        }));
        assert_eq!(
            on_media(&cleared),
            [
                event("BlockRemoved", "DISK", &[2, 1]),
                event("BlockStored", "GPU", &[1]),
            ]
        );
        events_of.follow(on_disk(chain()));
        assert_eq!(
            on_media(&events_of.tell_all()),
            [
                event("AllBlocksCleared", "", &[]),
                event("BlockStored", "GPU", &[1]),
                event("BlockStored", "DISK", &[1, 2, 3]),
            ]
        );
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
        let all_removed = NetChange {
            removed: removed((0..1000).rev()),
            ..NetChange::default()
        };
        assert_eq!(events_of.follow(all_removed).len(), 4);
        assert_eq!(events(&events_of.tell_all()[0]).len(), 1, "nothing is held");
    }
}
