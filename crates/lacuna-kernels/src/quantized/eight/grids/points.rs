//! What [`super`] makes ready of each type, and how its points are looked up.
//!
//! # Safety
//! 1. As in [`super`]: what has target features, and what is inlined into it, is reached through it only.
//! 2. Loads and stores go through references to arrays that are as long, unaligned.
//! 3. Indices are read where [`Points::prepare`] has written them, below the number of points.
#![expect(unsafe_code, reason = "intrinsics; see # Safety")]

use std::arch::x86_64::*;
use std::hint::assert_unchecked;
use std::ptr;

use super::super::{Blocks, pair};
use super::{Indices, Points, Words, every_other};
use crate::quantized::grids::{Iq2S, Iq2Xs, Iq2Xxs, Iq3S, Iq3Xxs, bytes};
use crate::simd::avx2::transpose4;
use crate::simd::each;

/// Eight signs for each lower seven bits of a byte: the number of negative ones is even. The eighth bit may be
/// anything: it is turned if the number with it is odd, and so becomes what it should be.
#[target_feature(enable = "avx2")]
#[inline]
fn even(sevens: __m256i) -> __m256i {
    // What four bits turn of the eighth sign.
    let odd = |bits: i32| if bits.count_ones() % 2 == 1 { 0x80 } else { 0 };
    let odd =
        |first: i32| odd(first) | odd(first + 1) << 8 | odd(first + 2) << 16 | odd(first + 3) << 24;
    let odd = _mm_setr_epi32(odd(0), odd(4), odd(8), odd(12));
    let odd = _mm256_broadcastsi128_si256(odd);
    let four = _mm256_xor_si256(sevens, _mm256_srli_epi16::<4>(sevens));
    let four = _mm256_and_si256(four, _mm256_set1_epi8(15));
    _mm256_xor_si256(sevens, _mm256_shuffle_epi8(odd, four))
}

/// The lowest four times seven bits of words, each in a byte, of which the eighth bit may be anything.
#[target_feature(enable = "avx2")]
#[inline]
fn sevens(words: __m256i) -> __m256i {
    let fourteens = _mm256_blend_epi16::<0xAA>(words, _mm256_slli_epi32::<2>(words));
    // What is added to itself moves by one.
    let upper = _mm256_and_si256(fourteens, _mm256_set1_epi16(0xFF80_u16.cast_signed()));
    _mm256_add_epi16(fourteens, upper)
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

/// 32 bytes at `at`.
#[target_feature(enable = "avx2")]
#[inline]
fn load32<const BYTES: usize>(block: &[u8; BYTES], at: usize) -> __m256i {
    let bytes: &[u8; 32] = bytes(block, at);
    // SAFETY: 2.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

/// Value `i` at `place`.
///
/// # Safety
/// It was written, and any bytes are a value.
#[inline(always)]
unsafe fn read<T: Copy>(place: *const u8, i: usize) -> T {
    // SAFETY: by the caller's promise.
    unsafe { place.cast::<T>().add(i).read() }
}

/// The `i`-th index at `place`, which is loaded with its neighbour.
///
/// # Safety
/// It was written, below `POINTS`.
#[inline(always)]
unsafe fn index_of_two<const POINTS: usize>(place: *const u8, i: usize) -> u16 {
    // SAFETY: by the caller's promise.
    unsafe {
        let two = read::<u32>(place, i / 2);
        below::<POINTS>((two >> (16 * (i % 2))) as u16)
    }
}

/// [`Points::place`] of indices that lie between others: of [`pair`]s of rows, eight bytes for each block of
/// columns.
#[inline(always)]
fn place_in_pairs(row: usize, part: usize) -> usize {
    128 * (row % 4) + 16 * (row / 4) + 32 * (part / 2) + 8 * (part % 2)
}

/// An index that is known to be below `POINTS`, so that nobody looks.
///
/// # Safety
/// It is.
#[inline(always)]
unsafe fn below<const POINTS: usize>(index: u16) -> u16 {
    // SAFETY: by the caller's promise.
    unsafe { assert_unchecked(usize::from(index) < POINTS) };
    index
}

/// Eight bytes at `at`.
#[inline(always)]
fn i64_at<const BYTES: usize>(block: &[u8; BYTES], at: usize) -> i64 {
    i64::from_le_bytes(*bytes(block, at))
}

/// Two points of eight elements.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn of_eights(point: impl Fn(usize) -> &'static u64) -> __m128i {
    // SAFETY: by the caller's promise, 2.
    unsafe {
        let low = _mm_load_sd(ptr::from_ref(point(0)).cast());
        _mm_castpd_si128(_mm_loadh_pd(low, ptr::from_ref(point(1)).cast()))
    }
}

/// Four points of four elements, of which the first `two` have come through a register of numbers: loads of
/// vectors, and what puts them side by side, are what most of the time goes to.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn of_fours(two: u64, point: impl Fn(usize) -> &'static u32) -> __m128i {
    // SAFETY: by the caller's promise, 2.
    unsafe {
        let load = |i: usize| _mm_load_ss(ptr::from_ref(point(i)).cast());
        let two = _mm_castsi128_ps(_mm_cvtsi64_si128(two.cast_signed()));
        let four = _mm_insert_ps::<0x20>(two, load(0));
        _mm_castps_si128(_mm_insert_ps::<0x30>(four, load(1)))
    }
}

