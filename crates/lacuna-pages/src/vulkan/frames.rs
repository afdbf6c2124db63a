#![expect(unsafe_code, reason = "Vulkan is a foreign interface")]

//! Recording commands. A frame is what one submission needs: a command buffer, a descriptor set
//! and host-visible memory; it is used again once the timeline has passed its last use.
//!
//! # Safety
//!
//! V1 to V5 of [`driver`](super::driver), and:
//!
//! * **F1** A frame is handed out only when the point of its last submission is reached, so that
//!   neither its commands, its descriptors nor its staging memory are in use.
//! * **F2** Commands name only buffers that are retired, not dropped, after they were submitted,
//!   and only ranges within them that are bound: the caller checked them under the same lock.

use std::fmt;
use std::sync::Arc;

use ash::vk;

use super::driver::{Driver, Queue};
use super::kernels::{Kernel, Kernels};
use super::objects::{BufferName, Staging};
use super::table::MOST_UPDATED;
use crate::device::{DeviceError, Fence, FenceState};

/// How many frames may be in flight before a new one waits for the oldest.
const FRAMES: usize = 8;

/// A range of a buffer, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Window {
    pub(super) buffer: BufferName,
    pub(super) offset: u64,
    pub(super) length: u64,
}

impl Window {
    /// It in parts, one behind the other, each as long as one of `others`, which are as long as it together.
    pub(super) fn beside(self, others: &[Self]) -> impl Iterator<Item = Self> + use<> {
        let mut offset = self.offset;
        let lengths: Vec<u64> = others.iter().map(|other| other.length).collect();
        lengths.into_iter().map(move |length| {
            let part = Self {
                offset,
                length,
                ..self
            };
            offset += length;
            part
        })
    }
}

/// What one submission needs.
pub(super) struct Frame {
    driver: Arc<Driver>,
    pool: vk::CommandPool,
    commands: vk::CommandBuffer,
    descriptors: Option<(vk::DescriptorPool, vk::DescriptorSet)>,
    staging: Option<Staging>,
    busy: Fence,
}

impl fmt::Debug for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Frame").field(&self.busy).finish()
    }
}

impl Drop for Frame {
    fn drop(&mut self) {
        // SAFETY: V1 and V3: only idle frames are dropped, or all when the device is idle.
        unsafe {
            if let Some((pool, _)) = self.descriptors {
                self.driver.device.destroy_descriptor_pool(pool, None);
            }
            self.driver.device.destroy_command_pool(self.pool, None);
        }
    }
}

impl Frame {
    fn new(driver: &Arc<Driver>) -> Result<Self, DeviceError> {
        let info = vk::CommandPoolCreateInfo::default()
            .flags(vk::CommandPoolCreateFlags::TRANSIENT)
            .queue_family_index(driver.compute_family);
        // SAFETY: V1 and V5.
        let pool = unsafe { driver.device.create_command_pool(&info, None) }
            .map_err(|result| driver.failure("vkCreateCommandPool", result, 0))?;
        let mut frame = Self {
            driver: Arc::clone(driver),
            pool,
            commands: vk::CommandBuffer::null(),
            descriptors: None,
            staging: None,
            busy: Fence::DONE,
        };
        let info = vk::CommandBufferAllocateInfo::default()
            .command_pool(pool)
            .level(vk::CommandBufferLevel::PRIMARY)
            .command_buffer_count(1);
        // SAFETY: V1 and V5.
        let commands = unsafe { driver.device.allocate_command_buffers(&info) }
            .map_err(|result| driver.failure("vkAllocateCommandBuffers", result, 0))?;
        frame.commands = commands[0];
        Ok(frame)
    }

    /// Host-visible memory of at least `length` bytes.
    pub(super) fn staging(&mut self, length: usize) -> Result<&mut Staging, DeviceError> {
        let enough = self
            .staging
            .take()
            .filter(|staging| staging.length() >= length);
        let staging = match enough {
            Some(staging) => staging,
            None => Staging::new(&self.driver, length.next_power_of_two().max(4096))?,
        };
        Ok(self.staging.insert(staging))
    }

