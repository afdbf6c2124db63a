#![expect(
    unsafe_code,
    reason = "mapping memory at chosen addresses is what this device does"
)]

//! The host device on macOS. It is type-checked (`.ci/check-apple`); nobody has run it yet.
//!
//! A heap is an anonymous memory object of the Mach kernel, held by a named entry
//! (`mach_make_memory_entry_64` with `MAP_MEM_NAMED_CREATE`, as browsers make memory that they share
//! between processes). A reservation is one `PROT_NONE` mapping, and attaching a page is `mach_vm_map`
//! of an offset of the object over it. `mach_vm_remap` of memory that is mapped already would show the
//! same pages, but takes the protection of its source: a sealed page would be writable until a second
//! call, which can fail on its own. Pages are the system's or multiples of them: 16 KiB on Apple silicon,
//! 4 KiB on Intel.
//!
//! Each heap is also mapped as a whole, for the device alone. That is how its memory is obtained, given
//! back and copied to, whether or not it is attached anywhere:
//!
//! * *Commit* writes zeros. The first write to a page of an object makes the kernel find memory for it,
//!   so that no later access has to; and pages that were given back still hold what they held until the
//!   kernel takes them. What is committed is not wired: macOS compresses and swaps what is not used.
//! * *Decommit* is `VM_BEHAVIOR_REUSABLE`, which memory allocators of this system give pages back by. The
//!   pages are off this process's footprint when the call returns, and the kernel takes them when it is
//!   short, without writing them anywhere. It says so of pages of an object that has several mappings as
//!   long as the object has no copies or shadows, which those of named entries never have. The other ways
//!   do not fit: `VM_BEHAVIOR_FREE` leaves pages on the footprint until they are taken,
//!   `VM_BEHAVIOR_DONTNEED` only moves them forward in the queue for swapping, purgeable memory is given
//!   up by whole objects, and unmapping returns nothing while the object lives.
//! * Destroying a heap ends its object, and with it all its memory goes back at once.
//!
//! The kernel never refuses committed memory by an error: a machine that is short swaps, and then ends
//! processes. Set [`crate::PoolConfig::limit`] below what the process may have.
//!
//! What the device on Linux has beyond this is refused: huge pages, for which this system has no call, and
//! heaps that are parts of files. The guard against files that become shorter tells them by `SIGBUS`,
//! which macOS also sends for holes and for writes to sealed pages: it would put zeros where a fault is due.
//!
//! # Safety
//!
//! * **H1** Every address handed to the kernel lies inside a reservation of this device, or inside a
//!   heap's own mapping, and is a multiple of its page: [`Reservation::at`] and [`HostDevice::heap_at`]
//!   check offset and length, so that a mapping never replaces foreign memory. Mach rounds what is not
//!   aligned instead of refusing it.
//! * **H2** A reservation is unmapped only by `release` or when the device is dropped, as a whole, and only
//!   then forgotten; a heap's own mapping and its named entry go when the heap does.
//! * **H3** No one else has the named entries, and no mapping of them is inherited by `fork`: a child that
//!   does not `exec` finds nothing there, rather than pages that both write to.
//! * **H4** Reading or writing mapped memory here (commit, copy, zero) is done through raw pointers during
//!   `apply`, which the pool calls only while it holds the buffer exclusively; committed is only what no
//!   buffer maps.

use std::ffi::{c_int, c_void};
use std::ptr::NonNull;

use mach2::kern_return::{KERN_NO_SPACE, KERN_RESOURCE_SHORTAGE, KERN_SUCCESS, kern_return_t};
use mach2::port::{MACH_PORT_NULL, mach_port_t};
use mach2::vm_behavior::{VM_BEHAVIOR_REUSABLE, VM_BEHAVIOR_REUSE, vm_behavior_t};
use mach2::vm_inherit::VM_INHERIT_NONE;
use mach2::vm_prot::{VM_PROT_READ, VM_PROT_WRITE, vm_prot_t};
use mach2::vm_statistics::{VM_FLAGS_ANYWHERE, VM_FLAGS_FIXED, VM_FLAGS_OVERWRITE};
use mach2::{mach_port, traps, vm};
use rustix::io::Errno;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags};
use slab::Slab;

