//! Types whose weights are points of a table, without permutations of bytes ([`super::planes`]): a row of 32
//! columns to a register.
//!
//! What can be is made ready for a whole file block of eight rows first: indices with their upper bits, the
//! signs of each row's 32 columns as a word, and scales, lanes of which are rows. What is left for each row
//! is to look its points up and to multiply, and that the signs move to the activations.
//!
//! # Safety
//! 1. As in [`super`]: what has target features, and what is inlined into it, is reached through
//!    [`super::multiply`] only.
//! 2. Loads and stores go through references to arrays that are as long, unaligned.
#![expect(unsafe_code, reason = "intrinsics; see # Safety")]

use std::arch::x86_64::*;

use super::{Ahead, Blocks, Eight, ROWS, Values, add_dots, eight, f16_of_rows, pair, sum_halves};
use crate::quantized::formats::Format;
use crate::quantized::grids::{Grid, Iq2S, Iq2Xs, Iq2Xxs, Iq3S, Iq3Xxs, bytes};
use crate::quantized::panel::{Extra, HasExtra};
use crate::simd::avx2::transpose4;
use crate::simd::each;

/// Words of which lanes are rows, for each block of 32 columns.
type Words = [__m256i; 8];

/// Indices of the points of a row, four to a word: to shift them out of one takes less than as many loads.
type Indices = [u64; 16];

/// A storage type, eight rows at a time.
trait Points<const BYTES: usize>: Grid + Format {
    /// Indices with their upper bits, where those are elsewhere in the file block.
    ///
    /// # Safety
    /// The CPU has AVX2.
    #[inline(always)]
    unsafe fn indices(_: &[u8; BYTES]) -> Indices {
        [0; 16]
    }

    /// The magnitudes of 32 columns.
    ///
    /// # Safety
    /// The CPU has AVX2.
    unsafe fn points(block: &[u8; BYTES], indices: &Indices, part: usize) -> __m256i;

