//! Pool and buffers on the Vulkan device.

use lacuna_pages::device::{Commitment, Patience};
use lacuna_pages::vulkan::checksum;
use lacuna_pages::{
    Buffer, ByteLength, Device, Error, PageCount, PageRange, Pool, PoolConfig, Recycle, VirtualPage,
};

use super::*;

fn pool_with(config: PoolConfig) -> (Pool, VulkanQueue) {
    let device = open();
    assert_eq!(device.capabilities().commitment, Commitment::PerHeap);
    let queue = device.queue();
    let config = PoolConfig {
        heap_bytes: ByteLength::mebibytes(4),
        ..config
    };
    (Pool::new(device, config).unwrap(), queue)
}

fn at(buffer: &Buffer, page: u64) -> Address {
    buffer.address(page * PAGE)
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn buffers_grow_side_by_side_and_keep_their_contents() {
    let (pool, queue) = pool_with(PoolConfig::default());
    let mut buffers: Vec<_> = (0..6)
        .map(|_| pool.reserve(ByteLength::mebibytes(16), "layer").unwrap())
        .collect();
    for page in 0..40u64 {
        for (index, buffer) in buffers.iter_mut().enumerate() {
            let start = (page * PAGE) as usize;
            buffer.ensure_mapped(start..start + PAGE as usize).unwrap();
            let data = noise(page * 10 + index as u64, PAGE);
            queue.write(at(buffer, page), &data).unwrap();
        }
    }
    pool.verify(&buffers).unwrap();
    for (index, buffer) in buffers.iter().enumerate() {
        let pages_of = (0..40u64).map(|page| noise(page * 10 + index as u64, PAGE));
        let all = pages_of.collect::<Vec<_>>().concat();
        assert_eq!(
            queue.checksum(at(buffer, 0), pages(40)).unwrap(),
            checksum(&all)
        );
    }
    assert_eq!(pool.ledger().mapped, pages(240));
    drop(buffers);
    pool.trim();
    assert_eq!(pool.ledger().committed, ByteLength::ZERO);
    assert_eq!(pool.ledger().heaps, 0);
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn a_copy_on_write_copies_one_page() {
    let (pool, queue) = pool_with(PoolConfig::default());
    let mut first = pool.reserve(ByteLength::mebibytes(4), "first").unwrap();
    let mut second = pool.reserve(ByteLength::mebibytes(4), "second").unwrap();
    first.ensure_mapped(0..10 * PAGE as usize).unwrap();
    let data = noise(5, 10 * PAGE);
    queue.write(at(&first, 0), &data).unwrap();
    first.seal(PageRange::of(0..10)).unwrap();
    second
        .share_from(&first, PageRange::of(0..10), VirtualPage::new(3))
        .unwrap();
    assert_eq!(pool.ledger().shared, pages(10));
    assert!(read(&queue, at(&second, 3), 10 * PAGE) == data);
    assert!(queue.write(at(&second, 4), &[0]).is_err(), "sealed");

    let report = second.make_unique(PageRange::of(4..5)).unwrap();
    assert_eq!(report.pages_mapped, PageCount::new(1));
    queue.write(at(&second, 4), &noise(6, PAGE)).unwrap();
    let mut changed = data.clone();
    changed[PAGE as usize..2 * PAGE as usize].copy_from_slice(&noise(6, PAGE));
    assert!(read(&queue, at(&second, 3), 10 * PAGE) == changed);
    assert!(read(&queue, at(&first, 0), 10 * PAGE) == data);
    assert_eq!(pool.ledger().counts.copies_on_write, 1);
    pool.verify([&first, &second]).unwrap();

    drop(first);
    assert!(read(&queue, at(&second, 3), 10 * PAGE) == changed);
    pool.verify([&second]).unwrap();
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn a_pin_outlives_the_buffer_that_wrote_the_page() {
    let (pool, queue) = pool_with(PoolConfig::default());
    let mut first = pool.reserve(ByteLength::mebibytes(1), "").unwrap();
    first.ensure_mapped(0..2 * PAGE as usize).unwrap();
    queue.write(at(&first, 0), &noise(1, 2 * PAGE)).unwrap();
    first.seal(PageRange::of(0..2)).unwrap();
    let pins = first.pin(PageRange::of(0..2)).unwrap();
    drop(first);
    let mut second = pool.reserve(ByteLength::mebibytes(1), "").unwrap();
    let share = lacuna_pages::Share {
        source: lacuna_pages::Source::Pins(&pins),
        target: &mut second,
        at: VirtualPage::new(7),
    };
    pool.share(&mut [share]).unwrap();
    assert!(read(&queue, at(&second, 7), 2 * PAGE) == noise(1, 2 * PAGE));
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn a_window_over_a_hundred_thousand_rows_keeps_memory_flat() {
    const ROW: u64 = 2_048;
    const WINDOW: u64 = 1_024;
    let limit = Some(ByteLength::mebibytes(4));
    let config = PoolConfig {
        limit,
        ..PoolConfig::default()
    };
    let (pool, queue) = pool_with(config);
    let rows = 100_000u64;
    let length = ByteLength::new(rows * ROW);
    let mut buffer = pool.reserve(length, "window").unwrap();
    let mut passed = 0;
    for row in 0..rows {
        buffer
            .ensure_mapped((row * ROW) as usize..((row + 1) * ROW) as usize)
            .unwrap();
        buffer.write(row * ROW, &noise(row, ROW)).unwrap();
        let first = row.saturating_sub(WINDOW);
        let whole = first * ROW / PAGE;
        if whole > passed {
            buffer.unmap(PageRange::of(passed..whole)).unwrap();
            passed = whole;
        }
        assert_eq!(pool.ledger().committed, ByteLength::mebibytes(4));
        if row % 10_000 == 0 || row + 1 == rows {
            let kept: Vec<u8> = (first..=row).flat_map(|row| noise(row, ROW)).collect();
            let found = read(&queue, buffer.address(first * ROW), kept.len() as u64);
            assert!(found == kept, "up to row {row}");
        }
    }
    assert_eq!(
        pool.ledger().counts.pages_mapped,
        (rows * ROW).div_ceil(PAGE)
    );
    assert_eq!(pool.ledger().counts.pages_committed, 64);
    pool.verify([&buffer]).unwrap();
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn recycled_pages_hold_zeros_if_asked_to() {
    let config = PoolConfig {
        recycle: Recycle::Zeroed,
        ..PoolConfig::default()
    };
    let (pool, queue) = pool_with(config);
    for round in 0..3 {
        let mut buffer = pool.reserve(ByteLength::mebibytes(4), "").unwrap();
        buffer.ensure_mapped(0..64 * PAGE as usize).unwrap();
        assert!(read(&queue, at(&buffer, 0), 64 * PAGE) == vec![0; 64 * PAGE as usize]);
        queue
            .write(at(&buffer, 0), &noise(round, 64 * PAGE))
            .unwrap();
    }
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn the_host_does_not_see_a_buffer_and_is_told_so() {
    let (pool, _) = pool_with(PoolConfig::default());
    let mut buffer = pool.reserve(ByteLength::mebibytes(1), "").unwrap();
    let report = buffer.ensure_mapped(0..4096).unwrap();
    buffer.write(4096, &[]).unwrap();
    buffer.read(1 << 20, &mut []).unwrap();
    pool.wait(report.fence, Patience::Block).unwrap();
    let unsupported = Error::Unsupported {
        device: "vulkan",
        what: "lend its memory to the host; copy with `read` and `write`",
    };
    assert_eq!(buffer.bytes(0..4096).unwrap_err(), unsupported);
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn a_storm_of_buffers_leaves_nothing_behind() {
    let (pool, queue) = pool_with(PoolConfig::default());
    let mut alive: Vec<Buffer> = Vec::new();
    for round in 0..120u64 {
        let mut buffer = pool.reserve(ByteLength::mebibytes(2), "").unwrap();
        let count = 1 + round * 7 % 11;
        buffer.ensure_mapped(0..(count * PAGE) as usize).unwrap();
        queue
            .write(at(&buffer, 0), &noise(round, count * PAGE))
            .unwrap();
        assert_eq!(
            queue.checksum(at(&buffer, 0), pages(count)).unwrap(),
            checksum(&noise(round, count * PAGE))
        );
        alive.push(buffer);
        if alive.len() > 5 {
            alive.swap_remove((round * 13 % 6) as usize);
        }
    }
    pool.verify(&alive).unwrap();
    drop(alive);
    pool.trim();
    assert_eq!(pool.ledger().committed, ByteLength::ZERO);
    assert_eq!(pool.ledger().reserved, ByteLength::ZERO);
}
