//! The host device where there is none: a type that cannot be had.
#![expect(unsafe_code, reason = "the device trait is unsafe to implement")]

use std::convert::Infallible;

use super::HostConfig;
use crate::device::{
    BatchError, Capabilities, Device, DeviceError, Fence, FenceState, HeapId, HostView, Operation,
    Patience, SpaceId,
};
use crate::units::ByteLength;

/// The host device, which this system does not have.
#[derive(Debug)]
pub struct HostDevice {
    never: Infallible,
}

impl HostDevice {
    /// Says that there is no host device here.
    ///
    /// # Errors
    /// Always [`DeviceError::Unavailable`].
    pub fn new() -> Result<Self, DeviceError> {
        Self::with_config(HostConfig::default())
    }

    /// Says that there is no host device here.
    ///
    /// # Errors
    /// Always [`DeviceError::Unavailable`].
    pub fn with_config(_: HostConfig) -> Result<Self, DeviceError> {
        Err(DeviceError::Unavailable {
            device: "host",
            reason: "it needs Linux, or macOS and a build with the feature `macos`, which nobody has run yet".to_owned(),
        })
    }
}

// SAFETY: no value of the type exists, so D1 to D4 hold of every one.
unsafe impl Device for HostDevice {
    fn capabilities(&self) -> &Capabilities {
        match self.never {}
    }
    fn reserve(&mut self, _: ByteLength) -> Result<SpaceId, DeviceError> {
        match self.never {}
    }
    fn release(&mut self, _: SpaceId, _: Fence) -> Result<Fence, DeviceError> {
        match self.never {}
    }
    fn create_heap(&mut self, _: ByteLength) -> Result<HeapId, DeviceError> {
        match self.never {}
    }
    fn destroy_heap(&mut self, _: HeapId) -> Result<(), DeviceError> {
        match self.never {}
    }
    fn apply(&mut self, _: &[Operation], _: Fence) -> Result<Fence, BatchError> {
        match self.never {}
    }
    fn wait(&mut self, _: Fence, _: Patience) -> Result<FenceState, DeviceError> {
        match self.never {}
    }
    fn host_view(&self, _: SpaceId) -> Option<HostView> {
        match self.never {}
    }
}
