//! One token with AVX2, and on levels that have it too, and some one by one: eight rows side by side, one of each of eight
//! streams. With AVX-512 types of 256 columns have a way of their own, [`avx512`].
//!
//! Lanes are rows, so terms are added as they come and none is kept, in the order of the blocks like
//! everywhere. Bytes stay as they are in the file; what an offset of all weights adds is corrected
//! with the sums of the activations.
//!
//! # Safety
//! 1. The functions with target features are reached through [`multiply`] only, which has the proof
//!    that the CPU has AVX2, FMA and F16C.
//! 2. Loads and stores go through references to arrays that are at least as long, unaligned.
#![expect(unsafe_code, reason = "intrinsics; see # Safety")]

mod avx512;
mod grids;
mod lookup;
mod low_bits;
mod nibbles;
mod planes;

pub(super) use planes::magnitudes_of_rows;

use std::arch::x86_64::*;

use super::formats::{Format, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0, with_format};
use super::streams::{ahead_bytes, prefetch_beginnings, rows_of_streams};
use crate::activations::{ActivationRow, Activations, BLOCK};
use crate::dtype::DType;
use crate::grid::Block;
use crate::matrix::Matrix;
use crate::simd::avx2::{Avx2, bytes_where, sum_quads, transpose4};
use crate::simd::{Simd, each};

/// Rows side by side.
const ROWS: usize = 8;

/// A file block of each row.
type Blocks<'a, const BYTES: usize> = [&'a [u8; BYTES]; ROWS];

/// Writes the products of the rows of `out` with tokens that are stored one by one.
pub(super) fn multiply<S: Simd>(
    s: S,
    weights: &Matrix<'_>,
    x: &Activations<'_>,
    out: &mut Block<'_, f32>,
) {
    let dtype = weights.dtype();
    if let Some(avx512) = s.avx512()
        && avx512::multiply(avx512, weights, x, out)
    {
        return;
    }
    let _: Avx2 = s.avx2().expect("a level that takes eight rows has AVX2");
    // SAFETY: 1.
    unsafe {
        with_format!(dtype, |D| all_rows::<
            D,
            { <D as Format>::DTYPE.block_bytes() },
            { <D as Format>::DTYPE.block_len() / BLOCK },
        >(weights, x, out));
    }
}

/// The activations of a file block.
struct Values<'a, const PARTS: usize> {
    q: &'a [[u32; 8]; PARTS],
    scale: &'a [f32; PARTS],
    scaled_sum: &'a [f32; PARTS],
    half_sums: [&'a [i32; PARTS]; 2],
}

impl<'a, const PARTS: usize> Values<'a, PARTS> {
    /// Those of file block `index`.
    #[inline(always)]
    fn of(x: &ActivationRow<'a>, index: usize) -> Self {
        let half = |half: usize| &x.half_sums[half].as_chunks().0[index];
        Self {
            q: &x.q.as_chunks().0[index],
            scale: &x.scale.as_chunks().0[index],
            scaled_sum: &x.scaled_sum.as_chunks().0[index],
            half_sums: [half(0), half(1)],
        }
    }
}

#[inline(always)]
fn prefetch_line(line: *const u8) {
    // SAFETY: a prefetch reads nothing and cannot fault.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(line.cast()) };
}

/// What is read soon, of the same rows.
#[derive(Clone, Copy)]
struct Ahead<const BYTES: usize> {
    /// Where in a block the first line begins that is not part of the block before.
    line: usize,
    /// How many bytes further on lines are prefetched.
    bytes: usize,
}

