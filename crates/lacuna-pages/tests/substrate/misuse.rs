//! Calls that make no sense, and limits that are too small: typed errors, nothing changed.

use lacuna_pages::{
    ByteLength, ByteRange, DenseDevice, DeviceError, Error, HostConfig, HostDevice, PageCount,
    PageSize, Pages, Pool, PoolConfig, Request, Share, Source, VirtualPage,
};

use crate::support::{
    Guise, PAGE, PAGE_SIZE, contents, every_pool, filled, host, pages, probed, range, small,
};

#[test]
fn a_configuration_that_cannot_work_is_refused() {
    let refuse = |config: PoolConfig| Pool::new(DenseDevice::new(), config).unwrap_err();
    let huge = PageSize::new(1 << 30).unwrap();
    let config = PoolConfig {
        page_size: huge,
        ..PoolConfig::default()
    };
    let error = Error::UnsupportedPageSize {
        device: "dense",
        page_size: huge,
    };
    assert_eq!(refuse(config), error);
    for config in [
        PoolConfig {
            heap_bytes: ByteLength::ZERO,
            ..small()
        },
        PoolConfig {
            heap_bytes: ByteLength::new(PAGE as u64 + 1),
            ..small()
        },
        PoolConfig {
            heap_bytes: ByteLength::new(1 << 60),
            ..small()
        },
        PoolConfig {
            low_watermark: pages(100),
            ..small()
        },
        PoolConfig {
            limit: Some(ByteLength::new(1)),
            ..small()
        },
    ] {
        assert!(matches!(refuse(config), Error::Config { .. }), "{config:?}");
    }
    let most = ByteLength::gibibytes(64);
    let largest = |heap_bytes| PoolConfig {
        heap_bytes,
        page_size: PageSize::KIB_4,
        ..PoolConfig::default()
    };
    Pool::new(DenseDevice::new(), largest(most)).unwrap();
    let more = ByteLength::new(most.get() + 4096);
    assert!(matches!(refuse(largest(more)), Error::Config { .. }));
    for share in [0, 96] {
        let config = HostConfig {
            mapping_share_percent: share,
            ..HostConfig::DEFAULT
        };
        assert!(matches!(
            HostDevice::with_config(config),
            Err(DeviceError::Invalid { .. })
        ));
    }
}

#[test]
fn absurd_lengths_are_refused_without_taking_memory() {
    for pool in every_pool(small()) {
        for length in [
            0,
            u64::MAX,
            u64::MAX / 2 + 2,
            i64::MAX as u64 - 20_000,
            1 << 62,
        ] {
            let error = pool.reserve(ByteLength::new(length), "").unwrap_err();
            let typed = matches!(
                error,
                Error::Length { .. }
                    | Error::Device(_)
                    | Error::OutOfPages { .. }
                    | Error::TableMemory { .. }
            );
            assert!(typed, "{error:?}");
        }
        for length in [0, 1 << 63, u64::MAX].map(ByteLength::new) {
            let error = pool.reserve(length, "").unwrap_err();
            assert_eq!(error, Error::Length { length });
        }
        assert_eq!(pool.ledger().reserved, ByteLength::ZERO);
    }
}

#[test]
fn a_reservation_of_terabytes_costs_nothing_until_used() {
    let pool = host(PoolConfig::default());
    let mut buffer = pool
        .reserve(ByteLength::gibibytes(16 << 10), "16 TiB")
        .unwrap();
    assert_eq!(pool.ledger().committed, ByteLength::ZERO);
    buffer.ensure_mapped(1 << 33..(1 << 33) + 1).unwrap();
    buffer.bytes_mut(1 << 33..(1 << 33) + 1).unwrap()[0] = 9;
    assert_eq!(pool.ledger().committed, ByteLength::kibibytes(64));
}

#[test]
fn ranges_past_the_end_or_reversed_are_errors() {
    for pool in every_pool(small()) {
        let mut buffer = filled(&pool, 4, 0);
        let before = pool.ledger();
        let reserved = pages(4);
        for (start, end) in [
            (0, 4 * PAGE + 1),
            (5 * PAGE, 5 * PAGE),
            (2, 1),
            (0, usize::MAX),
        ] {
            let range = ByteRange::new(start as u64, end as u64);
            let error = Error::ByteRange { range, reserved };
            assert_eq!(buffer.bytes(range).unwrap_err(), error);
            assert_eq!(buffer.bytes_mut(range).unwrap_err(), error);
            assert_eq!(buffer.ensure_mapped(range).unwrap_err(), error);
        }
        for pages in [
            range(0, 5),
            range(3, 2),
            range(u64::MAX, u64::MAX),
            range(0, u64::MAX),
        ] {
            let reserved = PageCount::new(4);
            let error = Error::PageRange {
                range: pages,
                reserved,
            };
            assert_eq!(buffer.seal(pages).unwrap_err(), error);
            assert_eq!(buffer.unmap(pages).unwrap_err(), error);
            assert_eq!(buffer.make_unique(pages).unwrap_err(), error);
            assert!(buffer.swap_out(pages, |_, _| Ok::<(), ()>(())).is_err());
            assert!(buffer.swap_in(pages, |_, _| Ok::<(), ()>(())).is_err());
        }
        assert_eq!(pool.ledger(), before);
        assert_eq!(contents(&buffer, 4 * PAGE..4 * PAGE), []);
        buffer.unmap(range(2, 2)).unwrap();
    }
}

