//! Causal attention of one layer over as many caches as memory is to be gone through.

use lacuna_kernels::{AttentionShape, Cpu, ElementType, View};

use super::cases::{Attention, MOST_DECODED};
use super::measure::{Bench, Measured, Work};

/// Qwen3-0.6B.
const SHAPE: AttentionShape = AttentionShape::causal(16, 8, 128, 0.088_388_35);

pub(super) fn measure(bench: &mut Bench<'_>, case: &Attention) -> Measured {
    let Attention {
        element,
        depth,
        tokens,
    } = *case;
    let side = depth * element.bytes(SHAPE.kv_heads * SHAPE.head_dim);
    let cpu = bench.cpu;
    let caches = (bench.extent.bytes / (2 * side)).max(1);
    let rows = cache(cpu, element, 2 * caches * depth);
    let width = SHAPE.query_heads * SHAPE.head_dim;
    let q: Vec<f32> = (0..tokens * width)
        .map(|i| (i % 13) as f32 * 0.1 - 0.6)
        .collect();
    let mut out = vec![0.0; q.len()];
    let split = tokens.min(MOST_DECODED);
    let mut scratch = vec![0.0; Cpu::attention_scratch_len(split, depth, &SHAPE)];
    // Query `i` sees `depth - tokens + 1 + i` rows, of K and of V.
    let seen = tokens * (depth - tokens) + tokens * (tokens + 1) / 2;
    let work = Work {
        bytes: 2 * side,
        macs: 2 * seen * width,
        integers: false,
        from_memory: true,
    };
    bench.measure(work, |call| {
        let first = call % caches * 2 * side;
        let [k, v] = [0, 1].map(|index| {
            let bytes = &rows[first + index * side..][..side];
            View::flat(element, SHAPE.kv_heads, SHAPE.head_dim, bytes)
        });
        cpu.attention(&mut out, &q, &k, &v, depth - tokens, &SHAPE, &mut scratch);
    })
}

/// Stored rows; sixteen, over and over.
fn cache(cpu: &Cpu, element: ElementType, rows: usize) -> Vec<u8> {
    let width = SHAPE.kv_heads * SHAPE.head_dim;
    let x: Vec<f32> = (0..16 * width)
        .map(|i| (i % 17) as f32 * 0.1 - 0.8)
        .collect();
    let mut bytes = vec![0; element.bytes(x.len())];
    cpu.store_rows(element, &mut bytes, &x);
    bytes.repeat(rows.div_ceil(16))
}
