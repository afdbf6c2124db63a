#![expect(unsafe_code, reason = "Vulkan is a foreign interface")]

//! The open device: its handle, its two queues, its timeline, and the objects made on it.
//!
//! All work goes onto one timeline. Each submission, be it binds or commands, waits for the one
//! before it and signals the next point, so binds and compute are ordered both ways, a later
//! [`Fence`] implies every earlier one, and memory taken from one buffer may be given to another
//! at once: whatever comes later also happens later.
//!
//! # Safety
//!
//! * **V1** *Alive.* Every object is owned by one value that destroys it and that keeps the
//!   [`Driver`] alive; the driver destroys the device last. The instance is there as long as the process.
//! * **V2** *One at a time.* Queues and everything but the timeline are used under the device's
//!   lock, or by `&mut`; the timeline may be asked and awaited by any thread.
//! * **V3** *Idle when destroyed.* What the queue may still use is not dropped but retired, and
//!   dropped once the timeline has passed its last use, or when the device is idle or lost.
//! * **V4** *In bounds.* Offsets and lengths given to Vulkan lie within their buffer and heap and
//!   are multiples of what the driver asked for; the caller has checked them.
//! * **V5** *Nothing dangles.* What a structure points to lives until the call it is made for
//!   returns.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ash::vk;

use super::NAME;
use super::open::{Candidate, DriverIdentity, Families, Limits, OpenInstance, PageTable, choose};
use crate::device::{DeviceError, Fence, FenceState, Patience};
use crate::units::ByteLength;

/// The open device.
pub(super) struct Driver {
    pub(super) device: ash::Device,
    pub(super) limits: Limits,
    pub(super) identity: DriverIdentity,
    pub(super) memory: vk::PhysicalDeviceMemoryProperties,
    physical: vk::PhysicalDevice,
    /// Whether it says how much of its memory this process may have.
    has_budget: bool,
    pub(super) compute_family: u32,
    /// How the pages of reservations are found.
    pub(super) pages: PageTable,
    pub(super) kind: vk::PhysicalDeviceType,
    name: String,
    timeline: vk::Semaphore,
    /// The last point that was seen to be reached.
    reached: AtomicU64,
    lost: AtomicBool,
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver")
            .field("name", &self.name)
            .field("reached", &self.reached)
            .field("lost", &self.lost)
            .finish_non_exhaustive()
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        // SAFETY: V1: everything else made on the device held this value alive, so it is gone.
        unsafe {
            let _ = self.device.device_wait_idle();
            self.device.destroy_semaphore(self.timeline, None);
            self.device.destroy_device(None);
        }
    }
}

impl Driver {
    /// Opens the best device that the loader offers, or the one at a place in its list, with pages found as `pages` says at
    /// most.
    pub(super) fn open(
        place: Option<usize>,
        pages: PageTable,
    ) -> Result<(Arc<Self>, Queue), DeviceError> {
        Self::open_with((place, pages), |device| device)
    }

    /// As [`Driver::open`], with the device's functions passed through `wrap`.
    pub(super) fn open_with(
        (place, pages): (Option<usize>, PageTable),
        wrap: impl FnOnce(ash::Device) -> ash::Device,
    ) -> Result<(Arc<Self>, Queue), DeviceError> {
        let instance = OpenInstance::shared()?;
        let devices = instance.devices()?;
        let candidates: Vec<Candidate> = devices
            .iter()
            .map(|&device| instance.describe(device))
            .collect();
        let (index, families, pages) = choose(&candidates, place, pages)?;
        let physical = devices[index];
        let integer_dot = candidates[index].limits.integer_dot;
        let device = wrap(create_device(
            instance,
            physical,
            (families, pages),
            integer_dot,
        )?);
        let timeline = match create_timeline(&device) {
            Ok(timeline) => timeline,
            Err(result) => {
                // SAFETY: V1: nothing else was made on it yet.
                unsafe { device.destroy_device(None) };
                return Err(refused("vkCreateSemaphore", result));
            }
        };
        // SAFETY: V1; both families were asked for when the device was created.
        let (memory, compute, bind) = unsafe {
            (
                instance
                    .instance
                    .get_physical_device_memory_properties(physical),
                device.get_device_queue(families.compute, 0),
                device.get_device_queue(families.bind, 0),
            )
        };
        let chosen = &candidates[index];
        let driver = Arc::new(Self {
            device,
            limits: chosen.limits.clone(),
            identity: chosen.identity,
            memory,
            physical,
            has_budget: chosen.has_budget,
            compute_family: families.compute,
            pages,
            kind: chosen.kind,
            name: chosen.name.clone(),
            timeline,
            reached: AtomicU64::new(0),
            lost: AtomicBool::new(false),
        });
        let queue = Queue {
            driver: Arc::clone(&driver),
            compute,
            bind,
            submitted: Fence::DONE,
        };
        Ok((driver, queue))
    }

    /// What the driver calls itself.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// An error unless the device is still there.
    pub(super) fn check_alive(&self) -> Result<(), DeviceError> {
        match self.lost.load(Ordering::Relaxed) {
            true => Err(DeviceError::Lost),
            false => Ok(()),
        }
    }

