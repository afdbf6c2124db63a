//! What the weights of each storage type are in f32, a block at a time: for rows of embedding tables.

use half::f16;

use crate::dtype::DType;
use crate::quantized::codebooks::{FLOATS, LEVELS, power, ternary_digits};
use crate::quantized::grids::{self, Iq2S, Iq2Xs, Iq2Xxs, Iq3S, Iq3Xxs};

/// Decodes whole blocks: `bytes` and `out` are the same number of blocks.
pub(crate) fn dequantize(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    if dtype == DType::F32 {
        // Without a choice for each element it is a copy.
        for (bytes, out) in bytes.as_chunks().0.iter().zip(out) {
            *out = f32::from_le_bytes(*bytes);
        }
        return;
    }
    let blocks = bytes.chunks_exact(dtype.block_bytes());
    for (block, out) in blocks.zip(out.chunks_exact_mut(dtype.block_len())) {
        match dtype {
            DType::F32 => unreachable!("they are copied"),
            DType::F16 => out[0] = f16_at(block, 0),
            DType::Bf16 => out[0] = f32::from_bits(u32::from(u16_at(block, 0)) << 16),
            DType::Q8_0 => affine(out, f16_at(block, 0), 0.0, |i| {
                f32::from(block[2 + i] as i8)
            }),
            DType::Q4_0 => affine(out, f16_at(block, 0), 0.0, |i| nibble(&block[2..], i) - 8.0),
            DType::Q4_1 => {
                affine(out, f16_at(block, 0), f16_at(block, 2), |i| {
                    nibble(&block[4..], i)
                });
            }
            DType::Q5_0 => affine(out, f16_at(block, 0), 0.0, |i| {
                nibble(&block[6..], i) + fifth_bit(&block[2..], i) - 16.0
            }),
            DType::Q5_1 => affine(out, f16_at(block, 0), f16_at(block, 2), |i| {
                nibble(&block[8..], i) + fifth_bit(&block[4..], i)
            }),
            DType::Q4K => k_quant(out, block, |sub, i| k_nibble(&block[16..], sub, i)),
            DType::Q5K => k_quant(out, block, |sub, i| {
                k_nibble(&block[48..], sub, i) + 16.0 * f32::from((block[16 + i] >> sub) & 1)
            }),
            DType::Q6K => q6_k(out, block),
            DType::Iq4Nl => affine(out, f16_at(block, 0), 0.0, |i| {
                f32::from(LEVELS[index(&block[2..], i)])
            }),
            DType::Iq4Xs => iq4_xs(out, block),
            DType::Mxfp4 => affine(out, power(block[0]), 0.0, |i| {
                f32::from(FLOATS[index(&block[1..], i)])
            }),
            DType::Q2K => q2_k(out, block),
            DType::Q3K => q3_k(out, block),
            DType::Tq1_0 => tq1_0(out, block),
            DType::Iq3S => grids::decode::<Iq3S>(block, f16_at(block, 0), out),
            DType::Iq3Xxs => grids::decode::<Iq3Xxs>(block, f16_at(block, 0), out),
            DType::Iq2S => grids::decode::<Iq2S>(block, f16_at(block, 0), out),
            DType::Iq2Xs => grids::decode::<Iq2Xs>(block, f16_at(block, 0), out),
            DType::Iq2Xxs => grids::decode::<Iq2Xxs>(block, f16_at(block, 0), out),
            DType::Tq2_0 => affine(out, f16_at(block, 64), 0.0, |i| {
                f32::from(two_bits(block, i)) - 1.0
            }),
        }
    }
}

/// `out[i] = scale * q(i) + offset`.
fn affine(out: &mut [f32], scale: f32, offset: f32, q: impl Fn(usize) -> f32) {
    for (i, out) in out.iter_mut().enumerate() {
        *out = scale * q(i) + offset;
    }
}

/// Eight sub-blocks of 32 with scales and minima packed in 6 bits at bytes 4..16.
fn k_quant(out: &mut [f32], block: &[u8], q: impl Fn(usize, usize) -> f32) {
    let (d, dmin) = (f16_at(block, 0), f16_at(block, 2));
    for (sub, out) in out.chunks_exact_mut(32).enumerate() {
        let (scale, min) = k_scale_min(&block[4..16], sub);
        affine(out, d * scale, -(dmin * min), |i| q(sub, i));
    }
}

