//! What the kernels reach on this machine: GB/s of weights for one token, GMAC/s for many.
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

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let threads = arguments.next().map_or(Ok(2), |threads| threads.parse())?;
    let filter = arguments.next().unwrap_or_default();
    let threads = NonZeroUsize::new(threads).ok_or("at least one thread")?;
    let cpu = Cpu::new(CpuConfig {
        threads,
        level: None,
    })?;
    println!("{} with {threads} threads", cpu.level().name());
    read(&cpu);
    for dtype in DType::ALL {
        if dtype.name().contains(&filter) {
            for (rows, cols) in [(3072, 1024), (1024, 3072)] {
                matmul(&cpu, dtype, rows, cols)?;
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

/// What one thread reads from memory, for comparison.
fn read(cpu: &Cpu) {
    let words = vec![1_u64; WEIGHTS / 8];
    let pieces: Vec<&[u64]> = words.chunks(1 << 17).collect();
    let mut total = 0;
    let seconds = average(cpu, &pieces, |piece| total += piece.iter().sum::<u64>());
    assert!(total >= words.len() as u64, "every word is 1");
    println!(
        "memory, one thread: {:.1} GB/s",
        (1 << 20) as f64 / seconds / 1e9
    );
}

fn matmul(
    cpu: &Cpu,
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
        let used = if tokens > 8 { 8 } else { matrices.len() };
        let seconds = product(cpu, &matrices[..used], tokens);
        let (bandwidth, macs) = (
            size as f64 / seconds,
            (tokens * rows * cols) as f64 / seconds,
        );
        if tokens > 8 {
            print!("  {tokens}: {:.0} GMAC/s", macs / 1e9);
        } else {
            print!("  {tokens}: {:.1} GB/s", bandwidth / 1e9);
        }
    }
    println!();
    Ok(())
}

/// Seconds of one product, the activations quantized once for all.
fn product(cpu: &Cpu, matrices: &[Matrix<'_>], tokens: usize) -> f64 {
    let (rows, cols) = (matrices[0].rows(), matrices[0].cols());
    let x = vec![0.5; tokens * cols];
    let mut storage = vec![0; Activations::storage_bytes(tokens, cols).unwrap_or(0) + 64];
    let start = storage.as_ptr().align_offset(64);
    let x = cpu.activations(&x, tokens, cols, &mut storage[start..]);
    let mut out = vec![0.0; tokens * rows];
    average(cpu, matrices, |matrix| cpu.matmul(&mut out, &x, matrix))
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
    let pairs: Vec<&[Vec<u8>]> = caches.chunks_exact(2).collect();
    let seconds = average(cpu, &pairs, |pair| {
        let [k, v] = [&pair[0], &pair[1]].map(|bytes| View::flat(ElementType::F16, 8, 128, bytes));
        cpu.attention(&mut out, &q, &k, &v, rows - tokens, &shape, &mut scratch);
    });
    let pairs = tokens as f64 * (rows as f64 - tokens as f64 / 2.0);
    println!(
        "attention f16, {tokens} tokens on {rows} rows: {:.2} ms, {:.1} GB/s, {:.0} GMAC/s",
        seconds * 1e3,
        (rows * 4096) as f64 / seconds / 1e9,
        pairs * 2.0 * 2048.0 / seconds / 1e9,
    );
}

/// Average seconds `f` takes: with one thread, of its CPU time where the system tells it, so that
/// other work on the machine does not count.
fn average<T>(cpu: &Cpu, items: &[T], mut f: impl FnMut(&T)) -> f64 {
    f(&items[0]);
    let (start, before) = (Instant::now(), cpu_time());
    items.iter().for_each(&mut f);
    let total = match (before, cpu_time()) {
        (Some(before), Some(after)) if cpu.threads() == 1 => after - before,
        _ => start.elapsed().as_secs_f64(),
    };
    total / items.len() as f64
}

/// Seconds this thread has run, as of the last scheduler tick.
fn cpu_time() -> Option<f64> {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    let nanoseconds: f64 = stat.split_whitespace().next()?.parse().ok()?;
    Some(nanoseconds * 1e-9)
}
