//! Where sequences resume whose layers keep more than rows: windows of them, states, or both. What holds for
//! each of these is here; what is particular to one is in `windows` and `states`.

use std::collections::BTreeSet;
use std::num::NonZeroUsize;
use std::time::Instant;

use lacuna_kv::prefix::{KnownBlocks, Miss, Namespace, Pins};
use lacuna_kv::{Geometry, Keep, LayerCache, RowSpec, ValueRows};
use proptest::prelude::*;

use crate::blocks::listen;
use crate::pages::{self, Bench, CAPACITY, Held, prompt, tokens};
use crate::{states, windows};

pub(crate) fn rows(kv_heads: usize, head_dim: usize, keep: Keep) -> LayerCache {
    LayerCache::Rows(RowSpec {
        kv_heads,
        key_dim: head_dim,
        value_dim: head_dim,
        values: ValueRows::Apart,
        keep,
    })
}

pub(crate) fn window(rows: usize) -> Keep {
    Keep::Window(NonZeroUsize::new(rows).expect("not zero"))
}

fn geometries() -> impl Iterator<Item = Geometry> {
    windows::geometries()
        .into_iter()
        .chain(states::geometries())
}

fn benches() -> impl Iterator<Item = Bench> {
    windows::benches().chain(states::benches())
}

pub(crate) fn find(bench: &Bench, tokens: &[u32]) -> (usize, Option<Miss>) {
    let (found, held) = bench.cache.find(Namespace::COMMON, tokens);
    assert_eq!(found.tail, None, "only resume points are gone on from");
    (held, found.miss)
}

/// The ends of groups of `held` that can be gone on from.
pub(crate) fn resume_points(bench: &Bench, held: &Held) -> Vec<usize> {
    let groups = held.path.groups().iter().enumerate();
    let tree = bench.cache.tree();
    let points = groups.filter(|(_, id)| tree.resume_point(**id).is_some());
    points.map(|(index, _)| index + 1).collect()
}

/// The same tokens leave the same resume points, however they came in.
#[test]
fn resume_points_follow_from_the_tokens_and_not_from_the_steps() {
    for geometry in geometries() {
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

/// Somebody waits for a running sequence: it can be gone on from when it is there.
#[test]
fn the_end_that_another_waits_for_is_a_resume_point() {
    for mut bench in benches() {
        let grain = bench.cache.grain().clone();
        let group = grain.group_tokens().get();
        let mut donor = bench.start(&prompt(7 * group, 400, 0));
        bench.cache.keep_resumable(&mut donor.path, 7 * group);
        bench.compute(&mut donor, 50);
        assert!(resume_points(&bench, &donor).contains(&7));
        let (held, _) = find(&bench, &prompt(7 * group, 400, 1));
        assert_eq!(held, grain.whole_tokens(7));
    }
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
    bench.cache = bench.cache.watched(Namespace::COMMON);
    let mut known = KnownBlocks::default();
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
        listen(&mut known, &mut bench.cache);
        for (one, _) in &held {
            bench.assert_rows(one);
        }
        let kept = bench.cache.tree().payloads().flat_map(Pins::pages);
        let paths = held.iter().flat_map(|(one, _)| one.path.pages());
        let pinned: BTreeSet<_> = kept.chain(paths).collect();
        let bytes = pinned.len() as u64 * bench.kv.page_bytes() as u64;
        prop_assert_eq!(bench.kv.ledger().pinned.get(), bytes);
    }
    for (one, _) in held {
        bench.leave(one);
    }
    while bench.cache.evict(Instant::now()) {}
    listen(&mut known, &mut bench.cache);
    prop_assert_eq!(known.in_order(), []);
    prop_assert_eq!(bench.owned(), 0);
    Ok(())
}

proptest! {
    // An eighth of the usual: every step compares all that is kept.
    #![proptest_config(ProptestConfig::with_cases(ProptestConfig::default().cases.div_ceil(8)))]
    #[test]
    fn whatever_is_reused_is_what_would_have_been_computed(
        acts in prop::collection::vec(act(), 1..30),
    ) {
        for geometry in geometries().chain(pages::geometries()) {
            play(Bench::with(geometry, "sparse"), &acts)?;
        }
    }
}