use super::{HostConfig, HugePages};
use crate::device::{
    Access, Address, Aliasing, BatchCost, BatchError, Capabilities, Commitment, Device,
    DeviceError, Fence, FenceState, HeapId, Hole, HostView, Operation, Ordering, Patience, Place,
    SpaceId,
};
use crate::units::{ByteLength, PageSize};

const NAME: &str = "host";

/// `MAP_MEM_NAMED_CREATE` of `mach/memory_object_types.h`, which `mach2` does not name: a new object, and
/// not one for memory that is there.
const MAP_MEM_NAMED_CREATE: vm_prot_t = 0x02_0000;

/// What a heap's memory may ever be used for.
const ALL: vm_prot_t = VM_PROT_READ | VM_PROT_WRITE;

/// The host device: its module says what it does.
#[derive(Debug)]
pub struct HostDevice {
    capabilities: Capabilities,
    /// The system's own page, in bytes.
    page: u64,
    spaces: Slab<Reservation>,
    heaps: Slab<Heap>,
}

/// A memory object, and where all of it is mapped for the device's own use.
#[derive(Debug)]
struct Heap {
    entry: Entry,
    base: NonNull<u8>,
    length: ByteLength,
}

// SAFETY: the pointer names a mapping that this value alone owns (H2) and that every thread of the process
// sees alike.
unsafe impl Send for Heap {}

impl Heap {
    fn new(length: ByteLength) -> Result<Self, DeviceError> {
        let entry = Entry::new(length)?;
        let base = entry.map(0, None, length, Access::ReadWrite)?;
        Ok(Self {
            entry,
            base,
            length,
        })
    }
}

impl Drop for Heap {
    fn drop(&mut self) {
        // SAFETY: H2: the whole mapping, exactly as it was made. A refusal leaks it, which is all a destructor
        // can do.
        let _ =
            unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.length.get() as usize) };
    }
}

/// The right to map a memory object; the object lives as long as it, or as a mapping.
#[derive(Debug)]
struct Entry(mach_port_t);

impl Entry {
    fn new(length: ByteLength) -> Result<Self, DeviceError> {
        const CALL: &str = "mach_make_memory_entry_64";
        let mut size = length.get();
        let mut port = MACH_PORT_NULL;
        // SAFETY: both pointers are to values that live until the call returns; a new object touches nothing
        // that exists.
        let code = unsafe {
            vm::mach_make_memory_entry_64(
                traps::mach_task_self(),
                &raw mut size,
                0,
                MAP_MEM_NAMED_CREATE | ALL,
                &raw mut port,
                MACH_PORT_NULL,
            )
        };
        done(CALL, code, length)?;
        let entry = Self(port);
        // An object holds somewhat less than 4 GiB on systems that count its pages in 32 bits.
        match size >= length.get() {
            true => Ok(entry),
            false => Err(refused(CALL, KERN_RESOURCE_SHORTAGE, length)),
        }
    }

    /// Maps `length` bytes of the object from `offset` on in place of what is at `target`, or else wherever the
    /// kernel likes.
    fn map(
        &self,
        offset: u64,
        target: Option<NonNull<u8>>,
        length: ByteLength,
        access: Access,
    ) -> Result<NonNull<u8>, DeviceError> {
        const CALL: &str = "mach_vm_map";
        let (flags, at) = match target {
            Some(target) => (
                VM_FLAGS_FIXED | VM_FLAGS_OVERWRITE,
                target.addr().get() as u64,
            ),
            None => (VM_FLAGS_ANYWHERE, 0),
        };
        let copy = 0;
        let mut mapped = at;
        // SAFETY: H1 for the address, if there is one; the pool holds the buffer exclusively while it changes
        // (H4), so no slice of this range exists. The pointer is to a value that lives until the call returns.
        let code = unsafe {
            vm::mach_vm_map(
                traps::mach_task_self(),
                &raw mut mapped,
                length.get(),
                0,
                flags,
                self.0,
                offset,
                copy,
                protection(access),
                ALL,
                VM_INHERIT_NONE,
            )
        };
        done(CALL, code, length)?;
        let pointer = std::ptr::with_exposed_provenance_mut(mapped as usize);
        target
            .or(NonNull::new(pointer))
            .ok_or(refused(CALL, KERN_NO_SPACE, length))
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        // SAFETY: H2: the one right there is, given back once.
        let _ = unsafe { mach_port::mach_port_deallocate(traps::mach_task_self(), self.0) };
    }
}

