//! Types of 256 columns with AVX-512 VNNI: four rows to a register, two sub-blocks at a time.
//!
//! The integers are those of AVX2, and floats are added as there, eight rows to a register.
//!
//! # Safety
//! 1. The functions with target features are reached through [`multiply`] only, which has the proof
//!    that the CPU has AVX-512 F, BW, DQ, VL and VNNI, AVX2, FMA and F16C; those with permutations of bytes through
//!    [`planes::multiply`], which has the proof of VBMI as well.
//! 2. Loads go through references to arrays that are at least as long, unaligned.
#![expect(unsafe_code, reason = "intrinsics; see # Safety")]

use std::arch::x86_64::*;

use super::low_bits::{self, ONES, Quads, THREES, block_sums};
use super::{
    Ahead, Blocks, Eight, Header, ROWS, Values, eight, f16_of_rows, load16, nibbles, pair, planes,
    ways,
};
use crate::activations::Activations;
use crate::grid::Block;
use crate::matrix::Matrix;
use crate::quantized::formats::{Format, Q2K, Q3K, Q4K, Q5K, Q6K, Tq1_0, Tq2_0};
use crate::simd::avx2::transpose4;
use crate::simd::avx512::Avx512Vnni;
use crate::simd::each;

/// Writes the products of the rows of `out`, if their type is not multiplied as with AVX2.
pub(super) fn multiply(
    avx512: Avx512Vnni,
    weights: &Matrix<'_>,
    x: &Activations<'_>,
    out: &mut Block<'_, f32>,
) -> bool {
    if planes::multiply(avx512, weights, x, out) || nibbles::multiply(avx512, weights, x, out) {
        return true;
    }
    // Last, because permutations of bytes have a faster way for one of these types.
    // SAFETY: 1.
    unsafe { of_its_type(weights, x, out) }
}

ways! {
    "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c", 8, |rows, x, ahead, sum|
    Q4K, 144: k_add(rows, x, ahead, None, 16, sum);
    Q5K, 176: k_add(rows, x, ahead, Some(16), 48, sum);
    Q6K, 210: q6_k(rows, x, ahead, sum);
    Q2K, 84: low_bits::q2_k::<Quads>(rows, x, ahead, sum);
    Q3K, 110: q3_k(rows, x, ahead, sum);
    Tq1_0, 54: tq1_0(rows, x, ahead, sum);
    Tq2_0, 66: low_bits::tq2_0::<Quads>(rows, x, ahead, sum);
}

/// Sixteen bytes at `at` of each row: of the first four, and of the others.
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) fn quads<const BYTES: usize>(rows: &Blocks<'_, BYTES>, at: usize) -> [__m512i; 2] {
    let zero = _mm512_setzero_si512();
    each!(zero, |four| {
        let low = _mm256_set_m128i(load16(rows[4 * four + 1], at), load16(rows[4 * four], at));
        let high = _mm256_set_m128i(
            load16(rows[4 * four + 3], at),
            load16(rows[4 * four + 2], at),
        );
        _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high)
    })
}

/// Half a block of activations, four times.
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) fn half<const PARTS: usize>(
    x: &Values<'_, PARTS>,
    block: usize,
    half: usize,
) -> __m512i {
    let words = &x.q[block].as_chunks::<4>().0[half];
    // SAFETY: 2.
    _mm512_broadcast_i32x4(unsafe { _mm_loadu_si128(words.as_ptr().cast()) })
}

/// Lanes 0 to 7: the sums over four lanes each of the rows of `first`, lanes 8 to 15 those of `second`.
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) fn sum_rows(first: [__m512i; 2], second: [__m512i; 2]) -> __m512i {
    let pairs = |[a, b]: [__m512i; 2]| {
        _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b))
    };
    let (first, second) = (pairs(first), pairs(second));
    let sums = _mm512_add_epi32(
        _mm512_unpacklo_epi64(first, second),
        _mm512_unpackhi_epi64(first, second),
    );
    // Quarter `q` has rows `q` and `q + 4` of the first, then of the second.
    let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_permutexvar_epi32(order, sums)
}

/// Eight lanes, twice.
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) fn twice(x: __m256i) -> __m512i {
    _mm512_broadcast_i64x4(x)
}

/// Eight numbers, twice.
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) fn numbers_twice(x: __m256) -> __m512 {
    _mm512_castsi512_ps(twice(_mm256_castps_si256(x)))
}

