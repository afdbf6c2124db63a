//! Weights into blocks of every element type that can be made well without knowing what they are
//! multiplied with.
//!
//! Scales are searched for ([`search`], [`nested`]); layouts are those of `ggml-common.h`. A type of
//! which published models hold plain roundings of an 8-bit or ternary kind is rounded plainly, bit for bit
//! as other programs do it.

mod nested;
mod search;

#[cfg(test)]
mod tests;

use half::{bf16, f16};

use lacuna_files::DType;
use nested::{Affine, Symmetric};
use search::{Levels, Linear, Nonlinear, Offset, largest};

/// Why values cannot be stored in a type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unfit {
    /// One of them is no finite number.
    NotFinite,
    /// One of them is larger than the type has room for.
    TooLarge,
}

/// Stores `values`, which are whole blocks of `dtype`, in `out`, which is as many blocks.
///
/// # Panics
/// For IQ2 and IQ3, which no recipe has: their points are so few that which of them is nearest matters less
/// than which weights are used most, and nothing here knows that.
pub(super) fn quantize(dtype: DType, values: &[f32], out: &mut [u8]) -> Result<(), Unfit> {
    if !values.iter().all(|value| value.is_finite()) {
        return Err(Unfit::NotFinite);
    }
    match dtype {
        DType::F32 => each(values, out, |[value]: &[f32; 1], block: &mut [u8; 4]| {
            *block = value.to_le_bytes();
            Ok(())
        }),
        DType::F16 => each(values, out, |[value]: &[f32; 1], block| {
            *block = stored(*value)?.to_le_bytes();
            Ok(())
        }),
        DType::Bf16 => each(values, out, |[value]: &[f32; 1], block| {
            let rounded = bf16::from_f32(*value);
            *block = rounded.to_le_bytes();
            rounded.is_finite().then_some(()).ok_or(Unfit::TooLarge)
        }),
        DType::Q8_0 => each(values, out, q8_0),
        DType::Q4_0 => each(values, out, q4_0),
        DType::Q5_0 => each(values, out, q5_0),
        DType::Iq4Nl => each(values, out, iq4_nl),
        DType::Q4_1 => each(values, out, q4_1),
        DType::Q5_1 => each(values, out, q5_1),
        DType::Mxfp4 => each(values, out, mxfp4),
        DType::Q2K => each(values, out, q2_k),
        DType::Q3K => each(values, out, q3_k),
        DType::Q4K => each(values, out, q4_k),
        DType::Q5K => each(values, out, q5_k),
        DType::Q6K => each(values, out, q6_k),
        DType::Iq4Xs => each(values, out, iq4_xs),
        DType::Tq1_0 => each(values, out, tq1_0),
        DType::Tq2_0 => each(values, out, tq2_0),
        DType::Iq2Xxs | DType::Iq2Xs | DType::Iq2S | DType::Iq3Xxs | DType::Iq3S => {
            unreachable!("no recipe has {dtype}")
        }
    }
}

/// Applies `store` block by block.
fn each<const N: usize, const B: usize>(
    values: &[f32],
    out: &mut [u8],
    store: impl Fn(&[f32; N], &mut [u8; B]) -> Result<(), Unfit>,
) -> Result<(), Unfit> {
    let blocks = values.as_chunks().0.iter().zip(out.as_chunks_mut().0);
    blocks
        .into_iter()
        .try_for_each(|(values, block)| store(values, block))
}

/// A number as scales are stored.
fn stored(value: f32) -> Result<f16, Unfit> {
    let stored = f16::from_f32(value);
    stored.is_finite().then_some(stored).ok_or(Unfit::TooLarge)
}

/// What to divide by, or 0 where that would be no number: everything is 0 then.
fn inverse(scale: f32) -> f32 {
    let inverse = 1.0 / scale;
    if inverse.is_finite() { inverse } else { 0.0 }
}

/// To the nearest integer, halves away from 0.
fn rounded(value: f32) -> i8 {
    let whole = value as i32;
    let rest = value - whole as f32;
    (whole + (2.0 * rest) as i32) as i8
}

fn q8_0(values: &[f32; 32], block: &mut [u8; 34]) -> Result<(), Unfit> {
    let scale = largest(values).abs() / 127.0;
    let inverse = inverse(scale);
    block[..2].copy_from_slice(&stored(scale)?.to_le_bytes());
    for (byte, value) in block[2..].iter_mut().zip(values) {
        *byte = rounded(value * inverse).cast_unsigned();
    }
    Ok(())
}

/// Of 32 weights with one scale: the scale, and the weights as levels.
fn single(values: &[f32; 32], levels: impl Levels) -> Result<(f16, [f32; 32]), Unfit> {
    let unit = Unit::of(values);
    let values = unit.scaled(values);
    let found = search::scale(&values, &search::importance(&values, 32), levels);
    let scale = unit.stored(found)?;
    let codes = search::nearest(&values, inverse(unit.of_stored(scale)), levels);
    Ok((scale, codes))
}