#[test]
fn unmapping_twice_names_the_hole() {
    for pool in every_pool(small()) {
        let mut buffer = filled(&pool, 4, 0);
        buffer.unmap(range(1, 3)).unwrap();
        let before = pool.ledger();
        let hole = Error::Hole {
            page: VirtualPage::new(2),
        };
        assert_eq!(buffer.unmap(range(2, 4)).unwrap_err(), hole);
        assert_eq!(pool.ledger(), before);
    }
}

#[test]
fn sharing_needs_sealed_pages_of_the_same_pool_and_room() {
    let (pool, other) = (host(small()), host(small()));
    let mut first = filled(&pool, 4, 0);
    let mut second = pool.reserve(pages(4), "").unwrap();
    let mut stranger = other.reserve(pages(4), "").unwrap();
    let at = VirtualPage::new;
    let not_sealed = Error::NotSealed { page: at(1) };
    first.seal(range(0, 1)).unwrap();
    assert_eq!(
        second.share_from(&first, range(0, 4), at(0)).unwrap_err(),
        not_sealed
    );
    assert_eq!(first.pin(range(0, 2)).unwrap_err(), not_sealed);
    first.seal(range(0, 4)).unwrap();
    let before = pool.ledger();
    assert_eq!(
        stranger.share_from(&first, range(0, 4), at(0)).unwrap_err(),
        Error::OtherPool
    );
    let foreign = Pages::new(&mut stranger, range(0, 0));
    assert_eq!(pool.unmap(&mut [foreign]).unwrap_err(), Error::OtherPool);
    let foreign = Request::new(&mut stranger, 0..PAGE);
    assert_eq!(
        pool.ensure_mapped(&mut [foreign]).unwrap_err(),
        Error::OtherPool
    );
    let pins = first.pin(range(0, 2)).unwrap();
    let source = Source::Pins(&pins);
    let share = Share {
        source,
        target: &mut stranger,
        at: at(0),
    };
    assert_eq!(other.share(&mut [share]).unwrap_err(), Error::OtherPool);
    drop(pins);
    assert!(matches!(
        second.share_from(&first, range(0, 4), at(1)).unwrap_err(),
        Error::PageRange { .. }
    ));
    assert!(
        second
            .share_from(&first, range(0, 4), at(u64::MAX))
            .is_err()
    );
    assert_eq!(pool.ledger(), before);
    second.share_from(&first, range(0, 2), at(1)).unwrap();
    let occupied = Error::Occupied { page: at(2) };
    assert_eq!(
        second.share_from(&first, range(0, 1), at(2)).unwrap_err(),
        occupied
    );
    let hole = Error::Hole { page: at(0) };
    assert_eq!(first.clone_into(&second).unwrap_err(), hole);
}

/// Shares from a buffer that has a hole at its first page.
trait CloneInto {
    fn clone_into(&mut self, source: &Self) -> Result<(), Error>;
}

impl CloneInto for lacuna_pages::Buffer {
    fn clone_into(&mut self, source: &Self) -> Result<(), Error> {
        self.unmap(range(0, 4))?;
        self.share_from(source, range(0, 3), VirtualPage::new(0))
            .map(drop)
    }
}

