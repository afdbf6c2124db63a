//! What the device's lock guards: reservations, heaps, frames and the queue. Every operation is
//! checked in full, then queued, then entered in the bindings: an error leaves all as it was.

use std::sync::Arc;

use ash::vk;
use slab::Slab;

use super::driver::{Driver, Queue};
use super::frames::{Frames, Window};
use super::invalid;
use super::kernels::Kernels;
use super::objects::{Buffer, Heap, KERNEL_USAGE, Memory, Space, SpaceMemory};
use super::open::PageTable;
use super::table::{LISTED_PAGE, MOST_HEAP_BYTES, Table, heap_slots, shown_alignment};
use crate::device::{
    Access, Address, BatchError, DeviceError, Fence, FenceState, HeapId, Operation, Place, SpaceId,
};
use crate::gpu::bindings::{Bindings, Denied, changed};
use crate::gpu::phases::{Bind, Kind, coalesce, phases};
use crate::gpu::words::limit;
use crate::units::{ByteLength, PageSize};

/// Something given back that the queue may still use, and its bytes.
#[derive(Debug)]
pub(super) enum Retired {
    Space(Space, u64),
    Heap(
        #[expect(dead_code, reason = "held until it may be dropped")] Heap,
        u64,
    ),
    Table(
        #[expect(dead_code, reason = "held until it may be dropped")] Buffer,
        #[expect(dead_code, reason = "held until it may be dropped")] Memory,
        u64,
    ),
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
    /// How often heaps, or the table, came and went: what shows them to kernels is made anew then.
    pub(super) heap_changes: u64,
    /// Where kernels look pages up, if they do.
    pub(super) table: Option<Table>,
    kernels: Option<Arc<Kernels>>,
    retired: Vec<(Fence, Retired)>,
    /// Bytes of address space and of memory taken, retired ones included.
    reserved: u64,
    allocated: u64,
    /// What offsets and lengths of bindings are multiples of.
    granularity: u64,
    /// The memory types that can be bound to a reservation.
    memory_types: u32,
}

impl Drop for State {
    fn drop(&mut self) {
        self.driver.wait_idle();
    }
}

impl State {
    pub(super) fn new(driver: Arc<Driver>, queue: Queue) -> Result<Self, DeviceError> {
        let probe = match driver.pages {
            PageTable::Unused | PageTable::Lookup => Buffer::plain(&driver, 1 << 20, KERNEL_USAGE)?,
            PageTable::Device => Buffer::sparse(&driver, 1 << 20)?,
        };
        let probe = probe.requirements();
        let granularity = match driver.pages {
            // What is zeroed is whole pages, whatever they are.
            PageTable::Unused => PageSize::KIB_4.bytes(),
            PageTable::Lookup => LISTED_PAGE,
            PageTable::Device => probe.alignment,
        };
        let looks_up = driver.pages == PageTable::Lookup;
        let mut state = Self {
            driver,
            queue,
            frames: Frames::default(),
            spaces: Slab::new(),
            heaps: Slab::new(),
            heap_changes: 0,
            table: None,
            kernels: None,
            retired: Vec::new(),
            reserved: 0,
            allocated: 0,
            granularity,
            memory_types: probe.memory_type_bits,
        };
        if looks_up {
            state.make_table()?;
        }
        Ok(state)
    }

    pub(super) fn granularity(&self) -> u64 {
        self.granularity
    }

    /// The kernels, compiled at first use.
    pub(super) fn kernels(&mut self) -> Result<Arc<Kernels>, DeviceError> {
        if self.kernels.is_none() {
            self.kernels = Some(Arc::new(Kernels::new(&self.driver)?));
        }
        self.kernels
            .clone()
            .ok_or(invalid("a kernel that was not compiled"))
    }

    // Reservations and heaps.

