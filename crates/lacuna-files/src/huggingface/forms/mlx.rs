//! MLX: whole numbers of a few bits, a scale and a bias for each group of columns.
//!
//! ```text
//! X.weight [.., rows, columns x bits / 32] u32    numbers one after another from the lowest bit on
//! X.scales [.., rows, groups]
//! X.biases [.., rows, groups]                     weight = scale * number + bias
//! ```
//!
//! Up to 4 bits become `Q4_1`, 5 bits `Q5_1`; more are rounded to `Q8_0`. In the mode `mxfp4` numbers are
//! floats of 4 bits, scales exponents, and there are no biases.

use lacuna_kernels::DType;
use serde_json::{Map, Value};

use super::blocks::{BLOCK, Grouped, Levels, Order, Target, Zero};
use super::part::{Floats, Part, Words};
use super::{FormError, Made, Table, mxfp4};
use crate::conversion::{ConversionError, Rows};

pub(super) fn read(settings: &Map<String, Value>, table: &mut Table<'_>) -> Result<(), FormError> {
    let usual = Variant::of(settings, None)?;
    for (module, name) in table.ending(".scales") {
        let weight = format!("{module}.weight");
        let variant = match settings.get(module) {
            None | Some(Value::Bool(true)) => usual,
            Some(Value::Object(own)) => Variant::of(own, Some(Variant::USUAL))?,
            Some(_) => {
                return Err(super::unsupported(settings, module, "group_size and bits"));
            }
        };
        let packed = table.require(&weight, name)?.words()?;
        let scales = table.require(name, &weight)?;
        let made = match variant.mode {
            Mode::Affine => {
                let biases = table.require(&format!("{module}.biases"), &weight)?;
                affine(module, variant, packed, scales, biases)?
            }
            Mode::Mxfp4 => floats(module, packed, scales)?,
        };
        table.put(name, made)?;
    }
    Ok(())
}

/// What weights are called in most files: a layer's experts are a module of their own in MLX.
fn usual_name(module: &str) -> String {
    format!("{}.weight", module.replace(".switch_mlp.", ".experts."))
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Affine,
    Mxfp4,
}

/// How a matrix is quantized.
#[derive(Clone, Copy)]
struct Variant {
    mode: Mode,
    bits: usize,
    group: usize,
}

impl Variant {
    /// Of a matrix with settings of its own, where they do not say otherwise.
    const USUAL: Self = Self {
        mode: Mode::Affine,
        bits: 4,
        group: 64,
    };

    fn of(settings: &Map<String, Value>, usual: Option<Self>) -> Result<Self, FormError> {
        super::expect(settings, "mode", &["affine", "mxfp4"], "affine or mxfp4")?;
        let number = |field: &str, usual: Option<usize>, most: usize, expected| {
            let said = settings.get(field).and_then(Value::as_u64);
            let number = match settings.contains_key(field) {
                true => said.and_then(|said| usize::try_from(said).ok()),
                false => usual,
            };
            number
                .filter(|number| (1..=most).contains(number))
                .ok_or_else(|| super::unsupported(settings, field, expected))
        };
        let bits = number("bits", usual.map(|usual| usual.bits), 8, "1 to 8")?;
        // Rows of more columns are of no model.
        let size = usual.map(|usual| usual.group);
        let group = number("group_size", size, 1 << 20, "a size of groups")?;
        let mode = match super::text(settings, "mode").as_deref() {
            Some("mxfp4") => Mode::Mxfp4,
            _ => Mode::Affine,
        };
        if mode == Mode::Mxfp4 && (bits, group) != (4, BLOCK) {
            let field = if bits == 4 { "group_size" } else { "bits" };
            return Err(super::unsupported(
                settings,
                field,
                "4 bits in groups of 32",
            ));
        }
        Ok(Self { mode, bits, group })
    }
}

