//! What the bits of some storage types stand for: tables of levels.
//!
//! Facts of the file format, from `ggml-common.h` (MIT licence, Copyright (c) 2023-2026 The ggml
//! authors).

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
