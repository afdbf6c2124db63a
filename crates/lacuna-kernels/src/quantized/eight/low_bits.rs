//! Types of two and three bits, and of three levels.
//!
//! # Safety
//! 1. As in [`super`]: what has target features is reached through [`super::multiply`] only.
#![expect(unsafe_code, reason = "intrinsics; see # Safety")]

use std::arch::x86_64::*;

use super::{
    Ahead, Blocks, Eight, ROWS, Values, add_dots, eight, f16_of_rows, halves, lacking, pair,
    sum_halves,
};
use crate::quantized::formats::{Q2K, Q3K, Tq1_0, Tq2_0};
use crate::simd::avx2::transpose4;
use crate::simd::each;

/// Two bits of each of sixteen bytes at `at` of rows `r` and `r + 4`: those of the `part`-th block of four.
#[target_feature(enable = "avx2")]
#[inline]
fn two_bits<const BYTES: usize>(
    rows: &Blocks<'_, BYTES>,
    r: usize,
    at: usize,
    part: usize,
) -> __m256i {
    let shift = _mm_cvtsi32_si128(2 * (part as i32 % 4));
    _mm256_and_si256(
        _mm256_srl_epi16(pair(rows, r, at), shift),
        _mm256_set1_epi8(3),
    )
}

/// Two 16-bit sums in lane `r`, and in lane `r + 4`: of all that the first and the second of `x[r]` have in
/// the lower, and in the upper 128 bits. No sum may leave 16 bits.
#[target_feature(enable = "avx2")]
#[inline]
fn sum_each_half(x: [[__m256i; 2]; 4]) -> __m256i {
    let two = |r: usize| {
        let [a, b] = x[r];
        _mm256_add_epi16(_mm256_unpacklo_epi16(a, b), _mm256_unpackhi_epi16(a, b))
    };
    let four = |r: usize| {
        let (a, b) = (two(r), two(r + 1));
        _mm256_add_epi16(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b))
    };
    let (a, b) = (four(0), four(2));
    _mm256_add_epi16(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b))
}

/// Two 16-bit numbers in each lane.
#[target_feature(enable = "avx2")]
#[inline]
fn both(x: [i32; 2]) -> __m256i {
    _mm256_set1_epi32((x[0] & 0xFFFF) | (x[1] << 16))
}

eight!(Q2K, 84, 8, |rows, x, ahead, sum| {
    q2_k(rows, x, ahead, sum)
});

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn q2_k<const CACHE: i32>(
    rows: &Blocks<'_, 84>,
    x: &Values<'_, 8>,
    ahead: Ahead<CACHE>,
    mut sum: __m256,
) -> __m256 {
    let (d, dmin) = (f16_of_rows(rows, 80), f16_of_rows(rows, 82));
    let minus_dmin = _mm256_mul_ps(dmin, _mm256_set1_ps(-1.0));
    let scales = transpose4(each!(_mm256_setzero_si256(), |r| pair(rows, r, 0)));
    let nibble = _mm256_set1_epi32(15);
    for part in 0..8 {
        ahead.prefetch(part * ROWS * 84 / 8, ROWS * 84 / 8);
        let values = halves(x, part);
        // `3 * 127 * 16 < 2^15`.
        let dots = sum_each_half(each!([nibble; 2], |r| each!(nibble, |half| {
            let at = 16 + 32 * (part / 4) + 16 * half;
            _mm256_maddubs_epi16(two_bits(rows, r, at, part), values[half])
        })));
        // A byte for each half.
        let shift = _mm_cvtsi32_si128(16 * (part as i32 % 2));
        let bytes = _mm256_srl_epi32(scales[part / 2], shift);
        let apart = _mm256_slli_epi32::<8>(bytes);
        let factors = _mm256_and_si256(
            _mm256_blend_epi16::<0xAA>(bytes, apart),
            _mm256_set1_epi16(15),
        );
        let dots = _mm256_madd_epi16(dots, factors);
        sum = add_dots(x, part, dots, d, sum);
        let minima = [
            _mm256_srli_epi32::<4>(bytes),
            _mm256_srli_epi32::<12>(bytes),
        ];
        for half in 0..2 {
            let minimum = _mm256_cvtepi32_ps(_mm256_and_si256(minima[half], nibble));
            let unit = x.scale[part] * x.half_sums[half][part] as f32;
            let minimum = _mm256_mul_ps(minus_dmin, minimum);
            sum = _mm256_fmadd_ps(minimum, _mm256_set1_ps(unit), sum);
        }
    }
    sum
}

