//! Types whose weights are points of a table, without permutations of bytes ([`super::planes`]): half a block
//! of columns of two rows to a register.
//!
//! What can be is made ready for a whole file block of eight rows first: indices with their upper bits, the
//! signs of each row's 32 columns as a word, and scales, lanes of which are rows. What is left for each row
//! is to look its points up and to multiply, and that the signs move to the activations: for IQ2 some 20
//! instructions, for IQ3 some 30, of which up to half are loads. Of those that fill vectors there are two in a
//! cycle, so indices are loaded several at once, and half of the points of IQ3 come through numbers.
//!
//! # Safety
//! 1. As in [`super`]: what has target features, and what is inlined into it, is reached through
//!    [`super::multiply`] only.
//! 2. Loads and stores go through references to arrays that are as long, unaligned.
//! 3. Indices are read of rows and places which [`Points::indices`] has written, below the number of points.
#![expect(unsafe_code, reason = "intrinsics; see # Safety")]

use std::arch::x86_64::*;
use std::hint::assert_unchecked;
use std::mem::MaybeUninit;
use std::ptr;

use super::{
    Ahead, Blocks, Eight, ROWS, Values, add_dots, eight, f16_of_rows, halves, pair, sum_halves,
};
use crate::quantized::formats::Format;
use crate::quantized::grids::{Grid, Iq2S, Iq2Xs, Iq2Xxs, Iq3S, Iq3Xxs, bytes};
use crate::quantized::panel::{Extra, HasExtra};
use crate::simd::avx2::{in_order, sum_quads, transpose4};
use crate::simd::each;

/// Words of which lanes are rows, for each block of 32 columns.
type Words = [__m256i; 8];

/// Indices of the points of a row, as many as a type has: bytes, or words of 16 bits. All rows' are brought to
/// one place, which a single register points to. They are not initialized for nothing, which would take as
/// long as a tenth of the products.
type Indices = [MaybeUninit<__m256i>; 4];

/// A storage type, eight rows at a time.
trait Points<const BYTES: usize>: Grid + Format {
    /// Writes the indices of a row: of many types 64 bytes, of which some may be others.
    ///
    /// # Safety
    /// The CPU has AVX2.
    #[inline(always)]
    unsafe fn indices(block: &[u8; BYTES], out: &mut Indices) {
        for (half, out) in out.iter_mut().take(2).enumerate() {
            // SAFETY: by the caller's promise.
            out.write(unsafe { load32(block, 2 + 32 * half) });
        }
    }

    /// The magnitudes of half a block of columns.
    ///
    /// # Safety
    /// The CPU has AVX2, and [`Points::indices`] has written the indices.
    unsafe fn points(indices: &Indices, part: usize, half: usize) -> __m128i;

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
        let mut indices = [const { [const { MaybeUninit::uninit() }; 4] }; ROWS];
        for (row, indices) in rows.iter().zip(&mut indices) {
            G::indices(row, indices);
        }
        let [signs, scales] = G::signs_and_scales(rows);
        let zero = _mm256_setzero_si256();
        // All at once: their constants are loaded once.
        let second_scales: [_; 8] = each!(d, |part| match G::Extra::EXTRA {
            Extra::SecondScale => odd(d, _mm256_srli_epi32::<4>(scales[part])),
            _ => d,
        });
        let scales: [_; 8] = each!(d, |part| odd(d, scales[part]));
        for part in 0..8 {
            ahead.prefetch(part * ROWS * BYTES / 8, ROWS * BYTES / 8);
            let values = halves(x, part);
            // Two values to choose from: known as negatives they would be made anew for each row.
            let negatives = values.map(|values| in_order(_mm256_sub_epi8(zero, values)));
            // Of rows `r` and `r + 4` in either half: rows 0 and 1, and rows 2 and 3.
            let moved = _mm256_srli_epi32::<1>(signs[part]);
            let signs = [
                _mm256_unpacklo_epi32(signs[part], moved),
                _mm256_unpackhi_epi32(signs[part], moved),
            ];
            // Written out: of a loop that the compiler leaves rolled products would go through memory.
            macro_rules! products {
                ($half:literal) => {
                    products!($half: 0 1 2 3)
                };
                ($half:literal: $($r:literal)+) => {
                    [$(multiply(
                        _mm256_set_m128i(
                            G::points(&indices[$r + 4], part, $half),
                            G::points(&indices[$r], part, $half),
                        ),
                        [values[$half], negatives[$half]],
                        signs[$r / 2],
                        4 * ($r % 2) + $half,
                    )),+]
                };
            }
            let (first, second) = (products!(0), products!(1));
            if G::Extra::EXTRA == Extra::SecondScale {
                let (first, second) = (sum_halves(first), sum_halves(second));
                sum = add_dots(x, part, first, scales[part], sum);
                sum = add_dots(x, part, second, second_scales[part], sum);
            } else {
                let dots = sum_quads(each!(zero, |r| {
                    let both = _mm256_add_epi16(first[r], second[r]);
                    _mm256_madd_epi16(both, _mm256_set1_epi16(1))
                }));
                sum = add_dots(x, part, dots, scales[part], sum);
            }
        }
    }
    sum
}