impl Points<66> for Iq2Xxs {
    const SHARED: bool = true;

    #[inline(always)]
    fn place(row: usize, part: usize) -> usize {
        place_in_pairs(row, part)
    }

    #[inline(always)]
    unsafe fn prepare(rows: &Blocks<'_, 66>, indices: &mut Indices) -> [Words; 2] {
        // SAFETY: by the caller's promise.
        unsafe {
            let zero = _mm256_setzero_si256();
            let words: [_; 4] = each!([zero; 2], |i| {
                let pairs: [_; 4] = each!(zero, |r| pair(rows, r, 2 + 16 * i));
                for r in 0..4 {
                    indices[r][i].write(pairs[r]);
                }
                // Every other word holds indices.
                let [_, first] = every_other(pairs[0], pairs[1]);
                let [_, last] = every_other(pairs[2], pairs[3]);
                every_other(first, last)
            });
            of_words(each!(zero, |part| words[part / 2][part % 2]))
        }
    }

    #[inline(always)]
    unsafe fn points(place: *const u8, row: usize, eight: usize) -> __m128i {
        // SAFETY: by the caller's promise, 3.
        unsafe {
            of_eights(|i| {
                let two = read::<u16>(place.add(Self::place(row + i, 0)), eight / 2);
                Self::point(two.to_le_bytes()[eight % 2].into())
            })
        }
    }
}

impl Points<74> for Iq2Xs {
    const SHARED: bool = true;

    #[inline(always)]
    fn place(row: usize, part: usize) -> usize {
        place_in_pairs(row, part)
    }

    #[inline(always)]
    unsafe fn prepare(rows: &Blocks<'_, 74>, indices: &mut Indices) -> [Words; 2] {
        // SAFETY: by the caller's promise.
        unsafe {
            let zero = _mm256_setzero_si256();
            let nine = _mm256_set1_epi16(0x1FF);
            let words: [_; 4] = each!([zero; 2], |i| {
                let pairs: [_; 4] = each!(zero, |r| pair(rows, r, 2 + 16 * i));
                for r in 0..4 {
                    indices[r][i].write(_mm256_and_si256(pairs[r], nine));
                }
                let upper = pairs.map(|pair| _mm256_srli_epi16::<9>(pair));
                let sevens = |a, b| even(_mm256_packus_epi16(a, b));
                every_other(sevens(upper[0], upper[1]), sevens(upper[2], upper[3]))
            });
            let [.., first, second] = four_words(rows, 58);
            [
                each!(zero, |part| words[part / 2][part % 2]),
                bytes_apart([first, second]),
            ]
        }
    }

    #[inline(always)]
    unsafe fn points(place: *const u8, row: usize, eight: usize) -> __m128i {
        // SAFETY: by the caller's promise, 3.
        unsafe {
            of_eights(|i| {
                let place = place.add(Self::place(row + i, 0));
                Self::point(index_of_two::<{ Self::POINTS }>(place, eight))
            })
        }
    }
}

impl Points<82> for Iq2S {
    const SHARED: bool = true;

    #[inline(always)]
    fn place(row: usize, part: usize) -> usize {
        // Of 32 indices the second eight and the last are in another register.
        128 * row + 32 * (part / 2 % 2) + 16 * (part / 4) + 8 * (part % 2)
    }

    #[inline(always)]
    unsafe fn prepare(rows: &Blocks<'_, 82>, indices: &mut Indices) -> [Words; 2] {
        // SAFETY: by the caller's promise.
        unsafe {
            // Two bits each, the lowest first: of bytes, and of bytes moved to the right by four.
            let bits = _mm256_set1_epi16(0x0C03);
            let levels = _mm256_broadcastsi128_si256(_mm_setr_epi8(
                0, 1, 2, 3, 1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0,
            ));
            let byte = |i: i64| 0x0909_0101_0808_0000 + 0x0202_0202_0202_0202 * i;
            let order = _mm256_setr_epi64x(byte(0), byte(1), byte(2), byte(3));
            for (block, out) in rows.iter().zip(&mut *indices) {
                let upper = _mm256_set1_epi64x(i64_at(block, 66));
                let upper = _mm256_unpacklo_epi64(upper, _mm256_srli_epi16::<4>(upper));
                let low = load32(block, 2);
                let bits = _mm256_and_si256(_mm256_shuffle_epi8(upper, order), bits);
                let upper = _mm256_shuffle_epi8(levels, bits);
                out[0].write(_mm256_unpacklo_epi8(low, upper));
                out[1].write(_mm256_unpackhi_epi8(low, upper));
            }
            let [.., first, second] = four_words(rows, 66);
            [eight_words(rows, 34), bytes_apart([first, second])]
        }
    }

