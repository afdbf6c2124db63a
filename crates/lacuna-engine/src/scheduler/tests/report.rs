//! The scheduler's figures.

use super::*;
use crate::block_feed::{BlockFeed, BlockWatch};
use crate::status::{GroupRun, GroupState, Phase};

fn runs<const N: usize>(runs: [(GroupState, usize); N]) -> Vec<GroupRun> {
    let run = |(state, groups)| GroupRun { state, groups };
    runs.map(run).to_vec()
}

#[test]
fn blocks_are_told_of_once_when_that_is_asked_for() {
    let feed = Arc::new(BlockFeed::default());
    let config = ServiceConfig {
        blocks: Some(BlockWatch {
            namespace: Namespace::COMMON,
            feed: Arc::clone(&feed),
        }),
        ..ServiceConfig::default()
    };
    let engine = Engine::new(demo_model(), &config.engine).expect("this machine runs it");
    let mut scheduler = Scheduler::new(engine, config).expect("room for it");
    let _stream = enqueue(&mut scheduler, endless(prompt(0, 40), 50));
    scheduler.step();
    scheduler.tell_of_blocks();
    let told = feed.take().stored;
    let tokens: Vec<u32> = told.iter().flat_map(|(_, block)| block.tokens).collect();
    assert_eq!(tokens, prompt(0, 32));
    scheduler.tell_of_blocks();
    assert!(feed.take().stored.is_empty(), "no block is told of twice");
}

#[test]
fn a_session_shows_what_it_does_and_whose_its_pages_are() {
    use GroupState::{Cached, Partial, Shared, Unique};
    let mut scheduler = with_context(2048);
    let _first = enqueue(&mut scheduler, endless(prompt(0, 40), 50));
    scheduler.step();
    let status = scheduler.status();
    let session = &status.sessions[0];
    assert_eq!((session.cached_tokens, session.tokens), (40, 41));
    assert_eq!(session.phase, Phase::Decode);
    assert_eq!(session.groups, runs([(Cached, 2), (Partial, 1)]));
    let begins_alike = [&prompt(0, 32)[..], &prompt(1, 200)].concat();
    let _second = enqueue(&mut scheduler, endless(begins_alike, 50));
    scheduler.step();
    scheduler.running[0].job.stalled = Some(scheduler.system.now());
    let status = scheduler.status();
    let phases: Vec<Phase> = status
        .sessions
        .iter()
        .map(|session| session.phase)
        .collect();
    assert_eq!(phases, [Phase::Stalled, Phase::Prefill]);
    let groups = |index: usize| &status.sessions[index].groups;
    assert_eq!(*groups(0), runs([(Shared, 2), (Partial, 1)]));
    assert_eq!(groups(1)[0], runs([(Shared, 2)])[0]);
    let group_bytes = scheduler.prefix.grain().bytes(16);
    assert_eq!(status.pages.group.get(), group_bytes);
    assert_eq!(status.budget.dense.get(), 2 * 2048 / 16 * group_bytes);
    assert_eq!((status.running, status.cache.unused_groups), (2, 0));
    let mut apart = with_context(2048);
    apart.config.prefix_cache.enabled = false;
    let _third = enqueue(&mut apart, endless(prompt(0, 32), 50));
    apart.step();
    let status = apart.status();
    assert_eq!(status.sessions[0].groups, runs([(Unique, 2)]));
}

#[test]
fn a_prompt_is_being_read_up_to_its_last_token() {
    let mut scheduler = with_context(2048);
    let _stream = enqueue(&mut scheduler, endless(prompt(0, 65), 50));
    for (cached_tokens, phase) in [(64, Phase::Prefill), (65, Phase::Decode)] {
        scheduler.step();
        let session = &scheduler.status().sessions[0];
        assert_eq!(
            (session.cached_tokens, session.phase),
            (cached_tokens, phase)
        );
    }
}