/// Products of magnitudes and activations of a half of 32 columns of two rows, or, where `signs` has a bit,
/// their negatives. `place` says which: half the number of bytes of `signs` before the row's signs, plus
/// the half; behind the row's signs are the same, moved to the right by one.
#[target_feature(enable = "avx2")]
#[inline]
fn multiply(
    magnitudes: __m256i,
    [values, negatives]: [__m256i; 2],
    signs: __m256i,
    place: usize,
) -> __m256i {
    // Two times eight columns of each row: to each the byte of its signs, to odd ones of the moved ones. A
    // multiplication moves the bit of two neighbours to the highest place, at which a blend looks.
    let byte =
        |first: i64| 0x0400_0400_0400_0400 + 0x0101_0101_0101_0101 * (first + 2 * place as i64);
    let byte = _mm256_setr_epi64x(byte(0), byte(1), byte(0), byte(1));
    let up = _mm256_set1_epi64x(0x0002_0008_0020_0080);
    let signs = _mm256_shuffle_epi8(signs, byte);
    let highest = _mm256_mullo_epi16(signs, up);
    let signed = _mm256_blendv_epi8(values, negatives, highest);
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

/// Eight signs for each lower seven bits of a byte: the number of negative ones is even. The eighth bit may be
/// anything: it is turned if the number with it is odd, and so becomes what it should be.
#[target_feature(enable = "avx2")]
#[inline]
fn even(sevens: __m256i) -> __m256i {
    // What four bits turn of the eighth sign.
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
    _mm256_xor_si256(sevens, _mm256_shuffle_epi8(odd, four))
}

/// The lowest four times seven bits of words, each in a byte, of which the eighth bit may be anything.
#[target_feature(enable = "avx2")]
#[inline]
fn sevens(words: __m256i) -> __m256i {
    let fourteens = _mm256_blend_epi16::<0xAA>(words, _mm256_slli_epi32::<2>(words));
    let odd_bytes = _mm256_set1_epi16(0xFF00_u16.cast_signed());
    _mm256_blendv_epi8(fourteens, _mm256_slli_epi16::<1>(fourteens), odd_bytes)
}

/// Which bytes of each word a shuffle takes: those that `order` names within the word, or none.
#[target_feature(enable = "avx2")]
#[inline]
fn in_each_word(order: u32) -> __m256i {
    let at = |word: i32| order.cast_signed() + 0x0404_0404 * word;
    _mm256_setr_epi32(at(0), at(1), at(2), at(3), at(0), at(1), at(2), at(3))
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

/// Sixteen bytes at `at`, each with the bits of `mask` of a byte of `upper` times a factor, where `order`
/// names the bytes.
#[target_feature(enable = "avx2")]
#[inline]
fn with_upper<const BYTES: usize>(
    block: &[u8; BYTES],
    at: usize,
    upper: i64,
    [order, factors]: [__m256i; 2],
    mask: i16,
) -> __m256i {
    let low: &[u8; 16] = bytes(block, at);
    // SAFETY: 2.
    let low = unsafe { _mm256_cvtepu8_epi16(_mm_loadu_si128(low.as_ptr().cast())) };
    let upper = _mm256_shuffle_epi8(_mm256_set1_epi64x(upper), order);
    let upper = _mm256_mullo_epi16(upper, factors);
    let upper = _mm256_and_si256(upper, _mm256_set1_epi16(mask));
    _mm256_or_si256(low, upper)
}

/// 32 bytes at `at`.
#[target_feature(enable = "avx2")]
#[inline]
fn load32<const BYTES: usize>(block: &[u8; BYTES], at: usize) -> __m256i {
    let bytes: &[u8; 32] = bytes(block, at);
    // SAFETY: 2.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

/// Value `i` of the indices of a row.
///
/// # Safety
/// It was written, and any bytes are a value.
#[inline(always)]
unsafe fn read<T: Copy>(indices: &Indices, i: usize) -> T {
    // SAFETY: by the caller's promise.
    unsafe { indices.as_ptr().cast::<T>().add(i).read() }
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

/// Four points of four elements, of which the first `two` come through a register of numbers: loads of
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
        let four = _mm_insert_ps::<0x20>(two, load(2));
        _mm_castps_si128(_mm_insert_ps::<0x30>(four, load(3)))
    }
}

impl Points<66> for Iq2Xxs {
    #[inline(always)]
    unsafe fn points(indices: &Indices, part: usize, half: usize) -> __m128i {
        // SAFETY: by the caller's promise, 3.
        unsafe {
            // One load for four. Signs and scale are between them.
            let four = read::<u32>(indices, 2 * part).to_le_bytes();
            of_eights(|i| Self::point(four[2 * half + i].into()))
        }
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
    unsafe fn indices(block: &[u8; 74], out: &mut Indices) {
        // SAFETY: by the caller's promise.
        unsafe {
            let nine = _mm256_set1_epi16(0x1FF);
            for (half, out) in out.iter_mut().take(2).enumerate() {
                out.write(_mm256_and_si256(load32(block, 2 + 32 * half), nine));
            }
        }
    }

    #[inline(always)]
    unsafe fn points(indices: &Indices, part: usize, half: usize) -> __m128i {
        // SAFETY: by the caller's promise, 3.
        unsafe {
            let four = read::<u64>(indices, part);
            let index = |i| below::<{ Self::POINTS }>((four >> (32 * half + 16 * i)) as u16);
            of_eights(|i| Self::point(index(i)))
        }
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
                // The upper seven bits of two times 16: odd bytes, whose lowest bits go to their
                // neighbours' eighth.
                let [first, second] = [0, 1].map(|word| words[part / 2][2 * (part % 2) + word]);
                let odd = _mm256_blend_epi16::<0xAA>(
                    _mm256_shuffle_epi8(first, in_each_word(0x8080_0301)),
                    _mm256_shuffle_epi8(second, in_each_word(0x0301_8080)),
                );
                even(_mm256_srli_epi16::<1>(odd))
            });
            let [.., first, second] = four_words(rows, 58);
            [signs, bytes_apart([first, second])]
        }
    }
}

