//! The device: opened, tested, and what it makes of a model.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lacuna_kv::{Geometry, KvCache, KvPolicy};
use lacuna_models::plan::ArenaPlan;
use lacuna_models::{ComputeDevice, Executor, ExecutorError, ExecutorMemory, Model};
use lacuna_pages::vulkan::{Compute, PageTable};
use lacuna_pages::{ByteLength, DeviceError, SplitDevice, VulkanDevice};

use crate::executor::{self, VulkanExecutor};
use crate::kernels::{MOST_SHARED_BYTES, MOST_THREADS};
use crate::part::Part;
use crate::pass::whole;
use crate::{capability, self_test};

/// How a device is used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct VulkanConfig {
    /// The most bytes of a buffer that kernels are shown at once, if that is to be less than the device allows: matrices
    /// and rows that are longer are gone through in parts. Default none.
    pub window: Option<ByteLength>,
    /// Whether kernels add up products of bytes by an instruction of the device's, where it has one. Default: where it
    /// says that this is faster. The numbers are the same.
    pub integer_dot: Option<bool>,
    /// Whether attention of many tokens over rows of several partitions merges these as it goes through them. Default: where
    /// that leaves enough to do side by side. The numbers are the same.
    pub merge_partitions: Option<bool>,
    /// How the pages of KV rows are found, at most. Default: by the device's own page table, else in a table of ours.
    pub page_table: PageTable,
    /// The place of the device in the driver's list, from 0. Default: the best there is.
    pub place: Option<usize>,
}

impl VulkanConfig {
    pub(crate) fn uses_integer_dot(self, compute: &Compute) -> bool {
        let (has_it, is_fast) = compute.integer_dot();
        has_it && self.integer_dot.unwrap_or(is_fast)
    }
}

/// A Vulkan device: the best there is, or the one at a place in the driver's list.
#[derive(Debug)]
pub struct Vulkan {
    device: VulkanDevice,
    config: VulkanConfig,
    kernel_folder: Option<PathBuf>,
}

impl Vulkan {
    /// Opens the best device there is, a GPU before a software driver, and has it compute something known.
    ///
    /// # Errors
    /// [`ExecutorError::Unavailable`] where there is no driver or no device that computes, and
    /// [`ExecutorError::Faulty`] for one that computes wrong numbers.
    pub fn open() -> Result<Self, ExecutorError> {
        Self::open_with(VulkanConfig::default())
    }

    /// The same, used as `config` says.
    ///
    /// # Errors
    /// As [`Vulkan::open`].
    pub fn open_with(config: VulkanConfig) -> Result<Self, ExecutorError> {
        let opened = match config.place {
            None => VulkanDevice::open_with(config.page_table),
            Some(place) => VulkanDevice::open_at(place, config.page_table),
        };
        let device = opened.map_err(|error| match error {
            DeviceError::Unavailable { reason, .. } => ExecutorError::Unavailable { reason },
            error => error.into(),
        })?;
        check_workgroups(device.driver_name(), device.workgroup_limits())?;
        self_test::run(&device, config)?;
        Ok(Self {
            device,
            config,
            kernel_folder: None,
        })
    }

    /// The same, which keeps what its driver makes of kernels in `folder`, so that the next process has them at once. What is
    /// found there is used if it is whole and of this device and driver. Default: nothing is kept.
    #[must_use]
    pub fn keeping_kernels_in(self, folder: PathBuf) -> Self {
        Self {
            kernel_folder: Some(folder),
            ..self
        }
    }

    /// The device itself.
    #[must_use]
    pub fn device(&self) -> &VulkanDevice {
        &self.device
    }
}

/// What copies are measured with: more than caches hold, and so many that a submission is little beside them.
const COPIED_BYTES: u64 = 64 << 20;
const COPIES: u64 = 8;

/// Whether a device has workgroups as large as the kernels': Vulkan itself promises fewer threads, and fewer bytes.
fn check_workgroups(name: &str, (threads, bytes): (u32, u32)) -> Result<(), ExecutorError> {
    if threads >= MOST_THREADS && bytes >= MOST_SHARED_BYTES {
        return Ok(());
    }
    Err(ExecutorError::Unavailable {
        reason: format!(
            "`{name}` has workgroups of {threads} threads that share {bytes} bytes, and {MOST_THREADS} that share \
             {MOST_SHARED_BYTES} are needed"
        ),
    })
}

