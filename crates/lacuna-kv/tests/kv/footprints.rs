//! The figures of the plan against those of the ledger.

use lacuna_kv::{Footprint, Geometry, KvCache, KvPolicy};
use lacuna_pages::PageSize;

use crate::support::{GEOMETRY, PAGE, POLICIES, WINDOWED, cpu, extend, pool};

const CAPACITY: usize = 1100;

#[test]
fn what_is_worked_out_is_what_the_ledger_says_at_every_token() {
    compare(&GEOMETRY);
}

#[test]
fn what_is_worked_out_for_windows_is_what_the_ledger_says_at_every_token() {
    compare(&WINDOWED);
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
            extend(&cpu, &mut sequence, 1);
        }
    }
}
