//! When a request ends before it is done, and who goes on then.

use super::*;

const SECOND: Duration = Duration::from_secs(1);
const MOMENT: Duration = Duration::from_millis(1);

#[test]
fn a_request_fails_at_its_deadline_and_not_before_whether_it_runs_or_waits() {
    let (mut scheduler, system) = on_a_fake_system();
    scheduler.config.max_running = 1;
    let within_five_seconds = |first: u32| Request {
        deadline: Some(5 * SECOND),
        ..greedy(first..first + 20, 100)
    };
    let mut streams = [400, 500].map(|first| enqueue(&mut scheduler, within_five_seconds(first)));
    scheduler.step();
    assert_eq!((scheduler.running.len(), scheduler.waiting_len()), (1, 1));
    system.pass(5 * SECOND - MOMENT);
    assert!(!scheduler.sweep(), "there is time left");
    system.pass(MOMENT);
    assert!(scheduler.sweep());
    assert!(scheduler.is_idle());
    for stream in &mut streams {
        assert_eq!(failure(stream), Some(Failure::Deadline));
    }
    assert_eq!(scheduler.counters.failed, 2);
}

/// Steps until the only running request waits for its client.
fn stall(scheduler: &mut Scheduler) {
    while scheduler.running[0].job.stalled.is_none() {
        assert!(scheduler.step(), "it goes on while there is room");
        scheduler.sweep();
    }
}

#[test]
fn a_client_that_does_not_read_is_waited_for_again_after_every_read() {
    let (mut scheduler, system) = on_a_fake_system();
    scheduler.config.unread_patience = 3 * SECOND;
    // Four choices fill the channel in a quarter of the steps.
    let request = Request {
        choices: 4.try_into().expect("more than none"),
        ..endless(prompt(0, 8), 500)
    };
    let mut stream = enqueue(&mut scheduler, request);
    scheduler.step();
    stall(&mut scheduler);
    let (steps, held) = (scheduler.counters.steps, scheduler.owned_bytes());
    assert!(!scheduler.step(), "nothing is computed for nobody");
    assert_eq!(scheduler.counters.steps, steps);
    assert_eq!(scheduler.owned_bytes(), held, "what it has it keeps");
    system.pass(3 * SECOND - MOMENT);
    assert!(!scheduler.sweep(), "it may still read");
    while stream.try_recv().is_some() {}
    scheduler.sweep();
    assert!(scheduler.step(), "it has read");
    stall(&mut scheduler);
    system.pass(3 * SECOND - MOMENT);
    assert!(!scheduler.sweep(), "it may read again");
    system.pass(MOMENT);
    assert!(scheduler.sweep());
    assert_eq!(failure(&mut stream), Some(Failure::Unread));
    assert!(scheduler.is_idle());
}

#[test]
fn a_request_whose_memory_an_unread_one_holds_waits_for_it_and_does_not_fail() {
    let mut scheduler = with_groups(20);
    let unread = enqueue(&mut scheduler, endless(prompt(0, 40), 100));
    scheduler.step();
    let mut waits = enqueue(&mut scheduler, endless(prompt(1, 40), 30));
    scheduler.step();
    scheduler.running[0].job.stalled = Some(scheduler.system.now());
    // Nothing is left to grow into, and that is all there will be.
    scheduler.budget.parts.kv_bytes = scheduler.owned_bytes();
    scheduler.tended = None;
    let preempted = (0..20).find(|_| {
        scheduler.step();
        scheduler.counters.preemptions > 0
    });
    assert!(preempted.is_some(), "it has come to the end of its pages");
    assert_eq!((scheduler.running.len(), scheduler.waiting_len()), (1, 1));
    assert_eq!(failure(&mut waits), None);
    drop(unread);
    scheduler.sweep();
    finish(&mut scheduler, 200);
    assert_eq!(failure(&mut waits), None, "the pages came back");
}