impl<const BYTES: usize> Ahead<BYTES> {
    /// Prefetches for one of so many shares of the rows: in between what is computed with others.
    #[inline(always)]
    fn prefetch(self, rows: &Blocks<'_, BYTES>, share: usize, shares: usize) {
        let fetch = |row: usize, line: usize| {
            let block = rows[row].as_ptr();
            prefetch_line(block.wrapping_add(self.bytes + self.line + 64 * line));
        };
        // All lines but one are constants, because a branch for each takes as long as the fetch.
        let lines = BYTES / 64;
        let one_more = self.line + 64 * lines < BYTES;
        for row in share * ROWS / shares..(share + 1) * ROWS / shares {
            for line in 0..lines {
                fetch(row, line);
            }
            if one_more {
                fetch(row, lines);
            }
        }
    }
}

/// A storage type whose blocks are `BYTES` bytes, and `PARTS` times 32 columns.
trait Eight<const BYTES: usize, const PARTS: usize> {
    /// Adds the terms of a file block of each row, in the order of its columns.
    fn add(
        rows: &Blocks<'_, BYTES>,
        x: &Values<'_, PARTS>,
        ahead: Ahead<BYTES>,
        sum: __m256,
    ) -> __m256;
}

/// Implements [`Eight`] for a type: the bytes and parts of a block, and how it is added.
macro_rules! eight {
    (
        $name:ty, $bytes:literal, $parts:literal,
        |$rows:ident, $x:ident, $ahead:ident, $sum:ident| $body:expr
    ) => {
        impl Eight<$bytes, $parts> for $name {
            #[inline(always)]
            fn add(
                $rows: &Blocks<'_, $bytes>,
                $x: &Values<'_, $parts>,
                $ahead: Ahead<$bytes>,
                $sum: __m256,
            ) -> __m256 {
                // SAFETY: 1.
                unsafe { $body }
            }
        }
    };
}
use eight;

/// Ways of types that take more instructions than AVX2: these instructions, how many times 32 columns are added at once, and of
/// each type the bytes that these are and how they are added.
macro_rules! ways {
    (
        $features:literal, $parts:literal, |$rows:ident, $x:ident, $ahead:ident, $sum:ident|
        $($name:ident, $bytes:literal: $body:expr;)+
    ) => {
        /// A storage type, as this module multiplies it.
        struct Way<D>(std::marker::PhantomData<D>);

        $(eight!(Way<$name>, $bytes, $parts, |$rows, $x, $ahead, $sum| $body);)+

        #[target_feature(enable = $features)]
        fn all_rows<D: Eight<BYTES, $parts>, const BYTES: usize>(
            weights: &Matrix<'_>,
            x: &Activations<'_>,
            out: &mut Block<'_, f32>,
        ) {
            $crate::quantized::eight::rows::<D, BYTES, $parts>(weights, x, out);
        }

        /// Writes the products of the rows of `out`, if their type is one of these.
        ///
        /// # Safety
        /// The CPU has the instructions, and columns are whole blocks of so many.
        pub(super) unsafe fn of_its_type(
            weights: &Matrix<'_>,
            x: &Activations<'_>,
            out: &mut Block<'_, f32>,
        ) -> bool {
            // SAFETY: by the caller's promise.
            unsafe {
                match weights.dtype() {
                    $(<$name as Format>::DTYPE => {
                        all_rows::<Way<$name>, $bytes>(weights, x, out);
                    })+
                    _ => return false,
                }
            }
            true
        }
    };
}
use ways;

/// See [`multiply`].
#[target_feature(enable = "avx2,fma,f16c")]
fn all_rows<D: Eight<BYTES, PARTS>, const BYTES: usize, const PARTS: usize>(
    weights: &Matrix<'_>,
    x: &Activations<'_>,
    out: &mut Block<'_, f32>,
) {
    rows::<D, BYTES, PARTS>(weights, x, out);
}

