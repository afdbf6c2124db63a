#![expect(unsafe_code, reason = "buffers are allocated with a page's alignment")]

//! The dense device: every reservation is memory from its first to its last byte, taken at once.
//! What engines without a page table do, and the fallback wherever there is none; the same buffers
//! stand on it, and only sharing is refused.
//!
//! # Safety
//!
//! * **N1** A block is allocated in `reserve`, zeroed and touched throughout, and freed with the
//!   same layout by `release` or when the device is dropped, never in between.
//! * **N2** Blocks are distinct allocations, so two pages never show the same memory.

use std::alloc::Layout;
use std::ptr::NonNull;

use crate::device::{
    Address, Aliasing, BatchCost, BatchError, Capabilities, Commitment, Device, DeviceError, Fence,
    FenceState, HeapId, Hole, HostView, Operation, Ordering, Patience, SpaceId,
};
use crate::units::{ByteLength, PageSize};

const NAME: &str = "dense";

/// Every block starts at a multiple of this, so that vector loads never straddle its start.
const ALIGNMENT: usize = 4096;

/// The dense device: its module says what it does and costs.
#[derive(Debug)]
pub struct DenseDevice {
    capabilities: Capabilities,
    blocks: Vec<Option<Block>>,
}

#[derive(Debug)]
struct Block {
    base: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the block is an allocation that this value alone owns (N1), and allocations may be used
// and freed by any thread.
unsafe impl Send for Block {}

impl Block {
    fn new(length: ByteLength) -> Option<Self> {
        let size = usize::try_from(length.get())
            .ok()
            .filter(|&size| size > 0)?;
        let layout = Layout::from_size_align(size, ALIGNMENT).ok()?;
        // SAFETY: the layout's size is not zero.
        let base = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) })?;
        for offset in (0..size).step_by(ALIGNMENT) {
            // SAFETY: N1: `offset` is within the allocation; a volatile write makes the system
            // commit the page now, which is what this device promises.
            unsafe { base.add(offset).write_volatile(0) };
        }
        Some(Self { base, layout })
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: N1: allocated with this layout and freed once.
        unsafe { std::alloc::dealloc(self.base.as_ptr(), self.layout) };
    }
}

impl DenseDevice {
    /// Opens the device; it exists everywhere.
    pub fn new() -> Self {
        let capabilities = Capabilities {
            name: NAME,
            page_sizes: PageSize::all_between(PageSize::KIB_4, PageSize::MIB_2),
            aliasing: Aliasing::Unsupported,
            hole: Hole::Undefined,
            ordering: Ordering::Immediate,
            commitment: Commitment::WithReservation,
            batch_cost: BatchCost::Operations,
            mapping_limit: None,
            heap_limit: None,
        };
        Self {
            capabilities,
            blocks: Vec::new(),
        }
    }

    fn zero(&self, address: Address, length: ByteLength) -> Result<(), DeviceError> {
        let found = self
            .blocks
            .get(address.space.0 as usize)
            .and_then(Option::as_ref);
        let block = found.ok_or_else(|| invalid("a reservation it does not have"))?;
        let end = address.offset.checked_add(length.get());
        if end.is_none_or(|end| end > block.layout.size() as u64) {
            return Err(invalid("an operation outside its reservation"));
        }
        // SAFETY: N1: the range is within the block, and the pool zeroes only pages of a buffer it
        // holds exclusively.
        unsafe {
            block
                .base
                .add(address.offset as usize)
                .write_bytes(0, length.get() as usize);
        }
        Ok(())
    }
}

impl Default for DenseDevice {
    fn default() -> Self {
        Self::new()
    }
}

// SAFETY: D1 and D2: N1. D3: N2, and only `zero` writes. D4: `zero` is the one operation, does all
// or nothing, and `apply` stops at the first that fails.
unsafe impl Device for DenseDevice {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn reserve(&mut self, length: ByteLength) -> Result<SpaceId, DeviceError> {
        let block = Block::new(length).ok_or(DeviceError::OutOfMemory {
            call: "alloc",
            code: 12,
            length,
        })?;
        let index = self
            .blocks
            .iter()
            .position(Option::is_none)
            .unwrap_or(self.blocks.len());
        if index == self.blocks.len() {
            self.blocks.push(None);
        }
        self.blocks[index] = Some(block);
        Ok(SpaceId(
            u32::try_from(index).expect("fewer than 2^32 allocations exist"),
        ))
    }

    fn release(&mut self, space: SpaceId, _after: Fence) -> Result<Fence, DeviceError> {
        let block = self.blocks.get_mut(space.0 as usize).and_then(Option::take);
        block
            .map(drop)
            .ok_or_else(|| invalid("a reservation it does not have"))?;
        Ok(Fence::DONE)
    }

    fn create_heap(&mut self, _: ByteLength) -> Result<HeapId, DeviceError> {
        Err(invalid("a heap: memory comes with the reservation"))
    }

    fn destroy_heap(&mut self, _: HeapId) -> Result<(), DeviceError> {
        Err(invalid("a heap: memory comes with the reservation"))
    }

    fn apply(&mut self, batch: &[Operation], _after: Fence) -> Result<Fence, BatchError> {
        for (applied, &operation) in batch.iter().enumerate() {
            let result = match operation {
                Operation::Zero { address, length } => self.zero(address, length),
                _ => Err(invalid("an operation other than zeroing")),
            };
            result.map_err(|cause| BatchError { applied, cause })?;
        }
        Ok(Fence::DONE)
    }

    fn wait(&mut self, _: Fence, _: Patience) -> Result<FenceState, DeviceError> {
        Ok(FenceState::Signalled)
    }

    fn host_view(&self, space: SpaceId) -> Option<HostView> {
        let block = self.blocks.get(space.0 as usize).and_then(Option::as_ref);
        block.map(|block| HostView::Pointer(block.base))
    }
}

fn invalid(what: &'static str) -> DeviceError {
    DeviceError::Invalid { device: NAME, what }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeroing_ends_where_the_reservation_does() {
        let mut device = DenseDevice::new();
        let length = ByteLength::kibibytes(64);
        let space = device.reserve(length).expect("memory");
        let mut zero = |offset, length| {
            let address = Address { space, offset };
            device.apply(&[Operation::Zero { address, length }], Fence::DONE)
        };
        assert!(zero(0, length).is_ok());
        assert!(zero(32 << 10, ByteLength::kibibytes(32)).is_ok());
        assert!(zero(0, ByteLength::kibibytes(32)).is_ok());
        assert!(zero(32 << 10, length).is_err());
        assert!(zero(u64::MAX, length).is_err());
    }

    #[test]
    fn what_there_is_not_cannot_be_given_back() {
        let mut device = DenseDevice::new();
        let space = device.reserve(ByteLength::kibibytes(64)).expect("memory");
        assert!(device.release(space, Fence::DONE).is_ok());
        assert!(device.host_view(space).is_none());
        assert!(device.release(space, Fence::DONE).is_err());
        assert!(device.destroy_heap(HeapId(0)).is_err());
    }
}
