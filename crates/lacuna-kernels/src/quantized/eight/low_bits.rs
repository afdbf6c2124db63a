//! Types of two and three bits, and of three levels.
//!
//! Several blocks of columns share bytes, each has some bits of all. So lanes are rows from the start: a
//! word holds four bytes of each row, is read once for all these blocks, and nothing is summed across
//! lanes. With AVX-512 VNNI only the products differ ([`Products`]), and three levels to eight bits are taken
//! in wider steps ([`super::avx512`]).
//!
//! Where all columns of a block share its bytes, prefetches are made before anything is read: the compiler moves no load past
//! one, so values loaded before would wait on the stack for what is multiplied with them.
//!
//! # Safety
//! 1. As in [`super`]: what has target features, and what is inlined into it, is reached through
//!    [`super::multiply`] only, and [`Quads`] through [`super::avx512`] only.
//! 2. Loads and stores go through references to arrays that are as long, unaligned.
#![expect(unsafe_code, reason = "intrinsics; see # Safety")]

use std::arch::x86_64::*;

use super::lookup::twice;
use super::{Ahead, Blocks, Eight, Values, add_dots, eight, f16_of_rows, half_sums, numbers, pair};
use crate::quantized::formats::{Q2K, Q3K, Tq1_0, Tq2_0};
use crate::simd::avx2::{in_order, transpose4};
use crate::simd::each;

/// Thirty-two bytes at `at` of each row: lane `r` of word `g` is bytes `4 * g ..` of row `r`.
#[target_feature(enable = "avx2")]
#[inline]
fn words<const BYTES: usize>(rows: &Blocks<'_, BYTES>, at: usize) -> [__m256i; 8] {
    let zero = _mm256_setzero_si256();
    let low = transpose4(each!(zero, |r| pair(rows, r, at)));
    let high = transpose4(each!(zero, |r| pair(rows, r, at + 16)));
    each!(zero, |g| if g < 4 { low[g] } else { high[g - 4] })
}

/// Byte `index` of each word, in the bytes of the word where `places` has a one; 0 in the others.
#[target_feature(enable = "avx2")]
#[inline]
fn byte_of_words(words: __m256i, index: usize, places: i32) -> __m256i {
    // Where the highest bit is set, a shuffle writes 0.
    let zeros = 0x8080_8080_u32.cast_signed() ^ (0x80 * places);
    let order = |word: i32| ((4 * word + index as i32) * places) | zeros;
    let [a, b, c, d] = [order(0), order(1), order(2), order(3)];
    _mm256_shuffle_epi8(words, _mm256_setr_epi32(a, b, c, d, a, b, c, d))
}

/// How the products of four weights of each row and four activations are summed.
pub(super) trait Products {
    /// Adds them to the sums of the row, which may not leave 16 bits.
    ///
    /// # Safety
    /// The CPU has the instructions of the level.
    unsafe fn add(sums: __m256i, weights: __m256i, x: u32) -> __m256i;
    /// The sum of each row.
    ///
    /// # Safety
    /// The CPU has the instructions of the level.
    unsafe fn sum(sums: __m256i) -> __m256i;
    /// The sum of each row times byte `index` of its word of `scales`, which has no sign; the sum may not
    /// leave 16 bits.
    ///
    /// # Safety
    /// The CPU has the instructions of the level.
    unsafe fn scaled(sums: __m256i, scales: __m256i, index: usize) -> __m256i;
}

/// With AVX2: two sums of 16 bits.
pub(super) struct Pairs;

/// With AVX-512 VNNI: one of 32 bits.
pub(super) struct Quads;

impl Products for Pairs {
    #[inline(always)]
    unsafe fn add(sums: __m256i, weights: __m256i, x: u32) -> __m256i {
        // SAFETY: by the caller's promise.
        unsafe {
            let x = _mm256_set1_epi32(x.cast_signed());
            in_order(_mm256_add_epi16(sums, _mm256_maddubs_epi16(weights, x)))
        }
    }

