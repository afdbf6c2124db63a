#![expect(unsafe_code, reason = "Vulkan is a foreign interface")]

//! How long the kernels of a pass take, by the device's own clock.
//!
//! # Safety
//!
//! V1 to V5 of [`driver`](super::driver), and C2 of [`compute`](super::compute) for the pool.

use std::sync::Arc;
use std::time::Duration;

use ash::vk;

use super::driver::Driver;
use super::invalid;
use crate::device::{DeviceError, KernelTime};

/// Dispatches of a pass that are timed at most; those beyond count with the last.
const MOST: usize = 8192;

/// The device's clock at the beginning of a pass and behind each dispatch.
pub(super) struct Times {
    driver: Arc<Driver>,
    pool: vk::QueryPool,
    kernels: Vec<(&'static str, [u32; 3])>,
    /// Whether the pass was submitted. Of one that was not, the device never reads its clock.
    submitted: bool,
}

impl Drop for Times {
    fn drop(&mut self) {
        // SAFETY: V1 and V3: whoever has this waits for its last submission before.
        unsafe { self.driver.device.destroy_query_pool(self.pool, None) };
    }
}

impl Times {
    /// # Errors
    /// [`DeviceError::Invalid`] for a device without such a clock, and what the driver refuses.
    pub(super) fn new(driver: &Arc<Driver>) -> Result<Self, DeviceError> {
        if driver.limits.tick_nanoseconds == 0.0 {
            return Err(invalid("time kernels, without a clock"));
        }
        let info = vk::QueryPoolCreateInfo::default()
            .query_type(vk::QueryType::TIMESTAMP)
            .query_count(MOST as u32 + 1);
        // SAFETY: V1 and V5.
        let pool = unsafe { driver.device.create_query_pool(&info, None) }
            .map_err(|result| driver.failure("vkCreateQueryPool", result, 0))?;
        Ok(Self {
            driver: Arc::clone(driver),
            pool,
            kernels: Vec::new(),
            submitted: false,
        })
    }

    /// A pass begins.
    pub(super) fn begin(&mut self, commands: vk::CommandBuffer) {
        self.kernels.clear();
        self.submitted = false;
        // SAFETY: C2, V2 and V5.
        unsafe {
            let device = &self.driver.device;
            device.cmd_reset_query_pool(commands, self.pool, 0, MOST as u32 + 1);
        }
        self.write(commands, 0);
    }

    /// A kernel has been dispatched.
    pub(super) fn note(&mut self, commands: vk::CommandBuffer, kernel: (&'static str, [u32; 3])) {
        if self.kernels.len() < MOST {
            self.kernels.push(kernel);
            self.write(commands, self.kernels.len() as u32);
        }
    }

    /// The pass has been submitted.
    pub(super) fn submitted(&mut self) {
        self.submitted = true;
    }

    fn write(&self, commands: vk::CommandBuffer, index: u32) {
        let stage = vk::PipelineStageFlags::BOTTOM_OF_PIPE;
        // SAFETY: C2, V2 and V5; `index` is in the pool.
        unsafe {
            let device = &self.driver.device;
            device.cmd_write_timestamp(commands, stage, self.pool, index);
        }
    }

    /// What the kernels took of the last pass, which is done; the longest first. Nothing of one that was dropped.
    pub(super) fn read(&self) -> Result<Vec<KernelTime>, DeviceError> {
        if self.kernels.is_empty() || !self.submitted {
            return Ok(Vec::new());
        }
        let mut ticks = vec![0u64; self.kernels.len() + 1];
        let flags = vk::QueryResultFlags::TYPE_64 | vk::QueryResultFlags::WAIT;
        // SAFETY: V1 and V5; all of them were written by a pass that is done.
        unsafe {
            let device = &self.driver.device;
            device.get_query_pool_results(self.pool, 0, &mut ticks, flags)
        }
        .map_err(|result| self.driver.failure("vkGetQueryPoolResults", result, 0))?;
        let mut times: Vec<KernelTime> = Vec::new();
        for (&(kernel, groups), ends) in self.kernels.iter().zip(ticks.windows(2)) {
            let ticks = ends[1].saturating_sub(ends[0]) as f64;
            let time = Duration::from_nanos((ticks * self.driver.limits.tick_nanoseconds) as u64);
            let mut known = times.iter_mut();
            match known.find(|known| (known.kernel, known.groups) == (kernel, groups)) {
                Some(known) => {
                    known.dispatches += 1;
                    known.time += time;
                }
                None => times.push(KernelTime {
                    kernel,
                    groups,
                    dispatches: 1,
                    time,
                }),
            }
        }
        times.sort_by_key(|known| std::cmp::Reverse(known.time));
        Ok(times)
    }
}
