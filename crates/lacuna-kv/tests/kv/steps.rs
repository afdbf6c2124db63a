//! Sequences over real pages: contents, bytes and the number of device batches.

use lacuna_kv::{Geometry, KvCache, KvError, KvPolicy};
use lacuna_pages::device::BatchCost;
use lacuna_pages::faults::{Completion, FaultyDevice};
use lacuna_pages::{ByteLength, HostDevice, PageSize, Pool, PoolConfig};

use crate::support::{
    GEOMETRY, LAYERS, PAGE, POLICIES, ROW_BYTES, assert_rows, cache, cpu, extend, pool, store,
};

/// K and V of every layer.
const BUFFERS: usize = 2 * LAYERS;

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
fn pages_are_mapped_once_and_a_token_that_begins_a_page_maps_no_more_than_its_neighbours() {
    let cpu = cpu();
    let cache = cache("sparse");
    let mut sequence = cache.sequence(4000).expect("address space");
    extend(&cpu, &mut sequence, 1);
    let counts = || cache.ledger().counts;
    let start = counts();
    for _ in 0..1000 {
        let before = counts();
        extend(&cpu, &mut sequence, 1);
        assert!(counts().batches - before.batches <= 1);
        let rows_of_two_tokens = 2 * GEOMETRY.bytes_per_token();
        let fair = rows_of_two_tokens.div_ceil(cache.page_bytes()) as u64;
        assert!(counts().pages_mapped - before.pages_mapped <= fair);
    }
    let pages = (1000 * ROW_BYTES).div_ceil(cache.page_bytes()) * BUFFERS;
    let mapped = counts().pages_mapped - start.pages_mapped;
    assert!(
        (pages - BUFFERS..=pages).contains(&(mapped as usize)),
        "{mapped} of {pages}"
    );
    assert_eq!(counts().pages_unmapped, start.pages_unmapped);
}

#[test]
fn what_is_mapped_ahead_does_not_cost_a_token_its_place() {
    let cpu = cpu();
    let policy = KvPolicy::default();
    for cost in [BatchCost::Operations, BatchCost::Call] {
        let pool = pool_where(cost, Some(BUFFERS * 2 * PAGE));
        let cache = KvCache::over(pool, GEOMETRY.clone(), policy).expect("a cache");
        let mut sequence = cache.sequence(1000).expect("address space");
        for _ in 0..2 * PAGE / ROW_BYTES {
            extend(&cpu, &mut sequence, 1);
        }
        assert_rows(&sequence);
        let error = sequence.prepare(1).expect_err("every page is full");
        assert!(matches!(error, KvError::Pages(_)), "{error}");
    }
}

/// A pool of host pages whose calls cost what `cost` says.
fn pool_where(cost: BatchCost, limit: Option<usize>) -> Pool {
    let host = HostDevice::new().expect("a host device");
    let (device, _) = FaultyDevice::new(host, Completion::Immediate);
    let config = PoolConfig {
        page_size: PageSize::new(PAGE as u64).expect("a page size"),
        limit: limit.map(|limit| ByteLength::new(limit as u64)),
        ..PoolConfig::default()
    };
    Pool::new(device.with_batch_cost(cost), config).expect("a pool")
}

