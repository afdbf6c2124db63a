#![expect(unsafe_code, reason = "Vulkan is a foreign interface")]

//! The compute kernels: pipelines made from committed SPIR-V. Their sources are in `gpu/kernels`, in WGSL;
//! the test `shaders` compiles them and compares.
//!
//! # Safety
//!
//! V1 and V5 of [`driver`](super::driver), and:
//!
//! * **K1** The SPIR-V is what naga made of the sources, which use two storage buffers and sixteen
//!   bytes of push constants at most: what the layout has.

use std::fmt;
use std::sync::Arc;

use ash::vk;

use super::driver::Driver;
use crate::device::DeviceError;

const WRITE_ROWS: &[u8] = include_bytes!("kernels/write_rows.spv");
pub(super) const CHECKSUM: &[u8] = include_bytes!("kernels/checksum.spv");

/// Which kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kernel {
    /// Rows from a dense source to a strided destination.
    WriteRows,
    /// The checksum of a flat range.
    Checksum,
}

/// Pipelines and their common layout.
pub(super) struct Kernels {
    driver: Arc<Driver>,
    set_layout: vk::DescriptorSetLayout,
    pipeline_layout: vk::PipelineLayout,
    pipelines: Vec<vk::Pipeline>,
}

impl fmt::Debug for Kernels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Kernels").field(&self.pipelines).finish()
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        // SAFETY: V1 and V3: dropped when the device is idle. Null handles are ignored.
        unsafe {
            for &pipeline in &self.pipelines {
                self.driver.device.destroy_pipeline(pipeline, None);
            }
            self.driver
                .device
                .destroy_pipeline_layout(self.pipeline_layout, None);
            self.driver
                .device
                .destroy_descriptor_set_layout(self.set_layout, None);
        }
    }
}

impl Kernels {
    /// Compiles the kernels for the device: tens of milliseconds, once.
    pub(super) fn new(driver: &Arc<Driver>) -> Result<Self, DeviceError> {
        let mut kernels = Self {
            driver: Arc::clone(driver),
            set_layout: vk::DescriptorSetLayout::null(),
            pipeline_layout: vk::PipelineLayout::null(),
            pipelines: Vec::new(),
        };
        kernels.make_layouts()?;
        for (code, entry) in [(WRITE_ROWS, c"write_rows"), (CHECKSUM, c"checksum")] {
            let pipeline = kernels.make_pipeline(code, entry)?;
            kernels.pipelines.push(pipeline);
        }
        Ok(kernels)
    }

    pub(super) fn set_layout(&self) -> vk::DescriptorSetLayout {
        self.set_layout
    }

    pub(super) fn pipeline_layout(&self) -> vk::PipelineLayout {
        self.pipeline_layout
    }

    pub(super) fn pipeline(&self, kernel: Kernel) -> vk::Pipeline {
        self.pipelines[kernel as usize]
    }

    fn make_layouts(&mut self) -> Result<(), DeviceError> {
        let binding = |index| {
            vk::DescriptorSetLayoutBinding::default()
                .binding(index)
                .descriptor_type(vk::DescriptorType::STORAGE_BUFFER)
                .descriptor_count(1)
                .stage_flags(vk::ShaderStageFlags::COMPUTE)
        };
        let bindings = [binding(0), binding(1)];
        let info = vk::DescriptorSetLayoutCreateInfo::default().bindings(&bindings);
        // SAFETY: V1 and V5.
        self.set_layout = unsafe { self.driver.device.create_descriptor_set_layout(&info, None) }
            .map_err(|result| {
            self.driver
                .failure("vkCreateDescriptorSetLayout", result, 0)
        })?;
        let sets = [self.set_layout];
        let constants = [vk::PushConstantRange::default()
            .stage_flags(vk::ShaderStageFlags::COMPUTE)
            .size(16)];
        let info = vk::PipelineLayoutCreateInfo::default()
            .set_layouts(&sets)
            .push_constant_ranges(&constants);
        // SAFETY: V1 and V5.
        self.pipeline_layout = unsafe { self.driver.device.create_pipeline_layout(&info, None) }
            .map_err(|result| self.driver.failure("vkCreatePipelineLayout", result, 0))?;
        Ok(())
    }

    fn make_pipeline(
        &self,
        code: &[u8],
        entry: &std::ffi::CStr,
    ) -> Result<vk::Pipeline, DeviceError> {
        let device = &self.driver.device;
        let words: Vec<u32> = code
            .chunks_exact(4)
            .map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]))
            .collect();
        let info = vk::ShaderModuleCreateInfo::default().code(&words);
        // SAFETY: V1, V5 and K1.
        let module = unsafe { device.create_shader_module(&info, None) }
            .map_err(|result| self.driver.failure("vkCreateShaderModule", result, 0))?;
        let stage = vk::PipelineShaderStageCreateInfo::default()
            .stage(vk::ShaderStageFlags::COMPUTE)
            .module(module)
            .name(entry);
        let info = vk::ComputePipelineCreateInfo::default()
            .stage(stage)
            .layout(self.pipeline_layout);
        // SAFETY: V1, V5 and K1; the module is not needed once the pipeline is made.
        let made = unsafe {
            let made = device.create_compute_pipelines(vk::PipelineCache::null(), &[info], None);
            device.destroy_shader_module(module, None);
            made
        };
        made.map(|pipelines| pipelines[0])
            .map_err(|(_, result)| self.driver.failure("vkCreateComputePipelines", result, 0))
    }
}
