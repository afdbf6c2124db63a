//! What every device must do, checked on the contents of pages.

use lacuna_pages::device::{Aliasing, Commitment};
use lacuna_pages::{
    Buffer, Error, MapReport, PageCount, Pages, PoolConfig, Recycle, Request, Share, Source,
    SwapError, VirtualPage,
};

use crate::support::{
    PAGE, assert_page, contents, every_pool, filled, is_graphics, pages, range, sharing_pools,
    small, write_page,
};

#[test]
fn fresh_memory_is_zero_and_pages_are_apart() {
    for pool in every_pool(small()) {
        let mut buffer = pool.reserve(pages(40), "").unwrap();
        buffer.ensure_mapped(0..40 * PAGE).unwrap();
        // A real graphics device hands out whatever its memory held before.
        if !is_graphics(&pool) {
            let bytes = contents(&buffer, 0..40 * PAGE);
            assert!(bytes.iter().all(|&byte| byte == 0));
        }
        for page in 0..40 {
            write_page(&mut buffer, page, page);
        }
        for page in 0..40 {
            assert_page(&buffer, page, page);
        }
        pool.verify([&buffer]).unwrap();
    }
}

#[test]
fn growing_in_any_order_keeps_what_is_there() {
    for pool in every_pool(small()) {
        let mut buffer = pool.reserve(pages(64), "").unwrap();
        for step in 0..64u64 {
            let page = step * 37 % 64;
            let start = page as usize * PAGE;
            buffer.ensure_mapped(start + 5..start + 6).unwrap();
            write_page(&mut buffer, page, 1_000 + page);
            pool.verify([&buffer]).unwrap();
        }
        for page in 0..64 {
            assert_page(&buffer, page, 1_000 + page);
        }
    }
}

#[test]
fn a_hole_is_an_error_and_never_memory() {
    for pool in every_pool(small()) {
        let mut buffer = filled(&pool, 8, 0);
        buffer.unmap(range(2, 4)).unwrap();
        let hole = Error::Hole {
            page: VirtualPage::new(2),
        };
        assert_eq!(buffer.bytes(PAGE..5 * PAGE).unwrap_err(), hole);
        assert_eq!(buffer.bytes_mut(3 * PAGE - 1..3 * PAGE).unwrap_err(), hole);
        assert_page(&buffer, 1, 1);
        assert_page(&buffer, 4, 4);
        buffer.ensure_mapped(0..8 * PAGE).unwrap();
        assert_page(&buffer, 1, 1);
        pool.verify([&buffer]).unwrap();
    }
}

#[test]
fn pages_used_again_are_zero_when_asked_for() {
    let config = PoolConfig {
        recycle: Recycle::Zeroed,
        ..small()
    };
    for pool in every_pool(config) {
        let mut buffer = filled(&pool, 24, 7);
        buffer.unmap(range(3, 20)).unwrap();
        let _ = pool.wait(
            lacuna_pages::device::Fence(u64::MAX),
            lacuna_pages::device::Patience::Block,
        );
        buffer.ensure_mapped(0..24 * PAGE).unwrap();
        let bytes = contents(&buffer, 3 * PAGE..20 * PAGE);
        assert!(
            bytes.iter().all(|&byte| byte == 0),
            "{}",
            pool.capabilities().name
        );
        assert_page(&buffer, 2, 9);
        assert_page(&buffer, 20, 27);
    }
}

#[test]
fn sealed_pages_are_read_and_not_written() {
    for pool in every_pool(small()) {
        let mut buffer = filled(&pool, 6, 50);
        buffer.seal(range(1, 4)).unwrap();
        buffer.seal(range(0, 2)).unwrap();
        let sealed = Error::Sealed {
            page: VirtualPage::new(3),
        };
        assert_eq!(
            buffer.bytes_mut(4 * PAGE - 1..5 * PAGE).unwrap_err(),
            sealed
        );
        for page in 0..6 {
            assert_page(&buffer, page, 50 + page);
        }
        write_page(&mut buffer, 4, 1);
        buffer.make_unique(range(2, 6)).unwrap();
        write_page(&mut buffer, 3, 2);
        assert_page(&buffer, 3, 2);
        assert_page(&buffer, 2, 52);
        assert_eq!(pool.ledger().counts.copies_on_write, 0);
        pool.verify([&buffer]).unwrap();
    }
}

