//! What a path keeps beside its sequence, what its forks take over, and what of it a folder is given and when.

use std::path::Path;
use std::time::{Duration, Instant};

use lacuna_kv::prefix::{Block, BlockHash, KnownBlocks, Namespace, PrefixCache};
use lacuna_kv::{KvCache, KvPolicy};
use lacuna_pages::HostDevice;

use crate::folder::{config, first_bench, made_by, root, segments, within_a_minute};
use crate::pages::{Bench, CAPACITY, Held, tokens};
use crate::resume::{find, resume_points};
use crate::{states, windows};

/// Segments of one kind in a folder.
fn count(root: &Path, kind: &str) -> usize {
    let paths = segments(root).into_iter();
    let of_kind = paths.filter(|path| path.extension().is_some_and(|suffix| suffix == kind));
    of_kind.count()
}

/// A second sequence that goes on from where one is.
fn fork(bench: &mut Bench, held: &mut Held) -> Held {
    let sequence = held.sequence.fork().expect("memory");
    Held {
        path: bench.cache.fork(&held.path, sequence.len()),
        sequence,
        tokens: held.tokens.clone(),
    }
}

#[test]
fn what_is_held_stays_until_it_is_given_back_and_takes_part_in_no_step() {
    for mut bench in crate::folder::benches().step_by(3) {
        let namespace = Namespace::new(7);
        let prompt = tokens(0, 300);
        let mut held = bench.start_in(namespace, &prompt);
        bench.compute(&mut held, 50);
        bench.leave(held);
        let kept = bench.cache.hold(namespace, &prompt);
        assert_eq!(kept.namespace(), namespace);
        let (groups, unused) = bench.cache.in_memory(namespace, &prompt);
        assert!(groups > 0 && kept.groups().len() == groups);
        assert_eq!(unused, 0);
        assert_eq!(bench.cache.next_stop(&kept, 0), None);
        while bench.cache.evict(Instant::now()) {}
        assert_eq!(bench.cache.tree().len(), groups);
        bench.cache.leave(kept, Instant::now());
        while bench.cache.evict(Instant::now()) {}
        assert!(bench.cache.tree().is_empty());
    }
}

#[test]
fn only_sequences_with_states_that_may_enter_have_to_stop() {
    for mut bench in crate::folder::benches().step_by(3) {
        let start = bench.start(&tokens(0, 300));
        let stop = bench.cache.next_stop(&start.path, 0);
        assert_eq!(stop.is_some(), bench.kv.geometry().has_states());
        let apart = bench.cache.start_apart(CAPACITY).expect("address space");
        assert_eq!(bench.cache.next_stop(&apart.path, 0), None);
    }
}

#[test]
fn a_fork_of_what_is_apart_enters_nothing_either() {
    let mut bench = Bench::with(crate::pages::even(), "sparse");
    let start = bench.cache.start_apart(CAPACITY).expect("address space");
    let mut apart = Held {
        sequence: start.sequence,
        path: start.path,
        tokens: tokens(0, 100),
    };
    bench.compute(&mut apart, 20);
    let mut fork = fork(&mut bench, &mut apart);
    fork.tokens.extend(tokens(1, 100));
    bench.compute(&mut fork, 20);
    bench.assert_rows(&fork);
    assert!(fork.path.groups().is_empty() && bench.cache.tree().is_empty());
}

/// What a fork computes of the prompt is no answer yet, which one resume point would follow.
#[test]
fn a_fork_in_the_middle_of_a_prompt_keeps_no_point_that_is_not_due() {
    for mut bench in states::benches() {
        let group = bench.cache.grain().group_tokens().get();
        let every = bench.cache.grain().resume_every().get();
        let prompt = tokens(0, 1100);
        let mut held = bench.start(&prompt);
        held.tokens.truncate(group);
        bench.compute(&mut held, 50);
        let mut fork = fork(&mut bench, &mut held);
        for end in group + 1..600 {
            fork.tokens = prompt[..end].to_vec();
            bench.compute(&mut fork, 1);
        }
        let points = resume_points(&bench, &fork);
        assert!(
            points.iter().all(|at| at.is_multiple_of(every)),
            "{points:?}"
        );
    }
}

