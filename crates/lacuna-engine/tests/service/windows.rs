//! The demo model with a window of 48 tokens in every layer: what is given back, reused, forked and
//! preempted never changes an answer.

use std::num::NonZeroUsize;
use std::sync::{Arc, OnceLock};

use lacuna_engine::{Event, Miss, Request, Sampling, Service, ServiceConfig};
use lacuna_files::{Mapping, ModelFiles};
use lacuna_models::Model;

use crate::support::{
    Answer, config, contents, demo_bytes, endless, finish, greedy, idle, leaving, prompt, together,
};

const WINDOW: u32 = 48;

/// The demo model's file with a window, which its family puts into every layer.
pub(crate) fn windowed() -> Arc<Model> {
    static MODEL: OnceLock<Arc<Model>> = OnceLock::new();
    let load = || {
        let mut file = demo_bytes();
        let mut entries = entry("qwen3.attention.sliding_window", 4, &WINDOW.to_le_bytes());
        // Tensors begin at multiples of 32 bytes: what is put before them is one.
        let rest = 32 - (entries.len() + 13) % 32;
        entries.extend(entry(&"x".repeat(rest), 7, &[1]));
        assert_eq!(entries.len() % 32, 0);
        let count = u64::from_le_bytes(file[16..24].try_into().expect("eight bytes"));
        file[16..24].copy_from_slice(&(count + 2).to_le_bytes());
        file.splice(24..24, entries);
        let files = ModelFiles::from_gguf(Mapping::from(file)).expect("a whole file");
        Arc::new(Model::load(files).expect("a model"))
    };
    Arc::clone(MODEL.get_or_init(load))
}

/// A metadata entry of a GGUF file: its key, its type, its value.
fn entry(key: &str, value_type: u32, value: &[u8]) -> Vec<u8> {
    let length = (key.len() as u64).to_le_bytes();
    [&length, key.as_bytes(), &value_type.to_le_bytes(), value].concat()
}

fn start(config: ServiceConfig) -> Service {
    Service::start(windowed(), config).expect("a service")
}

/// What `request` gives when nothing is shared and every row is kept and masked.
fn alone(request: Request) -> Vec<Answer> {
    let mut config = config();
    config.prefix_cache.enabled = false;
    config.engine.kv_policy = "dense".parse().expect("a policy");
    let service = start(config);
    finish(service.handle().submit(request).expect("taken")).expect("an answer")
}

fn ask(service: &Service, request: Request) -> Vec<Answer> {
    finish(service.handle().submit(request).expect("taken")).expect("an answer")
}

#[test]
fn rows_that_were_given_back_are_rows_that_were_masked() {
    let requests = || (0..3u32).map(|seed| endless(prompt(seed, 100 + 70 * seed as usize), 40));
    let service = start(config());
    let found = together(&service, requests().collect());
    for (found, request) in found.iter().zip(requests()) {
        assert_eq!(contents(found), contents(&alone(request)));
    }
    let without = crate::support::alone(endless(prompt(1, 170), 40));
    assert_ne!(
        contents(&found[1]),
        contents(&without),
        "the window is there"
    );
}

#[test]
fn a_conversation_goes_on_from_its_own_answer() {
    let service = start(config());
    let first = prompt(21, 300);
    let answer = ask(&service, endless(first.clone(), 100));
    let second = [first, answer[0].tokens.clone(), prompt(22, 9)].concat();
    let found = ask(&service, endless(second.clone(), 20));
    assert_eq!(contents(&found), contents(&alone(endless(second, 20))));
    assert!(
        found[0].reused >= 384,
        "all but a group: {}",
        found[0].reused
    );
}

#[test]
fn a_request_hears_that_windows_have_passed_what_it_would_go_on_from() {
    let service = start(config());
    let ended = ask(
        &service,
        greedy([prompt(7, 137), prompt(8, 200)].concat(), 1),
    );
    assert_eq!(ended[0].reused, 0);
    let other = |seed| greedy([prompt(7, 137), prompt(seed, 200)].concat(), 6);
    let mut stream = service.handle().submit(other(9)).expect("taken");
    let started = stream.blocking_recv();
    let Some(Event::Started {
        reused_tokens,
        miss,
        ..
    }) = started
    else {
        panic!("{started:?}");
    };
    assert!(reused_tokens < 128, "{reused_tokens}");
    assert_eq!(miss, Some(Miss::Passed));
    let found = finish(stream).expect("an answer");
    assert_eq!(contents(&found), contents(&alone(other(9))));
    // It left a place to go on from where it went its own way.
    let found = ask(&service, other(10));
    assert_eq!(contents(&found), contents(&alone(other(10))));
    assert_eq!(found[0].reused, 128);
}

#[test]
fn choices_fork_off_in_the_middle_of_a_window() {
    let request = |seed, count| Request {
        sampling: Sampling {
            seed,
            ..Sampling::default()
        },
        choices: NonZeroUsize::new(count).expect("more than none"),
        ..endless(prompt(31, 145), 60)
    };
    let expected: Vec<_> = (5..8).flat_map(|seed| alone(request(seed, 1))).collect();
    let found = ask(&start(config()), request(5, 3));
    assert_eq!(contents(&found), contents(&expected));
}

#[test]
fn requests_that_are_short_of_memory_end_as_if_nothing_had_happened() {
    let requests = || (0..5u32).map(|seed| endless(prompt(60 + seed, 70), 160));
    let expected: Vec<_> = requests().map(alone).collect();
    for prefix_cache in [true, false] {
        let mut config = config();
        config.max_running = 8;
        config.max_batched_tokens = 32;
        config.prefix_cache.enabled = prefix_cache;
        let status = start(config.clone()).handle().status();
        // Not one sequence of all its tokens: windows keep half of them.
        let token = status.pages.token.get();
        config.engine.budget = Some(leaving(&status, 170 * token));
        let service = start(config);
        let found = together(&service, requests().collect());
        for (found, expected) in found.iter().zip(&expected) {
            assert_eq!(contents(found), contents(expected), "cache: {prefix_cache}");
        }
        assert_eq!(idle(&service).counters.finished, 5);
    }
}
