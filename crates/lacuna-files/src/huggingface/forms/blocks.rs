//! Blocks of weights that can be computed with, made of what other forms hold.

use half::f16;
use lacuna_kernels::DType;

use super::Made;
use super::part::{Floats, Words};
use crate::conversion::{ConversionError, Rows};

/// Weights of a block of every type that is written here.
pub(super) const BLOCK: usize = 32;

/// What a form's weights become.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Target {
    /// Blocks of a type that holds the same whole numbers, with the same scales.
    Exact(DType),
    /// `Q8_0` of what the weights are worth. Off by no more than 1/254 of the largest of 32 weights.
    Rounded,
    /// `F32`, where rows are not whole blocks.
    Float,
}

impl Target {
    /// `exact`, or else what comes near it, for rows of `columns` weights in groups of `group`.
    pub(super) fn of(exact: Option<DType>, columns: usize, group: usize) -> Self {
        let whole_groups = group.is_multiple_of(BLOCK) || group >= columns;
        match exact {
            _ if !columns.is_multiple_of(BLOCK) => Self::Float,
            Some(dtype) if whole_groups => Self::Exact(dtype),
            _ => Self::Rounded,
        }
    }

    pub(super) fn dtype(self) -> DType {
        match self {
            Self::Exact(dtype) => dtype,
            Self::Rounded => DType::Q8_0,
            Self::Float => DType::F32,
        }
    }
}

/// What a stored number 0 to 255 is taken from.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Zero {
    /// `scale * (level - zero)`
    Level(i32),
    /// `scale * level + bias`
    Bias(f32),
}

/// Numbers 0 to 255 with a scale and a zero for each group of a row's columns, in some packing.
pub(super) trait Levels: std::fmt::Debug + Send + Sync {
    /// The numbers of a row.
    fn row(&self, row: usize, levels: &mut [u8]);

    /// The zero of a group of a row.
    fn zero(&self, row: usize, group: usize) -> Zero;

    /// Where the scale of a group of a row is.
    fn scale(&self, row: usize, group: usize) -> usize;
}

/// Which group each column of a row is of.
#[derive(Debug)]
pub(super) enum Order {
    /// Groups of so many columns lie one after another; the tensor, where there is one, says the same.
    Consecutive(Option<Words>),
    /// The group of each column.
    Listed(Words),
}

/// A matrix of whole numbers, as the kernels' blocks.
#[derive(Debug)]
pub(super) struct Grouped<L> {
    pub(super) levels: L,
    pub(super) scales: Floats,
    pub(super) columns: usize,
    /// Columns of a group.
    pub(super) group: usize,
    pub(super) order: Order,
    pub(super) target: Target,
    /// The tensor that zero points are in.
    pub(super) zeros: String,
}

impl<L: Levels> Rows for Grouped<L> {
    fn check(&self) -> Result<(), ConversionError> {
        let groups = self.columns.div_ceil(self.group.max(1));
        let (words, listed) = match &self.order {
            Order::Consecutive(None) => return Ok(()),
            Order::Consecutive(Some(words)) => (words, false),
            Order::Listed(words) => (words, true),
        };
        for column in 0..self.columns {
            let found = words.get(column);
            let expected = match listed {
                true if (found as usize) < groups => continue,
                true => format!("one of 0 to {}", groups.saturating_sub(1)),
                false if found as usize == column / self.group => continue,
                false => format!("{}, since `desc_act` is false,", column / self.group),
            };
            return Err(ConversionError::Group {
                part: words.0.name().to_owned(),
                column,
                found: found as i32,
                expected,
            });
        }
        Ok(())
    }

    fn write(&self, row: usize, out: &mut [u8]) -> Result<(), ConversionError> {
        let mut levels = vec![0; self.columns];
        self.levels.row(row, &mut levels);
        match self.target {
            Target::Exact(dtype) => self.exact(row, &levels, dtype, out),
            Target::Rounded => {
                let values = self.values(row, &levels)?;
                round(&values, out).map_err(|ScaleTooLarge| self.too_large(row))
            }
            Target::Float => {
                let values = self.values(row, &levels)?;
                write_floats(&values, out);
                Ok(())
            }
        }
    }
}

