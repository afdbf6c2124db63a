//! Pages: shared once, never copied for coming and going, back when a request is gone.

use std::time::Duration;

use lacuna_engine::{GroupState, Refusal, Request, Service, Status};

use crate::support::{
    config, endless, eventually, finish, greedy, idle, owned, prompt, start, tight,
};

/// Waits until nothing runs, and returns the bytes that are then held beyond the cache's groups.
fn leftover(service: &Service) -> u64 {
    let status = idle(service);
    owned(&status) - status.cache.groups as u64 * status.pages.group.get()
}

#[test]
fn sessions_that_begin_alike_hold_one_copy_and_their_own_ends() {
    let mut config = config();
    config.max_running = 64;
    let service = start(config);
    let shared = prompt(7, 128);
    let streams: Vec<_> = (0..64u32)
        .map(|member| {
            let prompt = [shared.clone(), prompt(100 + member, 5)].concat();
            service
                .handle()
                .submit(endless(prompt, 150))
                .expect("taken")
        })
        .collect();
    let all = |status: &Status| {
        status.sessions.len() == 64
            && status
                .sessions
                .iter()
                .all(|session| session.cached_tokens > 133)
    };
    let status = eventually(&service, all);
    let pages = status.pages;
    let prefix = 128 / pages.group_tokens as u64 * pages.group.get();
    // The figures of sessions may be a moment older than the ledger.
    let ends = status
        .sessions
        .iter()
        .map(|session| session.cached_tokens - 128 + pages.group_tokens);
    let most: u64 = ends
        .map(|tokens| tokens as u64 * pages.token.get() + pages.group.get())
        .sum();
    let held = owned(&status);
    assert!(
        held <= prefix + most,
        "{held} bytes held, {prefix} shared, {most} at most besides"
    );
    assert!(held >= prefix + 64 * 5 * pages.token.get());
    for session in &status.sessions {
        assert_eq!(session.groups[0].state, GroupState::Shared, "{session:?}");
        assert!(session.groups[0].groups >= 128 / pages.group_tokens);
    }
    drop(streams);
    assert_eq!(leftover(&service), 0);
}

#[test]
fn joining_and_leaving_copy_nothing() {
    let service = start(config());
    let shared = prompt(7, 96);
    let long = service
        .handle()
        .submit(endless([&shared[..], &prompt(8, 10)].concat(), 900))
        .expect("taken");
    eventually(&service, |status| status.counters.generated_tokens > 0);
    let before = service.handle().status().ledger.counts.copies_on_write;
    for member in 0..8u32 {
        let prompt = [&shared[..], &prompt(200 + member, 6)].concat();
        let stream = service.handle().submit(greedy(prompt, 5)).expect("taken");
        let found = finish(stream).expect("an answer");
        assert_eq!(found[0].reused, 96);
    }
    assert_eq!(
        service.handle().status().ledger.counts.copies_on_write,
        before
    );
    drop(long);
    assert_eq!(leftover(&service), 0);
}

#[test]
fn a_cancelled_request_is_gone_within_a_step() {
    let mut config = config();
    config.prefix_cache.enabled = false;
    let service = start(config);
    let stream = service
        .handle()
        .submit(endless(prompt(1, 100), 900))
        .expect("taken");
    // The ledger of a status may be older than the first token. It does not miss the request, which
    // waits when nobody reads what it has written.
    eventually(&service, |status| owned(status) > 0);
    drop(stream);
    let steps = service.handle().status().counters.steps;
    let status = eventually(&service, |status| owned(status) == 0 && status.running == 0);
    assert_eq!(status.counters.cancelled, 1);
    let after = status.counters.steps;
    assert!(
        after <= steps + 1,
        "one step was under way: {steps} to {after}"
    );
}

/// Requests of all kinds, some cancelled at once or later; returns how many were refused for size.
fn storm(service: &Service) -> u64 {
    let mut state = 12_345u64;
    let mut random = |below: usize| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    let (mut open, mut refused) = (Vec::new(), 0);
    for _ in 0..120 {
        let own = prompt(random(1000) as u32, 1 + random(40));
        let request = Request {
            choices: (1 + random(3)).try_into().expect("at least one"),
            pin_prefix: (random(8) == 0).then_some(Duration::from_secs(600)),
            ..greedy([prompt(7, 16 * random(5)), own].concat(), 1 + random(12))
        };
        match service.handle().submit(request) {
            Ok(stream) => open.push(stream),
            Err(Refusal::TooLarge { .. }) => refused += 1,
            Err(other) => panic!("{other}"),
        }
        if random(2) == 0 && !open.is_empty() {
            drop(open.swap_remove(random(open.len())));
        }
        if random(4) == 0 && !open.is_empty() {
            finish(open.swap_remove(random(open.len()))).expect("an answer");
        }
    }
    for stream in open {
        finish(stream).expect("an answer");
    }
    refused
}

#[test]
fn requests_that_come_and_go_at_random_leave_nothing_behind() {
    let mut config = config();
    (config.max_running, config.max_waiting) = (6, 1000);
    let service = start(config);
    assert_eq!(storm(&service), 0);
    assert_eq!(leftover(&service), 0);
    assert_eq!(idle(&service).counters.failed, 0);
}

#[test]
fn they_leave_nothing_behind_when_few_of_them_fit() {
    let mut config = tight(8, true);
    config.max_waiting = 1000;
    let service = start(config);
    assert!(storm(&service) > 0);
    assert_eq!(leftover(&service), 0);
    let counters = idle(&service).counters;
    assert_eq!(counters.failed, 0);
    assert!(counters.evicted_groups > 0, "{counters:?}");
}

#[test]
fn unused_groups_go_after_their_time() {
    let mut config = config();
    config.prefix_cache.time_to_live = Some(Duration::from_millis(300));
    let service = start(config);
    finish(
        service
            .handle()
            .submit(greedy(prompt(1, 100), 2))
            .expect("taken"),
    )
    .expect("an answer");
    eventually(&service, |status| {
        status.counters.expired_groups > 0 && owned(status) == 0
    });
}

#[test]
fn pinned_groups_outlive_others() {
    let service = {
        let mut config = config();
        config.prefix_cache.time_to_live = Some(Duration::from_millis(300));
        start(config)
    };
    let pinned = Request {
        pin_prefix: Some(Duration::from_secs(600)),
        ..greedy(prompt(1, 100), 2)
    };
    finish(service.handle().submit(pinned).expect("taken")).expect("an answer");
    finish(
        service
            .handle()
            .submit(greedy(prompt(2, 100), 2))
            .expect("taken"),
    )
    .expect("an answer");
    let status = eventually(&service, |status| status.counters.expired_groups >= 6);
    assert_eq!(
        (status.cache.groups, status.cache.pinned_groups),
        (6, 6),
        "96 of 100 tokens"
    );
}
