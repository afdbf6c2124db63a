//! The compute kernels: pipelines made from committed text in Metal's language, which naga writes. Their
//! sources are in `gpu/kernels`, in WGSL; the test `shaders` compiles them and compares.

use std::fmt;

use objc2::rc::Retained;
use objc2::runtime::ProtocolObject;
use objc2_foundation::NSString;
use objc2_metal::{MTLComputePipelineState, MTLDevice, MTLLibrary};

use super::driver::refused;
use crate::device::DeviceError;
use crate::gpu::words::GROUP;

const WRITE_ROWS: &str = include_str!("kernels/write_rows.metal");
const CHECKSUM: &str = include_str!("kernels/checksum.metal");

/// Which kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kernel {
    /// Rows from a dense source to a strided destination.
    WriteRows,
    /// The checksum of a flat range.
    Checksum,
}

impl Kernel {
    /// The bytes that the threads of a workgroup share; a multiple of sixteen.
    pub(super) const fn shared_bytes(self) -> usize {
        match self {
            Self::WriteRows => 0,
            // A sum for each thread.
            Self::Checksum => GROUP as usize * size_of::<u32>(),
        }
    }
}

type Pipeline = Retained<ProtocolObject<dyn MTLComputePipelineState>>;

/// Pipelines.
pub(super) struct Kernels {
    write_rows: Pipeline,
    checksum: Pipeline,
}

impl fmt::Debug for Kernels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Kernels")
    }
}

impl Kernels {
    /// Compiles the kernels for the device.
    pub(super) fn new(device: &ProtocolObject<dyn MTLDevice>) -> Result<Self, DeviceError> {
        Ok(Self {
            write_rows: pipeline(device, WRITE_ROWS, "write_rows")?,
            checksum: pipeline(device, CHECKSUM, "checksum")?,
        })
    }

    pub(super) fn pipeline(&self, kernel: Kernel) -> &ProtocolObject<dyn MTLComputePipelineState> {
        match kernel {
            Kernel::WriteRows => &self.write_rows,
            Kernel::Checksum => &self.checksum,
        }
    }
}

fn pipeline(
    device: &ProtocolObject<dyn MTLDevice>,
    source: &str,
    entry: &str,
) -> Result<Pipeline, DeviceError> {
    let library = device
        .newLibraryWithSource_options_error(&NSString::from_str(source), None)
        .map_err(|_| refused("newLibraryWithSource:options:error:"))?;
    let function = library
        .newFunctionWithName(&NSString::from_str(entry))
        .ok_or(refused("newFunctionWithName:"))?;
    device
        .newComputePipelineStateWithFunction_error(&function)
        .map_err(|_| refused("newComputePipelineStateWithFunction:error:"))
}
