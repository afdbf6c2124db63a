//! Preempted requests and the swap file, a step at a time: when pages are moved, when they are waited for, and when
//! what they hold is computed again.

use super::*;
use crate::scheduler::simulation::swap::{Disk, Trouble, over};
use crate::scheduler::swapping::{Away, Rates, Urgency};
use lacuna_kv::prefix::Moving;
use lacuna_kv::swap::Phase;

/// Pages of a file that is large enough for all that there is.
const PAGES: u32 = 1000;
/// Of an answer: more than the steps of a test.
const TOKENS: usize = 100;

/// A scheduler with memory for `groups` groups and a swap file that is worth its time.
pub(super) fn swapping(groups: u64) -> (Scheduler, FakeSystem, Disk) {
    let (mut scheduler, system, disk) = (with_groups(groups), FakeSystem::new(), Disk::default());
    scheduler.system = Box::new(system.clone());
    scheduler.swap = Some(over(disk.clone(), PAGES, scheduler.engine.kv_cache()));
    assume_slow_prompts(&mut scheduler);
    (scheduler, system, disk)
}

/// A token a second, whatever was seen: on a clock that stands still prompts take no time.
pub(super) fn assume_slow_prompts(scheduler: &mut Scheduler) {
    scheduler.prompt_rate = Rate::over(1.0);
    scheduler.prompt_rate.observe(1.0, Duration::from_secs(1));
}

/// Two requests that run, of some groups each, and their streams.
pub(super) fn two_running(scheduler: &mut Scheduler) -> [Stream; 2] {
    let group = scheduler.prefix.grain().group_tokens().get() as u32;
    let streams = [0, 1].map(|seed| enqueue(scheduler, endless(prompt(seed, 4 * group), TOKENS)));
    (0..20).for_each(|_| assert!(scheduler.step()));
    assert_eq!(scheduler.running.len(), 2);
    assume_slow_prompts(scheduler);
    streams
}

pub(super) fn away(scheduler: &Scheduler) -> usize {
    scheduler.away().count()
}

/// Moves pieces until nothing moves any more, and lets the scheduler see it.
fn move_all(scheduler: &mut Scheduler) {
    while scheduler.swap.as_ref().is_some_and(Swap::advance) {}
    scheduler.follow_swaps();
}

fn alone(seed: u32) -> Vec<u32> {
    let mut scheduler = with_groups(100);
    let group = scheduler.prefix.grain().group_tokens().get() as u32;
    let stream = enqueue(&mut scheduler, endless(prompt(seed, 4 * group), TOKENS));
    finish(&mut scheduler, 300);
    tokens(stream)
}

#[test]
fn pages_leave_piece_by_piece_and_come_back_to_where_they_were() {
    let (mut scheduler, _, _) = swapping(100);
    let streams = two_running(&mut scheduler);
    let both = scheduler.owned_bytes();
    assert!(!scheduler.is_freeing() && !scheduler.give_up_freeing());
    assert!(scheduler.preempt_last(Urgency::Soon));
    assert_eq!((scheduler.running.len(), away(&scheduler)), (1, 1));
    assert!(scheduler.is_freeing() && !scheduler.is_returning());
    assert_eq!(
        (scheduler.coming_back(), scheduler.returning_bytes()),
        (0, 0)
    );
    let mut last = both;
    while scheduler.swap.as_ref().is_some_and(Swap::advance) {
        assert!(
            scheduler.owned_bytes() <= last,
            "what is written comes free"
        );
        last = scheduler.owned_bytes();
    }
    assert!(last < both);
    scheduler.follow_swaps();
    assert!(!scheduler.is_freeing() && away(&scheduler) == 1);
    assert_eq!(scheduler.status().swapped, 1);
    assert!(!scheduler.cancel_returning(), "nothing is being read");
    // There is room for it all the time, so that the next step fetches it.
    scheduler.admit();
    assert!(scheduler.is_returning() && !scheduler.is_freeing());
    assert_eq!(scheduler.coming_back(), 1);
    let promised = scheduler.returning_bytes();
    assert!(promised > 0 && promised <= both - last);
    assert!(
        scheduler.promised_bytes() > promised,
        "and what the other still needs"
    );
    move_all(&mut scheduler);
    assert_eq!((scheduler.running.len(), away(&scheduler)), (2, 0));
    assert_eq!(scheduler.returning_bytes(), 0);
    let status = scheduler.swap.as_ref().expect("there is one").status();
    assert_eq!((status.left, status.returned, status.held.get()), (1, 1, 0));
    finish(&mut scheduler, 300);
    assert_eq!(streams.map(tokens), [alone(0), alone(1)]);
}