fn affine(
    module: &str,
    Variant { bits, group, .. }: Variant,
    packed: Words,
    scales: Part,
    biases: Part,
) -> Result<Made, FormError> {
    let (leading, words) = packed.0.rows()?;
    let bits_of_row = words.saturating_mul(32);
    let columns = bits_of_row / bits;
    let groups = columns / group;
    let expected = [leading, &[groups]].concat();
    if bits_of_row % bits != 0 || !columns.is_multiple_of(group) || groups == 0 {
        let expected = format!("rows of whole groups of {group} numbers of {bits} bits");
        return Err(packed.0.misshapen(expected));
    }
    let (scales, biases) = (scales.shaped(&expected)?, biases.shaped(&expected)?);
    let exact = match bits {
        1..=4 => Some(DType::Q4_1),
        5 => Some(DType::Q5_1),
        _ => None,
    };
    let target = Target::of(exact, columns, group);
    let name = biases.name().to_owned();
    let grouped = Grouped {
        levels: Packed {
            words: packed,
            row_words: words,
            bits,
            biases: biases.floats()?,
            groups,
        },
        scales: scales.floats()?,
        columns,
        group,
        order: Order::Consecutive(None),
        target,
        zeros: name,
    };
    Ok(grouped.made(
        usual_name(module),
        with_columns(&expected, columns),
        ["mlx", "mlx, rounded"],
    ))
}

#[derive(Debug)]
struct Packed {
    words: Words,
    row_words: usize,
    bits: usize,
    biases: Floats,
    /// Of a row.
    groups: usize,
}

impl Levels for Packed {
    fn row(&self, row: usize, levels: &mut [u8]) {
        let words = self
            .words
            .every(row * self.row_words, 1)
            .take(self.row_words);
        // What was read and not used yet, and how many bits that is.
        let (mut held, mut count) = (0u64, 0);
        let mut levels = levels.iter_mut();
        for word in words {
            held |= u64::from(word) << count;
            count += 32;
            while count >= self.bits {
                if let Some(level) = levels.next() {
                    *level = held as u8 & super::gptq::mask(self.bits);
                }
                held >>= self.bits;
                count -= self.bits;
            }
        }
    }

    fn zero(&self, row: usize, group: usize) -> Zero {
        Zero::Bias(self.biases.get(row * self.groups + group))
    }

    fn scale(&self, row: usize, group: usize) -> usize {
        row * self.groups + group
    }
}

/// A matrix of floats of 4 bits.
fn floats(module: &str, packed: Words, scales: Part) -> Result<Made, FormError> {
    let (leading, words) = packed.0.rows()?;
    let groups = words / 4;
    if !words.is_multiple_of(4) {
        return Err(packed
            .0
            .misshapen("rows of whole blocks of 32 floats of 4 bits".to_owned()));
    }
    let shape = [leading, &[groups]].concat();
    let scales = scales.shaped(&shape)?.typed(&["u8"], "u8")?;
    Ok(Made {
        name: usual_name(module),
        form: "mlx mxfp4",
        dtype: DType::Mxfp4,
        shape: with_columns(&shape, groups.saturating_mul(BLOCK)),
        rows: Box::new(Blocks {
            packed: packed.0,
            scales,
            groups,
        }),
    })
}

/// A shape with another last dimension.
fn with_columns(shape: &[usize], columns: usize) -> Vec<usize> {
    let mut shape = shape.to_vec();
    shape.pop();
    shape.push(columns);
    shape
}

#[derive(Debug)]
struct Blocks {
    packed: Part,
    scales: Part,
    /// Of a row.
    groups: usize,
}

impl Rows for Blocks {
    fn write(&self, row: usize, out: &mut [u8]) -> Result<(), ConversionError> {
        let first = row * self.groups;
        let blocks = self.packed.bytes()[first * BLOCK / 2..].as_chunks().0;
        let scales = &self.scales.bytes()[first..][..self.groups];
        let out = out.chunks_exact_mut(DType::Mxfp4.block_bytes());
        for ((block, &scale), out) in blocks.iter().zip(scales).zip(out) {
            mxfp4::write(block, scale, out).map_err(|mxfp4::NotANumber| {
                let part = self.scales.name().to_owned();
                ConversionError::NotFinite { part, row }
            })?;
        }
        Ok(())
    }
}
