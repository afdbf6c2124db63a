#![expect(unsafe_code, reason = "Vulkan is a foreign interface")]

//! All heaps as an array of buffers, for kernels that look pages up: a descriptor set beside that of a dispatch, written anew
//! when heaps came or went.
//!
//! # Safety
//!
//! V1 to V5 of [`driver`](super::driver), and:
//!
//! * **H1** The set is written only when the point of the last submission of the pass before is reached, and before commands of
//!   the next one name it.
//! * **H2** Every place of the array shows a buffer that is there, a heap or the table, and heaps that go meanwhile are not
//!   dropped before the queue has done with the pass. Which of them a kernel touches is in entries that were checked under the
//!   lock which the recording holds.

use std::sync::Arc;

use ash::vk;

use super::driver::Driver;
use super::state::State;
use super::table::heap_slots;
use crate::device::DeviceError;

/// The descriptor set.
pub(super) struct HeapSet {
    driver: Arc<Driver>,
    pool: vk::DescriptorPool,
    pub(super) handle: vk::DescriptorSet,
    /// Of which change of heaps it shows what there is then, if it shows anything.
    shows: Option<u64>,
}

impl Drop for HeapSet {
    fn drop(&mut self) {
        // SAFETY: V1 and V3: its owner has waited for the last pass.
        unsafe { self.driver.device.destroy_descriptor_pool(self.pool, None) };
    }
}

impl HeapSet {
    /// A set of the layout that [`layout`] makes.
    pub(super) fn new(
        driver: &Arc<Driver>,
        layout: vk::DescriptorSetLayout,
    ) -> Result<Self, DeviceError> {
        let sizes = [vk::DescriptorPoolSize::default()
            .ty(vk::DescriptorType::STORAGE_BUFFER)
            .descriptor_count(heap_slots(&driver.limits))];
        let info = vk::DescriptorPoolCreateInfo::default()
            .max_sets(1)
            .pool_sizes(&sizes);
        // SAFETY: V1 and V5.
        let pool = unsafe { driver.device.create_descriptor_pool(&info, None) }
            .map_err(|result| driver.failure("vkCreateDescriptorPool", result, 0))?;
        let mut set = Self {
            driver: Arc::clone(driver),
            pool,
            handle: vk::DescriptorSet::null(),
            shows: None,
        };
        let layouts = [layout];
        let info = vk::DescriptorSetAllocateInfo::default()
            .descriptor_pool(pool)
            .set_layouts(&layouts);
        // SAFETY: V1 and V5.
        let sets = unsafe { driver.device.allocate_descriptor_sets(&info) }
            .map_err(|result| driver.failure("vkAllocateDescriptorSets", result, 0))?;
        set.handle = sets[0];
        Ok(set)
    }

    /// Has it show all heaps that there are; the pass before is done (H1). Returns whether it was written: commands that
    /// name it are to be recorded anew then.
    pub(super) fn show(&mut self, state: &State) -> bool {
        let shows = Some(state.heap_changes());
        let heaps = state.heap_windows().filter(|_| self.shows != shows);
        let is_written = heaps.is_some();
        if let Some(heaps) = heaps {
            let infos: Vec<_> = heaps
                .map(|window| {
                    vk::DescriptorBufferInfo::default()
                        .buffer(window.buffer.handle)
                        .offset(window.offset)
                        .range(window.length)
                })
                .collect();
            let writes = [vk::WriteDescriptorSet::default()
                .dst_set(self.handle)
                .descriptor_type(vk::DescriptorType::STORAGE_BUFFER)
                .buffer_info(&infos)];
            // SAFETY: H1 for the set; H2 and V4 for the windows; V5.
            unsafe { self.driver.device.update_descriptor_sets(&writes, &[]) };
            self.shows = shows;
        }
        is_written
    }
}

/// The layout of such a set.
pub(super) fn layout(driver: &Driver) -> Result<vk::DescriptorSetLayout, DeviceError> {
    let bindings = [vk::DescriptorSetLayoutBinding::default()
        .descriptor_type(vk::DescriptorType::STORAGE_BUFFER)
        .descriptor_count(heap_slots(&driver.limits))
        .stage_flags(vk::ShaderStageFlags::COMPUTE)];
    let info = vk::DescriptorSetLayoutCreateInfo::default().bindings(&bindings);
    // SAFETY: V1 and V5.
    unsafe { driver.device.create_descriptor_set_layout(&info, None) }
        .map_err(|result| driver.failure("vkCreateDescriptorSetLayout", result, 0))
}