#[test]
fn a_request_whose_pages_are_in_the_file_makes_the_queue_no_longer() {
    // It waits for the file, and one more that had never run was let into the queue for it.
    let (mut scheduler, _, _) = swapping(100);
    let _two = two_running(&mut scheduler);
    assert!(scheduler.preempt_last(Urgency::Soon));
    (scheduler.config.max_running, scheduler.config.max_waiting) = (1, 1);
    let mut streams = [2, 3].map(|seed| enqueue(&mut scheduler, endless(prompt(seed, 4), 1)));
    scheduler.admit();
    assert_eq!((away(&scheduler), scheduler.waiting.len()), (1, 2));
    assert_eq!(failure(&mut streams[0]), None);
    let refused = failure(&mut streams[1]);
    assert!(matches!(refused, Some(Failure::QueueFull { .. })));
}

#[test]
fn what_is_read_is_given_back_when_memory_is_needed_and_stays_in_the_file() {
    let (mut scheduler, _, _) = swapping(100);
    let streams = two_running(&mut scheduler);
    scheduler.preempt_last(Urgency::Soon);
    move_all(&mut scheduler);
    let one = scheduler.owned_bytes();
    scheduler.admit();
    scheduler.swap.as_ref().expect("there is one").advance();
    assert!(scheduler.owned_bytes() > one);
    assert!(scheduler.cancel_returning());
    assert_eq!(scheduler.owned_bytes(), one);
    assert!(!scheduler.cancel_returning() && !scheduler.is_returning());
    assert_eq!(away(&scheduler), 1);
    scheduler.admit();
    move_all(&mut scheduler);
    finish(&mut scheduler, 300);
    assert_eq!(streams.map(tokens), [alone(0), alone(1)]);
}

#[test]
fn what_is_being_written_is_given_up_when_memory_is_needed_at_once() {
    let (mut scheduler, _, _) = swapping(100);
    let streams = two_running(&mut scheduler);
    let both = scheduler.owned_bytes();
    scheduler.preempt_last(Urgency::Soon);
    assert_eq!(scheduler.owned_bytes(), both);
    assert!(scheduler.give_up_freeing());
    assert!(scheduler.owned_bytes() < both);
    assert_eq!(away(&scheduler), 0);
    assert!(!scheduler.give_up_freeing());
    assert_eq!(
        scheduler.swap_paused_until, None,
        "nothing is wrong with the file"
    );
    finish(&mut scheduler, 300);
    assert_eq!(streams.map(tokens), [alone(0), alone(1)]);
}

/// Two seconds without a piece, either way: then it is computed again, and for a minute nothing is moved.
#[test]
fn a_file_that_does_not_move_is_waited_for_two_seconds_and_left_alone_for_a_minute() {
    for returns in [false, true] {
        let (mut scheduler, system, _) = swapping(100);
        let streams = two_running(&mut scheduler);
        scheduler.preempt_last(Urgency::Soon);
        if returns {
            // In the file it may be for as long as it takes.
            move_all(&mut scheduler);
            system.pass(Duration::from_secs(100));
            scheduler.follow_swaps();
            assert_eq!(away(&scheduler), 1);
            scheduler.admit();
            assert!(scheduler.is_returning());
        }
        let millisecond = Duration::from_millis(1);
        system.pass(Duration::from_secs(2) - millisecond);
        scheduler.follow_swaps();
        assert_eq!(away(&scheduler), 1, "it may yet move");
        // A piece that has moved begins the time anew.
        assert!(scheduler.swap.as_ref().expect("there is one").advance());
        scheduler.follow_swaps();
        system.pass(Duration::from_secs(2) - millisecond);
        scheduler.follow_swaps();
        assert_eq!(away(&scheduler), 1, "returns: {returns}");
        system.pass(millisecond);
        scheduler.follow_swaps();
        assert_eq!(away(&scheduler), 0);
        assert_eq!(scheduler.waiting.len(), 1, "to be computed again");
        let now = scheduler.system.now();
        assert_eq!(
            scheduler.swap_paused_until,
            Some(now + Duration::from_secs(60))
        );
        for (time, expected) in [(Duration::from_secs(60) - millisecond, 0), (millisecond, 1)] {
            system.pass(time);
            scheduler.admit();
            (0..10).for_each(|_| assert!(scheduler.step()));
            assert_eq!(scheduler.running.len(), 2);
            assume_slow_prompts(&mut scheduler);
            scheduler.preempt_last(Urgency::Soon);
            assert_eq!(away(&scheduler), expected);
        }
        move_all(&mut scheduler);
        while !scheduler.is_idle() {
            scheduler.step();
            move_all(&mut scheduler);
        }
        assert_eq!(streams.map(tokens), [alone(0), alone(1)]);
    }
}