/// The rows of `out`, for a function that has the instructions of `D`.
#[inline(always)]
fn rows<D: Eight<BYTES, PARTS>, const BYTES: usize, const PARTS: usize>(
    weights: &Matrix<'_>,
    x: &Activations<'_>,
    out: &mut Block<'_, f32>,
) {
    let all = out.cols();
    let each = rows_of_streams::<ROWS>(all.len(), weights.row_bytes());
    let rest = all.len() - ROWS * each;
    let first = &weights.bytes()[all.start * weights.row_bytes()..];
    let ahead = ahead_bytes();
    prefetch_beginnings::<ROWS>(
        first.as_ptr(),
        each * weights.row_bytes(),
        ahead,
        prefetch_line,
    );
    // A row of each stream, and then those that are left over.
    for step in 0..each + rest.div_ceil(ROWS) {
        let (row, apart) = match step.checked_sub(each) {
            None => (step, each),
            Some(behind) => (ROWS * (each + behind), 1),
        };
        let rows = eight_rows(weights, all.start + row, apart);
        for token in 0..x.tokens() {
            let sum = sum_blocks::<D, BYTES, PARTS>(&rows, &x.single(token), ahead);
            let mut lanes = [0.0; ROWS];
            // SAFETY: 1, 2.
            unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), sum) };
            let out = out.row(token)[row..].iter_mut().step_by(apart);
            for (lane, out) in lanes.into_iter().zip(out) {
                *out = lane;
            }
        }
    }
}

/// The sums of eight rows and a token.
#[inline(always)]
fn sum_blocks<D: Eight<BYTES, PARTS>, const BYTES: usize, const PARTS: usize>(
    rows: &[&[[u8; BYTES]]; ROWS],
    x: &ActivationRow<'_>,
    ahead_bytes: usize,
) -> __m256 {
    let blocks = x.q.len() / PARTS;
    let rows: [&[[u8; BYTES]]; ROWS] = each!(&[][..], |r| &rows[r][..blocks]);
    // SAFETY: 1.
    let mut sum = unsafe { _mm256_setzero_ps() };
    for block in 0..blocks {
        let place = block * BYTES;
        let ahead = Ahead {
            line: place.next_multiple_of(64) - place,
            bytes: ahead_bytes,
        };
        let rows = each!(&[0; BYTES], |r| &rows[r][block]);
        sum = D::add(&rows, &Values::of(x, block), ahead, sum);
    }
    sum
}

/// The file blocks of rows from `first` on, each so many after the one before; for one that does not exist there is the last row.
#[inline(always)]
fn eight_rows<'a, const BYTES: usize>(
    weights: &Matrix<'a>,
    first: usize,
    apart: usize,
) -> [&'a [[u8; BYTES]]; ROWS] {
    let (row_bytes, last) = (weights.row_bytes(), weights.rows() - 1);
    each!(&[][..], |r| {
        let row = (first + r * apart).min(last);
        weights.bytes()[row * row_bytes..][..row_bytes]
            .as_chunks()
            .0
    })
}

#[target_feature(enable = "avx2")]
#[inline]
fn load16<const BYTES: usize>(bytes: &[u8; BYTES], at: usize) -> __m128i {
    let bytes: &[u8; 16] = bytes[at..].first_chunk().expect("inside the block");
    // SAFETY: 2.
    unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) }
}

/// Sixteen bytes at `at` of rows `r` and `r + 4`.
#[target_feature(enable = "avx2")]
#[inline]
fn pair<const BYTES: usize>(rows: &Blocks<'_, BYTES>, r: usize, at: usize) -> __m256i {
    _mm256_set_m128i(load16(rows[r + 4], at), load16(rows[r], at))
}

#[inline(always)]
fn u16_at<const BYTES: usize>(bytes: &[u8; BYTES], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

/// The binary16 at `at` of each row.
#[target_feature(enable = "avx2,f16c")]
#[inline]
fn f16_of_rows<const BYTES: usize>(rows: &Blocks<'_, BYTES>, at: usize) -> __m256 {
    let x: [i16; ROWS] = each!(0, |r| u16_at(rows[r], at) as i16);
    _mm256_cvtph_ps(_mm_setr_epi16(
        x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7],
    ))
}

