//! CPU arithmetic for language models over views and slices.
//!
//! [`Cpu`] has the operations: products with weight matrices in their file layout, attention over
//! cached rows, norms, rotary embeddings. It chooses an instruction-set [`Level`] at run time and
//! shares each operation between its threads. No operation allocates, and none knows where memory
//! comes from: weights are [`Matrix`] borrows of a file mapping, cached rows are [`View`]s.
//!
//! ```
//! use lacuna_kernels::{Activations, Cpu, CpuConfig, DType, Matrix};
//!
//! let weights: Vec<u8> = [1.0_f32, 2.0, 3.0, 4.0].iter().flat_map(|w| w.to_le_bytes()).collect();
//! let matrix = Matrix::new(DType::F32, 2, 2, &weights)?;
//! let cpu = Cpu::new(CpuConfig::default())?;
//! let x = cpu.activations(&[10.0, 1.0], 1, 2, &mut []);
//! let mut out = [0.0; 2];
//! cpu.matmul(&mut out, &x, &matrix);
//! assert_eq!(out, [12.0, 34.0]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![expect(
    clippy::needless_range_loop,
    reason = "register tiles are arrays of arrays; loops over their indices read best"
)]

mod activations;
mod attention;
mod columns;
mod cpu;
mod decode;
mod dtype;
mod element;
mod elementwise;
mod experts;
mod float;
mod grid;
mod level;
mod limits;
mod matrix;
mod processor;
mod quantized;
mod recurrence;
#[cfg(target_arch = "x86_64")]
mod rounded;
mod share;
mod simd;
mod store;
mod threads;
mod tile;
mod view;

pub use activations::Activations;
pub use attention::{AttentionShape, Cached, Mask, Sequences, SharedRows};
pub use columns::{ColumnLayout, Columns, NotFinite};
pub use cpu::{Cpu, CpuConfig, CpuError, MatmulPrecision, PrecisionMode};
pub use dtype::{DType, UnknownDType};
pub use element::{ElementType, HeadDimError, UnknownElementType};
pub use elementwise::activation::Activation;
pub use elementwise::hadamard::Smoothing;
pub use elementwise::heads::{HeadOrder, HeadRows};
pub use elementwise::rope::RopeStyle;
pub use experts::{
    Expert, ExpertActivations, ExpertInput, GroupScore, Groups, Routes, Routing, Scores,
};
pub use level::Level;
pub use matrix::{Matrix, ShapeError};
pub use recurrence::{Convolution, KeyHeads, Rule, Scan, ScanShape, State};
pub use view::{RowLayout, Run, RunMut, Runs, View, ViewError};
