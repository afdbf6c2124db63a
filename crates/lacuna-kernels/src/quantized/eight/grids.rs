//! Types whose weights are points of a table, without permutations of bytes ([`super::planes`]): eight columns
//! of four rows to a register.
//!
//! What can be is made ready for a whole file block of eight rows first: indices with their upper bits, the
//! signs of each row's 32 columns as a word, and scales, lanes of which are rows. What is left is to look
//! points up, of rows 0, 1, 4 and 5 and then of the others, to move signs to the activations, and to multiply.
//! For each 32 weights that is some 20 instructions for IQ2 and some 30 for IQ3, a third to a half of which are
//! loads. Those that fill vectors are two in a cycle and are what is short, others four. So indices are loaded
//! two at once, half of the points of IQ3 come through numbers, and constants stay in registers.
//!
//! # Safety
//! 1. As in [`super`]: what has target features, and what is inlined into it, is reached through
//!    [`super::multiply`] only.
//! 2. Loads go through references to arrays that are as long, unaligned.
#![expect(unsafe_code, reason = "intrinsics; see # Safety")]

mod points;

use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use super::{Ahead, Blocks, Eight, ROWS, Values, add_dots, eight, f16_of_rows};
use crate::quantized::formats::Format;
use crate::quantized::grids::{Grid, Iq2S, Iq2Xs, Iq2Xxs, Iq3S, Iq3Xxs};
use crate::quantized::panel::{Extra, HasExtra};
use crate::simd::avx2::{in_order, later};
use crate::simd::each;

/// Words of which lanes are rows, for each block of 32 columns.
type Words = [__m256i; 8];

/// Indices of the points of all rows, as many as a type has: bytes, or words of 16 bits. They are brought to
/// one place, which a single register points to, and are not initialized for nothing, which would take as
/// long as a tenth of the products.
type Indices = [[MaybeUninit<__m256i>; 4]; ROWS];

/// A storage type, eight rows at a time.
trait Points<const BYTES: usize>: Grid + Format {
    /// Whether one load has the indices of two times eight columns, which are then looked up together.
    const SHARED: bool;

