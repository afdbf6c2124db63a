#![expect(
    unsafe_code,
    reason = "mapping memory at chosen addresses is what this device does"
)]

//! The host device on Linux.
//!
//! A heap is a memfd, a reservation is one `PROT_NONE` mapping, and attaching a page is
//! `mmap(MAP_SHARED | MAP_FIXED)` of a heap offset over it. Memory is committed by `fallocate` and
//! its page table entries filled by `MADV_POPULATE_*`, never by touching: what the kernel refuses
//! is an error value instead of a signal, and it is about twice as fast as page faults. Holes stay
//! `PROT_NONE` and sealed pages `PROT_READ`, so a stray access faults instead of corrupting someone
//! else.
//!
//! The kernel refuses memory only under strict overcommit (`vm.overcommit_memory=2`). At the limit
//! of a memory cgroup, or of the machine, it kills instead, whoever asks and by whatever call
//! (measured with `fallocate` in a 64 MiB cgroup, Linux 6.18): set [`crate::PoolConfig::limit`]
//! below what the process may have, and the pool answers first.
//!
//! Costs on the 2-core machine this was built on, per 64 KiB page: commit 7 us and map 4 us, share
//! 4 us, unmap 6 us, giving back 10 us; each operation is one or two system calls whatever its
//! length, so runs are cheaper by the page.
//!
//! Huge pages are had by [`HugePages::Collapse`] only. `MADV_HUGEPAGE` does nothing for memory that
//! `fallocate` has committed already, and splits mappings besides; `MADV_COLLAPSE` does make huge
//! mappings of it, by copying 2 MiB at a time, where address and heap offset agree modulo 2 MiB,
//! whatever `shmem_enabled` says (measured on Linux 6.18). Where that setting is `within_size` or
//! `always`, `fallocate` itself takes 2 MiB for a page of 64 KiB (measured on a tmpfs with the same
//! options): the system then holds more than the ledger says, until the pages beside it are used.
//!
//! # Safety
//!
//! * **H1** Every address handed to the kernel lies inside a reservation of this device:
//!   [`Reservation::at`] checks offset and length, so `MAP_FIXED` never replaces foreign memory.
//! * **H2** A reservation is unmapped only by `release`, as a whole, and only then forgotten.
//! * **H3** Heaps are close-on-exec memfds no one else has, or parts of files, which are mapped for
//!   reading alone. Memfds are shared by `fork` like any shared mapping: a process that forks without
//!   `exec` must not write to its buffers in both.
//! * **H4** Reading or writing mapped memory here (copy, zero) is done through raw pointers during
//!   `apply`, which the pool calls only while it holds the buffer exclusively.
//! * **H5** A reservation is watched over before the first page of a file is mapped there, until it
//!   is unmapped. A fault replaces a page of a file with zeros, at its address; slices of it stay
//!   valid, and [`Device::has_lost_files`] says so.

use std::ffi::c_void;
use std::fs::File;
use std::num::NonZeroU64;
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;

use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags};
use slab::Slab;

use super::{HostConfig, HugePages};
use crate::device::{
    Access, Address, Aliasing, BatchCost, BatchError, Capabilities, Commitment, Device,
    DeviceError, Fence, FenceState, FilePart, HeapId, Hole, HostView, Operation, Ordering,
    Patience, Place, SpaceId,
};
use crate::guard::{self, Guard};
use crate::units::{ByteLength, PageSize};

const NAME: &str = "host";

/// `MADV_COLLAPSE` of the kernel's interface, the same on every architecture; `libc` names it for
/// glibc alone.
const MADV_COLLAPSE: libc::c_int = 25;

/// Bytes of the system's huge page on x86-64, and on 64-bit Arm with base pages of 4 KiB.
const HUGE_PAGE: u64 = 2 << 20;

/// What a kernel allows when it does not say: the default of `vm.max_map_count`.
const DEFAULT_MAP_COUNT: u64 = 65_530;

/// The host device: its module says what it does and costs.
#[derive(Debug)]
pub struct HostDevice {
    capabilities: Capabilities,
    huge_pages: HugePages,
    spaces: Slab<Reservation>,
    heaps: Slab<Heap>,
}