/// Sixteen sub-blocks of 16 with 8-bit scales.
fn q6_k(out: &mut [f32], block: &[u8]) {
    let d = f16_at(block, 208);
    for (sub, out) in out.chunks_exact_mut(32).enumerate() {
        let (half, quarter) = (sub / 4, sub % 4);
        let low = &block[64 * half + 32 * (quarter % 2)..][..32];
        let high = &block[128 + 32 * half..][..32];
        let scales = &block[192 + 2 * sub..][..2];
        for (i, out) in out.iter_mut().enumerate() {
            let low = (low[i] >> (4 * (quarter / 2))) & 15;
            let high = (high[i] >> (2 * quarter)) & 3;
            let q = i32::from(low | (high << 4)) - 32;
            *out = d * f32::from(scales[i / 16] as i8) * q as f32;
        }
    }
}

/// Eight sub-blocks of 32 with 6-bit scales: the lower four bits at bytes 4..8, the others at 2..4.
fn iq4_xs(out: &mut [f32], block: &[u8]) {
    let (d, high) = (f16_at(block, 0), u16_at(block, 2));
    for (sub, out) in out.chunks_exact_mut(32).enumerate() {
        let low = (block[4 + sub / 2] >> (4 * (sub % 2))) & 15;
        let scale = i32::from(low) + i32::from((high >> (2 * sub)) & 3) * 16 - 32;
        affine(out, d * scale as f32, 0.0, |i| {
            f32::from(LEVELS[index(&block[8 + 16 * sub..], i)])
        });
    }
}

/// Sixteen sub-blocks of 16 with a scale and a minimum of 4 bits each, in a byte.
fn q2_k(out: &mut [f32], block: &[u8]) {
    let (d, dmin) = (f16_at(block, 80), f16_at(block, 82));
    for (sub, out) in out.chunks_exact_mut(16).enumerate() {
        let (scale, min) = (f32::from(block[sub] & 15), f32::from(block[sub] >> 4));
        affine(out, d * scale, -(dmin * min), |i| {
            f32::from(two_bits(&block[16..], 16 * sub + i))
        });
    }
}

/// Sixteen sub-blocks of 16 with 6-bit scales; the third bits of all weights are at bytes 0..32.
fn q3_k(out: &mut [f32], block: &[u8]) {
    let (packed, d) = (&block[96..108], f16_at(block, 108));
    for (sub, out) in out.chunks_exact_mut(16).enumerate() {
        let low = (packed[sub % 8] >> (4 * (sub / 8))) & 15;
        let high = (packed[8 + sub % 4] >> (2 * (sub / 4))) & 3;
        let scale = i32::from(low | (high << 4)) - 32;
        affine(out, d * scale as f32, 0.0, |i| {
            let i = 16 * sub + i;
            let third = (block[i % 32] >> (i / 32)) & 1;
            f32::from(two_bits(&block[32..], i) | (third << 2)) - 4.0
        });
    }
}

/// Digits of base 3, less 1.
fn tq1_0(out: &mut [f32], block: &[u8]) {
    let d = f16_at(block, 52);
    for (part, out) in out.chunks_exact_mut(32).enumerate() {
        let digits = ternary_digits(block, part);
        affine(out, d, 0.0, |i| {
            f32::from(digits[i / 8].to_le_bytes()[i % 8]) - 1.0
        });
    }
}

/// Element `i` of 256 of 2 bits: four blocks of 32 share 32 bytes.
fn two_bits(bytes: &[u8], i: usize) -> u8 {
    (bytes[i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2)) & 3
}

/// Element `i` of 32 nibbles: the low halves of 16 bytes, then the high halves.
fn nibble(bytes: &[u8], i: usize) -> f32 {
    index(bytes, i) as f32
}

/// The same, as what it is the index of.
fn index(bytes: &[u8], i: usize) -> usize {
    usize::from((bytes[i % 16] >> (4 * (i / 16))) & 15)
}

/// Element `i` of 32 bits, as 0 or 16.
fn fifth_bit(bytes: &[u8], i: usize) -> f32 {
    f32::from(((bytes[i / 8] >> (i % 8)) & 1) << 4)
}

/// Element `i` of sub-block `sub`: two sub-blocks share 32 bytes, one in each half.
fn k_nibble(bytes: &[u8], sub: usize, i: usize) -> f32 {
    f32::from((bytes[32 * (sub / 2) + i] >> (4 * (sub % 2))) & 15)
}

/// The 6-bit scale and minimum of a sub-block, from their 12 packed bytes.
fn k_scale_min(packed: &[u8], sub: usize) -> (f32, f32) {
    let (scale, min) = if sub < 4 {
        (packed[sub] & 63, packed[sub + 4] & 63)
    } else {
        let low = packed[sub + 4];
        (
            (low & 15) | ((packed[sub - 4] >> 6) << 4),
            (low >> 4) | ((packed[sub] >> 6) << 4),
        )
    };
    (f32::from(scale), f32::from(min))
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn f16_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_bits(u16_at(bytes, at)).to_f32()
}
