//! Layers that keep a state: what is resumed, forked, preempted and held in other ways never changes an
//! answer.

use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;

use lacuna_engine::{Event, Miss, Request, Sampling, Service, ServiceConfig};
use lacuna_files::ModelFiles;
use lacuna_models::Model;

use crate::support::{Answer, config, contents, finish, greedy, idle, leaving, together};

/// The token that ends a message of the model's.
const END: u32 = 2;

/// Tiny models: attention in one layer of four and gated delta nets in the others; attention and Mamba-2 side by
/// side; layers with either, and such that keep nothing.
pub(crate) fn models() -> [Arc<Model>; 3] {
    ["qwen3.5", "falcon-h1", "nemotron-h-moe"].map(load)
}

fn load(name: &str) -> Arc<Model> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../reference/families");
    let files = ModelFiles::open(&folder.join(name).join("model.gguf"));
    Arc::new(Model::load(files.expect("a committed fixture")).expect("a model"))
}

fn settings() -> ServiceConfig {
    let mut config: ServiceConfig = config();
    config.engine.context_tokens = Some(512);
    config
}

fn start(model: &Arc<Model>, config: ServiceConfig) -> Service {
    Service::start(Arc::clone(model), config).expect("a service")
}

fn ask(service: &Service, request: Request) -> Vec<Answer> {
    finish(service.handle().submit(request).expect("taken")).expect("an answer")
}

/// What `request` gives when nothing is shared, resumed or forked.
fn alone(model: &Arc<Model>, request: Request) -> Vec<Answer> {
    let mut config = settings();
    config.prefix_cache.enabled = false;
    config.engine.kv_policy = "dense".parse().expect("a policy");
    ask(&start(model, config), request)
}

/// Letters of the model's small vocabulary: `shared` that all prompts begin with, then `own`.
fn prompt(seed: u32, shared: u32, own: u32) -> Vec<u32> {
    let letter = |index: u32| 4 + index.wrapping_mul(0x9e37_79b9).rotate_left(index % 31) % 56;
    let own = (0..own).map(|index| letter(1000 * (seed + 1) + index));
    (0..shared).map(letter).chain(own).collect()
}

#[test]
fn requests_that_begin_alike_start_from_a_checkpoint_and_answer_as_alone() {
    for model in &models() {
        let service = start(model, settings());
        let group = service.handle().status().pages.group_tokens;
        // A first message that all have, and one of each one's own.
        let first = [prompt(0, 300, 0), vec![END]].concat();
        let request = |seed: u32| {
            let own = prompt(seed, 0, 20 + 17 * seed);
            greedy([first.clone(), own, vec![END, 5, 6]].concat(), 30)
        };
        assert_eq!(ask(&service, request(0))[0].reused, 0);
        let found = together(&service, (1..5).map(request).collect());
        for (found, seed) in found.iter().zip(1..) {
            assert_eq!(found[0].reused, 301 / group * group);
            assert_eq!(contents(found), contents(&alone(model, request(seed))));
        }
        let status = idle(&service);
        assert!(status.cache.resume_points > 0 && status.pages.states.get() > 0);
    }
}

#[test]
fn a_conversation_goes_on_from_its_own_answer() {
    for model in &models() {
        let service = start(model, settings());
        let group = service.handle().status().pages.group_tokens;
        let first = prompt(3, 0, 150);
        let answer = ask(&service, greedy(first.clone(), 120));
        let length = first.len() + answer[0].tokens.len();
        let second = [first, answer[0].tokens.clone(), prompt(4, 0, 9)].concat();
        let found = ask(&service, greedy(second.clone(), 20));
        assert_eq!(
            contents(&found),
            contents(&alone(model, greedy(second, 20)))
        );
        assert!(found[0].reused + 2 * group >= length, "{}", found[0].reused);
    }
}

#[test]
fn a_request_hears_that_there_is_no_state_where_it_would_go_on() {
    let model = &load("qwen3.5");
    let mut config = settings();
    config.max_batched_tokens = 64;
    let service = start(model, config);
    let group = service.handle().status().pages.group_tokens as u32;
    let other = |seed| greedy(prompt(seed, 2 * group + 9, 150), 6);
    ask(&service, greedy(prompt(7, 2 * group + 9, 200), 1));
    // States of a group's length are as long as its rows here, so every group could be gone on from.
    let mut stream = service.handle().submit(other(8)).expect("taken");
    let started = stream.blocking_recv();
    let Some(Event::Started {
        reused_tokens,
        miss,
        ..
    }) = started
    else {
        panic!("{started:?}");
    };
    let common = 2 * group as usize;
    let passed = reused_tokens < common;
    assert_eq!(
        miss == Some(Miss::Passed),
        passed,
        "{miss:?} at {reused_tokens}"
    );
    let found = finish(stream).expect("an answer");
    assert_eq!(contents(&found), contents(&alone(model, other(8))));
    let found = ask(&service, other(9));
    assert_eq!(contents(&found), contents(&alone(model, other(9))));
    assert_eq!(
        found[0].reused, common,
        "the one before left a resume point"
    );
}

#[test]
fn choices_fork_off_the_prompt_with_its_state() {
    for model in &models() {
        let request = |seed, count| Request {
            sampling: Sampling {
                seed,
                ..Sampling::default()
            },
            choices: NonZeroUsize::new(count).expect("more than none"),
            ..greedy(prompt(31, 0, 145), 40)
        };
        let expected: Vec<_> = (5..8)
            .flat_map(|seed| alone(model, request(seed, 1)))
            .collect();
        for prefix_cache in [true, false] {
            let mut config = settings();
            config.prefix_cache.enabled = prefix_cache;
            let found = ask(&start(model, config), request(5, 3));
            assert_eq!(
                contents(&found),
                contents(&expected),
                "cache: {prefix_cache}"
            );
        }
    }
}

#[test]
fn requests_that_are_short_of_memory_end_as_if_nothing_had_happened() {
    for model in &models() {
        let requests = || (0..5u32).map(|seed| greedy(prompt(60 + seed, 0, 70), 160));
        let expected: Vec<_> = requests().map(|request| alone(model, request)).collect();
        for prefix_cache in [true, false] {
            let mut config = settings();
            config.max_running = 8;
            config.max_batched_tokens = 32;
            config.prefix_cache.enabled = prefix_cache;
            let status = start(model, config.clone()).handle().status();
            // One of them and a bit.
            let pages = status.pages;
            let one =
                4 * pages.group.get() + 2 * pages.states.get().next_multiple_of(pages.page.get());
            config.engine.budget = Some(leaving(&status, one));
            let service = start(model, config);
            let found = together(&service, requests().collect());
            for (found, expected) in found.iter().zip(&expected) {
                assert_eq!(contents(found), contents(expected), "cache: {prefix_cache}");
            }
            assert_eq!(idle(&service).counters.finished, 5);
        }
    }
}

#[test]
fn every_way_to_hold_rows_answers_alike_beside_states() {
    for model in &models() {
        let requests = || (0..3u32).map(|seed| greedy(prompt(seed, 200, 3 + 40 * seed), 30));
        let answers = |policy: &str| {
            let mut config = settings();
            config.engine.kv_policy = policy.parse().expect("a policy");
            config.prefix_cache.enabled = policy.starts_with("sparse");
            let found = together(&start(model, config), requests().collect());
            let found = found.iter().map(|answers| contents(answers));
            found.collect::<Vec<_>>()
        };
        let expected = answers("dense");
        for policy in ["sparse", "sparse:head-major", "grow:mlx", "paged:16"] {
            assert!(answers(policy) == expected, "{policy}");
        }
    }
}