#[derive(Debug)]
struct Heap {
    file: File,
    /// Where it begins in the file.
    start: u64,
    length: ByteLength,
    contents: Contents,
    /// Whether a page of it could not be had, without anyone having touched it.
    lost: bool,
}

/// What a heap is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Contents {
    /// Memory of the device's own.
    Memory,
    /// Part of a file.
    File,
}

/// One `PROT_NONE` range of address space.
#[derive(Debug)]
struct Reservation {
    /// Once pages of files are mapped there. Dropped before the range is unmapped (H5).
    guard: Option<Guard>,
    base: NonNull<u8>,
    length: ByteLength,
}

// SAFETY: the pointer names a range that this value alone owns (H2) and that every thread of the
// process sees alike; nothing about it is bound to the thread that made it.
unsafe impl Send for Reservation {}

impl Reservation {
    fn at(&self, offset: u64, length: ByteLength) -> Result<*mut c_void, DeviceError> {
        let end = offset.checked_add(length.get());
        if length == ByteLength::ZERO || end.is_none_or(|end| end > self.length.get()) {
            return Err(invalid("an operation outside its reservation"));
        }
        // SAFETY: H1: `offset` is within the reservation, which is one mapping of less than
        // `isize::MAX` bytes.
        Ok(unsafe { self.base.add(offset as usize) }.as_ptr().cast())
    }

    /// Sees to it that pages of files here that cannot be read do not end the process.
    fn watch_over(&mut self) -> Result<(), DeviceError> {
        if self.guard.is_none() {
            let (start, bytes) = (self.base.as_ptr(), self.length.get() as usize);
            // SAFETY: H2, H5: the guard goes before the reservation. The pool changes a buffer only while it holds
            // it exclusively (H4), so nobody reads it then; of committed memory no read faults.
            self.guard = unsafe { Guard::of_pages(start, bytes) };
        }
        match self.guard {
            Some(_) => Ok(()),
            None => Err(invalid("map files to so many buffers")),
        }
    }
}

impl HostDevice {
    /// Opens the device with its default share of the system's limits.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`] when the kernel has no memfd or cannot commit it.
    ///
    /// ```
    /// # use lacuna_pages::{Device, HostDevice, PageSize};
    /// # if !cfg!(target_os = "linux") { return Ok(()); }
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
    /// bounds.
    pub fn with_config(config: HostConfig) -> Result<Self, DeviceError> {
        if !(1..=95).contains(&config.mapping_share_percent) {
            return Err(invalid("a mapping share outside 1 to 95 percent"));
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
            mapping_limit: Some(max_map_count() / 100 * u64::from(config.mapping_share_percent)),
            heap_limit: None,
        };
        let mut device = Self {
            capabilities,
            huge_pages: config.huge_pages,
            spaces: Slab::new(),
            heaps: Slab::new(),
        };
        device.probe(base)?;
        Ok(device)
    }

    /// Commits and gives back one page, so that a kernel without memfd or hole punching is found
    /// out when the device is opened and not in the middle of a session.
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

    fn space_mut(&mut self, space: SpaceId) -> Result<&mut Reservation, DeviceError> {
        let found = self.spaces.get_mut(space.place());
        found.ok_or_else(|| invalid("a reservation it does not have"))
    }

    fn space(&self, space: SpaceId) -> Result<&Reservation, DeviceError> {
        let found = self.spaces.get(space.place());
        found.ok_or_else(|| invalid("a reservation it does not have"))
    }

    fn heap(&self, place: Place, length: ByteLength) -> Result<&Heap, DeviceError> {
        let found = self.heaps.get(place.heap.place());
        let heap = found.ok_or_else(|| invalid("a heap it does not have"))?;
        match place.offset.checked_add(length.get()) {
            Some(end) if end <= heap.length.get() => Ok(heap),
            _ => Err(invalid("an operation outside its heap")),
        }
    }

    /// A heap that is memory and no file.
    fn own_heap(&self, place: Place, length: ByteLength) -> Result<&Heap, DeviceError> {
        let heap = self.heap(place, length)?;
        match heap.contents {
            Contents::Memory => Ok(heap),
            Contents::File => Err(invalid("writing to a file")),
        }
    }

