//! When idle memory goes back: past the high watermark, when nothing is in use, and as the limit
//! asks for it, with whatever call a page comes free.

use lacuna_pages::device::{HeapId, Operation};
use lacuna_pages::{Buffer, ByteLength, Pool, Request, Share, Source, VirtualPage};

use crate::support::{
    FEW_MAPPINGS, Failing, Guise, Handle, PAGE, filled, host, pages, probed, range, small,
};

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

/// The pages that the device was told to give back, by heap.
fn decommitted(handle: &Handle) -> Vec<(HeapId, u64)> {
    let log = handle.log();
    let operations = log.batches.iter().flat_map(|(batch, _)| batch);
    let given_back = operations.filter_map(|operation| match operation {
        Operation::Decommit { place, length } => Some((place.heap, length.get() / PAGE as u64)),
        _ => None,
    });
    given_back.collect()
}

/// The heaps that were committed to, in the order of their first pages.
fn heap_of_each(handle: &Handle) -> Vec<HeapId> {
    let log = handle.log();
    let operations = log.batches.iter().flat_map(|(batch, _)| batch);
    let mut heaps: Vec<HeapId> = operations
        .filter_map(|operation| match operation {
            Operation::Commit { place, .. } => Some(place.heap),
            _ => None,
        })
        .collect();
    heaps.dedup();
    heaps
}

#[test]
fn a_lowered_limit_takes_what_it_asks_for_and_no_more() {
    let (pool, handle) = probed(small(), Guise::Plain);
    // One heap, with idle pages in two places.
    let mut buffer = filled(&pool, 16, 0);
    buffer.unmap(range(2, 6)).unwrap();
    buffer.unmap(range(9, 13)).unwrap();
    assert_eq!((pool.ledger().idle, pool.ledger().heaps), (pages(8), 1));
    pool.set_limit(Some(pages(13))).unwrap();
    pool.set_limit(Some(pages(10))).unwrap();
    assert_eq!(
        (pool.ledger().idle, pool.ledger().committed),
        (pages(2), pages(10))
    );
    let lengths: Vec<u64> = decommitted(&handle)
        .iter()
        .map(|&(_, pages)| pages)
        .collect();
    assert_eq!(lengths, [3, 1, 2], "the last first");
    pool.verify([&buffer]).unwrap();
}

#[test]
fn idle_pages_of_the_heap_with_the_fewest_owners_go_first() {
    // Pages of a heap each that are in use and that lie idle, and which heap gives its own back.
    let cases = [
        ([(12, 4), (2, 8)], 1),
        ([(4, 10), (6, 2)], 0),
        ([(8, 2), (9, 7)], 0),
    ];
    for (heaps, expected) in cases {
        let (pool, handle) = probed(small(), Guise::Plain);
        let mut buffers = heaps.map(|_| filled(&pool, 16, 0));
        let ids = heap_of_each(&handle);
        for (buffer, (used, idle)) in buffers.iter_mut().zip(heaps) {
            // What is neither has to go first, while nothing else lies idle.
            buffer.unmap(range(used + idle, 16)).unwrap();
        }
        pool.trim();
        for (buffer, (used, idle)) in buffers.iter_mut().zip(heaps) {
            buffer.unmap(range(used, used + idle)).unwrap();
        }
        let before = decommitted(&handle).len();
        let committed = pool.ledger().committed.get() / PAGE as u64;
        pool.set_limit(Some(pages(committed - 1))).unwrap();
        assert_eq!(decommitted(&handle)[before..], [(ids[expected], 1)]);
        pool.verify(&buffers).unwrap();
    }
}

#[test]
fn near_the_limit_of_mappings_scattered_memory_is_traded_for_memory_in_one_piece() {
    let (pool, _) = probed(small(), Guise::FewMappings);
    let mut scattered = filled(&pool, 48, 0);
    // Every third page lies idle, and each of them ends a mapping and begins another.
    for page in (0..48).step_by(3) {
        scattered.unmap(range(page, page + 1)).unwrap();
    }
    let before = pool.ledger();
    assert_eq!(before.idle, pages(16));
    assert!(before.regions > FEW_MAPPINGS / 2);
    // Four pages may be committed besides; ten are needed.
    let limit = ByteLength::new(before.committed.get() + pages(4).get());
    pool.set_limit(Some(limit)).unwrap();
    let whole = filled(&pool, 10, 100);
    let after = pool.ledger();
    assert_eq!(after.committed, limit);
    assert_eq!(
        after.idle,
        pages(16 - 6),
        "no more was given back than is missing"
    );
    assert!(after.regions <= before.regions + 3, "{before:?} {after:?}");
    pool.verify([&scattered, &whole]).unwrap();
}

#[test]
fn far_from_the_limit_of_mappings_idle_memory_is_used_where_it_lies() {
    let (pool, _) = probed(small(), Guise::Plain);
    let mut scattered = filled(&pool, 48, 0);
    for page in (0..48).step_by(3) {
        scattered.unmap(range(page, page + 1)).unwrap();
    }
    let before = pool.ledger();
    pool.set_limit(Some(before.committed)).unwrap();
    let other = filled(&pool, 10, 100);
    let after = pool.ledger();
    assert_eq!(after.idle, pages(16 - 10));
    assert_eq!(after.counts.pages_committed, before.counts.pages_committed);
    assert_eq!(after.counts.pages_decommitted, 0);
    pool.verify([&scattered, &other]).unwrap();
}

/// A heap without idle pages has nothing to give back, however few of its pages are in use.
#[test]
fn the_device_is_asked_for_nothing_that_is_not_there() {
    let (pool, handle) = probed(small(), Guise::Plain);
    let few = filled(&pool, 4, 0);
    let mut many = filled(&pool, 16, 100);
    many.unmap(range(10, 16)).unwrap();
    pool.set_limit(Some(pages(4 + 10 + 1))).unwrap();
    assert_eq!(pool.ledger().idle, pages(1));
    // Nor is there anything to undo of a batch whose first operation fails.
    let mut other = pool.reserve(pages(4), "other").unwrap();
    handle.fail(Failing::Once(0));
    other.ensure_mapped(0..PAGE).unwrap_err();
    other.ensure_mapped(0..PAGE).unwrap();
    let log = handle.log();
    assert!(log.batches.iter().all(|(batch, _)| !batch.is_empty()));
    drop(log);
    pool.verify([&few, &many, &other]).unwrap();
}

#[test]
fn what_is_set_aside_for_a_growing_buffer_stays_so_while_other_memory_goes_back() {
    let pool = host(small());
    let mut growing = pool.reserve(pages(16), "growing").unwrap();
    growing.ensure_mapped(0..PAGE).unwrap();
    let mut other = filled(&pool, 16, 100);
    other.unmap(range(4, 10)).unwrap();
    pool.set_limit(Some(pages(1 + 10))).unwrap();
    assert_eq!((pool.ledger().idle, pool.ledger().heaps), (pages(0), 2));
    pool.set_limit(None).unwrap();
    growing.ensure_mapped(0..2 * PAGE).unwrap();
    assert_eq!(pool.ledger().heaps, 2, "next to its first page");
    pool.verify([&growing, &other]).unwrap();
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
