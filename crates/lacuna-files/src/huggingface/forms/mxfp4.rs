//! Experts as gpt-oss has them: stacked, gate and up in one tensor, their rows by turns.
//!
//! ```text
//! experts.gate_up_proj_blocks [experts, 2 x inner, hidden / 32, 16] u8   two floats of 4 bits to a byte
//! experts.gate_up_proj_scales [experts, 2 x inner, hidden / 32] u8       exponents
//! experts.gate_up_proj_bias   [experts, 2 x inner]
//! experts.down_proj_*         the same of [experts, hidden, inner]
//! ```
//!
//! Where experts are not quantized, `gate_up_proj` is `[experts, hidden, 2 x inner]` and `down_proj`
//! `[experts, inner, hidden]`: columns where products take rows. Both become tensors of gates, of ups
//! and of downs, with the same numbers.

use lacuna_kernels::DType;

use super::blocks::{self, BLOCK};
use super::part::Part;
use super::{FormError, Made, Table};
use crate::conversion::{ConversionError, Rows};

/// Bytes of a block's floats.
const PACKED: usize = BLOCK / 2;

pub(super) fn read(table: &mut Table<'_>) -> Result<(), FormError> {
    for (module, name) in table.ending("_blocks") {
        let parts = matrices(module);
        let scales = table.require(&format!("{module}_scales"), name)?;
        let blocks = table.require(name, name)?.typed(&["u8"], "u8")?;
        let [ref stack @ .., groups, PACKED] = *blocks.shape() else {
            return Err(blocks.misshapen(format!("[.., {PACKED}]")));
        };
        let &[experts, rows] = stack else {
            return Err(blocks.misshapen(format!("[experts, rows, groups, {PACKED}]")));
        };
        let scales = scales.shaped(&[experts, rows, groups])?;
        let scales = scales.typed(&["u8", "f8_e8m0"], "u8")?;
        let columns = groups.saturating_mul(BLOCK);
        for part in &parts {
            let made = Made {
                name: format!("{}.weight", part.name),
                form: "mxfp4",
                dtype: DType::Mxfp4,
                shape: vec![experts, part.share(rows, &blocks)?, columns],
                rows: Box::new(Blocks {
                    blocks: blocks.clone(),
                    scales: scales.clone(),
                    groups,
                    part: part.place(),
                }),
            };
            table.put(name, made)?;
        }
    }
    read_plain(table)
}

/// Experts of a folder that are not quantized, and biases of both kinds.
pub(super) fn read_plain(table: &mut Table<'_>) -> Result<(), FormError> {
    // Stacks of other families have no biases, and lie otherwise.
    for (module, name) in table.ending(".experts.gate_up_proj_bias") {
        let [gate, up] = halves(&format!("{module}.experts.gate_up_proj"));
        let biases = table.require(name, name)?;
        let [experts, rows] = biases.matrix()?;
        let dtype = float(&biases)?;
        for part in [gate, up] {
            let made = Made {
                name: format!("{}.bias", part.name),
                form: "stacked experts",
                dtype,
                shape: vec![experts, part.share(rows, &biases)?],
                rows: Box::new(Every {
                    floats: biases.clone(),
                    columns: rows,
                    part: part.place(),
                }),
            };
            table.put(name, made)?;
        }
        for stack in ["gate_up_proj", "down_proj"] {
            let stack = format!("{module}.experts.{stack}");
            if let Some(floats) = table.tensors.find(&stack) {
                let parts = matrices(&stack);
                transpose(table, &floats.name, Part::new(floats), &parts)?;
            }
        }
    }
    Ok(())
}

/// Puts `parts` of a tensor of stacked matrices where it was, each the other way round.
pub(super) fn transpose<'a>(
    table: &mut Table<'a>,
    name: &'a str,
    floats: Part,
    parts: &[Matrix],
) -> Result<(), FormError> {
    table.take(name);
    let &[experts, columns, rows] = floats.shape() else {
        return Err(floats.misshapen("[experts, columns, rows]".to_owned()));
    };
    let dtype = float(&floats)?;
    for part in parts {
        let made = Made {
            name: format!("{}.weight", part.name),
            form: "transposed",
            dtype,
            shape: vec![experts, part.share(rows, &floats)?, columns],
            rows: Box::new(Columns {
                floats: floats.clone(),
                rows,
                columns,
                part: part.place(),
            }),
        };
        table.put(name, made)?;
    }
    Ok(())
}

/// A matrix among those of a tensor.
pub(super) struct Matrix {
    /// Without `weight` or `bias`.
    name: String,
    first: usize,
    step: usize,
}

/// Every so many rows of each expert, from one on.
#[derive(Debug, Clone, Copy)]
struct Place {
    first: usize,
    step: usize,
}