/// The first eight lanes and the last.
#[target_feature(enable = "avx512f,avx512dq")]
#[inline]
pub(super) fn halves(x: __m512) -> [__m256; 2] {
    [_mm512_castps512_ps256(x), _mm512_extractf32x8_ps::<1>(x)]
}

/// `a` in the first eight lanes and `b` in the last.
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) fn both(a: i32, b: i32) -> __m512i {
    _mm512_mask_set1_epi32(_mm512_set1_epi32(a), 0xFF00, b)
}

/// Adds the terms of a `Q4K` or `Q5K` block, whose nibbles are at `nibbles`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
#[inline]
fn k_add<const BYTES: usize>(
    rows: &Blocks<'_, BYTES>,
    x: &Values<'_, 8>,
    ahead: Ahead<BYTES>,
    fifth: Option<usize>,
    nibbles: usize,
    mut sum: __m256,
) -> __m256 {
    let zero = _mm512_setzero_si512();
    let header = Header::read(rows);
    let d = numbers_twice(header.d);
    let minus_dmin = numbers_twice(header.minus_dmin);
    let bytes: [_; 4] = each!(zero, |i| twice(header.bytes[i]));
    // Without fifth bits they are read for nothing, which the compiler leaves out.
    let at = fifth.unwrap_or(nibbles);
    let bits = [quads(rows, at), quads(rows, at + 16)];
    for two in 0..4 {
        ahead.prefetch(rows, two, 4);
        let mut dots = [[zero; 2]; 2];
        for index in 0..2 {
            let shared = quads(rows, nibbles + 32 * two + 16 * index);
            for part in 0..2 {
                let values = half(x, 2 * two + part, index);
                for four in 0..2 {
                    let shifted = match part {
                        0 => shared[four],
                        _ => _mm512_srli_epi16::<4>(shared[four]),
                    };
                    let mut weights = _mm512_and_si512(shifted, _mm512_set1_epi8(15));
                    if fifth.is_some() {
                        weights = with_bit::<4>(weights, bits[index][four], 2 * two + part);
                    }
                    dots[part][four] = _mm512_dpbusd_epi32(dots[part][four], weights, values);
                }
            }
        }
        let shift = 8 * (2 * two as i32 % 4);
        let shifts = both(shift, shift + 8);
        let scale = byte_of(bytes[two / 2], shifts, d);
        let minimum = halves(byte_of(bytes[2 + two / 2], shifts, minus_dmin));
        let dots = _mm512_cvtepi32_ps(sum_rows(dots[0], dots[1]));
        let terms = halves(_mm512_mul_ps(dots, scale));
        for part in 0..2 {
            let block = 2 * two + part;
            sum = _mm256_fmadd_ps(terms[part], _mm256_set1_ps(x.scale[block]), sum);
            sum = _mm256_fmadd_ps(minimum[part], _mm256_set1_ps(x.scaled_sum[block]), sum);
        }
    }
    sum
}

/// Six bits of each word, `shifts` from its end, times `unit`.
#[target_feature(enable = "avx512f")]
#[inline]
fn byte_of(words: __m512i, shifts: __m512i, unit: __m512) -> __m512 {
    let byte = _mm512_and_si512(_mm512_srlv_epi32(words, shifts), _mm512_set1_epi32(63));
    _mm512_mul_ps(unit, _mm512_cvtepi32_ps(byte))
}