    #[inline(always)]
    unsafe fn points(place: *const u8, row: usize, eight: usize) -> __m128i {
        // SAFETY: by the caller's promise, 3.
        unsafe {
            of_eights(|i| {
                let place = place.add(Self::place(row + i, 0));
                Self::point(index_of_two::<{ Self::POINTS }>(place, eight))
            })
        }
    }
}

impl Points<98> for Iq3Xxs {
    const SHARED: bool = false;

    #[inline(always)]
    fn place(row: usize, part: usize) -> usize {
        128 * row + 8 * part
    }

    #[inline(always)]
    unsafe fn prepare(rows: &Blocks<'_, 98>, indices: &mut Indices) -> [Words; 2] {
        for (block, out) in rows.iter().zip(&mut *indices) {
            for (half, out) in out.iter_mut().take(2).enumerate() {
                // SAFETY: by the caller's promise.
                out.write(unsafe { load32(block, 2 + 32 * half) });
            }
        }
        // SAFETY: by the caller's promise.
        unsafe { of_words(eight_words(rows, 66)) }
    }

    #[inline(always)]
    unsafe fn points(place: *const u8, row: usize, eight: usize) -> __m128i {
        // SAFETY: by the caller's promise, 3.
        unsafe {
            let (first, next) = (
                place.add(Self::place(row, 0)),
                place.add(Self::place(row + 1, 0)),
            );
            let two = read::<u16>(first, eight).to_le_bytes();
            // These one by one: then as many instructions are loads as are not.
            let index = |i| read::<u8>(next, 2 * eight + i).into();
            let two = Self::two(two.map(|index| index.into()));
            of_fours(two, |i| Self::point(index(i)))
        }
    }
}

impl Points<110> for Iq3S {
    const SHARED: bool = false;

    #[inline(always)]
    fn place(row: usize, part: usize) -> usize {
        // As of `Iq2S`.
        128 * row + 64 * (part / 4) + 32 * (part % 2) + 16 * (part % 4 / 2)
    }

    #[inline(always)]
    unsafe fn prepare(rows: &Blocks<'_, 110>, indices: &mut Indices) -> [Words; 2] {
        // SAFETY: by the caller's promise.
        unsafe {
            // A bit each, the lowest first.
            let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64.cast_signed());
            let one = _mm256_set1_epi8(1);
            let order = |first: i64| {
                let byte = |i: i64| 0x0101_0101_0101_0101 * (first + i);
                _mm256_setr_epi64x(byte(0), byte(1), byte(2), byte(3))
            };
            let orders = [order(0), order(4)];
            for (block, out) in rows.iter().zip(&mut *indices) {
                let upper = _mm256_set1_epi64x(i64_at(block, 66));
                for half in 0..2 {
                    let bits = _mm256_and_si256(_mm256_shuffle_epi8(upper, orders[half]), bit);
                    let upper = _mm256_min_epu8(bits, one);
                    let low = load32(block, 2 + 32 * half);
                    out[2 * half].write(_mm256_unpacklo_epi8(low, upper));
                    out[2 * half + 1].write(_mm256_unpackhi_epi8(low, upper));
                }
            }
            let [.., scales] = four_words(rows, 94);
            let scales = each!(scales, |part| {
                let shift = _mm_cvtsi32_si128(4 * part as i32);
                _mm256_srl_epi32(scales, shift)
            });
            [eight_words(rows, 74), scales]
        }
    }

    #[inline(always)]
    unsafe fn points(place: *const u8, row: usize, eight: usize) -> __m128i {
        // SAFETY: by the caller's promise, 3.
        unsafe {
            let (first, next) = (
                place.add(Self::place(row, 0)),
                place.add(Self::place(row + 1, 0)),
            );
            let two = [0, 1].map(|i| index_of_two::<{ Self::POINTS }>(first, 2 * eight + i));
            let index = |i| below::<{ Self::POINTS }>(read(next, 2 * eight + i));
            of_fours(Self::two(two), |i| Self::point(index(i)))
        }
    }
}