#[test]
fn truncating_keeps_the_partial_page_and_forgets_the_rest() {
    for pool in every_pool(small()) {
        let mut buffer = filled(&pool, 9, 0);
        buffer
            .truncate(lacuna_pages::ByteLength::new(3 * PAGE as u64 + 1))
            .unwrap();
        assert_page(&buffer, 3, 3);
        assert_eq!(
            buffer.bytes(4 * PAGE..4 * PAGE + 1).unwrap_err(),
            Error::Hole {
                page: VirtualPage::new(4)
            }
        );
        assert_eq!(buffer.ledger().mapped, pages(4));
        buffer.truncate(pages(100)).unwrap();
        buffer.truncate(pages(0)).unwrap();
        assert_eq!(buffer.ledger().mapped, pages(0));
        pool.verify([&buffer]).unwrap();
    }
}

#[test]
fn swapping_out_and_in_keeps_contents_and_address() {
    for pool in every_pool(small()) {
        let mut buffer = filled(&pool, 8, 300);
        let address = buffer.bytes(0..1).map(<[u8]>::as_ptr);
        let mut store = Vec::new();
        buffer
            .swap_out(range(2, 7), |_, bytes| {
                store.push(bytes.to_vec());
                Ok::<(), ()>(())
            })
            .unwrap();
        let swapped = Error::Swapped {
            page: VirtualPage::new(2),
        };
        assert_eq!(buffer.bytes(0..8 * PAGE).unwrap_err(), swapped);
        assert_eq!(buffer.ensure_mapped(0..8 * PAGE).unwrap_err(), swapped);
        assert_eq!(buffer.ledger().mapped, pages(3));
        assert_eq!(pool.ledger().counts.pages_swapped_out, 5);
        assert_eq!(buffer.label(), "filled 300");
        pool.verify([&buffer]).unwrap();
        buffer
            .swap_in(range(2, 7), |page, bytes| {
                bytes.copy_from_slice(&store[page.index() as usize - 2]);
                Ok::<(), ()>(())
            })
            .unwrap();
        assert_eq!(buffer.bytes(0..1).map(<[u8]>::as_ptr), address);
        assert_eq!(pool.ledger().counts.pages_swapped_in, 5);
        for page in 0..8 {
            assert_page(&buffer, page, 300 + page);
        }
        pool.verify([&buffer]).unwrap();
    }
}

#[test]
fn a_store_that_fails_leaves_pages_where_they_were() {
    for pool in every_pool(small()) {
        let mut buffer = filled(&pool, 6, 0);
        let before = pool.ledger();
        let fails_at = |at: u64| {
            move |page: VirtualPage| {
                if page.index() == at {
                    Err("full")
                } else {
                    Ok(())
                }
            }
        };
        let fails = fails_at(3);
        let error = buffer
            .swap_out(range(1, 5), |page, _| fails(page))
            .unwrap_err();
        assert_eq!(
            error,
            SwapError::Store {
                page: VirtualPage::new(3),
                source: "full"
            }
        );
        assert_eq!(pool.ledger(), before);
        buffer
            .swap_out(range(1, 5), |_, _| Ok::<(), ()>(()))
            .unwrap();
        let error = buffer
            .swap_in(range(1, 5), |page, _| fails(page))
            .unwrap_err();
        assert_eq!(
            error,
            SwapError::Store {
                page: VirtualPage::new(3),
                source: "full"
            }
        );
        let swapped = Error::Swapped {
            page: VirtualPage::new(1),
        };
        assert_eq!(buffer.bytes(0..6 * PAGE).unwrap_err(), swapped);
        pool.verify([&buffer]).unwrap();
    }
}