    pub(super) fn reserve(&mut self, length: ByteLength) -> Result<SpaceId, DeviceError> {
        if length == ByteLength::ZERO {
            return Err(invalid("a reservation of no bytes"));
        }
        if self.driver.pages == PageTable::Unused {
            return self.reserve_memory(length);
        }
        let (total, most) = self.address_space();
        let size = length.get().checked_next_multiple_of(self.granularity);
        let size = size.filter(|&size| size <= most);
        let size = size.ok_or(limit("a single reservation", length, most, 0))?;
        if self.reserved.saturating_add(size) > total {
            self.drop_retired_after_waiting()?;
        }
        if self.reserved.saturating_add(size) > total {
            return Err(limit("address space", length, total, self.reserved));
        }
        let space = match self.driver.pages {
            PageTable::Lookup => self.reserve_entries(size)?,
            PageTable::Unused | PageTable::Device => Space {
                length: size,
                memory: SpaceMemory::Sparse(
                    Buffer::sparse(&self.driver, size)?,
                    Bindings::default(),
                ),
            },
        };
        self.reserved += size;
        Ok(SpaceId::of(self.spaces.insert(space)))
    }

    /// Bytes of all reservations together, and of a single one.
    fn address_space(&self) -> (u64, u64) {
        let limits = &self.driver.limits;
        match self.driver.pages {
            PageTable::Lookup => {
                let all = self.most_entries() * LISTED_PAGE;
                (all, all)
            }
            PageTable::Unused | PageTable::Device => {
                let all = limits.address_space;
                (all, limits.buffer.min(all))
            }
        }
    }

    /// A reservation that is memory throughout, of zeros.
    fn reserve_memory(&mut self, length: ByteLength) -> Result<SpaceId, DeviceError> {
        let most = self.driver.limits.buffer;
        let size = length.get().checked_next_multiple_of(self.granularity);
        let size = size.filter(|&size| size <= most);
        let size = size.ok_or(limit("a single reservation", length, most, 0))?;
        let (buffer, memory, taken) = self.piece(size)?;
        let window = Window {
            buffer: buffer.name(),
            offset: 0,
            length: size,
        };
        let space = Space {
            length: size,
            memory: SpaceMemory::Whole(buffer, memory, taken),
        };
        self.reserved += size;
        if let Err(error) = self.record(|recorder| recorder.zero(window)) {
            self.retire(Retired::Space(space, size));
            return Err(error);
        }
        Ok(SpaceId::of(self.spaces.insert(space)))
    }

    /// A buffer with memory of its own, in the account, and the bytes of that.
    pub(super) fn piece(&mut self, length: u64) -> Result<(Buffer, Memory, u64), DeviceError> {
        let driver = Arc::clone(&self.driver);
        let buffer = Buffer::plain(&driver, length, KERNEL_USAGE)?;
        let requirements = buffer.requirements();
        let local = vk::MemoryPropertyFlags::DEVICE_LOCAL;
        let any = vk::MemoryPropertyFlags::empty();
        let memory_type = driver
            .memory_type(requirements.memory_type_bits, local, any)
            .ok_or(invalid("a piece: no memory type suits it"))?;
        let size = requirements.size.max(length);
        self.take_memory(size)?;
        let made = Memory::new(&driver, size, memory_type)
            .and_then(|memory| buffer.bind(&memory).map(|()| memory));
        match made {
            Ok(memory) => Ok((buffer, memory, size)),
            Err(error) => {
                self.give_memory(size);
                Err(error)
            }
        }
    }

    pub(super) fn release(&mut self, space: SpaceId, after: Fence) -> Result<Fence, DeviceError> {
        self.check_fence(after)?;
        self.drop_retired()?;
        let space = self
            .spaces
            .try_remove(space.place())
            .ok_or(invalid("a reservation it does not have"))?;
        if let SpaceMemory::Listed(entries, _) = space.memory {
            self.give_entries(entries);
        }
        let length = space.length;
        Ok(self.retire(Retired::Space(space, length)))
    }

