#![expect(unsafe_code, reason = "Vulkan is a foreign interface")]

//! Passes of kernels that callers bring. A pass that does what the one before it of its class did, as those of one token
//! after the other do, is checked call by call, and the commands of that are submitted again, all at once. Others are
//! recorded and submitted in a few parts, so that the device begins while the host still records.
//!
//! A [`Compute`] has what one pass in flight takes: commands, descriptor sets, and memory through
//! which the host gives numbers and gets them back. A [`Recording`] holds the device's lock, so what
//! it checked of mapped memory is still so when it is submitted. Nothing is allocated for a pass
//! that is no longer than those before it.
//!
//! # Safety
//!
//! V1 to V5 of [`driver`](super::driver), and:
//!
//! * **C1** A kernel is valid SPIR-V with one compute entry point of the name given, which uses of
//!   set 0 at most the storage buffers that [`WINDOWS`] counts, of set 1 at most an array of all heaps where
//!   [`Compute::looks_pages_up`], and at most `CONSTANT_BYTES` bytes of push constants: whoever makes a [`ComputeKernel`] promises it. What it asks for beyond a window
//!   stays within that window's buffer, because the device has robust buffer access.
//! * **C2** Commands, sets and staging memory of a [`Compute`] are touched only when the point of the last submission of the
//!   pass before is reached. Sets belong to one part of one class: they are written only while that part's commands are recorded,
//!   each before commands name it, and once; the set of heaps is written only where all are recorded anew.
//! * **C3** What a recording names outlives it by its lifetime, and is not dropped before the queue
//!   has done with it: pieces of memory, kernels and a [`Compute`] wait for what was submitted. Mapped
//!   memory is checked under the lock that the recording holds. Commands are submitted again only by a recording that has named
//!   all that they name: handles that a driver gives twice have numbers that no other one has had.

use std::ffi::CStr;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, MutexGuard};

use ash::vk;

use super::driver::Driver;
use super::frames::Window;
use super::heap_set::HeapSet;
use super::kernel_cache::KernelCache;
use super::layout::Layout;
use super::memory::DeviceMemory;
use super::objects::Staging;
use super::open::PageTable;
use super::queue::VulkanQueue;
use super::state::State;
use super::table::shown_alignment;
use super::times::Times;
use super::{Shared, invalid};
use crate::device::{Access, Address, DeviceError, Fence, KernelTime};
use crate::units::ByteLength;

/// Storage buffers that a kernel sees at most: as many as every device has room for.
pub const WINDOWS: usize = 4;

/// Bytes of constants that every device takes with a dispatch.
pub(super) const CONSTANT_BYTES: usize = 128;

/// Workgroups in each direction that every device takes.
const MOST_GROUPS: u32 = 65_535;

/// Parts in which a pass may be submitted.
const PARTS: usize = 4;

/// Classes of passes whose commands are kept: those of batches of a few sizes, one of which a step has.
const CLASSES: usize = 4;

/// Descriptor sets that are made at once: those of a few layers.
const SETS: u32 = 64;

/// What a kernel sees as one of its buffers.
#[derive(Clone, Copy, Debug)]
pub enum Bound<'a> {
    /// Part of a piece of memory.
    Memory {
        /// The piece.
        memory: &'a DeviceMemory,
        /// The first byte, a multiple of [`Compute::alignment`].
        offset: u64,
        /// Bytes.
        length: u64,
    },
    /// Part of a reservation, all of it mapped. Kernels that look pages up are shown its entries. Can be copied where it is in
    /// one piece.
    Mapped {
        /// The first byte, a multiple of four. Kernels are shown some before it: see [`Compute::shown_before`].
        address: Address,
        /// Bytes.
        length: u64,
        /// What the kernel does with it.
        access: Access,
    },
    /// Part of a reservation, of which the kernel touches some, which is mapped. As [`Bound::Mapped`] beside that, so
    /// that a pass may be the same as one before although other rows are touched.
    Reserved {
        /// The first byte, a multiple of four.
        address: Address,
        /// Bytes.
        length: u64,
        /// Bytes before those that are touched.
        untouched: u64,
        /// Bytes that are touched.
        touched: u64,
        /// What the kernel does with them.
        access: Access,
    },
    /// Nothing: the kernel does not use it.
    Unused,
}

/// A compiled kernel. Dropping it waits until nothing that was submitted uses it any more.
pub struct ComputeKernel {
    shared: Arc<Shared>,
    layout: Arc<Layout>,
    pipeline: PipelineName,
    /// What it is called where kernels are timed.
    name: &'static str,
}

/// Which pipeline it is: the handle, and a number that no other one has had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PipelineName {
    handle: vk::Pipeline,
    number: u64,
}

impl PipelineName {
    fn new(handle: vk::Pipeline) -> Self {
        static MADE: AtomicU64 = AtomicU64::new(0);
        Self {
            handle,
            number: MADE.fetch_add(1, Ordering::Relaxed),
        }
    }
}

