#![expect(unsafe_code, reason = "Vulkan is a foreign interface")]

//! What all kernels of passes are called with.
//!
//! # Safety
//!
//! V1 to V5 of [`driver`](super::driver).

use std::sync::Arc;

use ash::vk;

use super::compute::{CONSTANT_BYTES, WINDOWS};
use super::driver::Driver;
use super::heap_set;
use super::open::PageTable;
use crate::device::DeviceError;

/// The layouts that all kernels have in common.
pub(super) struct Layout {
    pub(super) driver: Arc<Driver>,
    /// Of what a kernel is shown in a dispatch.
    pub(super) set: vk::DescriptorSetLayout,
    /// Of the heaps, where kernels look pages up; null else.
    pub(super) heaps: vk::DescriptorSetLayout,
    pub(super) pipeline: vk::PipelineLayout,
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: V1 and V3: kernels and sets made with it are gone. Null handles are ignored.
        unsafe {
            let device = &self.driver.device;
            device.destroy_pipeline_layout(self.pipeline, None);
            device.destroy_descriptor_set_layout(self.heaps, None);
            device.destroy_descriptor_set_layout(self.set, None);
        }
    }
}

impl Layout {
    pub(super) fn new(driver: &Arc<Driver>) -> Result<Self, DeviceError> {
        let mut layout = Self {
            driver: Arc::clone(driver),
            set: vk::DescriptorSetLayout::null(),
            heaps: vk::DescriptorSetLayout::null(),
            pipeline: vk::PipelineLayout::null(),
        };
        let bindings: [_; WINDOWS] = std::array::from_fn(|index| {
            vk::DescriptorSetLayoutBinding::default()
                .binding(index as u32)
                .descriptor_type(vk::DescriptorType::STORAGE_BUFFER)
                .descriptor_count(1)
                .stage_flags(vk::ShaderStageFlags::COMPUTE)
        });
        let info = vk::DescriptorSetLayoutCreateInfo::default().bindings(&bindings);
        // SAFETY: V1 and V5.
        layout.set = unsafe { driver.device.create_descriptor_set_layout(&info, None) }
            .map_err(|result| driver.failure("vkCreateDescriptorSetLayout", result, 0))?;
        if driver.pages == PageTable::Lookup {
            layout.heaps = heap_set::layout(driver)?;
        }
        let sets = [layout.set, layout.heaps];
        let sets = match driver.pages {
            PageTable::Lookup => &sets[..],
            PageTable::Unused | PageTable::Device => &sets[..1],
        };
        let constants = [vk::PushConstantRange::default()
            .stage_flags(vk::ShaderStageFlags::COMPUTE)
            .size(CONSTANT_BYTES as u32)];
        let info = vk::PipelineLayoutCreateInfo::default()
            .set_layouts(sets)
            .push_constant_ranges(&constants);
        // SAFETY: V1 and V5.
        layout.pipeline = unsafe { driver.device.create_pipeline_layout(&info, None) }
            .map_err(|result| driver.failure("vkCreatePipelineLayout", result, 0))?;
        Ok(layout)
    }
}