    pub(super) fn create_heap(&mut self, length: ByteLength) -> Result<HeapId, DeviceError> {
        let size = length.get();
        if self.driver.pages == PageTable::Unused {
            return Err(invalid("a heap: memory comes with the reservation"));
        }
        if size == 0 || !size.is_multiple_of(self.granularity) {
            return Err(invalid("a heap that is not a multiple of its page"));
        }
        let most = self.longest_heap();
        if size > most {
            return Err(limit("a single heap", length, most, 0));
        }
        if let Some(slots) = self.heap_limit() {
            let count = self.heaps.len() as u64;
            if count >= slots {
                let bytes = |heaps: u64| heaps.saturating_mul(size);
                let what = "memory in heaps of that length";
                return Err(limit(what, length, bytes(slots), bytes(count)));
            }
        }
        let total = self.memory();
        if self.allocated.saturating_add(size) > total {
            self.drop_retired_after_waiting()?;
        }
        if self.allocated.saturating_add(size) > total {
            return Err(limit("device memory", length, total, self.allocated));
        }
        let heap = Heap::new(&self.driver, size, self.memory_types)?;
        self.allocated += size;
        self.heap_changes += 1;
        Ok(HeapId::of(self.heaps.insert(heap)))
    }

    /// The most heaps that there may be at once, if that is limited.
    pub(super) fn heap_limit(&self) -> Option<u64> {
        let slots = u64::from(heap_slots(&self.driver.limits));
        (self.driver.pages == PageTable::Lookup).then_some(slots)
    }

    /// Bytes of the longest heap.
    fn longest_heap(&self) -> u64 {
        let limits = &self.driver.limits;
        match self.driver.pages {
            PageTable::Lookup => [limits.window, limits.buffer, MOST_HEAP_BYTES]
                .into_iter()
                .fold(limits.allocation, u64::min),
            PageTable::Unused | PageTable::Device => limits.allocation,
        }
    }

    /// How often heaps came and went.
    pub(super) fn heap_changes(&self) -> u64 {
        self.heap_changes
    }

    /// Takes `length` bytes of memory that is not a heap into the account.
    pub(super) fn take_memory(&mut self, length: u64) -> Result<(), DeviceError> {
        let total = self.memory();
        if self.allocated.saturating_add(length) > total {
            self.drop_retired_after_waiting()?;
        }
        if self.allocated.saturating_add(length) > total {
            let requested = ByteLength::new(length);
            return Err(limit("device memory", requested, total, self.allocated));
        }
        self.allocated += length;
        Ok(())
    }

    /// What [`State::take_memory`] took is there again.
    pub(super) fn give_memory(&mut self, length: u64) {
        self.allocated = self.allocated.saturating_sub(length);
    }

    /// Bytes of memory taken: heaps, and what was taken beside them.
    pub(super) fn allocated(&self) -> u64 {
        self.allocated
    }

    /// The memory there is for heaps; a software driver enforces no such limit itself.
    pub(super) fn memory(&self) -> u64 {
        let memory_type = self.heap_type();
        memory_type.map_or(0, |memory_type| self.driver.memory_size(memory_type))
    }

    /// What is left of it, for this process.
    pub(super) fn memory_left(&self) -> u64 {
        let left = self.memory().saturating_sub(self.allocated);
        let told = self
            .heap_type()
            .and_then(|memory_type| self.driver.memory_left(memory_type));
        told.map_or(left, |told| told.min(left))
    }

    /// Whose memory heaps are of.
    fn heap_type(&self) -> Option<u32> {
        let local = vk::MemoryPropertyFlags::DEVICE_LOCAL;
        let any = vk::MemoryPropertyFlags::empty();
        self.driver.memory_type(self.memory_types, local, any)
    }

    pub(super) fn destroy_heap(&mut self, heap: HeapId) -> Result<(), DeviceError> {
        self.drop_retired()?;
        let mut spaces = self.spaces.iter();
        if spaces.any(|(_, space)| space.memory.bindings().is_some_and(|it| it.names(heap))) {
            return Err(invalid("give a heap back that is still mapped"));
        }
        let heap = self
            .heaps
            .try_remove(heap.place())
            .ok_or(invalid("a heap it does not have"))?;
        let length = heap.length;
        self.heap_changes += 1;
        self.retire(Retired::Heap(heap, length));
        Ok(())
    }

