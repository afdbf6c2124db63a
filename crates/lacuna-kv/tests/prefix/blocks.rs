//! What is told of blocks is what can be reused.

use std::collections::BTreeSet;
use std::time::Instant;

use lacuna_kv::prefix::{Block, BlockChange, KnownBlocks, Namespace, PrefixCache};

use crate::pages::{self, Bench, tokens};

/// Follows what is told and compares it with what the cache would give, by asking it for all that it has.
pub(crate) fn listen(known: &mut KnownBlocks, cache: &mut PrefixCache) {
    for change in cache.take_block_changes() {
        match change {
            BlockChange::Stored(block) => assert!(known.store(&block), "news, after its parent"),
            BlockChange::Removed(hash) => assert!(known.remove(hash), "it was stored"),
        }
    }
    assert_eq!(known.prefixes(), reusable(cache));
    let order = known.in_order();
    let mut again = KnownBlocks::default();
    assert!(order.iter().all(|block| again.store(block)));
    assert_eq!(again.prefixes(), known.prefixes());
}

fn reusable(cache: &PrefixCache) -> BTreeSet<Vec<u32>> {
    let mut reusable = BTreeSet::new();
    for (namespace, mut tokens) in cache.tree().sequences() {
        tokens.push(u32::MAX);
        let (_, held) = cache.find(namespace, &tokens);
        let ends = (Block::TOKENS..=held).step_by(Block::TOKENS);
        reusable.extend(ends.map(|end| tokens[..end].to_vec()));
    }
    reusable
}

#[test]
fn blocks_are_of_sixteen_tokens_whatever_a_group_has() {
    for mut bench in pages::geometries().map(|geometry| Bench::with(geometry, "sparse")) {
        bench.cache = bench.cache.watched(Namespace::COMMON);
        let mut known = KnownBlocks::default();
        let grain = bench.cache.grain().clone();
        let held = bench.run(&tokens(1, 200));
        listen(&mut known, &mut bench.cache);
        let whole = grain.whole_tokens(200 / grain.group_tokens());
        assert_eq!(known.in_order().len(), whole / Block::TOKENS);
        bench.leave(held);
        while bench.cache.evict(Instant::now()) {
            listen(&mut known, &mut bench.cache);
        }
        assert_eq!(known.in_order(), []);
    }
}

/// Two prompts that part within a group have the blocks before that in common, and they stay with either.
#[test]
fn a_block_is_stored_until_the_last_group_that_it_ends_in_leaves() {
    let mut bench = Bench::with(pages::even(), "sparse");
    assert_eq!(bench.cache.grain().group_tokens().get(), 32);
    bench.cache = bench.cache.watched(Namespace::COMMON);
    let mut known = KnownBlocks::default();
    for seed in [1, 2] {
        let held = bench.run(&pages::prompt(16, 16, seed));
        bench.leave(held);
        listen(&mut known, &mut bench.cache);
    }
    assert_eq!(bench.cache.tree().len(), 2);
    let blocks = |known: &KnownBlocks| known.in_order().len();
    assert_eq!(blocks(&known), 3, "one in common, and each its own");
    assert!(bench.cache.evict(Instant::now()));
    listen(&mut known, &mut bench.cache);
    assert_eq!(blocks(&known), 2);
}

#[test]
fn nothing_is_told_of_what_others_cannot_find() {
    let mut bench = Bench::with(pages::even(), "sparse");
    bench.cache = bench.cache.watched(Namespace::COMMON);
    let mut held = bench.start_in(Namespace::new(7), &tokens(1, 100));
    bench.compute(&mut held, 50);
    bench.leave(held);
    assert!(!bench.cache.tree().is_empty());
    assert_eq!(bench.cache.take_block_changes(), []);
    while bench.cache.evict(Instant::now()) {}
    assert_eq!(bench.cache.take_block_changes(), []);
}

/// Other machines, and this one after a start, give the same tokens the same names.
#[test]
fn a_blocks_name_follows_from_its_tokens_and_those_before() {
    let names = || {
        let mut bench = Bench::with(pages::even(), "sparse");
        bench.cache = bench.cache.watched(Namespace::COMMON);
        bench.run(&tokens(1, 33));
        let changes = bench.cache.take_block_changes().into_iter();
        let hash = |change| match change {
            BlockChange::Stored(block) => block.hash.0,
            BlockChange::Removed(_) => panic!("nothing leaves"),
        };
        changes.map(hash).collect::<Vec<u64>>()
    };
    assert_eq!(
        names(),
        [8_729_889_518_996_808_353, 11_414_542_043_716_479_145]
    );
}
