//! The Vulkan device, on whatever driver there is: a GPU's, or Mesa's in software.
//!
//! Ignored until asked for, since not every machine has one: `just test-vulkan`.

#![cfg(feature = "vulkan")]
#![expect(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

mod device;
mod pool;
mod refusals;
mod table;

use lacuna_pages::device::{Access, Address, HeapId, HostCopies, Operation, Place, SpaceId};
use lacuna_pages::vulkan::{PageTable, VulkanQueue};
use lacuna_pages::{ByteLength, Device, DeviceError, VulkanDevice};

const PAGE: u64 = 65_536;

/// A device with its own page table, unless `LACUNA_TEST_LOOKUP` says that kernels are to look pages up.
fn open() -> VulkanDevice {
    let pages = match std::env::var_os("LACUNA_TEST_LOOKUP") {
        Some(_) => PageTable::Lookup,
        None => PageTable::Device,
    };
    let device = VulkanDevice::open_with(pages).expect("a driver");
    assert_eq!(device.page_table(), pages, "a driver with all features");
    device
}

fn pages(count: u64) -> ByteLength {
    ByteLength::new(count * PAGE)
}

fn address(space: SpaceId, page: u64) -> Address {
    Address {
        space,
        offset: page * PAGE,
    }
}

fn map(space: SpaceId, page: u64, heap: HeapId, from: u64) -> Operation {
    Operation::Map {
        address: address(space, page),
        place: Place {
            heap,
            offset: from * PAGE,
        },
        length: pages(1),
        access: Access::ReadWrite,
    }
}

fn unmap(space: SpaceId, page: u64, count: u64) -> Operation {
    Operation::Unmap {
        address: address(space, page),
        length: pages(count),
    }
}

/// A reservation that shows `heap` from end to end.
fn whole(device: &mut VulkanDevice, heap: HeapId, count: u64) -> SpaceId {
    let space = device.reserve(pages(count)).unwrap();
    let operation = Operation::Map {
        address: address(space, 0),
        place: Place { heap, offset: 0 },
        length: pages(count),
        access: Access::ReadWrite,
    };
    device.apply(&[operation], Default::default()).unwrap();
    space
}

fn read(queue: &VulkanQueue, at: Address, length: u64) -> Vec<u8> {
    let mut bytes = vec![0; length as usize];
    queue.read(at, &mut bytes).unwrap();
    bytes
}

/// Bytes without a pattern, the same for the same seed.
fn noise(seed: u64, length: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(length as usize);
    while (bytes.len() as u64) < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(length as usize);
    bytes
}

/// `0..count` in an order that leaves no two neighbours side by side.
fn shuffled(count: u64) -> Vec<u64> {
    (0..count).map(|index| index * 77 % count).collect()
}
