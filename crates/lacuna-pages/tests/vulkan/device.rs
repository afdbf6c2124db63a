//! What a GPU sees through its own page table.

use lacuna_pages::device::{Fence, FenceState, Operation, Patience, Place};
use lacuna_pages::vulkan::{Rows, checksum};
use lacuna_pages::{ByteLength, Device};

use super::*;

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn a_kernel_reads_one_flat_range_over_scattered_pages() {
    let mut device = open();
    let queue = device.queue();
    let count = 128;
    let heap = device.create_heap(pages(count)).unwrap();
    let space = device.reserve(pages(count)).unwrap();
    let order = shuffled(count);
    let batch: Vec<_> = (0..count)
        .map(|page| map(space, page, heap, order[page as usize]))
        .collect();
    device.apply(&batch, Fence::DONE).unwrap();

    // Rows of 1,536 bytes straddle the pages.
    let row = 1_536;
    let data = noise(1, count * PAGE / row * row);
    let rows = Rows {
        address: address(space, 0),
        row: ByteLength::new(row),
        stride: ByteLength::new(row),
    };
    queue.write_rows(rows, &data).unwrap();
    let all = ByteLength::new(data.len() as u64);
    assert_eq!(
        queue.checksum(address(space, 0), all).unwrap(),
        checksum(&data)
    );
    assert!(read(&queue, address(space, 0), all.get()) == data);

    // And every page lies where it was put.
    let flat = whole(&mut device, heap, count);
    for (page, place) in (0..count).zip(order) {
        let start = (page * PAGE) as usize;
        let end = data.len().min(start + PAGE as usize);
        let found = read(&queue, address(flat, place), (end - start) as u64);
        assert!(found == data[start..end], "page {page} at {place}");
    }
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn rows_with_a_stride_leave_what_is_between_them() {
    let mut device = open();
    let queue = device.queue();
    let heap = device.create_heap(pages(4)).unwrap();
    let space = whole(&mut device, heap, 4);
    let mut expected = noise(2, 4 * PAGE);
    queue.write(address(space, 0), &expected).unwrap();
    let (first, row, stride, count) = (60, 96, 1_000, 250);
    let data = noise(3, row * count);
    let rows = Rows {
        address: Address {
            space,
            offset: first,
        },
        row: ByteLength::new(row),
        stride: ByteLength::new(stride),
    };
    queue.write_rows(rows, &data).unwrap();
    for index in 0..count {
        let (from, to) = ((index * row) as usize, (first + index * stride) as usize);
        expected[to..to + row as usize].copy_from_slice(&data[from..from + row as usize]);
    }
    assert!(read(&queue, address(space, 0), 4 * PAGE) == expected);
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn pages_in_two_buffers_are_one_memory() {
    let mut device = open();
    let queue = device.queue();
    let heap = device.create_heap(pages(8)).unwrap();
    let first = device.reserve(pages(64)).unwrap();
    let second = device.reserve(pages(64)).unwrap();
    let batch: Vec<_> = (0..8)
        .flat_map(|page| {
            [
                map(first, page * 3, heap, page),
                map(second, 40 - page, heap, page),
            ]
        })
        .collect();
    device.apply(&batch, Fence::DONE).unwrap();
    for page in 0..8 {
        let written = noise(page, PAGE);
        let through_first = page % 2 == 0;
        let (to, other) = (address(first, page * 3), address(second, 40 - page));
        queue
            .write(if through_first { to } else { other }, &written)
            .unwrap();
        assert!(read(&queue, to, PAGE) == written, "page {page}");
        assert!(read(&queue, other, PAGE) == written, "page {page}");
        assert_eq!(queue.checksum(other, pages(1)).unwrap(), checksum(&written));
    }
    // Detaching here, or releasing the whole reservation, leaves the page there.
    device.apply(&[unmap(second, 40, 1)], Fence::DONE).unwrap();
    assert!(read(&queue, address(first, 0), PAGE) == noise(0, PAGE));
    device.release(second, Fence::DONE).unwrap();
    for page in 0..8 {
        assert!(read(&queue, address(first, page * 3), PAGE) == noise(page, PAGE));
    }
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn a_page_keeps_its_contents_while_it_moves() {
    let mut device = open();
    let queue = device.queue();
    let heap = device.create_heap(pages(4)).unwrap();
    let space = device.reserve(pages(1_000)).unwrap();
    for page in 0..4 {
        device
            .apply(&[map(space, page, heap, page)], Fence::DONE)
            .unwrap();
        queue
            .write(address(space, page), &noise(page, PAGE))
            .unwrap();
    }
    // Round and round, one batch and one submission a step, without waiting.
    let mut last = queue_end(&mut device);
    for step in 0..50u64 {
        let batch: Vec<_> = (0..4)
            .map(|page| map(space, page, heap, (page + step) % 4))
            .collect();
        let fence = device.apply(&batch, Fence::DONE).unwrap();
        assert_eq!(fence.0, last.0 + 1, "one submission per batch");
        last = fence;
    }
    for page in 0..4 {
        assert!(read(&queue, address(space, page), PAGE) == noise((page + 49) % 4, PAGE));
    }
    let far = [unmap(space, 0, 4), map(space, 999, heap, 2)];
    device.apply(&far, Fence::DONE).unwrap();
    assert!(read(&queue, address(space, 999), PAGE) == noise(2, PAGE));
}

/// The last point of the timeline.
fn queue_end(device: &mut VulkanDevice) -> Fence {
    let space = device.reserve(pages(1)).unwrap();
    let fence = device.apply(&[unmap(space, 0, 1)], Fence::DONE).unwrap();
    device.release(space, fence).unwrap();
    fence
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn a_range_longer_than_a_shader_sees_at_once_is_read_in_parts() {
    let mut device = open();
    let queue = device.queue();
    let (sixteen, total) = (16, 2_560);
    let heap = device.create_heap(pages(sixteen)).unwrap();
    let space = device.reserve(pages(total)).unwrap();
    // 160 MiB of addresses over 1 MiB of memory.
    let batch: Vec<_> = (0..total / sixteen)
        .map(|part| Operation::Map {
            address: address(space, part * sixteen),
            place: Place { heap, offset: 0 },
            length: pages(sixteen),
            access: Access::ReadWrite,
        })
        .collect();
    device.apply(&batch, Fence::DONE).unwrap();
    let part = noise(9, sixteen * PAGE);
    queue.write(address(space, 0), &part).unwrap();
    let expected = checksum(&part.repeat((total / sixteen) as usize));
    assert_eq!(
        queue.checksum(address(space, 0), pages(total)).unwrap(),
        expected
    );
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn binds_and_kernels_take_effect_in_the_order_they_were_submitted() {
    let mut device = open();
    let queue = device.queue();
    let heap = device.create_heap(pages(64)).unwrap();
    let space = device.reserve(pages(64)).unwrap();
    // Every round writes all 64 pages through a window that then moves on, and never waits.
    let rounds = 40;
    for round in 0..rounds {
        let batch: Vec<_> = (0..32)
            .map(|page| map(space, page, heap, (page + round) % 64))
            .collect();
        device.apply(&batch, Fence::DONE).unwrap();
        let rows = Rows {
            address: address(space, 0),
            row: ByteLength::new(4_096),
            stride: ByteLength::new(4_096),
        };
        queue.write_rows(rows, &noise(round, 32 * PAGE)).unwrap();
    }
    let flat = whole(&mut device, heap, 64);
    for page in 0..64u64 {
        // The last round whose window held the page, and where in the window it was.
        let held = |round: u64| (page + 64 * 2 - round) % 64;
        let round = (0..rounds).rev().find(|&round| held(round) < 32).unwrap();
        let data = noise(round, 32 * PAGE);
        let start = (held(round) * PAGE) as usize;
        let found = read(&queue, address(flat, page), PAGE);
        assert!(found == data[start..start + PAGE as usize], "page {page}");
    }
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn copying_and_zeroing_are_part_of_the_batch() {
    let mut device = open();
    let queue = device.queue();
    let heap = device.create_heap(pages(4)).unwrap();
    let space = whole(&mut device, heap, 4);
    for page in 0..4 {
        queue
            .write(address(space, page), &noise(page, PAGE))
            .unwrap();
    }
    // Copy page 0 over memory 3, show that at page 0, and zero page 1.
    let batch = [
        Operation::Copy {
            from: address(space, 0),
            to: Place {
                heap,
                offset: 3 * PAGE,
            },
            length: pages(1),
        },
        map(space, 0, heap, 3),
        unmap(space, 3, 1),
        Operation::Zero {
            address: address(space, 1),
            length: pages(1),
        },
    ];
    let before = queue_end(&mut device);
    let fence = device.apply(&batch, Fence::DONE).unwrap();
    assert_eq!(fence.0, before.0 + 3, "copy, bind, zero");
    queue.write(address(space, 0), &[1; 8]).unwrap();
    let flat = whole(&mut device, heap, 4);
    let mut copied = noise(0, PAGE);
    assert!(read(&queue, address(flat, 0), PAGE) == copied);
    copied[..8].fill(1);
    assert!(read(&queue, address(flat, 3), PAGE) == copied);
    assert!(read(&queue, address(flat, 1), PAGE) == vec![0; PAGE as usize]);
    assert!(read(&queue, address(flat, 2), PAGE) == noise(2, PAGE));
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn fences_are_reached_in_order() {
    let mut device = open();
    let queue = device.queue();
    let heap = device.create_heap(pages(64)).unwrap();
    let space = whole(&mut device, heap, 64);
    let fences: Vec<_> = (0..20)
        .map(|round| {
            queue
                .write(address(space, 0), &noise(round, 64 * PAGE))
                .unwrap()
        })
        .collect();
    assert!(fences.is_sorted_by(|left, right| left < right));
    let middle = fences[10];
    assert_eq!(
        device.wait(middle, Patience::Block),
        Ok(FenceState::Signalled)
    );
    for &fence in &fences[..=10] {
        assert_eq!(queue.wait(fence, Patience::Poll), Ok(FenceState::Signalled));
    }
    while device.wait(fences[19], Patience::Poll).unwrap() == FenceState::Pending {
        std::thread::yield_now();
    }
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn what_is_released_while_in_use_lasts_until_it_is_not() {
    let mut device = open();
    let queue = device.queue();
    for round in 0..30 {
        let heap = device.create_heap(pages(32)).unwrap();
        let space = whole(&mut device, heap, 32);
        queue
            .write(address(space, 0), &noise(round, 32 * PAGE))
            .unwrap();
        let fence = device.apply(&[unmap(space, 0, 32)], Fence::DONE).unwrap();
        device.destroy_heap(heap).unwrap();
        device.release(space, fence).unwrap();
    }
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn threads_share_a_queue() {
    let mut device = open();
    let queue = device.queue();
    let heap = device.create_heap(pages(64)).unwrap();
    let space = whole(&mut device, heap, 64);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let queue = queue.clone();
            scope.spawn(move || {
                for round in 0..8 {
                    let at = address(space, thread * 16);
                    let data = noise(thread * 100 + round, 16 * PAGE);
                    queue.write(at, &data).unwrap();
                    assert_eq!(queue.checksum(at, pages(16)).unwrap(), checksum(&data));
                    assert!(read(&queue, at, 16 * PAGE) == data);
                }
            });
        }
    });
}
