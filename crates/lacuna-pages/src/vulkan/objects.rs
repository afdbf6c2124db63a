#![expect(unsafe_code, reason = "Vulkan is a foreign interface")]

//! Buffers and memory, each owned by one value.
//!
//! # Safety
//!
//! V1 to V5 of [`driver`](super::driver), and:
//!
//! * **B1** A buffer is bound to its memory once, right after both were made; the memory is as
//!   long as the buffer wants and outlives it.
//! * **B2** Mapped memory is host-visible and coherent, stays mapped until it is freed, and is read
//!   and written by the host only while no submission that uses it is pending.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ash::vk;

use super::driver::Driver;
use super::table::Entries;
use crate::device::DeviceError;
use crate::gpu::bindings::Bindings;

/// What every buffer that kernels see is used for.
pub(super) const KERNEL_USAGE: vk::BufferUsageFlags = vk::BufferUsageFlags::from_raw(
    vk::BufferUsageFlags::STORAGE_BUFFER.as_raw()
        | vk::BufferUsageFlags::TRANSFER_SRC.as_raw()
        | vk::BufferUsageFlags::TRANSFER_DST.as_raw(),
);

/// Which buffer it is. Drivers give the handles of buffers that are gone to new ones; the number no other one has had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BufferName {
    pub(super) handle: vk::Buffer,
    number: u64,
}

impl BufferName {
    fn new(handle: vk::Buffer) -> Self {
        static MADE: AtomicU64 = AtomicU64::new(0);
        Self {
            handle,
            number: MADE.fetch_add(1, Ordering::Relaxed),
        }
    }
}

/// A buffer.
pub(super) struct Buffer {
    driver: Arc<Driver>,
    name: BufferName,
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Buffer").field(&self.name).finish()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: V1 and V3.
        unsafe { self.driver.device.destroy_buffer(self.name.handle, None) };
    }
}

impl Buffer {
    fn new(driver: &Arc<Driver>, info: &vk::BufferCreateInfo<'_>) -> Result<Self, DeviceError> {
        driver.check_alive()?;
        // SAFETY: V1 and V5; the size is within the device's limit (V4).
        let handle = unsafe { driver.device.create_buffer(info, None) }
            .map_err(|result| driver.failure("vkCreateBuffer", result, info.size))?;
        Ok(Self {
            driver: Arc::clone(driver),
            name: BufferName::new(handle),
        })
    }

    /// A buffer of holes, whose pages may be bound elsewhere too.
    pub(super) fn sparse(driver: &Arc<Driver>, length: u64) -> Result<Self, DeviceError> {
        let flags = vk::BufferCreateFlags::SPARSE_BINDING
            | vk::BufferCreateFlags::SPARSE_RESIDENCY
            | vk::BufferCreateFlags::SPARSE_ALIASED;
        let info = vk::BufferCreateInfo::default()
            .flags(flags)
            .size(length)
            .usage(KERNEL_USAGE);
        Self::new(driver, &info)
    }

    pub(super) fn plain(
        driver: &Arc<Driver>,
        length: u64,
        usage: vk::BufferUsageFlags,
    ) -> Result<Self, DeviceError> {
        let info = vk::BufferCreateInfo::default().size(length).usage(usage);
        Self::new(driver, &info)
    }

    pub(super) fn name(&self) -> BufferName {
        self.name
    }

    pub(super) fn requirements(&self) -> vk::MemoryRequirements {
        // SAFETY: V1.
        unsafe {
            self.driver
                .device
                .get_buffer_memory_requirements(self.name.handle)
        }
    }

    pub(super) fn bind(&self, memory: &Memory) -> Result<(), DeviceError> {
        // SAFETY: V1 and B1.
        unsafe {
            self.driver
                .device
                .bind_buffer_memory(self.name.handle, memory.handle, 0)
        }
        .map_err(|result| self.driver.failure("vkBindBufferMemory", result, 0))
    }
}

/// An allocation.
pub(super) struct Memory {
    driver: Arc<Driver>,
    handle: vk::DeviceMemory,
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Memory").field(&self.handle).finish()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: V1 and V3; what is bound to it is gone or will not be used again.
        unsafe { self.driver.device.free_memory(self.handle, None) };
    }
}

impl Memory {
    pub(super) fn new(
        driver: &Arc<Driver>,
        length: u64,
        memory_type: u32,
    ) -> Result<Self, DeviceError> {
        let info = vk::MemoryAllocateInfo::default()
            .allocation_size(length)
            .memory_type_index(memory_type);
        // SAFETY: V1 and V5; the type is one of the device's.
        let handle = unsafe { driver.device.allocate_memory(&info, None) }
            .map_err(|result| driver.failure("vkAllocateMemory", result, length))?;
        Ok(Self {
            driver: Arc::clone(driver),
            handle,
        })
    }
}

/// A reservation, and its memory.
#[derive(Debug)]
pub(super) struct Space {
    pub(super) length: u64,
    pub(super) memory: SpaceMemory,
}