impl ComputeKernel {
    /// The same, called `name` in [`KernelTime`].
    #[must_use]
    pub fn named(mut self, name: &'static str) -> Self {
        self.name = name;
        self
    }
}

impl fmt::Debug for ComputeKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ComputeKernel")
            .field(&self.pipeline)
            .finish()
    }
}

impl Drop for ComputeKernel {
    fn drop(&mut self) {
        self.shared.finish_submitted();
        // SAFETY: V1 and V3: what was submitted is done, and no recording can name it any more (C3).
        unsafe {
            let device = &self.layout.driver.device;
            device.destroy_pipeline(self.pipeline.handle, None);
        }
    }
}

/// Records and submits passes, one at a time.
#[derive(Debug)]
pub struct Compute {
    shared: Arc<Shared>,
    objects: Objects,
    kernels: Option<KernelCache>,
}

/// What the one pass that may be in flight takes.
struct Objects {
    driver: Arc<Driver>,
    layout: Arc<Layout>,
    pool: vk::CommandPool,
    classes: Vec<Class>,
    /// Passes that were begun.
    begun: u64,
    descriptors: Vec<vk::DescriptorPool>,
    /// Sets that no part has.
    sets: Vec<Set>,
    counters: ComputeCounters,
    /// Where kernels look pages up.
    heaps: Option<HeapSet>,
    input: Staging,
    output: Staging,
    busy: Fence,
    /// Where passes are timed.
    times: Option<Times>,
}

/// What passes have come to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ComputeCounters {
    /// Passes that were submitted whole.
    pub passes: u64,
    /// Submissions of them.
    pub submissions: u64,
    /// Dispatches that were recorded for them. Those of passes that were as ones before are not.
    pub recorded_dispatches: u64,
}

/// Passes that are alike, as far as the caller knows.
struct Class {
    key: u64,
    /// The pass that used it last.
    used: u64,
    parts: [Part; PARTS],
}

/// Commands that are submitted together.
struct Part {
    commands: vk::CommandBuffer,
    sets: Vec<Set>,
    /// What was asked for.
    calls: Vec<Call>,
    /// Whether `commands` do all of that, and can be submitted.
    is_recorded: bool,
}

/// What is asked for in a pass.
#[derive(Clone, Copy, Debug, PartialEq)]
#[expect(
    clippy::large_enum_variant,
    reason = "most are dispatches, and none is allocated by itself"
)]
enum Call {
    Dispatch {
        kernel: (PipelineName, &'static str),
        windows: Shown,
        constants: ([u32; CONSTANT_BYTES / 4], usize),
        groups: [u32; 3],
    },
    Copy {
        from: Window,
        to: Window,
    },
    /// Before, and after it.
    Barrier {
        stages: [vk::PipelineStageFlags; 2],
        accesses: [vk::AccessFlags; 2],
    },
}

/// A descriptor set, and what it was last written with.
struct Set {
    handle: vk::DescriptorSet,
    shown: Shown,
}

/// What each binding of a set shows, if anything.
type Shown = [Option<Window>; WINDOWS];

impl Set {
    /// Whether a kernel that uses `wanted` finds it all. What a kernel does not use may be anything.
    fn shows(&self, wanted: &Shown) -> bool {
        let mut pairs = self.shown.iter().zip(wanted);
        pairs.all(|(shown, wanted)| wanted.is_none() || wanted == shown)
    }

    /// Has it show `wanted`, in one call, or none where it does. Where nothing is wanted and it shows something else, it shows
    /// some of that too: what it showed may be gone before its commands are submitted again.
    fn show(&mut self, driver: &Driver, wanted: &Shown) {
        let any = wanted.iter().flatten().next().copied();
        let wanted: Shown = std::array::from_fn(|binding| {
            let stale = self.shown[binding].filter(|shown| !wanted.contains(&Some(*shown)));
            wanted[binding].or(stale.and(any))
        });
        let mut buffers = [[vk::DescriptorBufferInfo::default()]; WINDOWS];
        for (buffer, window) in buffers.iter_mut().zip(&wanted) {
            if let Some(window) = window {
                buffer[0] = vk::DescriptorBufferInfo::default()
                    .buffer(window.buffer.handle)
                    .offset(window.offset)
                    .range(window.length);
            }
        }
        let mut writes = [vk::WriteDescriptorSet::default(); WINDOWS];
        let mut count = 0;
        for (binding, window) in wanted.iter().enumerate() {
            if window.is_some() && *window != self.shown[binding] {
                self.shown[binding] = *window;
                writes[count] = vk::WriteDescriptorSet::default()
                    .dst_set(self.handle)
                    .dst_binding(binding as u32)
                    .descriptor_type(vk::DescriptorType::STORAGE_BUFFER)
                    .buffer_info(&buffers[binding]);
                count += 1;
            }
        }
        if count > 0 {
            // SAFETY: C2 for the set; C3 and V4 for the windows; V5.
            unsafe {
                driver.device.update_descriptor_sets(&writes[..count], &[]);
            }
        }
    }
}

impl fmt::Debug for Objects {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Objects")
            .field("sets", &self.sets.len())
            .field("busy", &self.busy)
            .finish_non_exhaustive()
    }
}

