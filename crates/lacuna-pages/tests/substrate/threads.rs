//! Threads that share, copy, unmap and drop while others read the same physical pages.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use lacuna_pages::{ByteLength, VirtualPage};

use crate::support::{assert_page, filled, host, pages, range, small, write_page};

const PAGES: u64 = 24;

#[test]
fn readers_see_their_pages_whatever_other_owners_do() {
    let pool = host(small());
    let mut donor = filled(&pool, PAGES, 500);
    donor.seal(range(0, PAGES)).unwrap();
    let donor = Arc::new(donor);
    let done = Arc::new(AtomicBool::new(false));
    std::thread::scope(|scope| {
        let reader = Arc::clone(&donor);
        let stop = Arc::clone(&done);
        scope.spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                for page in 0..PAGES {
                    assert_page(&reader, page, 500 + page);
                }
            }
        });
        let workers: Vec<_> = (0..4u64)
            .map(|worker| {
                let donor = Arc::clone(&donor);
                let pool = pool.clone();
                scope.spawn(move || {
                    for round in 0..150u64 {
                        let start = (worker * 7 + round) % (PAGES - 8);
                        let mut own = pool.reserve(pages(16), "fork").unwrap();
                        own.share_from(&donor, range(start, start + 8), VirtualPage::new(2))
                            .unwrap();
                        let pins = own.pin(range(3, 5)).unwrap();
                        own.make_unique(range(4, 7)).unwrap();
                        write_page(&mut own, 4, worker << 32 | round);
                        own.unmap(range(2, 3)).unwrap();
                        own.ensure_mapped(0..2).unwrap();
                        write_page(&mut own, 0, round);
                        assert_page(&own, 4, worker << 32 | round);
                        assert_page(&own, 5, 500 + start + 3);
                        assert_page(&own, 9, 500 + start + 7);
                        assert_page(&own, 0, round);
                        drop(own);
                        drop(pins);
                    }
                })
            })
            .collect();
        let results: Vec<_> = workers.into_iter().map(|worker| worker.join()).collect();
        done.store(true, Ordering::Relaxed);
        assert!(results.iter().all(Result::is_ok));
    });
    pool.verify([&*donor]).unwrap();
    assert_eq!(pool.ledger().unique, pages(PAGES));
    drop(donor);
    pool.trim();
    assert_eq!(pool.ledger().committed, ByteLength::ZERO);
}
