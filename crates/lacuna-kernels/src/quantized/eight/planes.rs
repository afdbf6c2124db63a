//! Types whose weights are points of a table, with the permutations of bytes of AVX-512 VBMI: a row of 256
//! columns to four registers.
//!
//! Points of four elements are 64 to a row, one for each byte of a register; points of eight are taken as
//! two of four. Tables hold the first elements of all points, then the second ones, and so on, and are in
//! registers or in the nearest cache: a permutation looks 64 points up in 128 entries. So byte `i` of
//! register `e` is column `4 * i + e`, activations are put in that order once for eight rows, and what is
//! summed in a word are the products of sixteen columns.
//!
//! For each 64 columns this takes 1 (IQ3_XXS: 2) to 6 (IQ2_S) permutations for points, and 4 steps of the
//! ports that permute for signs, products and order; loads of single points took 16 loads and 8 inserts.
//!
//! # Safety
//! 1. What has target features, and what is inlined into it, is reached through [`multiply`] and [`magnitudes_of_rows`] only, which
//!    have the proof that the CPU has AVX-512 F, BW, DQ, VL, VNNI and VBMI, GFNI, AVX2, FMA and F16C.
//! 2. Loads go through references to arrays that are at least as long, unaligned.
#![expect(unsafe_code, reason = "intrinsics; see # Safety")]

use std::arch::x86_64::*;

use super::avx512::tq1_0_by_permutations;
use super::{Ahead, Blocks, Eight, ROWS, Values, eight, f16_of_rows, ways};
use crate::activations::Activations;
use crate::grid::Block;
use crate::matrix::Matrix;
use crate::quantized::formats::{Format, Tq1_0};
use crate::quantized::grids::planes::{
    IQ2_S_PLANES, IQ2_XS_PLANES, IQ2_XXS_PLANES, IQ3_S_PLANES, IQ3_XXS_PLANES, Plane,
};
use crate::quantized::grids::{Grid, IQ2, Iq2S, Iq2Xs, Iq2Xxs, Iq3S, Iq3Xxs, bytes};
use crate::simd::avx512::{Avx512Vbmi, Avx512Vnni};
use crate::simd::{LANES, each};
use crate::tile::Tile;

/// Writes the products of the rows from `first` on with one token, if they are of such a type and the CPU has
/// these permutations.
pub(super) fn multiply(
    avx512: Avx512Vnni,
    weights: &Matrix<'_>,
    x: &Activations<'_>,
    out: &mut Block<'_, f32>,
) -> bool {
    let Some(_): Option<Avx512Vbmi> = avx512.permutes_bytes() else {
        return false;
    };
    // SAFETY: 1.
    unsafe { of_its_type(weights, x, out) }
}

ways! {
    "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,gfni,avx2,fma,f16c",
    8, |rows, x, ahead, sum|
    Iq3S, 110: add::<Iq3S, 110>(rows, x, ahead, sum);
    Iq3Xxs, 98: add::<Iq3Xxs, 98>(rows, x, ahead, sum);
    Iq2S, 82: add::<Iq2S, 82>(rows, x, ahead, sum);
    Iq2Xs, 74: add::<Iq2Xs, 74>(rows, x, ahead, sum);
    Iq2Xxs, 66: add::<Iq2Xxs, 66>(rows, x, ahead, sum);
    Tq1_0, 54: tq1_0_by_permutations(rows, x, ahead, sum);
}

/// Bytes, or words, of which the `e`-th register is about columns `4 * i + e`.
type Planes = [__m512i; 4];

/// Sixty-four bytes, each made of its index.
macro_rules! in_order {
    (|$i:ident| $byte:expr) => {{
        let mut bytes = [0; 64];
        let mut $i = 0;
        while $i < 64 {
            bytes[$i] = $byte as u8;
            $i += 1;
        }
        Plane(bytes)
    }};
}

/// A storage type, two rows at a time.
pub(in crate::quantized) trait InPlanes<const BYTES: usize>: Grid {
    /// Scales of each sixteen columns; else of each thirty-two.
    const HALVES: bool;

