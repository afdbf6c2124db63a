#![expect(unsafe_code, reason = "Vulkan is a foreign interface")]

//! What a driver has made of kernels, as bytes that outlive the process: with them it compiles nothing again.
//!
//! # Safety
//!
//! V1, V2 and V5 of [`driver`](super::driver), and:
//!
//! * **P1** Bytes that a cache begins with are those that [`KernelCache::bytes`] gave of a device and driver of the same
//!   identity, since few drivers look at more than the first of them: whoever makes a [`KernelCache`] promises it.

use std::fmt;
use std::sync::Arc;

use ash::vk;

use super::driver::Driver;
use super::queue::VulkanQueue;
use crate::device::DeviceError;

/// Kernels as the driver has compiled them, which [`Compute::keep_kernels_in`](super::Compute::keep_kernels_in) takes.
pub struct KernelCache {
    driver: Arc<Driver>,
    handle: vk::PipelineCache,
}

impl fmt::Debug for KernelCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("KernelCache").field(&self.handle).finish()
    }
}

impl Drop for KernelCache {
    fn drop(&mut self) {
        // SAFETY: V1 and V3: a cache is used within the calls that compile kernels alone, which borrow it.
        unsafe {
            let device = &self.driver.device;
            device.destroy_pipeline_cache(self.handle, None);
        }
    }
}

impl VulkanQueue {
    /// A cache that begins with `bytes`, or with nothing.
    ///
    /// # Errors
    /// What the driver refuses.
    ///
    /// # Safety
    /// P1: `bytes` are none, or what [`KernelCache::bytes`] gave where the
    /// [identity](super::VulkanDevice::driver_identity) was the same.
    pub unsafe fn kernel_cache(&self, bytes: &[u8]) -> Result<KernelCache, DeviceError> {
        let driver = &self.shared.driver;
        let info = vk::PipelineCacheCreateInfo::default().initial_data(bytes);
        // SAFETY: V1, V5 and P1.
        let handle = unsafe { driver.device.create_pipeline_cache(&info, None) }
            .map_err(|result| driver.failure("vkCreatePipelineCache", result, 0))?;
        Ok(KernelCache {
            driver: Arc::clone(driver),
            handle,
        })
    }
}

impl KernelCache {
    /// What it holds now: what it began with, and kernels that were compiled since.
    ///
    /// # Errors
    /// What the driver refuses.
    pub fn bytes(&self) -> Result<Vec<u8>, DeviceError> {
        // SAFETY: V1; a cache may be used by several threads at once.
        unsafe { self.driver.device.get_pipeline_cache_data(self.handle) }
            .map_err(|result| self.driver.failure("vkGetPipelineCacheData", result, 0))
    }

    pub(super) fn handle(&self) -> vk::PipelineCache {
        self.handle
    }

    /// Whether it is one of `driver`'s.
    pub(super) fn is_of(&self, driver: &Arc<Driver>) -> bool {
        Arc::ptr_eq(&self.driver, driver)
    }
}
