//! Forks, shared prefixes, windows and truncation: contents, bytes and batches.

use lacuna_kv::{KvError, Layer};

use crate::support::{
    GEOMETRY, LAYERS, PAGE, POLICIES, ROW_BYTES, SHARING, append, assert_rows, assert_tags, cache,
    cpu, extend, store,
};

/// The most that `tokens` held tokens may take under `sparse`: in every buffer a page more for where
/// the first row lies in its page, and one for the part of the last that is unfilled or mapped ahead.
fn bound(tokens: usize) -> usize {
    2 * LAYERS * (tokens * ROW_BYTES + 2 * PAGE)
}

#[test]
fn a_fork_holds_the_same_rows_and_both_go_on_alone() {
    let cpu = cpu();
    for policy in POLICIES {
        let mut first = cache(policy).sequence(400).expect("address space");
        extend(&cpu, &mut first, 200);
        let mut second = first.fork().expect("memory");
        assert_eq!(second.capacity(), 400);
        let after = |from: usize| (0..200).chain(from..from + 100).collect::<Vec<_>>();
        append(&cpu, &mut first, &after(1000)[200..]);
        append(&cpu, &mut second, &after(2000)[200..]);
        assert_tags(&first, &after(1000));
        assert_tags(&second, &after(2000));
        drop(first);
        assert_tags(&second, &after(2000));
    }
}

/// Its rows are gone, and the memory that was there from the start stays.
#[test]
fn dense_memory_stays_whatever_is_cut_off_or_released() {
    let cpu = cpu();
    for policy in ["dense", "dense:head-major"] {
        let cache = cache(policy);
        let mut sequence = cache.sequence(400).expect("address space");
        let whole = sequence.report().committed_bytes;
        let batches = cache.ledger().counts.batches;
        extend(&cpu, &mut sequence, 300);
        sequence.truncate(50).expect("nothing to give back");
        assert_eq!(sequence.report().committed_bytes, whole, "{policy}");
        sequence.release_before(20).expect("nothing to give back");
        assert_eq!(sequence.report().committed_bytes, whole, "{policy}");
        sequence.truncate(0).expect("nothing to give back");
        assert_eq!(sequence.report().committed_bytes, whole, "{policy}");
        extend(&cpu, &mut sequence, 400);
        assert_rows(&sequence);
        assert_eq!(sequence.report().committed_bytes, whole);
        assert_eq!(cache.ledger().counts.batches, batches, "{policy}");
    }
}

#[test]
fn a_fork_shares_full_pages_and_copies_at_most_the_last() {
    let cpu = cpu();
    let cache = cache("sparse");
    let mut first = cache.sequence(1000).expect("address space");
    extend(&cpu, &mut first, 900);
    let unique = cache.ledger().unique;
    let second = first.fork().expect("pages");
    let report = second.report();
    let pages = 900 * ROW_BYTES / PAGE;
    assert_eq!(report.shared_bytes, 2 * LAYERS * pages * PAGE);
    let tails = 2 * LAYERS * PAGE;
    let mapped_ahead = tails;
    assert!((tails..tails + mapped_ahead).contains(&report.unique_bytes));
    assert!((1..tails).contains(&report.copied_bytes));
    assert_eq!(first.report().copied_bytes, 0);
    drop(second);
    assert_eq!(
        cache.ledger().unique,
        unique,
        "the pages are one's own again"
    );
}

#[test]
fn rows_in_common_are_those_of_pages_that_both_have_and_nobody_writes() {
    let cpu = cpu();
    let layer = Layer(LAYERS - 1);
    let mut first = cache("sparse").sequence(1000).expect("address space");
    extend(&cpu, &mut first, 900);
    let whole = 900 * ROW_BYTES / PAGE * PAGE / ROW_BYTES;
    assert_eq!(
        first.rows_in_common(&first, layer),
        0,
        "its own pages are writable"
    );
    let mut second = first.fork().expect("pages");
    assert_eq!(first.rows_in_common(&second, layer), whole);
    assert_eq!(second.rows_in_common(&first, layer), whole);
    // What is written after them changes nothing, and what is cut off is not held any more.
    extend(&cpu, &mut second, 50);
    assert_eq!(first.rows_in_common(&second, layer), whole);
    second.truncate(500).expect("pages");
    assert_eq!(first.rows_in_common(&second, layer), 500);
    // The page that is written to is copied, and with it the rows that it has before.
    extend(&cpu, &mut second, 300);
    let kept = 500 * ROW_BYTES / PAGE * PAGE / ROW_BYTES;
    assert_eq!(first.rows_in_common(&second, layer), kept);
    // Another pool's pages have the same numbers.
    let mut third = cache("sparse").sequence(1000).expect("address space");
    extend(&cpu, &mut third, 900);
    let fourth = third.fork().expect("pages");
    assert_eq!(first.rows_in_common(&fourth, layer), 0);
    for policy in ["dense", "grow:mlx"] {
        let mut first = cache(policy).sequence(1000).expect("address space");
        extend(&cpu, &mut first, 900);
        let second = first.fork().expect("memory");
        assert_eq!(first.rows_in_common(&second, layer), 0, "{policy}");
    }
}