impl Drop for Objects {
    fn drop(&mut self) {
        let _ = self.driver.block(self.busy);
        // SAFETY: V1 and V3: its last submission is done, or the device is lost.
        unsafe {
            let device = &self.driver.device;
            for &pool in &self.descriptors {
                device.destroy_descriptor_pool(pool, None);
            }
            device.destroy_command_pool(self.pool, None);
        }
    }
}

impl VulkanQueue {
    /// What passes are recorded and submitted with. The host gives a pass at most `input` bytes and
    /// gets at most `output` bytes back.
    ///
    /// # Errors
    /// What the driver refuses.
    pub fn compute(&self, input: usize, output: usize) -> Result<Compute, DeviceError> {
        let driver = &self.shared.driver;
        let layout = Arc::new(Layout::new(driver)?);
        let heaps = match driver.pages {
            PageTable::Lookup => Some(HeapSet::new(driver, layout.heaps)?),
            PageTable::Unused | PageTable::Device => None,
        };
        let (input, output) = (
            Staging::new(driver, input.max(4))?,
            Staging::new(driver, output.max(4))?,
        );
        let info = vk::CommandPoolCreateInfo::default()
            .flags(vk::CommandPoolCreateFlags::RESET_COMMAND_BUFFER)
            .queue_family_index(driver.compute_family);
        // SAFETY: V1 and V5.
        let pool = unsafe { driver.device.create_command_pool(&info, None) }
            .map_err(|result| driver.failure("vkCreateCommandPool", result, 0))?;
        Ok(Compute {
            shared: Arc::clone(&self.shared),
            objects: Objects {
                driver: Arc::clone(driver),
                layout,
                heaps,
                pool,
                classes: Vec::new(),
                begun: 0,
                descriptors: Vec::new(),
                sets: Vec::new(),
                counters: ComputeCounters::default(),
                input,
                output,
                busy: Fence::DONE,
                times: None,
            },
            kernels: None,
        })
    }
}

impl Compute {
    /// What offsets of [`Bound::Memory`] are multiples of, in bytes.
    pub fn alignment(&self) -> u64 {
        self.objects.driver.limits.window_alignment
    }

    /// Whether kernels look pages up: what they are shown of [`Bound::Mapped`] is words of a table then, one for each 64 KiB from
    /// the first byte shown on. Such a word has the number of a heap in its upper half, and of a page of it in its lower half.
    /// The heaps are an array of buffers in binding 0 of set 1.
    pub fn looks_pages_up(&self) -> bool {
        self.objects.heaps.is_some()
    }

    /// Bytes of a reservation that a kernel is shown before those of a [`Bound::Mapped`] that begins at its byte `offset`, less
    /// than 2^23. They need not be mapped where pages are looked up.
    pub fn shown_before(&self, offset: u64) -> u64 {
        offset % self.shown_alignment()
    }

    /// What the offset of the first byte that a kernel is shown of a reservation is a multiple of.
    pub fn shown_alignment(&self) -> u64 {
        shown_alignment(&self.objects.driver)
    }

    /// The most bytes that a kernel sees of a buffer at once.
    pub fn largest_window(&self) -> u64 {
        self.objects.driver.limits.window
    }

    /// Whether kernels may add up products of packed bytes by one instruction (`SPV_KHR_integer_dot_product`), and
    /// whether the device is faster for it.
    pub fn integer_dot(&self) -> (bool, bool) {
        let limits = &self.objects.driver.limits;
        (limits.integer_dot, limits.fast_integer_dot)
    }

    /// The queue that passes are submitted on.
    pub fn queue(&self) -> VulkanQueue {
        VulkanQueue {
            shared: Arc::clone(&self.shared),
        }
    }

    /// From now on looks kernels up in `cache` before they are compiled, and puts them there.
    ///
    /// # Errors
    /// [`DeviceError::Invalid`] for one of another device.
    pub fn keep_kernels_in(&mut self, cache: KernelCache) -> Result<(), DeviceError> {
        if !cache.is_of(&self.objects.driver) {
            return Err(invalid("keep kernels in a cache of another device"));
        }
        self.kernels = Some(cache);
        Ok(())
    }

    /// Where kernels are kept, if they are.
    pub fn kernel_cache(&self) -> Option<&KernelCache> {
        self.kernels.as_ref()
    }