#[test]
fn times_and_totals_are_those_of_what_has_happened() {
    let (mut scheduler, system) = on_a_fake_system();
    assert!(!scheduler.step(), "there is nothing to compute");
    assert!(scheduler.is_idle() && !scheduler.needs_tending());
    let mut stream = enqueue(&mut scheduler, endless(prompt(0, 100), 5));
    assert_eq!(scheduler.waiting_len(), 1);
    system.pass(Duration::from_secs(2));
    while !scheduler.is_idle() {
        system.pass(Duration::from_secs(1));
        assert!(scheduler.step(), "every step computes something");
    }
    let (counters, latencies) = (scheduler.counters, &scheduler.latencies);
    assert_eq!((counters.steps, counters.generated_tokens), (6, 5));
    assert_eq!((counters.prompt_tokens, counters.finished), (100, 1));
    let seconds =
        |histogram: &crate::status::Histogram| (histogram.count(), histogram.sum().as_secs());
    assert_eq!(seconds(&latencies.queue), (1, 3));
    assert_eq!(
        seconds(&latencies.first_token),
        (1, 4),
        "two steps of prompt"
    );
    assert_eq!(seconds(&latencies.inter_token), (4, 4));
    assert_eq!(seconds(&latencies.end_to_end), (1, 8));
    assert!(scheduler.needs_tending(), "the prompt's groups");
    let usage = std::iter::from_fn(|| stream.try_recv()).find_map(|event| match event {
        Event::Finished { usage, .. } => Some(usage),
        _ => None,
    });
    let usage = usage.expect("it has ended");
    assert_eq!(usage.prompt_time.as_secs(), 1, "waiting is no part of it");
    assert_eq!(usage.generation_time.as_secs(), 4);
}

#[test]
fn activations_and_idle_pages_stay_for_a_while_after_the_last_request_and_then_go() {
    let (mut scheduler, system) = on_a_fake_system();
    let held = |scheduler: &Scheduler| scheduler.engine.holds_activations();
    let mut said = Vec::new();
    for _ in 0..2 {
        let stream = enqueue(&mut scheduler, endless(prompt(0, 100), 5));
        while !scheduler.is_idle() {
            system.pass(Scheduler::REST);
            scheduler.step();
            assert!(held(&scheduler), "a request is under way");
        }
        said.push(tokens(stream));
        system.pass(Scheduler::REST / 2);
        scheduler.step();
        assert!(held(&scheduler), "another may follow");
        assert!(scheduler.needs_tending());
        system.pass(Scheduler::REST / 2);
        scheduler.step();
        assert!(!held(&scheduler));
        while scheduler.evict() {}
        let idle = |scheduler: &Scheduler| scheduler.engine.kv_cache().ledger().idle.get();
        assert!(idle(&scheduler) > 0, "the next request takes them");
        assert!(scheduler.needs_tending());
        system.pass(Scheduler::LONG_REST);
        scheduler.step();
        assert_eq!(idle(&scheduler), 0);
        assert!(!scheduler.needs_tending());
    }
    assert_eq!(said[0], said[1]);
}

#[test]
fn a_limit_of_no_tokens_counts_no_token() {
    let mut scheduler = with_context(2048);
    let _stream = enqueue(&mut scheduler, after(prompt(0, 20), 0));
    finish(&mut scheduler, 5);
    assert_eq!(scheduler.counters.generated_tokens, 0);
    assert_eq!(scheduler.latencies.first_token.count(), 0);
    assert_eq!(scheduler.latencies.end_to_end.count(), 1);
}

/// A system on which every look at the clock takes a millisecond.
#[derive(Clone)]
struct Ticking(FakeSystem);

impl System for Ticking {
    fn now(&self) -> Instant {
        self.0.pass(Duration::from_millis(1));
        self.0.now()
    }

    fn memory(&self, lent_bytes: u64) -> Reading {
        self.0.memory(lent_bytes)
    }
}

/// A few tokens take as long as one: what they say is how fast weights are read.
#[test]
fn only_steps_of_many_tokens_beside_those_of_replies_say_how_fast_prompts_are_computed() {
    for (tokens, expected) in [
        (2, false),
        (Scheduler::PROMPT_STEP as u32, false),
        (Scheduler::PROMPT_STEP as u32 + 1, true),
        (60, true),
    ] {
        let mut scheduler = with_context(512);
        scheduler.system = Box::new(Ticking(FakeSystem::new()));
        let stream = enqueue(&mut scheduler, after(prompt(0, tokens), 3));
        finish(&mut scheduler, 10);
        let rate = scheduler.prompt_rate.per_second();
        assert_eq!(rate.is_some(), expected, "{tokens}");
        drop(stream);
    }
}