eight!(Q3K, 110, 8, |rows, x, ahead, sum| {
    q3_k(rows, x, ahead, sum)
});

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn q3_k<const CACHE: i32>(
    rows: &Blocks<'_, 110>,
    x: &Values<'_, 8>,
    ahead: Ahead<CACHE>,
    mut sum: __m256,
) -> __m256 {
    let zero = _mm256_setzero_si256();
    let d = f16_of_rows(rows, 108);
    let scales = q3_k_scales(rows);
    for part in 0..8 {
        ahead.prefetch(part * ROWS * 110 / 8, ROWS * 110 / 8);
        let values = halves(x, part);
        // `7 * 127 * 16 < 2^15`.
        let dots = sum_each_half(each!([zero; 2], |r| each!(zero, |half| {
            let low = two_bits(rows, r, 32 + 32 * (part / 4) + 16 * half, part);
            let high = third_bit(pair(rows, r, 16 * half), part);
            _mm256_maddubs_epi16(_mm256_or_si256(low, high), values[half])
        })));
        let dots = _mm256_sub_epi16(dots, both(x.half_sums.map(|sums| 4 * sums[part])));
        let dots = [_mm256_slli_epi32::<16>(dots), dots];
        for half in 0..2 {
            let index = 2 * part + half;
            let shift = _mm_cvtsi32_si128(24 - 8 * (index as i32 % 4));
            let top = _mm256_sll_epi32(scales[index / 4], shift);
            let scale = _mm256_cvtepi32_ps(_mm256_srai_epi32::<24>(top));
            let dots = _mm256_srai_epi32::<16>(dots[half]);
            sum = add_dots(x, part, dots, _mm256_mul_ps(d, scale), sum);
        }
    }
    sum
}

/// Sixteen signed bytes of each row, four to a word.
#[target_feature(enable = "avx2")]
#[inline]
fn q3_k_scales(rows: &Blocks<'_, 110>) -> [__m256i; 4] {
    let [_, packed @ ..] = transpose4(each!(_mm256_setzero_si256(), |r| pair(rows, r, 92)));
    each!(packed[0], |word| {
        let nibbles = match word {
            0 | 1 => packed[word],
            _ => _mm256_srli_epi16::<4>(packed[word - 2]),
        };
        let upper = _mm256_srl_epi32(packed[2], _mm_cvtsi32_si128(2 * word as i32));
        let upper = _mm256_slli_epi16::<4>(_mm256_and_si256(upper, _mm256_set1_epi8(3)));
        let low = _mm256_and_si256(nibbles, _mm256_set1_epi8(15));
        _mm256_sub_epi8(_mm256_or_si256(low, upper), _mm256_set1_epi8(32))
    })
}

/// The third bits of block `part`, in place.
#[target_feature(enable = "avx2")]
#[inline]
fn third_bit(bits: __m256i, part: usize) -> __m256i {
    let (up, down) = (2_usize.saturating_sub(part), part.saturating_sub(2));
    let bits = _mm256_sll_epi16(bits, _mm_cvtsi32_si128(up as i32));
    let bits = _mm256_srl_epi16(bits, _mm_cvtsi32_si128(down as i32));
    _mm256_and_si256(bits, _mm256_set1_epi8(4))
}

