//! When idle memory goes back: past the high watermark, when nothing is in use, and as the limit
//! asks for it, with whatever call a page comes free.

use lacuna_pages::{Buffer, ByteLength, Pool, Request, Share, Source, VirtualPage};

use crate::support::{Guise, PAGE, filled, host, pages, probed, range, small};

/// A buffer of a hundred pages, of which `idle` were given up.
fn with_idle(pool: &Pool, idle: u64) -> Buffer {
    let mut buffer = filled(pool, 100, 0);
    buffer.unmap(range(100 - idle, 100)).unwrap();
    buffer
}

#[test]
fn idle_memory_is_kept_up_to_the_high_watermark_and_then_down_to_the_low() {
    let pool = host(small());
    let mut buffer = with_idle(&pool, 32);
    assert_eq!(pool.ledger().idle, pages(32), "as much as may lie idle");
    buffer.unmap(range(67, 68)).unwrap();
    assert_eq!(pool.ledger().idle, small().low_watermark);
    assert_eq!(pool.ledger().committed, pages(67 + 8));
    buffer.truncate(pages(60)).unwrap();
    assert_eq!(pool.ledger().idle, pages(8 + 7), "far from the high one");
    pool.verify([&buffer]).unwrap();
}

#[test]
fn shared_pages_and_pages_that_only_pins_keep_are_in_use() {
    let pool = host(small());
    let mut buffer = filled(&pool, 30, 0);
    buffer.seal(range(0, 10)).unwrap();
    let mut other = pool.reserve(pages(10), "").unwrap();
    other
        .share_from(&buffer, range(0, 10), VirtualPage::new(0))
        .unwrap();
    buffer.unmap(range(10, 30)).unwrap();
    assert_eq!(pool.ledger().shared, pages(10));
    assert_eq!(pool.ledger().idle, pages(20), "far from the high watermark");
    let pins = buffer.pin(range(0, 10)).unwrap();
    drop((buffer, other));
    assert_eq!(pool.ledger().pinned_only, pages(10));
    assert_eq!(pool.ledger().idle, pages(20));
    drop(pins);
    assert_eq!(pool.ledger().idle, small().low_watermark);
}

#[test]
fn what_lies_idle_when_nothing_is_in_use_is_the_low_watermark() {
    let pool = host(small());
    drop(filled(&pool, 20, 0));
    assert_eq!(pool.ledger().committed, small().low_watermark);
    drop(filled(&pool, 5, 0));
    assert_eq!(pool.ledger().committed, small().low_watermark);
}

/// The last pin of a page that no buffer maps is all that keeps it, so dropping it is a giving back
/// like any other.
#[test]
fn a_dropped_pin_gives_back_what_the_limit_asks_for() {
    let pool = host(small());
    let mut buffer = filled(&pool, 10, 0);
    buffer.seal(range(0, 10)).unwrap();
    let mut pins = buffer.pin(range(0, 10)).unwrap();
    let rest = filled(&pool, 1, 0);
    drop(buffer);
    pool.set_limit(Some(pages(4))).unwrap();
    assert_eq!(pool.ledger().owed, pages(7));
    for left in (3..10).rev() {
        drop(pins.pop());
        let ledger = pool.ledger();
        assert_eq!((ledger.committed, ledger.idle), (pages(left + 1), pages(0)));
        assert_eq!(ledger.owed, pages((left + 1).saturating_sub(4)));
    }
    drop(pins);
    let ledger = pool.ledger();
    assert_eq!((ledger.committed, ledger.idle), (pages(4), pages(3)));
    pool.verify([&rest]).unwrap();
}

#[test]
fn a_dropped_pin_gives_back_what_is_past_the_high_watermark() {
    let pool = host(small());
    let mut buffer = filled(&pool, 40, 0);
    let rest = filled(&pool, 1, 0);
    buffer.seal(range(0, 40)).unwrap();
    let mut pins = buffer.pin(range(0, 40)).unwrap();
    drop(buffer);
    pins.truncate(8);
    assert_eq!(pool.ledger().idle, pages(32));
    pins.truncate(7);
    assert_eq!(pool.ledger().idle, small().low_watermark);
    pool.verify([&rest]).unwrap();
}

#[test]
fn a_copy_on_write_that_frees_the_old_page_gives_it_back() {
    let pool = host(small());
    let mut first = filled(&pool, 4, 0);
    first.seal(range(0, 4)).unwrap();
    let mut second = pool.reserve(pages(4), "").unwrap();
    let pins = first.pin(range(0, 4)).unwrap();
    let (target, at) = (&mut second, VirtualPage::new(0));
    let source = Source::Pins(&pins);
    pool.share(&mut [Share { source, target, at }]).unwrap();
    pool.set_limit(Some(pages(8))).unwrap();
    first.make_unique(range(0, 4)).unwrap();
    drop(pins);
    pool.set_limit(Some(pages(4))).unwrap();
    assert_eq!(pool.ledger().owed, pages(4));
    let before = pool.ledger();
    second.make_unique(range(0, 4)).unwrap();
    assert_eq!(pool.ledger().owed, before.owed, "one's own already");
    drop(second);
    assert_eq!(pool.ledger().owed, ByteLength::ZERO);
    assert_eq!(pool.ledger().committed, pages(4));
}

/// Memory that comes by the heap goes by the heap: only those that are empty, and among them no
/// more than leaves the low watermark.
#[test]
fn whole_heaps_go_back_and_none_of_them_half() {
    let (pool, handle) = probed(small(), Guise::PerHeap);
    let mut buffer = pool.reserve(pages(100), "").unwrap();
    pool.ensure_mapped(&mut [Request::new(&mut buffer, 0..80 * PAGE)])
        .unwrap();
    assert_eq!(pool.ledger().committed, pages(80));
    buffer.unmap(range(1, 80)).unwrap();
    let ledger = pool.ledger();
    assert_eq!(handle.log().committed(), ledger.committed);
    assert!(ledger.idle >= small().low_watermark, "{ledger:?}");
    assert!(
        ledger.idle < pages(8 + 16),
        "another heap could go: {ledger:?}"
    );
    pool.trim();
    assert_eq!(pool.ledger().committed, pages(16), "the one in use");
    assert_eq!(handle.log().committed(), pages(16));
    let counts = pool.ledger().counts;
    assert_eq!((counts.pages_committed, counts.pages_decommitted), (80, 64));
    pool.verify([&buffer]).unwrap();
}