    fn perform(&mut self, operation: Operation) -> Result<(), DeviceError> {
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
        let heap = self.own_heap(place, length)?;
        let flags = FallocateFlags::KEEP_SIZE;
        retry(|| fallocate(&heap.file, flags, place.offset, length.get()))
            .map_err(|errno| memory("fallocate", errno, length))
    }

    fn decommit(&self, place: Place, length: ByteLength) -> Result<(), DeviceError> {
        let heap = self.own_heap(place, length)?;
        let flags = FallocateFlags::KEEP_SIZE | FallocateFlags::PUNCH_HOLE;
        retry(|| fallocate(&heap.file, flags, place.offset, length.get()))
            .map_err(|errno| system("fallocate(PUNCH_HOLE)", errno))
    }

    fn map(
        &mut self,
        address: Address,
        place: Place,
        length: ByteLength,
        access: Access,
    ) -> Result<(), DeviceError> {
        if self.heap(place, length)?.contents == Contents::File {
            if access == Access::ReadWrite {
                return Err(invalid("writing to a file"));
            }
            self.space_mut(address.space)?.watch_over()?;
        }
        let heap = self.heap(place, length)?;
        let pointer = self.space(address.space)?.at(address.offset, length)?;
        let flags = MapFlags::SHARED | MapFlags::FIXED | MapFlags::NORESERVE;
        // SAFETY: H1 for the address; the pool holds the buffer exclusively while it changes (H4),
        // so no slice of this range exists.
        unsafe {
            rustix::mm::mmap(
                pointer,
                length.get() as usize,
                protection(access),
                flags,
                &heap.file,
                heap.start + place.offset,
            )
        }
        .map(drop)
        .map_err(|errno| address_space("mmap", errno, length))
    }

    /// Fills the page table for memory that is committed already. Kernels before 5.14 have no such
    /// call; there the first access of each 4 KiB does it, which cannot fail any more.
    ///
    /// Of a file it fills the last entry alone, which is missing if any page is that the file was cut
    /// by. The kernel walks each 4 KiB of what it is told, on one core, which for gigabytes is a good part
    /// of what computing a token with them takes; threads that read them are given 64 KiB with each
    /// fault, as they come to them. What cannot be read then is the guard's, as is what is cut later.
    fn populate(&self, operation: Operation) -> Result<(), DeviceError> {
        let Operation::Map {
            address,
            place,
            length,
            access,
        } = operation
        else {
            return Ok(());
        };
        let contents = self.heap(place, length)?.contents;
        let (offset, length) = match contents {
            Contents::File => last_entry(address.offset, length),
            Contents::Memory => (address.offset, length),
        };
        let pointer = self.space(address.space)?.at(offset, length)?;
        let advice = match access {
            Access::Read => Advice::LinuxPopulateRead,
            Access::ReadWrite => Advice::LinuxPopulateWrite,
        };
        // SAFETY: H1; populating changes no contents.
        match retry(|| unsafe { rustix::mm::madvise(pointer, length.get() as usize, advice) }) {
            Ok(()) | Err(Errno::INVAL) => Ok(()),
            Err(errno) if contents == Contents::File && errno != Errno::NOMEM => {
                Err(DeviceError::LostFile)
            }
            Err(errno) => Err(memory("madvise(POPULATE)", errno, length)),
        }
    }

    fn apply_all(&mut self, batch: &[Operation]) -> Result<Fence, BatchError> {
        for (applied, &operation) in batch.iter().enumerate() {
            self.perform(operation)
                .map_err(|cause| BatchError { applied, cause })?;
            // The mapping is in place by now, so this operation counts as applied.
            self.populate(operation)
                .and_then(|()| self.collapse(operation))
                .map_err(|cause| BatchError {
                    applied: applied + 1,
                    cause,
                })?;
        }
        Ok(Fence::DONE)
    }

