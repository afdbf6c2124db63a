//! Devices whose batches are done later: pages wait for their readers.

use lacuna_pages::device::{Fence, FenceState, Operation, Patience};
use lacuna_pages::{Error, Pages, PoolConfig, VirtualPage};

use crate::support::{Guise, PAGE, assert_page, filled, pages, probed, range, small};

#[test]
fn an_unmapped_page_is_not_used_again_before_its_fence() {
    let config = PoolConfig {
        limit: Some(pages(8)),
        ..small()
    };
    let (pool, handle) = probed(config, Guise::Queue);
    let mut buffer = filled(&pool, 8, 0);
    buffer.read_until(Fence(3));
    buffer.unmap(range(0, 4)).unwrap();
    assert_eq!(
        handle.log().batches.last().unwrap().1,
        Fence(3),
        "the unmap waits for the readers"
    );
    assert_eq!(pool.ledger().retiring, pages(4));
    let mut other = pool.reserve(pages(4), "").unwrap();
    assert!(matches!(
        other.ensure_mapped(0..PAGE).unwrap_err(),
        Error::OutOfPages { .. }
    ));
    pool.verify([&buffer, &other]).unwrap();
    handle.signal_everything();
    other.ensure_mapped(0..4 * PAGE).unwrap();
    assert_eq!(pool.ledger().retiring, pages(0));
    assert_page(&buffer, 4, 4);
    pool.verify([&buffer, &other]).unwrap();
}

#[test]
fn the_latest_of_all_readers_is_waited_for_however_they_were_told_of() {
    let (pool, handle) = probed(small(), Guise::Queue);
    let mut buffer = filled(&pool, 4, 0);
    for fence in [5, 9, 3] {
        buffer.read_until(Fence(fence));
    }
    buffer.unmap(range(0, 1)).unwrap();
    assert_eq!(handle.log().batches.last().unwrap().1, Fence(9));
    drop(buffer);
    assert_eq!(handle.log().releases, [Fence(9)]);
}

#[test]
fn a_batch_for_several_buffers_waits_for_the_readers_of_all() {
    for (first, second) in [(4, 7), (7, 4)] {
        let (pool, handle) = probed(small(), Guise::Queue);
        let mut buffers = [filled(&pool, 2, 0), filled(&pool, 2, 10)];
        buffers[0].read_until(Fence(first));
        buffers[1].read_until(Fence(second));
        let mut all = buffers
            .each_mut()
            .map(|buffer| Pages::new(buffer, range(0, 1)));
        pool.seal(&mut all).unwrap();
        assert_eq!(handle.log().batches.last().unwrap().1, Fence(7));
        pool.unmap(&mut all).unwrap();
        assert_eq!(handle.log().batches.last().unwrap().1, Fence(7));
    }
}

#[test]
fn a_dropped_buffer_retires_its_pages_and_trim_waits_for_them() {
    let (pool, handle) = probed(small(), Guise::Queue);
    let buffer = filled(&pool, 5, 0);
    drop(buffer);
    assert_eq!(pool.ledger().retiring, pages(5));
    pool.trim();
    assert_eq!(pool.ledger().committed, pages(0));
    assert_eq!(handle.log().heaps, 0);
}

#[test]
fn the_report_carries_the_fence_of_the_batch() {
    let (pool, handle) = probed(small(), Guise::Queue);
    let mut buffer = pool.reserve(pages(4), "").unwrap();
    let report = buffer.ensure_mapped(0..PAGE).unwrap();
    assert_eq!(
        pool.wait(report.fence, Patience::Poll),
        Ok(FenceState::Pending)
    );
    handle.signal_everything();
    assert_eq!(
        pool.wait(report.fence, Patience::Poll),
        Ok(FenceState::Signalled)
    );
    assert_eq!(buffer.ensure_mapped(0..PAGE).unwrap().fence, Fence::DONE);
}

#[test]
fn a_copy_on_write_retires_the_old_page_after_its_last_owner_only() {
    let (pool, handle) = probed(small(), Guise::Queue);
    let mut first = filled(&pool, 2, 0);
    first.seal(range(0, 2)).unwrap();
    let mut second = pool.reserve(pages(2), "").unwrap();
    second
        .share_from(&first, range(0, 2), VirtualPage::new(0))
        .unwrap();
    second.make_unique(range(0, 1)).unwrap();
    assert_eq!(pool.ledger().retiring, pages(0));
    first.unmap(range(0, 1)).unwrap();
    assert_eq!(pool.ledger().retiring, pages(1));
    handle.signal_everything();
    assert_page(&second, 0, 0);
    pool.verify([&first, &second]).unwrap();
}

#[test]
fn neighbours_in_both_spaces_are_one_operation() {
    let (pool, handle) = probed(small(), Guise::Plain);
    let mut buffer = pool.reserve(pages(12), "").unwrap();
    buffer.ensure_mapped(0..12 * PAGE).unwrap();
    let kinds = |batch: &[Operation]| -> Vec<&'static str> {
        batch
            .iter()
            .map(|operation| match operation {
                Operation::Commit { .. } => "commit",
                Operation::Map { .. } => "map",
                Operation::Unmap { .. } => "unmap",
                Operation::Protect { .. } => "protect",
                Operation::Copy { .. } => "copy",
                Operation::Zero { .. } => "zero",
                Operation::Decommit { .. } => "decommit",
            })
            .collect()
    };
    assert_eq!(kinds(&handle.log().batches[0].0), ["commit", "map"]);
    assert_eq!(pool.ledger().counts.map_calls, 1);
    buffer.seal(range(2, 9)).unwrap();
    assert_eq!(kinds(&handle.log().batches[1].0), ["protect"]);
    buffer.unmap(range(0, 11)).unwrap();
    assert_eq!(kinds(&handle.log().batches[2].0), ["unmap"]);
}

#[test]
fn a_pin_that_outlives_the_mappings_still_waits_for_their_readers() {
    let (pool, handle) = probed(small(), Guise::Queue);
    let mut buffer = filled(&pool, 2, 0);
    buffer.seal(range(0, 2)).unwrap();
    let pins = buffer.pin(range(0, 1)).unwrap();
    buffer.unmap(range(0, 1)).unwrap();
    assert_eq!(pool.ledger().pinned_only, pages(1));
    drop(pins);
    assert_eq!(pool.ledger().retiring, pages(1));
    handle.signal_everything();
    pool.set_limit(None).unwrap();
    assert_eq!(
        (pool.ledger().retiring, pool.ledger().idle),
        (pages(0), pages(1))
    );
    pool.verify([&buffer]).unwrap();
}