    /// The magnitudes of each row.
    ///
    /// # Safety
    /// The CPU has the instructions of 1.
    unsafe fn planes(rows: [&[u8; BYTES]; 2]) -> [Planes; 2];

    /// The signs of eight columns, twice: bytes `2 * j` and `2 * j + 1` are those of columns `8 * j ..`.
    ///
    /// # Safety
    /// The CPU has the instructions of 1.
    unsafe fn signs_twice(row: &[u8; BYTES]) -> __m512i;

    /// The bits of scales in the lowest four of words: of each of sixteen columns, or of thirty-two in every
    /// other word.
    ///
    /// # Safety
    /// The CPU has the instructions of 1.
    unsafe fn scale_bits(row: &[u8; BYTES]) -> __m512i;
}

/// Adds the terms of a file block of each row.
///
/// # Safety
/// The CPU has the instructions of 1.
#[inline(always)]
unsafe fn add<G: InPlanes<BYTES>, const BYTES: usize>(
    rows: &Blocks<'_, BYTES>,
    x: &Values<'_, 8>,
    ahead: Ahead<BYTES>,
    mut sum: __m256,
) -> __m256 {
    // SAFETY: by the caller's promise.
    unsafe {
        let values = in_planes(x);
        let d = _mm256_mul_ps(f16_of_rows(rows, 0), _mm256_set1_ps(G::UNIT));
        let mut terms = [_mm512_setzero_ps(); ROWS];
        for pair in 0..4 {
            ahead.prefetch(rows, pair, 4);
            let two = [rows[2 * pair], rows[2 * pair + 1]];
            let magnitudes = G::planes(two);
            let dots: [_; 2] = each!(_mm512_setzero_si512(), |i| {
                dots(&magnitudes[i], G::signs_twice(two[i]), &values)
            });
            let scales: [_; 2] = each!(dots[0], |i| G::scale_bits(two[i]));
            if G::HALVES {
                for i in 0..2 {
                    let d = lanes(d, 2 * pair + i, 2 * pair + i);
                    terms[2 * pair + i] = products(dots[i], scales[i], d);
                }
            } else {
                let dots = _mm512_add_epi32(even(dots), odd(dots));
                let d = lanes(d, 2 * pair, 2 * pair + 1);
                terms[pair] = products(dots, even(scales), d);
            }
        }
        if G::HALVES {
            let terms = by_sixteen(&terms);
            for (index, terms) in terms.into_iter().enumerate() {
                sum = _mm256_fmadd_ps(terms, _mm256_set1_ps(x.scale[index / 2]), sum);
            }
        } else {
            let [a, b, c, d, ..] = terms;
            let terms = by_thirty_two(&[a, b, c, d]);
            for (part, terms) in terms.into_iter().enumerate() {
                sum = _mm256_fmadd_ps(terms, _mm256_set1_ps(x.scale[part]), sum);
            }
        }
    }
    sum
}

/// Writes the magnitudes of a file block of sixteen rows, if the CPU has these permutations: of each row columns 0 to 15 of
/// each quarter, one after the other, then columns 16 to 31 of each, and so on.
pub(in crate::quantized) fn magnitudes_of_rows<G: InPlanes<BYTES>, const BYTES: usize>(
    avx512: Avx512Vnni,
    tile: &Tile<'_>,
    out: &mut [[u8; 256]; LANES],
) -> bool {
    let Some(_): Option<Avx512Vbmi> = avx512.permutes_bytes() else {
        return false;
    };
    // SAFETY: 1.
    unsafe { each_row::<G, BYTES>(tile, out) };
    true
}

