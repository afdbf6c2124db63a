//! What a service that nobody asks for anything gives back, by the kernel's account. Alone in its process, because
//! all of a process's memory counts.
#![cfg(target_os = "linux")]

#[path = "service/support.rs"]
#[expect(dead_code, reason = "the other tests use the rest")]
mod support;

use std::thread;
use std::time::{Duration, Instant};

use lacuna_pages::ProcessMemory;
use support::{config, finish, greedy, prompt, start};

/// Bytes that no file stands behind.
fn anonymous() -> u64 {
    let read = ProcessMemory::read().expect("a process of Linux");
    read.anonymous.get()
}

#[test]
fn a_service_without_requests_gives_the_memory_of_activations_back() {
    let mut config = config();
    config.max_batched_tokens = 512;
    let service = start(config);
    let activations = service.handle().status().budget.plan.parts.activation_bytes;
    let ask = |seed| {
        let stream = service.handle().submit(greedy(prompt(seed, 600), 8));
        finish(stream.expect("taken")).expect("an answer")
    };
    // Whatever else the first request allocates is there by then.
    let expected = ask(0);
    for round in 1..4 {
        // A prompt that the prefix cache has nothing of, so that all of the arena is used.
        ask(round);
        let busy = anonymous();
        let least = busy.saturating_sub(activations / 2);
        let patience = Instant::now() + Duration::from_secs(60);
        while anonymous() > least {
            assert!(
                Instant::now() < patience,
                "{} bytes stay of {busy}, {activations} of them for activations",
                anonymous()
            );
            thread::sleep(Duration::from_millis(20));
        }
        assert_eq!(ask(0)[0].tokens, expected[0].tokens);
    }
}