    /// Moves the whole huge pages of a mapping that was just made, as far as the system does it.
    fn collapse(&self, operation: Operation) -> Result<(), DeviceError> {
        let Operation::Map {
            address,
            place,
            length,
            ..
        } = operation
        else {
            return Ok(());
        };
        let pointer = self.space(address.space)?.at(address.offset, length)?;
        if self.huge_pages == HugePages::Collapse
            && let Some((skipped, whole)) =
                whole_huge_pages(pointer.addr() as u64, place.offset, length.get())
        {
            // SAFETY: H1: `skipped + whole` is within `length`; collapsing changes no contents. A
            // refusal leaves the mapping as it was.
            let _ = unsafe {
                let start = pointer.byte_add(skipped as usize);
                libc::madvise(start, whole as usize, MADV_COLLAPSE)
            };
        }
        Ok(())
    }

    fn unmap(&self, address: Address, length: ByteLength) -> Result<(), DeviceError> {
        let pointer = self.space(address.space)?.at(address.offset, length)?;
        let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
        // SAFETY: H1, and H4 as in `map`.
        let result = unsafe {
            rustix::mm::mmap_anonymous(pointer, length.get() as usize, ProtFlags::empty(), flags)
        };
        result
            .map(drop)
            .map_err(|errno| address_space("mmap(PROT_NONE)", errno, length))
    }

    fn protect(
        &self,
        address: Address,
        length: ByteLength,
        access: Access,
    ) -> Result<(), DeviceError> {
        let pointer = self.space(address.space)?.at(address.offset, length)?;
        let flags = match access {
            Access::Read => MprotectFlags::READ,
            Access::ReadWrite => MprotectFlags::READ | MprotectFlags::WRITE,
        };
        // SAFETY: H1, and H4 as in `map`.
        unsafe { rustix::mm::mprotect(pointer, length.get() as usize, flags) }
            .map_err(|errno| address_space("mprotect", errno, length))
    }

    fn copy(&self, from: Address, to: Place, length: ByteLength) -> Result<(), DeviceError> {
        let heap = self.own_heap(to, length)?;
        let pointer = self.space(from.space)?.at(from.offset, length)?;
        // SAFETY: H1; the pool copies mapped pages only, and holds their buffer exclusively (H4);
        // a sealed page is not written by anyone else either.
        let source = unsafe {
            std::slice::from_raw_parts(pointer.cast::<u8>().cast_const(), length.get() as usize)
        };
        let written = heap.file.write_all_at(source, to.offset);
        written.map_err(
            |error| match Errno::from_io_error(&error).unwrap_or(Errno::IO) {
                // Committed memory can be read: what cannot is a file's.
                Errno::FAULT => DeviceError::LostFile,
                errno => memory("pwrite", errno, length),
            },
        )
    }

    fn zero(&self, address: Address, length: ByteLength) -> Result<(), DeviceError> {
        let pointer = self.space(address.space)?.at(address.offset, length)?;
        // SAFETY: H1; the pool zeroes pages it has just mapped for writing, of a buffer it holds
        // exclusively (H4).
        unsafe { pointer.cast::<u8>().write_bytes(0, length.get() as usize) };
        Ok(())
    }
}

// SAFETY: D1: H1 and H2. D2: `map` and `protect` are in force when the call returns, and the pages
// behind them are committed, so no access faults. D3: `MAP_SHARED` mappings of one file show the
// same memory exactly where offsets agree, and H3 keeps others out. D4: each operation is one call
// that does all or nothing (filling the page table comes after it and is counted apart), and
// `apply` stops at the first that fails.
unsafe impl Device for HostDevice {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn reserve(&mut self, length: ByteLength) -> Result<SpaceId, DeviceError> {
        let size = usize::try_from(length.get())
            .ok()
            .filter(|&size| size > 0 && size <= isize::MAX as usize)
            .ok_or_else(|| address_space("mmap(PROT_NONE)", Errno::NOMEM, length))?;
        let base = match self.huge_pages {
            HugePages::Never => reserve(size),
            HugePages::Collapse => reserve_aligned(size),
        };
        let base = base.map_err(|errno| address_space("mmap(PROT_NONE)", errno, length))?;
        Ok(SpaceId::of(self.spaces.insert(Reservation {
            guard: None,
            base,
            length,
        })))
    }

