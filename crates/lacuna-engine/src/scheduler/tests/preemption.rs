//! What is given up for pages, in which order, and what that is counted as.

use lacuna_kv::KvError;
use lacuna_pages::PageCount;

use super::admission::limit_to_groups;
use super::speculation::family;
use super::swap_file::{away, swapping, two_running};
use super::weights::reading;
use super::*;
use crate::scheduler::swapping::Urgency;

/// A session lacks so many pages.
fn shortage(pages: u64) -> KvError {
    KvError::Pages(lacuna_pages::Error::OutOfPages {
        requested: PageCount::new(pages),
        free: PageCount::new(0),
        limit: None,
    })
}

#[test]
fn what_is_mapped_of_the_model_is_known_to_whoever_asks_for_memory() {
    let scheduler = scheduler();
    let mapped = scheduler.budget.mapped_weight_bytes;
    assert!(mapped > 0);
    assert_eq!(scheduler.kv_demand().mapped, mapped);
}

#[test]
fn groups_and_resume_points_that_leave_the_cache_are_counted_one_by_one() {
    let mut scheduler = scheduler_of(family("qwen3.5"), 256);
    for seed in 1..4 {
        let text = (0..100).map(|token| 3 + token * seed % 50).collect();
        let _stream = enqueue(&mut scheduler, after(text, 4));
        finish(&mut scheduler, 20);
    }
    let (groups, points) = scheduler.kept();
    assert!(groups > 1 && points > 1, "{groups} groups, {points} points");
    while scheduler.evict() {
        let (groups_left, points_left) = scheduler.kept();
        let counters = &scheduler.counters;
        assert_eq!(counters.evicted_groups, (groups - groups_left) as u64);
        assert_eq!(
            counters.evicted_resume_points,
            (points - points_left) as u64
        );
    }
    assert_eq!(scheduler.kept(), (0, 0));
}

#[test]
fn a_group_has_a_page_in_each_buffer_of_rows_and_one_of_states() {
    for (model, states) in [(demo_model(), 0), (family("qwen3.5"), 1)] {
        let scheduler = scheduler_of(model, 256);
        let rows = scheduler.prefix.grain().buffers();
        assert!(rows > 0);
        assert_eq!(scheduler.status().pages.buffers, rows + states);
    }
}

#[test]
fn what_comes_back_from_the_swap_file_makes_room_after_all_that_is_cached() {
    let (mut scheduler, _, _) = swapping(100);
    let _streams = two_running(&mut scheduler);
    assert!(!scheduler.evict(), "nothing is cached");
    scheduler.preempt_last(Urgency::Soon);
    while scheduler.swap.as_ref().is_some_and(Swap::advance) {}
    scheduler.follow_swaps();
    scheduler.admit();
    assert!(scheduler.is_returning());
    assert!(scheduler.evict());
    assert!(!scheduler.is_returning() && away(&scheduler) == 1);
}

#[test]
fn a_session_beside_gets_what_is_on_its_way_to_the_file_before_what_runs_and_then_that() {
    let (mut scheduler, _, _) = swapping(100);
    let _streams = two_running(&mut scheduler);
    scheduler.preempt_last(Urgency::Soon);
    assert!(scheduler.is_freeing());
    assert!(scheduler.make_room_beside(&shortage(1)));
    assert_eq!((away(&scheduler), scheduler.running.len()), (0, 1));
    assert!(scheduler.make_room_beside(&shortage(1)));
    assert!(scheduler.running.is_empty());
    assert!(!scheduler.make_room_beside(&shortage(1)), "nothing is left");
    assert_eq!(scheduler.waiting.len(), 2, "they are computed again");
}

