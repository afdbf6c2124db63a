//! Every device call of every operation fails once, for every n: nothing may have changed. Then
//! every call from the n-th on fails, undoing included: something may be set aside, nothing lost.

use std::panic::Location;

use lacuna_pages::{
    Buffer, ByteLength, Error, Ledger, PageCount, Pages, Pool, PoolConfig, Recycle, Request, Share,
    Source, SwapError, VirtualPage,
};

use crate::support::{
    Failing, Guise, Handle, PAGE, PAGE_SIZE, assert_page, failing_guises, filled, pages, probed,
    range, small, write_page,
};

/// Three buffers in every state a page can be in.
struct World {
    pool: Pool,
    handle: Handle,
    /// Ten pages of its own, all sealed.
    donor: Buffer,
    /// Pages 0..4 shared with the donor, 4 and 5 swapped out, 6 writable, 7..10 holes.
    second: Buffer,
    /// Page 0 writable, the rest holes.
    third: Buffer,
}

impl World {
    fn new(guise: Guise) -> Self {
        let config = PoolConfig {
            recycle: Recycle::Zeroed,
            ..small()
        };
        let (pool, handle) = probed(config, guise);
        let mut donor = filled(&pool, 10, 100);
        donor.seal(range(0, 10)).unwrap();
        let mut second = pool.reserve(pages(10), "second").unwrap();
        second
            .share_from(&donor, range(0, 4), VirtualPage::new(0))
            .unwrap();
        second.ensure_mapped(4 * PAGE..7 * PAGE).unwrap();
        write_page(&mut second, 6, 206);
        second
            .swap_out(range(4, 6), |_, _| Ok::<(), ()>(()))
            .unwrap();
        let third = filled(&pool, 1, 300);
        let mut longer = pool.reserve(pages(40), "third").unwrap();
        longer.ensure_mapped(0..PAGE).unwrap();
        write_page(&mut longer, 0, 300);
        drop(third);
        handle.signal_everything();
        pool.set_limit(None).unwrap();
        Self {
            pool,
            handle,
            donor,
            second,
            third: longer,
        }
    }

    fn ledger(&self) -> Ledger {
        self.pool.ledger()
    }

    fn verify(&self) {
        self.pool
            .verify([&self.donor, &self.second, &self.third])
            .unwrap();
        assert_eq!(self.handle.log().committed(), self.ledger().committed);
    }

    /// Checks the contents that `new` describes.
    fn assert_contents(&self) {
        for page in 0..10 {
            assert_page(&self.donor, page, 100 + page);
        }
        for page in 0..4 {
            assert_page(&self.second, page, 100 + page);
        }
        assert_page(&self.second, 6, 206);
        assert_page(&self.third, 0, 300);
        for (page, error) in [
            (
                4,
                Error::Swapped {
                    page: VirtualPage::new(4),
                },
            ),
            (
                8,
                Error::Hole {
                    page: VirtualPage::new(8),
                },
            ),
        ] {
            assert_eq!(
                self.second.bytes(page * PAGE..page * PAGE + 1).unwrap_err(),
                error
            );
        }
    }
}

type Operation = fn(&mut World) -> Result<(), Error>;

/// Fails call n of `operation` for n = 0, 1, ... until it no longer reaches call n.
#[track_caller]
fn fail_each_call(operation: Operation) {
    let caller = Location::caller();
    for guise in failing_guises() {
        let mut failures = 0;
        for n in 0.. {
            assert!(n < 1_000, "{caller}: no end of calls");
            let mut world = World::new(guise);
            let before = world.ledger();
            world.handle.fail(Failing::Once(n));
            let result = operation(&mut world);
            let reached = world.handle.log().calls > n;
            world.handle.fail(Failing::Nothing);
            world.verify();
            match result {
                Err(error) => {
                    assert!(reached, "{caller}: {guise:?}, call {n}: {error}");
                    failures += 1;
                    assert_eq!(world.ledger(), before, "{caller}: {guise:?}, call {n}");
                    world.assert_contents();
                    operation(&mut world).unwrap();
                    world.verify();
                }
                Ok(()) if reached => {}
                Ok(()) => break,
            }
            assert_everything_comes_back(world);
        }
        assert!(failures > 0, "{caller}: no call failed");
    }
}