    /// Writes the indices. Returns signs of each block of columns, and its scale's bits in the lowest of a word,
    /// those of its second half above them, if it has two.
    ///
    /// # Safety
    /// The CPU has AVX2.
    unsafe fn prepare(rows: &Blocks<'_, BYTES>, indices: &mut Indices) -> [Words; 2];

    /// At which byte those of a row's block of columns are: a sum of what each of them adds.
    fn place(row: usize, part: usize) -> usize;

    /// The magnitudes of the `eight`-th eight columns of a row, and of the next row: of the block of columns
    /// whose indices are at `place` for the first row.
    ///
    /// # Safety
    /// The CPU has AVX2, and [`Points::prepare`] has written the indices.
    unsafe fn points(place: *const u8, row: usize, eight: usize) -> __m128i;
}

eight!(Iq2Xxs, 66, 8, |rows, x, ahead, sum| {
    add::<Self, 66>(rows, x, ahead, sum)
});
eight!(Iq2Xs, 74, 8, |rows, x, ahead, sum| {
    add::<Self, 74>(rows, x, ahead, sum)
});
eight!(Iq2S, 82, 8, |rows, x, ahead, sum| {
    add::<Self, 82>(rows, x, ahead, sum)
});
eight!(Iq3Xxs, 98, 8, |rows, x, ahead, sum| {
    add::<Self, 98>(rows, x, ahead, sum)
});
eight!(Iq3S, 110, 8, |rows, x, ahead, sum| {
    add::<Self, 110>(rows, x, ahead, sum)
});

/// Adds the terms of a file block of each row.
///
/// # Safety
/// The CPU has AVX2, FMA and F16C.
#[inline(always)]
unsafe fn add<G: Points<BYTES>, const BYTES: usize>(
    rows: &Blocks<'_, BYTES>,
    x: &Values<'_, 8>,
    ahead: Ahead<BYTES>,
    mut sum: __m256,
) -> __m256 {
    // SAFETY: by the caller's promise, 2.
    unsafe {
        let d = _mm256_mul_ps(f16_of_rows(rows, 0), _mm256_set1_ps(G::UNIT));
        let mut indices = [const { [const { MaybeUninit::uninit() }; 4] }; ROWS];
        let [signs, scales] = G::prepare(rows, &mut indices);
        let rule = Rule {
            orders: each!(_mm256_setzero_si256(), |eight| order(eight)),
            // In registers: the compiler would load them for each block of columns.
            up: in_order(_mm256_set1_epi64x(0x0002_0008_0020_0080)),
            ones: in_order(_mm256_set1_epi16(1)),
        };
        // All at once: their constants are loaded once.
        let second_scales: [_; 8] = each!(d, |part| match G::Extra::EXTRA {
            Extra::SecondScale => odd(d, _mm256_srli_epi32::<4>(scales[part])),
            _ => d,
        });
        let scales: [_; 8] = each!(d, |part| odd(d, scales[part]));
        for part in 0..8 {
            ahead.prefetch(rows, part, 8);
            let moved = _mm256_srli_epi32::<1>(signs[part]);
            let signs = [
                _mm256_unpacklo_epi32(signs[part], moved),
                _mm256_unpackhi_epi32(signs[part], moved),
            ];
            let mut place = indices.as_ptr().cast::<u8>().add(G::place(0, part));
            let first = half_dots::<G, BYTES, 0>(&mut place, &x.q[part], signs, &rule);
            let second = half_dots::<G, BYTES, 1>(&mut place, &x.q[part], signs, &rule);
            if G::Extra::EXTRA == Extra::SecondScale {
                sum = add_dots(x, part, sum_twos(first), scales[part], sum);
                sum = add_dots(x, part, sum_twos(second), second_scales[part], sum);
            } else {
                let both = each!(first[0], |i| _mm256_add_epi32(first[i], second[i]));
                sum = add_dots(x, part, sum_twos(both), scales[part], sum);
            }
        }
    }
    sum
}

/// How signs come to their columns, and what sums products.
struct Rule {
    orders: [__m256i; 4],
    up: __m256i,
    ones: __m256i,
}

/// Dot products of half a block of columns, two to a row: of rows 0, 1, 4 and 5, and of the others. Signs of a
/// row are a word, and the same, moved to the right by one.
///
/// # Safety
/// The CPU has AVX2, and [`Points::prepare`] has written the indices, of which `place` says where.
#[inline(always)]
unsafe fn half_dots<G: Points<BYTES>, const BYTES: usize, const HALF: usize>(
    place: &mut *const u8,
    q: &[u32; 8],
    signs: [__m256i; 2],
    rule: &Rule,
) -> [__m256i; 2] {
    // SAFETY: by the caller's promise.
    unsafe {
        let zero = _mm256_setzero_si256();
        let values: [_; 2] = each!(zero, |i| eight_values(q, 2 * HALF + i));
        // Two values to choose from: known as negatives they would be made anew for each row.
        let negatives: [_; 2] = each!(zero, |i| in_order(_mm256_sub_epi8(zero, values[i])));
        each!(zero, |last| {
            let products: [_; 2] = each!(zero, |i| {
                let eight = 2 * HALF + i;
                let magnitudes = _mm256_set_m128i(
                    G::points(*place, 2 * last + 4, eight),
                    G::points(*place, 2 * last, eight),
                );
                // A multiplication moves the bit of two neighbours to the highest place, at which a blend looks.
                let signs = _mm256_shuffle_epi8(signs[last], rule.orders[eight]);
                let highest = _mm256_mullo_epi16(signs, rule.up);
                let signed = _mm256_blendv_epi8(values[i], negatives[i], highest);
                let product = _mm256_maddubs_epi16(magnitudes, signed);
                // Or points of many rows would be looked up at once, and wait in memory.
                if !G::SHARED {
                    *place = later(*place, product);
                }
                product
            });
            // `62 * 127 * 4 < 2^15`.
            let both = _mm256_add_epi16(products[0], products[1]);
            let dots = _mm256_madd_epi16(both, rule.ones);
            *place = later(*place, dots);
            dots
        })
    }
}

/// Which bytes of signs those of eight columns are taken from: of a row's word for even columns, of the moved
/// one for odd columns.
#[target_feature(enable = "avx2")]
#[inline]
fn order(eight: usize) -> __m256i {
    let byte = |first: i64| 0x0400_0400_0400_0400 + 0x0101_0101_0101_0101 * (first + eight as i64);
    _mm256_setr_epi64x(byte(0), byte(8), byte(0), byte(8))
}

/// The `eight`-th eight values, for each row.
#[target_feature(enable = "avx2")]
#[inline]
fn eight_values(q: &[u32; 8], eight: usize) -> __m256i {
    let values = &q.as_chunks::<2>().0[eight];
    // SAFETY: 2.
    _mm256_broadcastq_epi64(unsafe { _mm_loadl_epi64(values.as_ptr().cast()) })
}

/// The sum of each row, of twos of rows 0, 1, 4 and 5, and of the others.
#[target_feature(enable = "avx2")]
#[inline]
fn sum_twos([first, last]: [__m256i; 2]) -> __m256i {
    let [even, odd] = every_other(first, last);
    // Not as the instruction that makes three of it.
    _mm256_add_epi32(even, in_order(odd))
}

/// The even words of each half of two registers, and the odd ones.
#[target_feature(enable = "avx2")]
#[inline]
fn every_other(first: __m256i, last: __m256i) -> [__m256i; 2] {
    let (first, last) = (_mm256_castsi256_ps(first), _mm256_castsi256_ps(last));
    [
        _mm256_castps_si256(_mm256_shuffle_ps::<0x88>(first, last)),
        _mm256_castps_si256(_mm256_shuffle_ps::<0xDD>(first, last)),
    ]
}

/// `d` times an odd number: twice the lowest four bits of each lane, and one.
#[target_feature(enable = "avx2,fma")]
#[inline]
fn odd(d: __m256, bits: __m256i) -> __m256 {
    let bits = _mm256_cvtepi32_ps(_mm256_and_si256(bits, _mm256_set1_epi32(15)));
    // Whole numbers below 32, so that nothing is rounded.
    let odd = _mm256_fmadd_ps(bits, _mm256_set1_ps(2.0), _mm256_set1_ps(1.0));
    _mm256_mul_ps(d, odd)
}
