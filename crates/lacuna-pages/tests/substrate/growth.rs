//! Growing buffers: contents, accounts and the shape of the work asked of the device.

use lacuna_pages::device::Operation;
use lacuna_pages::{
    ByteLength, DenseDevice, Error, HostDevice, PageCount, Pool, PoolConfig, Request,
};

use crate::support::{FEW_MAPPINGS, Guise, PAGE, pages, probed, small};

fn pools() -> Vec<Pool> {
    let config = PoolConfig::default();
    vec![
        Pool::new(HostDevice::new().unwrap(), config).unwrap(),
        Pool::new(DenseDevice::new(), config).unwrap(),
    ]
}

#[test]
fn what_is_written_is_read_back_across_pages() {
    for pool in pools() {
        let mut buffer = pool.reserve(ByteLength::mebibytes(8), "rows").unwrap();
        for row in 0..1_000usize {
            let range = row * 1_536..(row + 1) * 1_536;
            buffer.ensure_mapped(range.clone()).unwrap();
            buffer.bytes_mut(range).unwrap().fill(row as u8);
        }
        let all = buffer.bytes(0..1_000 * 1_536usize).unwrap();
        for (row, bytes) in all.chunks(1_536).enumerate() {
            assert!(bytes.iter().all(|&byte| byte == row as u8), "row {row}");
        }
    }
}

#[test]
fn a_host_buffer_commits_what_it_touches_and_a_dense_one_everything() {
    let [host, dense] = pools().try_into().unwrap();
    for (pool, committed) in [(host, 2), (dense, 16)] {
        let mut buffer = pool.reserve(ByteLength::mebibytes(1), "").unwrap();
        buffer.ensure_mapped(65_530..65_540).unwrap();
        assert_eq!(
            pool.ledger().committed,
            ByteLength::kibibytes(64 * committed)
        );
        assert_eq!(pool.ledger().reserved, ByteLength::mebibytes(1));
        assert_eq!(
            buffer.ledger().mapped,
            ByteLength::kibibytes(64 * committed)
        );
        drop(buffer);
        assert_eq!(pool.ledger().reserved, ByteLength::ZERO);
        assert_eq!(pool.ledger().mapped, ByteLength::ZERO);
    }
}

#[test]
fn seventy_two_buffers_grow_in_one_batch_and_not_at_all_when_nothing_is_missing() {
    let pool = Pool::new(HostDevice::new().unwrap(), PoolConfig::default()).unwrap();
    let mut buffers: Vec<_> = (0..72)
        .map(|_| pool.reserve(ByteLength::mebibytes(64), "").unwrap())
        .collect();
    for _ in 0..2 {
        let mut requests: Vec<_> = buffers
            .iter_mut()
            .map(|buffer| Request::new(buffer, 0..2_048usize))
            .collect();
        pool.ensure_mapped(&mut requests).unwrap();
    }
    assert_eq!(pool.ledger().counts.batches, 1);
    assert_eq!(pool.ledger().counts.pages_mapped, 72);
}

#[test]
fn out_of_pages_is_a_value_and_changes_nothing() {
    let limit = Some(ByteLength::kibibytes(256));
    let config = PoolConfig {
        limit,
        ..PoolConfig::default()
    };
    let pool = Pool::new(HostDevice::new().unwrap(), config).unwrap();
    let mut first = pool.reserve(ByteLength::mebibytes(1), "").unwrap();
    let mut second = pool.reserve(ByteLength::mebibytes(1), "").unwrap();
    first.ensure_mapped(0..65_536).unwrap();
    let before = pool.ledger();
    let requests = &mut [
        Request::new(&mut first, 0..196_608),
        Request::new(&mut second, 0..131_072),
    ];
    let error = pool.ensure_mapped(requests).unwrap_err();
    assert_eq!(
        error,
        Error::OutOfPages {
            requested: PageCount::new(4),
            free: PageCount::new(3),
            limit
        }
    );
    assert_eq!(pool.ledger(), before);
    second.ensure_mapped(0..196_608).unwrap();
    assert_eq!(pool.ledger().committed, ByteLength::kibibytes(256));
}

#[test]
fn a_batch_sets_aside_what_it_still_wants_and_no_more() {
    let config = PoolConfig {
        heap_bytes: pages(1_024),
        ..small()
    };
    let (pool, handle) = probed(config, Guise::Plain);
    let [mut long, mut short, mut next] = [(); 3].map(|()| pool.reserve(pages(200), "").unwrap());
    pool.ensure_mapped(&mut [
        Request::new(&mut long, 0..100 * PAGE),
        Request::new(&mut short, 0..PAGE),
    ])
    .unwrap();
    next.ensure_mapped(0..PAGE).unwrap();
    let log = handle.log();
    let operations = log.batches.iter().flat_map(|(batch, _)| batch);
    let places: Vec<u64> = operations
        .filter_map(|operation| match operation {
            Operation::Map { place, .. } => Some(place.offset / PAGE as u64),
            _ => None,
        })
        .collect();
    // The first extent is for both buffers' pages; one page needs no more than a first extent.
    assert_eq!(places, [0, 101, 101 + 16]);
}

#[test]
fn the_last_mapping_that_a_device_has_can_be_had() {
    let (pool, _) = probed(small(), Guise::FewMappings);
    let buffers: Vec<_> = (0..FEW_MAPPINGS)
        .map(|_| pool.reserve(pages(1), "").unwrap())
        .collect();
    let error = pool.reserve(pages(1), "").unwrap_err();
    let expected = Error::OutOfMappings {
        needed: 1,
        in_use: FEW_MAPPINGS,
        limit: FEW_MAPPINGS,
    };
    assert_eq!(error, expected);
    drop(buffers);
}
