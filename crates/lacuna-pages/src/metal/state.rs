//! What the device's lock guards: reservations, heaps, frames and the queue. Every operation is
//! checked in full, then queued, then entered in the bindings: an error leaves all as it was.

use std::sync::Arc;

use objc2_foundation::NSRange;
use objc2_metal::{MTL4UpdateSparseBufferMappingOperation, MTLSparseTextureMappingMode};
use slab::Slab;

use super::driver::{Change, Driver, Queue};
use super::frames::{Frame, Frames, Window};
use super::invalid;
use super::kernels::Kernels;
use super::objects::{Heap, Space};
use crate::device::{
    Access, Address, BatchError, DeviceError, Fence, FenceState, HeapId, Operation, Place, SpaceId,
};
use crate::gpu::bindings::{Denied, changed};
use crate::gpu::phases::{Bind, Kind, coalesce, phases};
use crate::gpu::words::limit;
use crate::units::ByteLength;

/// Something given back that the queue may still use.
#[derive(Debug)]
enum Retired {
    Space(Space),
    Heap(Heap),
}

/// A copy or a zeroing, checked.
enum Transfer {
    Copy(Window, Window),
    Zero(Window),
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) driver: Arc<Driver>,
    pub(super) queue: Queue,
    pub(super) frames: Frames,
    spaces: Slab<Space>,
    heaps: Slab<Heap>,
    kernels: Option<Arc<Kernels>>,
    retired: Vec<(Fence, Retired)>,
    /// Bytes of memory in heaps, retired ones included.
    allocated: u64,
}

impl Drop for State {
    fn drop(&mut self) {
        if !self.driver.is_idle_after(self.queue.submitted()) {
            // L1.
            std::mem::forget((
                std::mem::take(&mut self.spaces),
                std::mem::take(&mut self.heaps),
                std::mem::take(&mut self.retired),
                std::mem::take(&mut self.frames),
            ));
        }
    }
}

impl State {
    pub(super) fn new(driver: Arc<Driver>, queue: Queue) -> Self {
        Self {
            driver,
            queue,
            frames: Frames::default(),
            spaces: Slab::new(),
            heaps: Slab::new(),
            kernels: None,
            retired: Vec::new(),
            allocated: 0,
        }
    }

    /// The kernels, compiled at first use.
    pub(super) fn kernels(&mut self) -> Result<Arc<Kernels>, DeviceError> {
        if let Some(kernels) = &self.kernels {
            return Ok(Arc::clone(kernels));
        }
        let kernels = Arc::new(Kernels::new(&self.driver.device)?);
        Ok(Arc::clone(self.kernels.insert(kernels)))
    }

    pub(super) fn frame(&mut self) -> Result<Frame, DeviceError> {
        self.frames.take(&self.driver, &mut self.queue)
    }

    // Reservations and heaps.

    pub(super) fn reserve(&mut self, length: ByteLength) -> Result<SpaceId, DeviceError> {
        self.driver.check_alive()?;
        if length == ByteLength::ZERO {
            return Err(invalid("a reservation of no bytes"));
        }
        let size = length.get().checked_next_multiple_of(self.driver.tile);
        let most = self.driver.longest;
        let size = size.filter(|&size| size <= most);
        let size = size.ok_or(limit("a single reservation", length, most, 0))?;
        let space = Space::new(&self.driver.device, size)?;
        self.queue.add_resident(space.allocation());
        Ok(SpaceId::of(self.spaces.insert(space)))
    }

    pub(super) fn release(&mut self, space: SpaceId, after: Fence) -> Result<Fence, DeviceError> {
        self.check_fence(after)?;
        self.drop_retired()?;
        let space = self
            .spaces
            .try_remove(space.place())
            .ok_or(invalid("a reservation it does not have"))?;
        Ok(self.retire(Retired::Space(space)))
    }