/// See [`magnitudes_of_rows`].
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,gfni,avx2,fma,f16c"
)]
fn each_row<G: InPlanes<BYTES>, const BYTES: usize>(tile: &Tile<'_>, out: &mut [[u8; 256]; LANES]) {
    for (pair, out) in out.as_chunks_mut::<2>().0.iter_mut().enumerate() {
        let rows: [_; 2] = each!(&[0; BYTES], |i| {
            let row = tile.row(2 * pair + i).first_chunk();
            row.expect("a file block of each row")
        });
        // SAFETY: 1.
        let planes = unsafe { G::planes(rows) };
        for (planes, out) in planes.iter().zip(out) {
            // Four columns side by side, of sixteen times four to a quarter.
            let [a, b, c, d] = *planes;
            let low = [_mm512_unpacklo_epi8(a, b), _mm512_unpacklo_epi8(c, d)];
            let high = [_mm512_unpackhi_epi8(a, b), _mm512_unpackhi_epi8(c, d)];
            let columns = [
                _mm512_unpacklo_epi16(low[0], low[1]),
                _mm512_unpackhi_epi16(low[0], low[1]),
                _mm512_unpacklo_epi16(high[0], high[1]),
                _mm512_unpackhi_epi16(high[0], high[1]),
            ];
            for (columns, out) in columns.into_iter().zip(out.as_chunks_mut::<64>().0) {
                // SAFETY: 2.
                unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), columns) };
            }
        }
    }
}

/// Activations in the order of magnitudes.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
#[inline]
fn in_planes(x: &Values<'_, 8>) -> Planes {
    static ORDER: Plane<64> = in_order!(|i| 4 * (i % 16) + i / 16);
    let columns = x.q.as_chunks::<2>().0;
    // Quarter `e` of each: columns `4 * i + e` of 64.
    let [a, b, c, d] = each!(_mm512_setzero_si512(), |i| {
        // SAFETY: 2.
        let columns = unsafe { _mm512_loadu_si512(columns[i].as_ptr().cast()) };
        _mm512_permutexvar_epi8(constant(&ORDER), columns)
    });
    let first = [
        _mm512_shuffle_i32x4::<0x44>(a, b),
        _mm512_shuffle_i32x4::<0x44>(c, d),
    ];
    let last = [
        _mm512_shuffle_i32x4::<0xEE>(a, b),
        _mm512_shuffle_i32x4::<0xEE>(c, d),
    ];
    [
        _mm512_shuffle_i32x4::<0x88>(first[0], first[1]),
        _mm512_shuffle_i32x4::<0xDD>(first[0], first[1]),
        _mm512_shuffle_i32x4::<0x88>(last[0], last[1]),
        _mm512_shuffle_i32x4::<0xDD>(last[0], last[1]),
    ]
}

#[target_feature(enable = "avx512f")]
#[inline]
fn constant(bytes: &'static Plane<64>) -> __m512i {
    // SAFETY: 2.
    unsafe { _mm512_loadu_si512(bytes.0.as_ptr().cast()) }
}

/// The dot product of each sixteen columns.
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
#[inline]
fn dots(magnitudes: &Planes, signs: __m512i, values: &Planes) -> __m512i {
    let zero = _mm512_setzero_si512();
    let mut dots = zero;
    for e in 0..4 {
        // Of two times four columns of eight, the `e`-th.
        let bits = _mm512_set1_epi16(0x1001 << e);
        let negative = _mm512_test_epi8_mask(signs, bits);
        let signed = _mm512_mask_sub_epi8(values[e], negative, zero, values[e]);
        dots = _mm512_dpbusd_epi32(dots, magnitudes[e], signed);
    }
    dots
}

/// Every other word, from the first on, of each: quarter `q` has words `4 * q` and `4 * q + 2` of the first,
/// then of the second.
#[target_feature(enable = "avx512f")]
#[inline]
fn even(x: [__m512i; 2]) -> __m512i {
    let [a, b] = x.map(|x| _mm512_castsi512_ps(x));
    _mm512_castps_si512(_mm512_shuffle_ps::<0x88>(a, b))
}

/// The others.
#[target_feature(enable = "avx512f")]
#[inline]
fn odd(x: [__m512i; 2]) -> __m512i {
    let [a, b] = x.map(|x| _mm512_castsi512_ps(x));
    _mm512_castps_si512(_mm512_shuffle_ps::<0xDD>(a, b))
}