#[test]
fn a_file_that_fails_is_noticed_once_and_left_alone_for_a_minute() {
    let (mut scheduler, _, disk) = swapping(100);
    let streams = two_running(&mut scheduler);
    scheduler.preempt_last(Urgency::Soon);
    disk.trouble(Some(Trouble::Refuses));
    move_all(&mut scheduler);
    assert_eq!(away(&scheduler), 0);
    let now = scheduler.system.now();
    assert_eq!(
        scheduler.swap_paused_until,
        Some(now + Duration::from_secs(60))
    );
    assert_eq!(scheduler.swap_failures, 1);
    finish(&mut scheduler, 300);
    assert_eq!(streams.map(tokens), [alone(0), alone(1)]);
}

#[test]
fn pages_are_moved_only_where_that_pays_and_there_is_time() {
    // What happens to the last of two that run.
    type Change = fn(&mut Scheduler);
    let cases: [(Change, Urgency, usize); 5] = [
        (|_| (), Urgency::Soon, 1),
        (|_| (), Urgency::Now, 0),
        (|scheduler| scheduler.swap = None, Urgency::Soon, 0),
        (
            |scheduler| scheduler.prompt_rate = Rate::over(1.0),
            Urgency::Soon,
            0,
        ),
        // So fast that reading takes longer.
        (
            |scheduler| {
                scheduler
                    .prompt_rate
                    .observe(1e18, Duration::from_millis(1))
            },
            Urgency::Soon,
            0,
        ),
    ];
    for (index, (change, urgency, expected)) in cases.into_iter().enumerate() {
        let (mut scheduler, _, _) = swapping(100);
        let streams = two_running(&mut scheduler);
        change(&mut scheduler);
        scheduler.preempt_last(urgency);
        assert_eq!(away(&scheduler), expected, "case {index}");
        assert_eq!((scheduler.running.len(), scheduler.waiting.len()), (1, 1));
        drop(streams);
    }
    // Choices of one prompt have pages in common.
    let (mut scheduler, _, _) = swapping(100);
    let group = scheduler.prefix.grain().group_tokens().get() as u32;
    let two = Request {
        choices: std::num::NonZeroUsize::new(2).expect("not zero"),
        ..endless(prompt(0, 4 * group), TOKENS)
    };
    let stream = enqueue(&mut scheduler, two);
    (0..20).for_each(|_| assert!(scheduler.step()));
    assume_slow_prompts(&mut scheduler);
    scheduler.preempt_last(Urgency::Soon);
    assert_eq!(away(&scheduler), 0);
    assert_eq!(scheduler.waiting[0].choices.len(), 2);
    drop(stream);
}

#[test]
fn what_takes_as_long_to_move_as_to_compute_is_computed() {
    let rates = Rates {
        write: Some(100.0),
        read: Some(50.0),
        compute: Some(10.0),
    };
    let favored = |written_bytes, read_bytes, tokens| {
        rates.favor(Moving {
            written_bytes,
            read_bytes,
            tokens,
        })
    };
    // Two seconds and one, against three and a bit more or less.
    assert!(favored(200, 50, 31));
    assert!(!favored(200, 50, 30));
    assert!(!favored(200, 50, 29));
    assert!(!favored(0, 0, 0));
}

/// Groups that the two have in common.
const SHARED: usize = 8;