    pub(super) fn create_heap(&mut self, length: ByteLength) -> Result<HeapId, DeviceError> {
        let size = length.get();
        if size == 0 || !size.is_multiple_of(self.driver.tile) {
            return Err(invalid("a heap that is not a multiple of its page"));
        }
        let most = self.driver.longest;
        if size > most {
            return Err(limit("a single heap", length, most, 0));
        }
        self.drop_retired()?;
        let total = self.driver.memory();
        if self.allocated.saturating_add(size) > total {
            self.drop_retired_after_waiting()?;
        }
        if self.allocated.saturating_add(size) > total {
            return Err(limit("device memory", length, total, self.allocated));
        }
        let heap = Heap::new(&self.driver.device, size)?;
        for allocation in heap.allocations() {
            self.queue.add_resident(allocation);
        }
        let mapped = self.queue.map(&mut [Change {
            buffer: &heap.whole.0,
            heap: Some(&heap.heap.0),
            operations: vec![operation(self.driver.tile, 0, size, Some(0))],
        }]);
        self.allocated += size;
        if let Err(error) = mapped {
            self.retire(Retired::Heap(heap));
            return Err(error);
        }
        Ok(HeapId::of(self.heaps.insert(heap)))
    }

    pub(super) fn destroy_heap(&mut self, heap: HeapId) -> Result<(), DeviceError> {
        self.drop_retired()?;
        let mut spaces = self.spaces.iter();
        if spaces.any(|(_, space)| space.bindings.names(heap)) {
            return Err(invalid("give a heap back that is still mapped"));
        }
        let heap = self
            .heaps
            .try_remove(heap.place())
            .ok_or(invalid("a heap it does not have"))?;
        self.retire(Retired::Heap(heap));
        Ok(())
    }

    /// Keeps `what` until everything submitted so far is done, or drops it now if that is so.
    fn retire(&mut self, what: Retired) -> Fence {
        let fence = self.queue.submitted();
        let done = matches!(self.driver.poll(fence), Ok(FenceState::Signalled));
        self.retired.push((fence, what));
        if done {
            self.drop_retired_until(fence);
            return Fence::DONE;
        }
        fence
    }

    /// Drops what the queue has done with.
    fn drop_retired(&mut self) -> Result<(), DeviceError> {
        self.driver.check_alive()?;
        let mut reached = None;
        for (fence, _) in &self.retired {
            if self.driver.poll(*fence)? == FenceState::Pending {
                break;
            }
            reached = Some(*fence);
        }
        if let Some(fence) = reached {
            self.drop_retired_until(fence);
        }
        Ok(())
    }

    fn drop_retired_after_waiting(&mut self) -> Result<(), DeviceError> {
        if let Some((fence, _)) = self.retired.last() {
            self.driver.block(*fence)?;
        }
        self.drop_retired()
    }

    fn drop_retired_until(&mut self, reached: Fence) {
        for (_, what) in self.retired.extract_if(.., |(fence, _)| *fence <= reached) {
            match what {
                Retired::Space(space) => self.queue.remove_resident(space.allocation()),
                Retired::Heap(heap) => {
                    for allocation in heap.allocations() {
                        self.queue.remove_resident(allocation);
                    }
                    self.allocated -= heap.length;
                }
            }
        }
    }

    // Batches.

    pub(super) fn apply(&mut self, batch: &[Operation], after: Fence) -> Result<Fence, BatchError> {
        let stop = |applied| move |cause| BatchError { applied, cause };
        self.check_fence(after).map_err(stop(0))?;
        self.drop_retired().map_err(stop(0))?;
        let mut fence = after;
        for phase in phases(batch) {
            let operations = &batch[phase.operations.clone()];
            let done = match phase.kind {
                Kind::Bind => self.bind(operations),
                Kind::Transfer => self.transfer(operations),
            };
            fence = fence.max(done.map_err(stop(phase.operations.start))?);
        }
        Ok(fence)
    }

    /// Every point up to the last submitted one can be waited for, and is: all work is in order.
    pub(super) fn check_fence(&self, fence: Fence) -> Result<(), DeviceError> {
        match fence <= self.queue.submitted() {
            true => Ok(()),
            false => Err(invalid("wait for a fence it never gave out")),
        }
    }