#[test]
fn pages_in_common_are_those_from_the_start_that_both_map_and_neither_may_write() {
    for pool in sharing_pools(small()) {
        let mut first = filled(&pool, 8, 10);
        first.seal(range(0, 6)).unwrap();
        let mut second = pool.reserve(pages(8), "second").unwrap();
        let share = |target: &mut Buffer, from: u64, to: u64| {
            let share = Share {
                source: Source::Buffer(&first, range(from, to)),
                target,
                at: VirtualPage::new(from),
            };
            pool.share(&mut [share]).unwrap();
        };
        let none = PageCount::new(0);
        assert_eq!(first.pages_in_common(&second), none, "it has no pages");
        share(&mut second, 0, 3);
        // Behind a page of its own they are not from the start any more.
        second.ensure_mapped(3 * PAGE..4 * PAGE).unwrap();
        share(&mut second, 4, 6);
        for (one, other) in [(&first, &second), (&second, &first)] {
            assert_eq!(one.pages_in_common(other), PageCount::new(3));
        }
        assert_eq!(first.pages_in_common(&first), PageCount::new(6), "sealed");
        second.make_unique(range(0, 1)).unwrap();
        assert_eq!(first.pages_in_common(&second), none);
        pool.verify([&first, &second]).unwrap();
    }
    // Pages of two pools have the same numbers and are others.
    let pools = [0, 1].map(|_| sharing_pools(small()).into_iter().next());
    let [Some(one), Some(other)] = pools else {
        return;
    };
    let [one, other] = [one, other].map(|pool| {
        let mut buffer = filled(&pool, 4, 10);
        buffer.seal(range(0, 4)).unwrap();
        buffer
    });
    assert_eq!(one.pages_in_common(&other), PageCount::new(0));
}

#[test]
fn shared_pages_show_the_same_contents_and_outlive_their_first_owner() {
    for pool in sharing_pools(small()) {
        let mut first = filled(&pool, 20, 10);
        first.seal(range(0, 20)).unwrap();
        let mut second = pool.reserve(pages(30), "second").unwrap();
        let mut third = pool.reserve(pages(30), "third").unwrap();
        let source = Source::Buffer(&first, range(3, 19));
        let at = VirtualPage::new(5);
        let batches = pool.ledger().counts.batches;
        let report = pool
            .share(&mut [
                Share {
                    source,
                    target: &mut second,
                    at,
                },
                Share {
                    source,
                    target: &mut third,
                    at: VirtualPage::new(0),
                },
            ])
            .unwrap();
        assert_eq!(report.pages_mapped, PageCount::new(32));
        assert_eq!(pool.ledger().counts.batches, batches + 1);
        assert_eq!(pool.ledger().shared, pages(16));
        assert_eq!(first.ledger().unique, pages(4));
        pool.verify([&first, &second, &third]).unwrap();
        drop(first);
        drop(third);
        assert_eq!(second.ledger().unique, pages(16));
        for page in 0..16 {
            assert_page(&second, 5 + page, 13 + page);
        }
        pool.verify([&second]).unwrap();
    }
}

#[test]
fn writing_to_a_shared_page_copies_exactly_that_page() {
    for pool in sharing_pools(small()) {
        let mut first = filled(&pool, 10, 10);
        first.seal(range(0, 10)).unwrap();
        let mut second = pool.reserve(pages(10), "second").unwrap();
        second
            .share_from(&first, range(0, 10), VirtualPage::new(0))
            .unwrap();
        let report = second.make_unique(range(4, 5)).unwrap();
        assert_eq!(report.pages_mapped, PageCount::new(1));
        assert_eq!(pool.ledger().counts.copies_on_write, 1);
        assert_eq!(
            second.make_unique(range(4, 5)).unwrap().pages_mapped,
            PageCount::ZERO
        );
        assert_page(&second, 4, 14);
        write_page(&mut second, 4, 99);
        assert_page(&first, 4, 14);
        assert_page(&second, 4, 99);
        assert_eq!(
            first.make_unique(range(4, 5)).unwrap().pages_mapped,
            PageCount::ZERO
        );
        write_page(&mut first, 4, 98);
        for page in [0, 1, 2, 3, 5, 6, 7, 8, 9] {
            assert_page(&first, page, 10 + page);
            assert_page(&second, page, 10 + page);
        }
        pool.verify([&first, &second]).unwrap();
    }
}