/// The halves of a block of activations, each twice.
#[target_feature(enable = "avx2")]
#[inline]
fn halves<const PARTS: usize>(x: &Values<'_, PARTS>, block: usize) -> [__m256i; 2] {
    let words = x.q[block].as_chunks::<4>().0;
    // SAFETY: 2.
    each!(_mm256_setzero_si256(), |half| unsafe {
        _mm256_broadcastsi128_si256(_mm_loadu_si128(words[half].as_ptr().cast()))
    })
}

/// What weights that are `offset` too small lack in their dot products.
#[target_feature(enable = "avx2")]
#[inline]
fn lacking<const PARTS: usize>(x: &Values<'_, PARTS>, block: usize, offset: i32) -> __m256i {
    let sum = x.half_sums[0][block] + x.half_sums[1][block];
    _mm256_set1_epi32(offset * sum)
}

/// Sums of the values of both halves of each block: eight at once, because numbers that are put into a
/// register one by one take more time than what is computed with them.
#[target_feature(enable = "avx2")]
#[inline]
fn half_sums(x: &Values<'_, 8>) -> [__m256i; 2] {
    x.half_sums.map(|sums| {
        // SAFETY: 2.
        unsafe { _mm256_loadu_si256(sums.as_ptr().cast()) }
    })
}

/// Eight numbers of a register.
#[target_feature(enable = "avx2")]
#[inline]
fn numbers(x: __m256i) -> [i32; 8] {
    let mut numbers = [0; 8];
    // SAFETY: 2.
    unsafe { _mm256_storeu_si256(numbers.as_mut_ptr().cast(), x) };
    numbers
}

/// Adds `dots * scale` times the scale of a block.
#[target_feature(enable = "avx2,fma")]
#[inline]
fn add_dots<const PARTS: usize>(
    x: &Values<'_, PARTS>,
    block: usize,
    dots: __m256i,
    scale: __m256,
    sum: __m256,
) -> __m256 {
    let term = _mm256_mul_ps(_mm256_cvtepi32_ps(dots), scale);
    _mm256_fmadd_ps(term, _mm256_set1_ps(x.scale[block]), sum)
}

/// Adds a minimum times the sum of a block.
#[target_feature(enable = "avx2,fma")]
#[inline]
fn add_minimum<const PARTS: usize>(
    x: &Values<'_, PARTS>,
    block: usize,
    minimum: __m256,
    sum: __m256,
) -> __m256 {
    _mm256_fmadd_ps(minimum, _mm256_set1_ps(x.scaled_sum[block]), sum)
}

/// Lane `r`, and lane `r + 4`: the sum of the first, and of the second half of `x[r]`, whose 16-bit
/// values are below 2^14.
#[target_feature(enable = "avx2")]
#[inline]
fn sum_halves(x: [__m256i; 4]) -> __m256i {
    let pairs = |a, b| {
        let sums = _mm256_add_epi16(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
        _mm256_madd_epi16(sums, _mm256_set1_epi16(1))
    };
    let (low, high) = (pairs(x[0], x[1]), pairs(x[2], x[3]));
    _mm256_add_epi32(
        _mm256_unpacklo_epi64(low, high),
        _mm256_unpackhi_epi64(low, high),
    )
}

eight!(Q8_0, 34, 1, |rows, x, ahead, sum| {
    ahead.prefetch(rows, 0, 1);
    q8_0(rows, x, sum)
});

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn q8_0(rows: &Blocks<'_, 34>, x: &Values<'_, 1>, sum: __m256) -> __m256 {
    // SAFETY: 2.
    let values = unsafe { _mm256_loadu_si256(x.q[0].as_ptr().cast()) };
    let dot = |r: usize| {
        let weights: &[u8; 32] = rows[r][2..].first_chunk().expect("inside the block");
        // SAFETY: 2.
        let weights = unsafe { _mm256_loadu_si256(weights.as_ptr().cast()) };
        // The signs of the weights move to the activations: `128 * 127 * 2 < 2^15`.
        let signed = _mm256_sign_epi8(values, weights);
        let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weights), signed);
        _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))
    };
    let low = sum_quads([dot(0), dot(1), dot(2), dot(3)]);
    let high = sum_quads([dot(4), dot(5), dot(6), dot(7)]);
    let dots = _mm256_add_epi32(
        _mm256_permute2x128_si256::<0x20>(low, high),
        _mm256_permute2x128_si256::<0x31>(low, high),
    );
    add_dots(x, 0, dots, f16_of_rows(rows, 0), sum)
}