    fn bind(&mut self, operations: &[Operation]) -> Result<Fence, DeviceError> {
        let mut binds = Vec::with_capacity(operations.len());
        for &operation in operations {
            binds.extend(self.plan_bind(operation)?);
        }
        let binds = coalesce(binds).map_err(|_| invalid("two changes of one address at once"))?;
        let mut fence = Fence::DONE;
        if !binds.is_empty() {
            let mut changes = changes(&self.spaces, &self.heaps, self.driver.tile, binds)?;
            fence = self.queue.map(&mut changes)?;
        }
        for &operation in operations {
            self.record(operation);
        }
        Ok(fence)
    }

    /// Checks one change of the page table.
    fn plan_bind(&self, operation: Operation) -> Result<Option<Bind>, DeviceError> {
        let (address, length, place) = match operation {
            Operation::Map {
                address,
                place,
                length,
                ..
            } => {
                self.check_place(place, length)?;
                (address, length, Some(place))
            }
            Operation::Unmap { address, length } => (address, length, None),
            Operation::Protect {
                address, length, ..
            } => {
                self.window(address, length, Access::Read)?;
                return Ok(None);
            }
            _ => return Err(invalid("commit memory by the page")),
        };
        self.check_range(address, length)?;
        Ok(Some(Bind {
            space: address.space,
            start: address.offset,
            length: length.get(),
            place,
        }))
    }

    /// Enters an operation that was queued.
    fn record(&mut self, operation: Operation) {
        let space =
            changed(operation).and_then(|address| self.spaces.get_mut(address.space.place()));
        if let Some(space) = space {
            space.bindings.enter(operation);
        }
    }

    fn transfer(&mut self, operations: &[Operation]) -> Result<Fence, DeviceError> {
        let transfers: Vec<Transfer> = operations
            .iter()
            .map(|&operation| self.plan_transfer(operation))
            .collect::<Result<_, _>>()?;
        let mut frame = self.frame()?;
        let mut recorder = frame.begin()?;
        for transfer in &transfers {
            match transfer {
                Transfer::Copy(from, to) => recorder.copy(from, to),
                Transfer::Zero(window) => recorder.zero(window),
            }
        }
        let fence = recorder.submit(&mut self.queue)?;
        self.frames.put(frame);
        Ok(fence)
    }

    fn plan_transfer(&self, operation: Operation) -> Result<Transfer, DeviceError> {
        match operation {
            Operation::Copy { from, to, length } => {
                self.check_range(from, length)?;
                self.check_place(to, length)?;
                let to = Window {
                    buffer: self.heap(to.heap)?.whole.0.clone(),
                    offset: to.offset,
                    length: length.get(),
                };
                Ok(Transfer::Copy(self.window(from, length, Access::Read)?, to))
            }
            Operation::Zero { address, length } => {
                self.check_range(address, length)?;
                let window = self.window(address, length, Access::ReadWrite)?;
                Ok(Transfer::Zero(window))
            }
            _ => Err(invalid("a transfer that is none")),
        }
    }

    // Checks.

    pub(super) fn space(&self, space: SpaceId) -> Result<&Space, DeviceError> {
        self.spaces
            .get(space.place())
            .ok_or(invalid("a reservation it does not have"))
    }

    fn heap(&self, heap: HeapId) -> Result<&Heap, DeviceError> {
        self.heaps
            .get(heap.place())
            .ok_or(invalid("a heap it does not have"))
    }

    /// A range of whole pages within its heap.
    fn check_place(&self, place: Place, length: ByteLength) -> Result<(), DeviceError> {
        let heap = self.heap(place.heap)?;
        self.check_tiles(place.offset, length)?;
        match place.offset.checked_add(length.get()) {
            Some(end) if end <= heap.length => Ok(()),
            _ => Err(invalid("an operation outside its heap")),
        }
    }

    /// A range of whole pages within its reservation.
    fn check_range(&self, address: Address, length: ByteLength) -> Result<(), DeviceError> {
        self.check_tiles(address.offset, length)?;
        self.check_within(address, length).map(drop)
    }

