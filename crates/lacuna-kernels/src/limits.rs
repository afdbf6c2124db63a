//! What this machine reaches at best, to compare kernels with: memory reads, int8 dot products and
//! f32 multiply-adds per second.
//!
//! Each method measures once, for a few milliseconds, with the threads and the instructions of a
//! [`Cpu`]. A machine with other work on it varies: measure limit and kernel in turn, several
//! times, and take the median of the ratios.

use std::hint::black_box;
use std::time::{Duration, Instant};

use crate::cpu::Cpu;
#[cfg(target_arch = "x86_64")]
use crate::level::Level;
#[cfg(target_arch = "x86_64")]
use crate::simd::amx;
use crate::simd::{Bf16Products, Kernel, LANES, Products, Registers, Simd, each};

/// Bytes that a task reads.
const READ_TASK: usize = 1 << 20;

/// Places that a task reads in turn; one stream per thread does not reach what memory delivers.
const STREAMS: usize = 8;

/// How far ahead of its use a line is prefetched.
const PREFETCH_BYTES: usize = 1024;

/// Tasks per thread of an arithmetic measurement, and steps per task: together a few milliseconds.
const ARITHMETIC_TASKS: usize = 32;
const STEPS: usize = 8 * 1024;

/// Steps per task where one takes as long as sixteen: of four tiles, each sixteen cycles.
#[cfg(target_arch = "x86_64")]
const TILE_STEPS: usize = STEPS / 16;

/// Empty operations whose average is a barrier.
const BARRIERS: usize = 1000;

impl Cpu {
    /// Bytes per second at which all threads together read `bytes` once, in several streams each.
    ///
    /// That is the bandwidth of memory if `bytes` is much larger than the last-level cache.
    pub fn measure_read(&self, bytes: &[u8]) -> f64 {
        let tasks = bytes.len() / READ_TASK;
        let elapsed = self.measure(tasks, |task| Read {
            bytes: &bytes[task * READ_TASK..][..READ_TASK],
        });
        (tasks * READ_TASK) as f64 / elapsed.as_secs_f64()
    }

    /// Products of 8-bit integers per second, summed in 32 bits, of all threads together.
    ///
    /// At a level with AMX they are those of its vectors too: its tiles multiply many times as many, but what they sum has
    /// to leave them every 32 columns, which is what bounds them.
    pub fn measure_int8_dot(&self) -> f64 {
        self.measure_arithmetic(Arithmetic::Int8)
    }

    /// Fused multiply-adds of f32 per second, of all threads together.
    pub fn measure_f32_fma(&self) -> f64 {
        self.measure_arithmetic(Arithmetic::F32)
    }

    /// Products of bf16 per second, summed in f32, of all threads together, where float matrices are multiplied so
    /// ([`MatmulPrecision::Bf16`](crate::MatmulPrecision::Bf16)).
    ///
    /// At a level with AMX they are those of its tiles.
    pub fn measure_bf16_products(&self) -> Option<f64> {
        let proof = self.rounded()?;
        #[cfg(target_arch = "x86_64")]
        if self.level() == Level::Amx {
            let tasks = self.threads() * ARITHMETIC_TASKS;
            let elapsed = self.measure(tasks, |_| TileProducts);
            return Some((tasks * TILE_STEPS * amx::PRODUCTS) as f64 / elapsed.as_secs_f64());
        }
        Some(self.measure_arithmetic(Arithmetic::Bf16(proof)))
    }

    /// Seconds that sharing an operation between all threads takes, the operation itself left out.
    pub fn measure_barrier(&self) -> f64 {
        let elapsed = |tasks| {
            let start = Instant::now();
            for _ in 0..BARRIERS {
                self.for_each(tasks, |task| {
                    black_box(task);
                });
            }
            start.elapsed().as_secs_f64()
        };
        (elapsed(self.threads()) - elapsed(1)).max(0.0) / BARRIERS as f64
    }

    fn measure_arithmetic(&self, kernel: Arithmetic) -> f64 {
        let tasks = self.threads() * ARITHMETIC_TASKS;
        let products = self.execute(PerStep(kernel));
        let elapsed = self.measure(tasks, |_| kernel);
        (tasks * STEPS * products) as f64 / elapsed.as_secs_f64()
    }

    fn measure<K: Kernel>(&self, tasks: usize, kernel: impl Fn(usize) -> K + Sync) -> Duration {
        let start = Instant::now();
        self.for_each(tasks, |task| {
            self.execute(kernel(task));
        });
        start.elapsed()
    }
}