#[test]
fn a_prefix_is_shared_by_a_donor_in_the_middle_of_a_step() {
    let cpu = cpu();
    for policy in POLICIES {
        let mut donor = cache(policy).sequence(400).expect("address space");
        extend(&cpu, &mut donor, 100);
        donor.prepare(30).expect("room");
        let mut shared = donor.share_prefix(90).expect("memory");
        let rows: Vec<usize> = (100..130).collect();
        store(&cpu, &mut donor, &rows);
        donor.accept(30);
        assert_rows(&donor);
        assert_rows(&shared);
        extend(&cpu, &mut shared, 200);
        assert_rows(&shared);
        assert_rows(&donor);
    }
}

#[test]
fn sharing_a_prefix_takes_two_batches_for_all_layers_and_a_third_for_the_rest() {
    let cpu = cpu();
    for policy in ["sparse", "sparse:head-major", "sparse:interleaved=2"] {
        let cache = cache(policy);
        let mut donor = cache.sequence(400).expect("address space");
        extend(&cpu, &mut donor, 300);
        let batches = || cache.ledger().counts.batches;
        let before = batches();
        let first = donor.share_prefix(300).expect("pages");
        assert_eq!(batches() - before, 3, "seal, map, copy");
        let before = batches();
        let second = donor.share_prefix(300).expect("pages");
        assert_eq!(batches() - before, 2, "sealed already");
        drop((first, second));
    }
}

#[test]
fn rows_that_are_not_there_cannot_be_shared_or_released() {
    let cpu = cpu();
    let mut donor = cache("sparse").sequence(100).expect("address space");
    extend(&cpu, &mut donor, 50);
    donor.prepare(10).expect("room");
    for result in [donor.share_prefix(51).map(drop), donor.release_before(51)] {
        assert!(matches!(
            result,
            Err(KvError::NotHeld {
                requested: 51,
                held: 50
            })
        ));
    }
}

#[test]
fn writing_after_truncation_into_a_shared_page_leaves_the_other_sequence_alone() {
    let cpu = cpu();
    for policy in POLICIES {
        let mut first = cache(policy).sequence(400).expect("address space");
        extend(&cpu, &mut first, 300);
        let second = first.fork().expect("memory");
        for (len, tag) in [(100, 5000), (100, 6000), (20, 7000)] {
            first.truncate(len).expect("pages go back");
            let tags: Vec<usize> = (0..len).chain(tag..tag + 60).collect();
            append(&cpu, &mut first, &tags[len..]);
            assert_tags(&first, &tags);
            assert_rows(&second);
            first.truncate(len).expect("pages go back");
            append(&cpu, &mut first, &(len..300).collect::<Vec<_>>());
        }
    }
}

#[test]
fn a_copy_on_write_is_one_page_a_buffer_and_is_counted() {
    let cpu = cpu();
    let mut first = cache("sparse").sequence(400).expect("address space");
    extend(&cpu, &mut first, 300);
    let second = first.fork().expect("pages");
    first.truncate(100).expect("pages go back");
    assert_eq!(first.report().copied_bytes, 0);
    extend(&cpu, &mut first, 1);
    assert_eq!(first.report().copied_bytes, 2 * LAYERS * PAGE);
    drop(second);
    first.truncate(50).expect("pages go back");
    extend(&cpu, &mut first, 1);
    assert_eq!(
        first.report().copied_bytes,
        2 * LAYERS * PAGE,
        "a page nobody else has is written in place"
    );
}

#[test]
fn a_window_gives_back_the_pages_behind_it() {
    let cpu = cpu();
    let cache = cache("sparse");
    let mut sequence = cache.sequence(4000).expect("address space");
    for _ in 0..40 {
        extend(&cpu, &mut sequence, 100);
        let start = sequence.len().saturating_sub(150);
        sequence.release_before(start).expect("pages go back");
        assert_eq!(sequence.first_held(Layer(0)), start);
        assert_rows(&sequence);
        let held = sequence.report().committed_bytes;
        assert!(held <= bound(150), "{held}");
    }
    let peak = sequence.report().peak_committed_bytes;
    assert!(peak <= bound(250), "{peak}");
}