/// One `PROT_NONE` range of address space.
#[derive(Debug)]
struct Reservation {
    base: NonNull<u8>,
    length: ByteLength,
}

// SAFETY: the pointer names a range that this value alone owns (H2) and that every thread of the
// process sees alike; nothing about it is bound to the thread that made it.
unsafe impl Send for Reservation {}

impl Reservation {
    fn at(&self, offset: u64, length: ByteLength, page: u64) -> Result<NonNull<u8>, DeviceError> {
        check(offset, length, page)?;
        let end = offset.checked_add(length.get());
        if end.is_none_or(|end| end > self.length.get()) {
            return Err(invalid("an operation outside its reservation"));
        }
        // SAFETY: H1: `offset` is within the reservation, which is one mapping of less than
        // `isize::MAX` bytes.
        Ok(unsafe { self.base.add(offset as usize) })
    }
}

impl HostDevice {
    /// Opens the device with its default settings.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`] when the kernel makes no memory objects, or does not take pages back.
    ///
    /// ```
    /// # use lacuna_pages::{Device, HostDevice, PageSize};
    /// let device = HostDevice::new()?;
    /// assert!(device.capabilities().page_sizes.contains(&PageSize::KIB_64));
    /// # Ok::<(), lacuna_pages::DeviceError>(())
    /// ```
    pub fn new() -> Result<Self, DeviceError> {
        Self::with_config(HostConfig::default())
    }

    /// Opens the device.
    ///
    /// # Errors
    /// As [`HostDevice::new`], and [`DeviceError::Invalid`] when the configuration is out of its
    /// bounds or asks for huge pages.
    pub fn with_config(config: HostConfig) -> Result<Self, DeviceError> {
        if !(1..=95).contains(&config.mapping_share_percent) {
            return Err(invalid("a mapping share outside 1 to 95 percent"));
        }
        if config.huge_pages != HugePages::Never {
            return Err(invalid("move mappings into huge pages on this system"));
        }
        let base = PageSize::new(rustix::param::page_size() as u64)
            .map_err(|_| unavailable("the system's own page size is not supported"))?;
        let capabilities = Capabilities {
            name: NAME,
            page_sizes: PageSize::all_between(base, PageSize::MIB_2),
            aliasing: Aliasing::Shared,
            hole: Hole::Fault,
            ordering: Ordering::Immediate,
            commitment: Commitment::PerPage,
            batch_cost: BatchCost::Operations,
            mapping_limit: None,
            heap_limit: None,
        };
        let mut device = Self {
            capabilities,
            page: base.bytes(),
            spaces: Slab::new(),
            heaps: Slab::new(),
        };
        device.probe(base)?;
        Ok(device)
    }

    /// Commits and gives back one page, so that a system which forbids it is found out when the device is
    /// opened and not in the middle of a session.
    fn probe(&mut self, base: PageSize) -> Result<(), DeviceError> {
        let say = |error: DeviceError| unavailable(&error.to_string());
        let heap = self.create_heap(base.length()).map_err(say)?;
        let place = Place { heap, offset: 0 };
        let result = self
            .commit(place, base.length())
            .and_then(|()| self.decommit(place, base.length()))
            .map_err(say);
        self.destroy_heap(heap)?;
        result
    }

    fn space_at(&self, address: Address, length: ByteLength) -> Result<NonNull<u8>, DeviceError> {
        self.space(address.space)?
            .at(address.offset, length, self.page)
    }

