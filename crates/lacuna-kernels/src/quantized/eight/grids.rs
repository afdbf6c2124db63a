//! Types whose weights are points of a table: a row of 32 columns to a register.
//!
//! # Safety
//! 1. As in [`super`]: what has target features is reached through [`super::multiply`] only.
//! 2. Loads and stores go through references to arrays that are as long, unaligned.
#![expect(unsafe_code, reason = "intrinsics; see # Safety")]

use std::arch::x86_64::*;

use super::{Ahead, Blocks, Eight, ROWS, Values, add_dots, eight, f16_of_rows, sum_halves};
use crate::quantized::formats::Format;
use crate::quantized::grids::{Grid, Iq2S, Iq2Xs, Iq2Xxs, Iq3S, Iq3Xxs};
use crate::quantized::panel::{Extra, HasExtra};
use crate::simd::each;

eight!(Iq2Xxs, 66, 8, |rows, x, ahead, sum| {
    add::<Self, 66, CACHE>(rows, x, ahead, sum)
});
eight!(Iq2Xs, 74, 8, |rows, x, ahead, sum| {
    add::<Self, 74, CACHE>(rows, x, ahead, sum)
});
eight!(Iq2S, 82, 8, |rows, x, ahead, sum| {
    add::<Self, 82, CACHE>(rows, x, ahead, sum)
});
eight!(Iq3Xxs, 98, 8, |rows, x, ahead, sum| {
    add::<Self, 98, CACHE>(rows, x, ahead, sum)
});
eight!(Iq3S, 110, 8, |rows, x, ahead, sum| {
    add::<Self, 110, CACHE>(rows, x, ahead, sum)
});

/// Adds the terms of a file block of each row.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn add<G: Grid + Format, const BYTES: usize, const CACHE: i32>(
    rows: &Blocks<'_, BYTES>,
    x: &Values<'_, 8>,
    ahead: Ahead<CACHE>,
    mut sum: __m256,
) -> __m256 {
    let d = _mm256_mul_ps(f16_of_rows(rows, 0), _mm256_set1_ps(G::UNIT));
    for part in 0..8 {
        ahead.prefetch(part * ROWS * BYTES / 8, ROWS * BYTES / 8);
        let [first, second] = dots::<G, BYTES>(rows, x, part);
        let scales: [[u8; 2]; ROWS] = each!([0; 2], |r| G::scales(rows[r], part));
        let scale = |half: usize| {
            let bytes: [u8; ROWS] = each!(0, |r| scales[r][half]);
            let bytes = _mm_set_epi64x(0, i64::from_le_bytes(bytes));
            _mm256_mul_ps(d, _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)))
        };
        if G::Extra::EXTRA == Extra::SecondScale {
            sum = add_dots(x, part, first, scale(0), sum);
            sum = add_dots(x, part, second, scale(1), sum);
        } else {
            sum = add_dots(x, part, _mm256_add_epi32(first, second), scale(0), sum);
        }
    }
    sum
}

/// Dot products of both halves of the `part`-th 32 columns.
#[target_feature(enable = "avx2")]
#[inline]
fn dots<G: Grid, const BYTES: usize>(
    rows: &Blocks<'_, BYTES>,
    x: &Values<'_, 8>,
    part: usize,
) -> [__m256i; 2] {
    // SAFETY: 2.
    let values = unsafe { _mm256_loadu_si256(x.q[part].as_ptr().cast()) };
    // Byte `i / 8` of four, for sign `i`, and its bit.
    let byte = _mm256_setr_epi64x(
        0,
        0x0101_0101_0101_0101,
        0x0202_0202_0202_0202,
        0x0303_0303_0303_0303,
    );
    let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64.cast_signed());
    let products = |r: usize| {
        let m = G::magnitudes(rows[r], part).map(u64::cast_signed);
        let magnitudes = _mm256_setr_epi64x(m[0], m[1], m[2], m[3]);
        let signs = _mm256_set1_epi32(G::signs(rows[r], part).cast_signed());
        let set = _mm256_and_si256(_mm256_shuffle_epi8(signs, byte), bit);
        let negative = _mm256_cmpeq_epi8(set, bit);
        let signed = _mm256_sub_epi8(_mm256_xor_si256(values, negative), negative);
        // `62 * 127 * 2 < 2^14`, as what sums them takes.
        _mm256_maddubs_epi16(magnitudes, signed)
    };
    let low = sum_halves(each!(values, |r| products(r)));
    let high = sum_halves(each!(values, |r| products(4 + r)));
    [
        _mm256_permute2x128_si256::<0x20>(low, high),
        _mm256_permute2x128_si256::<0x31>(low, high),
    ]
}