    #[inline(always)]
    unsafe fn sum(sums: __m256i) -> __m256i {
        // SAFETY: by the caller's promise.
        unsafe { _mm256_madd_epi16(sums, _mm256_set1_epi16(1)) }
    }

    #[inline(always)]
    unsafe fn scaled(sums: __m256i, scales: __m256i, index: usize) -> __m256i {
        // SAFETY: by the caller's promise.
        unsafe { _mm256_madd_epi16(sums, byte_of_words(scales, index, 0x0001_0001)) }
    }
}

impl Products for Quads {
    #[inline(always)]
    unsafe fn add(sums: __m256i, weights: __m256i, x: u32) -> __m256i {
        // SAFETY: by the caller's promise.
        unsafe { _mm256_dpbusd_epi32(sums, weights, _mm256_set1_epi32(x.cast_signed())) }
    }

    #[inline(always)]
    unsafe fn sum(sums: __m256i) -> __m256i {
        sums
    }

    #[inline(always)]
    unsafe fn scaled(sums: __m256i, scales: __m256i, index: usize) -> __m256i {
        // SAFETY: by the caller's promise. The upper halves of sums, which are signs, are multiplied with 0.
        unsafe { _mm256_madd_epi16(sums, byte_of_words(scales, index, 1)) }
    }
}

/// Of four blocks of columns that share bytes: whether a block's two bits are among the lower or the upper
/// four, and where. Those that are not the lowest two make weights four times as large, because that is
/// cheaper to undo in the sums.
const FIELDS: [(usize, i8); 4] = [(0, 3), (0, 12), (1, 3), (1, 12)];

eight!(Q2K, 84, 8, |rows, x, ahead, sum| {
    q2_k::<Pairs>(rows, x, ahead, sum)
});

/// # Safety
/// The CPU has AVX2, FMA and F16C, and the instructions of `P`.
#[inline(always)]
pub(super) unsafe fn q2_k<P: Products>(
    rows: &Blocks<'_, 84>,
    x: &Values<'_, 8>,
    ahead: Ahead<84>,
    mut sum: __m256,
) -> __m256 {
    // SAFETY: by the caller's promise.
    unsafe {
        ahead.prefetch(rows, 0, 1);
        let (d, dmin) = (f16_of_rows(rows, 80), f16_of_rows(rows, 82));
        let minus_dmin = _mm256_mul_ps(dmin, _mm256_set1_ps(-1.0));
        let zero = _mm256_setzero_si256();
        let nibble = _mm256_set1_epi8(15);
        // Sixteen bytes: a scale in the low nibble and a minimum in the high one.
        let both = transpose4(each!(zero, |r| pair(rows, r, 0)));
        let scales: [_; 4] = each!(zero, |i| _mm256_and_si256(both[i], nibble));
        let minima: [_; 4] = each!(zero, |i| {
            _mm256_and_si256(_mm256_srli_epi16::<4>(both[i]), nibble)
        });
        let units = units_of_halves(x);
        for upper in 0..2 {
            let shared = words(rows, 16 + 32 * upper);
            let mut dots = [[zero; 2]; 4];
            for half in 0..2 {
                for g in 4 * half..4 * half + 4 {
                    let both = [shared[g], _mm256_srli_epi16::<4>(shared[g])];
                    for quarter in 0..4 {
                        // `12 * 127 * 8 < 2^15` in the end.
                        let (field, mask) = FIELDS[quarter];
                        let weights = _mm256_and_si256(both[field], _mm256_set1_epi8(mask));
                        let x = x.q[4 * upper + quarter][g];
                        dots[quarter][half] = P::add(dots[quarter][half], weights, x);
                    }
                }
            }
            for quarter in 0..4 {
                let part = 4 * upper + quarter;
                // Two bytes of a word, one for each half.
                let (word, byte) = (part / 2, 2 * (quarter % 2));
                let scaled: [_; 2] = each!(zero, |half| {
                    P::scaled(dots[quarter][half], scales[word], byte + half)
                });
                let mut scaled = _mm256_add_epi32(scaled[0], scaled[1]);
                if quarter % 2 == 1 {
                    scaled = _mm256_srai_epi32::<2>(scaled);
                }
                sum = add_dots(x, part, scaled, d, sum);
                for half in 0..2 {
                    let minimum = byte_of_words(minima[word], byte + half, 1);
                    let minimum = _mm256_mul_ps(minus_dmin, _mm256_cvtepi32_ps(minimum));
                    let unit = _mm256_set1_ps(units[half][part]);
                    sum = _mm256_fmadd_ps(minimum, unit, sum);
                }
            }
        }
    }
    sum
}