/// The point that a sequence went on from was of use for as long as its forks go on.
#[test]
fn what_a_fork_began_with_is_used_until_it_ends() {
    let mut bench = states::benches().next().expect("a bench");
    let group = bench.cache.grain().group_tokens().get();
    let prompts = [1, 2].map(|seed| tokens(seed, 4 * group + 1));
    for prompt in &prompts {
        let held = bench.run(prompt);
        bench.leave(held);
    }
    let now = Instant::now() + Duration::from_secs(10);
    let later = |seconds| now + Duration::from_secs(seconds);
    // Both go on for two groups more, which are another point's.
    let [mut first, second] = prompts.each_ref().map(|prompt| {
        let longer = [&prompt[..], &tokens(3, 2 * group)].concat();
        let mut held = bench.start(&longer);
        assert_eq!(held.sequence.len(), 4 * group);
        bench.compute(&mut held, 50);
        assert_eq!(held.path.groups().len(), 6);
        held
    });
    let fork = fork(&mut bench, &mut first);
    bench.cache.leave(first.path, later(1));
    bench.cache.leave(second.path, later(2));
    bench.cache.leave(fork.path, later(3));
    while find(&bench, &prompts[1]).0 > 0 {
        assert!(bench.cache.evict(later(4)));
    }
    let left = find(&bench, &prompts[0]).0;
    assert_eq!(left, 4 * group, "the fork was the last to use it");
}

/// Windows are there whenever they are wanted, so nothing follows a sequence for them.
#[test]
fn no_resume_point_follows_windows_alone() {
    for mut bench in windows::benches().step_by(2) {
        let grain = bench.cache.grain().clone();
        let (group, every) = (grain.group_tokens().get(), grain.resume_every().get());
        let prompt = 3 * group + 5;
        let mut held = bench.start(&tokens(0, prompt));
        bench.compute(&mut held, 64);
        for end in prompt + 1..(every + 2) * group {
            held.tokens = tokens(0, end);
            bench.compute(&mut held, 1);
            let points = resume_points(&bench, &held);
            let due = |at: &usize| *at == 2 || *at == 3 || at.is_multiple_of(every);
            assert!(points.iter().all(due), "{points:?} at {end}");
        }
    }
}

/// Where rows straddle pages the states are those from before the end of the group, and kept until it is full.
#[test]
fn states_that_are_kept_for_a_point_are_free_when_it_is_there_or_not_wanted() {
    for bench in 0..3 {
        let mut bench = states::benches().nth(bench).expect("a bench");
        let grain = bench.cache.grain().clone();
        let every = grain.resume_every().get();
        let (end, stop) = (
            every * grain.group_tokens().get(),
            grain.whole_tokens(every),
        );
        let whole = tokens(0, 1100);
        let [mut first, mut second, mut third] = [(); 3].map(|()| bench.start(&whole));
        for held in [&mut first, &mut second] {
            held.tokens.truncate(stop);
            bench.compute(held, 50);
            assert_eq!(held.path.pages().count() > 0, stop < end);
        }
        // The point is there when the second comes to it.
        for held in [&mut first, &mut second] {
            held.tokens = whole[..end].to_vec();
            bench.compute(held, 50);
            assert!(resume_points(&bench, held).contains(&every));
            assert_eq!(held.path.pages().count(), 0);
        }
        third.tokens.truncate(stop);
        bench.compute(&mut third, 50);
        let groups = third.path.groups().len();
        bench
            .cache
            .leave_after(&mut third.path, groups, Instant::now());
        assert_eq!(third.path.groups().len(), groups, "all of them stay");
        assert_eq!(third.path.pages().count(), 0);
    }
}

/// What a step has changed that was not accepted whole is no state of any prompt.
#[test]
fn a_spent_state_is_kept_for_nobody() {
    for mut bench in states::benches() {
        let whole = tokens(0, 1100);
        let mut held = bench.start(&whole);
        let stop = bench.cache.next_stop(&held.path, 0).expect("a stop");
        held.tokens.truncate(stop - 1);
        bench.compute(&mut held, 50);
        let points = bench.cache.tree().resume_points();
        held.sequence.prepare(3).expect("memory");
        for layer in 0..bench.geometry.layers().len() {
            held.sequence.state(lacuna_kv::Layer(layer)).after.fill(1.0);
        }
        held.sequence.accept(1);
        assert!(held.sequence.is_spent() && held.sequence.len() == stop);
        let (path, sequence) = (&mut held.path, &mut held.sequence);
        let grown = bench.cache.grow(path, sequence, &whole, Instant::now());
        grown.expect("pages can be sealed");
        assert_eq!(held.path.pages().count(), 0);
        assert_eq!(bench.cache.tree().resume_points(), points);
    }
}

/// Whatever the device could do: memory that was there from the start is not shared page by page.
#[test]
fn dense_memory_of_a_device_that_shares_is_not_kept() {
    let device = HostDevice::new().expect("a host device");
    let policy: KvPolicy = "dense".parse().expect("a policy");
    let mut bench = Bench::with(crate::pages::even(), "dense");
    bench.kv = KvCache::on_device(device, crate::pages::even(), policy).expect("a cache");
    bench.cache = PrefixCache::new(bench.kv.clone());
    let held = bench.run(&tokens(0, 100));
    assert!(held.path.groups().is_empty());
    bench.assert_rows(&held);
}