    fn check_tiles(&self, offset: u64, length: ByteLength) -> Result<(), DeviceError> {
        let whole = |bytes: u64| bytes.is_multiple_of(self.driver.tile);
        match whole(offset) && whole(length.get()) {
            true => Ok(()),
            false => Err(invalid("an operation on part of a page")),
        }
    }

    fn check_within(&self, address: Address, length: ByteLength) -> Result<&Space, DeviceError> {
        let space = self.space(address.space)?;
        let end = address.offset.checked_add(length.get());
        if length == ByteLength::ZERO || end.is_none_or(|end| end > space.length) {
            return Err(invalid("an operation outside its reservation"));
        }
        Ok(space)
    }

    /// A range that is mapped throughout and may be used for `wanted`.
    pub(super) fn window(
        &self,
        address: Address,
        length: ByteLength,
        wanted: Access,
    ) -> Result<Window, DeviceError> {
        let space = self.check_within(address, length)?;
        space
            .bindings
            .check(address.offset, length.get(), wanted)
            .map_err(|denied| match denied {
                Denied::Hole => invalid("touch a hole; map it first"),
                Denied::Sealed => invalid("write to a sealed page; make it unique first"),
            })?;
        Ok(Window {
            buffer: space.buffer.0.clone(),
            offset: address.offset,
            length: length.get(),
        })
    }
}

/// `binds` as Metal wants them: of one buffer and one heap, or none, at a time.
fn changes<'a>(
    spaces: &'a Slab<Space>,
    heaps: &'a Slab<Heap>,
    tile: u64,
    mut binds: Vec<Bind>,
) -> Result<Vec<Change<'a>>, DeviceError> {
    let heap_of = |bind: &Bind| bind.place.map(|place| place.heap);
    binds.sort_by_key(|bind| (bind.space, heap_of(bind)));
    let groups =
        binds.chunk_by(|left, right| left.space == right.space && heap_of(left) == heap_of(right));
    let mut changes = Vec::new();
    for group in groups {
        let space = spaces.get(group[0].space.place());
        let space = space.ok_or(invalid("a reservation it does not have"))?;
        let heap = match heap_of(&group[0]) {
            Some(heap) => {
                let heap = heaps
                    .get(heap.place())
                    .ok_or(invalid("a heap it does not have"))?;
                Some(&*heap.heap.0)
            }
            None => None,
        };
        let operations = group.iter().map(|bind| {
            let place = bind.place.map(|place| place.offset);
            operation(tile, bind.start, bind.length, place)
        });
        changes.push(Change {
            buffer: &space.buffer.0,
            heap,
            operations: operations.collect(),
        });
    }
    Ok(changes)
}

/// A change of `length` bytes of a buffer from `start` on, to the heap from `place` on or to a hole, in tiles.
fn operation(
    tile: u64,
    start: u64,
    length: u64,
    place: Option<u64>,
) -> MTL4UpdateSparseBufferMappingOperation {
    let tiles = |bytes: u64| (bytes / tile) as usize;
    MTL4UpdateSparseBufferMappingOperation {
        mode: match place {
            Some(_) => MTLSparseTextureMappingMode::Map,
            None => MTLSparseTextureMappingMode::Unmap,
        },
        bufferRange: NSRange::new(tiles(start), tiles(length)),
        heapOffset: place.map_or(0, tiles),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_counted_in_tiles() {
        let tile = 65_536;
        let map = operation(tile, 2 * tile, 3 * tile, Some(5 * tile));
        assert_eq!(map.mode, MTLSparseTextureMappingMode::Map);
        assert_eq!(map.bufferRange, NSRange::new(2, 3));
        assert_eq!(map.heapOffset, 5);
        let unmap = operation(tile, tile, tile, None);
        assert_eq!(unmap.mode, MTLSparseTextureMappingMode::Unmap);
        assert_eq!(unmap.bufferRange, NSRange::new(1, 1));
    }
}