    fn release(&mut self, space: SpaceId, _after: Fence) -> Result<Fence, DeviceError> {
        let reservation = self.space_mut(space)?;
        // Another mapping may have the range once it is gone. What is refused is not read any more.
        reservation.guard = None;
        let Reservation { base, length, .. } = reservation;
        // SAFETY: H2: the whole reservation, exactly as it was made; its buffer is being dropped,
        // so no slice of it exists.
        unsafe { rustix::mm::munmap(base.as_ptr().cast(), length.get() as usize) }
            .map_err(|errno| address_space("munmap", errno, *length))?;
        self.spaces.try_remove(space.place());
        Ok(Fence::DONE)
    }

    fn create_heap(&mut self, length: ByteLength) -> Result<HeapId, DeviceError> {
        if length == ByteLength::ZERO {
            return Err(invalid("a heap of no bytes"));
        }
        let file =
            memfd_create(c"lacuna-heap", MemfdFlags::CLOEXEC).map_err(|errno| match errno {
                Errno::MFILE | Errno::NFILE => DeviceError::OutOfDescriptors {
                    code: errno.raw_os_error(),
                },
                _ => system("memfd_create", errno),
            })?;
        ftruncate(&file, length.get()).map_err(|errno| memory("ftruncate", errno, length))?;
        let heap = Heap {
            file: File::from(file),
            start: 0,
            length,
            contents: Contents::Memory,
            lost: false,
        };
        Ok(HeapId::of(self.heaps.insert(heap)))
    }

    fn open_heap(&mut self, part: FilePart) -> Result<HeapId, DeviceError> {
        if !guard::is_installed() {
            return Err(invalid("map files before `guard::install` is called"));
        }
        let aligned = part
            .offset
            .is_multiple_of(rustix::param::page_size() as u64);
        if !aligned || part.length == ByteLength::ZERO {
            return Err(invalid("map a file from within a page on"));
        }
        let heap = Heap {
            file: part.file,
            start: part.offset,
            length: part.length,
            contents: Contents::File,
            lost: false,
        };
        Ok(HeapId::of(self.heaps.insert(heap)))
    }

    fn has_lost_files(&self) -> bool {
        let guards = self.spaces.iter().flat_map(|(_, space)| &space.guard);
        // The rest of the page that a shortened file ends in reads as zeros, and nothing faults.
        let lost = |heap: &Heap| {
            let end = heap.start + heap.length.get();
            let shorter = || heap.file.metadata().is_ok_and(|file| file.len() < end);
            heap.contents == Contents::File && (heap.lost || shorter())
        };
        guards.into_iter().any(Guard::is_lost) || self.heaps.iter().any(|(_, heap)| lost(heap))
    }

    fn destroy_heap(&mut self, heap: HeapId) -> Result<(), DeviceError> {
        let heap = self.heaps.try_remove(heap.place());
        heap.map(drop)
            .ok_or_else(|| invalid("a heap it does not have"))
    }

    fn apply(&mut self, batch: &[Operation], _after: Fence) -> Result<Fence, BatchError> {
        let applied = self.apply_all(batch);
        if let Err(BatchError {
            cause: DeviceError::LostFile,
            ..
        }) = applied
        {
            // Which one it was does not matter: whoever asks lets go of all.
            for (_, heap) in &mut self.heaps {
                heap.lost = heap.contents == Contents::File;
            }
        }
        applied
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
        for reservation in self.spaces.drain() {
            let Reservation {
                guard,
                base,
                length,
            } = reservation;
            drop(guard);
            // SAFETY: H2. A refusal leaks address space, which is all a destructor can do.
            let _ = unsafe { rustix::mm::munmap(base.as_ptr().cast(), length.get() as usize) };
        }
    }
}

/// Address space for `size` bytes, wherever the kernel likes.
fn reserve(size: usize) -> Result<NonNull<u8>, Errno> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a fresh mapping wherever the kernel likes touches nothing that exists.
    let pointer = unsafe {
        rustix::mm::mmap_anonymous(std::ptr::null_mut(), size, ProtFlags::empty(), flags)
    }?;
    NonNull::new(pointer.cast()).ok_or(Errno::NOMEM)
}