#[test]
fn where_a_call_costs_more_than_its_pages_there_is_one_in_eight_tokens_at_most() {
    let cpu = cpu();
    for policy in ["sparse", "sparse:interleaved=1", "sparse:interleaved=3"] {
        let mut calls = Vec::new();
        for cost in [BatchCost::Operations, BatchCost::Call] {
            let policy = policy.parse().expect("a policy");
            let pool = pool_where(cost, None);
            let cache = KvCache::over(pool.clone(), GEOMETRY.clone(), policy).expect("a cache");
            let mut sequence = cache.sequence(600).expect("address space");
            extend(&cpu, &mut sequence, 21);
            let (mut grown, mut last): (usize, Option<usize>) = (0, None);
            for token in 0..400 {
                let before = cache.ledger().counts.batches;
                extend(&cpu, &mut sequence, 1);
                let batches = cache.ledger().counts.batches - before;
                assert!(batches <= 1, "one call for all buffers");
                if batches > 0 {
                    grown += 1;
                    if let (BatchCost::Call, Some(last)) = (cost, last) {
                        assert!(token - last >= 8, "{policy}: tokens {last} and {token}");
                    }
                    last = Some(token);
                }
            }
            calls.push(grown);
            assert_rows(&sequence);
            // What lies ahead is in the books like everything else, and goes with the rest.
            let report = sequence.report();
            assert_eq!(
                cache.ledger().committed.get(),
                report.committed_bytes as u64
            );
            let ahead = report.committed_bytes - sequence.len() * GEOMETRY.bytes_per_token();
            assert!(ahead < BUFFERS * PAGE + 8 * GEOMETRY.bytes_per_token());
            let mut fork = sequence.fork().expect("memory");
            extend(&cpu, &mut fork, 9);
            assert_rows(&fork);
            sequence.truncate(100).expect("pages go back");
            extend(&cpu, &mut sequence, 30);
            assert_rows(&sequence);
            drop((sequence, fork));
            pool.verify([]).expect("the books are right");
            pool.trim();
            assert_eq!(cache.ledger().committed, ByteLength::ZERO);
        }
        assert!(calls[1] <= calls[0], "{policy}: {calls:?}");
    }
}

/// Tokens of more than half a page, as layers have that lie side by side.
#[test]
fn tokens_of_nearly_a_page_would_need_a_call_each() {
    let geometry = Geometry::uniform(24, 2, 12, GEOMETRY.elements());
    let policy = "sparse:interleaved=24".parse().expect("a policy");
    let calls = |cost| {
        let cache = KvCache::over(pool_where(cost, None), geometry.clone(), policy);
        let cache = cache.expect("a cache");
        let mut sequence = cache.sequence(600).expect("address space");
        for _ in 0..400 {
            sequence.prepare(1).expect("room");
            sequence.accept(1);
        }
        cache.ledger().counts.batches
    };
    let (each, few) = (calls(BatchCost::Operations), calls(BatchCost::Call));
    assert!(each > 200, "{each}");
    assert!(few <= 400 / 8, "{few}");
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
    let cache = KvCache::over(pool, GEOMETRY.clone(), policy).expect("a cache");
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
    let none = Geometry::uniform(0, 2, 12, GEOMETRY.elements());
    assert!(matches!(
        KvCache::new(none, KvPolicy::default()),
        Err(KvError::EmptyGeometry)
    ));
    let absurd = cache("sparse").sequence(usize::MAX);
    assert!(matches!(absurd, Err(KvError::ContextTooLarge { .. })));
}

#[test]
fn a_limit_holds_for_all_sequences_until_it_is_raised() {
    for name in POLICIES {
        let cache = cache(name);
        assert_eq!(Ok(cache.policy()), name.parse());
        assert_eq!(*cache.geometry(), *GEOMETRY);
        let long = || {
            let mut sequence = cache.sequence(5000)?;
            sequence.prepare(5000).map(|()| sequence)
        };
        assert!(cache.set_limit(ByteLength::ZERO).is_err(), "no page at all");
        cache.set_limit(ByteLength::mebibytes(1)).expect("a limit");
        let error = long().expect_err("two mebibytes too many");
        let refused = match error {
            KvError::NotNow {
                needed, available, ..
            } => name.starts_with("paged") && available < needed && available <= (1 << 20) / 4096,
            KvError::Pages(lacuna_pages::Error::OutOfPages { .. }) => !name.starts_with("paged"),
            _ => false,
        };
        assert!(refused, "{name}: {error}");
        cache.set_limit(ByteLength::mebibytes(16)).expect("a limit");
        long().expect(name);
    }
}