impl Matrix {
    /// The only one of a tensor.
    pub(super) fn whole(module: &str) -> Self {
        Self {
            name: module.to_owned(),
            first: 0,
            step: 1,
        }
    }

    /// Of `rows` rows of an expert, those of this matrix.
    fn share(&self, rows: usize, of: &Part) -> Result<usize, FormError> {
        match rows.is_multiple_of(self.step) {
            true => Ok(rows / self.step),
            false => Err(of.misshapen("an even number of rows of gates and ups".to_owned())),
        }
    }

    fn place(&self) -> Place {
        let Self { first, step, .. } = *self;
        Place { first, step }
    }
}

impl Place {
    /// Where row `row` of this matrix is among all.
    fn of(self, row: usize) -> usize {
        self.first + row * self.step
    }
}

/// Gate and up, whose rows alternate.
fn halves(module: &str) -> [Matrix; 2] {
    [("gate_proj", 0), ("up_proj", 1)].map(|(part, first)| Matrix {
        name: module.replace("gate_up_proj", part),
        first,
        step: 2,
    })
}

/// The matrices that a tensor holds.
fn matrices(module: &str) -> Vec<Matrix> {
    match module.ends_with(".gate_up_proj") {
        true => halves(module).into(),
        false => vec![Matrix::whole(module)],
    }
}

/// The type of a tensor of floats.
fn float(part: &Part) -> Result<DType, FormError> {
    let part = part
        .clone()
        .typed(&["f32", "f16", "bf16"], "f32, f16 or bf16")?;
    Ok(match part.type_name() {
        "f32" => DType::F32,
        "f16" => DType::F16,
        _ => DType::Bf16,
    })
}

/// Rows of blocks, of which neighbours share a byte: ours are sixteen apart.
#[derive(Debug)]
struct Blocks {
    blocks: Part,
    scales: Part,
    /// Blocks of a row.
    groups: usize,
    part: Place,
}

impl Rows for Blocks {
    fn write(&self, row: usize, out: &mut [u8]) -> Result<(), ConversionError> {
        // Rows of all experts are one after another, and each has a whole number of steps.
        let first = self.part.of(row) * self.groups;
        let blocks = self.blocks.bytes()[first * PACKED..]
            .as_chunks::<PACKED>()
            .0;
        let scales = &self.scales.bytes()[first..][..self.groups];
        let out = out.chunks_exact_mut(DType::Mxfp4.block_bytes());
        for ((block, &scale), out) in blocks.iter().zip(scales).zip(out) {
            write(block, scale, out).map_err(|NotANumber| ConversionError::NotFinite {
                part: self.scales.name().to_owned(),
                row,
            })?;
        }
        Ok(())
    }
}

/// A scale that is no number.
pub(super) struct NotANumber;

/// Writes a block of floats of which neighbours share a byte, the first in its lower half.
pub(super) fn write(packed: &[u8; PACKED], exponent: u8, out: &mut [u8]) -> Result<(), NotANumber> {
    if exponent == u8::MAX {
        return Err(NotANumber);
    }
    let mut floats = [0; BLOCK];
    for (pair, byte) in floats.chunks_exact_mut(2).zip(packed) {
        pair.copy_from_slice(&[byte & 15, byte >> 4]);
    }
    out[0] = exponent;
    blocks::write_nibbles(&floats, &mut out[1..]);
    Ok(())
}

/// Columns of stacked matrices, as rows.
#[derive(Debug)]
struct Columns {
    floats: Part,
    /// Of one matrix as it should lie.
    rows: usize,
    columns: usize,
    part: Place,
}

impl Rows for Columns {
    fn write(&self, row: usize, out: &mut [u8]) -> Result<(), ConversionError> {
        let row = self.part.of(row);
        let (expert, row) = (row / self.rows, row % self.rows);
        let size = out.len() / self.columns;
        let first = (expert * self.columns * self.rows + row) * size;
        let elements = self.floats.bytes()[first..].chunks(self.rows * size);
        for (out, element) in out.chunks_exact_mut(size).zip(elements) {
            out.copy_from_slice(&element[..size]);
        }
        Ok(())
    }
}

/// Elements of vectors, one for each expert.
#[derive(Debug)]
struct Every {
    floats: Part,
    /// Elements of a vector in the file.
    columns: usize,
    part: Place,
}

impl Rows for Every {
    fn write(&self, row: usize, out: &mut [u8]) -> Result<(), ConversionError> {
        let size = out.len() * self.part.step / self.columns.max(1);
        let vector = &self.floats.bytes()[row * self.columns * size..][..self.columns * size];
        let elements = vector.chunks_exact(size).skip(self.part.first);
        for (out, element) in out
            .chunks_exact_mut(size)
            .zip(elements.step_by(self.part.step))
        {
            out.copy_from_slice(element);
        }
        Ok(())
    }
}