#[test]
fn a_limit_below_what_is_in_use_is_owed_and_met_as_pages_come_free() {
    let pool = host(small());
    let mut buffer = filled(&pool, 30, 0);
    buffer.unmap(range(20, 30)).unwrap();
    assert_eq!(pool.ledger().committed, pages(30));
    assert!(matches!(
        pool.set_limit(Some(ByteLength::ZERO)),
        Err(Error::Config { .. })
    ));
    pool.set_limit(Some(pages(12))).unwrap();
    let ledger = pool.ledger();
    assert_eq!(
        (ledger.committed, ledger.owed, ledger.idle),
        (pages(20), pages(8), pages(0))
    );
    let error = buffer.ensure_mapped(20 * PAGE..21 * PAGE).unwrap_err();
    let (requested, free) = (PageCount::new(1), PageCount::ZERO);
    assert_eq!(
        error,
        Error::OutOfPages {
            requested,
            free,
            limit: Some(pages(12))
        }
    );
    buffer.unmap(range(0, 5)).unwrap();
    assert_eq!(
        (pool.ledger().committed, pool.ledger().owed),
        (pages(15), pages(3))
    );
    buffer.truncate(pages(12)).unwrap();
    assert_eq!(pool.ledger().owed, ByteLength::ZERO);
    buffer.ensure_mapped(0..5 * PAGE).unwrap();
    assert_eq!(pool.ledger().committed, pages(12));
    pool.verify([&buffer]).unwrap();
}

#[test]
fn a_limit_between_whole_heaps_is_kept_by_giving_a_heap_back() {
    let limit = Some(pages(40));
    let (pool, _) = probed(PoolConfig { limit, ..small() }, Guise::PerHeap);
    let mut buffer = pool.reserve(pages(40), "").unwrap();
    buffer.ensure_mapped(0..20 * PAGE).unwrap();
    buffer.unmap(range(4, 20)).unwrap();
    assert_eq!(pool.ledger().committed, pages(32));
    // Two pages too many, and one of the two heaps of 16 is empty.
    let limit = Some(pages(30));
    pool.set_limit(limit).unwrap();
    assert_eq!(pool.ledger().committed, pages(16));
    assert_eq!(pool.ledger().owed, ByteLength::ZERO);
    // Twelve pages are idle, and the other fourteen are too few for a heap.
    let before = pool.ledger();
    let error = buffer.ensure_mapped(0..20 * PAGE).unwrap_err();
    let (requested, free) = (PageCount::new(16), PageCount::new(12));
    assert_eq!(
        error,
        Error::OutOfPages {
            requested,
            free,
            limit
        }
    );
    assert_eq!(pool.ledger(), before);
    buffer.ensure_mapped(0..16 * PAGE).unwrap();
    assert_eq!(pool.ledger().committed, pages(16));
    pool.verify([&buffer]).unwrap();
}

#[test]
fn a_dense_buffer_past_the_limit_is_refused() {
    let limit = Some(pages(10));
    let pool = Pool::new(DenseDevice::new(), PoolConfig { limit, ..small() }).unwrap();
    let buffer = pool.reserve(pages(6), "").unwrap();
    let (requested, free) = (PageCount::new(5), PageCount::new(4));
    let error = pool.reserve(pages(5), "").unwrap_err();
    assert_eq!(
        error,
        Error::OutOfPages {
            requested,
            free,
            limit
        }
    );
    assert_eq!(buffer.ledger().mapped, pages(6));
    drop(buffer);
    pool.reserve(pages(10), "").unwrap();
}

#[test]
fn a_lowered_mapping_limit_is_kept_and_says_what_to_do() {
    let config = HostConfig {
        mapping_share_percent: 1,
        ..HostConfig::DEFAULT
    };
    let device = HostDevice::with_config(config).unwrap();
    let pool = Pool::new(
        device,
        PoolConfig {
            page_size: PAGE_SIZE,
            ..PoolConfig::default()
        },
    );
    let pool = pool.unwrap();
    let limit = pool.ledger().region_limit.unwrap();
    let mut buffer = pool.reserve(pages(4 * limit), "").unwrap();
    let error = (0..2 * limit as usize).find_map(|page| {
        buffer
            .ensure_mapped(2 * page * PAGE..2 * page * PAGE + 1)
            .err()
    });
    let Some(error @ Error::OutOfMappings { needed: 2, .. }) = error else {
        panic!("{error:?}");
    };
    assert!(error.to_string().contains("vm.max_map_count"));
    let ledger = pool.ledger();
    assert!(
        ledger.regions <= limit && ledger.regions + 2 > limit,
        "{ledger:?}"
    );
    pool.verify([&buffer]).unwrap();
    buffer.ensure_mapped(0..1).unwrap();
    buffer.truncate(ByteLength::ZERO).unwrap();
    buffer.ensure_mapped(0..100 * PAGE).unwrap();
}

#[test]
fn a_heap_has_at_most_sixteen_million_pages() {
    let pool = |count| {
        let config = PoolConfig {
            heap_bytes: pages(count),
            ..small()
        };
        Pool::new(HostDevice::new().unwrap(), config)
    };
    assert!(pool(1 << 24).is_ok());
    let refused = pool((1 << 24) + 1).unwrap_err();
    assert!(matches!(refused, Error::Config { .. }), "{refused:?}");
}