impl Points<82> for Iq2S {
    #[inline(always)]
    unsafe fn indices(block: &[u8; 82], out: &mut Indices) {
        let upper = i64_at(block, 66);
        // SAFETY: by the caller's promise.
        unsafe {
            // Two bits each, the lowest first, to bits 8 and 9.
            let factors = _mm256_set1_epi64x(0x0004_0010_0040_0100);
            let byte =
                |i: i64| 0xFF00_FF00_FF00_FF00_u64.cast_signed() | (i * 0x0001_0001_0001_0001);
            for (half, out) in out.iter_mut().take(2).enumerate() {
                let first = 4 * half as i64;
                let order = _mm256_setr_epi64x(
                    byte(first),
                    byte(first + 1),
                    byte(first + 2),
                    byte(first + 3),
                );
                let rule = [order, factors];
                out.write(with_upper(block, 2 + 16 * half, upper, rule, 0x300));
            }
        }
    }

    #[inline(always)]
    unsafe fn points(indices: &Indices, part: usize, half: usize) -> __m128i {
        // SAFETY: by the caller's promise, 3.
        unsafe {
            let four = read::<u64>(indices, part);
            let index = |i| below::<{ Self::POINTS }>((four >> (32 * half + 16 * i)) as u16);
            of_eights(|i| Self::point(index(i)))
        }
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
    unsafe fn points(indices: &Indices, part: usize, half: usize) -> __m128i {
        // SAFETY: by the caller's promise, 3.
        unsafe {
            // One load for half of them: loads are what most of the time goes to.
            let four = match half {
                0 => each!(0, |i| read::<u8>(indices, 8 * part + i)),
                _ => read::<u32>(indices, 2 * part + 1).to_le_bytes(),
            };
            let two = Self::two([four[0].into(), four[1].into()]);
            of_fours(two, |i| Self::point(four[i].into()))
        }
    }

    #[inline(always)]
    unsafe fn signs_and_scales(rows: &Blocks<'_, 98>) -> [Words; 2] {
        // SAFETY: by the caller's promise.
        unsafe { of_words(eight_words(rows, 66)) }
    }
}

impl Points<110> for Iq3S {
    #[inline(always)]
    unsafe fn indices(block: &[u8; 110], out: &mut Indices) {
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
            let byte =
                |i: i64| 0xFF00_FF00_FF00_FF00_u64.cast_signed() | (i * 0x0001_0001_0001_0001);
            for (two, out) in out.iter_mut().enumerate() {
                let (first, second) = (byte(2 * two as i64), byte(2 * two as i64 + 1));
                let rule = [_mm256_setr_epi64x(first, first, second, second), factors];
                out.write(with_upper(block, 2 + 16 * two, upper, rule, 0x100));
            }
        }
    }

    #[inline(always)]
    unsafe fn points(indices: &Indices, part: usize, half: usize) -> __m128i {
        // SAFETY: by the caller's promise, 3.
        unsafe {
            // As of `Iq3Xxs`.
            if half == 0 {
                let index = |i| below::<{ Self::POINTS }>(read(indices, 8 * part + i));
                return of_fours(Self::two([index(0), index(1)]), |i| Self::point(index(i)));
            }
            let four = read::<u64>(indices, 2 * part + 1);
            let index = |i| below::<{ Self::POINTS }>((four >> (16 * i)) as u16);
            of_fours(Self::two([index(0), index(1)]), |i| Self::point(index(i)))
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
