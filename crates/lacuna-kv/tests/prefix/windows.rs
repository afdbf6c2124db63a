//! Sequences of layers with windows start at resume points, and hold the rows they would have computed.

use std::collections::BTreeSet;
use std::num::NonZeroUsize;
use std::time::Instant;

use lacuna_kernels::ElementType;
use lacuna_kv::prefix::{Miss, Namespace, Pins};
use lacuna_kv::{Geometry, Keep, KvElements, Layer, LayerCache, RowSpec, ValueRows};
use proptest::prelude::*;

use crate::pages::{Bench, CAPACITY, Held, prompt, tokens};

fn rows(kv_heads: usize, head_dim: usize, keep: Keep) -> LayerCache {
    LayerCache::Rows(RowSpec {
        kv_heads,
        key_dim: head_dim,
        value_dim: head_dim,
        values: ValueRows::Apart,
        keep,
    })
}

fn window(rows: usize) -> Keep {
    Keep::Window(NonZeroUsize::new(rows).expect("not zero"))
}

/// Rows of 256 bytes, 16 a page, in layers with windows of 64 and 33 rows and in one without.
fn even() -> Geometry {
    let layers = vec![
        rows(1, 64, window(64)),
        rows(1, 64, window(33)),
        rows(1, 64, Keep::All),
        rows(1, 64, window(64)),
    ];
    Geometry::new(layers, KvElements::both(ElementType::F32)).expect("a model")
}

/// Rows that straddle pages and rows that do not, windows of a few rows and of one, another layer's
/// rows.
fn uneven() -> Geometry {
    let layers = vec![
        rows(2, 12, window(100)),
        rows(2, 12, Keep::All),
        rows(1, 64, window(5)),
        LayerCache::Of(Layer(0)),
        rows(2, 12, window(1)),
    ];
    Geometry::new(layers, KvElements::both(ElementType::F32)).expect("a model")
}

/// Windows and nothing else.
fn only_windows() -> Geometry {
    let layers = vec![rows(1, 64, window(40)); 2];
    Geometry::new(layers, KvElements::both(ElementType::F32)).expect("a model")
}

fn benches() -> impl Iterator<Item = Bench> {
    let layouts = ["sparse", "sparse:head-major", "sparse:interleaved=2"];
    layouts.into_iter().flat_map(|policy| {
        [even(), uneven(), only_windows()].map(|geometry| Bench::with(geometry, policy))
    })
}

fn find(bench: &Bench, tokens: &[u32]) -> (usize, Option<Miss>) {
    let (found, held) = bench.cache.find(Namespace::COMMON, tokens);
    assert_eq!(found.tail, None, "only resume points are gone on from");
    (held, found.miss)
}

/// The ends of groups of `held` that can be gone on from.
fn resume_points(bench: &Bench, held: &Held) -> Vec<usize> {
    let groups = held.path.groups().iter().enumerate();
    let tree = bench.cache.tree();
    let points = groups.filter(|(_, id)| tree.resume_point(**id).is_some());
    points.map(|(index, _)| index + 1).collect()
}

#[test]
fn the_next_turn_goes_on_at_the_end_of_the_last() {
    for mut bench in benches() {
        let grain = bench.cache.grain().clone();
        let mut turn = bench.start(&tokens(0, 500));
        bench.compute(&mut turn, 64);
        // The reply.
        turn.tokens.extend(tokens(1, 77));
        bench.compute(&mut turn, 1);
        let mut next = turn.tokens.clone();
        bench.leave(turn);
        next.extend(tokens(2, 60));
        let end = grain.whole_tokens(577 / grain.group_tokens());
        assert_eq!(find(&bench, &next), (end, Some(Miss::Ended)));
        let mut second = bench.start(&next);
        assert_eq!(second.sequence.len(), end);
        bench.compute(&mut second, 5);
        bench.assert_rows(&second);
        bench.leave(second);
    }
}

/// The same tokens leave the same resume points, however they came in.
#[test]
fn resume_points_follow_from_the_tokens_and_not_from_the_steps() {
    for geometry in [even(), uneven(), only_windows()] {
        let mut all: Option<Vec<usize>> = None;
        for chunk in [1, 7, 64, 1000] {
            let mut bench = Bench::with(geometry.clone(), "sparse");
            let mut held = bench.start(&tokens(0, 1100));
            bench.compute(&mut held, chunk);
            let points = resume_points(&bench, &held);
            let grain = bench.cache.grain();
            let (every, end) = (grain.resume_every().get(), 1099 / grain.group_tokens());
            for groups in 1..=held.path.groups().len() {
                let expected = groups.is_multiple_of(every) || groups + 1 == end || groups == end;
                assert_eq!(points.contains(&groups), expected, "{groups} of {end}");
            }
            assert!(points.len() > 2, "{points:?}");
            assert_eq!(*all.get_or_insert_with(|| points.clone()), points);
        }
    }
}

