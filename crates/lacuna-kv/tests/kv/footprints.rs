//! The figures of the plan against those of the ledger.

use lacuna_kv::{Footprint, Geometry, KvCache, KvPolicy};
use lacuna_pages::{PageSize, SystemMemory};

use crate::support::{GEOMETRY, PAGE, POLICIES, STATES, WINDOWED, cache, cpu, extend, pool};

const CAPACITY: usize = 1100;

#[test]
fn what_is_worked_out_is_what_the_ledger_says_at_every_token() {
    compare(&GEOMETRY);
}

#[test]
fn what_is_worked_out_for_windows_is_what_the_ledger_says_at_every_token() {
    compare(&WINDOWED);
}

#[test]
fn what_is_worked_out_for_states_is_what_the_ledger_says_at_every_token() {
    compare(&STATES);
}

fn compare(geometry: &Geometry) {
    let cpu = cpu();
    let page_size = PageSize::new(PAGE as u64).expect("a page size");
    for name in POLICIES {
        let policy: KvPolicy = name.parse().expect("a policy");
        let pool = pool(policy, None);
        let cache = KvCache::over(pool.clone(), geometry.clone(), policy).expect("a cache");
        let mut sequence = cache.sequence(CAPACITY).expect("address space");
        for tokens in 0..CAPACITY {
            let expected = policy
                .footprint(geometry, page_size, CAPACITY, tokens)
                .expect("a context that fits");
            let report = sequence.report();
            let found = Footprint {
                reserved_bytes: report.reserved_bytes,
                committed_bytes: report.committed_bytes,
                peak_committed_bytes: report.peak_committed_bytes,
                copied_bytes: report.copied_bytes,
                zeroed_bytes: report.zeroed_bytes,
                resizes: report.resizes,
            };
            assert_eq!(found, expected, "{name} at {tokens}");
            let mapped = pool.ledger().mapped.get() as usize;
            assert_eq!(
                mapped, expected.committed_bytes,
                "{name} at {tokens}, by the pool"
            );
            let peak = cache.sequence_peak_bytes(CAPACITY, tokens);
            assert_eq!(peak, expected.peak_committed_bytes as u64);
            extend(&cpu, &mut sequence, 1);
        }
        let buffers = sequence.buffers();
        let in_blocks = matches!(policy, KvPolicy::Paged { .. });
        assert_eq!(
            buffers.len() == usize::from(geometry.has_states()),
            in_blocks,
            "{name}: blocks are nobody's alone"
        );
        if !in_blocks {
            pool.verify(buffers).expect("all buffers there are");
        }
    }
}

#[test]
fn a_sequence_that_no_sequence_can_be_takes_nothing() {
    let cache = cache("sparse");
    assert_eq!(cache.sequence_peak_bytes(usize::MAX, usize::MAX), 0);
}

#[test]
fn only_pages_that_cannot_be_shared_are_anonymous_memory_of_the_process() {
    let cpu = cpu();
    for name in POLICIES {
        let policy: KvPolicy = name.parse().expect("a policy");
        let cache = KvCache::over(pool(policy, None), GEOMETRY.clone(), policy).expect("a cache");
        let mut sequence = cache.sequence(CAPACITY).expect("address space");
        extend(&cpu, &mut sequence, 1);
        let committed = cache.ledger().committed.get();
        assert!(committed > 0);
        let anonymous = if name.starts_with("sparse") {
            0
        } else {
            committed
        };
        assert_eq!(cache.anonymous_bytes(), anonymous, "{name}");
    }
}

#[test]
fn a_cache_of_its_own_takes_no_more_than_the_system_can_spare() {
    let limit = cache("sparse")
        .ledger()
        .limit
        .expect("Linux says what it has");
    let memory = SystemMemory::read();
    assert!(limit <= memory.limit.expect("as above"));
}