/// Fails every call from n on, so that undoing fails too.
#[track_caller]
fn fail_from_each_call(operation: Operation) {
    let caller = Location::caller();
    for n in 0..1_000 {
        let mut world = World::new(Guise::Plain);
        let before = world.ledger();
        world.handle.fail(Failing::From(n));
        let result = operation(&mut world);
        let reached = world.handle.log().calls > n;
        world.handle.fail(Failing::Nothing);
        world.verify();
        match result {
            Err(Error::Undo { lost, .. }) => assert_eq!(world.ledger().lost, lost, "{caller}"),
            Err(_) => {
                // Memory that could be neither used nor given back may lie idle.
                let now = world.ledger();
                assert_eq!(
                    (now.unique, now.shared),
                    (before.unique, before.shared),
                    "{caller}"
                );
                assert_eq!(
                    (now.mapped, now.lost),
                    (before.mapped, before.lost),
                    "{caller}"
                );
                world.assert_contents();
            }
            Ok(()) if !reached => return,
            Ok(()) => {}
        }
        for page in 0..10 {
            let at = page * PAGE;
            if world.donor.bytes(at..at + PAGE).is_ok() {
                assert_page(&world.donor, page as u64, 100 + page as u64);
            }
        }
        assert_everything_comes_back(world);
    }
    panic!("{caller}: no end of calls");
}

/// Drops everything and finds the device empty but for what was set aside.
fn assert_everything_comes_back(world: World) {
    let World {
        pool,
        handle,
        donor,
        second,
        third,
    } = world;
    drop((donor, second, third));
    pool.trim();
    let ledger = pool.ledger();
    assert_eq!(ledger.committed, ledger.lost);
    assert_eq!(
        (ledger.reserved, ledger.mapped),
        (ByteLength::ZERO, ByteLength::ZERO)
    );
    let log = handle.log();
    assert_eq!(log.spaces, 0, "a reservation leaked");
    assert!(
        log.heaps == 0 || ledger.lost > ByteLength::ZERO,
        "a heap leaked"
    );
}

fn check(operation: Operation) {
    fail_each_call(operation);
    fail_from_each_call(operation);
}

#[test]
fn reserving() {
    check(|world| world.pool.reserve(pages(3), "").map(drop));
}

#[test]
fn growing_several_buffers_into_several_heaps() {
    check(|world| {
        world
            .pool
            .ensure_mapped(&mut [
                Request::new(&mut world.second, 6 * PAGE..9 * PAGE),
                Request::new(&mut world.third, 0..40 * PAGE),
            ])
            .map(drop)
    });
}

#[test]
fn sealing() {
    check(|world| {
        world.pool.seal(&mut [
            Pages::new(&mut world.second, range(6, 7)),
            Pages::new(&mut world.third, range(0, 1)),
        ])
    });
}

#[test]
fn sharing() {
    check(|world| {
        let World {
            pool,
            donor,
            second,
            third,
            ..
        } = world;
        pool.share(&mut [
            Share {
                source: Source::Buffer(donor, range(4, 6)),
                target: second,
                at: VirtualPage::new(7),
            },
            Share {
                source: Source::Buffer(donor, range(0, 10)),
                target: third,
                at: VirtualPage::new(1),
            },
        ])
        .map(drop)
    });
}

#[test]
fn making_unique_by_copy_and_in_place() {
    check(|world| {
        world
            .pool
            .make_unique(&mut [
                Pages::new(&mut world.second, range(0, 3)),
                Pages::new(&mut world.donor, range(2, 8)),
            ])
            .map(drop)
    });
}

#[test]
fn making_holes_and_shared_pages_writable() {
    check(|world| {
        world
            .pool
            .ensure_writable(&mut [
                Request::new(&mut world.second, 6 * PAGE..10 * PAGE),
                Request::new(&mut world.donor, 2 * PAGE..8 * PAGE),
            ])
            .map(drop)
    });
}

#[test]
fn unmapping() {
    check(|world| {
        world.pool.unmap(&mut [
            Pages::new(&mut world.second, range(1, 7)),
            Pages::new(&mut world.donor, range(2, 9)),
        ])
    });
}

#[test]
fn truncating() {
    check(|world| world.donor.truncate(ByteLength::new(PAGE as u64)));
}

#[test]
fn swapping_out() {
    check(|world| pages_only(world.donor.swap_out(range(0, 6), |_, _| Ok::<(), ()>(()))));
}

#[test]
fn swapping_in() {
    check(|world| pages_only(world.second.swap_in(range(4, 6), |_, _| Ok::<(), ()>(()))));
}

fn pages_only(result: Result<(), SwapError<()>>) -> Result<(), Error> {
    result.map_err(|error| match error {
        SwapError::Pages(error) => error,
        other => panic!("the store never fails: {other}"),
    })
}

#[test]
fn a_buffer_the_device_will_not_release_is_released_later() {
    let World {
        pool,
        handle,
        donor,
        second,
        third,
    } = World::new(Guise::Plain);
    handle.fail(Failing::From(0));
    drop(donor);
    drop(third);
    let ledger = pool.ledger();
    assert_eq!(ledger.buffers, 3, "books change only after the device");
    pool.verify([&second]).unwrap();
    handle.fail(Failing::Nothing);
    pool.trim();
    assert_eq!(pool.ledger().buffers, 1);
    assert_page(&second, 2, 102);
    pool.verify([&second]).unwrap();
    drop(second);
    pool.trim();
    assert_eq!(pool.ledger().committed, ByteLength::ZERO);
    let log = handle.log();
    assert_eq!((log.spaces, log.heaps), (0, 0));
}

