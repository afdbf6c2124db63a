//! Sequences of layers with states start at resume points, with the states they would have computed, and
//! leave nothing behind that nothing can start from.

use std::time::Instant;

use lacuna_kernels::ElementType;
use lacuna_kv::prefix::Miss;
use lacuna_kv::{Geometry, Keep, KvElements, LayerCache};

use crate::pages::{Bench, Held, tokens};
use crate::resume::{find, resume_points, rows, window};

/// The token that ends a message.
const END: u32 = 9_999;

fn geometry(layers: Vec<LayerCache>, states: Vec<usize>) -> Geometry {
    let geometry = Geometry::new(layers, KvElements::both(ElementType::F32));
    let geometry = geometry.expect("layers");
    geometry.with_states(states).expect("states")
}

/// Rows of 256 bytes, 16 a page, and states of two pages and a bit.
fn even() -> Geometry {
    let layers = vec![LayerCache::None, rows(1, 64, Keep::All), LayerCache::None];
    geometry(layers, vec![1500, 0, 700])
}

/// Rows that straddle pages, in a layer that keeps a state too.
fn uneven() -> Geometry {
    let layers = vec![rows(2, 12, Keep::All), LayerCache::None];
    geometry(layers, vec![40, 6000])
}

/// Windows, wide and narrow, beside states.
fn windows() -> Geometry {
    let layers = vec![
        rows(2, 12, window(100)),
        rows(1, 64, Keep::All),
        LayerCache::None,
        rows(1, 64, window(5)),
    ];
    geometry(layers, vec![0, 40, 1100, 0])
}

/// States and nothing else.
fn alone() -> Geometry {
    geometry(vec![LayerCache::None; 2], vec![1100, 40])
}

fn bench(geometry: Geometry) -> Bench {
    let mut bench = Bench::with(geometry, "sparse");
    bench.cache = bench.cache.with_message_ends(vec![END]);
    bench
}

pub(crate) fn geometries() -> [Geometry; 4] {
    [even(), uneven(), windows(), alone()]
}

pub(crate) fn benches() -> impl Iterator<Item = Bench> {
    geometries().into_iter().map(bench)
}

/// Those, and rows and states in memory of two kinds, which no folder takes.
fn every_bench() -> impl Iterator<Item = Bench> {
    let layers = vec![
        rows(1, 64, Keep::All),
        LayerCache::None,
        rows(2, 12, Keep::All),
    ];
    let split = geometry(layers, vec![1500, 40, 6000]).with_host_layers(2);
    benches().chain([bench(split.expect("rows of their own"))])
}

/// A prompt of messages of these lengths, each ended, and the words with which an answer begins.
fn messages(lengths: &[usize]) -> Vec<u32> {
    let message = |(seed, &length): (usize, &usize)| {
        let mut message = tokens(seed as u32, length - 1);
        message.push(END);
        message
    };
    let mut prompt: Vec<u32> = lengths.iter().enumerate().flat_map(message).collect();
    prompt.extend([501, 502, 503]);
    prompt
}

#[test]
fn the_next_turn_goes_on_close_to_the_end_of_the_last() {
    for mut bench in every_bench() {
        let group = bench.cache.grain().group_tokens().get();
        let mut turn = bench.start(&tokens(0, 500));
        bench.compute(&mut turn, 64);
        turn.tokens.extend(tokens(1, 277));
        bench.compute(&mut turn, 1);
        let mut next = turn.tokens.clone();
        bench.leave(turn);
        next.extend(tokens(2, 60));
        let (held, miss) = find(&bench, &next);
        assert!(held + 64 + group > 777, "{held} of 777");
        assert!(matches!(miss, Some(Miss::Passed | Miss::Ended)), "{miss:?}");
        let mut second = bench.start(&next);
        assert_eq!(second.sequence.len(), held);
        bench.compute(&mut second, 5);
        bench.assert_rows(&second);
        bench.leave(second);
    }
}

#[test]
fn the_first_message_and_the_last_end_in_resume_points() {
    for mut bench in every_bench() {
        let group = bench.cache.grain().group_tokens().get();
        // Longer than a group, as ends within one are one.
        let lengths = [5 * group + 3, 3 * group + 5, 2 * group + 1, 4 * group];
        let first = messages(&lengths);
        let mut held = bench.start(&first);
        bench.compute(&mut held, 50);
        let points = resume_points(&bench, &held);
        let last = lengths.iter().sum::<usize>() / group;
        assert!(points.contains(&5), "{points:?}");
        assert!(points.contains(&last), "{points:?}");
        bench.leave(held);
        // The next turn leaves the answer's first words out.
        let (kept, _) = find(&bench, &[&first[..first.len() - 3], &[600; 300]].concat());
        assert_eq!(kept, bench.cache.grain().whole_tokens(last));
        // Another conversation has the first message alone in common.
        let (kept, _) = find(&bench, &[&first[..lengths[0]], &[700; 300]].concat());
        assert_eq!(kept, bench.cache.grain().whole_tokens(5));
    }
}

/// A message that ends just with a group has a resume point there and not a group before.
#[test]
fn a_message_may_end_with_a_group() {
    for mut bench in every_bench() {
        let group = bench.cache.grain().group_tokens().get();
        let prompt = messages(&[5 * group, 4 * group]);
        let mut held = bench.start(&prompt);
        bench.compute(&mut held, 50);
        let points = resume_points(&bench, &held);
        assert!(points.contains(&5) && points.contains(&9), "{points:?}");
    }
}