/// Two requests that run, of which the second begins with the prompt of the first, and the bytes and tokens that are
/// the second's own.
fn two_that_share() -> (Scheduler, [Stream; 2], u64, usize) {
    let (mut scheduler, _, _) = swapping(100);
    scheduler.config.prefix_cache.enabled = true;
    let group = scheduler.prefix.grain().group_tokens().get();
    let shared = prompt(0, (SHARED * group) as u32);
    let longer = [shared.clone(), prompt(7, 3 * group as u32)].concat();
    let streams = [shared, longer].map(|prompt| {
        let stream = enqueue(&mut scheduler, endless(prompt, TOKENS));
        (0..20).for_each(|_| assert!(scheduler.step()));
        stream
    });
    let second = &scheduler.running[1].sessions[0];
    assert_eq!(scheduler.prefix.shared_groups(&second.path), SHARED);
    let whole = second.sequence.report().committed_bytes as u64;
    let bytes = whole - SHARED as u64 * scheduler.prefix.grain().group_bytes();
    let tokens = second.sequence.len() - SHARED * group;
    (scheduler, streams, bytes, tokens)
}

/// Of a prompt that another request has, too, only what is its own is moved, and weighed.
#[test]
fn what_is_shared_stays_and_is_not_counted() {
    // Computing is a little faster than moving, and a little slower.
    for (times, moved) in [(1.001, 0), (0.999, 1)] {
        let (mut scheduler, streams, bytes, tokens) = two_that_share();
        let rates = scheduler.swap_rates().expect("there is a file");
        let seconds = |rate: Option<f64>| bytes as f64 / rate.expect("assumed");
        let as_fast = tokens as f64 / (seconds(rates.write) + seconds(rates.read));
        scheduler.prompt_rate = Rate::over(1e18);
        let second = Duration::from_secs(1);
        scheduler.prompt_rate.observe(as_fast * times, second);
        scheduler.preempt_last(Urgency::Soon);
        assert_eq!(away(&scheduler), moved, "{times}");
        drop(streams);
    }
    let (mut scheduler, streams, bytes, _) = two_that_share();
    assume_slow_prompts(&mut scheduler);
    scheduler.preempt_last(Urgency::Soon);
    move_all(&mut scheduler);
    let status = scheduler.swap.as_ref().expect("there is one").status();
    // Pages that were mapped ahead hold nothing yet, and are not written.
    let (held, group) = (status.held.get(), scheduler.prefix.grain().group_bytes());
    assert!(held <= bytes && held + group > bytes, "{held} of {bytes}");
    // It needs memory for no more to come back, and a group to go on.
    let waiting = &scheduler.waiting[0];
    let there = waiting.away.as_ref().expect("it is away");
    let needed = scheduler.needs_to_return(waiting, there);
    let (back, _) = needed.expect("what it shares is in memory");
    assert!(back <= bytes + 2 * group, "{back} of {bytes}");
    drop(streams);
}

#[test]
fn groups_whose_pages_are_written_are_let_go_of_one_after_the_other() {
    let (mut scheduler, streams, _, _) = two_that_share();
    assume_slow_prompts(&mut scheduler);
    scheduler.preempt_last(Urgency::Soon);
    let groups = |scheduler: &Scheduler| {
        let away = scheduler.away().next().expect("it is away");
        let is_leaving = matches!(away.image.progress().phase, Phase::Leaving { .. });
        (away.path.groups().len(), is_leaving)
    };
    let before = groups(&scheduler).0;
    assert!(before > SHARED);
    let mut seen = Vec::new();
    while scheduler.swap.as_ref().is_some_and(Swap::advance) {
        scheduler.follow_swaps();
        if let (left, true) = groups(&scheduler) {
            seen.push(left);
        }
    }
    assert!(seen.is_sorted_by(|a, b| a >= b), "{seen:?}");
    assert!(
        seen.iter().any(|&left| SHARED < left && left < before),
        "{seen:?}"
    );
    assert_eq!(groups(&scheduler), (0, false), "the shared ones, too");
    drop(streams);
}