    /// The error that a failed call amounts to; a lost device is remembered.
    pub(super) fn failure(
        &self,
        call: &'static str,
        result: vk::Result,
        length: u64,
    ) -> DeviceError {
        match result {
            vk::Result::ERROR_DEVICE_LOST => {
                self.lost.store(true, Ordering::Relaxed);
                DeviceError::Lost
            }
            vk::Result::ERROR_OUT_OF_DEVICE_MEMORY
            | vk::Result::ERROR_OUT_OF_HOST_MEMORY
            | vk::Result::ERROR_TOO_MANY_OBJECTS => DeviceError::OutOfMemory {
                call,
                code: result.as_raw(),
                length: ByteLength::new(length),
            },
            _ => refused(call, result),
        }
    }

    /// Looks whether `fence` is reached. Costs nothing if it was seen to be before.
    pub(super) fn poll(&self, fence: Fence) -> Result<FenceState, DeviceError> {
        if self.reached.load(Ordering::Acquire) < fence.0 {
            self.check_alive()?;
            // SAFETY: V1 and V2.
            let now = unsafe { self.device.get_semaphore_counter_value(self.timeline) }
                .map_err(|result| self.failure("vkGetSemaphoreCounterValue", result, 0))?;
            self.reached.fetch_max(now, Ordering::AcqRel);
        }
        match self.reached.load(Ordering::Acquire) < fence.0 {
            true => Ok(FenceState::Pending),
            false => Ok(FenceState::Signalled),
        }
    }

    /// Waits until `fence`, which has been submitted, is reached.
    pub(super) fn block(&self, fence: Fence) -> Result<(), DeviceError> {
        if self.poll(fence)? == FenceState::Signalled {
            return Ok(());
        }
        let (semaphores, values) = ([self.timeline], [fence.0]);
        let info = vk::SemaphoreWaitInfo::default()
            .semaphores(&semaphores)
            .values(&values);
        // SAFETY: V1, V2 and V5.
        unsafe { self.device.wait_semaphores(&info, u64::MAX) }
            .map_err(|result| self.failure("vkWaitSemaphores", result, 0))?;
        self.reached.fetch_max(fence.0, Ordering::AcqRel);
        Ok(())
    }

    pub(super) fn wait(&self, fence: Fence, patience: Patience) -> Result<FenceState, DeviceError> {
        match patience {
            Patience::Poll => self.poll(fence),
            Patience::Block => self.block(fence).map(|()| FenceState::Signalled),
        }
    }

    /// Waits until nothing runs any more, or the device is lost.
    pub(super) fn wait_idle(&self) {
        // SAFETY: V1; called when no one else can reach the queues any more (V2).
        let _ = unsafe { self.device.device_wait_idle() };
    }

    /// The first memory type in `allowed` with all of `wanted`, or else the first in `allowed`
    /// with all of `needed`.
    pub(super) fn memory_type(
        &self,
        allowed: u32,
        wanted: vk::MemoryPropertyFlags,
        needed: vk::MemoryPropertyFlags,
    ) -> Option<u32> {
        let find = |flags: vk::MemoryPropertyFlags| {
            (0..self.memory.memory_type_count).find(|&index| {
                let has = self.memory.memory_types[index as usize].property_flags;
                allowed & (1 << index) != 0 && has.contains(flags)
            })
        };
        find(wanted).or_else(|| find(needed))
    }

    /// How much memory of a type there is.
    pub(super) fn memory_size(&self, memory_type: u32) -> u64 {
        let heap = self.memory.memory_types[memory_type as usize].heap_index;
        self.memory.memory_heaps[heap as usize].size
    }

    /// How much of it this process could take now beside what it has, others having theirs; `None` where the driver does not
    /// tell.
    pub(super) fn memory_left(&self, memory_type: u32) -> Option<u64> {
        let heap = self.memory.memory_types[memory_type as usize].heap_index as usize;
        let instance = OpenInstance::shared().ok().filter(|_| self.has_budget)?;
        let mut budget = vk::PhysicalDeviceMemoryBudgetPropertiesEXT::default();
        let mut properties = vk::PhysicalDeviceMemoryProperties2::default().push_next(&mut budget);
        // SAFETY: V1, V5; the device has the extension that the structure belongs to.
        unsafe {
            instance
                .instance
                .get_physical_device_memory_properties2(self.physical, &mut properties);
        }
        let (all, used) = (budget.heap_budget[heap], budget.heap_usage[heap]);
        (all > 0).then(|| all.saturating_sub(used))
    }
}