/// The same, from a multiple of the huge page on.
fn reserve_aligned(size: usize) -> Result<NonNull<u8>, Errno> {
    let huge = HUGE_PAGE as usize;
    let size = size.next_multiple_of(rustix::param::page_size());
    let wide = reserve(size.checked_add(huge).ok_or(Errno::NOMEM)?)?;
    let skipped = wide.addr().get().next_multiple_of(huge) - wide.addr().get();
    // SAFETY: `skipped` is below `huge`, so base and end lie within the `size + huge` bytes just
    // reserved. The parts before and behind are given back; nothing was mapped there.
    unsafe {
        let base = wide.byte_add(skipped);
        if skipped > 0 {
            rustix::mm::munmap(wide.as_ptr().cast(), skipped)?;
        }
        rustix::mm::munmap(base.byte_add(size).as_ptr().cast(), huge - skipped)?;
        Ok(base)
    }
}

/// Of a mapping at `address` of `length` bytes of a file, from `offset` on: how many bytes are before
/// its first huge page and how many in huge pages, if there are any. Address and offset have to be
/// equally far from one.
fn whole_huge_pages(address: u64, offset: u64, length: u64) -> Option<(u64, u64)> {
    let skipped = address.next_multiple_of(HUGE_PAGE) - address;
    let whole = length.saturating_sub(skipped) / HUGE_PAGE * HUGE_PAGE;
    let alike = address % HUGE_PAGE == offset % HUGE_PAGE;
    (alike && whole > 0).then_some((skipped, whole))
}

/// The last entry of the page table among those of `length` bytes at `offset`.
fn last_entry(offset: u64, length: ByteLength) -> (u64, ByteLength) {
    let entry = length.get().min(rustix::param::page_size() as u64);
    (offset + length.get() - entry, ByteLength::new(entry))
}

fn protection(access: Access) -> ProtFlags {
    match access {
        Access::Read => ProtFlags::READ,
        Access::ReadWrite => ProtFlags::READ | ProtFlags::WRITE,
    }
}

fn max_map_count() -> u64 {
    let text = std::fs::read_to_string("/proc/sys/vm/max_map_count").ok();
    let count = text.and_then(|text| text.trim().parse::<NonZeroU64>().ok());
    count.map_or(DEFAULT_MAP_COUNT, NonZeroU64::get)
}

/// Repeats a call that a signal interrupted.
fn retry<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            result => return result,
        }
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

fn system(call: &'static str, errno: Errno) -> DeviceError {
    DeviceError::System {
        call,
        code: errno.raw_os_error(),
    }
}

fn memory(call: &'static str, errno: Errno, length: ByteLength) -> DeviceError {
    match errno {
        Errno::NOMEM | Errno::NOSPC | Errno::DQUOT | Errno::FAULT => DeviceError::OutOfMemory {
            call,
            code: errno.raw_os_error(),
            length,
        },
        _ => system(call, errno),
    }
}