#[test]
fn a_client_that_has_gone_takes_its_pages_out_of_the_file() {
    let (mut scheduler, _, _) = swapping(100);
    let [stays, goes] = two_running(&mut scheduler);
    scheduler.preempt_last(Urgency::Soon);
    move_all(&mut scheduler);
    let held = |scheduler: &Scheduler| {
        let swap = scheduler.swap.as_ref().expect("there is one");
        swap.status().held.get()
    };
    assert!(held(&scheduler) > 0);
    drop(goes);
    assert!(scheduler.sweep());
    move_all(&mut scheduler);
    assert_eq!((held(&scheduler), away(&scheduler)), (0, 0));
    drop(stays);
}

#[test]
fn a_file_that_does_not_move_is_waited_for_no_longer_because_somebody_looks() {
    let (mut scheduler, system, _) = swapping(100);
    let _streams = two_running(&mut scheduler);
    scheduler.preempt_last(Urgency::Soon);
    for waited_for in [1, 0] {
        system.pass(Duration::from_secs(1));
        scheduler.follow_swaps();
        assert_eq!(away(&scheduler), waited_for);
    }
}

#[test]
fn what_comes_back_to_where_there_is_room_costs_no_cached_group() {
    let (mut scheduler, _, _) = swapping(100);
    scheduler.config.prefix_cache.enabled = true;
    let _cached = enqueue(&mut scheduler, after(prompt(9, 64), 1));
    finish(&mut scheduler, 10);
    scheduler.config.prefix_cache.enabled = false;
    let _streams = two_running(&mut scheduler);
    scheduler.preempt_last(Urgency::Soon);
    move_all(&mut scheduler);
    let groups = scheduler.prefix.tree().len();
    assert!(groups > 0);
    scheduler.admit();
    assert!(scheduler.is_returning());
    assert_eq!(scheduler.prefix.tree().len(), groups);
}

/// What the file had come to since the last step was not asked, and what a request had in memory because of it stayed there
/// whatever the budget said: all of its pages when they had just come back.
#[test]
fn a_lower_budget_takes_what_swapped_requests_have_in_memory_whatever_the_file_has_come_to() {
    type Event = fn(&mut Scheduler, &Disk);
    fn piece(scheduler: &Scheduler) -> bool {
        scheduler.swap.as_ref().is_some_and(Swap::advance)
    }
    fn has(away: &Away, phase: Phase) -> bool {
        away.image.progress().phase == phase
    }
    fn bring_back(scheduler: &mut Scheduler) {
        move_all(scheduler);
        scheduler.admit();
        assert!(scheduler.is_returning());
    }
    let events: [Event; 7] = [
        |_, _| (),
        |scheduler, _| assert!(piece(scheduler)),
        |scheduler, _| {
            while piece(scheduler) {}
            assert!(scheduler.away().any(|away| has(away, Phase::Out)));
        },
        |scheduler, disk| {
            disk.trouble(Some(Trouble::Refuses));
            piece(scheduler);
            assert!(scheduler.away().any(|away| has(away, Phase::Failed)));
        },
        |scheduler, _| {
            bring_back(scheduler);
            assert!(piece(scheduler));
        },
        |scheduler, _| {
            bring_back(scheduler);
            while piece(scheduler) {}
            assert!(scheduler.away().any(|away| has(away, Phase::Back)));
        },
        |scheduler, disk| {
            bring_back(scheduler);
            disk.trouble(Some(Trouble::Refuses));
            // The first pieces need not be read: the cache has their groups.
            while piece(scheduler) {}
            assert!(scheduler.away().any(|away| has(away, Phase::Failed)));
        },
    ];
    for (index, happens) in events.into_iter().enumerate() {
        let (mut scheduler, _, disk) = swapping(100);
        scheduler.config.prefix_cache.enabled = true;
        let streams = two_running(&mut scheduler);
        scheduler.preempt_last(Urgency::Soon);
        happens(&mut scheduler, &disk);
        let parts = scheduler.budget.parts;
        let group = scheduler.prefix.grain().group_bytes();
        scheduler.set_budget(parts.besides_kv() + group);
        let (owned, limit) = (scheduler.owned_bytes(), scheduler.kv_limit);
        assert!(owned <= limit, "case {index}: {owned} bytes of {limit}");
        scheduler.set_budget(parts.bytes());
        for _ in 0..1000 {
            move_all(&mut scheduler);
            if scheduler.is_idle() {
                break;
            }
            scheduler.step();
        }
        let texts = streams.map(tokens);
        assert_eq!(texts, [alone(0), alone(1)], "case {index}");
    }
}