#[test]
fn a_prompt_that_leaves_what_is_kept_says_why_it_starts_earlier_and_the_next_one_does_not() {
    for mut bench in benches() {
        let grain = bench.cache.grain().clone();
        let every = grain.resume_every().get();
        let groups = (6..9usize).find(|groups| !groups.is_multiple_of(every));
        let groups = groups.expect("resume points lie groups apart");
        let shared = groups * grain.group_tokens().get() + 3;
        let first = bench.run(&prompt(shared, 300, 0));
        bench.leave(first);
        let (held, miss) = find(&bench, &prompt(shared, 300, 1));
        let common = grain.whole_tokens(groups);
        assert!(held < common, "no resume point is just there");
        assert_eq!(miss, Some(Miss::Passed));
        let second = bench.run(&prompt(shared, 300, 1));
        bench.assert_rows(&second);
        let (held, miss) = find(&bench, &prompt(shared, 300, 2));
        assert_eq!((held, miss), (common, Some(Miss::Diverged)));
        let third = bench.run(&prompt(shared, 300, 2));
        bench.assert_rows(&third);
        bench.assert_rows(&second);
    }
}

/// Somebody waits for a running sequence's rows: they can be gone on from when they are there.
#[test]
fn the_end_that_another_waits_for_is_a_resume_point() {
    let mut bench = Bench::with(even(), "sparse");
    let group = bench.cache.grain().group_tokens().get();
    let mut donor = bench.start(&prompt(7 * group, 400, 0));
    bench.cache.keep_resumable(&mut donor.path, 7 * group);
    bench.compute(&mut donor, 50);
    assert!(resume_points(&bench, &donor).contains(&7));
    assert_eq!(find(&bench, &prompt(7 * group, 400, 1)).0, 7 * group);
}

#[test]
fn what_is_kept_of_windows_is_what_resume_points_take() {
    let mut bench = Bench::with(even(), "sparse");
    let grain = bench.cache.grain().clone();
    let held = bench.run(&tokens(0, 1100));
    let points = resume_points(&bench, &held);
    let groups = held.path.groups().len();
    bench.leave(held);
    let kept = groups as u64 * grain.group_bytes();
    let windows = bench.owned() - kept;
    assert_eq!(bench.owned(), bench.kv.ledger().pinned.get());
    // The end of the prompt, the group before it, and the end of the tokens share all but a page.
    let most = (points.len() as u64 - 1) * grain.resume_bytes();
    assert!((1..=most).contains(&windows), "{windows} of {most}");
    assert!(
        windows <= kept + 2 * grain.resume_bytes(),
        "{windows} beside {kept}"
    );
}

#[test]
fn windows_are_evicted_before_the_groups_they_end() {
    let mut bench = Bench::with(even(), "sparse");
    let held = bench.run(&tokens(0, 700));
    let (groups, points) = (held.path.groups().len(), resume_points(&bench, &held).len());
    assert!(bench.cache.evict(Instant::now()), "whoever uses the group");
    bench.assert_rows(&held);
    bench.leave(held);
    let windows = bench.cache.tree().resume_points();
    assert!((points - 1..=points).contains(&windows));
    for left in (0..windows).rev() {
        assert!(find(&bench, &tokens(0, 700)).0 > 0);
        assert!(bench.cache.evict(Instant::now()));
        let tree = bench.cache.tree();
        assert_eq!((tree.resume_points(), tree.len()), (left, groups));
    }
    assert_eq!(find(&bench, &tokens(0, 700)), (0, Some(Miss::Passed)));
    let mut again = bench.start(&tokens(0, 700));
    bench.compute(&mut again, 100);
    bench.assert_rows(&again);
    assert_eq!(
        bench.cache.tree().len(),
        groups,
        "the groups were still good"
    );
    bench.leave(again);
    while bench.cache.evict(Instant::now()) {}
    assert!(bench.cache.tree().is_empty());
    assert_eq!(bench.owned(), 0);
}

