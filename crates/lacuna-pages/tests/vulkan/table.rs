//! The table that kernels look pages up in. What is true of the device's own page table is tested of it too: see `open`.

use lacuna_pages::device::Fence;
use lacuna_pages::{Error, PageCount, Pool, PoolConfig};

use super::*;

fn looks_up() -> VulkanDevice {
    let device = VulkanDevice::open_with(PageTable::Lookup).expect("a driver");
    assert_eq!(device.page_table(), PageTable::Lookup);
    device
}

#[test]
#[ignore = "needs a Vulkan device: run .ci/install-vulkan"]
fn a_table_grows_while_pages_stay_where_they_are() {
    let mut device = looks_up();
    let queue = device.queue();
    let taken = || queue.memory_use().allocated;
    let heap = device.create_heap(pages(4)).unwrap();
    let first = device.reserve(pages(1000)).unwrap();
    let maps = [map(first, 0, heap, 3), map(first, 999, heap, 1)];
    device.apply(&maps, Fence::DONE).unwrap();
    for page in [0, 999] {
        queue
            .write(address(first, page), &noise(page, PAGE))
            .unwrap();
    }
    let before = taken();
    // Each is longer than the table.
    let longer: Vec<_> = [3_000, 9_000, 20_000]
        .into_iter()
        .map(|count| device.reserve(pages(count)).unwrap())
        .collect();
    let last = [map(longer[2], 19_999, heap, 0)];
    device.apply(&last, Fence::DONE).unwrap();
    queue
        .write(address(longer[2], 19_999), &noise(5, PAGE))
        .unwrap();
    for page in [0, 999] {
        assert!(read(&queue, address(first, page), PAGE) == noise(page, PAGE));
    }
    // It is counted, and what was outgrown is not once the queue has done with it.
    device.apply(&[], Fence::DONE).unwrap();
    let grown = taken().get() - before.get();
    assert!((4 * 32_000..4 * 70_000).contains(&grown), "{grown}");
    for space in longer {
        device.release(space, Fence::DONE).unwrap();
    }
    // What was given back is there again, in one piece.
    let again = device.reserve(pages(32_000)).unwrap();
    assert_eq!(taken().get() - before.get(), grown);
    device.release(again, Fence::DONE).unwrap();
    assert!(read(&queue, address(first, 0), PAGE) == noise(0, PAGE));
}

#[test]
#[ignore = "needs a Vulkan device: run .ci/install-vulkan"]
fn a_pool_has_no_more_heaps_than_kernels_are_shown_and_says_so() {
    let device = looks_up();
    let limit = device.capabilities().heap_limit.expect("a limit");
    let config = PoolConfig {
        heap_bytes: pages(1),
        ..PoolConfig::default()
    };
    let pool = Pool::new(device, config).unwrap();
    let mut buffer = pool.reserve(pages(limit + 2), "").unwrap();
    let bytes = |pages: u64| 0..(pages * PAGE) as usize;
    let refused = buffer.ensure_mapped(bytes(limit + 1)).unwrap_err();
    let Error::OutOfPages {
        requested, free, ..
    } = refused
    else {
        panic!("{refused}")
    };
    assert_eq!([requested, free], [limit + 1, limit].map(PageCount::new));
    assert_eq!(pool.ledger().committed, ByteLength::ZERO);
    buffer.ensure_mapped(bytes(limit)).unwrap();
    assert!(matches!(
        buffer.ensure_mapped(bytes(limit + 1)),
        Err(Error::OutOfPages { .. })
    ));
    pool.verify([&buffer]).unwrap();
    buffer.truncate(ByteLength::ZERO).unwrap();
    pool.trim();
    buffer.ensure_mapped(bytes(2)).unwrap();
}

#[test]
#[ignore = "needs a Vulkan device: run .ci/install-vulkan"]
fn heaps_beyond_those_that_kernels_are_shown_are_a_limit() {
    let mut device = looks_up();
    let limit = device.capabilities().heap_limit.expect("a limit");
    let heaps: Vec<_> = (0..limit)
        .map(|_| device.create_heap(pages(1)).unwrap())
        .collect();
    let refused = device.create_heap(pages(1));
    assert!(
        matches!(refused, Err(DeviceError::Limit { .. })),
        "{refused:?}"
    );
    device.destroy_heap(heaps[3]).unwrap();
    assert_eq!(device.create_heap(pages(1)), Ok(heaps[3]));
}
