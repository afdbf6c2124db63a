//! Sequences over real pages: contents, bytes and the number of device batches.

use lacuna_kv::{Geometry, KvCache, KvError, KvPolicy, Side};

use crate::support::{GEOMETRY, PAGE, POLICIES, assert_rows, cache, cpu, extend, pool, store};

/// K and V of every layer.
const BUFFERS: usize = 2 * GEOMETRY.layers;

#[test]
fn rows_keep_their_contents_while_the_sequence_grows() {
    let cpu = cpu();
    for policy in POLICIES {
        let mut sequence = cache(policy).sequence(300).expect("address space");
        for count in [1, 1, 40, 1, 128, 2, 127] {
            extend(&cpu, &mut sequence, count);
            assert_rows(&sequence);
        }
        assert_eq!(sequence.len(), 300);
    }
}

#[test]
fn committed_bytes_stay_within_one_page_per_buffer_of_the_rows() {
    let cpu = cpu();
    let mut sequence = cache("sparse").sequence(1 << 20).expect("address space");
    assert_eq!(
        sequence.report().committed_bytes,
        0,
        "an empty sequence holds address space only"
    );
    for _ in 0..200 {
        extend(&cpu, &mut sequence, 1);
        let report = sequence.report();
        let needed = sequence.len() * GEOMETRY.bytes_per_token();
        assert!(report.committed_bytes >= needed);
        assert!(report.committed_bytes - needed < BUFFERS * PAGE);
        assert_eq!(report.slack_bytes, report.committed_bytes - needed);
    }
}

#[test]
fn dense_commits_the_context_at_once() {
    let sequence = cache("dense").sequence(1000).expect("memory");
    let report = sequence.report();
    assert_eq!(report.dense_bytes, 1000 * GEOMETRY.bytes_per_token());
    assert!(report.committed_bytes >= report.dense_bytes);
    assert_eq!(report.committed_bytes, report.reserved_bytes);
}

#[test]
fn the_device_is_asked_once_per_boundary_crossed_not_once_per_token() {
    let cpu = cpu();
    let cache = cache("sparse");
    let mut sequence = cache.sequence(4000).expect("address space");
    let before = cache.ledger().counts.batches;
    for _ in 0..1000 {
        extend(&cpu, &mut sequence, 1);
    }
    let batches = cache.ledger().counts.batches - before;
    let boundaries = (1000 * GEOMETRY.row_bytes(Side::Key)).div_ceil(cache.page_bytes());
    assert_eq!(batches, boundaries as u64);
}

#[test]
fn rows_that_were_not_accepted_are_written_again() {
    let cpu = cpu();
    let mut sequence = cache("sparse").sequence(100).expect("address space");
    extend(&cpu, &mut sequence, 5);
    sequence.prepare(3).expect("room");
    store(&cpu, &mut sequence, &[900, 901, 902]);
    sequence.accept(0);
    extend(&cpu, &mut sequence, 3);
    assert_rows(&sequence);
}

#[test]
fn truncating_gives_pages_back_and_keeps_the_rows_before() {
    let cpu = cpu();
    let mut sequence = cache("sparse").sequence(500).expect("address space");
    extend(&cpu, &mut sequence, 400);
    let before = sequence.report().committed_bytes;
    sequence.truncate(50).expect("pages go back");
    let needed = 50 * GEOMETRY.bytes_per_token();
    let after = sequence.report().committed_bytes;
    assert!(
        after < before && after - needed < BUFFERS * PAGE,
        "{before} -> {after}"
    );
    assert_rows(&sequence);
    extend(&cpu, &mut sequence, 300);
    assert_rows(&sequence);
}

#[test]
fn a_full_context_is_an_error_that_changes_nothing() {
    let cpu = cpu();
    let mut sequence = cache("sparse").sequence(10).expect("address space");
    extend(&cpu, &mut sequence, 8);
    let error = sequence.prepare(3).expect_err("two rows are left");
    assert!(matches!(
        error,
        KvError::ContextFull {
            capacity: 10,
            held: 8,
            requested: 3
        }
    ));
    extend(&cpu, &mut sequence, 2);
    assert_rows(&sequence);
}

#[test]
fn running_out_of_pages_is_an_error_that_changes_nothing() {
    let cpu = cpu();
    let policy = KvPolicy::default();
    let pool = pool(policy, Some(BUFFERS * 2 * PAGE));
    let cache = KvCache::over(pool, GEOMETRY, policy).expect("a cache");
    let mut sequence = cache.sequence(1000).expect("address space");
    extend(&cpu, &mut sequence, 60);
    let before = sequence.report();
    let error = sequence
        .prepare(60)
        .expect_err("three pages a buffer are over the limit");
    assert!(
        matches!(
            error,
            KvError::Pages(lacuna_pages::Error::OutOfPages { .. })
        ),
        "{error}"
    );
    assert_eq!(sequence.report(), before);
    extend(&cpu, &mut sequence, 20);
    assert_rows(&sequence);
}

#[test]
fn dropping_a_sequence_frees_its_pages_for_the_next() {
    let cpu = cpu();
    let cache = cache("sparse");
    let mut first = cache.sequence(500).expect("address space");
    extend(&cpu, &mut first, 500);
    let held = cache.ledger().committed;
    drop(first);
    let mut second = cache.sequence(500).expect("address space");
    extend(&cpu, &mut second, 500);
    assert_eq!(
        cache.ledger().committed,
        held,
        "the same pages are used again"
    );
    assert_rows(&second);
}

#[test]
fn absurd_shapes_are_refused() {
    let none = Geometry {
        layers: 0,
        ..GEOMETRY
    };
    assert!(matches!(
        KvCache::new(none, KvPolicy::default()),
        Err(KvError::EmptyGeometry { .. })
    ));
    let absurd = cache("sparse").sequence(usize::MAX);
    assert!(matches!(absurd, Err(KvError::ContextTooLarge { .. })));
}
