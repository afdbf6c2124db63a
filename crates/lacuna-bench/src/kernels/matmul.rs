//! Products of weight matrices, which follow each other in memory, and the same activations.

use anyhow::{Context, Result};
use lacuna_kernels::{Activations, MatmulPrecision, Matrix};

use super::cases::Matmul;
use super::measure::{Bench, Limit, Measured, Work};

/// The alignment of quantized activations.
const LINE: usize = 64;

pub(super) fn measure(bench: &mut Bench<'_>, case: &Matmul) -> Result<Measured> {
    let Matmul {
        dtype,
        rows,
        cols,
        tokens,
    } = *case;
    let row_bytes = dtype.row_bytes(cols).context("rows of whole blocks")?;
    let size = rows * row_bytes;
    let cpu = bench.cpu;
    let memory = bench.memory(size);
    let matrices: Vec<Matrix<'_>> = memory
        .chunks_exact(size)
        .map(|bytes| Matrix::new(dtype, rows, cols, bytes))
        .collect::<Result<_, _>>()?;
    let x: Vec<f32> = (0..tokens * cols)
        .map(|i| (i % 13) as f32 * 0.1 - 0.6)
        .collect();
    let mut storage = vec![0; Activations::storage_bytes(tokens, cols).unwrap_or(0) + LINE];
    let start = storage.as_ptr().align_offset(LINE).min(LINE);
    let x = cpu.activations(&x, tokens, cols, &mut storage[start..]);
    let mut out = vec![0.0; tokens * rows];
    let work = Work {
        bytes: size,
        macs: tokens * rows * cols,
        arithmetic: match (dtype.is_quantized(), cpu.precision()) {
            (true, _) => Limit::Int8,
            (false, MatmulPrecision::F32) => Limit::F32,
            (false, MatmulPrecision::Bf16) => Limit::Bf16,
        },
        from_memory: true,
    };
    Ok(bench.measure(work, |call| {
        cpu.matmul(&mut out, &x, &matrices[call % matrices.len()]);
    }))
}
