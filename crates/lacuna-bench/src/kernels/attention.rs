//! Attention of one layer over as many caches as memory is to be gone through.

use lacuna_kernels::{
    AttentionShape, Cpu, ElementType, Mask, MatmulPrecision, RowLayout, Run, View,
};

use super::cases::{Attention, MOST_DECODED};
use super::measure::{Bench, Limit, Measured, Work};

/// Qwen3-0.6B.
pub(super) const GROUPED: AttentionShape = AttentionShape::causal(16, 8, 128, 0.088_388_35);

/// DeepSeek V2 Lite: values are the first elements of keys.
pub(super) const LATENT: AttentionShape = AttentionShape {
    value_dim: 512,
    ..AttentionShape::causal(16, 1, 576, 0.072_168_78)
};

/// SigLIP So400m, the encoder of images of Gemma 3.
pub(super) const ENCODER: AttentionShape = AttentionShape {
    mask: Mask::Full,
    ..AttentionShape::causal(16, 16, 72, 0.117_851_13)
};

pub(super) fn measure(bench: &mut Bench<'_>, case: &Attention) -> Measured {
    let Attention {
        shape,
        element,
        depth,
        tokens,
    } = *case;
    let side = depth * element.bytes(shape.kv_heads * shape.head_dim);
    let sides = if shape == LATENT { 1 } else { 2 };
    let cpu = bench.cpu;
    let caches = (bench.extent.bytes / (sides * side)).max(1);
    let rows = cache(cpu, element, &shape, sides * caches * depth);
    let heads = tokens * shape.query_heads;
    let q: Vec<f32> = (0..heads * shape.head_dim)
        .map(|i| (i % 13) as f32 * 0.1 - 0.6)
        .collect();
    let mut out = vec![0.0; heads * shape.value_dim];
    let split = tokens.min(MOST_DECODED);
    let mut scratch = vec![0.0; Cpu::attention_scratch_len(split, depth, &shape)];
    let seen = match shape.mask {
        Mask::Full => tokens * depth,
        // Query `i` sees `depth - tokens + 1 + i` rows, of K and of V.
        _ => tokens * (depth - tokens) + tokens * (tokens + 1) / 2,
    };
    let work = Work {
        bytes: sides * side,
        macs: seen * shape.query_heads * (shape.head_dim + shape.value_dim),
        arithmetic: match cpu.attention_precision(&shape) {
            // Scores of keys in integers are products of bytes, and what they weigh is in f32.
            MatmulPrecision::Bf16 if !element.is_in_units() => Limit::Bf16,
            _ => Limit::F32,
        },
        from_memory: true,
    };
    bench.measure(work, |call| {
        let first = call % caches * sides * side;
        let bytes = &rows[first..first + sides * side];
        let k = View::flat(element, shape.kv_heads, shape.head_dim, &bytes[..side]);
        let v = match sides {
            1 => beginnings(&k, &shape, bytes),
            _ => View::flat(element, shape.kv_heads, shape.value_dim, &bytes[side..]),
        };
        cpu.attention(&mut out, &q, &k, &v, depth - tokens, &shape, &mut scratch);
    })
}

/// The first elements of the heads of `keys`.
fn beginnings<'a>(keys: &View<'a>, shape: &AttentionShape, bytes: &'a [u8]) -> View<'a> {
    let layout = RowLayout {
        head_dim: shape.value_dim,
        ..*keys.layout()
    };
    let run = Run {
        start_row: 0,
        rows: keys.rows().len(),
        bytes,
    };
    View::from_runs(layout, run, &[]).expect("values are shorter than keys")
}

/// Stored rows; sixteen, over and over.
fn cache(cpu: &Cpu, element: ElementType, shape: &AttentionShape, rows: usize) -> Vec<u8> {
    let width = shape.kv_heads * shape.head_dim;
    let x: Vec<f32> = (0..16 * width)
        .map(|i| (i % 17) as f32 * 0.1 - 0.8)
        .collect();
    let mut bytes = vec![0; element.bytes(x.len())];
    cpu.store_rows(element, &mut bytes, &x);
    bytes.repeat(rows.div_ceil(16))
}