/// What a minimum of each half of a block is multiplied with: the sum of the activations.
#[target_feature(enable = "avx2")]
#[inline]
fn units_of_halves(x: &Values<'_, 8>) -> [[f32; 8]; 2] {
    let mut units = [[0.0; 8]; 2];
    for (sums, units) in half_sums(x).into_iter().zip(&mut units) {
        // SAFETY: 2.
        unsafe {
            let scale = _mm256_loadu_ps(x.scale.as_ptr());
            let products = _mm256_mul_ps(scale, _mm256_cvtepi32_ps(sums));
            _mm256_storeu_ps(units.as_mut_ptr(), products);
        }
    }
    units
}

eight!(Q3K, 110, 8, |rows, x, ahead, sum| {
    q3_k(rows, x, ahead, sum)
});

/// # Safety
/// The CPU has AVX2, FMA and F16C.
#[inline(always)]
unsafe fn q3_k(
    rows: &Blocks<'_, 110>,
    x: &Values<'_, 8>,
    ahead: Ahead<110>,
    mut sum: __m256,
) -> __m256 {
    // SAFETY: by the caller's promise.
    unsafe {
        ahead.prefetch(rows, 0, 1);
        let zero = _mm256_setzero_si256();
        let d = f16_of_rows(rows, 108);
        let scales = q3_k_scales(rows);
        let lacking = half_sums(x).map(|sums| numbers(_mm256_slli_epi32::<2>(sums)));
        let high = words(rows, 0);
        for upper in 0..2 {
            let shared = words(rows, 32 + 32 * upper);
            let mut dots = [[zero; 2]; 4];
            for half in 0..2 {
                for g in 4 * half..4 * half + 4 {
                    let mut bits = shared[g];
                    // The first bit of four, where the third one of a weight is.
                    let mut third = match upper {
                        0 => _mm256_slli_epi16::<2>(high[g]),
                        _ => _mm256_srli_epi16::<2>(high[g]),
                    };
                    for quarter in 0..4 {
                        // `7 * 127 * 8 < 2^15` in the end.
                        let weights = _mm256_or_si256(
                            _mm256_and_si256(bits, _mm256_set1_epi8(3)),
                            _mm256_and_si256(third, _mm256_set1_epi8(4)),
                        );
                        let x = x.q[4 * upper + quarter][g];
                        dots[quarter][half] = Pairs::add(dots[quarter][half], weights, x);
                        bits = _mm256_srli_epi16::<2>(bits);
                        third = _mm256_srli_epi16::<1>(third);
                    }
                }
            }
            for quarter in 0..4 {
                let part = 4 * upper + quarter;
                for half in 0..2 {
                    let index = 2 * part + half;
                    let shift = _mm_cvtsi32_si128(24 - 8 * (index as i32 % 4));
                    let top = _mm256_sll_epi32(scales[index / 4], shift);
                    let scale = _mm256_cvtepi32_ps(_mm256_srai_epi32::<24>(top));
                    let dots = Pairs::sum(dots[quarter][half]);
                    // Weights are four too large.
                    let dots = _mm256_sub_epi32(dots, _mm256_set1_epi32(lacking[half][part]));
                    sum = add_dots(x, part, dots, _mm256_mul_ps(d, scale), sum);
                }
            }
        }
    }
    sum
}