/// Lane `first` in the first two lanes of each quarter, and lane `second` in the others.
#[target_feature(enable = "avx512f")]
#[inline]
fn lanes(x: __m256, first: usize, second: usize) -> __m512 {
    let (first, second) = (first as i32, second as i32);
    let order = _mm512_set4_epi32(second, second, first, first);
    _mm512_permutexvar_ps(order, _mm512_castps256_ps512(x))
}

/// Dot products times `d` and the odd numbers that scales are: twice their bits, and one.
#[target_feature(enable = "avx512f")]
#[inline]
fn products(dots: __m512i, scales: __m512i, d: __m512) -> __m512 {
    let bits = _mm512_cvtepi32_ps(scales);
    // Whole numbers below 32, so that nothing is rounded.
    let odd = _mm512_fmadd_ps(bits, _mm512_set1_ps(2.0), _mm512_set1_ps(1.0));
    _mm512_mul_ps(_mm512_cvtepi32_ps(dots), _mm512_mul_ps(d, odd))
}

/// Words of four times two rows, in the order of [`even`], by which thirty-two columns they are of.
#[target_feature(enable = "avx512f")]
#[inline]
fn by_thirty_two(x: &[__m512; 4]) -> [__m256; 8] {
    // Quarter `q` of rows 0 to 3, and of 4 to 7: part `2 * q`, then `2 * q + 1`.
    let evens = [
        _mm512_shuffle_ps::<0x88>(x[0], x[1]),
        _mm512_shuffle_ps::<0x88>(x[2], x[3]),
    ];
    let odds = [
        _mm512_shuffle_ps::<0xDD>(x[0], x[1]),
        _mm512_shuffle_ps::<0xDD>(x[2], x[3]),
    ];
    let [evens, odds] = [joined(evens), joined(odds)];
    each!(evens[0], |part| if part % 2 == 0 {
        evens[part / 2]
    } else {
        odds[part / 2]
    })
}

/// Words of eight rows, by which sixteen columns they are of.
#[target_feature(enable = "avx512f")]
#[inline]
fn by_sixteen(x: &[__m512; ROWS]) -> [__m256; 16] {
    // Of rows 0 to 3, and of 4 to 7: quarter `q` of the `i`-th is column group `4 * q + i`.
    let four = |x: [__m512; 4]| {
        let low = [
            _mm512_unpacklo_ps(x[0], x[1]),
            _mm512_unpacklo_ps(x[2], x[3]),
        ];
        let high = [
            _mm512_unpackhi_ps(x[0], x[1]),
            _mm512_unpackhi_ps(x[2], x[3]),
        ];
        [
            _mm512_shuffle_ps::<0x44>(low[0], low[1]),
            _mm512_shuffle_ps::<0xEE>(low[0], low[1]),
            _mm512_shuffle_ps::<0x44>(high[0], high[1]),
            _mm512_shuffle_ps::<0xEE>(high[0], high[1]),
        ]
    };
    let (first, second) = (
        four([x[0], x[1], x[2], x[3]]),
        four([x[4], x[5], x[6], x[7]]),
    );
    let groups: [_; 4] = each!([_mm256_setzero_ps(); 4], |i| joined([first[i], second[i]]));
    each!(_mm256_setzero_ps(), |group| groups[group % 4][group / 4])
}

/// The quarters of the first, each followed by the same quarter of the second.
#[target_feature(enable = "avx512f")]
#[inline]
fn joined([a, b]: [__m512; 2]) -> [__m256; 4] {
    let [a, b] = [_mm512_castps_pd(a), _mm512_castps_pd(b)];
    let low = _mm512_permutex2var_pd(a, _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), b);
    let high = _mm512_permutex2var_pd(a, _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15), b);
    let halves = |x| {
        [
            _mm256_castpd_ps(_mm512_castpd512_pd256(x)),
            _mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(x)),
        ]
    };
    let ([first, second], [third, fourth]) = (halves(low), halves(high));
    [first, second, third, fourth]
}