/// Weights with bit `part` of each byte of `bits` for their bit `PLACE`.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn with_bit<const PLACE: usize>(weights: __m512i, bits: __m512i, part: usize) -> __m512i {
    let (up, down) = (PLACE.saturating_sub(part), part.saturating_sub(PLACE));
    let bits = _mm512_sll_epi16(bits, _mm_cvtsi32_si128(up as i32));
    let bits = _mm512_srl_epi16(bits, _mm_cvtsi32_si128(down as i32));
    // Weights, or bits where the mask has them.
    _mm512_ternarylogic_epi32::<0xF8>(weights, bits, _mm512_set1_epi8(1 << PLACE))
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
#[inline]
fn q6_k(rows: &Blocks<'_, 210>, x: &Values<'_, 8>, ahead: Ahead<210>, mut sum: __m256) -> __m256 {
    let zero = _mm512_setzero_si512();
    let d = f16_of_rows(rows, 208);
    let d = numbers_twice(d);
    let scales = transpose4(each!(_mm256_setzero_si256(), |r| pair(rows, r, 192)));
    for upper in 0..2 {
        // Blocks 0 and 2, then 1 and 3, because two share the bytes of their nibbles.
        let mut dots = [zero; 4];
        for block in 0..2 {
            ahead.prefetch(rows, 2 * upper + block, 4);
            [dots[block], dots[block + 2]] = q6_k_dots(rows, x, upper, block);
        }
        for quarter in 0..4 {
            let block = 4 * upper + quarter;
            let scale = signed_bytes(scales[block / 2], 2 * (block % 2), d);
            let lacking = both(-32 * x.half_sums[0][block], -32 * x.half_sums[1][block]);
            let dots = _mm512_add_epi32(dots[quarter], lacking);
            for terms in halves(_mm512_mul_ps(_mm512_cvtepi32_ps(dots), scale)) {
                sum = _mm256_fmadd_ps(terms, _mm256_set1_ps(x.scale[block]), sum);
            }
        }
    }
    sum
}