/// Sixteen signed bytes of each row, four to a word.
#[target_feature(enable = "avx2")]
#[inline]
pub(super) fn q3_k_scales(rows: &Blocks<'_, 110>) -> [__m256i; 4] {
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

eight!(Tq2_0, 66, 8, |rows, x, ahead, sum| {
    tq2_0::<Pairs>(rows, x, ahead, sum)
});

/// # Safety
/// The CPU has AVX2, FMA and F16C, and the instructions of `P`.
#[inline(always)]
pub(super) unsafe fn tq2_0<P: Products>(
    rows: &Blocks<'_, 66>,
    x: &Values<'_, 8>,
    ahead: Ahead<66>,
    mut sum: __m256,
) -> __m256 {
    // SAFETY: by the caller's promise.
    unsafe {
        ahead.prefetch(rows, 0, 1);
        let d = f16_of_rows(rows, 64);
        let sums = block_sums(x);
        for upper in 0..2 {
            let shared = words(rows, 32 * upper);
            let mut dots = [_mm256_setzero_si256(); 4];
            for g in 0..8 {
                let both = [shared[g], _mm256_srli_epi16::<4>(shared[g])];
                for quarter in 0..4 {
                    // `12 * 127 * 16 < 2^15` in the end.
                    let (field, mask) = FIELDS[quarter];
                    let weights = _mm256_and_si256(both[field], _mm256_set1_epi8(mask));
                    dots[quarter] = P::add(dots[quarter], weights, x.q[4 * upper + quarter][g]);
                }
            }
            for quarter in 0..4 {
                let part = 4 * upper + quarter;
                let mut dots = P::sum(dots[quarter]);
                if quarter % 2 == 1 {
                    dots = _mm256_srai_epi32::<2>(dots);
                }
                // Weights are one too large.
                let dots = _mm256_sub_epi32(dots, _mm256_set1_epi32(sums[part]));
                sum = add_dots(x, part, dots, d, sum);
            }
        }
    }
    sum
}

/// Sums of the activations of each block.
#[target_feature(enable = "avx2")]
#[inline]
pub(super) fn block_sums(x: &Values<'_, 8>) -> [i32; 8] {
    let [first, second] = half_sums(x);
    numbers(_mm256_add_epi32(first, second))
}

eight!(Tq1_0, 54, 8, |rows, x, ahead, sum| {
    tq1_0(rows, x, ahead, sum)
});

/// # Safety
/// The CPU has AVX2, FMA and F16C.
#[inline(always)]
unsafe fn tq1_0(
    rows: &Blocks<'_, 54>,
    x: &Values<'_, 8>,
    ahead: Ahead<54>,
    mut sum: __m256,
) -> __m256 {
    // SAFETY: by the caller's promise.
    unsafe {
        let zero = _mm256_setzero_si256();
        let d = f16_of_rows(rows, 52);
        let sums = block_sums(x);
        let five = words(rows, 0);
        // `2 * 127 * 16 < 2^15` in the end.
        let digits = ternary_digits(five[0]);
        let mut dots: [_; 5] = each!(zero, |digit| product(digits[digit], x.q[digit][0]));
        macro_rules! add {
            ($g:expr) => {
                let digits = ternary_digits(five[$g]);
                for digit in 0..5 {
                    dots[digit] = Pairs::add(dots[digit], digits[digit], x.q[digit][$g]);
                }
            };
        }
        // In twos: of seven in a row the compiler would keep some in memory.
        add!(1);
        for two in 1..4 {
            add!(2 * two);
            add!(2 * two + 1);
        }
        for part in 0..5 {
            ahead.prefetch(rows, part, 8);
            // Weights are one too large.
            let dots = _mm256_sub_epi32(Pairs::sum(dots[part]), _mm256_set1_epi32(sums[part]));
            sum = add_dots(x, part, dots, d, sum);
        }
        // Each digit of sixteen bytes is half a block of columns.
        let last = transpose4(each!(zero, |r| pair(rows, r, 32)));
        let digits = ternary_digits(last[0]);
        let mut upper: [_; 3] = each!(zero, |part| product(digits[2 * part], x.q[5 + part][0]));
        for part in 0..2 {
            upper[part] = Pairs::add(upper[part], digits[2 * part + 1], x.q[5 + part][4]);
        }
        for g in 1..4 {
            let digits = ternary_digits(last[g]);
            for digit in 0..5 {
                let (part, g) = (digit / 2, 4 * (digit % 2) + g);
                upper[part] = Pairs::add(upper[part], digits[digit], x.q[5 + part][g]);
            }
        }
        // And each of four bytes an eighth.
        let digits = ternary_digits(words_of_rows(rows, 48));
        for digit in 0..4 {
            upper[2] = Pairs::add(upper[2], digits[digit], x.q[7][4 + digit]);
        }
        for part in 0..3 {
            ahead.prefetch(rows, 5 + part, 8);
            let dots = _mm256_sub_epi32(Pairs::sum(upper[part]), _mm256_set1_epi32(sums[5 + part]));
            sum = add_dots(x, 5 + part, dots, d, sum);
        }
    }
    sum
}

/// Products of four weights of each row and four activations, two and two.
#[target_feature(enable = "avx2")]
#[inline]
fn product(weights: __m256i, x: u32) -> __m256i {
    in_order(_mm256_maddubs_epi16(
        weights,
        _mm256_set1_epi32(x.cast_signed()),
    ))
}

/// Four bytes at `at` of each row.
#[target_feature(enable = "avx2")]
#[inline]
fn words_of_rows<const BYTES: usize>(rows: &Blocks<'_, BYTES>, at: usize) -> __m256i {
    let word = |r: usize| {
        let bytes: &[u8; 4] = rows[r][at..].first_chunk().expect("inside the block");
        // SAFETY: 2.
        unsafe { _mm_load_ss(bytes.as_ptr().cast()) }
    };
    let [low, high]: [_; 2] = each!(_mm_setzero_ps(), |half| {
        let two = _mm_insert_ps::<0x10>(word(4 * half), word(4 * half + 1));
        let three = _mm_insert_ps::<0x20>(two, word(4 * half + 2));
        _mm_insert_ps::<0x30>(three, word(4 * half + 3))
    });
    _mm256_castps_si256(_mm256_set_m128(high, low))
}

/// The first of two digits of base 3, and the second.
pub(super) const THREES: [u8; 16] = [0, 0, 0, 1, 1, 1, 2, 2, 2, 0, 0, 0, 0, 0, 0, 0];
pub(super) const ONES: [u8; 16] = [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 0, 0, 0, 0, 0, 0];

/// The digits of base 3 of each byte, which are fractions of 256.
///
/// Nine times a fraction has two digits in its upper byte, and the rest of the fraction in the lower one. A
/// table tells digits of such a number apart. That is half of what it takes to compare fractions with
/// thirds.
#[target_feature(enable = "avx2")]
#[inline]
fn ternary_digits(fractions: __m256i) -> [__m256i; 5] {
    // The lower byte of two times a factor.
    let times = |two, factor: i16| _mm256_maddubs_epi16(two, _mm256_set1_epi16(factor));
    let next = |[even, odd]: [__m256i; 2], factor| [times(even, factor), times(odd, factor)];
    let upper = |[even, odd]: [__m256i; 2]| {
        let odd_bytes = _mm256_set1_epi16(0xFF00_u16.cast_signed());
        _mm256_blendv_epi8(_mm256_srli_epi16::<8>(even), odd, odd_bytes)
    };
    let first = [times(fractions, 9), times(fractions, 9 << 8)];
    let second = next(first, 9);
    let [first, last] = [upper(first), upper(next(second, 3))];
    let second = upper(second);
    let of_nine = |table, two| _mm256_shuffle_epi8(twice(table), two);
    [
        of_nine(THREES, first),
        of_nine(ONES, first),
        of_nine(THREES, second),
        of_nine(ONES, second),
        last,
    ]
}