/// 64 bytes at `at`.
#[target_feature(enable = "avx512f")]
#[inline]
fn load64<const BYTES: usize>(row: &[u8; BYTES], at: usize) -> __m512i {
    let bytes: &[u8; 64] = bytes(row, at);
    // SAFETY: 2.
    unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) }
}

/// 32 bytes at `at`.
#[target_feature(enable = "avx512f")]
#[inline]
fn load32<const BYTES: usize>(row: &[u8; BYTES], at: usize) -> __m256i {
    let bytes: &[u8; 32] = bytes(row, at);
    // SAFETY: 2.
    unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) }
}

/// What the points of a table have at one place: `highest` are the bits of indices from the eighth on.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
#[inline]
fn look_up<const N: usize>(
    plane: &'static Plane<N>,
    indices: __m512i,
    highest: [__mmask64; 3],
) -> __m512i {
    let entries = |first: usize| {
        let of = |at: usize| load64(&plane.0, at);
        _mm512_permutex2var_epi8(of(first), indices, of(first + 64))
    };
    let two =
        |first: usize| _mm512_mask_blend_epi8(highest[0], entries(first), entries(first + 128));
    let four = |first: usize| _mm512_mask_blend_epi8(highest[1], two(first), two(first + 256));
    match N {
        256 => two(0),
        512 => four(0),
        1024 => _mm512_mask_blend_epi8(highest[2], four(0), four(512)),
        _ => unreachable!("tables have 256, 512 or 1024 points"),
    }
}

/// The magnitudes of two rows of points of eight, of which `indices` are the lowest bits: 32 of the first row,
/// then of the second.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
#[inline]
fn of_eights<const N: usize>(
    planes: &'static [Plane<N>; 2],
    indices: __m512i,
    highest: [__mmask64; 2],
) -> [Planes; 2] {
    let highest = [_mm512_movepi8_mask(indices), highest[0], highest[1]];
    let [low, high] = [
        look_up(&planes[0], indices, highest),
        look_up(&planes[1], indices, highest),
    ];
    each!([low; 4], |row| {
        // Both halves of a point, one after the other.
        static ORDERS: [Plane<64>; 2] = [
            in_order!(|i| i / 2 + i % 2 * 64),
            in_order!(|i| 32 + i / 2 + i % 2 * 64),
        ];
        let codes = _mm512_permutex2var_epi8(low, constant(&ORDERS[row]), high);
        // Of an index, a permutation uses the lowest six bits: three elements.
        static LEVELS: [Plane<64>; 3] = [
            in_order!(|i| IQ2[i % 4]),
            in_order!(|i| IQ2[i / 4 % 4]),
            in_order!(|i| IQ2[i / 16]),
        ];
        each!(codes, |e| if e < 3 {
            _mm512_permutexvar_epi8(codes, constant(&LEVELS[e]))
        } else {
            _mm512_permutexvar_epi8(_mm512_srli_epi16::<2>(codes), constant(&LEVELS[2]))
        })
    })
}

/// Eight signs for each seven bits in a byte: the number of negative ones is even.
#[target_feature(enable = "avx512f,gfni")]
#[inline]
fn even_signs(sevens: __m512i) -> __m512i {
    // Each bit is itself, and the eighth, whose row comes first, is the sum of the others.
    let matrix = _mm512_set1_epi64(0x0102_0408_1020_407F);
    _mm512_gf2p8affine_epi64_epi8::<0>(sevens, matrix)
}

/// Eight bits of each word of 64 from bit `starts[j]` on, as byte `j`.
#[target_feature(enable = "avx512f,avx512vbmi")]
#[inline]
fn shifted(words: __m512i, starts: [u8; 8]) -> __m512i {
    let starts = _mm512_set1_epi64(i64::from_le_bytes(starts));
    _mm512_multishift_epi64_epi8(starts, words)
}

