//! What attention reaches on this machine, by element type, depth and number of tokens.
//!
//! `cargo run --release -p lacuna-kernels --example attention -- [threads] [types] [depths] [tokens]
//! [layers]`, lists separated by commas; a type is one of K and V or `k/v`. With one layer rows stay in
//! the cache.

use std::error::Error;
use std::num::NonZeroUsize;
use std::time::Instant;

use lacuna_kernels::{AttentionShape, Cpu, CpuConfig, ElementType, View};

/// More than the last-level cache holds, so that rows come from memory.
const CACHE_BYTES: usize = 128 << 20;

/// Qwen3-0.6B.
const SHAPE: AttentionShape = AttentionShape {
    query_heads: 16,
    kv_heads: 8,
    head_dim: 128,
    scale: 0.088_388_35,
    window: None,
};

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let list = |index: usize, default: &'static str| {
        arguments
            .get(index)
            .map_or(default, String::as_str)
            .split(',')
    };
    let threads: NonZeroUsize = list(0, "2").next().unwrap_or_default().parse()?;
    let cpu = Cpu::new(CpuConfig {
        threads,
        level: None,
    })?;
    println!("{} with {threads} threads", cpu.level().name());
    for types in list(1, "f16,bf16,f32,q8_0,q4_0") {
        let (k, v) = types.split_once('/').unwrap_or((types, types));
        let elements = [k.parse()?, v.parse()?];
        for depth in list(2, "4096,16384") {
            for tokens in list(3, "1,2,8,16") {
                let (depth, tokens) = (depth.parse()?, tokens.parse()?);
                let layers = arguments.get(4).map(|layers| layers.parse()).transpose()?;
                attention(&cpu, elements, depth, tokens, layers);
            }
        }
    }
    Ok(())
}

/// One layer, causal, over `rows` rows.
fn attention(
    cpu: &Cpu,
    elements: [ElementType; 2],
    rows: usize,
    tokens: usize,
    layers: Option<usize>,
) {
    let row_bytes = elements.map(|element| element.bytes(SHAPE.kv_heads * SHAPE.head_dim));
    let bytes = rows * (row_bytes[0] + row_bytes[1]);
    let layers = layers.unwrap_or((CACHE_BYTES / bytes).max(2));
    let sides = [0, 1].map(|side| cache(cpu, elements[side], rows, layers));
    let width = SHAPE.query_heads * SHAPE.head_dim;
    let q: Vec<f32> = (0..tokens * width)
        .map(|i| (i % 13) as f32 * 0.1 - 0.6)
        .collect();
    let mut out = vec![0.0; q.len()];
    let mut scratch = vec![0.0; Cpu::attention_scratch_len(tokens.min(16), rows, &SHAPE)];
    let mut times: Vec<f64> = (0..(3 * layers).max(20))
        .map(|call| {
            let [k, v] = [0, 1].map(|side| {
                let start = call % layers * rows * row_bytes[side];
                let bytes = &sides[side][start..start + rows * row_bytes[side]];
                View::flat(elements[side], SHAPE.kv_heads, SHAPE.head_dim, bytes)
            });
            let start = Instant::now();
            cpu.attention(&mut out, &q, &k, &v, rows - tokens, &SHAPE, &mut scratch);
            start.elapsed().as_secs_f64()
        })
        .skip(2)
        .collect();
    times.sort_by(f64::total_cmp);
    let seconds = times[times.len() / 2];
    let pairs = tokens as f64 * (rows as f64 - (tokens - 1) as f64 / 2.0);
    println!(
        "{}/{} {tokens:4} tokens on {rows:5} rows: {:8.3} ms, {:5.1} GB/s, {:6.1} GMAC/s",
        elements[0],
        elements[1],
        seconds * 1e3,
        bytes as f64 / seconds / 1e9,
        pairs * 2.0 * width as f64 / seconds / 1e9,
    );
}

/// Rows of `layers` layers.
fn cache(cpu: &Cpu, element: ElementType, rows: usize, layers: usize) -> Vec<u8> {
    let width = SHAPE.kv_heads * SHAPE.head_dim;
    let x: Vec<f32> = (0..16 * width)
        .map(|i| (i % 17) as f32 * 0.1 - 0.8)
        .collect();
    let mut bytes = vec![0; element.bytes(x.len())];
    cpu.store_rows(element, &mut bytes, &x);
    bytes.repeat((rows * layers).div_ceil(16))
}
