//! What a request needs to start, what there is for it, and for whom it waits.

use lacuna_kv::prefix::Namespace;

use super::*;

fn group(scheduler: &Scheduler) -> usize {
    scheduler.prefix.grain().group_tokens().get()
}

/// Bytes as page groups.
fn groups(scheduler: &Scheduler, bytes: u64) -> u64 {
    let group_bytes = scheduler.prefix.grain().bytes(group(scheduler));
    assert_eq!(bytes % group_bytes, 0, "whole groups");
    bytes / group_bytes
}

fn choices(count: usize, request: Request) -> Request {
    Request {
        choices: count.try_into().expect("more than none"),
        ..request
    }
}

#[test]
fn a_request_needs_its_prompt_once_and_for_every_choice_the_last_group_and_one_more() {
    let scheduler = with_groups(20);
    let group = group(&scheduler);
    let prompt = prompt(0, 3 * group as u32);
    let request = choices(3, after(prompt, 5));
    let made = Waiting::new(request, 100, scheduler.system.now());
    let (waiting, _stream) = made.expect("valid settings");
    let needed = |held| groups(&scheduler, scheduler.bytes_to_start(&waiting, held));
    assert_eq!(needed(0), 4 + 2 + 2);
    assert_eq!(needed(2 * group), 2 + 2 + 2);
    assert_eq!(
        needed(2 * group + group / 2),
        2 + 2 + 2,
        "a group that matches in part is copied"
    );
}

#[test]
fn the_first_request_needs_room_for_all_its_choices_whether_they_wait_or_run() {
    let mut scheduler = with_groups(30);
    let needed = |scheduler: &Scheduler| groups(scheduler, scheduler.first_needs());
    assert_eq!(needed(&scheduler), 0);
    let prompt = prompt(0, 3 * group(&scheduler) as u32);
    let _stream = enqueue(&mut scheduler, choices(3, after(prompt, 100)));
    // Two groups that they share; the prompt's last group and the next one for each.
    assert_eq!(needed(&scheduler), 2 + 3 * 2);
    scheduler.admit();
    assert_eq!(scheduler.running[0].followers.len(), 2);
    assert_eq!(needed(&scheduler), 2 + 3 * 2);
    scheduler.step();
    assert_eq!(scheduler.running[0].sessions.len(), 3);
    // Each has a token of its own, for which a group more has to be free.
    assert_eq!(needed(&scheduler), 2 + 3 * 3);
}

#[test]
fn requests_that_take_all_there_is_to_the_byte_go_on() {
    let mut scheduler = with_groups(30);
    let _streams = [0, 1].map(|seed| enqueue(&mut scheduler, endless(prompt(seed, 20), 100)));
    scheduler.step();
    for (missing, running) in [(0, 2), (1, 1)] {
        let held = scheduler.owned_bytes();
        scheduler.budget.parts.kv_bytes = held - missing;
        scheduler.tended = None;
        scheduler.tend(scheduler.system.now());
        assert_eq!(scheduler.kv_limit, held - missing);
        assert_eq!(scheduler.running.len(), running);
    }
}

#[test]
fn what_running_requests_are_promised_is_not_free() {
    let mut scheduler = with_groups(30);
    let free = |scheduler: &Scheduler| groups(scheduler, scheduler.free_for_admission(0));
    assert_eq!(free(&scheduler), 30);
    let group = group(&scheduler);
    let long = choices(4, after(prompt(0, 7 * group as u32), 5));
    let _stream = enqueue(&mut scheduler, long);
    scheduler.step();
    let owned = groups(&scheduler, scheduler.owned_bytes());
    assert_eq!(owned, 4, "64 tokens of the prompt");
    // Four groups for the rest of it and one more, and two for each choice that will fork off.
    assert_eq!(free(&scheduler), 30 - 4 - 4 - 3 * 2);
}

#[test]
fn cached_groups_that_nobody_uses_are_free_but_for_those_to_be_used() {
    let mut scheduler = with_groups(30);
    scheduler.config.prefix_cache.enabled = true;
    let group = group(&scheduler);
    let _stream = enqueue(&mut scheduler, after(prompt(0, 3 * group as u32), 1));
    finish(&mut scheduler, 10);
    assert_eq!(scheduler.prefix.tree().unused(), 3);
    let free = |kept| groups(&scheduler, scheduler.free_for_admission(kept));
    assert_eq!((free(0), free(2)), (30, 28));
    let found = scheduler.reusable(Namespace::COMMON, &prompt(0, 3 * group as u32 + 1));
    assert_eq!((found.tokens, found.unused_groups), (3 * group, 3));
}