/// The four bits of 64 that start where `starts` says, in words of 32.
#[target_feature(enable = "avx512f,avx512vbmi")]
#[inline]
fn nibbles(bits: u64, starts: &'static Plane<64>) -> __m512i {
    let bits = _mm512_set1_epi64(bits.cast_signed());
    let bits = _mm512_multishift_epi64_epi8(constant(starts), bits);
    _mm512_and_si512(bits, _mm512_set1_epi32(15))
}

/// Where the nibbles of words start: of one for each, and of one for every two.
static EACH: Plane<64> = in_order!(|i| i / 4 * 4);
static EVERY_OTHER: Plane<64> = in_order!(|i| i / 8 * 4);

#[inline(always)]
fn u64_at<const BYTES: usize>(row: &[u8; BYTES], at: usize) -> u64 {
    u64::from_le_bytes(*bytes(row, at))
}

impl InPlanes<66> for Iq2Xxs {
    const HALVES: bool = false;

    #[inline(always)]
    unsafe fn planes(rows: [&[u8; 66]; 2]) -> [Planes; 2] {
        // Four indices, then signs and scale in four bytes.
        static ORDER: Plane<64> = in_order!(|i| 8 * (i / 4) + i % 4);
        // SAFETY: by the caller's promise.
        unsafe {
            let [a, b] = [load64(rows[0], 2), load64(rows[1], 2)];
            let indices = _mm512_permutex2var_epi8(a, constant(&ORDER), b);
            of_eights(&IQ2_XXS_PLANES, indices, [0; 2])
        }
    }

    #[inline(always)]
    unsafe fn signs_twice(row: &[u8; 66]) -> __m512i {
        // SAFETY: by the caller's promise.
        unsafe { even_signs(shifted(load64(row, 2), [32, 32, 39, 39, 46, 46, 53, 53])) }
    }

    #[inline(always)]
    unsafe fn scale_bits(row: &[u8; 66]) -> __m512i {
        // SAFETY: by the caller's promise.
        unsafe { _mm512_srli_epi64::<60>(load64(row, 2)) }
    }
}

impl InPlanes<74> for Iq2Xs {
    const HALVES: bool = true;

    #[inline(always)]
    unsafe fn planes(rows: [&[u8; 74]; 2]) -> [Planes; 2] {
        // Every other byte.
        static ORDERS: [Plane<64>; 2] = [in_order!(|i| 2 * i), in_order!(|i| 2 * i + 1)];
        // SAFETY: by the caller's promise.
        unsafe {
            let [a, b] = [load64(rows[0], 2), load64(rows[1], 2)];
            let indices = _mm512_permutex2var_epi8(a, constant(&ORDERS[0]), b);
            let upper = _mm512_permutex2var_epi8(a, constant(&ORDERS[1]), b);
            let ninth = _mm512_test_epi8_mask(upper, _mm512_set1_epi8(1));
            of_eights(&IQ2_XS_PLANES, indices, [ninth, 0])
        }
    }

    #[inline(always)]
    unsafe fn signs_twice(row: &[u8; 74]) -> __m512i {
        // SAFETY: by the caller's promise.
        unsafe { even_signs(shifted(load64(row, 2), [9, 9, 25, 25, 41, 41, 57, 57])) }
    }

    #[inline(always)]
    unsafe fn scale_bits(row: &[u8; 74]) -> __m512i {
        // SAFETY: by the caller's promise.
        unsafe { nibbles(u64_at(row, 66), &EACH) }
    }
}

impl InPlanes<82> for Iq2S {
    const HALVES: bool = true;

    #[inline(always)]
    unsafe fn planes(rows: [&[u8; 82]; 2]) -> [Planes; 2] {
        // A byte holds two bits of four indices.
        static ORDER: Plane<64> = in_order!(|i| i / 4);
        // SAFETY: by the caller's promise.
        unsafe {
            let indices = _mm512_castsi256_si512(load32(rows[0], 2));
            let indices = _mm512_inserti64x4::<1>(indices, load32(rows[1], 2));
            let upper = [u64_at(rows[0], 66), u64_at(rows[1], 66)].map(u64::cast_signed);
            let upper = _mm512_castsi128_si512(_mm_set_epi64x(upper[1], upper[0]));
            let upper = _mm512_permutexvar_epi8(constant(&ORDER), upper);
            let ninth = _mm512_set1_epi32(0x4010_0401);
            let tenth = _mm512_slli_epi16::<1>(ninth);
            let highest = [ninth, tenth].map(|bits| _mm512_test_epi8_mask(upper, bits));
            of_eights(&IQ2_S_PLANES, indices, highest)
        }
    }