/// The memory of a reservation.
#[derive(Debug)]
pub(super) enum SpaceMemory {
    /// Pages of heaps, which the device's page table has in a buffer.
    Sparse(Buffer, Bindings),
    /// Pages of heaps, which kernels look up in the [`Table`](super::table::Table) from this entry on.
    Listed(Entries, Bindings),
    /// A buffer with memory from its first to its last byte, of so many bytes.
    Whole(
        Buffer,
        #[expect(dead_code, reason = "held as long as the buffer")] Memory,
        u64,
    ),
}

impl SpaceMemory {
    /// Which pages are where, unless all memory is there from the start.
    pub(super) fn bindings(&self) -> Option<&Bindings> {
        match self {
            Self::Sparse(_, bindings) | Self::Listed(_, bindings) => Some(bindings),
            Self::Whole(..) => None,
        }
    }

    /// The same, to be changed.
    pub(super) fn bindings_mut(&mut self) -> Option<&mut Bindings> {
        match self {
            Self::Sparse(_, bindings) | Self::Listed(_, bindings) => Some(bindings),
            Self::Whole(..) => None,
        }
    }
}

/// A heap: one allocation, and a buffer over all of it, for copying into it and for kernels that look pages up.
#[derive(Debug)]
pub(super) struct Heap {
    whole: Buffer,
    memory: Memory,
    pub(super) length: u64,
}

impl Heap {
    /// A heap whose memory suits buffers that allow the memory types in `allowed`.
    pub(super) fn new(
        driver: &Arc<Driver>,
        length: u64,
        allowed: u32,
    ) -> Result<Self, DeviceError> {
        let whole = Buffer::plain(driver, length, KERNEL_USAGE)?;
        let requirements = whole.requirements();
        let device_local = vk::MemoryPropertyFlags::DEVICE_LOCAL;
        let any = vk::MemoryPropertyFlags::empty();
        let memory_type = driver
            .memory_type(allowed & requirements.memory_type_bits, device_local, any)
            .ok_or(super::invalid(
                "a heap: no memory type suits reservations and copying",
            ))?;
        let memory = Memory::new(driver, requirements.size.max(length), memory_type)?;
        whole.bind(&memory)?;
        Ok(Self {
            whole,
            memory,
            length,
        })
    }

    pub(super) fn memory(&self) -> vk::DeviceMemory {
        self.memory.handle
    }

    pub(super) fn whole(&self) -> BufferName {
        self.whole.name
    }
}

/// A buffer that the host sees.
#[derive(Debug)]
pub(super) struct Staging {
    buffer: Buffer,
    _memory: Memory,
    pointer: NonNull<u8>,
    length: usize,
}

// SAFETY: the pointer names memory that this value alone owns and that is mapped for the whole
// process (B2).
unsafe impl Send for Staging {}

impl Staging {
    pub(super) fn new(driver: &Arc<Driver>, length: usize) -> Result<Self, DeviceError> {
        let size = length as u64;
        let buffer = Buffer::plain(driver, size, KERNEL_USAGE)?;
        let requirements = buffer.requirements();
        let visible =
            vk::MemoryPropertyFlags::HOST_VISIBLE | vk::MemoryPropertyFlags::HOST_COHERENT;
        let cached = visible | vk::MemoryPropertyFlags::HOST_CACHED;
        let memory_type = driver
            .memory_type(requirements.memory_type_bits, cached, visible)
            .ok_or(super::invalid(
                "a staging buffer: no memory type is visible to the host",
            ))?;
        let memory = Memory::new(driver, requirements.size.max(size), memory_type)?;
        buffer.bind(&memory)?;
        let flags = vk::MemoryMapFlags::empty();
        // SAFETY: V1; the type is host-visible and the allocation is not mapped yet.
        let pointer = unsafe {
            driver
                .device
                .map_memory(memory.handle, 0, vk::WHOLE_SIZE, flags)
        }
        .map_err(|result| driver.failure("vkMapMemory", result, size))?;
        let pointer = NonNull::new(pointer.cast()).ok_or(super::invalid(
            "a staging buffer: the driver mapped it nowhere",
        ))?;
        Ok(Self {
            buffer,
            _memory: memory,
            pointer,
            length,
        })
    }

    pub(super) fn name(&self) -> BufferName {
        self.buffer.name
    }

    pub(super) fn length(&self) -> usize {
        self.length
    }

    /// Copies `bytes` to the beginning; no submission uses the buffer now (B2).
    pub(super) fn fill(&mut self, bytes: &[u8]) {
        assert!(bytes.len() <= self.length, "B1: staging is long enough");
        // SAFETY: B2, and the length was just checked; device memory never overlaps a Rust slice.
        unsafe {
            self.pointer
                .as_ptr()
                .copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
        }
    }

    /// Copies from the beginning to `bytes`; no submission uses the buffer now (B2).
    pub(super) fn read(&self, bytes: &mut [u8]) {
        assert!(bytes.len() <= self.length, "B1: staging is long enough");
        // SAFETY: as in `fill`.
        unsafe {
            self.pointer
                .as_ptr()
                .copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len());
        }
    }
}
