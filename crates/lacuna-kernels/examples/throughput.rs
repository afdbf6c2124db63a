//! What the kernels reach on this machine, and how much that is of what the machine can do: GB/s of
//! weights for few tokens, GMAC/s for many. Limit and kernel are measured in turn; each figure is
//! the median of several passes.
//!
//! `cargo run --release -p lacuna-kernels --example throughput -- [threads] [filter]`

use std::num::NonZeroUsize;
use std::time::Instant;

use half::f16;
use lacuna_kernels::{
    Activations, AttentionShape, Cpu, CpuConfig, DType, ElementType, Matrix, View,
};

/// More than the last-level cache holds, so that weights come from memory.
const WEIGHTS: usize = 256 << 20;

/// Passes of which the median is shown.
const PASSES: usize = 7;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let threads = arguments.next().map_or(Ok(2), |threads| threads.parse())?;
    let filter = arguments.next().unwrap_or_default();
    let threads = NonZeroUsize::new(threads).ok_or("at least one thread")?;
    let cpu = Cpu::new(CpuConfig {
        threads,
        level: None,
    })?;
    let memory = vec![1; WEIGHTS];
    println!("{} with {threads} threads", cpu.level().name());
    limits(&cpu, &memory);
    for dtype in DType::ALL {
        if dtype.name().contains(&filter) {
            for (rows, cols) in [(3072, 1024), (1024, 3072)] {
                matmul(&cpu, &memory, dtype, rows, cols)?;
            }
        }
    }
    if "attention".contains(&filter) {
        for (tokens, rows) in [(1, 4096), (1, 16384), (512, 512), (512, 4096)] {
            attention(&cpu, tokens, rows);
        }
    }
    Ok(())
}

fn limits(cpu: &Cpu, memory: &[u8]) {
    println!(
        "limits: {:.1} GB/s, {:.0} int8 GMAC/s, {:.0} f32 GMAC/s, {:.2} us to start and end an operation",
        1e-9 * median(|| cpu.measure_read(memory)),
        1e-9 * median(|| cpu.measure_int8_dot()),
        1e-9 * median(|| cpu.measure_f32_fma()),
        1e6 * median(|| cpu.measure_barrier()),
    );
}

fn matmul(
    cpu: &Cpu,
    memory: &[u8],
    dtype: DType,
    rows: usize,
    cols: usize,
) -> Result<(), Box<dyn std::error::Error>> {
    let size = rows * dtype.row_bytes(cols).ok_or("whole blocks")?;
    let copies = (WEIGHTS / size).max(2);
    let bytes: Vec<u8> = (0..copies * size)
        .map(|i| if i % 2 == 0 { i as u8 } else { 0x11 })
        .collect();
    let matrices: Result<Vec<Matrix<'_>>, _> = bytes
        .chunks_exact(size)
        .map(|bytes| Matrix::new(dtype, rows, cols, bytes))
        .collect();
    let matrices = matrices?;
    print!("{dtype:>5} {rows}x{cols}:");
    for tokens in [1, 2, 4, 8, 512] {
        let many = tokens > 8;
        let used = if many { 8 } else { matrices.len() };
        let work = (if many { tokens * rows * cols } else { size } * used) as f64;
        let limit = || match (many, dtype.is_quantized()) {
            (false, _) => cpu.measure_read(memory),
            (true, true) => cpu.measure_int8_dot(),
            (true, false) => cpu.measure_f32_fma(),
        };
        let mut product = product(cpu, &matrices[..used], tokens);
        let mut passes = [(); PASSES].map(|()| {
            let limit = limit();
            let rate = work / time(&mut product);
            (rate, rate / limit)
        });
        passes.sort_by(|a, b| a.1.total_cmp(&b.1));
        let (rate, share) = passes[PASSES / 2];
        let unit = if many { "GMAC/s" } else { "GB/s" };
        print!(
            "  {tokens}: {:.1} {unit} {:.0}%",
            rate * 1e-9,
            share * 100.0
        );
    }
    println!();
    Ok(())
}

/// Multiplies all matrices with the same activations, quantized once.
fn product(cpu: &Cpu, matrices: &[Matrix<'_>], tokens: usize) -> impl FnMut() {
    let (rows, cols) = (matrices[0].rows(), matrices[0].cols());
    let x = vec![0.5; tokens * cols];
    let mut storage = vec![0; Activations::storage_bytes(tokens, cols).unwrap_or(0) + 64];
    let start = storage.as_ptr().align_offset(64);
    let mut out = vec![0.0; tokens * rows];
    move || {
        let x = cpu.activations(&x, tokens, cols, &mut storage[start..]);
        for matrix in matrices {
            cpu.matmul(&mut out, &x, matrix);
        }
    }
}

/// One layer of 16 query and 8 KV heads of 128, f16, causal.
fn attention(cpu: &Cpu, tokens: usize, rows: usize) {
    let shape = AttentionShape {
        query_heads: 16,
        kv_heads: 8,
        head_dim: 128,
        scale: 128_f32.powf(-0.5),
        window: None,
    };
    let layers = if tokens == 1 {
        (WEIGHTS / (rows * 4096)).max(2)
    } else {
        4
    };
    let row: Vec<u8> = f16::from_f32(0.25).to_le_bytes().repeat(1024);
    let caches: Vec<Vec<u8>> = (0..2 * layers).map(|_| row.repeat(rows)).collect();
    let q = vec![0.1; tokens * 2048];
    let mut out = vec![0.0; q.len()];
    let mut scratch = vec![0.0; Cpu::attention_scratch_len(1, rows, &shape)];
    let mut pass = || {
        for pair in caches.chunks_exact(2) {
            let [k, v] = [0, 1].map(|side| View::flat(ElementType::F16, 8, 128, &pair[side]));
            cpu.attention(&mut out, &q, &k, &v, rows - tokens, &shape, &mut scratch);
        }
    };
    let seconds = median(|| time(&mut pass)) / layers as f64;
    let pairs = tokens as f64 * (rows as f64 - tokens as f64 / 2.0);
    println!(
        "attention f16, {tokens} tokens on {rows} rows: {:.2} ms, {:.1} GB/s, {:.0} GMAC/s",
        seconds * 1e3,
        (rows * 4096) as f64 / seconds / 1e9,
        pairs * 2.0 * 2048.0 / seconds / 1e9,
    );
}

fn median(mut measure: impl FnMut() -> f64) -> f64 {
    let mut values = [(); PASSES].map(|()| measure());
    values.sort_by(f64::total_cmp);
    values[PASSES / 2]
}

fn time(f: impl FnOnce()) -> f64 {
    let start = Instant::now();
    f();
    start.elapsed().as_secs_f64()
}