/// Dot products of blocks `block` and `block + 2` of half a file block: lanes 0 to 7 of the first half
/// of each, lanes 8 to 15 of the second.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
#[inline]
fn q6_k_dots(
    rows: &Blocks<'_, 210>,
    x: &Values<'_, 8>,
    upper: usize,
    block: usize,
) -> [__m512i; 2] {
    let zero = _mm512_setzero_si512();
    let (four, two) = (_mm512_set1_epi8(15), _mm512_set1_epi8(0x30));
    let mut dots = [[[zero; 2]; 2]; 2];
    for index in 0..2 {
        let low = quads(rows, 64 * upper + 32 * block + 16 * index);
        let high = quads(rows, 128 + 32 * upper + 16 * index);
        for rows in 0..2 {
            let (up, down) = match block {
                0 => (_mm512_slli_epi16::<4>(high[rows]), high[rows]),
                _ => (
                    _mm512_slli_epi16::<2>(high[rows]),
                    _mm512_srli_epi16::<2>(high[rows]),
                ),
            };
            let nibbles = [low[rows], _mm512_srli_epi16::<4>(low[rows])];
            let bits = [up, down];
            for second in 0..2 {
                let low = _mm512_and_si512(nibbles[second], four);
                let weights = _mm512_ternarylogic_epi32::<0xF8>(low, bits[second], two);
                let values = half(x, 4 * upper + block + 2 * second, index);
                dots[second][index][rows] = _mm512_dpbusd_epi32(zero, weights, values);
            }
        }
    }
    each!(zero, |second| sum_rows(dots[second][0], dots[second][1]))
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
#[inline]
fn q3_k(rows: &Blocks<'_, 110>, x: &Values<'_, 8>, ahead: Ahead<110>, mut sum: __m256) -> __m256 {
    // All at once: see [`low_bits`].
    ahead.prefetch(rows, 0, 1);
    let zero = _mm512_setzero_si512();
    let d = f16_of_rows(rows, 108);
    let d = numbers_twice(d);
    let scales = low_bits::q3_k_scales(rows);
    let high = [quads(rows, 0), quads(rows, 16)];
    for upper in 0..2 {
        let low = [quads(rows, 32 + 32 * upper), quads(rows, 48 + 32 * upper)];
        for quarter in 0..4 {
            let part = 4 * upper + quarter;
            let down = _mm_cvtsi32_si128(2 * quarter as i32);
            let mut dots = [[zero; 2]; 2];
            for index in 0..2 {
                let values = half(x, part, index);
                for four in 0..2 {
                    let bits = _mm512_srl_epi16(low[index][four], down);
                    let bits = _mm512_and_si512(bits, _mm512_set1_epi8(3));
                    let weights = with_bit::<2>(bits, high[index][four], part);
                    dots[index][four] = _mm512_dpbusd_epi32(zero, weights, values);
                }
            }
            // Weights are four too large.
            let lacking = both(-4 * x.half_sums[0][part], -4 * x.half_sums[1][part]);
            let dots = _mm512_add_epi32(sum_rows(dots[0], dots[1]), lacking);
            let scale = signed_bytes(scales[part / 2], 2 * (part % 2), d);
            for terms in halves(_mm512_mul_ps(_mm512_cvtepi32_ps(dots), scale)) {
                sum = _mm256_fmadd_ps(terms, _mm256_set1_ps(x.scale[part]), sum);
            }
        }
    }
    sum
}

/// Two neighbouring bytes of each word, the first in lanes 0 to 7, times `unit`.
#[target_feature(enable = "avx512f")]
#[inline]
fn signed_bytes(words: __m256i, first: usize, unit: __m512) -> __m512 {
    let end = 24 - 8 * first as i32;
    let top = _mm512_sllv_epi32(twice(words), both(end, end - 8));
    _mm512_mul_ps(unit, _mm512_cvtepi32_ps(_mm512_srai_epi32::<24>(top)))
}

/// Adds the terms of a block of three levels: a step takes the digits of eight bytes of each row.
macro_rules! tq1_0 {
    ($name:ident, $features:literal, $digits:ident) => {
        #[target_feature(enable = $features)]
        #[inline]
        pub(super) fn $name(
            rows: &Blocks<'_, 54>,
            x: &Values<'_, 8>,
            ahead: Ahead<54>,
            mut sum: __m256,
        ) -> __m256 {
            let zero = _mm512_setzero_si512();
            // Weights are one too large, so dot products start at minus the sums of the activations, in the first of
            // two words.
            let starts = block_sums(x).map(|sum| i64::from((-sum).cast_unsigned()));
            let mut dots: [_; 8] = each!(zero, |part| _mm512_set1_epi64(starts[part]));
            for quarter in 0..2 {
                ahead.prefetch(rows, quarter, 4);
                let bytes = eights(rows, 16 * quarter);
                for i in 0..2 {
                    let digits = $digits(bytes[i]);
                    for digit in 0..5 {
                        let values = eight_values(x, digit, 2 * quarter + i);
                        dots[digit] = _mm512_dpbusd_epi32(dots[digit], digits[digit], values);
                    }
                }
            }
            // Each digit of sixteen bytes is half a block of columns.
            ahead.prefetch(rows, 2, 4);
            let bytes = eights(rows, 32);
            for i in 0..2 {
                let digits = $digits(bytes[i]);
                for digit in 0..5 {
                    let part = 5 + digit / 2;
                    let values = eight_values(x, part, 2 * (digit % 2) + i);
                    dots[part] = _mm512_dpbusd_epi32(dots[part], digits[digit], values);
                }
            }
            // And each of four bytes an eighth: two others are before them, which are multiplied with zeros, and the
            // scale is after them.
            ahead.prefetch(rows, 3, 4);
            let last: [i64; ROWS] = each!(0, |r| {
                i64::from_le_bytes(*rows[r][46..].first_chunk().expect("inside the block"))
            });
            let last = _mm512_setr_epi64(
                last[0], last[1], last[2], last[3], last[4], last[5], last[6], last[7],
            );
            let digits = $digits(last);
            for digit in 0..4 {
                let values = _mm512_set1_epi64(i64::from(x.q[7][4 + digit]) << 16);
                dots[7] = _mm512_dpbusd_epi32(dots[7], digits[digit], values);
            }
            let scales = _mm512_cvtepi64_epi16(_mm512_srli_epi64::<48>(last));
            let d = _mm256_cvtph_ps(scales);
            let d = numbers_twice(d);
            for two in 0..4 {
                let part = 2 * two;
                let dots = sum_words(dots[part], dots[part + 1]);
                let terms = halves(_mm512_mul_ps(_mm512_cvtepi32_ps(dots), d));
                for index in 0..2 {
                    let unit = _mm256_set1_ps(x.scale[part + index]);
                    sum = _mm256_fmadd_ps(terms[index], unit, sum);
                }
            }
            sum
        }
    };
}

tq1_0!(
    tq1_0,
    "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c",
    ternary_digits
);
tq1_0!(
    tq1_0_by_permutations,
    "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,avx2,fma,f16c",
    ternary_digits_by_permutations
);

/// Lanes 0 to 7: the sums of the two words of each row of `first`, lanes 8 to 15 those of `second`.
#[target_feature(enable = "avx512f")]
#[inline]
fn sum_words(first: __m512i, second: __m512i) -> __m512i {
    let (a, b) = (_mm512_castsi512_ps(first), _mm512_castsi512_ps(second));
    let words = [
        _mm512_shuffle_ps::<0x88>(a, b),
        _mm512_shuffle_ps::<0xDD>(a, b),
    ];
    let [words, others] = words.map(|words| _mm512_castps_si512(words));
    // Quarter `q` has rows `2 * q` and `2 * q + 1` of the first, then of the second.
    let order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    _mm512_permutexvar_epi64(order, _mm512_add_epi32(words, others))
}

/// Eight bytes at `at` of each row, and the next eight.
#[target_feature(enable = "avx512f")]
#[inline]
fn eights<const BYTES: usize>(rows: &Blocks<'_, BYTES>, at: usize) -> [__m512i; 2] {
    let every_other = |first: usize| {
        let two = |r: usize| _mm256_set_m128i(load16(rows[r + 2], at), load16(rows[r], at));
        _mm512_inserti64x4::<1>(_mm512_castsi256_si512(two(first)), two(first + 4))
    };
    let [even, odd] = [every_other(0), every_other(1)];
    [
        _mm512_unpacklo_epi64(even, odd),
        _mm512_unpackhi_epi64(even, odd),
    ]
}

/// The `i`-th eight of a block of activations, for each row.
#[target_feature(enable = "avx512f")]
#[inline]
fn eight_values(x: &Values<'_, 8>, block: usize, i: usize) -> __m512i {
    let eight = &x.q[block].as_chunks::<2>().0[i];
    // SAFETY: 2.
    _mm512_broadcastq_epi64(unsafe { _mm_loadl_epi64(eight.as_ptr().cast()) })
}

/// The lower byte of two times a factor, and the upper one times that of its upper byte.
#[target_feature(enable = "avx512bw")]
#[inline]
fn times(two: __m512i, factor: i16) -> __m512i {
    _mm512_maddubs_epi16(two, _mm512_set1_epi16(factor))
}

/// The upper bytes of products of even bytes and of odd ones, in the places of these.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn upper_bytes([even, odd]: [__m512i; 2]) -> __m512i {
    let odd_bytes = _mm512_set1_epi16(0xFF00_u16.cast_signed());
    _mm512_ternarylogic_epi32::<0xF8>(_mm512_srli_epi16::<8>(even), odd, odd_bytes)
}