#[test]
fn holes_and_shared_pages_become_writable_in_one_batch() {
    for pool in sharing_pools(small()) {
        let mut first = filled(&pool, 4, 10);
        first.seal(range(0, 4)).unwrap();
        let mut second = pool.reserve(pages(8), "second").unwrap();
        second
            .share_from(&first, range(0, 4), VirtualPage::new(0))
            .unwrap();
        first.unmap(range(2, 3)).unwrap();
        let batches = pool.ledger().counts.batches;
        let bytes = PAGE..PAGE * 7;
        let report = pool
            .ensure_writable(&mut [Request::new(&mut second, bytes.clone())])
            .unwrap();
        assert_eq!(pool.ledger().counts.batches, batches + 1);
        assert_eq!(
            report.pages_copied,
            PageCount::new(2),
            "1 and 3 are shared, 2 is not"
        );
        assert_eq!(report.pages_mapped, PageCount::new(5));
        for page in 1..4 {
            assert_page(&second, page, 10 + page);
        }
        for page in 1..7 {
            write_page(&mut second, page, 90 + page);
        }
        assert_page(&first, 1, 11);
        assert_page(&first, 3, 13);
        let again = pool.ensure_writable(&mut [Request::new(&mut second, bytes)]);
        assert_eq!(again.unwrap(), MapReport::default());
        assert_eq!(pool.ledger().counts.batches, batches + 1);
        pool.verify([&first, &second]).unwrap();
    }
}

#[test]
fn a_pin_keeps_a_page_and_shares_it_again() {
    for pool in sharing_pools(small()) {
        let mut buffer = filled(&pool, 4, 70);
        buffer.seal(range(0, 4)).unwrap();
        let pins = buffer.pin(range(1, 3)).unwrap();
        let again = pins[0].clone();
        assert_eq!(again.page(), pins[0].page());
        assert_eq!(
            buffer.make_unique(range(0, 3)).unwrap().pages_mapped,
            PageCount::new(2)
        );
        write_page(&mut buffer, 1, 0);
        drop(buffer);
        assert_eq!(pool.ledger().pinned_only, pages(2));
        let mut other = pool.reserve(pages(6), "other").unwrap();
        let source = Source::Pins(&pins);
        pool.share(&mut [Share {
            source,
            target: &mut other,
            at: VirtualPage::new(2),
        }])
        .unwrap();
        let source = Source::Pins(std::slice::from_ref(&again));
        pool.share(&mut [Share {
            source,
            target: &mut other,
            at: VirtualPage::new(5),
        }])
        .unwrap();
        assert_page(&other, 2, 71);
        assert_page(&other, 3, 72);
        assert_page(&other, 5, 71);
        assert_eq!(pool.ledger().shared, pages(1));
        pool.verify([&other]).unwrap();
        drop((pins, again));
        assert_eq!(pool.ledger().pinned, pages(0));
        assert_page(&other, 5, 71);
        other.unmap(range(2, 3)).unwrap();
        assert_page(&other, 5, 71);
        pool.verify([&other]).unwrap();
    }
}

#[test]
fn one_call_serves_many_buffers_in_one_batch() {
    for pool in every_pool(small()) {
        let mut buffers: Vec<_> = (0..10)
            .map(|_| pool.reserve(pages(4), "").unwrap())
            .collect();
        let before = pool.ledger().counts.batches;
        let mut requests: Vec<_> = buffers
            .iter_mut()
            .map(|buffer| Request::new(buffer, 0..2 * PAGE))
            .collect();
        pool.ensure_mapped(&mut requests).unwrap();
        let mut all: Vec<_> = buffers
            .iter_mut()
            .map(|buffer| Pages::new(buffer, range(0, 2)))
            .collect();
        pool.seal(&mut all).unwrap();
        pool.make_unique(&mut all).unwrap();
        pool.unmap(&mut all).unwrap();
        let batches = match pool.capabilities().commitment {
            Commitment::WithReservation => 0,
            Commitment::PerPage | Commitment::PerHeap => 4,
        };
        assert_eq!(pool.ledger().counts.batches, before + batches);
        pool.verify(&buffers).unwrap();
    }
}

#[test]
fn without_aliasing_sharing_and_pinning_are_refused() {
    for pool in every_pool(small()) {
        if pool.capabilities().aliasing == Aliasing::Shared {
            continue;
        }
        let mut first = filled(&pool, 2, 0);
        first.seal(range(0, 2)).unwrap();
        let mut second = pool.reserve(pages(2), "").unwrap();
        let shared = second.share_from(&first, range(0, 2), VirtualPage::new(0));
        assert!(matches!(shared, Err(Error::Unsupported { .. })));
        assert!(matches!(
            first.pin(range(0, 1)),
            Err(Error::Unsupported { .. })
        ));
    }
}
