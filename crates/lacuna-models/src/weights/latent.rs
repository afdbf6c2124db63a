//! Matrices that heads of latent attention have of their own.
//!
//! Files have them apart, or in one tensor, of each head first the rows that make keys, then those that
//! make values. What values are made with is used there as it is. What keys are made with is needed
//! transposed, so it is turned round once, when it is loaded, and takes memory of its own.

use half::{bf16, f16};
use lacuna_kernels::Matrix;

use super::Linear;
use super::source::Source;
use crate::error::LoadError;
use crate::families::Spelling;
use crate::program::{ExpertsSpec, TensorName};
use crate::spec::{Attention, Latent, ModelSpec};
use lacuna_files::{DType, Tensor, Tensors};

/// The parts that files may have apart.
const KEYS: &str = "attn_k_b";
const VALUES: &str = "attn_v_b";

/// The part that is both.
const BOTH: &str = "attn_kv_b";

/// What names of that part end with, in files of either kind.
const ENDINGS: [&str; 2] = [".attn_kv_b.weight", ".self_attn.kv_b_proj.weight"];

/// A matrix for each head that is made when a model is loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Derived {
    /// The tensor that it is made of.
    pub(crate) from: String,
    /// What it is stored as.
    pub(crate) dtype: DType,
    /// `[heads, rows, columns]`
    pub(crate) shape: [usize; 3],
}

impl Derived {
    fn of(from: &str, stored: &str, attention: &Attention, latent: &Latent) -> Self {
        Self {
            from: from.to_owned(),
            dtype: turned_type(stored.parse().unwrap_or(DType::F32)),
            shape: [attention.query_heads, latent.rank, latent.key_dim],
        }
    }

    pub(crate) fn bytes(&self) -> usize {
        let elements: usize = self.shape.iter().product();
        elements / self.dtype.block_len() * self.dtype.block_bytes()
    }
}

/// What is made when a model of `spec` is loaded from a file with `tensors`.
pub(crate) fn derived(tensors: &Tensors, spec: &ModelSpec) -> Vec<Derived> {
    let derived = tensors.iter().filter_map(|tensor| {
        let mut blocks = ENDINGS
            .iter()
            .map(|ending| tensor.name.strip_suffix(ending));
        let block = blocks.find_map(|block| block)?;
        let layer: usize = block.rsplit('.').next()?.parse().ok()?;
        let attention = spec.layer(layer)?.attention.as_ref()?;
        let is_apart = tensors.contains(&format!("{block}.{KEYS}.weight"));
        let made = Derived::of(
            tensor.name,
            tensor.type_name,
            attention,
            attention.latent.as_ref()?,
        );
        (!is_apart).then_some(made)
    });
    derived.collect()
}

/// The type that elements have when they are turned round. Those of blocks, whose rows would be cut across,
/// become F16: of what a block's element can be it keeps eleven bits.
fn turned_type(stored: DType) -> DType {
    match stored {
        DType::F32 | DType::F16 | DType::Bf16 => stored,
        _ => DType::F16,
    }
}

impl Source<'_> {
    /// Whether `part` is to be found in `whole`: the file does not have it apart, or no file of its kind does.
    fn has_only(&self, whole: TensorName, part: TensorName) -> bool {
        let in_whole = self.spelling == Spelling::HuggingFace || self.has(whole, "weight");
        in_whole && !self.has(part, "weight")
    }

    /// The matrices of each head where a file has them in one tensor with others; `None` where it does not,
    /// and for other tensors.
    pub(super) fn heads(&mut self, spec: &ExpertsSpec) -> Result<Option<Vec<Linear>>, LoadError> {
        let name = spec.name;
        let both = TensorName { part: BOTH, ..name };
        if !matches!(name.part, KEYS | VALUES) || !self.has_only(both, name) {
            return Ok(None);
        }
        let latent = name.layer.and_then(|layer| self.latent(layer));
        let Some(Latent {
            rank,
            key_dim,
            value_dim,
            ..
        }) = latent
        else {
            return Ok(None);
        };
        let (heads, each) = (spec.experts, key_dim + value_dim);
        let tensor = self.whole(both, &[heads * each, rank])?;
        let tensor = self.fetch.whole(tensor)?;
        let linear = |tensor: &Tensor, first, rows, columns| {
            Linear::new(tensor.clone(), first, rows, columns, None)
        };
        let linears: Result<_, _> = match name.part {
            VALUES => (0..heads)
                .map(|head| linear(&tensor, head * each + key_dim, value_dim, rank))
                .collect(),
            _ => {
                let turned = turned(&tensor, [heads, each], [rank, key_dim])?;
                (0..heads)
                    .map(|head| linear(&turned, head * rank, rank, key_dim))
                    .collect()
            }
        };
        linears.map(Some)
    }
}