/// Dot products of 32 nibbles at `at`, with a fifth bit where there are some.
#[target_feature(enable = "avx2")]
#[inline]
fn nibble_dots<const BYTES: usize>(
    rows: &Blocks<'_, BYTES>,
    x: [__m256i; 2],
    fifth_bits: Option<usize>,
    at: usize,
) -> __m256i {
    let mask = _mm256_set1_epi8(15);
    sum_halves(each!(mask, |r| {
        let both = pair(rows, r, at);
        let mut weights = [
            _mm256_and_si256(both, mask),
            _mm256_and_si256(_mm256_srli_epi16::<4>(both), mask),
        ];
        if let Some(at) = fifth_bits {
            for half in 0..2 {
                let bits = |row: usize| u32::from(u16_at(rows[row], at + 2 * half));
                let bits = bytes_where(bits(r) | bits(r + 4) << 16, 16);
                weights[half] = _mm256_or_si256(weights[half], bits);
            }
        }
        _mm256_add_epi16(
            _mm256_maddubs_epi16(weights[0], x[0]),
            _mm256_maddubs_epi16(weights[1], x[1]),
        )
    }))
}

/// Implements [`Eight`] for a type of 32 nibbles: the bytes of a block, where its fifth bits are, if it
/// has some, and its nibbles, the offset of all weights, and whether there is a minimum.
macro_rules! nibbles {
    ($name:ident, $len:literal, $fifth:expr, $at:literal, $offset:literal, $minimum:literal) => {
        eight!($name, $len, 1, |rows, x, ahead, sum| {
            ahead.prefetch(rows, 0, 1);
            let dots = nibble_dots(rows, halves(x, 0), $fifth, $at);
            let dots = _mm256_add_epi32(dots, lacking(x, 0, $offset));
            let sum = add_dots(x, 0, dots, f16_of_rows(rows, 0), sum);
            if $minimum {
                add_minimum(x, 0, f16_of_rows(rows, 2), sum)
            } else {
                sum
            }
        });
    };
}

nibbles!(Q4_0, 18, None, 2, -8, false);
nibbles!(Q4_1, 20, None, 4, 0, true);
nibbles!(Q5_0, 22, Some(2), 6, -16, false);
nibbles!(Q5_1, 24, Some(4), 8, 0, true);

/// The scales of a `Q4K` or `Q5K` block.
struct Header {
    d: __m256,
    /// Negated, because the minimum is subtracted.
    minus_dmin: __m256,
    /// Scales of four sub-blocks and of the other four, then minima, a byte each.
    bytes: [__m256i; 4],
}