    fn space(&self, space: SpaceId) -> Result<&Reservation, DeviceError> {
        let found = self.spaces.get(space.place());
        found.ok_or_else(|| invalid("a reservation it does not have"))
    }

    /// A heap, and where the device itself sees part of it.
    fn heap_at(
        &self,
        place: Place,
        length: ByteLength,
    ) -> Result<(&Heap, NonNull<u8>), DeviceError> {
        let found = self.heaps.get(place.heap.place());
        let heap = found.ok_or_else(|| invalid("a heap it does not have"))?;
        check(place.offset, length, self.page)?;
        let end = place.offset.checked_add(length.get());
        if end.is_none_or(|end| end > heap.length.get()) {
            return Err(invalid("an operation outside its heap"));
        }
        // SAFETY: H1: `offset` is within the heap, all of which is one mapping.
        Ok((heap, unsafe { heap.base.add(place.offset as usize) }))
    }

    fn perform(&self, operation: Operation) -> Result<(), DeviceError> {
        match operation {
            Operation::Commit { place, length } => self.commit(place, length),
            Operation::Decommit { place, length } => self.decommit(place, length),
            Operation::Map {
                address,
                place,
                length,
                access,
            } => self.map(address, place, length, access),
            Operation::Unmap { address, length } => self.unmap(address, length),
            Operation::Protect {
                address,
                length,
                access,
            } => self.protect(address, length, access),
            Operation::Copy { from, to, length } => self.copy(from, to, length),
            Operation::Zero { address, length } => self.zero(address, length),
        }
    }

    fn commit(&self, place: Place, length: ByteLength) -> Result<(), DeviceError> {
        let (_, pointer) = self.heap_at(place, length)?;
        // Onto the footprint again, where they were given back. Of fresh pages it changes nothing.
        behave(pointer, length, VM_BEHAVIOR_REUSE)?;
        // SAFETY: H1, H4.
        unsafe { pointer.write_bytes(0, length.get() as usize) };
        Ok(())
    }

    fn decommit(&self, place: Place, length: ByteLength) -> Result<(), DeviceError> {
        let (_, pointer) = self.heap_at(place, length)?;
        behave(pointer, length, VM_BEHAVIOR_REUSABLE)
    }

    fn map(
        &self,
        address: Address,
        place: Place,
        length: ByteLength,
        access: Access,
    ) -> Result<(), DeviceError> {
        let (heap, _) = self.heap_at(place, length)?;
        let pointer = self.space_at(address, length)?;
        heap.entry
            .map(place.offset, Some(pointer), length, access)
            .map(drop)
    }

    fn unmap(&self, address: Address, length: ByteLength) -> Result<(), DeviceError> {
        let pointer = self.space_at(address, length)?;
        let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
        let (pointer, size) = (pointer.as_ptr().cast(), length.get() as usize);
        // SAFETY: H1, and H4 as in `Entry::map`.
        unsafe { rustix::mm::mmap_anonymous(pointer, size, ProtFlags::empty(), flags) }
            .map(drop)
            .map_err(|errno| address_space("mmap(PROT_NONE)", errno, length))
    }

    fn protect(
        &self,
        address: Address,
        length: ByteLength,
        access: Access,
    ) -> Result<(), DeviceError> {
        let pointer = self.space_at(address, length)?;
        let flags = match access {
            Access::Read => MprotectFlags::READ,
            Access::ReadWrite => MprotectFlags::READ | MprotectFlags::WRITE,
        };
        let (pointer, size): (*mut c_void, _) = (pointer.as_ptr().cast(), length.get() as usize);
        // SAFETY: H1, and H4 as in `Entry::map`.
        unsafe { rustix::mm::mprotect(pointer, size, flags) }
            .map_err(|errno| address_space("mprotect", errno, length))
    }

    fn copy(&self, from: Address, to: Place, length: ByteLength) -> Result<(), DeviceError> {
        let (_, target) = self.heap_at(to, length)?;
        let source = self.space_at(from, length)?;
        // SAFETY: H1; the pool copies mapped pages only, and holds their buffer exclusively (H4); a sealed
        // page is not written by anyone else either. A reservation and a heap's own mapping are apart.
        unsafe { target.copy_from_nonoverlapping(source, length.get() as usize) };
        Ok(())
    }