    /// Keeps `what` until everything submitted so far is done, or drops it now if that is so.
    pub(super) fn retire(&mut self, what: Retired) -> Fence {
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
        let fences = self.retired.iter().map(|(fence, _)| *fence);
        let mut reached = None;
        for fence in fences {
            if self.driver.poll(fence)? == FenceState::Pending {
                break;
            }
            reached = Some(fence);
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
                Retired::Space(space, length) => {
                    self.reserved -= length;
                    if let SpaceMemory::Whole(_, _, taken) = space.memory {
                        self.allocated -= taken;
                    }
                }
                Retired::Heap(_, length) | Retired::Table(_, _, length) => {
                    self.allocated -= length;
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
        if self.driver.pages == PageTable::Unused {
            return Err(invalid("an operation other than zeroing"));
        }
        let mut binds = Vec::with_capacity(operations.len());
        for &operation in operations {
            binds.extend(self.plan_bind(operation)?);
        }
        let binds = coalesce(binds).map_err(|_| invalid("two changes of one address at once"))?;
        let mut fence = Fence::DONE;
        if !binds.is_empty() {
            fence = match self.driver.pages {
                PageTable::Lookup => self.change_entries(&binds)?,
                PageTable::Unused | PageTable::Device => {
                    let changes = self.translate(&binds)?;
                    self.queue.bind(&changes)?
                }
            };
        }
        for &operation in operations {
            self.note(operation);
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
                self.check_mapped(address, length, Access::Read)?;
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

    /// `binds`, which are sorted by reservation, as the driver wants them.
    fn translate(
        &self,
        binds: &[Bind],
    ) -> Result<Vec<(vk::Buffer, Vec<vk::SparseMemoryBind>)>, DeviceError> {
        let mut changes = Vec::new();
        for group in binds.chunk_by(|left, right| left.space == right.space) {
            let mut list = Vec::with_capacity(group.len());
            for bind in group {
                let mut info = vk::SparseMemoryBind::default()
                    .resource_offset(bind.start)
                    .size(bind.length);
                if let Some(place) = bind.place {
                    let memory = self.heap(place.heap)?.memory();
                    info = info.memory(memory).memory_offset(place.offset);
                }
                list.push(info);
            }
            let SpaceMemory::Sparse(buffer, _) = &self.space(group[0].space)?.memory else {
                return Err(invalid("bind memory to what is no sparse buffer"));
            };
            changes.push((buffer.name().handle, list));
        }
        Ok(changes)
    }

    /// Enters an operation that was queued.
    fn note(&mut self, operation: Operation) {
        let space =
            changed(operation).and_then(|address| self.spaces.get_mut(address.space.place()));
        if let Some(bindings) = space.and_then(|space| space.memory.bindings_mut()) {
            bindings.enter(operation);
        }
    }

    fn transfer(&mut self, operations: &[Operation]) -> Result<Fence, DeviceError> {
        let mut transfers = Vec::with_capacity(operations.len());
        for &operation in operations {
            self.plan_transfer(operation, &mut transfers)?;
        }
        self.record(|recorder| {
            for transfer in transfers {
                match transfer {
                    Transfer::Copy(from, to) => recorder.copy(from, to),
                    Transfer::Zero(window) => recorder.zero(window),
                }
            }
        })
    }

    /// Adds what an operation comes to in buffers to `transfers`.
    fn plan_transfer(
        &self,
        operation: Operation,
        transfers: &mut Vec<Transfer>,
    ) -> Result<(), DeviceError> {
        match operation {
            Operation::Copy { from, to, length } => {
                self.check_range(from, length)?;
                self.check_place(to, length)?;
                let to = Window {
                    buffer: self.heap(to.heap)?.whole(),
                    offset: to.offset,
                    length: length.get(),
                };
                let from = self.windows(from, length, Access::Read)?;
                let parts = to.beside(&from).zip(from);
                transfers.extend(parts.map(|(to, from)| Transfer::Copy(from, to)));
                Ok(())
            }
            Operation::Zero { address, length } => {
                self.check_range(address, length)?;
                let windows = self.windows(address, length, Access::ReadWrite)?;
                transfers.extend(windows.into_iter().map(Transfer::Zero));
                Ok(())
            }
            _ => Err(invalid("a transfer that is none")),
        }
    }

    // Checks.

    pub(super) fn space(&self, space: SpaceId) -> Result<&Space, DeviceError> {
        let found = self.spaces.get(space.place());
        found.ok_or(invalid("a reservation it does not have"))
    }

    pub(super) fn heap(&self, heap: HeapId) -> Result<&Heap, DeviceError> {
        let found = self.heaps.get(heap.place());
        found.ok_or(invalid("a heap it does not have"))
    }

    /// A range of whole pages within its heap.
    fn check_place(&self, place: Place, length: ByteLength) -> Result<(), DeviceError> {
        let heap = self.heap(place.heap)?;
        self.check_granularity(place.offset, length)?;
        match place.offset.checked_add(length.get()) {
            Some(end) if end <= heap.length => Ok(()),
            _ => Err(invalid("an operation outside its heap")),
        }
    }

    /// A range of whole pages within its reservation.
    fn check_range(&self, address: Address, length: ByteLength) -> Result<(), DeviceError> {
        self.check_granularity(address.offset, length)?;
        self.check_within(address, length).map(drop)
    }

    fn check_granularity(&self, offset: u64, length: ByteLength) -> Result<(), DeviceError> {
        let whole = |bytes: u64| bytes.is_multiple_of(self.granularity);
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

    /// The reservation of a range that is mapped throughout and may be used for `wanted`.
    pub(super) fn check_mapped(
        &self,
        address: Address,
        length: ByteLength,
        wanted: Access,
    ) -> Result<&Space, DeviceError> {
        let space = self.check_within(address, length)?;
        let bindings = space.memory.bindings();
        let checked = bindings.map_or(Ok(()), |it| it.check(address.offset, length.get(), wanted));
        checked.map_err(|denied| match denied {
            Denied::Hole => invalid("touch a hole; map it first"),
            Denied::Sealed => invalid("write to a sealed page; make it unique first"),
        })?;
        Ok(space)
    }

    /// Where such a range is in buffers: in its order, and in one piece unless kernels look pages up.
    pub(super) fn windows(
        &self,
        address: Address,
        length: ByteLength,
        wanted: Access,
    ) -> Result<Vec<Window>, DeviceError> {
        let space = self.check_mapped(address, length, wanted)?;
        let (start, length) = (address.offset, length.get());
        match &space.memory {
            SpaceMemory::Sparse(buffer, _) | SpaceMemory::Whole(buffer, ..) => Ok(vec![Window {
                buffer: buffer.name(),
                offset: start,
                length,
            }]),
            SpaceMemory::Listed(_, bindings) => {
                let places = bindings.places(start, length);
                let window = |(place, length): (Place, u64)| {
                    Ok(Window {
                        buffer: self.heap(place.heap)?.whole(),
                        offset: place.offset,
                        length,
                    })
                };
                places.map(window).collect()
            }
        }
    }

    /// What a kernel that works on such a range is shown: from the last byte, or entry, before it on that it may be shown.
    pub(super) fn shown(
        &self,
        address: Address,
        length: ByteLength,
        wanted: Access,
    ) -> Result<Window, DeviceError> {
        let space = self.check_mapped(address, length, wanted)?;
        self.show(space, (address.offset, length.get()))
    }

    /// The same of a range of a reservation of which the kernel works on `touched` bytes, behind `untouched` others.
    pub(super) fn shown_reserved(
        &self,
        (address, length): (Address, u64),
        (untouched, touched): (u64, u64),
        wanted: Access,
    ) -> Result<Window, DeviceError> {
        let outside = invalid("show a kernel more than what is reserved");
        let within = untouched.checked_add(touched);
        if within.is_none_or(|within| within > length) {
            return Err(outside);
        }
        let first = Address {
            offset: address.offset.saturating_add(untouched),
            ..address
        };
        let space = self.check_mapped(first, ByteLength::new(touched), wanted)?;
        let end = address.offset.checked_add(length);
        if end.is_none_or(|end| end > space.length) {
            return Err(outside);
        }
        self.show(space, (address.offset, length))
    }

    fn show(&self, space: &Space, (start, length): (u64, u64)) -> Result<Window, DeviceError> {
        let skip = start % shown_alignment(&self.driver);
        match &space.memory {
            SpaceMemory::Sparse(buffer, _) | SpaceMemory::Whole(buffer, ..) => Ok(Window {
                buffer: buffer.name(),
                offset: start - skip,
                length: length + skip,
            }),
            SpaceMemory::Listed(entries, _) => self.shown_entries(*entries, (start, length)),
        }
    }
}
