//! What this machine reaches at best, measured in the run whose figures are compared with it.

use lacuna_kernels::Cpu;
use serde::Serialize;

use super::samples::median;

/// Bytes that are read: many times the last-level cache of small machines.
const READ_BYTES: usize = 256 << 20;
const ROUNDS: usize = 7;

/// Medians of several rounds, with all threads of the processor.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Limits {
    /// Memory read per second, in 1e9 bytes.
    pub(super) read_gb_per_s: f64,
    /// Products of 8-bit integers per second, in 1e9.
    pub(super) int8_gmac_per_s: f64,
}

impl Limits {
    pub(super) fn measure(cpu: &Cpu) -> Self {
        let memory = vec![1; READ_BYTES];
        Self {
            read_gb_per_s: middle(|| cpu.measure_read(&memory)),
            int8_gmac_per_s: middle(|| cpu.measure_int8_dot()),
        }
    }
}

fn middle(mut measure: impl FnMut() -> f64) -> f64 {
    let values = (0..ROUNDS).map(|_| measure() / 1e9).collect();
    median(values).expect("there are rounds")
}