#[test]
fn a_session_beside_gets_a_cached_group_and_no_more_where_that_is_enough() {
    let (mut scheduler, _, _) = swapping(100);
    scheduler.config.prefix_cache.enabled = true;
    let cached = enqueue(&mut scheduler, after(prompt(9, 64), 1));
    finish(&mut scheduler, 10);
    scheduler.config.prefix_cache.enabled = false;
    let _streams = two_running(&mut scheduler);
    scheduler.preempt_last(Urgency::Soon);
    let groups = scheduler.prefix.tree().len();
    assert!(groups > 0);
    assert!(scheduler.make_room_beside(&shortage(1)));
    assert_eq!(scheduler.prefix.tree().len(), groups - 1);
    assert_eq!((away(&scheduler), scheduler.running.len()), (1, 1));
    drop(cached);
}

#[test]
fn pages_that_are_being_written_are_waited_for_and_nobody_else_is_preempted() {
    let (mut scheduler, _, _) = swapping(100);
    let _two = two_running(&mut scheduler);
    let _third = enqueue(&mut scheduler, endless(prompt(5, 64), 100));
    (0..5).for_each(|_| assert!(scheduler.step()));
    assert_eq!(scheduler.running.len(), 3);
    scheduler.preempt_last(Urgency::Soon);
    assert!(scheduler.is_freeing());
    assert!(!scheduler.find_pages(0, &shortage(1)));
    assert!(scheduler.waits_for_pages);
    assert_eq!((away(&scheduler), scheduler.running.len()), (1, 2));
    // With nothing on its way the last one gives way.
    assert!(scheduler.give_up_freeing());
    assert!(scheduler.find_pages(0, &shortage(1)));
    assert_eq!(scheduler.running.len(), 1);
}

#[test]
fn when_files_are_lost_nothing_is_written_to_one() {
    let (mut scheduler, _, _) = swapping(100);
    let _streams = two_running(&mut scheduler);
    scheduler.preempt_last(Urgency::Soon);
    assert!(scheduler.is_freeing());
    assert!(scheduler.give_up_files());
    assert_eq!((away(&scheduler), scheduler.owned_bytes()), (0, 0));
    assert_eq!(scheduler.waiting.len(), 2);
}

#[test]
fn weights_give_as_many_pages_as_were_asked_for() {
    let (mut scheduler, ..) = reading();
    let page = scheduler.engine.kv_cache().page_bytes() as u64;
    let pages = scheduler.engine.weights_to_spare() / 2 / page;
    assert!(pages > 1);
    let before = scheduler.kv_limit;
    assert!(scheduler.take_from_weights(&shortage(pages)));
    assert!(scheduler.kv_limit >= before + pages * page);
    assert!(
        !scheduler.take_from_weights(&KvError::RowsLost),
        "not for that"
    );
}

#[test]
fn pages_that_a_swap_file_may_still_hold_are_waited_for() {
    for swaps in [false, true] {
        let (mut scheduler, system, _) = swapping(20);
        if !swaps {
            scheduler.swap = None;
        }
        let mut stream = enqueue(&mut scheduler, after(prompt(0, 100), 1));
        limit_to_groups(&mut scheduler, 2);
        scheduler.step();
        scheduler.step();
        assert_eq!(failure(&mut stream).is_none(), swaps);
        system.pass(Scheduler::PAGES_ON_THEIR_WAY);
        scheduler.step();
        assert!(scheduler.is_idle());
    }
}

#[test]
fn a_request_alone_starts_again_from_the_cache_once_for_each_token() {
    for cached in [false, true] {
        let mut scheduler = with_context(512);
        if cached {
            let _other = enqueue(&mut scheduler, after(prompt(1, 64), 1));
            finish(&mut scheduler, 5);
        } else {
            scheduler.config.prefix_cache.enabled = false;
        }
        let _stream = enqueue(&mut scheduler, endless(prompt(0, 40), 20));
        scheduler.step();
        assert_eq!(scheduler.share_again(), cached, "where something is cached");
        assert_eq!(scheduler.counters.preemptions, u64::from(cached));
        scheduler.step();
        scheduler.running[0].sessions[0]
            .sequence
            .truncate(40)
            .expect("held");
        assert!(!scheduler.share_again(), "it has no token more");
        assert_eq!(scheduler.running.len(), 1);
    }
}
