//! What is told of blocks is what can be reused.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Instant;

use lacuna_kv::prefix::{Block, BlockChange, KnownBlocks, Medium, Namespace, PrefixCache};

use crate::folder::{benches, config, made_by, segments};
use crate::pages::{self, Bench, tokens};

/// Follows what is told and compares it with what the cache would give, by asking it for all that it has.
pub(crate) fn listen(known: &mut KnownBlocks, cache: &mut PrefixCache) {
    let mut disk = KnownBlocks::default();
    follow(known, &mut disk, cache);
    assert_eq!(disk.in_order(), [], "there is no folder");
    let order = known.in_order();
    let mut again = KnownBlocks::default();
    assert!(order.iter().all(|block| again.store(block)));
    assert_eq!(again.prefixes(), known.prefixes());
}

/// Follows what is told of memory and of the folder, and compares the former with what the cache would give.
fn follow(memory: &mut KnownBlocks, disk: &mut KnownBlocks, cache: &mut PrefixCache) {
    for change in cache.take_block_changes() {
        let (BlockChange::Stored(medium, _) | BlockChange::Removed(medium, _)) = change;
        let known = match medium {
            Medium::Memory => &mut *memory,
            Medium::Disk => &mut *disk,
        };
        match change {
            BlockChange::Stored(_, block) => assert!(known.store(&block), "news, after its parent"),
            BlockChange::Removed(_, hash) => assert!(known.remove(hash), "it was stored"),
        }
    }
    assert_eq!(memory.prefixes(), reusable(cache));
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
            BlockChange::Stored(_, block) => block.hash.0,
            BlockChange::Removed(..) => panic!("nothing leaves"),
        };
        changes.map(hash).collect::<Vec<u64>>()
    };
    assert_eq!(
        names(),
        [8_729_889_518_996_808_353, 11_414_542_043_716_479_145]
    );
}

/// What a process that has just opened the folder would bring into memory for prompts that begin like `turns`, and what it
/// is told.
fn on_disk(bench: &Bench, root: &Path, turns: &[Vec<u32>]) -> BTreeSet<Vec<u32>> {
    let mut opened = bench.restarted(root);
    opened.cache = opened.cache.watched(Namespace::COMMON);
    let mut found = BTreeSet::new();
    for turn in turns {
        let asked = [&turn[..], &[u32::MAX]].concat();
        let Some(stored) = opened.cache.stored(Namespace::COMMON, &asked) else {
            continue;
        };
        let grain = opened.cache.grain();
        let whole = grain.whole_tokens(stored.tokens / grain.group_tokens());
        let ends = (Block::TOKENS..=whole).step_by(Block::TOKENS);
        found.extend(ends.map(|end| turn[..end].to_vec()));
    }
    let (mut memory, mut disk) = (KnownBlocks::default(), KnownBlocks::default());
    follow(&mut memory, &mut disk, &mut opened.cache);
    assert_eq!(disk.prefixes(), found);
    found
}

#[test]
fn what_is_in_the_folder_is_told_of_by_itself() {
    for bench in benches() {
        let root = tempfile::tempdir().expect("a folder");
        let mut bench = bench.with_folder(config(root.path(), 1 << 30), made_by("a"));
        bench.cache = bench.cache.watched(Namespace::COMMON);
        let (mut memory, mut disk) = (KnownBlocks::default(), KnownBlocks::default());
        let mut turns = Vec::new();
        for seed in [1, 2] {
            let begins_alike = [&tokens(9, 150)[..], &tokens(seed, 200)].concat();
            turns.push(bench.turn(&begins_alike));
            bench.settle();
            follow(&mut memory, &mut disk, &mut bench.cache);
            assert_eq!(disk.prefixes(), on_disk(&bench, root.path(), &turns));
        }
        assert!(disk.in_order().len() > 20);
        // It is told of no less when it leaves memory, and no more when it comes back.
        let before = disk.prefixes();
        while bench.cache.evict(Instant::now()) {}
        follow(&mut memory, &mut disk, &mut bench.cache);
        assert_eq!(
            (memory.in_order().len(), disk.prefixes()),
            (0, before.clone())
        );
        assert!(bench.restore(&turns[0]) > 0);
        follow(&mut memory, &mut disk, &mut bench.cache);
        assert!(!memory.in_order().is_empty());
        assert_eq!(disk.prefixes(), before);
    }
}

/// Somebody removes files: what they had is told of no longer, nor what comes after it, once that is seen.
#[test]
fn what_leaves_the_folder_takes_with_it_what_comes_after() {
    for bench in benches() {
        let root = tempfile::tempdir().expect("a folder");
        let mut bench = bench.with_folder(config(root.path(), 1 << 30), made_by("a"));
        bench.cache = bench.cache.watched(Namespace::COMMON);
        let (mut memory, mut disk) = (KnownBlocks::default(), KnownBlocks::default());
        let mut turns = vec![bench.turn(&tokens(1, 300))];
        let longer = [&turns[0][..], &tokens(2, 200)].concat();
        turns.push(bench.turn(&longer));
        bench.settle();
        follow(&mut memory, &mut disk, &mut bench.cache);
        let before = disk.in_order().len();
        let mut files = segments(root.path());
        files.retain(|path| path.extension().is_some_and(|kind| kind == "rows"));
        files.sort();
        assert!(files.len() >= 2, "several segments of one text");
        std::fs::remove_file(&files[0]).expect("it was there");
        turns.push(bench.turn(&tokens(3, 40)));
        bench.settle();
        follow(&mut memory, &mut disk, &mut bench.cache);
        assert_eq!(disk.prefixes(), on_disk(&bench, root.path(), &turns));
        assert!(disk.in_order().len() < before);
    }
}
