//! Kernels between products. A prompt's activations come from memory here; those of a few tokens stay
//! in a cache, as they do in a forward pass.

use lacuna_kernels::{Activation, Activations, RopeStyle};

use super::KernelKind;
use super::cases::{Elementwise, MOST_DECODED};
use super::measure::{Bench, Limit, Measured, Work};

/// Qwen3-0.6B: the width of a layer, of its feed-forward part, and of its query heads.
const WIDTH: usize = 1024;
const FEED_FORWARD: usize = 3072;
const HEADS: usize = 16;
const HEAD_DIM: usize = 128;

pub(super) fn measure(bench: &mut Bench<'_>, case: &Elementwise) -> Measured {
    match case.kind {
        KernelKind::RmsNorm => rms_norm(bench, case.tokens),
        KernelKind::Rope => rope(bench, case.tokens),
        KernelKind::SiluMul => silu_mul(bench, case.tokens),
        KernelKind::Quantize => quantize(bench, case.tokens),
        KernelKind::Matmul
        | KernelKind::Attention
        | KernelKind::LatentAttention
        | KernelKind::EncoderAttention
        | KernelKind::Barrier => {
            unreachable!("{} is no elementwise kernel", case.kind.name())
        }
    }
}

/// Activations of `tokens` in several places.
struct Places {
    all: Vec<f32>,
    len: usize,
}

impl Places {
    /// Places of `len` elements each, of which a call takes `bytes` bytes in all.
    fn new(bench: &Bench<'_>, tokens: usize, len: usize, bytes: usize) -> Self {
        let count = match from_memory(tokens) {
            true => bench.extent.bytes.div_ceil(bytes),
            false => 1,
        };
        let element = |i: usize| (i % 13) as f32 * 0.1 - 0.6;
        let all = (0..count * len).map(element).collect();
        Self { all, len }
    }

    fn at(&mut self, call: usize) -> &mut [f32] {
        let start = call % (self.all.len() / self.len) * self.len;
        &mut self.all[start..][..self.len]
    }
}

fn from_memory(tokens: usize) -> bool {
    tokens > MOST_DECODED
}

/// Work that reads and writes so many bytes.
fn moved(tokens: usize, bytes: usize) -> Work {
    Work {
        bytes,
        macs: 0,
        arithmetic: Limit::F32,
        from_memory: from_memory(tokens),
    }
}

fn rms_norm(bench: &mut Bench<'_>, tokens: usize) -> Measured {
    let (cpu, len) = (bench.cpu, tokens * WIDTH);
    let weight = vec![1.0; WIDTH];
    let mut x = Places::new(bench, tokens, len, 4 * len);
    let mut out = vec![0.0; len];
    bench.measure(moved(tokens, 8 * len), |call| {
        cpu.rms_norm(&mut out, x.at(call), &weight, 1e-6, WIDTH);
    })
}

fn rope(bench: &mut Bench<'_>, tokens: usize) -> Measured {
    let (cpu, len) = (bench.cpu, tokens * HEADS * HEAD_DIM);
    let frequencies: Vec<f32> = (0..HEAD_DIM / 2)
        .map(|i| 1e6_f32.powf(-2.0 * i as f32 / HEAD_DIM as f32))
        .collect();
    let positions: Vec<u32> = (0..).take(tokens).collect();
    let mut table = vec![0.0; tokens * HEAD_DIM];
    cpu.rope_table(&mut table, &positions, &frequencies, 1.0);
    let mut x = Places::new(bench, tokens, len, 4 * len);
    bench.measure(moved(tokens, 8 * len), |call| {
        cpu.rope(x.at(call), HEADS, HEAD_DIM, RopeStyle::HalfSplit, &table);
    })
}

fn silu_mul(bench: &mut Bench<'_>, tokens: usize) -> Measured {
    let (cpu, len) = (bench.cpu, tokens * FEED_FORWARD);
    let mut gate = Places::new(bench, tokens, 2 * len, 8 * len);
    bench.measure(moved(tokens, 12 * len), |call| {
        let (gate, up) = gate.at(call).split_at_mut(len);
        cpu.activate_mul(Activation::Silu, gate, up);
    })
}

fn quantize(bench: &mut Bench<'_>, tokens: usize) -> Measured {
    let (cpu, len) = (bench.cpu, tokens * WIDTH);
    let mut x = Places::new(bench, tokens, len, 4 * len);
    let stored = Activations::storage_bytes(tokens, WIDTH).unwrap_or(0);
    let mut storage = vec![0; stored + 64];
    let start = storage.as_ptr().align_offset(64).min(64);
    bench.measure(moved(tokens, 4 * len + stored), |call| {
        cpu.activations(x.at(call), tokens, WIDTH, &mut storage[start..]);
    })
}