impl ComputeDevice for Vulkan {
    fn name(&self) -> &str {
        self.device.driver_name()
    }

    fn reopened(&self) -> Result<Arc<dyn ComputeDevice>, ExecutorError> {
        Ok(Arc::new(Self {
            kernel_folder: self.kernel_folder.clone(),
            ..Self::open_with(self.config)?
        }))
    }

    fn free_bytes(&self) -> Option<u64> {
        Some(self.device.queue().memory_left().get())
    }

    fn has_own_memory(&self) -> bool {
        self.device.has_own_memory()
    }

    fn kv_cache(&self, geometry: Geometry, policy: KvPolicy) -> Result<KvCache, ExecutorError> {
        let pages = self.device.page_table();
        let is_split = geometry.host_layers() > 0;
        if is_split && pages == PageTable::Unused {
            return Err(ExecutorError::Setting {
                device: self.name().to_owned(),
                what: "layers on the processor beside those on a device without pages",
            });
        }
        let policy = capability::as_held(policy, &geometry, self.config.window, pages);
        capability::check_kv(self.name(), &geometry, policy)?;
        // States are computed in their place, so that no step can go back.
        let geometry = geometry.without_state_inputs();
        let device = self.device.share();
        Ok(match is_split {
            false => KvCache::on_device(device, geometry, policy)?,
            true => KvCache::on_device(SplitDevice::new(device)?, geometry, policy)?,
        })
    }

    fn memory_for(
        &self,
        model: &Arc<Model>,
        geometry: &Geometry,
        plan: &ArenaPlan,
    ) -> Result<ExecutorMemory, ExecutorError> {
        let part = Part::behind(Arc::clone(model), geometry.host_layers())?;
        capability::check(self.name(), &part)?;
        Ok(executor::memory_for(&part, geometry, plan))
    }

    fn executor(
        &self,
        model: Arc<Model>,
        geometry: &Geometry,
        plan: &ArenaPlan,
    ) -> Result<Box<dyn Executor>, ExecutorError> {
        let part = Part::behind(model, geometry.host_layers())?;
        capability::check(self.name(), &part)?;
        let name = self.name().to_owned();
        let queue = self.device.queue();
        let kept = self.kernel_folder.as_deref();
        let kept = kept.map(|folder| (folder, self.device.driver_identity()));
        let used = (self.config, kept);
        let made = VulkanExecutor::new(name, &queue, used, part, geometry, plan)?;
        Ok(Box::new(made))
    }

    fn measure_copies(&self) -> Result<f64, ExecutorError> {
        let queue = self.device.queue();
        let [from, to] = [(); 2].map(|()| queue.memory(ByteLength::new(COPIED_BYTES)));
        let (from, to) = (from?, to?);
        let mut compute = queue.compute(4, 4)?;
        let mut took = Duration::MAX;
        // The first finds nothing recorded, and maybe a device that sleeps.
        for _ in 0..3 {
            let begun = Instant::now();
            let mut recording = compute.begin(&[], 0)?;
            for copy in 0..COPIES {
                let (from, to) = if copy % 2 == 0 {
                    (&from, &to)
                } else {
                    (&to, &from)
                };
                recording.copy(whole(from), whole(to))?;
                recording.barrier()?;
            }
            recording.submit()?;
            compute.output(&mut [])?;
            took = took.min(begun.elapsed());
        }
        Ok((2 * COPIED_BYTES * COPIES) as f64 / took.as_secs_f64())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_with_smaller_workgroups_is_refused_by_name() {
        assert!(check_workgroups("card", (MOST_THREADS, MOST_SHARED_BYTES)).is_ok());
        // What Vulkan promises.
        for limits in [(128, 32_768), (1024, 16_384)] {
            let told = check_workgroups("card", limits)
                .expect_err("too small")
                .to_string();
            assert!(
                told.contains("`card`") && told.contains(&limits.0.to_string()),
                "{told}"
            );
        }
    }
}