fn q4_0(values: &[f32; 32], block: &mut [u8; 18]) -> Result<(), Unfit> {
    let (scale, codes) = single(values, Linear::bits(4))?;
    block[..2].copy_from_slice(&scale.to_le_bytes());
    nibbles(&codes.map(|level| (level + 8.0) as u8), &mut block[2..]);
    Ok(())
}

fn q5_0(values: &[f32; 32], block: &mut [u8; 22]) -> Result<(), Unfit> {
    let (scale, codes) = single(values, Linear::bits(5))?;
    let codes = codes.map(|level| (level + 16.0) as u8);
    block[..2].copy_from_slice(&scale.to_le_bytes());
    block[2..6].copy_from_slice(&fifth_bits(&codes));
    nibbles(&codes, &mut block[6..]);
    Ok(())
}

fn iq4_nl(values: &[f32; 32], block: &mut [u8; 18]) -> Result<(), Unfit> {
    let (scale, codes) = single(values, Nonlinear)?;
    block[..2].copy_from_slice(&scale.to_le_bytes());
    nibbles(&codes.map(Nonlinear::code), &mut block[2..]);
    Ok(())
}

/// Of 32 weights with a scale and an offset: both, and the weights as levels.
fn offset(values: &[f32; 32], top: f32) -> Result<([f16; 2], [u8; 32]), Unfit> {
    let unit = Unit::of(values);
    let values = unit.scaled(values);
    let found = search::affine(&values, &search::importance(&values, 32), top, Offset::Any);
    let (scale, offset) = (unit.stored(found.scale)?, unit.stored(found.offset)?);
    let fit = search::AffineFit {
        scale: unit.of_stored(scale),
        offset: unit.of_stored(offset),
    };
    let codes = fit.codes(&values, top).map(|code| code as u8);
    Ok(([scale, offset], codes))
}

fn q4_1(values: &[f32; 32], block: &mut [u8; 20]) -> Result<(), Unfit> {
    let ([scale, offset], codes) = offset(values, 15.0)?;
    block[..2].copy_from_slice(&scale.to_le_bytes());
    block[2..4].copy_from_slice(&offset.to_le_bytes());
    nibbles(&codes, &mut block[4..]);
    Ok(())
}

fn q5_1(values: &[f32; 32], block: &mut [u8; 24]) -> Result<(), Unfit> {
    let ([scale, offset], codes) = offset(values, 31.0)?;
    block[..2].copy_from_slice(&scale.to_le_bytes());
    block[2..4].copy_from_slice(&offset.to_le_bytes());
    block[4..8].copy_from_slice(&fifth_bits(&codes));
    nibbles(&codes, &mut block[8..]);
    Ok(())
}

/// 32 codes of 4 bits into 16 bytes: the first half in the low halves.
fn nibbles(codes: &[u8; 32], bytes: &mut [u8]) {
    for (i, byte) in bytes.iter_mut().enumerate() {
        *byte = (codes[i] & 15) | (codes[i + 16] << 4);
    }
}

/// The fifth bits of 32 codes.
fn fifth_bits(codes: &[u8; 32]) -> [u8; 4] {
    let bits = codes.iter().enumerate();
    let bits = bits.fold(0, |bits, (i, code)| bits | u32::from(code >> 4) << i);
    bits.to_le_bytes()
}

/// The doubled floats of 4 bits (E2M1), without sign.
const FLOATS: [f32; 8] = [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0];

/// The power of two is the one of three that leaves the least error: the one that the largest weight
/// needs, the one below, which clips it, and the one above.
fn mxfp4(values: &[f32; 32], block: &mut [u8; 17]) -> Result<(), Unfit> {
    let largest = largest(values).abs();
    // 2 is the exponent of the largest float, and floats are stored doubled.
    let exponent = i32::from((largest.to_bits() >> 23) as u8) - 2;
    let candidates = [exponent, exponent - 1, exponent + 1].map(|e| e.clamp(0, 254) as u8);
    let errors = candidates.map(|exponent| {
        let scale = power(exponent);
        let error = |value: &f32| {
            let value = f64::from(value.abs());
            let found = f64::from(FLOATS[nearest_float(value / scale)]) * scale;
            // What decodes it may have no more room than a 32-bit float.
            match found <= f64::from(f32::MAX) {
                true => (value - found).powi(2),
                false => f64::INFINITY,
            }
        };
        values.iter().map(error).sum::<f64>()
    });
    let best = (0..3).fold(0, |best, i| if errors[i] < errors[best] { i } else { best });
    let scale = power(candidates[best]);
    let code = |value: &f32| {
        let code = nearest_float(f64::from(value.abs()) / scale) as u8;
        // There is a minus 0, which nothing needs.
        code | u8::from(*value < 0.0 && code > 0) << 3
    };
    block[0] = candidates[best];
    for i in 0..16 {
        block[1 + i] = code(&values[i]) | code(&values[16 + i]) << 4;
    }
    Ok(())
}

