//! Types whose nibbles name one of sixteen levels, or have a fifth bit, with AVX-512 VNNI: four rows to a register, and 64
//! columns at a time, whose sums fill one.
//!
//! # Safety
//! 1. As in [`super::avx512`]: what has target features is reached through [`multiply`] only.
//! 2. Loads go through references to arrays that are at least as long, unaligned.
#![expect(unsafe_code, reason = "intrinsics; see # Safety")]

use std::arch::x86_64::*;

use super::avx512::{both, half, halves, numbers_twice, quads, sum_rows, twice};
use super::{Ahead, Blocks, Eight, ROWS, Values, eight, f16_of_rows, pair, u16_at, ways};
use crate::activations::{Activations, BLOCK};
use crate::grid::Block;
use crate::matrix::Matrix;
use crate::quantized::codebooks::{FLOATS, FLOATS_OFFSET, LEVELS, as_bytes};
use crate::quantized::formats::{Format, Iq4Nl, Iq4Xs, Mxfp4, Q5_0, Q5_1};
use crate::simd::avx2::transpose4;
use crate::simd::avx512::Avx512Vnni;
use crate::simd::each;

/// Writes the products of the rows of `out`, if their type is one of these.
pub(super) fn multiply(
    _: Avx512Vnni,
    weights: &Matrix<'_>,
    x: &Activations<'_>,
    out: &mut Block<'_, f32>,
) -> bool {
    // SAFETY: 1; and a file block has 256 columns.
    if unsafe { of_its_type(weights, x, out) } {
        return true;
    }
    // SAFETY: 1; and columns are whole pairs of file blocks.
    weights.cols().is_multiple_of(2 * BLOCK) && unsafe { two::of_its_type(weights, x, out) }
}

ways! {
    "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c", 8, |rows, x, ahead, sum|
    Iq4Xs, 136: iq4_xs(rows, x, ahead, sum);
}

/// Types of 32 columns, two file blocks at a time.
mod two {
    use super::*;

    ways! {
        "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c", 2, |rows, x, ahead, sum|
        Iq4Nl, 36: iq4_nl(rows, x, ahead, sum);
        Mxfp4, 34: mxfp4(rows, x, ahead, sum);
        Q5_0, 44: q5_0(rows, x, ahead, sum);
        Q5_1, 48: q5_1(rows, x, ahead, sum);
    }
}

/// Levels as bytes without signs.
#[derive(Clone, Copy)]
struct Table {
    bytes: [u8; 16],
    /// How much too large they are.
    offset: u8,
}

impl Table {
    const fn new(levels: [i8; 16], offset: u8) -> Self {
        Self {
            bytes: as_bytes(levels, offset),
            offset,
        }
    }
}

/// The least of them is -127.
const TABLE: Table = Table::new(LEVELS, 127);

/// Weights of two blocks of columns: of each, of four rows and of the other four, and of the first and the second half.
type Weights = [[[__m512i; 2]; 2]; 2];

/// The low and the high nibbles of bytes.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn nibbles(bytes: __m512i) -> [__m512i; 2] {
    let mask = _mm512_set1_epi8(15);
    [
        _mm512_and_si512(bytes, mask),
        _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), mask),
    ]
}

/// What the nibbles at two places name.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn levels<const BYTES: usize>(rows: &Blocks<'_, BYTES>, at: [usize; 2], table: &Table) -> Weights {
    let zero = _mm512_setzero_si512();
    // SAFETY: 2.
    let levels = unsafe { _mm_loadu_si128(table.bytes.as_ptr().cast()) };
    let levels = _mm512_broadcast_i32x4(levels);
    each!([[zero; 2]; 2], |part| {
        let bytes = quads(rows, at[part]);
        each!([zero; 2], |four| {
            let nibbles = nibbles(bytes[four]);
            each!(zero, |half| _mm512_shuffle_epi8(levels, nibbles[half]))
        })
    })
}