#[test]
fn a_folder_is_given_segments_when_they_are_full_and_the_rest_at_the_end() {
    let (bench, root) = (first_bench(), root());
    let mut bench = bench.restarted(root.path());
    // Segments of 1,024 tokens, and of these rows groups of 32.
    let whole = tokens(0, 1150);
    let mut held = bench.start(&whole);
    for (end, written) in [(1023, 0), (1024, 1), (1150, 1)] {
        held.tokens = whole[..end].to_vec();
        bench.compute(&mut held, 64);
        bench.settle();
        assert_eq!(count(root.path(), "rows"), written, "at {end}");
    }
    bench.leave(held);
    bench.settle();
    assert_eq!(count(root.path(), "rows"), 2);
}

/// The point that follows a sequence moves on, and would be written many times.
#[test]
fn a_folder_is_given_resume_points_that_stay() {
    let (bench, root) = (states::benches().last().expect("a bench"), root());
    let mut bench = bench.with_folder(config(root.path(), 1 << 30), made_by("a"));
    let group = bench.cache.grain().group_tokens().get();
    let mut held = bench.start(&tokens(0, group + 5));
    let all = tokens(0, 1025);
    for end in group + 6..1025 {
        held.tokens = all[..end].to_vec();
        bench.compute(&mut held, 1);
    }
    bench.settle();
    let points = resume_points(&bench, &held);
    assert_eq!(points, [1, 1024 / group], "the end of the prompt, and here");
    assert_eq!(count(root.path(), "point"), 1);
    bench.leave(held);
    bench.settle();
    assert_eq!(count(root.path(), "point"), 2);
}

#[test]
fn it_is_known_whether_a_folder_has_anything_of_these_settings() {
    let (bench, root) = (first_bench(), root());
    assert!(!bench.cache.has_folder() && !bench.cache.has_only_others());
    let with = |weights: &str| {
        let bench = Bench::with(crate::pages::even(), "sparse");
        bench.with_folder(config(root.path(), 1 << 30), made_by(weights))
    };
    let mut first = with("a");
    assert!(first.cache.has_folder());
    assert!(!first.cache.has_only_others(), "it is empty");
    first.turn(&tokens(0, 100));
    first.settle();
    assert!(!first.cache.has_only_others(), "it has its own alone");
    drop(first);
    let mut second = with("b");
    assert!(second.cache.has_only_others());
    second.turn(&tokens(0, 100));
    second.settle();
    assert!(!second.cache.has_only_others(), "it has both");
}

/// What was read goes on behind groups that have left meanwhile: it would be taken for other tokens' rows.
#[test]
fn what_is_read_back_is_entered_behind_what_is_there_and_only_there() {
    let (bench, root) = (first_bench(), root());
    let mut bench = bench.restarted(root.path());
    let prompt = bench.turn(&tokens(0, 300));
    bench.settle();
    let groups = bench.cache.tree().len();
    let evict = |bench: &mut Bench, left: usize| {
        while bench.cache.tree().len() > left {
            assert!(bench.cache.evict(Instant::now()));
        }
    };
    for (left, entered) in [(3, groups - 3), (2, 0)] {
        evict(&mut bench, 3);
        let stored = bench.cache.stored(Namespace::COMMON, &prompt);
        let stored = stored.expect("it is there");
        let restoring = bench.cache.restore(stored, &prompt).expect("a folder");
        let restored = within_a_minute(|| restoring.poll());
        evict(&mut bench, left);
        let before = bench.folder().restored_tokens;
        let now = Instant::now();
        let found = bench.cache.enter(Namespace::COMMON, &prompt, restored, now);
        assert_eq!(found, entered);
        assert_eq!(bench.cache.tree().len(), left + entered);
        let group = bench.cache.grain().group_tokens().get();
        let tokens = bench.folder().restored_tokens - before;
        assert_eq!(tokens, (entered * group) as u64);
    }
    let held = bench.start(&prompt);
    bench.check(held);
}

#[test]
fn a_block_is_news_once_and_behind_the_one_before_it() {
    let block = |hash, parent: Option<u64>| {
        std::sync::Arc::new(Block {
            hash: BlockHash(hash),
            parent: parent.map(BlockHash),
            tokens: [hash as u32; Block::TOKENS],
        })
    };
    let mut known = KnownBlocks::default();
    assert!(!known.store(&block(2, Some(1))), "it follows nothing");
    assert!(known.store(&block(1, None)));
    assert!(!known.store(&block(1, None)), "it is known");
    assert!(!known.store(&block(2, Some(1))), "so is this by now");
    assert!(known.store(&block(3, Some(2))));
    assert_eq!(known.get(BlockHash(3)), Some(&block(3, Some(2))));
    assert!(known.remove(BlockHash(3)));
    assert_eq!(known.get(BlockHash(3)), None);
}