impl Header {
    #[target_feature(enable = "avx2,f16c")]
    #[inline]
    fn read<const BYTES: usize>(rows: &Blocks<'_, BYTES>) -> Self {
        let [both, first, second, third] =
            transpose4(each!(_mm256_setzero_si256(), |r| pair(rows, r, 0)));
        let low = _mm256_and_si256(both, _mm256_set1_epi32(0xFFFF));
        let packed = _mm256_packus_epi32(low, _mm256_srli_epi32::<16>(both));
        let halves = _mm256_permute4x64_epi64::<0xD8>(packed);
        let dmin = _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(halves));
        let (six, four, two) = (
            _mm256_set1_epi8(63),
            _mm256_set1_epi8(15),
            _mm256_set1_epi8(0x30),
        );
        // The upper two bits are those the first four sub-blocks leave unused.
        let upper = |x| _mm256_and_si256(_mm256_srli_epi16::<2>(x), two);
        let high = _mm256_srli_epi16::<4>(third);
        Self {
            d: _mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
            minus_dmin: _mm256_mul_ps(dmin, _mm256_set1_ps(-1.0)),
            bytes: [
                _mm256_and_si256(first, six),
                _mm256_or_si256(_mm256_and_si256(third, four), upper(first)),
                _mm256_and_si256(second, six),
                _mm256_or_si256(_mm256_and_si256(high, four), upper(second)),
            ],
        }
    }

    /// Scale and (negative) minimum of a sub-block.
    #[target_feature(enable = "avx2")]
    #[inline]
    fn sub_block(&self, part: usize) -> [__m256; 2] {
        let byte = |words: __m256i| {
            let shift = _mm_cvtsi32_si128(8 * (part as i32 % 4));
            let byte = _mm256_and_si256(_mm256_srl_epi32(words, shift), _mm256_set1_epi32(63));
            _mm256_cvtepi32_ps(byte)
        };
        [
            _mm256_mul_ps(self.d, byte(self.bytes[part / 4])),
            _mm256_mul_ps(self.minus_dmin, byte(self.bytes[2 + part / 4])),
        ]
    }
}

/// The fifth bits of sub-block `part`, in place.
#[target_feature(enable = "avx2")]
#[inline]
fn fifth_bits(bits: __m256i, part: usize) -> __m256i {
    let (up, down) = (4_usize.saturating_sub(part), part.saturating_sub(4));
    let bits = _mm256_sll_epi16(bits, _mm_cvtsi32_si128(up as i32));
    let bits = _mm256_srl_epi16(bits, _mm_cvtsi32_si128(down as i32));
    _mm256_and_si256(bits, _mm256_set1_epi8(16))
}

/// Adds the terms of a `Q4K` or `Q5K` block, whose nibbles are at `nibbles`.
#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn k_add<const BYTES: usize>(
    rows: &Blocks<'_, BYTES>,
    x: &Values<'_, 8>,
    ahead: Ahead<BYTES>,
    fifth: Option<usize>,
    nibbles: usize,
    mut sum: __m256,
) -> __m256 {
    let header = Header::read(rows);
    for both in 0..4 {
        ahead.prefetch(rows, both, 4);
        let dots = k_dots(rows, x, 2 * both, fifth, nibbles + 32 * both);
        for second in 0..2 {
            let part = 2 * both + second;
            let [scale, minimum] = header.sub_block(part);
            sum = add_dots(x, part, dots[second], scale, sum);
            sum = add_minimum(x, part, minimum, sum);
        }
    }
    sum
}

/// Dot products of sub-blocks `part` and `part + 1`, the low and the high nibbles of 32 bytes at `at`.
#[target_feature(enable = "avx2")]
#[inline]
fn k_dots<const BYTES: usize>(
    rows: &Blocks<'_, BYTES>,
    x: &Values<'_, 8>,
    part: usize,
    fifth: Option<usize>,
    at: usize,
) -> [__m256i; 2] {
    let mask = _mm256_set1_epi8(15);
    let values: [_; 2] = each!([mask; 2], |i| halves(x, part + i));
    let mut pairs = [[_mm256_setzero_si256(); 4]; 2];
    for r in 0..4 {
        for half in 0..2 {
            let both = pair(rows, r, at + 16 * half);
            let mut weights = [
                _mm256_and_si256(both, mask),
                _mm256_and_si256(_mm256_srli_epi16::<4>(both), mask),
            ];
            if let Some(fifth) = fifth {
                let bits = pair(rows, r, fifth + 16 * half);
                for i in 0..2 {
                    weights[i] = _mm256_or_si256(weights[i], fifth_bits(bits, part + i));
                }
            }
            for i in 0..2 {
                let products = _mm256_maddubs_epi16(weights[i], values[i][half]);
                pairs[i][r] = _mm256_add_epi16(pairs[i][r], products);
            }
        }
    }
    each!(mask, |i| sum_halves(pairs[i]))
}