    /// Starts recording; what was recorded before is gone.
    pub(super) fn begin(&mut self) -> Result<Recorder<'_>, DeviceError> {
        let info = vk::CommandBufferBeginInfo::default()
            .flags(vk::CommandBufferUsageFlags::ONE_TIME_SUBMIT);
        let device = &self.driver.device;
        // SAFETY: F1, V2 and V5.
        unsafe {
            device
                .reset_command_pool(self.pool, vk::CommandPoolResetFlags::empty())
                .and_then(|()| device.begin_command_buffer(self.commands, &info))
        }
        .map_err(|result| self.driver.failure("vkBeginCommandBuffer", result, 0))?;
        Ok(Recorder { frame: self })
    }

    /// The frame's descriptor set, made at first use.
    fn descriptors(&mut self, kernels: &Kernels) -> Result<vk::DescriptorSet, DeviceError> {
        if let Some((_, set)) = self.descriptors {
            return Ok(set);
        }
        let sizes = [vk::DescriptorPoolSize::default()
            .ty(vk::DescriptorType::STORAGE_BUFFER)
            .descriptor_count(2)];
        let info = vk::DescriptorPoolCreateInfo::default()
            .max_sets(1)
            .pool_sizes(&sizes);
        // SAFETY: V1 and V5.
        let pool = unsafe { self.driver.device.create_descriptor_pool(&info, None) }
            .map_err(|result| self.driver.failure("vkCreateDescriptorPool", result, 0))?;
        let layouts = [kernels.set_layout()];
        let info = vk::DescriptorSetAllocateInfo::default()
            .descriptor_pool(pool)
            .set_layouts(&layouts);
        // SAFETY: V1 and V5.
        match unsafe { self.driver.device.allocate_descriptor_sets(&info) } {
            Ok(sets) => {
                self.descriptors = Some((pool, sets[0]));
                Ok(sets[0])
            }
            Err(result) => {
                // SAFETY: V1: nothing was made from it.
                unsafe { self.driver.device.destroy_descriptor_pool(pool, None) };
                Err(self.driver.failure("vkAllocateDescriptorSets", result, 0))
            }
        }
    }
}

/// A frame being recorded. Its commands take effect in order: each is separated from the next by
/// a barrier over all memory, since pages may be bound in several buffers at once.
pub(super) struct Recorder<'a> {
    frame: &'a mut Frame,
}