    fn zero(&self, address: Address, length: ByteLength) -> Result<(), DeviceError> {
        let pointer = self.space_at(address, length)?;
        // SAFETY: H1; the pool zeroes pages it has just mapped for writing, of a buffer it holds
        // exclusively (H4).
        unsafe { pointer.write_bytes(0, length.get() as usize) };
        Ok(())
    }
}

// SAFETY: D1: H1 and H2. D2: `map` and `protect` are in force when the call returns, and the pages
// behind them are committed, so no access faults. D3: mappings of one object, not copies of it, show the
// same memory exactly where offsets agree, and H3 keeps others out. D4: each operation is one call that
// does all or nothing (the kernel puts back what a mapping that fails was to replace), or writes contents;
// `commit` makes such a call before it writes. `apply` stops at the first that fails.
unsafe impl Device for HostDevice {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn reserve(&mut self, length: ByteLength) -> Result<SpaceId, DeviceError> {
        const CALL: &str = "mmap(PROT_NONE)";
        let size = usize::try_from(length.get())
            .ok()
            .filter(|&size| size > 0 && size <= isize::MAX as usize)
            .ok_or_else(|| address_space(CALL, Errno::NOMEM, length))?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a fresh mapping wherever the kernel likes touches nothing that exists.
        let pointer = unsafe {
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), size, ProtFlags::empty(), flags)
        };
        let base = pointer
            .and_then(|pointer| NonNull::new(pointer.cast()).ok_or(Errno::NOMEM))
            .map_err(|errno| address_space(CALL, errno, length))?;
        Ok(SpaceId::of(
            self.spaces.insert(Reservation { base, length }),
        ))
    }

    fn release(&mut self, space: SpaceId, _after: Fence) -> Result<Fence, DeviceError> {
        let Reservation { base, length } = *self.space(space)?;
        // SAFETY: H2: the whole reservation, exactly as it was made; its buffer is being dropped,
        // so no slice of it exists.
        unsafe { rustix::mm::munmap(base.as_ptr().cast(), length.get() as usize) }
            .map_err(|errno| address_space("munmap", errno, length))?;
        self.spaces.try_remove(space.place());
        Ok(Fence::DONE)
    }

    fn create_heap(&mut self, length: ByteLength) -> Result<HeapId, DeviceError> {
        check(0, length, self.page)?;
        Ok(HeapId::of(self.heaps.insert(Heap::new(length)?)))
    }

    fn destroy_heap(&mut self, heap: HeapId) -> Result<(), DeviceError> {
        let heap = self.heaps.try_remove(heap.place());
        heap.map(drop)
            .ok_or_else(|| invalid("a heap it does not have"))
    }

    fn apply(&mut self, batch: &[Operation], _after: Fence) -> Result<Fence, BatchError> {
        for (applied, &operation) in batch.iter().enumerate() {
            self.perform(operation)
                .map_err(|cause| BatchError { applied, cause })?;
        }
        Ok(Fence::DONE)
    }

    fn wait(&mut self, _: Fence, _: Patience) -> Result<FenceState, DeviceError> {
        Ok(FenceState::Signalled)
    }

    fn host_view(&self, space: SpaceId) -> Option<HostView> {
        let reservation = self.space(space).ok()?;
        Some(HostView::Pointer(reservation.base))
    }
}

impl Drop for HostDevice {
    fn drop(&mut self) {
        for Reservation { base, length } in self.spaces.drain() {
            // SAFETY: H2. A refusal leaks address space, which is all a destructor can do.
            let _ = unsafe { rustix::mm::munmap(base.as_ptr().cast(), length.get() as usize) };
        }
    }
}