/// What doubled floats are multiplied by: `2^(exponent - 128)`.
fn power(exponent: u8) -> f64 {
    f64::from(i32::from(exponent) - 128).exp2()
}

fn nearest_float(value: f64) -> usize {
    let between = FLOATS
        .windows(2)
        .map(|pair| f64::from(pair[0] + pair[1]) / 2.0);
    between.filter(|between| value > *between).count()
}

fn q2_k(values: &[f32; 256], block: &mut [u8; 84]) -> Result<(), Unfit> {
    let Affine {
        scale,
        minimum,
        scales,
        minimums,
        codes,
    } = Affine::<16>::of(values, 3.0, 15)?;
    for (sub, byte) in block[..16].iter_mut().enumerate() {
        *byte = scales[sub] | minimums[sub] << 4;
    }
    two_bits(&codes, &mut block[16..80]);
    block[80..82].copy_from_slice(&scale.to_le_bytes());
    block[82..].copy_from_slice(&minimum.to_le_bytes());
    Ok(())
}

fn q3_k(values: &[f32; 256], block: &mut [u8; 110]) -> Result<(), Unfit> {
    let Symmetric {
        scale,
        scales,
        levels,
    } = Symmetric::<16>::of(values, Linear::bits(3), [-32, 31])?;
    let codes = levels.map(|level| (level + 4.0) as u8);
    block.fill(0);
    for (i, code) in codes.iter().enumerate() {
        block[i % 32] |= (code >> 2) << (i / 32);
    }
    two_bits(&codes.map(|code| code & 3), &mut block[32..96]);
    for (sub, scale) in scales.iter().enumerate() {
        let scale = (scale + 32) as u8;
        block[96 + sub % 8] |= (scale & 15) << (4 * (sub / 8));
        block[104 + sub % 4] |= (scale >> 4) << (2 * (sub / 4));
    }
    block[108..].copy_from_slice(&scale.to_le_bytes());
    Ok(())
}

fn q4_k(values: &[f32; 256], block: &mut [u8; 144]) -> Result<(), Unfit> {
    let found = Affine::<8>::of(values, 15.0, 63)?;
    sub_scales(&found, &mut block[..16]);
    paired_nibbles(&found.codes, &mut block[16..]);
    Ok(())
}

fn q5_k(values: &[f32; 256], block: &mut [u8; 176]) -> Result<(), Unfit> {
    let found = Affine::<8>::of(values, 31.0, 63)?;
    sub_scales(&found, &mut block[..16]);
    for (i, byte) in block[16..48].iter_mut().enumerate() {
        let bits = (0..8).map(|sub| (found.codes[32 * sub + i] >> 4) << sub);
        *byte = bits.sum();
    }
    paired_nibbles(&found.codes, &mut block[48..]);
    Ok(())
}

/// Scale, minimum, and eight of each in 6 bits.
fn sub_scales(found: &Affine<8>, bytes: &mut [u8]) {
    bytes[..2].copy_from_slice(&found.scale.to_le_bytes());
    bytes[2..4].copy_from_slice(&found.minimum.to_le_bytes());
    for j in 0..4 {
        let (scale, minimum) = (found.scales[j + 4], found.minimums[j + 4]);
        bytes[4 + j] = found.scales[j] | (scale >> 4) << 6;
        bytes[8 + j] = found.minimums[j] | (minimum >> 4) << 6;
        bytes[12 + j] = (scale & 15) | (minimum & 15) << 4;
    }
}

/// Four bits of each code: two sub-blocks of 32 share 32 bytes.
fn paired_nibbles(codes: &[u8; 256], bytes: &mut [u8]) {
    for (pair, bytes) in bytes.chunks_exact_mut(32).enumerate() {
        for (i, byte) in bytes.iter_mut().enumerate() {
            *byte = (codes[64 * pair + i] & 15) | codes[64 * pair + 32 + i] << 4;
        }
    }
}

/// 256 codes of 2 bits: four blocks of 32 share 32 bytes.
fn two_bits(codes: &[u8; 256], bytes: &mut [u8]) {
    for (half, bytes) in bytes.chunks_exact_mut(32).enumerate() {
        for (i, byte) in bytes.iter_mut().enumerate() {
            let quarters =
                (0..4).map(|quarter| codes[128 * half + 32 * quarter + i] << (2 * quarter));
            *byte = quarters.sum();
        }
    }
}

