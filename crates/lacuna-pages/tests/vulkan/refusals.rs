//! What the device refuses, and that a refusal changes nothing.

use lacuna_pages::device::{Fence, Operation, Patience, Place};
use lacuna_pages::vulkan::Rows;
use lacuna_pages::{ByteLength, Device};

use super::*;

fn is_invalid<T: std::fmt::Debug>(result: Result<T, DeviceError>) -> bool {
    matches!(
        result,
        Err(DeviceError::Invalid {
            device: "vulkan",
            ..
        })
    )
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn batches_outside_the_contract_are_refused_before_anything_is_done() {
    let mut device = open();
    let queue = device.queue();
    let heap = device.create_heap(pages(4)).unwrap();
    let space = device.reserve(pages(16)).unwrap();
    device
        .apply(&[map(space, 0, heap, 0)], Fence::DONE)
        .unwrap();
    queue.write(address(space, 0), &noise(1, PAGE)).unwrap();
    let part = |operation: fn(Address, ByteLength) -> Operation, offset, length| {
        operation(Address { space, offset }, ByteLength::new(length))
    };
    let zero = |address, length| Operation::Zero { address, length };
    let drop_ = |address, length| Operation::Unmap { address, length };
    let place = Place { heap, offset: 0 };
    let bad = [
        map(space, 16, heap, 0),
        map(space, 1, heap, 4),
        map(space, 1, HeapId(99), 0),
        map(SpaceId(99), 1, heap, 0),
        unmap(space, 15, 2),
        unmap(space, 3, 0),
        part(drop_, 100, PAGE),
        part(drop_, 0, 100),
        part(drop_, PAGE * u64::from(u32::MAX), PAGE),
        part(drop_, u64::MAX - PAGE + 1, PAGE),
        part(zero, PAGE, PAGE),
        part(zero, 0, 2 * PAGE),
        Operation::Copy {
            from: address(space, 1),
            to: place,
            length: pages(1),
        },
        Operation::Protect {
            address: address(space, 1),
            length: pages(1),
            access: Access::Read,
        },
        Operation::Commit {
            place,
            length: pages(1),
        },
        Operation::Decommit {
            place,
            length: pages(1),
        },
    ];
    for operation in bad {
        let error = device
            .apply(&[operation, map(space, 8, heap, 1)], Fence::DONE)
            .unwrap_err();
        assert_eq!(error.applied, 0, "{operation:?}");
        assert!(is_invalid::<()>(Err(error.cause)), "{operation:?}");
    }
    let twice = [map(space, 8, heap, 1), map(space, 8, heap, 2)];
    assert!(is_invalid(
        device
            .apply(&twice, Fence::DONE)
            .map_err(|error| error.cause)
    ));
    let early = device
        .apply(&[], Fence(u64::MAX))
        .map_err(|error| error.cause);
    assert!(is_invalid(early));
    assert!(is_invalid(queue.checksum(address(space, 8), pages(1))));
    assert!(read(&queue, address(space, 0), PAGE) == noise(1, PAGE));
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn a_batch_that_stops_says_how_far_it_got() {
    let mut device = open();
    let queue = device.queue();
    let heap = device.create_heap(pages(4)).unwrap();
    let space = device.reserve(pages(16)).unwrap();
    let hole = Operation::Zero {
        address: address(space, 9),
        length: pages(1),
    };
    let batch = [
        map(space, 0, heap, 0),
        map(space, 1, heap, 1),
        hole,
        unmap(space, 0, 1),
    ];
    let error = device.apply(&batch, Fence::DONE).unwrap_err();
    assert_eq!(error.applied, 2);
    queue.write(address(space, 0), &noise(1, 2 * PAGE)).unwrap();
    assert!(read(&queue, address(space, 0), 2 * PAGE) == noise(1, 2 * PAGE));
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn holes_and_sealed_pages_are_never_touched() {
    let mut device = open();
    let queue = device.queue();
    let heap = device.create_heap(pages(4)).unwrap();
    let space = device.reserve(pages(16)).unwrap();
    let seal = Operation::Protect {
        address: address(space, 2),
        length: pages(1),
        access: Access::Read,
    };
    let maps = [
        map(space, 1, heap, 1),
        map(space, 2, heap, 2),
        map(space, 3, heap, 3),
    ];
    device.apply(&maps, Fence::DONE).unwrap();
    queue.write(address(space, 1), &noise(1, 3 * PAGE)).unwrap();
    device.apply(&[seal], Fence::DONE).unwrap();

    let rows = |page| Rows {
        address: address(space, page),
        row: ByteLength::new(PAGE),
        stride: ByteLength::new(PAGE),
    };
    let data = noise(2, 2 * PAGE);
    for page in [0, 1, 2, 3] {
        assert!(
            is_invalid(queue.write(address(space, page), &data)),
            "write at {page}"
        );
        assert!(
            is_invalid(queue.write_rows(rows(page), &data)),
            "rows at {page}"
        );
    }
    for page in [0, 3, 4, 15] {
        assert!(
            is_invalid(queue.checksum(address(space, page), pages(2))),
            "read at {page}"
        );
        assert!(is_invalid(
            queue.read(address(space, page), &mut data.clone())
        ));
    }
    assert!(read(&queue, address(space, 1), 3 * PAGE) == noise(1, 3 * PAGE));

    let unseal = Operation::Protect {
        address: address(space, 2),
        length: pages(1),
        access: Access::ReadWrite,
    };
    device.apply(&[unseal], Fence::DONE).unwrap();
    queue.write(address(space, 2), &data).unwrap();
    assert!(read(&queue, address(space, 2), 2 * PAGE) == data);
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn rows_and_words_that_do_not_fit_are_refused() {
    let mut device = open();
    let queue = device.queue();
    let heap = device.create_heap(pages(4)).unwrap();
    let space = whole(&mut device, heap, 4);
    let try_rows = |offset, row, stride, length: usize| {
        let rows = Rows {
            address: Address { space, offset },
            row: ByteLength::new(row),
            stride: ByteLength::new(stride),
        };
        queue.write_rows(rows, &vec![1; length])
    };
    assert!(try_rows(0, 8, 12, 16).is_ok());
    for (offset, row, stride, length) in [
        (2, 8, 12, 16),
        (0, 6, 12, 12),
        (0, 8, 10, 16),
        (0, 8, 4, 16),
        (0, 0, 4, 16),
        (0, 8, 12, 0),
        (0, 8, 12, 12),
        (0, 8 << 20, 8 << 20, 8 << 20),
        (0, 8, u64::MAX - 3, 32),
        (4 * PAGE - 8, 8, 8, 16),
    ] {
        assert!(
            is_invalid(try_rows(offset, row, stride, length)),
            "{offset} {row} {stride}"
        );
    }
    assert!(is_invalid(
        queue.checksum(Address { space, offset: 2 }, ByteLength::new(4))
    ));
    assert!(is_invalid(
        queue.checksum(address(space, 0), ByteLength::new(6))
    ));
    assert!(is_invalid(
        queue.checksum(address(space, 0), ByteLength::ZERO)
    ));
    assert!(is_invalid(queue.wait(Fence(u64::MAX), Patience::Block)));
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn a_mapped_heap_is_not_given_back() {
    let mut device = open();
    let heap = device.create_heap(pages(4)).unwrap();
    let space = whole(&mut device, heap, 4);
    assert!(is_invalid(device.destroy_heap(heap)));
    device.apply(&[unmap(space, 0, 4)], Fence::DONE).unwrap();
    device.destroy_heap(heap).unwrap();
    assert!(is_invalid(device.destroy_heap(heap)));
    device.release(space, Fence::DONE).unwrap();
    assert!(is_invalid(device.release(space, Fence::DONE)));
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn more_than_the_device_has_is_a_limit_and_names_it() {
    let mut device = open();
    for absurd in [1 << 50, u64::MAX] {
        let error = device.reserve(ByteLength::new(absurd)).unwrap_err();
        let DeviceError::Limit {
            limit, requested, ..
        } = error
        else {
            panic!("{error}")
        };
        assert!(limit < requested, "{error}");
        assert!(matches!(
            device.create_heap(ByteLength::new(absurd / PAGE * PAGE)),
            Err(DeviceError::Limit { .. })
        ));
    }
    assert!(is_invalid(device.reserve(ByteLength::ZERO)));
    assert!(is_invalid(device.create_heap(ByteLength::ZERO)));
    assert!(is_invalid(device.create_heap(ByteLength::new(1))));
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn address_space_runs_out_and_comes_back() {
    let mut device = open();
    // A GPU has far more than a test should take.
    let DeviceError::Limit { limit, .. } = device.reserve(ByteLength::new(1 << 50)).unwrap_err()
    else {
        panic!("no limit")
    };
    if limit > ByteLength::gibibytes(64) {
        return;
    }
    let quarter = ByteLength::new(limit.get() / 4 / PAGE * PAGE);
    let spaces: Vec<_> = (0..4).map(|_| device.reserve(quarter).unwrap()).collect();
    let error = device.reserve(quarter).unwrap_err();
    assert!(
        matches!(
            error,
            DeviceError::Limit {
                what: "address space",
                ..
            }
        ),
        "{error}"
    );
    device.release(spaces[1], Fence::DONE).unwrap();
    assert_eq!(device.reserve(quarter), Ok(spaces[1]));
}