/// A scheduler that reads a prompt of 200 tokens and has got to 64.
fn reading_a_long_prompt() -> (Scheduler, Stream) {
    let mut scheduler = with_context(2048);
    let stream = enqueue(&mut scheduler, after(prompt(0, 200), 1));
    scheduler.step();
    assert_eq!(scheduler.running[0].sessions[0].sequence.len(), 64);
    (scheduler, stream)
}

#[test]
fn the_nearest_of_those_who_wait_for_a_prompt_says_how_urgent_it_is() {
    for lengths in [[100, 84], [84, 100]] {
        let (mut scheduler, _stream) = reading_a_long_prompt();
        let waits = |length| after(prompt(0, length), 1);
        let _streams = lengths.map(|length| enqueue(&mut scheduler, waits(length)));
        scheduler.admit();
        assert_eq!(scheduler.waiting_len(), 2);
        let awaited = scheduler.running[0].sessions[0].awaited;
        assert_eq!(awaited, Some(80 - 64), "whole groups before the last token");
    }
}

#[test]
fn nobody_waits_for_pages_that_would_be_of_no_use() {
    // Of eighty tokens the last is computed again in any case, and four groups are there.
    let (mut scheduler, _stream) = reading_a_long_prompt();
    let _short = enqueue(&mut scheduler, after(prompt(0, 80), 1));
    scheduler.admit();
    assert_eq!(scheduler.running.len(), 2);
}

#[test]
fn nobody_waits_for_a_prompt_that_does_not_go_on_or_is_none_of_theirs() {
    let elsewhere = || Request {
        prefix_namespace: Namespace::new(7),
        ..after(prompt(0, 150), 1)
    };
    let alike = || after(prompt(0, 150), 1);
    let (mut scheduler, _stream) = reading_a_long_prompt();
    let _other = enqueue(&mut scheduler, elsewhere());
    scheduler.admit();
    assert_eq!(scheduler.running.len(), 2, "another namespace");
    let (mut scheduler, _stream) = reading_a_long_prompt();
    let _alike = enqueue(&mut scheduler, alike());
    scheduler.admit();
    assert_eq!(scheduler.running.len(), 1, "it will have the pages");
    scheduler.running[0].job.stalled = Some(scheduler.system.now());
    scheduler.admit();
    assert_eq!(scheduler.running.len(), 2, "it is not read, and so waits");
}

#[test]
fn nobody_waits_for_rows_that_somebody_has_and_cannot_share() {
    // The first 64 tokens are computed, and their groups are in no cache.
    for begins_alike in [49, 65] {
        let mut scheduler = with_context(2048);
        scheduler.config.prefix_cache.enabled = false;
        let _long = enqueue(&mut scheduler, after(prompt(0, 200), 1));
        scheduler.step();
        scheduler.config.prefix_cache.enabled = true;
        let _short = enqueue(&mut scheduler, after(prompt(0, begins_alike), 1));
        scheduler.admit();
        assert_eq!(scheduler.running.len(), 2, "{begins_alike} tokens");
    }
}

#[test]
fn nobody_waits_for_a_prompt_that_the_cache_has_from_somebody_else() {
    let (mut scheduler, _stream) = reading_a_long_prompt();
    scheduler.running[0].job.stalled = Some(scheduler.system.now());
    let overtakes = enqueue(&mut scheduler, after(prompt(0, 200), 1));
    for _ in 0..4 {
        scheduler.step();
    }
    assert_eq!(tokens(overtakes).len(), 1);
    scheduler.running[0].job.stalled = None;
    let _third = enqueue(&mut scheduler, after(prompt(0, 200), 1));
    scheduler.admit();
    assert_eq!(scheduler.running.len(), 2);
}

#[test]
fn those_who_wait_for_a_prompt_that_is_being_read_take_no_place_in_the_queue() {
    let (mut scheduler, _stream) = reading_a_long_prompt();
    scheduler.config.max_waiting = 1;
    let mut streams = [150, 160, 170, 180].map(|length| {
        let alike = after(prompt(0, length), 1);
        enqueue(&mut scheduler, alike)
    });
    scheduler.admit();
    assert_eq!(scheduler.waiting_len(), 4);
    assert!(streams.iter_mut().all(|stream| failure(stream).is_none()));
}