    /// Signs of each block of columns, and its scale's bits in the lowest of a word, those of its second half
    /// above them, if it has two.
    ///
    /// # Safety
    /// The CPU has AVX2.
    unsafe fn signs_and_scales(rows: &Blocks<'_, BYTES>) -> [Words; 2];
}

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
///
/// # Safety
/// The CPU has AVX2, FMA and F16C.
#[inline(always)]
unsafe fn add<G: Points<BYTES>, const BYTES: usize, const CACHE: i32>(
    rows: &Blocks<'_, BYTES>,
    x: &Values<'_, 8>,
    ahead: Ahead<CACHE>,
    mut sum: __m256,
) -> __m256 {
    // SAFETY: by the caller's promise, 2.
    unsafe {
        let d = _mm256_mul_ps(f16_of_rows(rows, 0), _mm256_set1_ps(G::UNIT));
        let indices: [Indices; ROWS] = each!([0; 16], |r| G::indices(rows[r]));
        let [signs, scales] = G::signs_and_scales(rows);
        let mut words = [[0; ROWS]; 8];
        for part in 0..8 {
            _mm256_storeu_si256(words[part].as_mut_ptr().cast(), signs[part]);
        }
        for part in 0..8 {
            ahead.prefetch(part * ROWS * BYTES / 8, ROWS * BYTES / 8);
            let values = _mm256_loadu_si256(x.q[part].as_ptr().cast());
            let values = [values, _mm256_sub_epi8(_mm256_setzero_si256(), values)];
            let products: [_; ROWS] = each!(values[0], |r| {
                let magnitudes = G::points(rows[r], &indices[r], part);
                multiply(magnitudes, values, words[part][r])
            });
            let [low, high] = products.as_chunks::<4>().0 else {
                unreachable!("eight rows are four and four")
            };
            let (low, high) = (sum_halves(*low), sum_halves(*high));
            let first = _mm256_permute2x128_si256::<0x20>(low, high);
            let second = _mm256_permute2x128_si256::<0x31>(low, high);
            if G::Extra::EXTRA == Extra::SecondScale {
                sum = add_dots(x, part, first, odd(d, scales[part]), sum);
                let upper = _mm256_srli_epi32::<4>(scales[part]);
                sum = add_dots(x, part, second, odd(d, upper), sum);
            } else {
                let dots = _mm256_add_epi32(first, second);
                sum = add_dots(x, part, dots, odd(d, scales[part]), sum);
            }
        }
    }
    sum
}

/// Products of magnitudes and 32 activations, or, where `signs` has a bit, their negatives.
#[target_feature(enable = "avx2")]
#[inline]
fn multiply(magnitudes: __m256i, [values, negatives]: [__m256i; 2], signs: u32) -> __m256i {
    // Byte `i / 8` of four, for sign `i`, and its bit.
    let byte = _mm256_setr_epi64x(
        0,
        0x0101_0101_0101_0101,
        0x0202_0202_0202_0202,
        0x0303_0303_0303_0303,
    );
    let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64.cast_signed());
    let signs = _mm256_shuffle_epi8(_mm256_set1_epi32(signs.cast_signed()), byte);
    let negative = _mm256_cmpeq_epi8(_mm256_and_si256(signs, bit), bit);
    let signed = _mm256_blendv_epi8(values, negatives, negative);
    // `62 * 127 * 2 < 2^14`, as what sums them takes.
    _mm256_maddubs_epi16(magnitudes, signed)
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

/// Eight signs for each seven bits in a byte: the number of negative ones is even.
#[target_feature(enable = "avx2")]
#[inline]
fn even(sevens: __m256i) -> __m256i {
    // The eighth sign of four bits.
    let odd = |bits: i32| if bits.count_ones() % 2 == 1 { 0x80 } else { 0 };
    let odd =
        |first: i32| odd(first) | odd(first + 1) << 8 | odd(first + 2) << 16 | odd(first + 3) << 24;
    let odd = _mm256_setr_epi32(
        odd(0),
        odd(4),
        odd(8),
        odd(12),
        odd(0),
        odd(4),
        odd(8),
        odd(12),
    );
    let four = _mm256_xor_si256(sevens, _mm256_srli_epi16::<4>(sevens));
    let four = _mm256_and_si256(four, _mm256_set1_epi8(15));
    _mm256_or_si256(sevens, _mm256_shuffle_epi8(odd, four))
}

/// The lowest four times seven bits of words, each in a byte.
#[target_feature(enable = "avx2")]
#[inline]
fn sevens(words: __m256i) -> __m256i {
    let of = |words, bits: i32| _mm256_and_si256(words, _mm256_set1_epi32(bits));
    let low = of(words, 0x3FFF);
    let fourteens = _mm256_or_si256(low, _mm256_slli_epi32::<2>(of(words, 0xFFF_C000)));
    let low = of(fourteens, 0x007F_007F);
    _mm256_or_si256(low, _mm256_slli_epi32::<1>(of(fourteens, 0x3F80_3F80)))
}

/// Signs and scales of words that hold four times seven signs and then four bits of scale.
#[target_feature(enable = "avx2")]
#[inline]
fn of_words(words: Words) -> [Words; 2] {
    [
        each!(words[0], |part| even(sevens(words[part]))),
        each!(words[0], |part| _mm256_srli_epi32::<28>(words[part])),
    ]
}

/// Sixteen bytes at `at` of each row, as words.
#[target_feature(enable = "avx2")]
#[inline]
fn four_words<const BYTES: usize>(rows: &Blocks<'_, BYTES>, at: usize) -> [__m256i; 4] {
    transpose4(each!(_mm256_setzero_si256(), |r| pair(rows, r, at)))
}

/// Thirty-two bytes at `at` of each row, as words.
#[target_feature(enable = "avx2")]
#[inline]
fn eight_words<const BYTES: usize>(rows: &Blocks<'_, BYTES>, at: usize) -> Words {
    let (low, high) = (four_words(rows, at), four_words(rows, at + 16));
    each!(low[0], |i| if i < 4 { low[i] } else { high[i - 4] })
}

/// A byte for each part, in two words, in the lowest of a word each.
#[target_feature(enable = "avx2")]
#[inline]
fn bytes_apart(words: [__m256i; 2]) -> Words {
    each!(words[0], |part| {
        let shift = _mm_cvtsi32_si128(8 * (part as i32 % 4));
        _mm256_srl_epi32(words[part / 4], shift)
    })
}

/// Adds to each of sixteen bytes at `at` the bits of `mask` of a byte of `upper` times a factor, where
/// `order` names the bytes.
#[target_feature(enable = "avx2")]
#[inline]
fn with_upper<const BYTES: usize>(
    block: &[u8; BYTES],
    at: usize,
    upper: i64,
    [order, factors]: [__m256i; 2],
    mask: i16,
    out: &mut [u64; 4],
) {
    let low: &[u8; 16] = bytes(block, at);
    // SAFETY: 2.
    let low = unsafe { _mm256_cvtepu8_epi16(_mm_loadu_si128(low.as_ptr().cast())) };
    let upper = _mm256_shuffle_epi8(_mm256_set1_epi64x(upper), order);
    let upper = _mm256_mullo_epi16(upper, factors);
    let upper = _mm256_and_si256(upper, _mm256_set1_epi16(mask));
    // SAFETY: 2.
    unsafe { _mm256_storeu_si256(out.as_mut_ptr().cast(), _mm256_or_si256(low, upper)) };
}

/// One of four indices.
#[inline(always)]
fn index_of(words: u64, i: usize) -> u16 {
    (words >> (16 * i)) as u16
}

/// Eight bytes at `at`.
#[inline(always)]
fn i64_at<const BYTES: usize>(block: &[u8; BYTES], at: usize) -> i64 {
    i64::from_le_bytes(*bytes(block, at))
}

/// Four points of eight elements: sixteen bytes of the table where the point of an index has a place. So no
/// instruction is needed to put it there.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn of_eights(point: impl Fn(usize, usize) -> &'static [u64; 2]) -> __m256i {
    // SAFETY: by the caller's promise, 2.
    unsafe {
        let load = |i: usize| _mm_loadu_si128(point(i, i % 2).as_ptr().cast());
        let two = |i: usize| _mm_blend_epi32::<0b1100>(load(i), load(i + 1));
        _mm256_set_m128i(two(2), two(0))
    }
}