/// Dot products of blocks `first` and `first + 1`, whose weights are `offset` too large: lanes 0 to 7 of the one, lanes 8 to 15
/// of the other.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
#[inline]
fn two_dots<const PARTS: usize>(
    x: &Values<'_, PARTS>,
    first: usize,
    weights: &Weights,
    offset: u8,
) -> __m512i {
    let mut dots = [[_mm512_setzero_si512(); 2]; 2];
    for part in 0..2 {
        for index in 0..2 {
            let values = half(x, first + part, index);
            for four in 0..2 {
                let weights = weights[part][four][index];
                dots[part][four] = _mm512_dpbusd_epi32(dots[part][four], weights, values);
            }
        }
    }
    let lacking: [i32; 2] = each!(0, |part| {
        let sums = x.half_sums.map(|sums| sums[first + part]);
        -i32::from(offset) * (sums[0] + sums[1])
    });
    _mm512_add_epi32(sum_rows(dots[0], dots[1]), both(lacking[0], lacking[1]))
}

/// Adds the terms of two blocks from `first` on, of so many dot products and scales.
#[target_feature(enable = "avx512f,avx512dq,avx2,fma")]
#[inline]
fn add_two<const PARTS: usize>(
    x: &Values<'_, PARTS>,
    first: usize,
    dots: __m512i,
    scale: __m512,
    minima: Option<__m512>,
    mut sum: __m256,
) -> __m256 {
    let terms = halves(_mm512_mul_ps(_mm512_cvtepi32_ps(dots), scale));
    for part in 0..2 {
        let block = first + part;
        sum = _mm256_fmadd_ps(terms[part], _mm256_set1_ps(x.scale[block]), sum);
        if let Some(minima) = minima {
            let unit = _mm256_set1_ps(x.scaled_sum[block]);
            sum = _mm256_fmadd_ps(halves(minima)[part], unit, sum);
        }
    }
    sum
}

/// The binary16 at each of two places of each row.
#[target_feature(enable = "avx512f,avx2")]
#[inline]
fn f16_of_two<const BYTES: usize>(rows: &Blocks<'_, BYTES>, at: [usize; 2]) -> __m512 {
    let x: [[i16; ROWS]; 2] = each!([0; ROWS], |i| each!(0, |r| u16_at(rows[r], at[i]) as i16));
    let [a, b] = x;
    let low = _mm_setr_epi16(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]);
    let high = _mm_setr_epi16(b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]);
    _mm512_cvtph_ps(_mm256_set_m128i(high, low))
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
#[inline]
fn iq4_nl(rows: &Blocks<'_, 36>, x: &Values<'_, 2>, ahead: Ahead<36>, sum: __m256) -> __m256 {
    ahead.prefetch(rows, 0, 1);
    let weights = levels(rows, [2, 20], &TABLE);
    let dots = two_dots(x, 0, &weights, TABLE.offset);
    add_two(x, 0, dots, f16_of_two(rows, [0, 18]), None, sum)
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
#[inline]
fn mxfp4(rows: &Blocks<'_, 34>, x: &Values<'_, 2>, ahead: Ahead<34>, sum: __m256) -> __m256 {
    const TABLE: Table = Table::new(FLOATS, FLOATS_OFFSET);
    ahead.prefetch(rows, 0, 1);
    let weights = levels(rows, [1, 18], &TABLE);
    let dots = two_dots(x, 0, &weights, TABLE.offset);
    let e: [[i8; ROWS]; 2] = each!([0; ROWS], |i| each!(0, |r| rows[r][17 * i].cast_signed()));
    let [a, b] = e;
    let e = _mm_setr_epi8(
        a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], b[0], b[1], b[2], b[3], b[4], b[5], b[6],
        b[7],
    );
    add_two(x, 0, dots, powers(_mm512_cvtepu8_epi32(e)), None, sum)
}

/// [`power`](crate::quantized::codebooks::power) of each lane.
#[target_feature(enable = "avx512f")]
#[inline]
fn powers(exponent: __m512i) -> __m512 {
    let factor = |e| {
        let biased = _mm512_add_epi32(e, _mm512_set1_epi32(63));
        _mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased))
    };
    let half = _mm512_srli_epi32::<1>(exponent);
    _mm512_mul_ps(factor(half), factor(_mm512_sub_epi32(exponent, half)))
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
#[inline]
fn iq4_xs(rows: &Blocks<'_, 136>, x: &Values<'_, 8>, ahead: Ahead<136>, mut sum: __m256) -> __m256 {
    let d = f16_of_rows(rows, 0);
    let d = numbers_twice(d);
    let header = transpose4(each!(_mm256_setzero_si256(), |r| pair(rows, r, 0)));
    let (high, low) = (twice(_mm256_srli_epi32::<16>(header[0])), twice(header[1]));
    for two in 0..4 {
        ahead.prefetch(rows, two, 4);
        let part = 2 * two;
        let weights = levels(rows, [8 + 16 * part, 24 + 16 * part], &TABLE);
        let dots = two_dots(x, part, &weights, TABLE.offset);
        // Six bits of each block: four in one word, two in another.
        let shift = 4 * part as i32;
        let lower = _mm512_srlv_epi32(low, both(shift, shift + 4));
        let upper = _mm512_srlv_epi32(high, both(shift / 2, shift / 2 + 2));
        let lower = _mm512_and_si512(lower, _mm512_set1_epi32(15));
        let upper = _mm512_and_si512(upper, _mm512_set1_epi32(3));
        let six = _mm512_or_si512(lower, _mm512_slli_epi32::<4>(upper));
        let scale = _mm512_cvtepi32_ps(_mm512_sub_epi32(six, _mm512_set1_epi32(32)));
        sum = add_two(x, part, dots, _mm512_mul_ps(d, scale), None, sum);
    }
    sum
}

