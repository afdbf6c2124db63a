//! What this machine reaches at best, measured beside the figures that are compared with it.

use lacuna_kernels::Cpu;
use lacuna_models::{ComputeDevice, ExecutorError};
use serde::Serialize;

use super::samples::median;

/// Bytes that are read: many times the last-level cache of small machines.
const READ_BYTES: usize = 256 << 20;

/// Medians over a run, with all threads of the processor; nothing for what was not measured.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Limits {
    /// Memory read per second, in 1e9 bytes.
    pub(super) read_gb_per_s: Option<f64>,
    /// Products of 8-bit integers per second, in 1e9.
    pub(super) int8_gmac_per_s: Option<f64>,
    /// Bytes that a device read and wrote of its memory where it copied that, per second, in 1e9.
    pub(super) device_copy_gb_per_s: Option<f64>,
}

/// Measures limits again and again. A machine's speed changes while other work comes and goes, so a
/// figure is compared with a limit of the same moment.
pub(super) struct Limiter {
    memory: Vec<u8>,
    reads: Vec<f64>,
    products: Vec<f64>,
    copies: Vec<f64>,
}

impl Limiter {
    pub(super) fn new() -> Self {
        Self {
            memory: Vec::new(),
            reads: Vec::new(),
            products: Vec::new(),
            copies: Vec::new(),
        }
    }

    /// Bytes per second that all threads read now, in 1e9.
    pub(super) fn read(&mut self, cpu: &Cpu) -> f64 {
        // Where it is needed alone.
        self.memory.resize(READ_BYTES, 1);
        self.reads.push(cpu.measure_read(&self.memory) / 1e9);
        self.reads[self.reads.len() - 1]
    }

    /// 8-bit products per second that all threads compute now, in 1e9.
    pub(super) fn int8(&mut self, cpu: &Cpu) -> f64 {
        self.products.push(cpu.measure_int8_dot() / 1e9);
        self.products[self.products.len() - 1]
    }

    /// Bytes per second that a device reads and writes now, in 1e9.
    pub(super) fn copies(&mut self, device: &dyn ComputeDevice) -> Result<f64, ExecutorError> {
        self.copies.push(device.measure_copies()? / 1e9);
        Ok(self.copies[self.copies.len() - 1])
    }

    /// The middle of all that was measured.
    pub(super) fn limits(self) -> Limits {
        Limits {
            read_gb_per_s: median(self.reads),
            int8_gmac_per_s: median(self.products),
            device_copy_gb_per_s: median(self.copies),
        }
    }
}