fn address_space(call: &'static str, errno: Errno, length: ByteLength) -> DeviceError {
    match errno {
        Errno::NOMEM | Errno::AGAIN => DeviceError::OutOfAddressSpace {
            call,
            code: errno.raw_os_error(),
            length,
        },
        _ => system(call, errno),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: ByteLength = ByteLength::kibibytes(64);

    #[test]
    fn a_refusal_says_what_ran_out() {
        for errno in [Errno::NOMEM, Errno::NOSPC, Errno::DQUOT, Errno::FAULT] {
            let expected = DeviceError::OutOfMemory {
                call: "fallocate",
                code: errno.raw_os_error(),
                length: PAGE,
            };
            assert_eq!(memory("fallocate", errno, PAGE), expected);
        }
        for errno in [Errno::NOMEM, Errno::AGAIN] {
            let expected = DeviceError::OutOfAddressSpace {
                call: "mmap",
                code: errno.raw_os_error(),
                length: PAGE,
            };
            assert_eq!(address_space("mmap", errno, PAGE), expected);
        }
        let other = DeviceError::System {
            call: "call",
            code: Errno::PERM.raw_os_error(),
        };
        assert_eq!(memory("call", Errno::PERM, PAGE), other);
        assert_eq!(address_space("call", Errno::PERM, PAGE), other);
    }

    #[test]
    fn a_call_that_a_signal_interrupts_is_made_again() {
        let mut calls = 0;
        let interrupted_twice = retry(|| {
            calls += 1;
            if calls < 3 {
                Err(Errno::INTR)
            } else {
                Ok(calls)
            }
        });
        assert_eq!(interrupted_twice, Ok(3));
        assert_eq!(retry(|| Err::<(), _>(Errno::IO)), Err(Errno::IO));
    }

    #[test]
    fn the_share_of_mappings_is_of_what_the_kernel_allows() {
        let text = std::fs::read_to_string("/proc/sys/vm/max_map_count").unwrap();
        let allowed: u64 = text.trim().parse().unwrap();
        for percent in [1, 50, 95] {
            let config = HostConfig {
                mapping_share_percent: percent,
                ..HostConfig::DEFAULT
            };
            let device = HostDevice::with_config(config).unwrap();
            let limit = device.capabilities().mapping_limit;
            assert_eq!(limit, Some(allowed / 100 * u64::from(percent)));
        }
    }

    #[test]
    fn a_reservation_that_asks_for_huge_pages_begins_at_one() {
        let mut device = HostDevice::with_config(HostConfig {
            huge_pages: HugePages::Collapse,
            ..HostConfig::DEFAULT
        })
        .unwrap();
        for length in [PAGE, ByteLength::mebibytes(3), ByteLength::mebibytes(4)] {
            let space = device.reserve(length).unwrap();
            let Some(HostView::Pointer(base)) = device.host_view(space) else {
                panic!("the host sees its own memory");
            };
            assert_eq!(base.addr().get() as u64 % HUGE_PAGE, 0);
            device.release(space, Fence::DONE).unwrap();
            assert!(device.host_view(space).is_none());
        }
    }

    #[test]
    fn huge_pages_are_the_whole_ones_of_a_mapping_and_its_file_alike() {
        let (huge, page) = (HUGE_PAGE, PAGE.get());
        let at = 40 * huge;
        for (address, offset, length, expected) in [
            (at, 0, huge, Some((0, huge))),
            (at, 3 * huge, 3 * huge - page, Some((0, 2 * huge))),
            (at, 0, huge - page, None),
            (at, page, 2 * huge, None),
            (at + page, page, 2 * huge, Some((huge - page, huge))),
            (
                at + page,
                huge + page,
                2 * huge - page,
                Some((huge - page, huge)),
            ),
            (at + page, page, 2 * huge - 2 * page, None),
            (at - page, 2 * huge - page, huge + page, Some((page, huge))),
            (at + page, page, page, None),
        ] {
            assert_eq!(whole_huge_pages(address, offset, length), expected);
        }
    }

    #[cfg(target_pointer_width = "64")]
    #[test]
    fn a_device_takes_its_reservations_along_when_it_goes() {
        // Together they are more than the addresses there are.
        for _ in 0..200 {
            let mut device = HostDevice::new().unwrap();
            device.reserve(ByteLength::new(1 << 40)).unwrap();
        }
    }

    /// A device with a heap and a reservation of two pages each.
    fn device() -> (HostDevice, Place, Address) {
        let mut device = HostDevice::new().unwrap();
        let two = ByteLength::kibibytes(128);
        let heap = device.create_heap(two).unwrap();
        let space = device.reserve(two).unwrap();
        (
            device,
            Place { heap, offset: 0 },
            Address { space, offset: 0 },
        )
    }

    #[test]
    fn an_operation_outside_what_there_is_touches_nothing() {
        let (mut device, place, address) = device();
        let commit = Operation::Commit {
            place,
            length: ByteLength::kibibytes(128),
        };
        let map = |address, place, length| Operation::Map {
            address,
            place,
            length,
            access: Access::ReadWrite,
        };
        device
            .apply(&[commit, map(address, place, PAGE)], Fence::DONE)
            .unwrap();
        let Some(HostView::Pointer(base)) = device.host_view(address.space) else {
            panic!("the host sees its own memory");
        };
        // SAFETY: the first page was just mapped for writing, and nothing else knows of it.
        unsafe { base.write_volatile(9) };
        let second = PAGE.get();
        let three = ByteLength::kibibytes(192);
        let at = |offset| Address { offset, ..address };
        let within = |offset| Place { offset, ..place };
        let elsewhere = Address {
            space: SpaceId(7),
            offset: 0,
        };
        let nowhere = Place {
            heap: HeapId(7),
            offset: 0,
        };
        let (length, access) = (PAGE, Access::Read);
        for operation in [
            Operation::Commit {
                place,
                length: three,
            },
            Operation::Commit {
                place: within(second + 1),
                length,
            },
            Operation::Commit {
                place: within(u64::MAX),
                length,
            },
            Operation::Commit {
                place: nowhere,
                length,
            },
            Operation::Decommit {
                place: within(second + 1),
                length,
            },
            Operation::Decommit {
                place: nowhere,
                length,
            },
            map(at(second + 1), place, length),
            map(at(u64::MAX), place, length),
            map(address, within(second + 1), length),
            map(elsewhere, place, length),
            map(address, nowhere, length),
            map(address, place, ByteLength::ZERO),
            Operation::Unmap {
                address,
                length: three,
            },
            Operation::Unmap {
                address: elsewhere,
                length,
            },
            Operation::Unmap {
                address,
                length: ByteLength::ZERO,
            },
            Operation::Protect {
                address: at(second + 1),
                length,
                access,
            },
            Operation::Protect {
                address: elsewhere,
                length,
                access,
            },
            Operation::Copy {
                from: at(second + 1),
                to: place,
                length,
            },
            Operation::Copy {
                from: address,
                to: within(second + 1),
                length,
            },
            Operation::Zero {
                address,
                length: three,
            },
            Operation::Zero {
                address: elsewhere,
                length,
            },
        ] {
            let error = device.apply(&[operation], Fence::DONE).unwrap_err();
            assert_eq!(error.applied, 0);
            let invalid = matches!(error.cause, DeviceError::Invalid { device: NAME, .. });
            assert!(invalid, "{operation:?}: {}", error.cause);
        }
        // SAFETY: the first page is still mapped: that is what this test is about.
        assert_eq!(unsafe { base.read_volatile() }, 9);
        let last = Operation::Zero { address, length };
        device
            .apply(
                &[map(at(second), within(second), length), last],
                Fence::DONE,
            )
            .unwrap();
        // SAFETY: as above.
        assert_eq!(unsafe { base.read_volatile() }, 0);
    }

    #[test]
    fn an_operation_that_fails_once_its_mapping_is_made_counts_as_applied() {
        let (mut device, place, address) = device();
        // A mapping of what the file has lost can be made, but not filled.
        let heap = device.heap(place, PAGE).unwrap();
        heap.file.set_len(0).unwrap();
        let map = Operation::Map {
            address,
            place,
            length: PAGE,
            access: Access::ReadWrite,
        };
        let unmap = Operation::Unmap {
            address,
            length: PAGE,
        };
        for (batch, applied) in [(&[map][..], 1), (&[unmap, map, unmap], 2)] {
            let error = device.apply(batch, Fence::DONE).unwrap_err();
            assert_eq!(error.applied, applied);
            let short = matches!(
                error.cause,
                DeviceError::OutOfMemory {
                    call: "madvise(POPULATE)",
                    ..
                }
            );
            assert!(short, "{}", error.cause);
        }
    }

    #[test]
    fn what_there_is_not_cannot_be_given_back_and_nothing_cannot_be_had() {
        let (mut device, place, address) = device();
        assert!(device.create_heap(ByteLength::ZERO).is_err());
        for length in [ByteLength::ZERO, ByteLength::new(u64::MAX)] {
            let refused = device.reserve(length);
            let expected = address_space("mmap(PROT_NONE)", Errno::NOMEM, length);
            assert_eq!(refused, Err(expected));
        }
        device.destroy_heap(place.heap).unwrap();
        assert!(device.destroy_heap(place.heap).is_err());
        assert!(device.destroy_heap(HeapId(9)).is_err());
        device.release(address.space, Fence::DONE).unwrap();
        assert!(device.release(address.space, Fence::DONE).is_err());
        assert!(device.release(SpaceId(9), Fence::DONE).is_err());
        assert_eq!(
            device.wait(Fence(3), Patience::Poll),
            Ok(FenceState::Signalled)
        );
    }
}