eight!(Tq2_0, 66, 8, |rows, x, ahead, sum| {
    tq2_0(rows, x, ahead, sum)
});

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn tq2_0<const CACHE: i32>(
    rows: &Blocks<'_, 66>,
    x: &Values<'_, 8>,
    ahead: Ahead<CACHE>,
    mut sum: __m256,
) -> __m256 {
    let d = f16_of_rows(rows, 64);
    for part in 0..8 {
        ahead.prefetch(part * ROWS * 66 / 8, ROWS * 66 / 8);
        let values = halves(x, part);
        let dots = sum_halves(each!(values[0], |r| {
            let two = |half: usize| {
                let weights = two_bits(rows, r, 32 * (part / 4) + 16 * half, part);
                _mm256_maddubs_epi16(weights, values[half])
            };
            _mm256_add_epi16(two(0), two(1))
        }));
        let dots = _mm256_add_epi32(dots, lacking(x, part, -1));
        sum = add_dots(x, part, dots, d, sum);
    }
    sum
}

eight!(Tq1_0, 54, 8, |rows, x, ahead, sum| {
    tq1_0(rows, x, ahead, sum)
});

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn tq1_0<const CACHE: i32>(
    rows: &Blocks<'_, 54>,
    x: &Values<'_, 8>,
    ahead: Ahead<CACHE>,
    mut sum: __m256,
) -> __m256 {
    let d = f16_of_rows(rows, 52);
    for part in 0..8 {
        ahead.prefetch(part * ROWS * 54 / 8, ROWS * 54 / 8);
        let values = halves(x, part);
        let dots = sum_halves(each!(values[0], |r| {
            let two = |half: usize| {
                let weights = ternary_digits(rows, r, part, half);
                _mm256_maddubs_epi16(weights, values[half])
            };
            _mm256_add_epi16(two(0), two(1))
        }));
        let dots = _mm256_add_epi32(dots, lacking(x, part, -1));
        sum = add_dots(x, part, dots, d, sum);
    }
    sum
}

/// Half a block of columns of rows `r` and `r + 4` of a `Tq1_0` block.
#[target_feature(enable = "avx2")]
#[inline]
fn ternary_digits(rows: &Blocks<'_, 54>, r: usize, part: usize, half: usize) -> __m256i {
    const POWERS: [i16; 5] = [1, 3, 9, 27, 81];
    let power = |n: usize| _mm256_set1_epi16(POWERS[n]);
    match (part, half) {
        (..5, _) => digits(pair(rows, r, 16 * half), power(part)),
        (7, 1) => {
            let four = |row: usize| {
                let bytes: &[u8; 4] = rows[row][48..].first_chunk().expect("inside the block");
                _mm_set1_epi32(i32::from_le_bytes(*bytes))
            };
            // The power of each four bytes, which are the same: two 16-bit numbers.
            let powers = _mm_setr_epi32(0x0001_0001, 0x0003_0003, 0x0009_0009, 0x001B_001B);
            digits(
                _mm256_set_m128i(four(r + 4), four(r)),
                _mm256_broadcastsi128_si256(powers),
            )
        }
        _ => digits(pair(rows, r, 32), power(2 * (part - 5) + half)),
    }
}

/// The digit of base 3 of each byte whose powers are given, in 16 bits for two bytes.
#[target_feature(enable = "avx2")]
#[inline]
fn digits(bytes: __m256i, powers: __m256i) -> __m256i {
    let three = _mm256_set1_epi16(3);
    // Fractions are in the upper bytes, where what exceeds one is lost.
    let fraction = _mm256_mullo_epi16(bytes, _mm256_slli_epi16::<8>(powers));
    let even = _mm256_mulhi_epu16(fraction, three);
    let odd = _mm256_and_si256(bytes, _mm256_set1_epi16(0xFF00_u16 as i16));
    let odd = _mm256_mulhi_epu16(_mm256_mullo_epi16(odd, powers), three);
    _mm256_or_si256(even, _mm256_slli_epi16::<8>(odd))
}