/// Of each head's `each` rows of `rank` elements the first `key_dim`, with rows and columns exchanged.
fn turned(
    tensor: &Tensor,
    [heads, each]: [usize; 2],
    [rank, key_dim]: [usize; 2],
) -> Result<Tensor, LoadError> {
    let matrix = Matrix::new(tensor.dtype(), heads * each, rank, tensor.bytes());
    let matrix = matrix.map_err(|source| LoadError::Tensor {
        name: tensor.name().to_owned(),
        source,
    })?;
    let dtype = turned_type(tensor.dtype());
    let mut bytes = Vec::with_capacity(heads * rank * key_dim * dtype.block_bytes());
    let mut rows = vec![0.0; key_dim * rank];
    for head in 0..heads {
        for (row, out) in rows.chunks_exact_mut(rank).enumerate() {
            matrix.dequantize_row(head * each + row, out);
        }
        for column in 0..rank {
            let elements = rows.iter().skip(column).step_by(rank);
            match dtype {
                DType::F32 => bytes.extend(elements.flat_map(|x| x.to_le_bytes())),
                DType::Bf16 => {
                    bytes.extend(elements.flat_map(|x| bf16::from_f32(*x).to_le_bytes()))
                }
                _ => bytes.extend(elements.flat_map(|x| f16::from_f32(*x).to_le_bytes())),
            }
        }
    }
    let shape = [heads * rank, key_dim];
    Ok(Tensor::in_memory(tensor.name(), dtype, &shape, bytes))
}

#[cfg(test)]
mod tests {
    use lacuna_kernels::{Cpu, CpuConfig, ElementType};

    use super::*;

    fn values(tensor: &Tensor, rows: usize, columns: usize) -> Vec<f32> {
        let matrix = Matrix::new(tensor.dtype(), rows, columns, tensor.bytes()).expect("a shape");
        let mut values = vec![0.0; rows * columns];
        for (row, out) in values.chunks_exact_mut(columns).enumerate() {
            matrix.dequantize_row(row, out);
        }
        values
    }

    #[test]
    fn rows_for_keys_are_turned_round_and_blocks_become_f16() {
        let (heads, key_dim, value_dim, rank) = (3, 5, 4, 64);
        let rows = heads * (key_dim + value_dim);
        let x: Vec<f32> = (0..rows * rank)
            .map(|at| ((at * 37 % 251) as f32 - 125.0) / 64.0)
            .collect();
        let cpu = Cpu::new(CpuConfig::default()).expect("this machine's own level");
        for (element, stored, expected) in [
            (ElementType::F32, DType::F32, DType::F32),
            (ElementType::F16, DType::F16, DType::F16),
            (ElementType::Bf16, DType::Bf16, DType::Bf16),
            (ElementType::Q8_0, DType::Q8_0, DType::F16),
            (ElementType::Q4_0, DType::Q4_0, DType::F16),
        ] {
            let mut bytes = vec![0; element.bytes(x.len())];
            cpu.store_rows(element, &mut bytes, &x);
            let both = Tensor::in_memory("both", stored, &[rows, rank], bytes);
            let made = turned(&both, [heads, key_dim + value_dim], [rank, key_dim]);
            let made = made.expect("rows of whole blocks");
            assert_eq!(made.dtype(), expected);
            let (from, to) = (
                values(&both, rows, rank),
                values(&made, heads * rank, key_dim),
            );
            for (at, to) in to.into_iter().enumerate() {
                let (head, column, row) = (at / key_dim / rank, at / key_dim % rank, at % key_dim);
                let from = from[(head * (key_dim + value_dim) + row) * rank + column];
                let from = match expected {
                    DType::F16 => f16::from_f32(from).to_f32(),
                    _ => from,
                };
                assert_eq!(to, from, "{stored}: {head} {row} {column}");
            }
        }
    }
}
