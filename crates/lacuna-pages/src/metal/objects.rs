#![expect(unsafe_code, reason = "Metal is a foreign interface")]

//! Buffers and heaps, each owned by one value.
//!
//! # Safety
//!
//! L1 to L4 of [`driver`](super::driver), and:
//!
//! * **B1** Staging memory is shared with the host, and read and written by it only while no submission that
//!   uses it is pending.

use std::fmt;
use std::ptr::NonNull;

use objc2::rc::Retained;
use objc2::runtime::ProtocolObject;
use objc2_metal::{
    MTLAllocation, MTLBuffer, MTLDevice, MTLHazardTrackingMode, MTLHeap, MTLHeapDescriptor,
    MTLHeapType, MTLResourceOptions, MTLStorageMode,
};

use super::driver::{Guarded, TILE, out_of_memory};
use crate::device::DeviceError;
use crate::gpu::bindings::Bindings;

/// A buffer of holes, of whole tiles.
pub(super) fn sparse_buffer(
    device: &ProtocolObject<dyn MTLDevice>,
    length: u64,
) -> Result<Retained<ProtocolObject<dyn MTLBuffer>>, DeviceError> {
    let options =
        MTLResourceOptions::StorageModePrivate | MTLResourceOptions::HazardTrackingModeUntracked;
    // SAFETY: L3: a length that is too long gives nothing.
    unsafe {
        device.newBufferWithLength_options_placementSparsePageSize(length as usize, options, TILE)
    }
    .ok_or(out_of_memory(
        "newBufferWithLength:options:placementSparsePageSize:",
        length,
    ))
}

/// A reservation.
pub(super) struct Space {
    pub(super) buffer: Guarded<dyn MTLBuffer>,
    pub(super) length: u64,
    pub(super) bindings: Bindings,
}

impl fmt::Debug for Space {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Space")
            .field("length", &self.length)
            .field("bindings", &self.bindings)
            .finish_non_exhaustive()
    }
}

impl Space {
    pub(super) fn new(
        device: &ProtocolObject<dyn MTLDevice>,
        length: u64,
    ) -> Result<Self, DeviceError> {
        Ok(Self {
            buffer: Guarded(sparse_buffer(device, length)?),
            length,
            bindings: Bindings::default(),
        })
    }

    pub(super) fn allocation(&self) -> &ProtocolObject<dyn MTLAllocation> {
        ProtocolObject::from_ref(&*self.buffer.0)
    }
}

/// Memory, and a buffer that all of it is mapped to, in order, which copies are made to.
pub(super) struct Heap {
    pub(super) heap: Guarded<dyn MTLHeap>,
    pub(super) whole: Guarded<dyn MTLBuffer>,
    pub(super) length: u64,
}

impl fmt::Debug for Heap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Heap").field(&self.length).finish()
    }
}

impl Heap {
    /// Memory, and a buffer that is still of holes.
    pub(super) fn new(
        device: &ProtocolObject<dyn MTLDevice>,
        length: u64,
    ) -> Result<Self, DeviceError> {
        let descriptor = MTLHeapDescriptor::new();
        descriptor.setType(MTLHeapType::Placement);
        descriptor.setStorageMode(MTLStorageMode::Private);
        descriptor.setHazardTrackingMode(MTLHazardTrackingMode::Untracked);
        descriptor.setMaxCompatiblePlacementSparsePageSize(TILE);
        descriptor.setSize(length as usize);
        let heap = device
            .newHeapWithDescriptor(&descriptor)
            .ok_or(out_of_memory("newHeapWithDescriptor:", length))?;
        Ok(Self {
            heap: Guarded(heap),
            whole: Guarded(sparse_buffer(device, length)?),
            length,
        })
    }

    /// Both of what has to be resident.
    pub(super) fn allocations(&self) -> [&ProtocolObject<dyn MTLAllocation>; 2] {
        [
            ProtocolObject::from_ref(&*self.heap.0),
            ProtocolObject::from_ref(&*self.whole.0),
        ]
    }
}

/// Memory that host and device see.
pub(super) struct Staging {
    pub(super) buffer: Guarded<dyn MTLBuffer>,
    length: usize,
}

impl Staging {
    pub(super) fn new(
        device: &ProtocolObject<dyn MTLDevice>,
        length: usize,
    ) -> Result<Self, DeviceError> {
        let options =
            MTLResourceOptions::StorageModeShared | MTLResourceOptions::HazardTrackingModeUntracked;
        let buffer = device
            .newBufferWithLength_options(length, options)
            .ok_or(out_of_memory("newBufferWithLength:options:", length as u64))?;
        Ok(Self {
            buffer: Guarded(buffer),
            length,
        })
    }

    pub(super) fn length(&self) -> usize {
        self.length
    }

    pub(super) fn allocation(&self) -> &ProtocolObject<dyn MTLAllocation> {
        ProtocolObject::from_ref(&*self.buffer.0)
    }

    fn contents(&self) -> NonNull<u8> {
        self.buffer.0.contents().cast()
    }

    /// Copies `bytes` to `start` on; no submission uses the buffer now (B1).
    pub(super) fn fill(&mut self, start: usize, bytes: &[u8]) {
        self.check(start, bytes.len());
        // SAFETY: B1, and the range was just checked; the buffer's memory never overlaps a Rust slice.
        unsafe {
            let target = self.contents().as_ptr().add(start);
            target.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
        }
    }

    /// Copies from `start` on to `bytes`; no submission uses the buffer now (B1).
    pub(super) fn read(&self, start: usize, bytes: &mut [u8]) {
        self.check(start, bytes.len());
        // SAFETY: as in `fill`.
        unsafe {
            let source = self.contents().as_ptr().add(start);
            source.copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len());
        }
    }

    fn check(&self, start: usize, length: usize) {
        let end = start.checked_add(length);
        let fits = end.is_some_and(|end| end <= self.length);
        assert!(fits, "staging is long enough");
    }
}