impl<L: Levels + 'static> Grouped<L> {
    /// What takes a tensor's place, of a form that is called `exact`, or `rounded` where it loses something.
    pub(super) fn made(
        self,
        name: String,
        shape: Vec<usize>,
        [exact, rounded]: [&'static str; 2],
    ) -> Made {
        Made {
            name,
            form: match self.target {
                Target::Rounded => rounded,
                Target::Exact(_) | Target::Float => exact,
            },
            dtype: self.target.dtype(),
            shape,
            rows: Box::new(self),
        }
    }
}

impl<L: Levels> Grouped<L> {
    fn scale(&self, row: usize, group: usize) -> Result<f32, ConversionError> {
        let scale = self.scales.get(self.levels.scale(row, group));
        match scale.is_finite() {
            true => Ok(scale),
            false => Err(self.not_finite(self.scales.part.name(), row)),
        }
    }

    fn bias(&self, row: usize, bias: f32) -> Result<f32, ConversionError> {
        match bias.is_finite() {
            true => Ok(bias),
            false => Err(self.not_finite(&self.zeros, row)),
        }
    }

    fn not_finite(&self, part: &str, row: usize) -> ConversionError {
        let part = part.to_owned();
        ConversionError::NotFinite { part, row }
    }

    fn too_large(&self, row: usize) -> ConversionError {
        let part = self.scales.part.name().to_owned();
        ConversionError::ScaleTooLarge { part, row }
    }

    /// A column that is said to be of a group that there is not.
    fn no_group(&self, column: usize, group: usize, groups: usize) -> ConversionError {
        let part = match &self.order {
            Order::Consecutive(None) => self.scales.part.name(),
            Order::Consecutive(Some(words)) | Order::Listed(words) => words.0.name(),
        };
        ConversionError::Group {
            part: part.to_owned(),
            column,
            found: group as i32,
            expected: format!("one of 0 to {}", groups.saturating_sub(1)),
        }
    }

    /// What a row's numbers are worth.
    fn values(&self, row: usize, levels: &[u8]) -> Result<Vec<f32>, ConversionError> {
        let groups = self.columns.div_ceil(self.group);
        let groups: Vec<(f32, Zero)> = (0..groups)
            .map(|group| {
                let zero = match self.levels.zero(row, group) {
                    Zero::Bias(bias) => Zero::Bias(self.bias(row, bias)?),
                    level => level,
                };
                Ok((self.scale(row, group)?, zero))
            })
            .collect::<Result<_, ConversionError>>()?;
        let value = |(column, &level): (usize, &u8)| {
            let group = match &self.order {
                Order::Consecutive(_) => column / self.group,
                Order::Listed(words) => words.get(column) as usize,
            };
            // Checked before, but a file that is mapped may have been written again since.
            match groups.get(group) {
                Some((scale, Zero::Level(zero))) => Ok(scale * (i32::from(level) - zero) as f32),
                Some((scale, Zero::Bias(bias))) => Ok(scale * f32::from(level) + bias),
                None => Err(self.no_group(column, group, groups.len())),
            }
        };
        levels.iter().enumerate().map(value).collect()
    }

    /// Writes blocks that hold the same numbers.
    fn exact(
        &self,
        row: usize,
        levels: &[u8],
        dtype: DType,
        out: &mut [u8],
    ) -> Result<(), ConversionError> {
        let blocks = levels.as_chunks::<BLOCK>().0.iter();
        let out = out.chunks_exact_mut(dtype.block_bytes());
        for (block, (levels, out)) in blocks.zip(out).enumerate() {
            let group = block * BLOCK / self.group;
            let scale = half(self.scale(row, group)?).ok_or_else(|| self.too_large(row))?;
            out[..2].copy_from_slice(&scale);
            let body = match self.levels.zero(row, group) {
                Zero::Level(zero) => {
                    let fits = write_signed(dtype, levels, zero, &mut out[2..]);
                    fits.map_err(|expected| ConversionError::ZeroPoint {
                        part: self.zeros.clone(),
                        row,
                        found: zero,
                        expected,
                    })?;
                    continue;
                }
                Zero::Bias(bias) => {
                    let bias = half(self.bias(row, bias)?);
                    out[2..4].copy_from_slice(&bias.ok_or_else(|| self.too_large(row))?);
                    &mut out[4..]
                }
            };
            write_unsigned(dtype, levels, body);
        }
        Ok(())
    }
}