    /// Compiles a kernel for the device, unless it is kept: some milliseconds.
    ///
    /// # Errors
    /// What the driver refuses.
    ///
    /// # Safety
    /// C1: `code` is valid SPIR-V for Vulkan 1.2, with products of packed bytes where [`Compute::integer_dot`] says that there
    /// are any, with a compute entry point `entry` that uses no more than
    /// [`WINDOWS`] storage buffers of set 0, from binding 0 on, of set 1 no more than the heaps where
    /// [`Compute::looks_pages_up`], and `CONSTANT_BYTES` bytes of push constants. There it also takes what it is shown of
    /// reservations for entries.
    pub unsafe fn kernel(&self, code: &[u8], entry: &CStr) -> Result<ComputeKernel, DeviceError> {
        let driver = &self.objects.driver;
        let words: Vec<u32> = code
            .as_chunks::<4>()
            .0
            .iter()
            .map(|&word| u32::from_le_bytes(word))
            .collect();
        let info = vk::ShaderModuleCreateInfo::default().code(&words);
        // SAFETY: V1, V5 and C1.
        let module = unsafe { driver.device.create_shader_module(&info, None) }
            .map_err(|result| driver.failure("vkCreateShaderModule", result, 0))?;
        let stage = vk::PipelineShaderStageCreateInfo::default()
            .stage(vk::ShaderStageFlags::COMPUTE)
            .module(module)
            .name(entry);
        let info = vk::ComputePipelineCreateInfo::default()
            .stage(stage)
            .layout(self.objects.layout.pipeline);
        let cache = self.kernels.as_ref().map(KernelCache::handle);
        let cache = cache.unwrap_or_default();
        // SAFETY: V1, V5 and C1; the module is not needed once the pipeline is made.
        let made = unsafe {
            let made = driver.device.create_compute_pipelines(cache, &[info], None);
            driver.device.destroy_shader_module(module, None);
            made
        };
        let pipelines =
            made.map_err(|(_, result)| driver.failure("vkCreateComputePipelines", result, 0))?;
        Ok(ComputeKernel {
            shared: Arc::clone(&self.shared),
            layout: Arc::clone(&self.objects.layout),
            pipeline: PipelineName::new(pipelines[0]),
            name: "kernel",
        })
    }

    /// Has the device's clock read behind each dispatch of the passes to come, or no longer. Passes take a little longer
    /// then.
    ///
    /// # Errors
    /// [`DeviceError::Invalid`] for a device without a clock, and what the driver refuses.
    pub fn time_kernels(&mut self, timed: bool) -> Result<(), DeviceError> {
        let objects = &mut self.objects;
        objects.driver.block(objects.busy)?;
        objects.times = match timed {
            true => Some(Times::new(&objects.driver)?),
            false => None,
        };
        // What reads a clock that is gone is not submitted again.
        objects.forget();
        Ok(())
    }

    /// What passes have come to so far.
    pub fn counters(&self) -> ComputeCounters {
        self.objects.counters
    }

    /// What the kernels of the last pass took, the longest first; nothing if it was not timed. Waits for it.
    ///
    /// # Errors
    /// [`DeviceError::Lost`], and what the driver refuses.
    pub fn kernel_times(&self) -> Result<Vec<KernelTime>, DeviceError> {
        let objects = &self.objects;
        objects.driver.block(objects.busy)?;
        objects.times.as_ref().map_or(Ok(Vec::new()), Times::read)
    }

    /// Begins a pass, to which the host gives `input`. Waits for the last one. The device is locked from now until the
    /// recording is submitted or dropped.
    ///
    /// Passes of a `class` are those that are likely to be alike, such as those of batches of one size: of each of a few classes
    /// the commands of the last pass are kept. Any number will do.
    ///
    /// # Errors
    /// [`DeviceError::Invalid`] for more input than there is room for, or what the driver refuses.
    pub fn begin<'a>(&'a mut self, input: &[u8], class: u64) -> Result<Recording<'a>, DeviceError> {
        let objects = &mut self.objects;
        if input.len() > objects.input.length() {
            return Err(invalid("give a pass more bytes than it has room for"));
        }
        objects.driver.block(objects.busy)?;
        objects.input.fill(input);
        let state = self.shared.lock();
        if let Some(heaps) = &mut objects.heaps
            && heaps.show(&state)
        {
            objects.forget();
        }
        let class = objects.class(class)?;
        let mut recording = Recording {
            state,
            objects,
            class,
            part: 0,
            matched: Some(0),
            queued: 0,
            used: 0,
            shown: None,
            bound: None,
            copied: false,
            seen_by_copies: true,
        };
        recording.begin_part()?;
        Ok(recording)
    }

    /// Waits for the last pass and copies what it left for the host, from the first byte on.
    ///
    /// # Errors
    /// [`DeviceError::Lost`], and [`DeviceError::Invalid`] for more bytes than there is room for.
    pub fn output(&self, bytes: &mut [u8]) -> Result<(), DeviceError> {
        let objects = &self.objects;
        if bytes.len() > objects.output.length() {
            return Err(invalid("get more bytes back than a pass has room for"));
        }
        objects.driver.block(objects.busy)?;
        objects.output.read(bytes);
        Ok(())
    }
}