/// Eight points of four elements, as [`of_eights`] has them.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn of_fours(point: impl Fn(usize, usize) -> &'static [u32; 4]) -> __m256i {
    // SAFETY: by the caller's promise, 2.
    unsafe {
        let load = |i: usize| _mm_loadu_si128(point(i, i % 4).as_ptr().cast());
        let four = |i: usize| {
            let four = _mm_blend_epi32::<0b0010>(load(i), load(i + 1));
            let four = _mm_blend_epi32::<0b0100>(four, load(i + 2));
            _mm_blend_epi32::<0b1000>(four, load(i + 3))
        };
        _mm256_set_m128i(four(4), four(0))
    }
}

impl Points<66> for Iq2Xxs {
    #[inline(always)]
    unsafe fn points(block: &[u8; 66], _: &Indices, part: usize) -> __m256i {
        let indices: &[u8; 4] = bytes(block, 2 + 8 * part);
        // SAFETY: by the caller's promise.
        unsafe { of_eights(|i, place| Self::point_at(indices[i].into(), place)) }
    }

    #[inline(always)]
    unsafe fn signs_and_scales(rows: &Blocks<'_, 66>) -> [Words; 2] {
        // SAFETY: by the caller's promise.
        unsafe {
            // Every other word holds indices.
            let words: [_; 4] = each!([_mm256_setzero_si256(); 4], |i| four_words(
                rows,
                2 + 16 * i
            ));
            of_words(each!(words[0][0], |part| words[part / 2][1 + 2 * (part % 2)]))
        }
    }
}

impl Points<74> for Iq2Xs {
    #[inline(always)]
    unsafe fn points(block: &[u8; 74], _: &Indices, part: usize) -> __m256i {
        let words = i64_at(block, 2 + 8 * part).cast_unsigned();
        // SAFETY: by the caller's promise.
        unsafe { of_eights(|i, place| Self::point_at(index_of(words, i), place)) }
    }

    #[inline(always)]
    unsafe fn signs_and_scales(rows: &Blocks<'_, 74>) -> [Words; 2] {
        // SAFETY: by the caller's promise.
        unsafe {
            let words: [_; 4] = each!([_mm256_setzero_si256(); 4], |i| four_words(
                rows,
                2 + 16 * i
            ));
            let signs = each!(words[0][0], |part| {
                // The upper seven bits of two times 16.
                let two = |word: usize| {
                    let sevens = _mm256_srli_epi16::<9>(words[part / 2][2 * (part % 2) + word]);
                    _mm256_or_si256(sevens, _mm256_srli_epi32::<8>(sevens))
                };
                let low = _mm256_and_si256(two(0), _mm256_set1_epi32(0xFFFF));
                even(_mm256_or_si256(low, _mm256_slli_epi32::<16>(two(1))))
            });
            let [.., first, second] = four_words(rows, 58);
            [signs, bytes_apart([first, second])]
        }
    }
}