/// Whole pages of the system, and not none.
fn check(offset: u64, length: ByteLength, page: u64) -> Result<(), DeviceError> {
    if length == ByteLength::ZERO {
        return Err(invalid("an operation on no bytes"));
    }
    match offset.is_multiple_of(page) && length.get().is_multiple_of(page) {
        true => Ok(()),
        false => Err(invalid("an operation on part of a page")),
    }
}

/// Tells the kernel what becomes of pages of a heap, which [`HostDevice::heap_at`] has found.
fn behave(
    pointer: NonNull<u8>,
    length: ByteLength,
    behavior: vm_behavior_t,
) -> Result<(), DeviceError> {
    let at = pointer.addr().get() as u64;
    // SAFETY: H1; no buffer maps these pages (H4), so what they hold is no one's.
    let code =
        unsafe { vm::mach_vm_behavior_set(traps::mach_task_self(), at, length.get(), behavior) };
    done("mach_vm_behavior_set", code, length)
}

fn protection(access: Access) -> vm_prot_t {
    match access {
        Access::Read => VM_PROT_READ,
        Access::ReadWrite => ALL,
    }
}

fn invalid(what: &'static str) -> DeviceError {
    DeviceError::Invalid { device: NAME, what }
}

fn unavailable(reason: &str) -> DeviceError {
    DeviceError::Unavailable {
        device: NAME,
        reason: reason.to_owned(),
    }
}

fn done(call: &'static str, code: kern_return_t, length: ByteLength) -> Result<(), DeviceError> {
    match code {
        KERN_SUCCESS => Ok(()),
        _ => Err(refused(call, code, length)),
    }
}

/// The error that a Mach call amounts to.
fn refused(call: &'static str, code: c_int, length: ByteLength) -> DeviceError {
    match code {
        KERN_NO_SPACE => DeviceError::OutOfAddressSpace { call, code, length },
        KERN_RESOURCE_SHORTAGE => DeviceError::OutOfMemory { call, code, length },
        _ => DeviceError::System { call, code },
    }
}