impl Objects {
    /// All passes to come are recorded.
    fn forget(&mut self) {
        for part in self.classes.iter_mut().flat_map(|class| &mut class.parts) {
            part.is_recorded = false;
            part.calls.clear();
        }
    }

    /// The class of this key: one that there is, or a new one, or that which was not used for longest.
    fn class(&mut self, key: u64) -> Result<usize, DeviceError> {
        self.begun += 1;
        let known = self.classes.iter().position(|class| class.key == key);
        let index = match known {
            Some(index) => index,
            None if self.classes.len() < CLASSES => {
                let parts = self.make_parts()?;
                self.classes.push(Class {
                    key,
                    used: 0,
                    parts,
                });
                self.classes.len() - 1
            }
            None => {
                let classes = self.classes.iter().enumerate();
                let oldest = classes.min_by_key(|(_, class)| class.used);
                oldest.map_or(0, |(index, _)| index)
            }
        };
        let class = &mut self.classes[index];
        // Its commands stay: they are compared with what is asked for.
        (class.key, class.used) = (key, self.begun);
        Ok(index)
    }

    fn make_parts(&self) -> Result<[Part; PARTS], DeviceError> {
        let info = vk::CommandBufferAllocateInfo::default()
            .command_pool(self.pool)
            .level(vk::CommandBufferLevel::PRIMARY)
            .command_buffer_count(PARTS as u32);
        // SAFETY: V1 and V5.
        let commands = unsafe { self.driver.device.allocate_command_buffers(&info) }
            .map_err(|result| self.driver.failure("vkAllocateCommandBuffers", result, 0))?;
        Ok(std::array::from_fn(|part| Part {
            commands: commands[part],
            sets: Vec::new(),
            calls: Vec::new(),
            is_recorded: false,
        }))
    }

    /// Begins the commands of a part anew.
    fn begin_part(&mut self, commands: vk::CommandBuffer) -> Result<(), DeviceError> {
        let info = vk::CommandBufferBeginInfo::default();
        // SAFETY: C2, V2 and V5.
        unsafe {
            let (device, none) = (&self.driver.device, vk::CommandBufferResetFlags::empty());
            device
                .reset_command_buffer(commands, none)
                .and_then(|()| device.begin_command_buffer(commands, &info))
        }
        .map_err(|result| self.driver.failure("vkBeginCommandBuffer", result, 0))?;
        if let Some(heaps) = &self.heaps {
            let (compute, layout) = (vk::PipelineBindPoint::COMPUTE, self.layout.pipeline);
            let (device, sets) = (&self.driver.device, [heaps.handle]);
            // SAFETY: C2 for commands, H1 and H2 of the heap set for what is bound; V5.
            unsafe {
                device.cmd_bind_descriptor_sets(commands, compute, layout, 1, &sets, &[]);
            }
        }
        Ok(())
    }

    /// A descriptor set, made with others when there is none left.
    fn take_set(&mut self) -> Result<Set, DeviceError> {
        if self.sets.is_empty() {
            self.make_sets()?;
        }
        let set = self.sets.pop();
        set.ok_or(invalid("use a descriptor set that was not made"))
    }

    fn make_sets(&mut self) -> Result<(), DeviceError> {
        let driver = &self.driver;
        let sizes = [vk::DescriptorPoolSize::default()
            .ty(vk::DescriptorType::STORAGE_BUFFER)
            .descriptor_count(SETS * WINDOWS as u32)];
        let info = vk::DescriptorPoolCreateInfo::default()
            .max_sets(SETS)
            .pool_sizes(&sizes);
        // SAFETY: V1 and V5.
        let pool = unsafe { driver.device.create_descriptor_pool(&info, None) }
            .map_err(|result| driver.failure("vkCreateDescriptorPool", result, 0))?;
        self.descriptors.push(pool);
        let layouts = [self.layout.set; SETS as usize];
        let info = vk::DescriptorSetAllocateInfo::default()
            .descriptor_pool(pool)
            .set_layouts(&layouts);
        // SAFETY: V1 and V5.
        let sets = unsafe { driver.device.allocate_descriptor_sets(&info) }
            .map_err(|result| driver.failure("vkAllocateDescriptorSets", result, 0))?;
        self.sets.extend(sets.into_iter().map(|handle| Set {
            handle,
            shown: [None; WINDOWS],
        }));
        Ok(())
    }
}

/// A pass being recorded. What is recorded takes effect in order only across a
/// [`barrier`](Recording::barrier).
pub struct Recording<'a> {
    state: MutexGuard<'a, State>,
    objects: &'a mut Objects,
    class: usize,
    /// The part under way.
    part: usize,
    /// How many of its calls have been those of the pass before, while all have: nothing is recorded then.
    matched: Option<usize>,
    /// Parts that are queued: those behind them are with the next that is recorded, or with the last.
    queued: usize,
    /// Descriptor sets that the part has used.
    used: usize,
    /// The one that is bound.
    shown: Option<usize>,
    /// The kernel that runs next, unless another is bound.
    bound: Option<PipelineName>,
    /// Whether there were copies since the last barrier.
    copied: bool,
    /// Whether copies see what was recorded before the last barrier, too.
    seen_by_copies: bool,
}

