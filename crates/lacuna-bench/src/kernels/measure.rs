//! Times of calls beside the limit of the machine that they would meet first.

use std::sync::Arc;
use std::time::{Duration, Instant};

use lacuna_kernels::Cpu;
use serde::Serialize;

use crate::samples::median;

/// How much is measured.
#[derive(Clone, Copy)]
pub(super) struct Extent {
    /// Bytes that calls go through before they meet the same again.
    pub(super) bytes: usize,
    /// Times that a kernel and its limit are measured.
    rounds: usize,
    /// How long the calls of a round take at least.
    least: Duration,
}

impl Extent {
    pub(super) fn new(quick: bool) -> Self {
        if quick {
            Self {
                bytes: 4 << 20,
                rounds: 1,
                least: Duration::ZERO,
            }
        } else {
            Self {
                bytes: 192 << 20,
                rounds: 7,
                least: Duration::from_millis(10),
            }
        }
    }
}

/// What the machine cannot exceed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) enum Limit {
    #[serde(rename = "memory read")]
    Read,
    #[serde(rename = "8-bit products, summed in 32 bits")]
    Int8,
    #[serde(rename = "f32 multiply-adds")]
    F32,
    #[serde(rename = "bf16 products")]
    Bf16,
}

/// What one call does.
#[derive(Clone, Copy)]
pub(super) struct Work {
    /// Bytes it reads and writes.
    pub(super) bytes: usize,
    /// Multiplications.
    pub(super) macs: usize,
    /// What limits those.
    pub(super) arithmetic: Limit,
    /// Whether the bytes come from memory, so that it may be what limits.
    pub(super) from_memory: bool,
}

#[derive(Serialize)]
pub(super) struct Measured {
    /// Of a call: the median of the rounds.
    pub(super) time_us: f64,
    /// Bytes read and written per second, in 1e9.
    pub(super) gb_per_s: Option<f64>,
    /// Multiplications per second, in 1e9; nothing where there are few.
    pub(super) gmac_per_s: Option<f64>,
    /// The limit that is met first; nothing for what works in caches.
    pub(super) limit: Option<Limit>,
    /// The part of it that is reached.
    pub(super) of_limit: Option<f64>,
}

/// Medians over the whole run, each with all threads; nothing for what no kernel was compared with.
#[derive(Serialize)]
pub(super) struct Limits {
    pub(super) read_gb_per_s: Option<f64>,
    /// Products of 8-bit integers, summed in 32 bits, per second, in 1e9. A kernel that sums products
    /// of smaller integers in 16 bits first can do more.
    pub(super) int8_gmac_per_s: Option<f64>,
    pub(super) f32_gmac_per_s: Option<f64>,
    pub(super) bf16_gmac_per_s: Option<f64>,
}

pub(super) struct Bench<'a> {
    pub(super) cpu: &'a Cpu,
    pub(super) extent: Extent,
    /// What is read for the limit of memory, and weights: any bytes are weights.
    memory: Arc<Vec<u8>>,
    /// What each limit was, by [`Limit`].
    seen: [Vec<f64>; 4],
}

impl<'a> Bench<'a> {
    pub(super) fn new(cpu: &'a Cpu, extent: Extent) -> Self {
        Self {
            cpu,
            extent,
            memory: Arc::new(bytes(extent.bytes)),
            seen: [const { Vec::new() }; 4],
        }
    }

    /// At least so many bytes to be taken for weights.
    pub(super) fn memory(&mut self, least: usize) -> Arc<Vec<u8>> {
        if self.memory.len() < least {
            self.memory = Arc::new(bytes(least));
        }
        Arc::clone(&self.memory)
    }

    /// Times `call`, which is told how often it was called before, beside the limit of its work.
    pub(super) fn measure(&mut self, work: Work, mut call: impl FnMut(usize)) -> Measured {
        let start = Instant::now();
        call(0);
        let first = start.elapsed().max(Duration::from_nanos(1));
        let per_round = self.extent.least.div_duration_f64(first).ceil().max(1.0) as usize;
        let limit = self.limit(&work);
        let (mut times, mut shares) = (Vec::new(), Vec::new());
        for round in 0..self.extent.rounds {
            let rate = limit.map(|limit| self.rate(limit));
            let start = Instant::now();
            for index in 0..per_round {
                call(1 + round * per_round + index);
            }
            let time = start.elapsed().as_secs_f64() / per_round as f64;
            times.push(time);
            shares.extend(
                limit
                    .zip(rate)
                    .map(|(limit, rate)| amount(limit, &work) / time / rate),
            );
        }
        let time = median(times).unwrap_or(f64::NAN);
        Measured {
            time_us: time * 1e6,
            gb_per_s: (work.bytes > 0).then_some(work.bytes as f64 / time / 1e9),
            gmac_per_s: (work.macs > 0).then_some(work.macs as f64 / time / 1e9),
            limit,
            of_limit: median(shares),
        }
    }

    /// Starting and ending an operation, which nothing limits.
    pub(super) fn barrier(&self) -> Measured {
        let times = (0..self.extent.rounds).map(|_| self.cpu.measure_barrier() * 1e6);
        Measured {
            time_us: median(times.collect()).unwrap_or(f64::NAN),
            gb_per_s: None,
            gmac_per_s: None,
            limit: None,
            of_limit: None,
        }
    }

    pub(super) fn limits(&self) -> Limits {
        let middle = |limit: Limit| median(self.seen[limit as usize].clone()).map(|x| x / 1e9);
        Limits {
            read_gb_per_s: middle(Limit::Read),
            int8_gmac_per_s: middle(Limit::Int8),
            f32_gmac_per_s: middle(Limit::F32),
            bf16_gmac_per_s: middle(Limit::Bf16),
        }
    }

    /// The limit that would take the longest for the work.
    fn limit(&mut self, work: &Work) -> Option<Limit> {
        let arithmetic = work.arithmetic;
        match (work.from_memory, work.macs > 0) {
            (false, false) => None,
            (true, false) => Some(Limit::Read),
            (false, true) => Some(arithmetic),
            (true, true) => {
                let mut least = |limit| amount(limit, work) / self.rate(limit);
                let memory = least(Limit::Read) >= least(arithmetic);
                Some(if memory { Limit::Read } else { arithmetic })
            }
        }
    }

    fn rate(&mut self, limit: Limit) -> f64 {
        let rate = match limit {
            Limit::Read => self.cpu.measure_read(&self.memory[..self.extent.bytes]),
            Limit::Int8 => self.cpu.measure_int8_dot(),
            Limit::F32 => self.cpu.measure_f32_fma(),
            Limit::Bf16 => self.cpu.measure_bf16_products().unwrap_or(f64::NAN),
        };
        self.seen[limit as usize].push(rate);
        rate
    }
}

/// Bytes of which any two neighbours are a small f16 or bf16, and any four a small f32.
fn bytes(len: usize) -> Vec<u8> {
    let byte = |at: usize| if at.is_multiple_of(2) { at as u8 } else { 0x11 };
    (0..len).map(byte).collect()
}

/// How much of what is limited a call takes.
fn amount(limit: Limit, work: &Work) -> f64 {
    match limit {
        Limit::Read => work.bytes as f64,
        Limit::Int8 | Limit::F32 | Limit::Bf16 => work.macs as f64,
    }
}
