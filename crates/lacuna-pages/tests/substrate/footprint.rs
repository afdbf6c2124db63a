//! The ledger against what macOS has this process pay for, each in a process of its own, so that nothing else is
//! counted.
#![expect(unsafe_code, reason = "the footprint is asked of the system")]

use lacuna_pages::{ByteLength, PoolConfig, VirtualPage};

use crate::children::succeeds_in_child;
use crate::support::{PAGE, assert_page, filled, host, pages, range};

/// Pages of the test, 100 MiB of them.
const PAGES: u64 = 1_600;

/// What the system's limits on memory are about: memory of this process that is dirty or compressed.
fn footprint() -> u64 {
    // SAFETY: a structure of integers, for which zeros are valid.
    let mut usage: libc::rusage_info_v2 = unsafe { std::mem::zeroed() };
    // SAFETY: of this process, into a structure of the version that is asked for.
    let code = unsafe {
        libc::proc_pid_rusage(
            libc::getpid(),
            libc::RUSAGE_INFO_V2,
            (&raw mut usage).cast(),
        )
    };
    assert_eq!(code, 0);
    usage.ri_phys_footprint
}

#[test]
fn memory_is_paid_for_once_and_not_after_it_was_given_back() {
    let test = "footprint::memory_is_paid_for_once_and_not_after_it_was_given_back";
    succeeds_in_child(test, || {
        // A tenth for tables and for what the system does beside.
        let is_about = |bytes: u64, expected: ByteLength| {
            let slack = pages(PAGES).get() / 10;
            assert!(
                bytes.abs_diff(expected.get()) < slack,
                "{bytes} instead of {expected}"
            );
        };
        let pool = host(PoolConfig::default());
        let before = footprint();
        let grown = || footprint().saturating_sub(before);
        let mut first = filled(&pool, PAGES, 0);
        is_about(grown(), pages(PAGES));
        first.seal(range(0, PAGES)).unwrap();
        let mut second = pool.reserve(pages(PAGES), "second").unwrap();
        second
            .share_from(&first, range(0, PAGES), VirtualPage::new(0))
            .unwrap();
        assert!(second.bytes(0..PAGES as usize * PAGE).is_ok());
        (0..PAGES).for_each(|page| assert_page(&second, page, page));
        is_about(grown(), pages(PAGES));

        // Every other page alone, so that no heap goes as a whole.
        drop(first);
        for page in (0..PAGES).step_by(2) {
            second.unmap(range(page, page + 1)).unwrap();
        }
        pool.trim();
        assert_eq!(pool.ledger().committed, pages(PAGES / 2));
        is_about(grown(), pages(PAGES / 2));
        for page in (1..PAGES).step_by(2) {
            assert_page(&second, page, page);
        }
        drop(second);
        pool.trim();
        is_about(grown(), ByteLength::ZERO);
    });
}