/// Only what is generated is followed by a resume point.
#[test]
fn in_the_middle_of_a_prompt_there_are_resume_points_where_they_are_due_and_nowhere_else() {
    for mut bench in every_bench() {
        let every = bench.cache.grain().resume_every().get();
        let prompt = tokens(0, 1100);
        let mut held = bench.start(&prompt);
        for end in 1..700 {
            held.tokens = prompt[..end].to_vec();
            bench.compute(&mut held, 1);
        }
        let points = resume_points(&bench, &held);
        assert!(
            points.iter().all(|at| at.is_multiple_of(every)),
            "{points:?}"
        );
    }
}

/// The resume point that a request went on from is used then, however old it is.
#[test]
fn a_beginning_that_is_gone_on_from_outlives_an_end_that_is_not() {
    let mut bench = bench(even());
    let group = bench.cache.grain().group_tokens().get();
    let common = 5 * group;
    let start = |seed| [messages(&[common]), tokens(seed, 150)].concat();
    let first = bench.run(&start(1));
    bench.leave(first);
    for seed in 2..6 {
        let next = bench.run(&start(seed));
        bench.leave(next);
        // What is left of the one before goes, and the beginning stays.
        while bench.cache.tree().resume_points() > 3 {
            assert!(bench.cache.evict(Instant::now()));
        }
        let (held, _) = find(&bench, &start(100));
        assert_eq!(held, common, "after {seed}");
    }
}

/// While a sequence generates one resume point follows it, and one only.
#[test]
fn a_sequence_that_generates_holds_one_more_state() {
    for mut bench in every_bench() {
        let group = bench.cache.grain().group_tokens().get();
        let mut held = bench.start(&tokens(0, 3 * group + 5));
        bench.compute(&mut held, 64);
        let every = bench.cache.grain().resume_every().get();
        for end in 3 * group + 6..900 {
            held.tokens = [tokens(0, 3 * group + 5), tokens(3, end - 3 * group - 5)].concat();
            bench.compute(&mut held, 1);
            let points = resume_points(&bench, &held);
            let moving = points
                .iter()
                .filter(|&&at| at > 3 && !at.is_multiple_of(every));
            assert!(moving.count() <= 1, "{points:?} at {end}");
            let last = points.last().copied().unwrap_or(0);
            assert!(end < last * group + 64 + 2 * group, "{points:?} at {end}");
        }
        bench.assert_rows(&held);
    }
}

/// Checkpoints go first, by themselves; rows with the last that led to them, and none stay behind.
#[test]
fn what_is_evicted_are_resume_points_and_the_rows_that_only_they_led_to() {
    for mut bench in every_bench() {
        let grain = bench.cache.grain().clone();
        let mut held = bench.start(&tokens(0, 1100));
        bench.compute(&mut held, 100);
        let (groups, points) = (held.path.groups().len(), resume_points(&bench, &held));
        bench.leave(held);
        let last = *points.last().expect("the end of the prompt");
        assert_eq!(bench.cache.tree().len(), last, "{groups} were filled");
        let mut left: Vec<usize> = points;
        while !left.is_empty() {
            let end = grain.whole_tokens(*left.last().expect("not empty"));
            assert_eq!(find(&bench, &tokens(0, 1100)).0, end);
            let before = bench.owned();
            assert!(bench.cache.evict(Instant::now()));
            // All were gone on from at one time, so the first of them goes first.
            left.remove(0);
            assert!(
                before - bench.owned() >= grain.state_bytes(),
                "memory is free"
            );
            let tree = bench.cache.tree();
            assert_eq!(tree.resume_points(), left.len());
            assert_eq!(tree.len(), left.last().copied().unwrap_or(0));
        }
        assert_eq!(find(&bench, &tokens(0, 1100)), (0, Some(Miss::Evicted)));
        assert!(!bench.cache.evict(Instant::now()));
        assert_eq!(bench.owned(), 0);
    }
}

/// Rows behind the last resume point end with their sequence.
#[test]
fn a_sequence_leaves_nothing_that_nothing_starts_from() {
    for mut bench in every_bench() {
        let group = bench.cache.grain().group_tokens().get();
        let mut held = bench.start(&tokens(0, 20 * group));
        held.tokens.truncate(6 * group);
        bench.compute(&mut held, 3 * group);
        assert_eq!(held.path.groups().len(), 6);
        let points = resume_points(&bench, &held);
        bench.leave(held);
        assert_eq!(
            bench.cache.tree().len(),
            points.last().copied().unwrap_or(0)
        );
    }
}

/// A resume point costs its bytes once, however many start from it.
#[test]
fn sequences_share_a_state_until_they_go_on() {
    for mut bench in every_bench() {
        let grain = bench.cache.grain().clone();
        let first = bench.run(&tokens(0, 600));
        bench.leave(first);
        let before = bench.owned();
        let prompts: Vec<_> = (1..4)
            .map(|seed| [tokens(0, 600), tokens(seed, 100)].concat())
            .collect();
        let mut held: Vec<Held> = prompts.iter().map(|prompt| bench.start(prompt)).collect();
        assert!(held.iter().all(|held| held.sequence.len() > 500));
        assert_eq!(bench.owned(), before, "no memory to start");
        let each = bench.kv.geometry().state_bytes();
        assert!(
            held.iter()
                .all(|held| held.sequence.state_bytes_to_take() == each)
        );
        for one in &mut held {
            bench.compute(one, 13);
            bench.assert_rows(one);
        }
        assert!(bench.owned() >= before + 3 * grain.state_bytes());
    }
}