/// The digits of base 3 of each byte: see [`low_bits`].
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn ternary_digits(fractions: __m512i) -> [__m512i; 5] {
    let next = |[even, odd]: [__m512i; 2], factor| [times(even, factor), times(odd, factor)];
    let first = [times(fractions, 9), times(fractions, 9 << 8)];
    let second = next(first, 9);
    let [first, last] = [upper_bytes(first), upper_bytes(next(second, 3))];
    let second = upper_bytes(second);
    let of_nine = |table: &[u8; 16], two| {
        // SAFETY: 2.
        let table = _mm512_broadcast_i32x4(unsafe { _mm_loadu_si128(table.as_ptr().cast()) });
        _mm512_shuffle_epi8(table, two)
    };
    [
        of_nine(&THREES, first),
        of_nine(&ONES, first),
        of_nine(&THREES, second),
        of_nine(&ONES, second),
        last,
    ]
}

/// The same with a table of three digits for each number below 27: one step less.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
#[inline]
fn ternary_digits_by_permutations(fractions: __m512i) -> [__m512i; 5] {
    let first = [times(fractions, 27), times(fractions, 27 << 8)];
    let second = upper_bytes([times(first[0], 9), times(first[1], 9)]);
    let first = upper_bytes(first);
    let digit = |digits: &[u8; 64], number| {
        // SAFETY: 2.
        let digits = unsafe { _mm512_loadu_si512(digits.as_ptr().cast()) };
        _mm512_permutexvar_epi8(number, digits)
    };
    let [nines, threes, ones] = &DIGITS;
    [
        digit(nines, first),
        digit(threes, first),
        digit(ones, first),
        digit(threes, second),
        digit(ones, second),
    ]
}

/// Digits of base 3 of numbers below 27, the first of each first.
static DIGITS: [[u8; 64]; 3] = {
    let mut digits = [[0; 64]; 3];
    let mut number = 0;
    while number < 27 {
        digits[0][number] = number as u8 / 9;
        digits[1][number] = number as u8 / 3 % 3;
        digits[2][number] = number as u8 % 3;
        number += 1;
    }
    digits
};