impl Points<82> for Iq2S {
    #[inline(always)]
    unsafe fn indices(block: &[u8; 82]) -> Indices {
        let mut indices = [0; 16];
        let upper = i64_at(block, 66);
        // SAFETY: by the caller's promise.
        unsafe {
            // Two bits each, the lowest first, to bits 8 and 9.
            let factors = _mm256_set1_epi64x(0x0004_0010_0040_0100);
            let (out, _) = indices.as_chunks_mut();
            for half in 0..2 {
                let byte =
                    |i: i64| 0xFF00_FF00_FF00_FF00_u64.cast_signed() | (i * 0x0001_0001_0001_0001);
                let first = 4 * half as i64;
                let order = _mm256_setr_epi64x(
                    byte(first),
                    byte(first + 1),
                    byte(first + 2),
                    byte(first + 3),
                );
                with_upper(
                    block,
                    2 + 16 * half,
                    upper,
                    [order, factors],
                    0x300,
                    &mut out[half],
                );
            }
        }
        indices
    }

    #[inline(always)]
    unsafe fn points(_: &[u8; 82], indices: &Indices, part: usize) -> __m256i {
        // SAFETY: by the caller's promise.
        unsafe { of_eights(|i, place| Self::point_at(index_of(indices[part], i), place)) }
    }

    #[inline(always)]
    unsafe fn signs_and_scales(rows: &Blocks<'_, 82>) -> [Words; 2] {
        // SAFETY: by the caller's promise.
        unsafe {
            let [.., first, second] = four_words(rows, 66);
            [eight_words(rows, 34), bytes_apart([first, second])]
        }
    }
}

impl Points<98> for Iq3Xxs {
    #[inline(always)]
    unsafe fn points(block: &[u8; 98], _: &Indices, part: usize) -> __m256i {
        let indices: &[u8; 8] = bytes(block, 2 + 8 * part);
        // SAFETY: by the caller's promise.
        unsafe { of_fours(|i, place| Self::point_at(indices[i].into(), place)) }
    }

    #[inline(always)]
    unsafe fn signs_and_scales(rows: &Blocks<'_, 98>) -> [Words; 2] {
        // SAFETY: by the caller's promise.
        unsafe { of_words(eight_words(rows, 66)) }
    }
}

impl Points<110> for Iq3S {
    #[inline(always)]
    unsafe fn indices(block: &[u8; 110]) -> Indices {
        let mut indices = [0; 16];
        let upper = i64_at(block, 66);
        // SAFETY: by the caller's promise.
        unsafe {
            // A bit each, the lowest first, to bit 8.
            let factors = _mm256_setr_epi64x(
                0x0020_0040_0080_0100,
                0x0002_0004_0008_0010,
                0x0020_0040_0080_0100,
                0x0002_0004_0008_0010,
            );
            let (out, _) = indices.as_chunks_mut();
            for two in 0..4 {
                let byte =
                    |i: i64| 0xFF00_FF00_FF00_FF00_u64.cast_signed() | (i * 0x0001_0001_0001_0001);
                let (first, second) = (byte(2 * two as i64), byte(2 * two as i64 + 1));
                let order = _mm256_setr_epi64x(first, first, second, second);
                with_upper(
                    block,
                    2 + 16 * two,
                    upper,
                    [order, factors],
                    0x100,
                    &mut out[two],
                );
            }
        }
        indices
    }

    #[inline(always)]
    unsafe fn points(_: &[u8; 110], indices: &Indices, part: usize) -> __m256i {
        // SAFETY: by the caller's promise.
        unsafe {
            of_fours(|i, place| Self::point_at(index_of(indices[2 * part + i / 4], i % 4), place))
        }
    }

    #[inline(always)]
    unsafe fn signs_and_scales(rows: &Blocks<'_, 110>) -> [Words; 2] {
        // SAFETY: by the caller's promise.
        unsafe {
            let [.., scales] = four_words(rows, 94);
            let scales = each!(scales, |part| {
                let shift = _mm_cvtsi32_si128(4 * part as i32);
                _mm256_srl_epi32(scales, shift)
            });
            [eight_words(rows, 74), scales]
        }
    }
}
