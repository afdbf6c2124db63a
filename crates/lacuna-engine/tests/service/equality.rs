//! What else is in the batch, in the cache, or short of memory never changes an answer.

use std::num::NonZeroUsize;

use lacuna_engine::{Request, Sampling};

use crate::support::{
    alone, config, contents, endless, finish, greedy, idle, prompt, start, tight, together,
};

fn choices(count: usize) -> NonZeroUsize {
    NonZeroUsize::new(count).expect("more than none")
}

/// Prompts with `shared` tokens in common and a few of their own.
fn family(shared: usize, members: u32) -> Vec<Vec<u32>> {
    let own = |member| prompt(100 + member, 5 + 3 * member as usize);
    (0..members)
        .map(|member| [prompt(7, shared), own(member)].concat())
        .collect()
}

#[test]
fn a_batch_of_different_lengths_gives_what_each_gives_alone() {
    let requests = || (0..5u32).map(|seed| greedy(prompt(seed, 3 + 30 * seed as usize), 12));
    let expected: Vec<_> = requests().map(alone).collect();
    assert_eq!(together(&start(config()), requests().collect()), expected);
}

#[test]
fn sampling_keeps_to_its_seed_in_any_batch() {
    let request = |seed: u64| Request {
        sampling: Sampling {
            seed,
            ..Sampling::default()
        },
        ..greedy(prompt(3, 20), 10)
    };
    let expected: Vec<_> = (0..4).map(|seed| alone(request(seed))).collect();
    let found = together(&start(config()), (0..4).map(request).collect());
    for (found, expected) in found.iter().zip(&expected) {
        assert_eq!(contents(found), contents(expected));
    }
    assert_ne!(expected[0], expected[1], "seeds make a difference");
}

#[test]
fn a_shared_beginning_is_computed_once_and_changes_nothing() {
    let requests = || family(100, 6).into_iter().map(|prompt| greedy(prompt, 8));
    let expected: Vec<_> = requests().map(alone).collect();
    let service = start(config());
    let found = together(&service, requests().collect());
    for (found, expected) in found.iter().zip(&expected) {
        assert_eq!(contents(found), contents(expected));
    }
    let status = service.handle().status();
    assert!(
        found[1..].iter().all(|answer| answer[0].reused >= 96),
        "{found:?}"
    );
    assert!(status.counters.reused_tokens >= 5 * 96);
}

#[test]
fn the_same_prompt_again_comes_from_the_cache_as_far_as_whole_groups_go() {
    for (len, kept) in [(64, 63), (71, 64), (80, 79)] {
        let request = || greedy(prompt(11, len), 6);
        let expected = alone(request());
        let service = start(config());
        for round in 0..2 {
            let stream = service.handle().submit(request()).expect("taken");
            let found = finish(stream).expect("an answer");
            assert_eq!(contents(&found), contents(&expected), "round {round}");
            assert_eq!(found[0].reused, round * kept);
        }
    }
}

#[test]
fn a_conversation_goes_on_from_its_own_answer() {
    let service = start(config());
    let ask = |prompt: Vec<u32>| {
        let stream = service.handle().submit(greedy(prompt, 20)).expect("taken");
        finish(stream).expect("an answer")
    };
    let first = prompt(21, 40);
    let answer = ask(first.clone());
    let second = [first, answer[0].tokens.clone(), prompt(22, 9)].concat();
    let found = ask(second.clone());
    assert_eq!(contents(&found), contents(&alone(greedy(second, 20))));
    assert!(
        found[0].reused >= 48,
        "more than the first prompt: {}",
        found[0].reused
    );
}

#[test]
fn choices_are_what_separate_requests_with_their_seeds_are() {
    let sampling = |seed| Sampling {
        seed,
        ..Sampling::default()
    };
    let request = |seed, count| Request {
        sampling: sampling(seed),
        choices: choices(count),
        ..greedy(prompt(31, 45), 9)
    };
    let expected: Vec<_> = (5..9).flat_map(|seed| alone(request(seed, 1))).collect();
    let found = together(&start(config()), vec![request(5, 4)]);
    assert_eq!(contents(&found[0]), contents(&expected));
}

#[test]
fn choices_do_not_need_the_prefix_cache() {
    let mut config = config();
    config.prefix_cache.enabled = false;
    let request = |count| Request {
        choices: choices(count),
        ..greedy(prompt(32, 45), 1)
    };
    let expected = contents(&alone(request(1)));
    let found = together(&start(config), vec![request(3)]);
    assert_eq!(
        contents(&found[0]),
        [
            expected[0].clone(),
            expected[0].clone(),
            expected[0].clone()
        ]
    );
}

#[test]
fn prompts_in_small_pieces_give_what_whole_prompts_give() {
    let requests = || (0..4u32).map(|seed| greedy(prompt(40 + seed, 50), 8));
    let expected: Vec<_> = requests().map(alone).collect();
    let mut config = config();
    config.max_batched_tokens = 7;
    config.max_running = 5;
    assert_eq!(together(&start(config), requests().collect()), expected);
}

#[test]
fn more_sessions_than_a_step_has_tokens_take_turns() {
    let requests = || (0..6u32).map(|seed| greedy(prompt(50 + seed, 4), 6));
    let expected: Vec<_> = requests().map(alone).collect();
    let mut config = config();
    config.max_batched_tokens = 1;
    config.max_running = 6;
    assert_eq!(together(&start(config), requests().collect()), expected);
}

#[test]
fn preempted_requests_end_as_if_nothing_had_happened() {
    for prefix_cache in [true, false] {
        let requests = || (0..5u32).map(|seed| endless(prompt(60 + seed, 30), 60));
        let expected: Vec<_> = requests().map(alone).collect();
        let service = start(tight(14, prefix_cache));
        let found = together(&service, requests().collect());
        for (found, expected) in found.iter().zip(&expected) {
            assert_eq!(
                contents(found),
                contents(expected),
                "prefix cache: {prefix_cache}"
            );
        }
        let counters = idle(&service).counters;
        assert!(
            counters.preemptions > 0,
            "nothing was preempted: {counters:?}"
        );
        assert_eq!(counters.finished, 5);
    }
}

#[test]
fn preempted_choices_end_as_if_nothing_had_happened() {
    let sampling = Sampling {
        seed: 9,
        ..Sampling::default()
    };
    let request = |seed: u32| Request {
        sampling: sampling.clone(),
        choices: choices(2),
        ..endless(prompt(70 + seed, 30), 50)
    };
    let expected: Vec<_> = (0..3).map(|seed| alone(request(seed))).collect();
    for prefix_cache in [true, false] {
        let service = start(tight(13, prefix_cache));
        let found = together(&service, (0..3).map(request).collect());
        for (found, expected) in found.iter().zip(&expected) {
            assert_eq!(
                contents(found),
                contents(expected),
                "prefix cache: {prefix_cache}"
            );
        }
        assert!(idle(&service).counters.preemptions > 0);
    }
}