#[test]
fn a_window_gives_back_the_blocks_behind_it() {
    let cpu = cpu();
    let cache = cache("paged");
    let block = (16 * GEOMETRY.bytes_per_token()).next_multiple_of(cache.page_bytes());
    let mut sequence = cache.sequence(400).expect("address space");
    extend(&cpu, &mut sequence, 300);
    for (position, blocks) in [(0, 19), (15, 19), (16, 18), (200, 7), (300, 1)] {
        sequence.release_before(position).expect("blocks go back");
        assert_eq!(sequence.report().committed_bytes, blocks * block);
        assert_rows(&sequence);
    }
}

#[test]
fn released_rows_stay_gone_until_the_sequence_starts_again() {
    let cpu = cpu();
    for policy in POLICIES {
        let mut sequence = cache(policy).sequence(400).expect("address space");
        extend(&cpu, &mut sequence, 300);
        sequence.release_before(200).expect("pages go back");
        sequence.release_before(100).expect("nothing to do");
        assert_eq!(sequence.first_held(Layer(0)), 200);
        for result in [sequence.truncate(150), sequence.share_prefix(199).map(drop)] {
            assert!(matches!(result, Err(KvError::Released { first: 200, .. })));
        }
        let fork = sequence.fork().expect("memory");
        assert_rows(&fork);
        sequence.truncate(200).expect("the window is empty");
        extend(&cpu, &mut sequence, 50);
        assert_rows(&sequence);
        sequence.truncate(0).expect("everything goes back");
        extend(&cpu, &mut sequence, 350);
        assert_eq!(sequence.first_held(Layer(0)), 0);
        assert_rows(&sequence);
        assert_rows(&fork);
    }
}

/// A window that has passed leaves holes where the sequence began, so what a start from the
/// beginning gives back is not what a truncation to any other length does.
#[test]
fn a_sequence_truncated_to_nothing_after_a_window_is_as_good_as_new() {
    let cpu = cpu();
    for policy in POLICIES {
        let cache = cache(policy);
        let mut sequence = cache.sequence(400).expect("address space");
        for window in [250, 300] {
            extend(&cpu, &mut sequence, 300);
            let fork = sequence.fork().expect("memory");
            sequence.release_before(window).expect("pages go back");
            sequence.truncate(0).expect("everything goes back");
            assert_eq!((sequence.first_held(Layer(0)), sequence.len()), (0, 0));
            let report = sequence.report();
            match policy.starts_with("sparse") || policy.starts_with("paged") {
                true => assert_eq!(report.committed_bytes, 0, "{policy}"),
                false => assert_eq!(report.shared_bytes, 0, "{policy}"),
            }
            assert_rows(&fork);
            extend(&cpu, &mut sequence, 200);
            assert_rows(&sequence);
            let again = sequence.fork().expect("memory");
            sequence.truncate(0).expect("everything goes back");
            assert_rows(&again);
        }
        let peak = sequence.report().peak_committed_bytes;
        if policy.starts_with("sparse:") || policy == "sparse" {
            assert!(peak <= bound(300 + 16), "{policy}: {peak}");
        }
    }
}

#[test]
fn a_fork_of_blocks_copies_the_rows_of_the_last_one() {
    let cpu = cpu();
    for (policy, rest) in [("paged", 300 % 16), ("paged:7", 300 % 7)] {
        let mut first = cache(policy).sequence(400).expect("address space");
        extend(&cpu, &mut first, 300);
        let fork = first.fork().expect("memory");
        let copied = fork.report().copied_bytes;
        assert_eq!(copied, rest * GEOMETRY.bytes_per_token(), "{policy}");
        assert_rows(&fork);
    }
}

#[test]
fn policies_that_cannot_share_copy_and_say_so() {
    let cpu = cpu();
    for policy in POLICIES {
        let mut first = cache(policy).sequence(400).expect("address space");
        extend(&cpu, &mut first, 300);
        let report = first.fork().expect("memory").report();
        let held = 300 * GEOMETRY.bytes_per_token();
        match SHARING.contains(&policy) {
            true => assert!(
                report.shared_bytes > 0 && report.copied_bytes < held,
                "{policy}"
            ),
            false => assert!(
                report.shared_bytes == 0 && report.copied_bytes >= held,
                "{policy}"
            ),
        }
    }
}
