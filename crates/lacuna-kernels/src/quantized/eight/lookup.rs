//! Types whose nibbles name one of sixteen levels.
//!
//! # Safety
//! 1. As in [`super`]: what has target features is reached through [`super::multiply`] only.
//! 2. Loads go through references to arrays that are as long, unaligned.
#![expect(unsafe_code, reason = "intrinsics; see # Safety")]

use std::arch::x86_64::*;

use super::{
    Ahead, Blocks, Eight, ROWS, Values, add_dots, eight, f16_of_rows, halves, lacking, pair,
    sum_halves,
};
use crate::quantized::codebooks::{FLOATS, FLOATS_OFFSET, LEVELS, as_bytes};
use crate::quantized::formats::{Iq4Nl, Iq4Xs, Mxfp4};
use crate::simd::avx2::{sum_quads, transpose4};
use crate::simd::each;

/// A table for both halves of a register.
#[target_feature(enable = "avx2")]
#[inline]
pub(super) fn twice(table: [u8; 16]) -> __m256i {
    // SAFETY: 2.
    _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(table.as_ptr().cast()) })
}

/// What the low nibbles of sixteen bytes at `at` of rows `r` and `r + 4` name, and what the high ones do.
#[target_feature(enable = "avx2")]
#[inline]
fn levels<const BYTES: usize>(
    rows: &Blocks<'_, BYTES>,
    table: __m256i,
    r: usize,
    at: usize,
) -> [__m256i; 2] {
    let mask = _mm256_set1_epi8(15);
    let both = pair(rows, r, at);
    [
        _mm256_shuffle_epi8(table, _mm256_and_si256(both, mask)),
        _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16::<4>(both), mask)),
    ]
}

/// Dot products of 32 levels of 8 bits whose nibbles are at `at`.
#[target_feature(enable = "avx2")]
#[inline]
fn wide_dots<const BYTES: usize>(rows: &Blocks<'_, BYTES>, x: [__m256i; 2], at: usize) -> __m256i {
    let table = twice(const { as_bytes(LEVELS, 0) });
    let ones = _mm256_set1_epi16(1);
    sum_quads(each!(ones, |r| {
        let weights = levels(rows, table, r, at);
        let products: [__m256i; 2] = each!(ones, |half| {
            // The signs of the weights move to the activations: `127 * 127 * 2 < 2^15`.
            let signed = _mm256_sign_epi8(x[half], weights[half]);
            let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weights[half]), signed);
            _mm256_madd_epi16(pairs, ones)
        });
        _mm256_add_epi32(products[0], products[1])
    }))
}

eight!(Iq4Nl, 18, 1, |rows, x, ahead, sum| {
    ahead.prefetch(rows, 0, 1);
    let dots = wide_dots(rows, halves(x, 0), 2);
    add_dots(x, 0, dots, f16_of_rows(rows, 0), sum)
});

eight!(Iq4Xs, 136, 8, |rows, x, ahead, sum| {
    iq4_xs(rows, x, ahead, sum)
});

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn iq4_xs(rows: &Blocks<'_, 136>, x: &Values<'_, 8>, ahead: Ahead<136>, mut sum: __m256) -> __m256 {
    let d = f16_of_rows(rows, 0);
    let header = transpose4(each!(_mm256_setzero_si256(), |r| pair(rows, r, 0)));
    let (high, low) = (_mm256_srli_epi32::<16>(header[0]), header[1]);
    for part in 0..8 {
        ahead.prefetch(rows, part, 8);
        let dots = wide_dots(rows, halves(x, part), 8 + 16 * part);
        let shift = |words, bits: usize| _mm256_srl_epi32(words, _mm_cvtsi32_si128(bits as i32));
        let low = _mm256_and_si256(shift(low, 4 * part), _mm256_set1_epi32(15));
        let high = _mm256_and_si256(shift(high, 2 * part), _mm256_set1_epi32(3));
        let six = _mm256_or_si256(low, _mm256_slli_epi32::<4>(high));
        let scale = _mm256_cvtepi32_ps(_mm256_sub_epi32(six, _mm256_set1_epi32(32)));
        sum = add_dots(x, part, dots, _mm256_mul_ps(d, scale), sum);
    }
    sum
}

eight!(Mxfp4, 17, 1, |rows, x, ahead, sum| {
    ahead.prefetch(rows, 0, 1);
    mxfp4(rows, x, sum)
});

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn mxfp4(rows: &Blocks<'_, 17>, x: &Values<'_, 1>, sum: __m256) -> __m256 {
    let table = twice(const { as_bytes(FLOATS, FLOATS_OFFSET) });
    let values = halves(x, 0);
    let dots = sum_halves(each!(table, |r| {
        let weights = levels(rows, table, r, 1);
        // `24 * 127 * 4 < 2^14`, as what sums them takes.
        _mm256_add_epi16(
            _mm256_maddubs_epi16(weights[0], values[0]),
            _mm256_maddubs_epi16(weights[1], values[1]),
        )
    }));
    let dots = _mm256_add_epi32(dots, lacking(x, 0, -i32::from(FLOATS_OFFSET)));
    let e: [i32; ROWS] = each!(0, |r| i32::from(rows[r][0]));
    let e = _mm256_setr_epi32(e[0], e[1], e[2], e[3], e[4], e[5], e[6], e[7]);
    add_dots(x, 0, dots, powers(e), sum)
}

/// [`power`](crate::quantized::codebooks::power) of each lane.
#[target_feature(enable = "avx2")]
#[inline]
fn powers(exponent: __m256i) -> __m256 {
    let factor = |e| {
        let biased = _mm256_add_epi32(e, _mm256_set1_epi32(63));
        _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))
    };
    let half = _mm256_srli_epi32::<1>(exponent);
    _mm256_mul_ps(factor(half), factor(_mm256_sub_epi32(exponent, half)))
}