fn q6_k(values: &[f32; 256], block: &mut [u8; 210]) -> Result<(), Unfit> {
    let Symmetric {
        scale,
        scales,
        levels,
    } = Symmetric::<16>::of(values, Linear::bits(6), [-128, 127])?;
    let codes = levels.map(|level| (level + 32.0) as u8);
    block.fill(0);
    for (i, code) in codes.iter().enumerate() {
        let (half, quarter, at) = (i / 128, i / 32 % 4, i % 32);
        block[64 * half + 32 * (quarter % 2) + at] |= (code & 15) << (4 * (quarter / 2));
        block[128 + 32 * half + at] |= (code >> 4) << (2 * quarter);
    }
    for (byte, scale) in block[192..208].iter_mut().zip(scales) {
        *byte = (scale as i8).cast_unsigned();
    }
    block[208..].copy_from_slice(&scale.to_le_bytes());
    Ok(())
}

fn iq4_xs(values: &[f32; 256], block: &mut [u8; 136]) -> Result<(), Unfit> {
    let Symmetric {
        scale,
        scales,
        levels,
    } = Symmetric::<8>::of(values, Nonlinear, [-32, 31])?;
    block.fill(0);
    block[..2].copy_from_slice(&scale.to_le_bytes());
    let mut high = 0u16;
    for (sub, scale) in scales.iter().enumerate() {
        let scale = (scale + 32) as u8;
        high |= u16::from(scale >> 4) << (2 * sub);
        block[4 + sub / 2] |= (scale & 15) << (4 * (sub % 2));
    }
    block[2..4].copy_from_slice(&high.to_le_bytes());
    let codes = levels.map(Nonlinear::code);
    let parts = codes.as_chunks().0.iter();
    for (codes, bytes) in parts.zip(block[8..].chunks_exact_mut(16)) {
        nibbles(codes, bytes);
    }
    Ok(())
}

/// Of 256 weights: the scale, and for each 0, 1 or 2, which is one more than what the scale is
/// multiplied by.
fn ternary(values: &[f32; 256]) -> Result<(f16, [u8; 256]), Unfit> {
    let scale = largest(values).abs();
    let inverse = inverse(scale);
    let digits = values.map(|value| (rounded(value * inverse) + 1).cast_unsigned());
    Ok((stored(scale)?, digits))
}

fn tq1_0(values: &[f32; 256], block: &mut [u8; 54]) -> Result<(), Unfit> {
    let (scale, digits) = ternary(values)?;
    // Bytes in three parts: how many, of how many digits each, and where their first digits are.
    let parts: [(usize, usize, usize); 3] = [(32, 5, 0), (16, 5, 160), (4, 4, 240)];
    let bytes = parts.into_iter().flat_map(|(bytes, count, first)| {
        (0..bytes).map(move |i| {
            let digit = |n| match n < count {
                true => u16::from(digits[first + n * bytes + i]),
                false => 0,
            };
            let number = (0..5).fold(0, |number, n| 3 * number + digit(n));
            // As a fraction of 256, rounded up, from which multiplications by 3 get the digits back.
            (number * 256).div_ceil(243) as u8
        })
    });
    for (byte, value) in block.iter_mut().zip(bytes) {
        *byte = value;
    }
    block[52..].copy_from_slice(&scale.to_le_bytes());
    Ok(())
}

fn tq2_0(values: &[f32; 256], block: &mut [u8; 66]) -> Result<(), Unfit> {
    let (scale, digits) = ternary(values)?;
    two_bits(&digits, &mut block[..64]);
    block[64..].copy_from_slice(&scale.to_le_bytes());
    Ok(())
}

/// A power of two that a block is divided by while scales are searched for, so that sums of powers of its
/// values neither overflow nor vanish. Dividing by it is exact, and so is multiplying again.
#[derive(Clone, Copy, Debug)]
struct Unit {
    unit: f32,
    inverse: f32,
}

impl Unit {
    fn of(values: &[f32]) -> Self {
        // Exponents of which both the power and its inverse are ordinary numbers.
        let exponent = (largest(values).to_bits() >> 23 & 0xFF).clamp(1, 253);
        Self {
            unit: f32::from_bits(exponent << 23),
            inverse: f32::from_bits((254 - exponent) << 23),
        }
    }

    fn scaled<const N: usize>(self, values: &[f32; N]) -> [f32; N] {
        values.map(|value| value * self.inverse)
    }

    /// A scale of scaled values, as it is stored.
    fn stored(self, scale: f32) -> Result<f16, Unfit> {
        stored(scale * self.unit)
    }

    /// What it is then.
    fn of_stored(self, scale: f16) -> f32 {
        scale.to_f32() * self.inverse
    }
}