/// Reads one task's bytes.
struct Read<'a> {
    bytes: &'a [u8],
}

impl Kernel for Read<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (lines, _) = self.bytes.as_chunks::<64>();
        let per_stream = lines.len() / STREAMS;
        let mut all = [s.u_splat(0); STREAMS];
        for line in 0..per_stream {
            for stream in 0..STREAMS {
                let bytes = &lines[stream * per_stream + line];
                s.prefetch_line(bytes.as_ptr().wrapping_add(PREFETCH_BYTES));
                let halves = bytes.as_chunks::<32>().0;
                all[stream] = s.u_or(all[stream], s.u_halves([&halves[0], &halves[1]]));
            }
        }
        for x in all {
            sink(s, x);
        }
    }
}

/// Independent chains of products, as many as registers hold.
#[derive(Clone, Copy)]
enum Arithmetic {
    Int8,
    F32,
    Bf16(Bf16Products),
}

impl Arithmetic {
    #[inline(always)]
    fn chains<S: Simd, const N: usize>(self, s: S) {
        let (words, numbers) = ([[0x0102_0304; LANES]; N], [[0.5; LANES]; N]);
        if let Self::Int8 = self {
            let x: [_; N] = each!(s.u_splat(0), |j| s.u_load(&black_box(words)[j]));
            let quads: [[_; 4]; N] = black_box([[words[0][0]; 4]; N]);
            let mut sums = [[s.u_splat(0); N]; N];
            for _ in 0..STEPS {
                // Read anew, so that no product is computed once for all steps.
                let weights = black_box(&words);
                for i in 0..N {
                    let weight = s.u_load(&weights[i]);
                    for j in 0..N {
                        let sum = &mut sums[i][j];
                        *sum = match S::PRODUCTS {
                            Products::Squares => s.dot_squares(*sum, weight, quads[j]),
                            _ => s.dot_unsigned(*sum, weight, x[j]),
                        };
                    }
                }
            }
            for x in sums.iter().flatten() {
                sink(s, *x);
            }
        } else {
            let x: [_; N] = each!(s.splat(0.0), |j| s.load(&black_box(numbers)[j]));
            let mut sums = [[s.splat(0.0); N]; N];
            for _ in 0..STEPS {
                let weights = black_box(&numbers);
                for i in 0..N {
                    let weight = s.load(&weights[i]);
                    for j in 0..N {
                        sums[i][j] = match self {
                            Self::Bf16(proof) => s.multiply_pairs(proof, weight, x[j], sums[i][j]),
                            _ => s.fma(weight, x[j], sums[i][j]),
                        };
                    }
                }
            }
            for x in sums.iter().flatten() {
                let mut lanes = [0.0; LANES];
                s.store(*x, &mut lanes);
                black_box(lanes);
            }
        }
    }
}

impl Kernel for Arithmetic {
    type Output = ();

    const MULTIPLIES_BYTES: bool = true;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match S::REGISTERS {
            Registers::Many => self.chains::<S, 4>(s),
            Registers::Few => self.chains::<S, 2>(s),
        }
    }
}

/// Products of tiles that registers hold.
#[cfg(target_arch = "x86_64")]
struct TileProducts;

#[cfg(target_arch = "x86_64")]
impl Kernel for TileProducts {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let amx = s.amx().expect("a level with AMX");
        amx::Tiles::new(amx, amx::ROWS).multiply_zeros(TILE_STEPS);
    }
}

/// Products per step of [`Arithmetic`].
struct PerStep(Arithmetic);

impl Kernel for PerStep {
    type Output = usize;

    const MULTIPLIES_BYTES: bool = true;

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> usize {
        let chains = match S::REGISTERS {
            Registers::Many => 16,
            Registers::Few => 4,
        };
        let products = match (self.0, S::PRODUCTS) {
            (Arithmetic::F32, _) => 1,
            (Arithmetic::Bf16(_), _) => 2,
            (Arithmetic::Int8, Products::Squares) => 8,
            (Arithmetic::Int8, _) => 4,
        };
        chains * LANES * products
    }
}

#[inline(always)]
fn sink<S: Simd>(s: S, x: S::U) {
    let mut lanes = [0; LANES];
    s.u_store(x, &mut lanes);
    black_box(lanes);
}
