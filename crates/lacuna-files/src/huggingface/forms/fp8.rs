//! FP8: bytes that are floats of 8 bits (E4M3), with one scale for all, for each row, or for each block.
//!
//! ```text
//! X.weight [rows, columns] f8_e4m3    X.weight_scale or X.weight_scale_inv: what they are multiplied with
//! ```
//!
//! No type of weights holds the same numbers in as few bytes, so they become `Q8_0`.

use serde_json::{Map, Value};

use super::blocks::{self, ScaleTooLarge, Target};
use super::part::{Floats, Part};
use super::{FormError, Made, Table};
use crate::conversion::{ConversionError, Rows};

/// Rows and columns that share a scale in the files of DeepSeek and Qwen.
const USUAL_BLOCK: [usize; 2] = [128, 128];

/// What is said of activations and of the KV cache beside weights.
pub(super) const NOT_OF_WEIGHTS: &[&str] = &[
    ".input_scale",
    ".input_scale_ub",
    ".activation_scale",
    ".output_scale",
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".input_zero_point",
];

pub(super) fn read(settings: &Map<String, Value>, table: &mut Table<'_>) -> Result<(), FormError> {
    super::expect(settings, "fmt", &["e4m3", "float8_e4m3fn"], "e4m3")?;
    let block = match settings.get("weight_block_size") {
        None | Some(Value::Null) => USUAL_BLOCK,
        Some(value) => size(value).ok_or_else(|| {
            super::unsupported(settings, "weight_block_size", "two numbers above 0")
        })?,
    };
    read_all(block, table)
}

/// Rows and columns of a block.
pub(super) fn size(value: &Value) -> Option<[usize; 2]> {
    let sizes = value.as_array()?.iter();
    let sizes: Option<Vec<usize>> = sizes
        .map(|size| {
            usize::try_from(size.as_u64()?)
                .ok()
                .filter(|&size| size > 0)
        })
        .collect();
    sizes?.try_into().ok()
}

/// Every matrix of FP8 bytes, with blocks of this size where there are blocks.
pub(super) fn read_all(block: [usize; 2], table: &mut Table<'_>) -> Result<(), FormError> {
    table.leave_out(NOT_OF_WEIGHTS);
    for (module, name) in table.ending(".weight") {
        let weights = table.tensors.find(name).map(Part::new);
        if weights.is_none_or(|weights| weights.type_name() != "f8_e4m3") {
            continue;
        }
        let weights = table.require(name, name)?;
        let inverse = table.take(&format!("{module}.weight_scale_inv"));
        let scales = match inverse {
            Some(scales) => scales,
            None => table.require(&format!("{module}.weight_scale"), name)?,
        };
        let [rows, columns] = weights.matrix()?;
        let matrix = Matrix::new(weights, scales, block)?;
        let made = Made {
            name: name.to_owned(),
            form: matrix.form(),
            dtype: matrix.target.dtype(),
            shape: vec![rows, columns],
            rows: Box::new(matrix),
        };
        table.put(name, made)?;
    }
    Ok(())
}

#[derive(Debug)]
struct Matrix {
    weights: Part,
    columns: usize,
    scales: Floats,
    /// Rows and columns that share a scale.
    block: [usize; 2],
    /// Scales of a row.
    scale_columns: usize,
    target: Target,
}

impl Matrix {
    fn new(weights: Part, scales: Part, block: [usize; 2]) -> Result<Self, FormError> {
        let [rows, columns] = weights.matrix()?;
        let [of_rows, of_columns] = block;
        let blocks = [rows.div_ceil(of_rows), columns.div_ceil(of_columns)];
        let (block, scale_columns) = match *scales.shape() {
            [] | [1] | [1, 1] => ([rows, columns], 1),
            [count] | [count, 1] if count == rows => ([1, columns], 1),
            [down, across] if [down, across] == blocks => (block, across),
            // Groups of a row's columns.
            [down, across] if down == rows && across > 0 && columns.is_multiple_of(across) => {
                ([1, columns / across], across)
            }
            _ => {
                let expected = format!("[1], [{rows}, 1] or {blocks:?}");
                return Err(scales.misshapen(expected));
            }
        };
        Ok(Self {
            target: Target::of(None, columns, columns),
            weights,
            columns,
            scales: scales.floats()?,
            block: block.map(|size| size.max(1)),
            scale_columns,
        })
    }

    fn form(&self) -> &'static str {
        match self.target {
            Target::Rounded => "fp8, rounded",
            _ => "fp8",
        }
    }

    fn values(&self, row: usize) -> Result<Vec<f32>, ConversionError> {
        let bytes = &self.weights.bytes()[row * self.columns..][..self.columns];
        let [of_rows, of_columns] = self.block;
        let mut values = Vec::with_capacity(self.columns);
        for (index, bytes) in bytes.chunks(of_columns).enumerate() {
            let scale = self.scales.get(row / of_rows * self.scale_columns + index);
            if !scale.is_finite() {
                return Err(not_finite(&self.scales.part, row));
            }
            values.extend(bytes.iter().map(|&byte| FLOATS[usize::from(byte)] * scale));
        }
        match values.iter().all(|value| value.is_finite()) {
            true => Ok(values),
            false => Err(not_finite(&self.weights, row)),
        }
    }
}

impl Rows for Matrix {
    fn write(&self, row: usize, out: &mut [u8]) -> Result<(), ConversionError> {
        let values = self.values(row)?;
        match self.target {
            Target::Float => blocks::write_floats(&values, out),
            _ => blocks::round(&values, out).map_err(|ScaleTooLarge| {
                let part = self.scales.part.name().to_owned();
                ConversionError::ScaleTooLarge { part, row }
            })?,
        }
        Ok(())
    }
}

fn not_finite(part: &Part, row: usize) -> ConversionError {
    let part = part.name().to_owned();
    ConversionError::NotFinite { part, row }
}

/// What each byte stands for: a sign, four bits of exponent, three of fraction, no infinity, and not a
/// number where all seven bits are set (OCP 8-bit floating point, E4M3).
static FLOATS: [f32; 256] = {
    let mut floats = [0.0; 256];
    let mut byte = 0;
    while byte < 256 {
        let (exponent, fraction) = ((byte >> 3) & 15, byte & 7);
        let value = match (exponent, fraction) {
            (15, 7) => f32::NAN,
            // 2^-9 is the least above zero.
            (0, _) => fraction as f32 / 512.0,
            _ => (8 + fraction) as f32 * (1u32 << (exponent - 1)) as f32 / 512.0,
        };
        floats[byte] = if byte < 128 { value } else { -value };
        byte += 1;
    }
    floats
};