/// The first sixteen bytes of two file blocks of each row: their scales and fifth bits are among them.
struct Heads([[__m512i; 2]; 2]);

impl Heads {
    #[target_feature(enable = "avx512f")]
    #[inline]
    fn read<const BYTES: usize>(rows: &Blocks<'_, BYTES>) -> Self {
        Self([quads(rows, 0), quads(rows, BYTES / 2)])
    }

    /// The binary16 that is the `index`-th of each block.
    #[target_feature(enable = "avx512f,avx512bw,avx2")]
    #[inline]
    fn f16(&self, index: i16) -> __m512 {
        // A register has 32, of which every eighth begins a row.
        let first = _mm_add_epi16(
            _mm_setr_epi16(0, 8, 16, 24, 32, 40, 48, 56),
            _mm_set1_epi16(index),
        );
        let order = _mm512_castsi128_si512(first);
        let [low, high]: [_; 2] = each!(first, |part| {
            let [a, b] = self.0[part];
            _mm512_castsi512_si128(_mm512_permutex2var_epi16(a, order, b))
        });
        _mm512_cvtph_ps(_mm256_set_m128i(high, low))
    }

    /// The nibbles `behind` bytes from the beginnings of blocks, with the fifth bits that are `at` bytes from there.
    #[target_feature(enable = "avx512f,avx512bw")]
    #[inline]
    fn weights<const BYTES: usize>(
        &self,
        rows: &Blocks<'_, BYTES>,
        at: i8,
        behind: usize,
    ) -> Weights {
        let zero = _mm512_setzero_si512();
        // A bit of each byte: eight columns have theirs in one.
        let bit = _mm512_set1_epi64(0x8040_2010_0804_0201_u64.cast_signed());
        let byte: [__m512i; 2] = each!(zero, |half| {
            let first = at + 2 * half as i8;
            let (first, second) = (_mm_set1_epi8(first), _mm_set1_epi8(first + 1));
            _mm512_broadcast_i32x4(_mm_unpacklo_epi64(first, second))
        });
        each!([[zero; 2]; 2], |part| {
            let bytes = quads(rows, part * BYTES / 2 + behind);
            each!([zero; 2], |four| {
                let nibbles = nibbles(bytes[four]);
                each!(zero, |half| {
                    let bits = _mm512_shuffle_epi8(self.0[part][four], byte[half]);
                    let set = _mm512_test_epi8_mask(bits, bit);
                    _mm512_mask_add_epi8(nibbles[half], set, nibbles[half], _mm512_set1_epi8(16))
                })
            })
        })
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
#[inline]
fn q5_0(rows: &Blocks<'_, 44>, x: &Values<'_, 2>, ahead: Ahead<44>, sum: __m256) -> __m256 {
    ahead.prefetch(rows, 0, 1);
    let heads = Heads::read(rows);
    let dots = two_dots(x, 0, &heads.weights(rows, 2, 6), 16);
    add_two(x, 0, dots, heads.f16(0), None, sum)
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
#[inline]
fn q5_1(rows: &Blocks<'_, 48>, x: &Values<'_, 2>, ahead: Ahead<48>, sum: __m256) -> __m256 {
    ahead.prefetch(rows, 0, 1);
    let heads = Heads::read(rows);
    let dots = two_dots(x, 0, &heads.weights(rows, 4, 8), 0);
    add_two(x, 0, dots, heads.f16(0), Some(heads.f16(1)), sum)
}
