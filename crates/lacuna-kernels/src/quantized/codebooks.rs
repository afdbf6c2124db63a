//! What the bits of some storage types stand for: tables of levels.
//!
//! Facts of the file format, from `ggml-common.h` (MIT licence, Copyright (c) 2023-2026 The ggml
//! authors).

/// What the nibbles of [`DType::Q4_0`](crate::DType::Q4_0) stand for.
pub(crate) const CENTRED: [i8; 16] = [-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7];

/// The levels of [`DType::Iq4Nl`](crate::DType::Iq4Nl) and [`DType::Iq4Xs`](crate::DType::Iq4Xs).
pub(crate) const LEVELS: [i8; 16] = [
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
];

/// Twice the floats of 4 bits (E2M1) of [`DType::Mxfp4`](crate::DType::Mxfp4), so that all are whole.
pub(crate) const FLOATS: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// What is added to [`FLOATS`] where bytes have no sign.
pub(super) const FLOATS_OFFSET: u8 = 12;

/// `2^(exponent - 128)`: the scale of [`FLOATS`]. The least two are subnormal.
#[inline(always)]
pub(crate) fn power(exponent: u8) -> f32 {
    // Two factors, because no float has an exponent byte as large as 255.
    let half = u32::from(exponent) / 2;
    let rest = u32::from(exponent) - half;
    f32::from_bits((half + 63) << 23) * f32::from_bits((rest + 63) << 23)
}

/// The `part`-th 32 digits of base 3 of a [`DType::Tq1_0`](crate::DType::Tq1_0) block, a byte each: five in
/// each of 32 bytes and of 16, then four in each of 4.
pub(crate) fn ternary_digits(block: &[u8], part: usize) -> [u64; 4] {
    let eight = |at: usize| u64::from_le_bytes(*block[at..].first_chunk().expect("in the block"));
    if part < 5 {
        return [0, 1, 2, 3].map(|i| ternary_digit(eight(8 * i), part));
    }
    let digit = 2 * (part - 5);
    let sixteen = |digit| [32, 40].map(|at| ternary_digit(eight(at), digit));
    let [a, b] = sixteen(digit);
    if part < 7 {
        let [c, d] = sixteen(digit + 1);
        return [a, b, c, d];
    }
    let last = u32::from_le_bytes(*block[48..].first_chunk().expect("in the block"));
    let four = |digit| ternary_digit(last.into(), digit) & 0xFFFF_FFFF;
    [a, b, four(0) | four(1) << 32, four(2) | four(3) << 32]
}

/// A digit of base 3 of each byte: bytes are fractions of 256, and a digit is what three times the rest of
/// the fraction is larger than one by.
fn ternary_digit(bytes: u64, digit: usize) -> u64 {
    const EVEN: u64 = 0x00FF_00FF_00FF_00FF;
    const POWERS: [u64; 5] = [1, 3, 9, 27, 81];
    let of_even = |bytes: u64| {
        let rest = ((bytes & EVEN) * POWERS[digit]) & EVEN;
        ((rest * 3) >> 8) & EVEN
    };
    of_even(bytes) | of_even(bytes >> 8) << 8
}

/// A table as bytes, each `offset` larger.
pub(super) const fn as_bytes(table: [i8; 16], offset: u8) -> [u8; 16] {
    let mut bytes = [0; 16];
    let mut i = 0;
    while i < bytes.len() {
        bytes[i] = table[i].cast_unsigned().wrapping_add(offset);
        i += 1;
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_are_exact_down_to_the_subnormal_ones() {
        for exponent in 0..=u8::MAX {
            let power = power(exponent);
            assert_eq!(f64::from(power), (f64::from(exponent) - 128.0).exp2());
        }
    }
}