#[test]
fn memory_that_cannot_be_given_back_stays_on_the_books() {
    let (pool, handle) = probed(small(), Guise::Plain);
    drop(filled(&pool, 40, 0));
    assert_eq!(pool.ledger().committed, small().low_watermark);
    handle.fail(Failing::From(0));
    pool.trim();
    assert_eq!(pool.ledger().committed, small().low_watermark);
    handle.fail(Failing::Nothing);
    pool.trim();
    assert_eq!(pool.ledger().committed, ByteLength::ZERO);
}

/// A pool of one heap in which every other page is in use, so that what lies idle goes back in as
/// many pieces as there are pages.
fn in_pieces() -> (Pool, Handle, Buffer) {
    let (pool, handle) = probed(small(), Guise::Plain);
    let mut buffer = filled(&pool, 16, 0);
    for page in (1..16).step_by(2) {
        buffer.unmap(range(page, page + 1)).unwrap();
    }
    let ledger = pool.ledger();
    assert_eq!((ledger.idle, ledger.counts.pages_committed), (pages(8), 16));
    (pool, handle, buffer)
}

/// A giving back that stops half-way has given back what it came to and no more: pages that the
/// device still holds and the books do not would be beyond the limit for ever.
#[test]
fn a_giving_back_that_fails_in_the_middle_counts_what_went_back() {
    for n in 0..8 {
        let (pool, handle, buffer) = in_pieces();
        handle.fail(Failing::From(n));
        pool.trim();
        let ledger = pool.ledger();
        assert_eq!(handle.log().committed(), ledger.committed, "call {n}");
        assert_eq!(ledger.committed, pages(16 - n), "call {n}");
        assert_eq!(ledger.idle, pages(8 - n), "call {n}");
        assert_eq!(ledger.counts.pages_decommitted, n, "call {n}");
        pool.verify([&buffer]).unwrap();
        handle.fail(Failing::Nothing);
        pool.trim();
        let ledger = pool.ledger();
        assert_eq!((ledger.committed, ledger.idle), (pages(8), pages(0)));
        assert_eq!(handle.log().committed(), pages(8));
        for page in (0..16).step_by(2) {
            assert_page(&buffer, page, page);
        }
        pool.verify([&buffer]).unwrap();
    }
}

#[test]
fn a_swap_in_whose_store_and_device_both_fail_sets_pages_aside() {
    let World {
        pool,
        handle,
        donor,
        mut second,
        third,
    } = World::new(Guise::Plain);
    let result = second.swap_in(range(4, 6), |_, _| {
        handle.fail(Failing::From(0));
        Err(())
    });
    assert!(matches!(result, Err(SwapError::Store { .. })));
    handle.fail(Failing::Nothing);
    assert_eq!(pool.ledger().lost, PAGE_SIZE.bytes_of(PageCount::new(2)));
    pool.verify([&donor, &second, &third]).unwrap();
    second
        .swap_in(range(4, 6), |_, bytes| {
            bytes.fill(1);
            Ok::<(), ()>(())
        })
        .unwrap();
    assert_eq!(second.bytes(4 * PAGE..4 * PAGE + 2).unwrap(), [1, 1]);
    pool.verify([&donor, &second, &third]).unwrap();
}

/// What is set aside for the growth of one buffer is anyone's when no heap can be made.
#[test]
fn a_heap_that_cannot_be_made_is_made_up_for_by_what_is_set_aside() {
    let (pool, handle) = probed(small(), Guise::Plain);
    let first = filled(&pool, 1, 0);
    let mut second = pool.reserve(pages(16), "second").unwrap();
    handle.fail(Failing::Once(0));
    second.ensure_mapped(0..3 * PAGE).unwrap();
    assert_eq!(
        (pool.ledger().heaps, pool.ledger().committed),
        (1, pages(4))
    );
    handle.fail(Failing::Once(0));
    let error = second.ensure_mapped(0..16 * PAGE).unwrap_err();
    assert!(matches!(error, Error::Device(_)), "{error:?}");
    assert_eq!(
        (pool.ledger().heaps, pool.ledger().committed),
        (1, pages(4))
    );
    handle.fail(Failing::Nothing);
    second.ensure_mapped(0..16 * PAGE).unwrap();
    second.unmap(range(0, 2)).unwrap();
    assert_eq!(pool.ledger().counts.pages_unmapped, 2);
    pool.verify([&first, &second]).unwrap();
}
