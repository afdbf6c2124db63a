//! What holds after every step.

use std::collections::{BTreeMap, BTreeSet};

use lacuna_kv::prefix::Pins;
use lacuna_pages::Pool;

use crate::scheduler::Scheduler;
use crate::speculation::{Draft, Drafter, Look};

/// Checks the scheduler's invariants and the pool's, and that both agree about who holds what.
///
/// # Panics
/// When one does not hold.
pub(super) fn check(scheduler: &Scheduler, pool: &Pool) {
    check_but_pins(scheduler, pool);
    let ledger = pool.ledger();
    let running = scheduler.running.iter();
    let paths = running.flat_map(|running| &running.sessions);
    let standing = paths.flat_map(|session| session.path.pages());
    for away in scheduler.away() {
        // They once stayed until the last page was written, for a request that comes back without them.
        let points = away.path.pages().count();
        assert_eq!(
            points, 0,
            "what is on its way to the swap file has no resume points"
        );
    }
    let kept = scheduler.prefix.tree().payloads().flat_map(Pins::pages);
    let pinned: BTreeSet<_> = kept.chain(standing).collect();
    assert_eq!(
        ledger.pinned.get(),
        pinned.len() as u64 * scheduler.engine.kv_cache().page_bytes() as u64,
        "pinned pages are those of the cache's groups and resume points"
    );
}

/// The same, while pages may be on their way to a folder or from it.
pub(super) fn check_but_pins(scheduler: &Scheduler, pool: &Pool) {
    order(scheduler);
    let users = users(scheduler);
    let tree = scheduler.prefix.tree();
    for (id, users) in &users {
        let kept = tree.get(*id).map(|(_, users)| users);
        assert_eq!(kept, Some(*users), "S3: a group's users");
    }
    assert_eq!(tree.unused(), tree.len() - users.len(), "S3: unused groups");
    let running = scheduler.running.iter();
    let sequences = running.flat_map(|running| &running.sessions);
    let looks: Vec<_> = scheduler.away().map(|away| away.image.look()).collect();
    let away = looks.iter().filter_map(|look| look.sequence());
    let away = away.flat_map(|sequence| sequence.buffers());
    let buffers = sequences.flat_map(|session| session.sequence.buffers());
    let drafter = scheduler.drafter.iter();
    let drafts: Vec<_> = drafter.flat_map(Drafter::drafts).collect();
    let looks: Vec<_> = drafts.iter().map(Draft::look).collect();
    let drafted = looks.iter().filter_map(Look::sequence);
    let drafted = drafted.flat_map(|sequence| sequence.buffers());
    if let Err(broken) = pool.verify(buffers.chain(away).chain(drafted)) {
        panic!("{broken}");
    }
}

/// S1 and S2, and places.
fn order(scheduler: &Scheduler) {
    let waiting = scheduler.waiting.iter().map(|waiting| waiting.job.rank());
    assert!(waiting.is_sorted(), "S1: requests wait in order");
    let running = scheduler.running.iter().map(|running| running.job.rank());
    assert!(running.is_sorted(), "S2: requests run in order");
    assert!(scheduler.places_taken() <= scheduler.config.max_running);
    for waiting in &scheduler.waiting {
        let leader = waiting.choices.front().expect("a choice that waits");
        assert!(leader.tokens.len() >= waiting.job.prompt_tokens);
    }
    for running in &scheduler.running {
        assert!(!running.sessions.is_empty(), "a request that runs");
        for session in &running.sessions {
            assert!(session.pending() > 0, "there is a next token to compute");
            assert_eq!(session.scheduled, 0, "the step is over");
            assert!(session.sampled.is_empty(), "and handed out");
            assert!(session.guesses().is_empty(), "nothing is guessed any more");
        }
    }
}

/// How many sessions use each group of the prefix cache.
fn users(scheduler: &Scheduler) -> BTreeMap<lacuna_kv::prefix::GroupId, usize> {
    let group = scheduler.prefix.grain().group_tokens().get();
    let mut users = BTreeMap::new();
    for running in &scheduler.running {
        for session in &running.sessions {
            let groups = session.path.groups();
            assert!(groups.len() * group <= session.sequence.len(), "S3");
            for &id in groups {
                *users.entry(id).or_insert(0) += 1;
            }
        }
    }
    for away in scheduler.away() {
        for &id in away.path.groups() {
            *users.entry(id).or_insert(0) += 1;
        }
    }
    users
}