fn address_space(call: &'static str, errno: Errno, length: ByteLength) -> DeviceError {
    let code = errno.raw_os_error();
    match errno {
        Errno::NOMEM | Errno::AGAIN => DeviceError::OutOfAddressSpace { call, code, length },
        _ => DeviceError::System { call, code },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::FilePart;

    const PAGE: ByteLength = ByteLength::kibibytes(64);

    /// A device with a committed heap and a reservation of two pages each.
    fn device() -> (HostDevice, Place, Address, NonNull<u8>) {
        let mut device = HostDevice::new().unwrap();
        let length = ByteLength::kibibytes(128);
        let heap = device.create_heap(length).unwrap();
        let place = Place { heap, offset: 0 };
        let space = device.reserve(length).unwrap();
        device
            .apply(&[Operation::Commit { place, length }], Fence::DONE)
            .unwrap();
        let Some(HostView::Pointer(base)) = device.host_view(space) else {
            panic!("the host sees its own memory");
        };
        (device, place, Address { space, offset: 0 }, base)
    }

    fn map(address: Address, place: Place, access: Access) -> Operation {
        Operation::Map {
            address,
            place,
            length: PAGE,
            access,
        }
    }

    #[test]
    fn a_page_that_was_given_back_is_zero_once_it_is_had_again() {
        let (mut device, place, address, base) = device();
        let length = PAGE;
        let writable = map(address, place, Access::ReadWrite);
        device.apply(&[writable], Fence::DONE).unwrap();
        // SAFETY: the page was just mapped for writing, and nothing else knows of it.
        unsafe { base.write_bytes(9, PAGE.get() as usize) };
        let batch = [
            Operation::Unmap { address, length },
            Operation::Decommit { place, length },
            Operation::Commit { place, length },
            writable,
        ];
        device.apply(&batch, Fence::DONE).unwrap();
        // SAFETY: it is mapped, and nobody writes to it.
        let bytes = unsafe { std::slice::from_raw_parts(base.as_ptr(), PAGE.get() as usize) };
        assert!(bytes.iter().all(|&byte| byte == 0));
    }

    #[test]
    fn a_page_shows_at_two_addresses_and_its_copy_does_not() {
        let (mut device, place, address, base) = device();
        let second = Address {
            offset: PAGE.get(),
            ..address
        };
        let other = Place {
            offset: PAGE.get(),
            ..place
        };
        let twice = [
            map(address, place, Access::ReadWrite),
            map(second, place, Access::Read),
        ];
        device.apply(&twice, Fence::DONE).unwrap();
        // SAFETY: both pages are mapped, and only this test knows of them.
        let read = || unsafe { base.add(PAGE.get() as usize).read_volatile() };
        // SAFETY: as above; the first may be written.
        let write = |byte| unsafe { base.write_volatile(byte) };
        write(7);
        assert_eq!(read(), 7);
        let apart = [
            Operation::Copy {
                from: second,
                to: other,
                length: PAGE,
            },
            map(second, other, Access::ReadWrite),
        ];
        device.apply(&apart, Fence::DONE).unwrap();
        write(8);
        assert_eq!(read(), 7);
    }

    #[test]
    fn an_operation_outside_what_there_is_touches_nothing() {
        let (mut device, place, address, base) = device();
        let access = Access::ReadWrite;
        device
            .apply(&[map(address, place, access)], Fence::DONE)
            .unwrap();
        // SAFETY: the first page was just mapped for writing, and nothing else knows of it.
        unsafe { base.write_volatile(9) };
        let length = PAGE;
        let at = |offset| Address { offset, ..address };
        let within = |offset| Place { offset, ..place };
        for operation in [
            map(at(1), place, access),
            map(at(2 * PAGE.get()), place, access),
            map(at(u64::MAX), place, access),
            map(address, within(1), access),
            map(address, within(2 * PAGE.get()), access),
            Operation::Commit {
                place: within(2 * PAGE.get()),
                length,
            },
            Operation::Decommit {
                place: within(1),
                length,
            },
            Operation::Unmap {
                address: at(2 * PAGE.get()),
                length,
            },
            Operation::Unmap {
                address,
                length: ByteLength::ZERO,
            },
            Operation::Protect {
                address: at(1),
                length,
                access,
            },
            Operation::Zero {
                address,
                length: ByteLength::new(1),
            },
        ] {
            let error = device.apply(&[operation], Fence::DONE).unwrap_err();
            assert_eq!(error.applied, 0);
            let invalid = matches!(error.cause, DeviceError::Invalid { device: NAME, .. });
            assert!(invalid, "{operation:?}: {}", error.cause);
        }
        // SAFETY: the first page is still mapped: that is what this test is about.
        assert_eq!(unsafe { base.read_volatile() }, 9);
    }

    #[test]
    fn what_this_system_does_not_have_is_refused() {
        let config = HostConfig {
            huge_pages: HugePages::Collapse,
            ..HostConfig::DEFAULT
        };
        assert!(HostDevice::with_config(config).is_err());
        let (mut device, place, address, _) = device();
        let part = FilePart {
            file: tempfile::tempfile().unwrap(),
            offset: 0,
            length: PAGE,
        };
        assert!(device.open_heap(part).is_err());
        assert!(device.create_heap(ByteLength::ZERO).is_err());
        assert!(device.reserve(ByteLength::new(u64::MAX)).is_err());
        device.destroy_heap(place.heap).unwrap();
        assert!(device.destroy_heap(place.heap).is_err());
        device.release(address.space, Fence::DONE).unwrap();
        assert!(device.release(address.space, Fence::DONE).is_err());
    }

    #[test]
    fn a_refusal_says_what_ran_out() {
        let call = "mach_vm_map";
        let (code, length) = (KERN_NO_SPACE, PAGE);
        let expected = DeviceError::OutOfAddressSpace { call, code, length };
        assert_eq!(done(call, code, length), Err(expected));
        let code = KERN_RESOURCE_SHORTAGE;
        let expected = DeviceError::OutOfMemory { call, code, length };
        assert_eq!(done(call, code, length), Err(expected));
        assert_eq!(done(call, KERN_SUCCESS, length), Ok(()));
    }
}