/// A step that was begun is forgotten with the tokens before it: what it prepared is no row.
#[test]
fn truncating_in_the_middle_of_a_step_ends_the_step() {
    let cpu = cpu();
    for name in POLICIES {
        let mut sequence = cache(name).sequence(100).expect("memory");
        extend(&cpu, &mut sequence, 50);
        sequence.prepare(7).expect("room");
        assert_eq!(sequence.prepared(), 7);
        sequence.truncate(20).expect("pages go back");
        assert_eq!((sequence.len(), sequence.prepared()), (20, 0));
        assert_rows(&sequence);
        extend(&cpu, &mut sequence, 60);
        assert_rows(&sequence);
        assert!(!sequence.is_empty());
        sequence.truncate(0).expect("pages go back");
        assert!(sequence.is_empty());
    }
}

/// After a long prompt most buffers want their next page at once. A token takes its share of them, so
/// that none is slower than what was promised.
#[test]
fn catching_up_with_what_is_mapped_ahead_is_spread_over_tokens() {
    // Twice the pages of a token, and one: tokens of less than a page, and of less than two.
    for (layers, share) in [(3, 3), (24, 5)] {
        let geometry = Geometry::uniform(layers, 2, 12, GEOMETRY.elements());
        let policy = KvPolicy::default();
        let cache = KvCache::over(pool(policy, None), geometry, policy).expect("a cache");
        let mut sequence = cache.sequence(1000).expect("address space");
        // All but a thirtieth of the eighth page of each buffer.
        sequence.prepare(340).expect("room");
        sequence.accept(340);
        let before = cache.ledger().counts.pages_mapped;
        sequence.prepare(1).expect("room");
        let mapped = cache.ledger().counts.pages_mapped - before;
        assert_eq!(mapped, share, "{layers} layers");
    }
}

#[test]
fn every_policy_works_on_pages_of_the_host_too() {
    let cpu = cpu();
    for name in POLICIES {
        let host = pool(KvPolicy::default(), None);
        let policy = name.parse().expect("a policy");
        let cache = KvCache::over(host, GEOMETRY.clone(), policy).expect("a cache");
        let mut sequence = cache.sequence(400).expect("memory");
        extend(&cpu, &mut sequence, 300);
        let mut fork = sequence.fork().expect("memory");
        extend(&cpu, &mut fork, 50);
        drop(sequence);
        assert_rows(&fork);
    }
}

/// A block pool lends blocks by number: a sequence that is dropped hands its numbers back too.
#[test]
fn blocks_of_dropped_sequences_are_lent_again() {
    let cpu = cpu();
    let policy: KvPolicy = "paged".parse().expect("a policy");
    let block = (16 * GEOMETRY.bytes_per_token()).next_multiple_of(PAGE);
    let cache =
        KvCache::over(pool(policy, Some(10 * block)), GEOMETRY.clone(), policy).expect("a cache");
    for _ in 0..5 {
        let mut sequence = cache.sequence(160).expect("ten blocks");
        extend(&cpu, &mut sequence, 160);
        assert_rows(&sequence);
    }
}

/// A hundredth of the blocks, so that sequences which run find one for the next token.
#[test]
fn the_last_blocks_are_for_sequences_that_run() {
    let policy: KvPolicy = "paged".parse().expect("a policy");
    // Sixteen tokens of 576 bytes, in whole pages.
    let block = 3 * PAGE;
    let cache = KvCache::over(pool(policy, Some(100 * block)), GEOMETRY.clone(), policy);
    let mut sequence = cache
        .expect("a cache")
        .sequence(2000)
        .expect("address space");
    let refused = sequence.prepare(100 * 16);
    assert!(
        matches!(
            refused,
            Err(KvError::NotNow {
                needed: 100,
                available: 99,
                ..
            })
        ),
        "{refused:?}"
    );
    extend(&cpu(), &mut sequence, 99 * 16);
    extend(&cpu(), &mut sequence, 16);
    assert_rows(&sequence);
}