eight!(Q4K, 144, 8, |rows, x, ahead, sum| {
    k_add(rows, x, ahead, None, 16, sum)
});

eight!(Q5K, 176, 8, |rows, x, ahead, sum| {
    k_add(rows, x, ahead, Some(16), 48, sum)
});

eight!(Q6K, 210, 8, |rows, x, ahead, sum| {
    q6_k(rows, x, ahead, sum)
});

#[target_feature(enable = "avx2,fma,f16c")]
#[inline]
fn q6_k(rows: &Blocks<'_, 210>, x: &Values<'_, 8>, ahead: Ahead<210>, mut sum: __m256) -> __m256 {
    let zero = _mm256_setzero_si256();
    let d = f16_of_rows(rows, 208);
    let scales = transpose4(each!(zero, |r| pair(rows, r, 192)));
    for upper in 0..2 {
        // Blocks 0 and 2, then 1 and 3, because two share the bytes of their nibbles.
        let mut dots = [[zero; 2]; 4];
        for block in 0..2 {
            ahead.prefetch(rows, 2 * upper + block, 4);
            for half in 0..2 {
                let both = q6_k_dots(rows, x, [upper, block, half]);
                [dots[block][half], dots[block + 2][half]] = both;
            }
        }
        for quarter in 0..4 {
            let block = 4 * upper + quarter;
            for half in 0..2 {
                let byte = 2 * quarter + half;
                let shift = _mm_cvtsi32_si128(24 - 8 * (byte as i32 % 4));
                let top = _mm256_sll_epi32(scales[2 * upper + byte / 4], shift);
                let scale = _mm256_cvtepi32_ps(_mm256_srai_epi32::<24>(top));
                let lacking = _mm256_set1_epi32(-32 * x.half_sums[half][block]);
                let dots = _mm256_add_epi32(dots[quarter][half], lacking);
                sum = add_dots(x, block, dots, _mm256_mul_ps(d, scale), sum);
            }
        }
    }
    sum
}

/// Dot products of one half of blocks `block` and `block + 2` of half a file block.
#[target_feature(enable = "avx2")]
#[inline]
fn q6_k_dots(
    rows: &Blocks<'_, 210>,
    x: &Values<'_, 8>,
    [upper, block, half]: [usize; 3],
) -> [__m256i; 2] {
    let (four, two) = (_mm256_set1_epi8(15), _mm256_set1_epi8(0x30));
    let values: [_; 2] = each!(four, |second| halves(x, 4 * upper + block + 2 * second)
        [half]);
    let [first, second] = values;
    let mut pairs = [[four; 4]; 2];
    for r in 0..4 {
        let low = pair(rows, r, 64 * upper + 32 * block + 16 * half);
        let high = pair(rows, r, 128 + 32 * upper + 16 * half);
        let (up, down) = match block {
            0 => (_mm256_slli_epi16::<4>(high), high),
            _ => (_mm256_slli_epi16::<2>(high), _mm256_srli_epi16::<2>(high)),
        };
        let weights =
            |low, high| _mm256_or_si256(_mm256_and_si256(low, four), _mm256_and_si256(high, two));
        pairs[0][r] = _mm256_maddubs_epi16(weights(low, up), first);
        let low = _mm256_srli_epi16::<4>(low);
        pairs[1][r] = _mm256_maddubs_epi16(weights(low, down), second);
    }
    each!(four, |i| sum_halves(pairs[i]))
}