impl fmt::Debug for Recording<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Recording").field(&self.matched).finish()
    }
}

impl<'a> Recording<'a> {
    /// Runs a kernel on `windows` with `constants`, in so many workgroups each way; none where one of these is 0.
    ///
    /// # Errors
    /// [`DeviceError::Invalid`] for more groups, constants or bytes than a device takes, an offset that
    /// is not aligned, or mapped memory that is not mapped; what the driver refuses.
    pub fn dispatch(
        &mut self,
        kernel: &'a ComputeKernel,
        windows: [Bound<'a>; WINDOWS],
        constants: &[u32],
        groups: [u32; 3],
    ) -> Result<(), DeviceError> {
        if groups.contains(&0) {
            return Ok(());
        }
        if groups.iter().any(|&count| count > MOST_GROUPS) {
            return Err(invalid("a dispatch of more than 65,535 workgroups one way"));
        }
        if size_of_val(constants) > CONSTANT_BYTES {
            return Err(invalid("a dispatch with more than 128 bytes of constants"));
        }
        let same_device = Arc::ptr_eq(&kernel.layout, &self.objects.layout);
        if !same_device {
            return Err(invalid("a kernel that was compiled for other passes"));
        }
        let mut wanted = [None; WINDOWS];
        for (wanted, window) in wanted.iter_mut().zip(windows) {
            *wanted = self.resolve(window, true)?;
        }
        let mut words = [0; CONSTANT_BYTES / 4];
        words[..constants.len()].copy_from_slice(constants);
        self.call(Call::Dispatch {
            kernel: (kernel.pipeline, kernel.name),
            windows: wanted,
            constants: (words, constants.len()),
            groups,
        })
    }

    /// The part under way.
    fn part(&mut self) -> &mut Part {
        &mut self.objects.classes[self.class].parts[self.part]
    }

    /// Begins a part, in which nothing is bound yet.
    fn begin_part(&mut self) -> Result<(), DeviceError> {
        self.matched = Some(0);
        match self.objects.times.is_some() {
            // What reads the device's clock is recorded each time.
            true => self.record_from(0),
            false => Ok(()),
        }
    }

    /// Asks for something: what the pass before has asked for here, or else it is recorded.
    fn call(&mut self, call: Call) -> Result<(), DeviceError> {
        if let Some(matched) = self.matched {
            let part = self.part();
            if part.is_recorded && part.calls.get(matched) == Some(&call) {
                self.matched = Some(matched + 1);
                return Ok(());
            }
            self.record_from(matched)?;
        }
        self.part().calls.push(call);
        self.record(&call)
    }

    /// Records the first `matched` calls of the part anew, and from now on what is asked for.
    fn record_from(&mut self, matched: usize) -> Result<(), DeviceError> {
        let part = self.part();
        part.is_recorded = false;
        part.calls.truncate(matched);
        let commands = part.commands;
        self.matched = None;
        (self.used, self.shown, self.bound) = (0, None, None);
        self.objects.begin_part(commands)?;
        if let (Some(times), 0) = (&mut self.objects.times, self.part) {
            times.begin(commands);
        }
        for call in 0..matched {
            let call = self.part().calls[call];
            self.record(&call)?;
        }
        Ok(())
    }

    fn record(&mut self, call: &Call) -> Result<(), DeviceError> {
        let commands = self.part().commands;
        let driver = Arc::clone(&self.objects.driver);
        match *call {
            Call::Dispatch {
                kernel: (kernel, name),
                ref windows,
                constants: (ref words, count),
                groups,
            } => {
                self.show(windows)?;
                self.bind(kernel);
                let bytes = words.map(u32::to_ne_bytes);
                let bytes = &bytes.as_flattened()[..4 * count];
                let layout = self.objects.layout.pipeline;
                let stage = vk::ShaderStageFlags::COMPUTE;
                // SAFETY: C1 for what the kernel touches, which `show` and `bind` have just bound; C2 for commands; V4, V5.
                unsafe {
                    let device = &driver.device;
                    if count > 0 {
                        device.cmd_push_constants(commands, layout, stage, 0, bytes);
                    }
                    device.cmd_dispatch(commands, groups[0], groups[1], groups[2]);
                }
                self.objects.counters.recorded_dispatches += 1;
                if let Some(times) = &mut self.objects.times {
                    times.note(commands, (name, groups));
                }
            }
            Call::Copy { from, to } => {
                let regions = [vk::BufferCopy::default()
                    .src_offset(from.offset)
                    .dst_offset(to.offset)
                    .size(from.length)];
                let (from, to) = (from.buffer.handle, to.buffer.handle);
                // SAFETY: C2 and C3, V4 and V5.
                unsafe { driver.device.cmd_copy_buffer(commands, from, to, &regions) };
            }
            Call::Barrier {
                stages: [first, then],
                accesses: [before, after],
            } => {
                let barriers = [vk::MemoryBarrier::default()
                    .src_access_mask(before)
                    .dst_access_mask(after)];
                let none = vk::DependencyFlags::empty();
                // SAFETY: V2 and V5.
                unsafe {
                    let device = &driver.device;
                    device.cmd_pipeline_barrier(commands, first, then, none, &barriers, &[], &[]);
                }
            }
        }
        Ok(())
    }

    /// Binds a set that shows `wanted`: the last one, if it does.
    fn show(&mut self, wanted: &Shown) -> Result<(), DeviceError> {
        let (shown, used) = (self.shown, self.used);
        if shown.is_some_and(|shown| self.part().sets[shown].shows(wanted)) {
            return Ok(());
        }
        if used == self.part().sets.len() {
            let set = self.objects.take_set()?;
            self.part().sets.push(set);
        }
        let driver = Arc::clone(&self.objects.driver);
        let part = self.part();
        let set = &mut part.sets[used];
        set.show(&driver, wanted);
        let (sets, commands) = ([set.handle], part.commands);
        self.shown = Some(used);
        self.used += 1;
        let (compute, layout) = (vk::PipelineBindPoint::COMPUTE, self.objects.layout.pipeline);
        // SAFETY: C2 for commands and set; C3 for what it shows, and what it showed before is not used; V5.
        unsafe {
            let device = &driver.device;
            device.cmd_bind_descriptor_sets(commands, compute, layout, 0, &sets, &[]);
        }
        Ok(())
    }

    /// Binds a kernel, unless it is.
    fn bind(&mut self, kernel: PipelineName) {
        if self.bound != Some(kernel) {
            self.bound = Some(kernel);
            let (compute, commands) = (vk::PipelineBindPoint::COMPUTE, self.part().commands);
            // SAFETY: C2 for commands; C3 for the kernel.
            unsafe {
                let device = &self.objects.driver.device;
                device.cmd_bind_pipeline(commands, compute, kernel.handle);
            }
        }
    }

    /// Copies what the host gave, from its byte `from` on, to `to`.
    ///
    /// # Errors
    /// [`DeviceError::Invalid`] for bytes that there are not.
    pub fn take_input(&mut self, from: u64, to: Bound<'a>) -> Result<(), DeviceError> {
        let to = self.resolve(to, false)?.ok_or(invalid("copy to nothing"))?;
        let staging = &self.objects.input;
        let from = staged(staging, from, to.length)?;
        self.copy_window(from, to)
    }

    /// Copies `from` to where the host reads it, from its byte `to` on.
    ///
    /// # Errors
    /// [`DeviceError::Invalid`] for bytes that there are not.
    pub fn leave_output(&mut self, from: Bound<'a>, to: u64) -> Result<(), DeviceError> {
        let from = self
            .resolve(from, false)?
            .ok_or(invalid("copy from nothing"))?;
        let staging = &self.objects.output;
        let to = staged(staging, to, from.length)?;
        self.copy_window(from, to)
    }

    /// Copies `from` to `to`, of as many bytes and apart from it.
    ///
    /// # Errors
    /// [`DeviceError::Invalid`] for bytes that there are not, or of which there are not as many.
    pub fn copy(&mut self, from: Bound<'a>, to: Bound<'a>) -> Result<(), DeviceError> {
        match (self.resolve(from, false)?, self.resolve(to, false)?) {
            (Some(from), Some(to)) if from.length == to.length => {
                let overlap = from.buffer == to.buffer
                    && from.offset < to.offset + to.length
                    && to.offset < from.offset + from.length;
                if overlap {
                    return Err(invalid("copy bytes to where they are"));
                }
                self.copy_window(from, to)
            }
            _ => Err(invalid("copy to a place of another length")),
        }
    }

    fn copy_window(&mut self, from: Window, to: Window) -> Result<(), DeviceError> {
        if !self.seen_by_copies {
            self.barrier_of_all()?;
        }
        self.copied = true;
        self.call(Call::Copy { from, to })
    }

    /// What was recorded before is done, and seen, before what is recorded after begins: over all memory,
    /// since pages may be mapped in several buffers at once.
    ///
    /// # Errors
    /// What the driver refuses.
    pub fn barrier(&mut self) -> Result<(), DeviceError> {
        if self.copied {
            return self.barrier_of_all();
        }
        self.seen_by_copies = false;
        let all = vk::AccessFlags::SHADER_READ | vk::AccessFlags::SHADER_WRITE;
        self.call(Call::Barrier {
            stages: [vk::PipelineStageFlags::COMPUTE_SHADER; 2],
            accesses: [vk::AccessFlags::SHADER_WRITE, all],
        })
    }

    /// The same, of copies too: a driver may take some microseconds longer to see to these.
    fn barrier_of_all(&mut self) -> Result<(), DeviceError> {
        (self.copied, self.seen_by_copies) = (false, true);
        let all = vk::AccessFlags::MEMORY_READ | vk::AccessFlags::MEMORY_WRITE;
        let stages = vk::PipelineStageFlags::COMPUTE_SHADER | vk::PipelineStageFlags::TRANSFER;
        self.call(Call::Barrier {
            stages: [stages; 2],
            accesses: [vk::AccessFlags::MEMORY_WRITE, all],
        })
    }

    /// Ends a part: what follows takes effect after it. Where it was recorded it is queued, so that the device begins with it; one
    /// that is as the pass before had it waits for the next. Does nothing where a pass has as many parts as it may.
    ///
    /// # Errors
    /// What the driver refuses.
    pub fn submit_part(&mut self) -> Result<(), DeviceError> {
        let next = self.part + 1;
        if next == PARTS {
            return Ok(());
        }
        if self.end_part()? {
            self.queue()?;
        }
        // The next commands see everything.
        (self.copied, self.seen_by_copies) = (false, true);
        self.part = next;
        self.begin_part()
    }

    /// Ends the commands of the part. Returns whether they were recorded.
    fn end_part(&mut self) -> Result<bool, DeviceError> {
        if let Some(matched) = self.matched {
            let part = self.part();
            if part.is_recorded && matched == part.calls.len() {
                return Ok(false);
            }
            self.record_from(matched)?;
        }
        let driver = Arc::clone(&self.objects.driver);
        let part = self.part();
        // SAFETY: V2 and V5.
        unsafe { driver.device.end_command_buffer(part.commands) }
            .map_err(|result| driver.failure("vkEndCommandBuffer", result, 0))?;
        part.is_recorded = true;
        Ok(true)
    }

    /// Queues the parts up to this one that are not.
    fn queue(&mut self) -> Result<(), DeviceError> {
        let parts = &self.objects.classes[self.class].parts;
        let commands = parts.each_ref().map(|part| part.commands);
        self.objects.busy = (self.state.queue).submit(&commands[self.queued..=self.part])?;
        self.objects.counters.submissions += 1;
        self.queued = self.part + 1;
        Ok(())
    }

    /// Ends the pass and queues it, or what is left of it, after everything submitted before and before everything submitted
    /// after.
    ///
    /// # Errors
    /// What the driver refuses; what was not queued before is not then.
    pub fn submit(mut self) -> Result<Fence, DeviceError> {
        self.call(Call::Barrier {
            stages: [
                vk::PipelineStageFlags::ALL_COMMANDS,
                vk::PipelineStageFlags::HOST,
            ],
            accesses: [vk::AccessFlags::MEMORY_WRITE, vk::AccessFlags::HOST_READ],
        })?;
        self.end_part()?;
        self.queue()?;
        self.objects.counters.passes += 1;
        if let Some(times) = &mut self.objects.times {
            times.submitted();
        }
        Ok(self.objects.busy)
    }

    /// The part of a buffer that is meant, if it may be used so now.
    fn resolve(&self, bound: Bound<'a>, by_kernel: bool) -> Result<Option<Window>, DeviceError> {
        let window = match bound {
            Bound::Unused => return Ok(None),
            Bound::Memory {
                memory,
                offset,
                length,
            } => {
                if !Arc::ptr_eq(&memory.shared.driver, &self.objects.driver) {
                    return Err(invalid("use memory of another device"));
                }
                memory.window(offset, length)?
            }
            Bound::Reserved {
                address,
                length,
                untouched,
                touched,
                access,
            } if by_kernel => {
                let whole = (address, length);
                self.state
                    .shown_reserved(whole, (untouched, touched), access)?
            }
            Bound::Reserved { .. } => return Err(invalid("copy what is not all mapped")),
            Bound::Mapped {
                address,
                length,
                access,
            } => {
                let length = ByteLength::new(length);
                match by_kernel {
                    true => self.state.shown(address, length, access)?,
                    false => match self.state.windows(address, length, access)?[..] {
                        [window] => window,
                        _ => return Err(invalid("copy what is in several pieces in a pass")),
                    },
                }
            }
        };
        let limits = &self.objects.driver.limits;
        let fits =
            window.offset.is_multiple_of(limits.window_alignment) && window.length <= limits.window;
        match fits || !by_kernel {
            true => Ok(Some(window)),
            false => Err(invalid(
                "show a kernel more of a buffer than it can see, or from an offset that is not aligned",
            )),
        }
    }
}

/// Part of what the host sees.
fn staged(staging: &Staging, offset: u64, length: u64) -> Result<Window, DeviceError> {
    let end = offset.checked_add(length);
    match end.is_some_and(|end| end <= staging.length() as u64) {
        true => Ok(Window {
            buffer: staging.name(),
            offset,
            length,
        }),
        false => Err(invalid("copy more bytes than the host has room for")),
    }
}