/// A number in the bytes of a binary16, unless it is larger than any.
fn half(value: f32) -> Option<[u8; 2]> {
    let half = f16::from_f32(value);
    half.is_finite().then(|| half.to_le_bytes())
}

/// Numbers less their zero point. The error is the zero point with which all would fit.
fn write_signed(dtype: DType, levels: &[u8; BLOCK], zero: i32, out: &mut [u8]) -> Result<(), i32> {
    match dtype {
        DType::Q8_0 => {
            for (out, &level) in out.iter_mut().zip(levels) {
                let value = i8::try_from(i32::from(level) - zero);
                *out = value.map_err(|_| 128)? as u8;
            }
        }
        DType::Q4_0 => {
            let shifted = |level: u8| {
                let value = i32::from(level) - zero + 8;
                u8::try_from(value)
                    .ok()
                    .filter(|&value| value < 16)
                    .ok_or(8)
            };
            let mut moved = [0; BLOCK];
            for (moved, &level) in moved.iter_mut().zip(levels) {
                *moved = shifted(level)?;
            }
            write_nibbles(&moved, out);
        }
        _ => {
            debug_assert_eq!(dtype, DType::Q5_0, "the types of signed numbers");
            // Four bits less a zero point of four: always -15 to 15.
            let moved = levels.map(|level| (i32::from(level) - zero + 16) as u8 & 31);
            write_fives(&moved, out);
        }
    }
    Ok(())
}

/// Numbers as they are, for blocks with a minimum.
fn write_unsigned(dtype: DType, levels: &[u8; BLOCK], out: &mut [u8]) {
    match dtype {
        DType::Q4_1 => write_nibbles(levels, out),
        _ => {
            debug_assert_eq!(dtype, DType::Q5_1, "the types of unsigned numbers");
            write_fives(levels, out);
        }
    }
}

/// Sixteen low halves, then sixteen high ones.
pub(super) fn write_nibbles(levels: &[u8; BLOCK], out: &mut [u8]) {
    for (index, out) in out[..16].iter_mut().enumerate() {
        *out = (levels[index] & 15) | ((levels[index + 16] & 15) << 4);
    }
}

/// Fifth bits, then nibbles.
fn write_fives(levels: &[u8; BLOCK], out: &mut [u8]) {
    let bits = levels.iter().enumerate();
    let fifth = bits.fold(0u32, |all, (index, level)| {
        all | (u32::from(level >> 4) & 1) << index
    });
    out[..4].copy_from_slice(&fifth.to_le_bytes());
    write_nibbles(levels, &mut out[4..]);
}

/// A scale that a binary16 cannot hold.
pub(super) struct ScaleTooLarge;

/// Writes `Q8_0` blocks of whole rows, each weight off by half a step at most: a step is 1/127 of the
/// block's largest weight, rounded up so that this one fits.
pub(super) fn round(values: &[f32], out: &mut [u8]) -> Result<(), ScaleTooLarge> {
    let blocks = values.as_chunks::<BLOCK>().0.iter();
    for (values, out) in blocks.zip(out.chunks_exact_mut(DType::Q8_0.block_bytes())) {
        let largest = values
            .iter()
            .fold(0.0f32, |most, value| most.max(value.abs()));
        let least = largest / 127.0;
        let mut step = f16::from_f32(least);
        if step.to_f32() < least {
            step = f16::from_bits(step.to_bits() + 1);
        }
        if !step.is_finite() {
            return Err(ScaleTooLarge);
        }
        out[..2].copy_from_slice(&step.to_le_bytes());
        let step = step.to_f32();
        for (out, value) in out[2..].iter_mut().zip(values) {
            // All are zero where the step is.
            let level = if step > 0.0 { value / step } else { 0.0 };
            *out = level.round() as i8 as u8;
        }
    }
    Ok(())
}

/// Writes `F32`.
pub(super) fn write_floats(values: &[f32], out: &mut [u8]) {
    for (out, value) in out.chunks_exact_mut(4).zip(values) {
        out.copy_from_slice(&value.to_le_bytes());
    }
}