fn create_device(
    instance: &OpenInstance,
    physical: vk::PhysicalDevice,
    (families, pages): (Families, PageTable),
    integer_dot: bool,
) -> Result<ash::Device, DeviceError> {
    let priority = [1.0];
    let queue = |family| {
        vk::DeviceQueueCreateInfo::default()
            .queue_family_index(family)
            .queue_priorities(&priority)
    };
    let mut queues = vec![queue(families.compute)];
    if families.bind != families.compute {
        queues.push(queue(families.bind));
    }
    // Every device has robust buffer access: what a kernel asks for beyond a window stays within the
    // window's buffer, whatever the numbers it was given.
    let features = vk::PhysicalDeviceFeatures::default()
        .robust_buffer_access(true)
        .sparse_binding(pages == PageTable::Device)
        .sparse_residency_buffer(pages == PageTable::Device)
        .sparse_residency_aliased(pages == PageTable::Device)
        .shader_storage_buffer_array_dynamic_indexing(pages == PageTable::Lookup);
    let mut newer = vk::PhysicalDeviceVulkan12Features::default()
        .timeline_semaphore(true)
        // All of it, since MoltenVK has arrays of buffers only then.
        .descriptor_indexing(pages == PageTable::Lookup)
        .shader_storage_buffer_array_non_uniform_indexing(pages == PageTable::Lookup)
        .runtime_descriptor_array(pages == PageTable::Lookup);
    let mut newest = vk::PhysicalDeviceVulkan13Features::default().shader_integer_dot_product(true);
    let mut info = vk::DeviceCreateInfo::default()
        .queue_create_infos(&queues)
        .enabled_features(&features)
        .push_next(&mut newer);
    if integer_dot {
        info = info.push_next(&mut newest);
    }
    // SAFETY: V1 and V5; the features and families are those that the device said it has.
    unsafe { instance.instance.create_device(physical, &info, None) }
        .map_err(|result| refused("vkCreateDevice", result))
}

fn create_timeline(device: &ash::Device) -> Result<vk::Semaphore, vk::Result> {
    let mut kind = vk::SemaphoreTypeCreateInfo::default()
        .semaphore_type(vk::SemaphoreType::TIMELINE)
        .initial_value(0);
    let info = vk::SemaphoreCreateInfo::default().push_next(&mut kind);
    // SAFETY: V1 and V5; the device was created with timeline semaphores.
    unsafe { device.create_semaphore(&info, None) }
}

fn refused(call: &'static str, result: vk::Result) -> DeviceError {
    DeviceError::Driver {
        device: NAME,
        call,
        code: result.as_raw(),
    }
}

/// The queues, and how far the timeline has been submitted.
pub(super) struct Queue {
    driver: Arc<Driver>,
    compute: vk::Queue,
    bind: vk::Queue,
    submitted: Fence,
}

impl fmt::Debug for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Queue").field(&self.submitted).finish()
    }
}

impl Queue {
    /// The last point that anything was submitted for.
    pub(super) fn submitted(&self) -> Fence {
        self.submitted
    }

    /// Queues changes of page tables, each buffer with its own, in one call.
    pub(super) fn bind(
        &mut self,
        changes: &[(vk::Buffer, Vec<vk::SparseMemoryBind>)],
    ) -> Result<Fence, DeviceError> {
        self.driver.check_alive()?;
        let buffers: Vec<_> = changes
            .iter()
            .map(|(buffer, binds)| {
                vk::SparseBufferMemoryBindInfo::default()
                    .buffer(*buffer)
                    .binds(binds)
            })
            .collect();
        let next = Fence(self.submitted.0 + 1);
        let (timeline, from, to) = ([self.driver.timeline], [self.submitted.0], [next.0]);
        let mut points = vk::TimelineSemaphoreSubmitInfo::default()
            .wait_semaphore_values(&from)
            .signal_semaphore_values(&to);
        let info = vk::BindSparseInfo::default()
            .wait_semaphores(&timeline)
            .signal_semaphores(&timeline)
            .buffer_binds(&buffers)
            .push_next(&mut points);
        // SAFETY: V1 for the buffers and heaps, which the caller holds; V2 by `&mut self`; V4, V5.
        unsafe {
            self.driver
                .device
                .queue_bind_sparse(self.bind, &[info], vk::Fence::null())
        }
        .map_err(|result| self.driver.failure("vkQueueBindSparse", result, 0))?;
        self.submitted = next;
        Ok(next)
    }

    /// Queues recorded commands, one after the other.
    pub(super) fn submit(&mut self, commands: &[vk::CommandBuffer]) -> Result<Fence, DeviceError> {
        self.driver.check_alive()?;
        let next = Fence(self.submitted.0 + 1);
        let (timeline, from, to) = ([self.driver.timeline], [self.submitted.0], [next.0]);
        let mut points = vk::TimelineSemaphoreSubmitInfo::default()
            .wait_semaphore_values(&from)
            .signal_semaphore_values(&to);
        let stages = [vk::PipelineStageFlags::ALL_COMMANDS];
        let info = vk::SubmitInfo::default()
            .wait_semaphores(&timeline)
            .wait_dst_stage_mask(&stages)
            .signal_semaphores(&timeline)
            .command_buffers(commands)
            .push_next(&mut points);
        // SAFETY: V1: the caller keeps the commands and what they name until the point is reached
        // (V3); V2 by `&mut self`; V5.
        unsafe {
            self.driver
                .device
                .queue_submit(self.compute, &[info], vk::Fence::null())
        }
        .map_err(|result| self.driver.failure("vkQueueSubmit", result, 0))?;
        self.submitted = next;
        Ok(next)
    }
}