    #[inline(always)]
    unsafe fn signs_twice(row: &[u8; 82]) -> __m512i {
        // SAFETY: by the caller's promise.
        unsafe { twice(load32(row, 34)) }
    }

    #[inline(always)]
    unsafe fn scale_bits(row: &[u8; 82]) -> __m512i {
        // SAFETY: by the caller's promise.
        unsafe { nibbles(u64_at(row, 74), &EACH) }
    }
}

/// Each byte twice.
#[target_feature(enable = "avx512f,avx512vbmi")]
#[inline]
fn twice(bytes: __m256i) -> __m512i {
    static ORDER: Plane<64> = in_order!(|i| i / 2);
    _mm512_permutexvar_epi8(constant(&ORDER), _mm512_castsi256_si512(bytes))
}

impl InPlanes<98> for Iq3Xxs {
    const HALVES: bool = false;

    #[inline(always)]
    unsafe fn planes(rows: [&[u8; 98]; 2]) -> [Planes; 2] {
        // SAFETY: by the caller's promise.
        unsafe {
            each!([_mm512_setzero_si512(); 4], |row| {
                let indices = load64(rows[row], 2);
                let highest = [_mm512_movepi8_mask(indices), 0, 0];
                each!(indices, |e| look_up(&IQ3_XXS_PLANES[e], indices, highest))
            })
        }
    }

    #[inline(always)]
    unsafe fn signs_twice(row: &[u8; 98]) -> __m512i {
        // SAFETY: by the caller's promise.
        unsafe {
            let words = _mm512_cvtepu32_epi64(load32(row, 66));
            even_signs(shifted(words, [0, 0, 7, 7, 14, 14, 21, 21]))
        }
    }

    #[inline(always)]
    unsafe fn scale_bits(row: &[u8; 98]) -> __m512i {
        // SAFETY: by the caller's promise.
        unsafe { _mm512_srli_epi64::<28>(_mm512_cvtepu32_epi64(load32(row, 66))) }
    }
}

impl InPlanes<110> for Iq3S {
    const HALVES: bool = false;

    #[inline(always)]
    unsafe fn planes(rows: [&[u8; 110]; 2]) -> [Planes; 2] {
        // SAFETY: by the caller's promise.
        unsafe {
            each!([_mm512_setzero_si512(); 4], |row| {
                let indices = load64(rows[row], 2);
                // Bit `i` is the ninth of index `i`.
                let highest = [_mm512_movepi8_mask(indices), u64_at(rows[row], 66), 0];
                let both: [_; 2] =
                    each!(indices, |two| look_up(&IQ3_S_PLANES[two], indices, highest));
                let nibble = _mm512_set1_epi8(15);
                each!(indices, |e| {
                    let shifted = match e % 2 {
                        0 => both[e / 2],
                        _ => _mm512_srli_epi16::<4>(both[e / 2]),
                    };
                    _mm512_and_si512(shifted, nibble)
                })
            })
        }
    }

    #[inline(always)]
    unsafe fn signs_twice(row: &[u8; 110]) -> __m512i {
        // SAFETY: by the caller's promise.
        unsafe { twice(load32(row, 74)) }
    }

    #[inline(always)]
    unsafe fn scale_bits(row: &[u8; 110]) -> __m512i {
        let scales: &[u8; 4] = bytes(row, 106);
        // SAFETY: by the caller's promise.
        unsafe { nibbles(u32::from_le_bytes(*scales).into(), &EVERY_OTHER) }
    }
}