#[test]
fn only_so_many_are_looked_at_behind_one_that_waits_for_memory() {
    for (between, starts) in [(7, true), (8, false)] {
        let mut scheduler = with_groups(20);
        let group = group(&scheduler) as u32;
        let holder = enqueue(&mut scheduler, endless(prompt(0, 10 * group), 100));
        scheduler.step();
        let long = |seed| after(prompt(seed, 15 * group), 1);
        let long: Vec<_> = (1..2 + between)
            .map(|seed| enqueue(&mut scheduler, long(seed)))
            .collect();
        let short = enqueue(&mut scheduler, after(prompt(50, 4), 1));
        scheduler.admit();
        assert_eq!(scheduler.running.len() == 2, starts, "{between} between");
        drop((holder, long, short));
    }
}

/// Has KV pages be as many groups at most, which is all that there will ever be.
pub(super) fn limit_to_groups(scheduler: &mut Scheduler, groups: u64) {
    let bytes = groups * scheduler.prefix.grain().bytes(group(scheduler));
    (scheduler.budget.parts.kv_bytes, scheduler.kv_limit) = (bytes, bytes);
    let limited = scheduler
        .engine
        .kv_cache()
        .set_limit(ByteLength::new(bytes));
    limited.expect("a page or more");
}

#[test]
fn a_request_that_has_all_memory_there_is_and_needs_more_fails_in_the_next_step() {
    let mut scheduler = with_groups(20);
    let mut stream = enqueue(&mut scheduler, after(prompt(0, 100), 1));
    limit_to_groups(&mut scheduler, 2);
    scheduler.step();
    scheduler.step();
    let Some(Failure::OutOfMemory(why)) = failure(&mut stream) else {
        panic!("nothing will ever come free");
    };
    assert!(why.contains("not enough"), "{why}");
}

#[test]
fn a_request_goes_on_with_pages_that_another_thread_lets_go_of_after_they_were_asked_for() {
    // The thread that writes to a cache folder let go of the last pages just then: nothing was left to evict, and the
    // only request failed for want of memory that was there.
    let mut scheduler = with_groups(20);
    let stream = enqueue(&mut scheduler, after(prompt(0, 100), 1));
    limit_to_groups(&mut scheduler, 2);
    scheduler.step();
    limit_to_groups(&mut scheduler, 20);
    finish(&mut scheduler, 20);
    assert_eq!(tokens(stream).len(), 1);
}

#[test]
fn a_running_request_is_promised_the_rest_of_its_prompt_and_a_group() {
    let mut scheduler = with_groups(20);
    let group = group(&scheduler);
    let _stream = enqueue(&mut scheduler, after(prompt(0, 6 * group as u32), 100));
    scheduler.step();
    let computed = scheduler.running[0].sessions[0].sequence.len();
    assert_eq!(computed, 4 * group);
    assert_eq!(groups(&scheduler, scheduler.promised_bytes()), 7 - 4);
    scheduler.step();
    assert_eq!(
        groups(&scheduler, scheduler.promised_bytes()),
        8 - 6,
        "the first token of the reply has begun a group"
    );
}

#[test]
fn events_that_a_step_does_not_need_are_shared_among_choices() {
    for (number, spare) in [(1, 256 - 5), (4, (256 - 11) / 4)] {
        let made = Waiting::new(choices(number, after(prompt(0, 4), 1)), 100, Instant::now());
        let (waiting, _stream) = made.expect("valid settings");
        assert_eq!(waiting.job.spare_events(number), spare);
    }
}

#[test]
fn the_channel_holds_the_events_of_a_step_twice() {
    assert_eq!(
        Job::events_per_step(3),
        2 * 3 + 3,
        "a token and an end for each, and for all a start, the prompt's scores and a failure"
    );
    let many = choices(200, after(prompt(0, 4), 1));
    let made = Waiting::new(many, 100, Instant::now());
    let (waiting, _stream) = made.expect("valid settings");
    for _ in 0..Job::events_per_step(200) {
        assert!(waiting.job.has_room(200));
        waiting.job.send(Event::Failed(Failure::Deadline));
    }
    assert!(waiting.job.has_room(200), "there is room for another step");
    waiting.job.send(Event::Failed(Failure::Deadline));
    assert!(!waiting.job.has_room(200));
}