#[test]
fn a_running_sequence_of_the_cache_holds_its_windows_and_no_more() {
    let mut bench = Bench::with(even(), "sparse");
    let grain = bench.cache.grain().clone();
    let mut held = bench.start(&tokens(0, 300));
    for end in 300..1100 {
        held.tokens = tokens(0, end);
        bench.compute(&mut held, 64);
        let report = held.sequence.report();
        let most = grain.bytes(end) + 8 * bench.kv.page_bytes() as u64;
        assert!(report.committed_bytes as u64 <= most, "at {end}");
    }
    bench.assert_rows(&held);
}

#[derive(Debug, Clone)]
enum Act {
    /// Start with a prompt of `shared` tokens that all have and `own` that few have.
    Start {
        shared: usize,
        own: usize,
        seed: u32,
    },
    /// Compute up to so many more tokens, in steps.
    Compute {
        index: usize,
        more: usize,
        chunk: usize,
    },
    /// A second sequence goes on from where one is.
    Fork {
        index: usize,
        seed: u32,
    },
    Leave {
        index: usize,
    },
    Evict,
}

fn act() -> impl Strategy<Value = Act> {
    let index = 0..4usize;
    prop_oneof![
        3 => (0..300usize, 1..200usize, 0..3u32)
            .prop_map(|(shared, own, seed)| Act::Start { shared, own, seed }),
        4 => (index.clone(), 1..250usize, prop_oneof![Just(1usize), 2..90usize])
            .prop_map(|(index, more, chunk)| Act::Compute { index, more, chunk }),
        1 => (index.clone(), 0..3u32).prop_map(|(index, seed)| Act::Fork { index, seed }),
        2 => index.prop_map(|index| Act::Leave { index }),
        2 => Just(Act::Evict),
    ]
}

fn play(mut bench: Bench, acts: &[Act]) -> Result<(), TestCaseError> {
    // Sequences, and the tokens each is to have.
    let mut held: Vec<(Held, Vec<u32>)> = Vec::new();
    for act in acts {
        match *act {
            Act::Start { shared, own, seed } if held.len() < 4 => {
                let wanted = prompt(shared, own, seed);
                let mut one = bench.start(&wanted);
                one.tokens.truncate(one.sequence.len());
                held.push((one, wanted));
            }
            Act::Compute { index, more, chunk } => {
                if let Some((one, wanted)) = held.get_mut(index) {
                    let have = one.tokens.len();
                    while wanted.len() < (have + more).min(CAPACITY) {
                        wanted.push(wanted.len() as u32 % 7);
                    }
                    one.tokens = wanted[..(have + more).min(wanted.len())].to_vec();
                    bench.compute(one, chunk);
                }
            }
            Act::Fork { index, seed } if held.len() < 4 => {
                let Some((one, _)) = held.get_mut(index) else {
                    continue;
                };
                let sequence = one.sequence.fork().expect("memory");
                let path = bench.cache.fork(&one.path, sequence.len());
                let tokens = one.tokens.clone();
                let wanted = [tokens.clone(), prompt(0, 50, seed)].concat();
                let fork = Held {
                    sequence,
                    path,
                    tokens,
                };
                held.push((fork, wanted));
            }
            Act::Leave { index } if index < held.len() => bench.leave(held.remove(index).0),
            Act::Evict => _ = bench.cache.evict(Instant::now()),
            Act::Start { .. } | Act::Fork { .. } | Act::Leave { .. } => {}
        }
        for (one, _) in &held {
            bench.assert_rows(one);
        }
        let pinned: BTreeSet<_> = bench
            .cache
            .tree()
            .payloads()
            .flat_map(Pins::pages)
            .collect();
        let bytes = pinned.len() as u64 * bench.kv.page_bytes() as u64;
        prop_assert_eq!(bench.kv.ledger().pinned.get(), bytes);
    }
    for (one, _) in held {
        bench.leave(one);
    }
    while bench.cache.evict(Instant::now()) {}
    prop_assert_eq!(bench.owned(), 0);
    Ok(())
}

proptest! {
    // An eighth of the usual: every step compares all rows.
    #![proptest_config(ProptestConfig::with_cases(ProptestConfig::default().cases.div_ceil(8)))]
    #[test]
    fn whatever_is_reused_is_what_would_have_been_computed(
        acts in prop::collection::vec(act(), 1..30),
    ) {
        for geometry in [even(), uneven(), only_windows()] {
            play(Bench::with(geometry, "sparse"), &acts)?;
        }
    }
}