impl Recorder<'_> {
    pub(super) fn copy(&mut self, from: Window, to: Window) {
        self.copy_beside(from, to);
        self.barrier();
    }

    /// Copies that touch nothing of each other.
    pub(super) fn copies(&mut self, copies: impl IntoIterator<Item = (Window, Window)>) {
        for (from, to) in copies {
            self.copy_beside(from, to);
        }
        self.barrier();
    }

    fn copy_beside(&mut self, from: Window, to: Window) {
        let regions = [vk::BufferCopy::default()
            .src_offset(from.offset)
            .dst_offset(to.offset)
            .size(from.length)];
        // SAFETY: F2, V4 and V5.
        unsafe {
            self.frame.driver.device.cmd_copy_buffer(
                self.frame.commands,
                from.buffer.handle,
                to.buffer.handle,
                &regions,
            );
        }
    }

    pub(super) fn zero(&mut self, window: Window) {
        self.fill(window, 0);
        self.barrier();
    }

    /// Fills a part of a buffer that nothing else of the submission touches.
    pub(super) fn fill(&mut self, window: Window, word: u32) {
        // SAFETY: F2 and V4; offset and length are multiples of four.
        unsafe {
            self.frame.driver.device.cmd_fill_buffer(
                self.frame.commands,
                window.buffer.handle,
                window.offset,
                window.length,
                word,
            );
        }
    }

    /// Writes `words`, which are as long, to a part of a buffer that nothing else of the submission touches.
    pub(super) fn update(&mut self, window: Window, words: &[u32]) {
        let mut offset = window.offset;
        for words in words.chunks(MOST_UPDATED) {
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
            // SAFETY: F2 and V4; offset and length are multiples of four, and no longer than a command takes; V5.
            unsafe {
                self.frame.driver.device.cmd_update_buffer(
                    self.frame.commands,
                    window.buffer.handle,
                    offset,
                    &bytes,
                );
            }
            offset += bytes.len() as u64;
        }
    }

    /// Runs `groups` workgroups of a kernel on two windows.
    pub(super) fn dispatch(
        &mut self,
        kernels: &Kernels,
        kernel: Kernel,
        windows: [Window; 2],
        parameters: [u32; 4],
        groups: u32,
    ) -> Result<(), DeviceError> {
        let set = self.frame.descriptors(kernels)?;
        let infos = windows.map(|window| {
            [vk::DescriptorBufferInfo::default()
                .buffer(window.buffer.handle)
                .offset(window.offset)
                .range(window.length)]
        });
        let write = |binding: usize| {
            vk::WriteDescriptorSet::default()
                .dst_set(set)
                .dst_binding(binding as u32)
                .descriptor_type(vk::DescriptorType::STORAGE_BUFFER)
                .buffer_info(&infos[binding])
        };
        let (device, commands) = (&self.frame.driver.device, self.frame.commands);
        let layout = kernels.pipeline_layout();
        // SAFETY: F1 for the set; F2 and V4 for the windows; V5. The kernels touch only the words
        // that their parameters name.
        unsafe {
            device.update_descriptor_sets(&[write(0), write(1)], &[]);
            let compute = vk::PipelineBindPoint::COMPUTE;
            device.cmd_bind_pipeline(commands, compute, kernels.pipeline(kernel));
            device.cmd_bind_descriptor_sets(commands, compute, layout, 0, &[set], &[]);
            let bytes = parameters.map(u32::to_ne_bytes).concat();
            let stage = vk::ShaderStageFlags::COMPUTE;
            device.cmd_push_constants(commands, layout, stage, 0, &bytes);
            device.cmd_dispatch(commands, groups, 1, 1);
        }
        self.barrier();
        Ok(())
    }

    fn barrier(&mut self) {
        let after = vk::AccessFlags::MEMORY_READ | vk::AccessFlags::MEMORY_WRITE;
        let barriers = [vk::MemoryBarrier::default()
            .src_access_mask(vk::AccessFlags::MEMORY_WRITE)
            .dst_access_mask(after | vk::AccessFlags::HOST_READ)];
        let stages = vk::PipelineStageFlags::ALL_COMMANDS;
        // SAFETY: V2 and V5.
        unsafe {
            self.frame.driver.device.cmd_pipeline_barrier(
                self.frame.commands,
                stages,
                stages | vk::PipelineStageFlags::HOST,
                vk::DependencyFlags::empty(),
                &barriers,
                &[],
                &[],
            );
        }
    }

    /// Ends recording and queues what was recorded.
    pub(super) fn submit(self, queue: &mut Queue) -> Result<Fence, DeviceError> {
        let frame = self.frame;
        // SAFETY: V2.
        unsafe { frame.driver.device.end_command_buffer(frame.commands) }
            .map_err(|result| frame.driver.failure("vkEndCommandBuffer", result, 0))?;
        frame.busy = queue.submit(&[frame.commands])?;
        Ok(frame.busy)
    }
}

/// The frames of a device that nobody holds.
#[derive(Debug, Default)]
pub(super) struct Frames {
    frames: Vec<Frame>,
}

impl Frames {
    /// An idle frame (F1): one whose work is done, a new one, or the oldest after waiting for it.
    pub(super) fn take(&mut self, driver: &Arc<Driver>) -> Result<Frame, DeviceError> {
        let oldest = (0..self.frames.len()).min_by_key(|&index| self.frames[index].busy);
        let Some(oldest) = oldest else {
            return Frame::new(driver);
        };
        let fence = self.frames[oldest].busy;
        if driver.poll(fence)? == FenceState::Pending {
            if self.frames.len() < FRAMES {
                return Frame::new(driver);
            }
            driver.block(fence)?;
        }
        Ok(self.frames.swap_remove(oldest))
    }

    /// Takes a frame back, in use or not.
    pub(super) fn put(&mut self, frame: Frame) {
        self.frames.push(frame);
    }
}
