//! AVX2 with FMA and F16C: two registers per vector, lanes 0 to 7 and 8 to 15.
//!
//! What bytes are multiplied with is a type of its own, [`Bytes`].
//!
//! # Safety
//! 1. An [`Avx2`] exists only if the CPU has AVX2, FMA and F16C, and one of [`Vnni`] only if it has AVX-VNNI
//!    too: `detect` is its only maker. So calling what they enable is sound.
//! 2. Loads and stores go through references to arrays of the size of the access, unaligned.
//! 3. Reads of a [`Tile`] are within its rows (the bounds are asserted once for all rows), and
//!    every row lies within the tile's bytes.
#![expect(unsafe_code, reason = "intrinsics; see # Safety")]

use std::arch::asm;
use std::arch::x86_64::*;

use super::{Kernel, Products, Registers, Simd, SingleToken};
use crate::activations::ActivationBlock;
use crate::tile::Tile;

/// Proof that the CPU has AVX2, FMA and F16C, and what it multiplies bytes with.
#[derive(Clone, Copy)]
pub(crate) struct Avx2<B = Pairs>(B);

impl<B: Bytes> Avx2<B> {
    /// The level, if this CPU has it.
    pub(crate) fn detect() -> Option<Self> {
        let all = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        B::detect().filter(|_| all).map(Self)
    }
}

/// Products of bytes; a value is the proof that the CPU has the instructions, where it has AVX2.
pub(crate) trait Bytes: Copy + Send + Sync + 'static {
    /// How packed panels are multiplied.
    const PRODUCTS: Products;
    /// Tokens per tile of quantized activations.
    const TOKENS: usize;
    /// What weights are stored with, to be added to them: -128, modulo 256, makes them unsigned and 128 too large.
    const BIAS: i8;

    /// The proof, if this CPU has them.
    fn detect() -> Option<Self>;

    /// Runs `kernel` compiled for these instructions.
    ///
    /// # Safety
    /// The CPU has AVX2, FMA and F16C.
    unsafe fn enter<K: Kernel>(self, kernel: K) -> K::Output;

    /// See [`Simd::dot_start`].
    fn dot_start(self, bias: [__m256i; 2]) -> [__m256i; 2];

    /// Adds to each lane the product of four weights below 128, unsigned, and four signed bytes.
    ///
    /// # Safety
    /// The CPU has AVX2.
    unsafe fn dot_unsigned(self, sum: __m256i, weights: __m256i, activations: __m256i) -> __m256i;

    /// The same of weights as they are stored.
    ///
    /// # Safety
    /// The CPU has AVX2.
    unsafe fn dot4(self, sum: __m256i, weights: __m256i, activations: __m256i) -> __m256i;

    /// See [`Simd::dot_rows`], of which the bounds have been checked.
    ///
    /// # Safety
    /// The CPU has AVX2, and `at + 32` does not exceed the rows.
    unsafe fn dot_rows<const T: usize>(
        self,
        tile: &Tile<'_>,
        at: usize,
        blocks: &[&ActivationBlock<1>; T],
    ) -> [[__m256i; 2]; T];
}

/// What all AVX2 has: `vpmaddubsw` multiplies unsigned by signed bytes and saturates sums of two to 16 bits, so
/// weights go in as magnitudes and their signs move to the activations: `128 * 127 * 2 < 2^15`. Weights that are
/// unsigned and small go in as they are; see [`Simd::add_pairs`].
#[derive(Clone, Copy)]
pub(crate) struct Pairs(());

impl Bytes for Pairs {
    const PRODUCTS: Products = Products::Pairs;
    const TOKENS: usize = 4;
    const BIAS: i8 = 0;

    fn detect() -> Option<Self> {
        Some(Self(()))
    }

    #[inline(always)]
    unsafe fn enter<K: Kernel>(self, kernel: K) -> K::Output {
        // SAFETY: by the caller's promise.
        unsafe { enter(Avx2(self), kernel) }
    }

    #[inline(always)]
    fn dot_start(self, _: [__m256i; 2]) -> [__m256i; 2] {
        // SAFETY: 1.
        unsafe { [_mm256_setzero_si256(); 2] }
    }

    #[inline(always)]
    unsafe fn dot_unsigned(self, sum: __m256i, weights: __m256i, activations: __m256i) -> __m256i {
        // SAFETY: by the caller's promise.
        unsafe {
            let pairs = _mm256_maddubs_epi16(weights, activations);
            _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
        }
    }

    #[inline(always)]
    unsafe fn dot4(self, sum: __m256i, weights: __m256i, activations: __m256i) -> __m256i {
        // SAFETY: by the caller's promise.
        unsafe {
            let signed = _mm256_sign_epi8(activations, weights);
            self.dot_unsigned(sum, _mm256_abs_epi8(weights), signed)
        }
    }

    #[inline(always)]
    unsafe fn dot_rows<const T: usize>(
        self,
        tile: &Tile<'_>,
        at: usize,
        blocks: &[&ActivationBlock<1>; T],
    ) -> [[__m256i; 2]; T] {
        // SAFETY: by the caller's promise; a block has 32 bytes.
        unsafe {
            let q = each!([_mm256_setzero_si256(); 2], |t| widen_bytes(
                blocks[t].q[0].as_ptr().cast()
            ));
            let low: [_; T] = dot_rows(tile, 0, at, &q);
            let high: [_; T] = dot_rows(tile, 8, at, &q);
            each!([low[0]; 2], |t| [low[t], high[t]])
        }
    }
}

/// AVX-VNNI, which many processors without AVX-512 have since 2021: `vpdpbusd` multiplies unsigned by signed bytes
/// and adds four of them to 32 bits. Weights are kept as unsigned bytes, 128 too large, and sums start with what
/// corrects it.
#[derive(Clone, Copy)]
pub(crate) struct Vnni(());

impl Bytes for Vnni {
    const PRODUCTS: Products = Products::Quads;
    const TOKENS: usize = 4;
    const BIAS: i8 = -128;

    fn detect() -> Option<Self> {
        is_x86_feature_detected!("avxvnni").then_some(Self(()))
    }

    #[inline(always)]
    unsafe fn enter<K: Kernel>(self, kernel: K) -> K::Output {
        // A constant, so that what multiplies no bytes is compiled once for both.
        if const { K::MULTIPLIES_BYTES } {
            // SAFETY: 1, by the caller's promise.
            unsafe { enter_vnni(Avx2(self), kernel) }
        } else {
            // SAFETY: by the caller's promise.
            unsafe { enter(Avx2(Pairs(())), kernel) }
        }
    }

    #[inline(always)]
    fn dot_start(self, bias: [__m256i; 2]) -> [__m256i; 2] {
        bias
    }

    #[inline(always)]
    unsafe fn dot_unsigned(self, sum: __m256i, weights: __m256i, activations: __m256i) -> __m256i {
        // SAFETY: 1.
        unsafe { _mm256_dpbusd_avx_epi32(sum, weights, activations) }
    }

    #[inline(always)]
    unsafe fn dot4(self, sum: __m256i, weights: __m256i, activations: __m256i) -> __m256i {
        // SAFETY: by the caller's promise.
        unsafe { self.dot_unsigned(sum, weights, activations) }
    }

    #[inline(always)]
    unsafe fn dot_rows<const T: usize>(
        self,
        tile: &Tile<'_>,
        at: usize,
        blocks: &[&ActivationBlock<1>; T],
    ) -> [[__m256i; 2]; T] {
        // SAFETY: 1, by the caller's promise.
        unsafe {
            let bias = _mm256_set1_epi8(Self::BIAS);
            let mut sums = each!([bias; 2], |t| [_mm256_set1_epi32(blocks[t].start[0]); 2]);
            for quarter in 0..4 {
                // Eight rows and half of the block at a time.
                let (rows, half) = (quarter % 2, quarter / 2);
                let words = columns(tile, 8 * rows, at + 16 * half);
                for g in 0..4 {
                    let word = _mm256_xor_si256(words[g], bias);
                    for t in 0..T {
                        let values = _mm256_set1_epi32(blocks[t].q[0][4 * half + g] as i32);
                        sums[t][rows] = self.dot_unsigned(sums[t][rows], word, values);
                    }
                }
            }
            sums
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
#[inline(never)]
fn enter<K: Kernel>(simd: Avx2, kernel: K) -> K::Output {
    kernel.run(simd)
}

#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
#[inline(never)]
fn enter_vnni<K: Kernel>(simd: Avx2<Vnni>, kernel: K) -> K::Output {
    kernel.run(simd)
}

/// Transposes four groups of rows, each four dwords in each 128-bit lane.
#[target_feature(enable = "avx2")]
#[inline]
pub(crate) fn transpose4(z: [__m256i; 4]) -> [__m256i; 4] {
    let low01 = _mm256_unpacklo_epi32(z[0], z[1]);
    let high01 = _mm256_unpackhi_epi32(z[0], z[1]);
    let low23 = _mm256_unpacklo_epi32(z[2], z[3]);
    let high23 = _mm256_unpackhi_epi32(z[2], z[3]);
    [
        _mm256_unpacklo_epi64(low01, low23),
        _mm256_unpackhi_epi64(low01, low23),
        _mm256_unpacklo_epi64(high01, high23),
        _mm256_unpackhi_epi64(high01, high23),
    ]
}

/// Lane `r` of element `c` is lane `c` of element `r`.
#[target_feature(enable = "avx2")]
#[inline]
fn transpose_eights(x: [__m256; 8]) -> [__m256; 8] {
    let four = |first: usize| {
        transpose4(each!(_mm256_setzero_si256(), |r| _mm256_castps_si256(
            x[first + r]
        )))
    };
    let (upper, lower) = (four(0), four(4));
    each!(x[0], |c| {
        let rows = [upper[c % 4], lower[c % 4]];
        _mm256_castsi256_ps(if c < 4 {
            _mm256_permute2x128_si256::<0x20>(rows[0], rows[1])
        } else {
            _mm256_permute2x128_si256::<0x31>(rows[0], rows[1])
        })
    })
}

/// Adds two vectors folded in half: the result holds the halves' sum of `a`, then of `b`.
#[target_feature(enable = "avx2")]
#[inline]
fn fold_halves(a: __m256, b: __m256) -> __m256 {
    _mm256_add_ps(
        _mm256_permute2f128_ps::<0x20>(a, b),
        _mm256_permute2f128_ps::<0x31>(a, b),
    )
}

#[target_feature(enable = "avx2")]
#[inline]
fn fold_within(a: __m256, b: __m256) -> __m256 {
    _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b))
}

/// Lane `j` is the sum of the lanes of `x[j]`, in the order of [`Simd::sum_halves`].
#[target_feature(enable = "avx2")]
#[inline]
fn sum_eights(x: [__m256; 8]) -> __m256 {
    let halves = |j: usize| fold_halves(x[j], x[j + 4]);
    let pairs = |j: usize| fold_within(halves(j), halves(j + 2));
    fold_within(pairs(0), pairs(1))
}

#[target_feature(enable = "avx2")]
#[inline]
fn sum(x: [__m256; 2]) -> f32 {
    let by8 = _mm256_add_ps(x[0], x[1]);
    let by4 = _mm_add_ps(_mm256_castps256_ps128(by8), _mm256_extractf128_ps::<1>(by8));
    let by2 = _mm_add_ps(by4, _mm_movehl_ps(by4, by4));
    _mm_cvtss_f32(_mm_add_ss(by2, _mm_movehdup_ps(by2)))
}

/// See [`Simd::largest`].
#[target_feature(enable = "avx2")]
#[inline]
fn largest(x: [__m256; 4]) -> f32 {
    let bits = |x| _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(i32::MAX));
    let by16 = _mm256_max_epi32(bits(x[0]), bits(x[1]));
    let by8 = _mm256_max_epi32(by16, _mm256_max_epi32(bits(x[2]), bits(x[3])));
    let by4 = _mm_max_epi32(
        _mm256_castsi256_si128(by8),
        _mm256_extracti128_si256::<1>(by8),
    );
    let by2 = _mm_max_epi32(by4, _mm_shuffle_epi32::<0b1110>(by4));
    let most = _mm_max_epi32(by2, _mm_shuffle_epi32::<1>(by2));
    f32::from_bits(_mm_cvtsi128_si32(most).cast_unsigned())
}

/// See [`Simd::to_bytes`].
#[target_feature(enable = "avx2")]
#[inline]
fn to_bytes(x: [__m256; 4]) -> ([u32; 8], [i32; 2]) {
    let whole = |x| _mm256_cvtps_epi32(x);
    let low = _mm256_packs_epi32(whole(x[0]), whole(x[1]));
    let high = _mm256_packs_epi32(whole(x[2]), whole(x[3]));
    // Words of the packed bytes are 0 2 4 6, 1 3 5 7.
    let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    let bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order);
    let pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), bytes);
    let quads = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    bytes_and_sums(bytes, quads)
}

/// Bytes as words, and the sums of the first and the last four lanes.
#[target_feature(enable = "avx2")]
#[inline]
pub(crate) fn bytes_and_sums(bytes: __m256i, lanes: __m256i) -> ([u32; 8], [i32; 2]) {
    let pairs = _mm256_add_epi32(lanes, _mm256_shuffle_epi32::<0b1110>(lanes));
    let sums = _mm256_add_epi32(pairs, _mm256_shuffle_epi32::<1>(pairs));
    let mut words = [0; 8];
    // SAFETY: 2.
    unsafe { _mm256_storeu_si256(words.as_mut_ptr().cast(), bytes) };
    let sums = [
        _mm256_extract_epi32::<0>(sums),
        _mm256_extract_epi32::<4>(sums),
    ];
    (words, sums)
}

/// The same value, which the compiler takes for another: it would add the terms of a sum as a tree,
/// sum by sum, and run out of registers; so they are added one by one, in the order of the source.
#[target_feature(enable = "avx2")]
#[inline]
pub(crate) fn in_order(sum: __m256i) -> __m256i {
    let mut sum = sum;
    // SAFETY: there are no instructions; the operand stays as it is.
    unsafe {
        asm!("/* {} */", inout(ymm_reg) sum, options(pure, nomem, nostack, preserves_flags));
    }
    sum
}

/// The same pointer, which the compiler takes for one that depends on `x`: what is read through it is read later.
#[target_feature(enable = "avx2")]
#[inline]
pub(crate) fn later(pointer: *const u8, x: __m256i) -> *const u8 {
    let mut pointer = pointer;
    // SAFETY: there are no instructions; the operands stay as they are.
    unsafe {
        asm!(
            "/* {} {} */",
            inout(reg) pointer,
            in(ymm_reg) x,
            options(pure, readonly, nostack, preserves_flags)
        );
    }
    pointer
}

/// Two signed bytes of each lane as 16-bit numbers: `order` puts them into upper halves.
#[target_feature(enable = "avx2")]
#[inline]
fn widen(bytes: __m256i, order: __m256i) -> __m256i {
    // The order is within four bytes; those of the other lanes follow at the same distance.
    let lanes = _mm256_setr_epi32(
        0,
        0x0404_0404,
        0x0808_0808,
        0x0C0C_0C0C,
        0,
        0x0404_0404,
        0x0808_0808,
        0x0C0C_0C0C,
    );
    _mm256_srai_epi16::<8>(_mm256_shuffle_epi8(bytes, _mm256_or_si256(order, lanes)))
}

/// Lane `4 * q + j` is the sum of lanes `4 * q .. 4 * q + 4` of `x[j]`.
#[target_feature(enable = "avx2")]
#[inline]
pub(crate) fn sum_quads(x: [__m256i; 4]) -> __m256i {
    // What a horizontal sum is made of, which takes longer.
    let pairs = |a, b| _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
    let (low, high) = (pairs(x[0], x[1]), pairs(x[2], x[3]));
    _mm256_add_epi32(
        _mm256_unpacklo_epi64(low, high),
        _mm256_unpackhi_epi64(low, high),
    )
}

/// Adds two vectors folded in half: the result holds the halves' sum of `a`, then of `b`.
#[target_feature(enable = "avx2")]
#[inline]
fn fold_integer_halves(a: __m256i, b: __m256i) -> __m256i {
    _mm256_add_epi32(
        _mm256_permute2x128_si256::<0x20>(a, b),
        _mm256_permute2x128_si256::<0x31>(a, b),
    )
}

#[target_feature(enable = "avx2")]
#[inline]
fn fold_integers_within(a: __m256i, b: __m256i) -> __m256i {
    _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b))
}

/// What the low nibbles of sixteen bytes name in a table, then the high ones.
#[target_feature(enable = "avx2")]
#[inline]
pub(crate) fn named(table: &[i8; 16], x: &[u8; 16]) -> __m256i {
    // SAFETY: 2.
    let (table, x) = unsafe {
        (
            _mm_loadu_si128(table.as_ptr().cast()),
            _mm_loadu_si128(x.as_ptr().cast()),
        )
    };
    let nibbles = _mm256_set_m128i(_mm_srli_epi16::<4>(x), x);
    let nibbles = _mm256_and_si256(nibbles, _mm256_set1_epi8(15));
    _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), nibbles)
}

/// Thirty-two signed bytes as 16-bit numbers.
///
/// # Safety
/// All of them can be read.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn widen_bytes(bytes: *const u8) -> [__m256i; 2] {
    // SAFETY: by the caller's promise.
    unsafe {
        [
            _mm256_cvtepi8_epi16(_mm_loadu_si128(bytes.cast())),
            _mm256_cvtepi8_epi16(_mm_loadu_si128(bytes.add(16).cast())),
        ]
    }
}

/// Sums of products of a row of signed bytes and each query, two and two of each half.
///
/// Words, because products of bytes take a third instruction for the signs, on the two ports that
/// multiply.
///
/// # Safety
/// The row has 32 bytes.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn row_products<const T: usize>(
    row: *const u8,
    queries: &[[__m256i; 2]; T],
) -> [__m256i; T] {
    // SAFETY: by the caller's promise.
    let [low, high] = unsafe { widen_bytes(row) };
    each!(_mm256_setzero_si256(), |t| _mm256_add_epi32(
        _mm256_madd_epi16(low, queries[t][0]),
        _mm256_madd_epi16(high, queries[t][1]),
    ))
}

/// Lane `r` of element `t` is the product of the 32 bytes at `at` of row `first + r` and query `t`.
///
/// # Safety
/// `at + 32` does not exceed the rows.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn dot_rows<const T: usize>(
    tile: &Tile<'_>,
    first: usize,
    at: usize,
    queries: &[[__m256i; 2]; T],
) -> [__m256i; T] {
    let zero = _mm256_setzero_si256();
    // SAFETY: 3, by the caller's promise.
    let row = |r: usize| unsafe { row_products(tile.ptr(first + r, at), queries) };
    let halves = |j: usize| {
        let (a, b) = (row(j), row(j + 4));
        each!(zero, |t| fold_integer_halves(a[t], b[t]))
    };
    let pairs = |j: usize| {
        let (a, b): ([_; T], [_; T]) = (halves(j), halves(j + 2));
        each!(zero, |t| fold_integers_within(a[t], b[t]))
    };
    let (a, b): ([_; T], [_; T]) = (pairs(0), pairs(1));
    each!(zero, |t| fold_integers_within(a[t], b[t]))
}

/// `value` in the bytes whose bit is set.
#[target_feature(enable = "avx2")]
#[inline]
pub(crate) fn bytes_where(bits: u32, value: u8) -> __m256i {
    let byte = _mm256_setr_epi64x(
        0,
        0x0101_0101_0101_0101,
        0x0202_0202_0202_0202,
        0x0303_0303_0303_0303,
    );
    let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
    let spread = _mm256_shuffle_epi8(_mm256_set1_epi32(bits as i32), byte);
    let set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit);
    _mm256_and_si256(set, _mm256_set1_epi8(value as i8))
}

/// Sixteen bytes at `at` of rows `first` and `first + 4`.
///
/// # Safety
/// `at + 16` does not exceed the rows, and `first < 12`.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn load_rows(tile: &Tile<'_>, first: usize, at: usize) -> __m256i {
    // SAFETY: 3, by the caller's promise.
    unsafe {
        let low = _mm_loadu_si128(tile.ptr(first, at).cast());
        let high = _mm_loadu_si128(tile.ptr(first + 4, at).cast());
        _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(low), high)
    }
}

/// Sixteen bytes at `at` of eight rows, transposed.
///
/// # Safety
/// `at + 16` does not exceed the rows, and `first <= 8`.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn columns(tile: &Tile<'_>, first: usize, at: usize) -> [__m256i; 4] {
    // SAFETY: by the caller's promise.
    transpose4(unsafe {
        [
            load_rows(tile, first, at),
            load_rows(tile, first + 1, at),
            load_rows(tile, first + 2, at),
            load_rows(tile, first + 3, at),
        ]
    })
}

/// Applies an operation to both registers.
macro_rules! both {
    (|$($x:ident),+| $body:expr) => {{
        // SAFETY: 1, and 2 where it loads.
        unsafe {
            [
                { $(let $x = $x[0];)+ $body },
                { $(let $x = $x[1];)+ $body },
            ]
        }
    }};
}

impl<B: Bytes> Simd for Avx2<B> {
    type F = [__m256; 2];
    type U = [__m256i; 2];

    const REGISTERS: Registers = Registers::Few;
    const TOKENS: usize = B::TOKENS;
    const TILES: usize = 1;
    const PRODUCTS: Products = B::PRODUCTS;
    const SINGLE_TOKEN: SingleToken = SingleToken::Eight;
    const START: i32 = 0;

    #[inline(always)]
    fn avx2(self) -> Option<Avx2> {
        Some(Avx2(Pairs(())))
    }

    #[inline]
    fn vectorize<K: Kernel>(self, kernel: K) -> K::Output {
        // SAFETY: 1.
        unsafe { self.0.enter(kernel) }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        // SAFETY: 1.
        unsafe { [_mm256_set1_ps(x); 2] }
    }

    #[inline(always)]
    fn load(self, x: &[f32; 16]) -> Self::F {
        // SAFETY: 1, 2.
        unsafe {
            [
                _mm256_loadu_ps(x.as_ptr()),
                _mm256_loadu_ps(x[8..].as_ptr()),
            ]
        }
    }

    #[inline(always)]
    fn store(self, x: Self::F, out: &mut [f32; 16]) {
        // SAFETY: 1, 2.
        unsafe {
            _mm256_storeu_ps(out.as_mut_ptr(), x[0]);
            _mm256_storeu_ps(out[8..].as_mut_ptr(), x[1]);
        }
    }

    #[inline(always)]
    fn load_f32_bytes(self, x: &[u8; 64]) -> Self::F {
        // SAFETY: 1, 2.
        unsafe {
            [
                _mm256_loadu_ps(x.as_ptr().cast()),
                _mm256_loadu_ps(x[32..].as_ptr().cast()),
            ]
        }
    }

    #[inline(always)]
    fn load_f16(self, x: &[u8; 32]) -> Self::F {
        // SAFETY: 1, 2.
        unsafe {
            [
                _mm256_cvtph_ps(_mm_loadu_si128(x.as_ptr().cast())),
                _mm256_cvtph_ps(_mm_loadu_si128(x[16..].as_ptr().cast())),
            ]
        }
    }

    #[inline(always)]
    fn load_bf16(self, x: &[u8; 32]) -> Self::F {
        // SAFETY: 1, 2.
        let wide = unsafe {
            [
                _mm256_cvtepu16_epi32(_mm_loadu_si128(x.as_ptr().cast())),
                _mm256_cvtepu16_epi32(_mm_loadu_si128(x[16..].as_ptr().cast())),
            ]
        };
        both!(|wide| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide)))
    }

    #[inline(always)]
    fn load_i8(self, x: &[u8; 16]) -> Self::F {
        // SAFETY: 1, 2.
        let wide = unsafe {
            [
                _mm256_cvtepi8_epi32(_mm_loadl_epi64(x.as_ptr().cast())),
                _mm256_cvtepi8_epi32(_mm_loadl_epi64(x[8..].as_ptr().cast())),
            ]
        };
        self.i_to_f32(wide)
    }

    #[inline(always)]
    fn load_named(self, table: &[i8; 16], x: &[u8; 16]) -> [Self::F; 2] {
        // SAFETY: 1, 2.
        unsafe {
            let table = _mm_loadu_si128(table.as_ptr().cast());
            let x = _mm_loadu_si128(x.as_ptr().cast());
            // Each by itself, not as in `named`: callers may leave one out.
            each!([self.splat(0.0)[0]; 2], |i| {
                let nibbles = if i == 0 { x } else { _mm_srli_epi16::<4>(x) };
                let nibbles = _mm_and_si128(nibbles, _mm_set1_epi8(15));
                let bytes = _mm_shuffle_epi8(table, nibbles);
                self.i_to_f32([
                    _mm256_cvtepi8_epi32(bytes),
                    _mm256_cvtepi8_epi32(_mm_srli_si128::<8>(bytes)),
                ])
            })
        }
    }

    #[inline(always)]
    fn named(self, table: &[i8; 16], x: &[u8; 16]) -> [u8; 32] {
        let mut out = [0; 32];
        // SAFETY: 1, 2.
        unsafe { _mm256_storeu_si256(out.as_mut_ptr().cast(), named(table, x)) };
        out
    }

    #[inline(always)]
    fn load_f16_halves(self, x: [&[u8; 16]; 2]) -> Self::F {
        both!(|x| _mm256_cvtph_ps(_mm_loadu_si128(x.as_ptr().cast())))
    }

    #[inline(always)]
    fn load_twice(self, x: &[f32; 8]) -> Self::F {
        // SAFETY: 1, 2.
        unsafe { [_mm256_loadu_ps(x.as_ptr()); 2] }
    }

    #[inline(always)]
    fn splat_f16(self, x: u16) -> Self::F {
        // SAFETY: 1.
        unsafe { [_mm256_cvtph_ps(_mm_set1_epi16(x.cast_signed())); 2] }
    }

    #[inline(always)]
    fn store_f16(self, x: Self::F, out: &mut [u8; 32]) {
        let narrow = both!(|x| _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x));
        // SAFETY: 1, 2.
        unsafe {
            _mm_storeu_si128(out.as_mut_ptr().cast(), narrow[0]);
            _mm_storeu_si128(out[16..].as_mut_ptr().cast(), narrow[1]);
        }
    }

    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        both!(|a, b| _mm256_add_ps(a, b))
    }

    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        both!(|a, b| _mm256_sub_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        both!(|a, b| _mm256_mul_ps(a, b))
    }

    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        both!(|a, b| _mm256_div_ps(a, b))
    }

    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        both!(|a, b, c| _mm256_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn fused(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        self.fma(a, b, c)
    }

    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        both!(|a, b| _mm256_max_ps(a, b))
    }

    #[inline(always)]
    fn exp2_whole(self, x: Self::F) -> Self::F {
        both!(|x| {
            let exponent = _mm256_add_epi32(_mm256_cvtps_epi32(x), _mm256_set1_epi32(127));
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent))
        })
    }

    #[inline(always)]
    fn keep_first(self, x: Self::F, n: usize, fill: Self::F) -> Self::F {
        // SAFETY: 1.
        let index = unsafe {
            [
                _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
                _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15),
            ]
        };
        both!(|x, fill, index| {
            let mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(n as i32), index);
            _mm256_blendv_ps(fill, x, _mm256_castsi256_ps(mask))
        })
    }

    #[inline(always)]
    fn sum(self, x: Self::F) -> f32 {
        // SAFETY: 1.
        unsafe { sum(x) }
    }

    #[inline(always)]
    fn max_lane(self, x: Self::F) -> f32 {
        // SAFETY: 1.
        unsafe {
            let by8 = _mm256_max_ps(x[0], x[1]);
            let by4 = _mm_max_ps(_mm256_castps256_ps128(by8), _mm256_extractf128_ps::<1>(by8));
            let by2 = _mm_max_ps(by4, _mm_movehl_ps(by4, by4));
            _mm_cvtss_f32(_mm_max_ss(by2, _mm_movehdup_ps(by2)))
        }
    }

    #[inline(always)]
    fn sum_each(self, x: [Self::F; 16]) -> Self::F {
        // SAFETY: 1.
        let eights: [__m256; 16] = each!(x[0][0], |j| unsafe { _mm256_add_ps(x[j][0], x[j][1]) });
        let low = each!(eights[0], |j| eights[j]);
        let high = each!(eights[0], |j| eights[8 + j]);
        // SAFETY: 1.
        unsafe { [sum_eights(low), sum_eights(high)] }
    }

    #[inline(always)]
    fn sum_halves(self, x: [Self::F; 8]) -> Self::F {
        let low = each!(x[0][0], |j| x[j][0]);
        let high = each!(x[0][0], |j| x[j][1]);
        // SAFETY: 1.
        unsafe { [sum_eights(low), sum_eights(high)] }
    }

    #[inline(always)]
    fn transpose_halves(self, x: [Self::F; 8]) -> [Self::F; 8] {
        let low = each!(x[0][0], |r| x[r][0]);
        let high = each!(x[0][0], |r| x[r][1]);
        // SAFETY: 1.
        let (low, high) = unsafe { (transpose_eights(low), transpose_eights(high)) };
        each!(x[0], |c| [low[c], high[c]])
    }

    #[inline(always)]
    fn u_splat(self, x: u32) -> Self::U {
        // SAFETY: 1.
        unsafe { [_mm256_set1_epi32(x as i32); 2] }
    }

    #[inline(always)]
    fn u_load(self, x: &[u32; 16]) -> Self::U {
        // SAFETY: 1, 2.
        unsafe {
            [
                _mm256_loadu_si256(x.as_ptr().cast()),
                _mm256_loadu_si256(x[8..].as_ptr().cast()),
            ]
        }
    }

    #[inline(always)]
    fn u_store(self, x: Self::U, out: &mut [u32; 16]) {
        // SAFETY: 1, 2.
        unsafe {
            _mm256_storeu_si256(out.as_mut_ptr().cast(), x[0]);
            _mm256_storeu_si256(out[8..].as_mut_ptr().cast(), x[1]);
        }
    }

    #[inline(always)]
    fn u_and(self, a: Self::U, b: Self::U) -> Self::U {
        both!(|a, b| _mm256_and_si256(a, b))
    }

    #[inline(always)]
    fn u_or(self, a: Self::U, b: Self::U) -> Self::U {
        both!(|a, b| _mm256_or_si256(a, b))
    }

    #[inline(always)]
    fn u_xor(self, a: Self::U, b: Self::U) -> Self::U {
        both!(|a, b| _mm256_xor_si256(a, b))
    }

    #[inline(always)]
    fn u_mul(self, a: Self::U, b: Self::U) -> Self::U {
        both!(|a, b| _mm256_mullo_epi32(a, b))
    }

    #[inline(always)]
    fn u_shl(self, x: Self::U, bits: u32) -> Self::U {
        both!(|x| _mm256_sll_epi32(x, _mm_cvtsi32_si128(bits as i32)))
    }

    #[inline(always)]
    fn u_shr(self, x: Self::U, bits: u32) -> Self::U {
        both!(|x| _mm256_srl_epi32(x, _mm_cvtsi32_si128(bits as i32)))
    }

    #[inline(always)]
    fn i_shr(self, x: Self::U, bits: u32) -> Self::U {
        both!(|x| _mm256_sra_epi32(x, _mm_cvtsi32_si128(bits as i32)))
    }

    #[inline(always)]
    fn bits_to_f32(self, x: Self::U) -> Self::F {
        both!(|x| _mm256_castsi256_ps(x))
    }

    #[inline(always)]
    fn i_to_f32(self, x: Self::U) -> Self::F {
        both!(|x| _mm256_cvtepi32_ps(x))
    }

    #[inline(always)]
    fn f16_low(self, x: Self::U) -> Self::F {
        // SAFETY: 1.
        unsafe {
            let low = _mm256_set1_epi32(0xFFFF);
            let packed =
                _mm256_packus_epi32(_mm256_and_si256(x[0], low), _mm256_and_si256(x[1], low));
            let ordered = _mm256_permute4x64_epi64::<0xD8>(packed);
            [
                _mm256_cvtph_ps(_mm256_castsi256_si128(ordered)),
                _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(ordered)),
            ]
        }
    }

    #[inline(always)]
    fn f16_column(self, tile: &Tile<'_>, at: usize) -> Self::F {
        assert!(
            at + 2 <= tile.row_bytes(),
            "a column at {at} exceeds the row"
        );
        // SAFETY: 3.
        self.f16_each(each!(0, |r| unsafe {
            tile.ptr(r, at).cast::<u16>().read_unaligned()
        }))
    }

    #[inline(always)]
    fn gather(self, tile: &Tile<'_>, at: usize) -> Self::U {
        assert!(
            at + 4 <= tile.row_bytes(),
            "a gather at {at} exceeds the row"
        );
        // SAFETY: 3.
        self.u_load(&each!(0, |r| unsafe {
            tile.ptr(r, at).cast::<u32>().read_unaligned()
        }))
    }

    #[inline(always)]
    fn columns(self, tile: &Tile<'_>, at: usize) -> [Self::U; 4] {
        assert!(
            at + 16 <= tile.row_bytes(),
            "columns at {at} exceed the row"
        );
        // SAFETY: 1, 3.
        let (low, high) = unsafe { (columns(tile, 0, at), columns(tile, 8, at)) };
        each!([low[0]; 2], |group| [low[group], high[group]])
    }

    #[inline(always)]
    fn largest(self, x: [Self::F; 2]) -> f32 {
        // SAFETY: 1.
        unsafe { largest([x[0][0], x[0][1], x[1][0], x[1][1]]) }
    }

    #[inline(always)]
    fn to_bytes(self, x: [Self::F; 2]) -> ([u32; 8], [i32; 2]) {
        // SAFETY: 1.
        unsafe { to_bytes([x[0][0], x[0][1], x[1][0], x[1][1]]) }
    }

    #[inline(always)]
    fn exchange<const APART: usize>(self, x: Self::F) -> Self::F {
        match APART {
            1 => both!(|x| _mm256_permute_ps::<0b10_11_00_01>(x)),
            2 => both!(|x| _mm256_permute_ps::<0b01_00_11_10>(x)),
            4 => both!(|x| _mm256_permute2f128_ps::<1>(x, x)),
            _ => [x[1], x[0]],
        }
    }

    #[inline(always)]
    fn weights(self, bytes: Self::U, offset: i8) -> Self::U {
        let biased = offset.wrapping_add(B::BIAS);
        both!(|bytes| _mm256_add_epi8(bytes, _mm256_set1_epi8(biased)))
    }

    #[inline(always)]
    fn dot_start(self, bias: Self::U) -> Self::U {
        self.0.dot_start(bias)
    }

    #[inline(always)]
    fn widen(self, bytes: Self::U) -> [Self::U; 2] {
        // SAFETY: 1.
        let (first, second) = unsafe {
            (
                _mm256_set1_epi32(0x0180_0080_u32 as i32),
                _mm256_set1_epi32(0x0380_0280_u32 as i32),
            )
        };
        [
            both!(|bytes| widen(bytes, first)),
            both!(|bytes| widen(bytes, second)),
        ]
    }

    #[inline(always)]
    fn widen_all(self, bytes: &[u32; 8]) -> [u32; 16] {
        let mut wide = [0; 16];
        // SAFETY: 1, 2.
        let halves = unsafe {
            let bytes = _mm256_loadu_si256(bytes.as_ptr().cast());
            [
                _mm256_cvtepi8_epi16(_mm256_castsi256_si128(bytes)),
                _mm256_cvtepi8_epi16(_mm256_extracti128_si256::<1>(bytes)),
            ]
        };
        self.u_store(halves, &mut wide);
        wide
    }

    #[inline(always)]
    fn dot2(self, sum: Self::U, weights: Self::U, activations: u32) -> Self::U {
        // SAFETY: 1.
        let activations = unsafe { _mm256_set1_epi32(activations as i32) };
        both!(|sum, weights| {
            in_order(_mm256_add_epi32(
                sum,
                _mm256_madd_epi16(weights, activations),
            ))
        })
    }

    #[inline(always)]
    fn add_pairs(self, sums: Self::U, weights: Self::U, activations: u32) -> Self::U {
        // SAFETY: 1.
        let activations = unsafe { _mm256_set1_epi32(activations as i32) };
        both!(|sums, weights| {
            in_order(_mm256_add_epi16(
                sums,
                _mm256_maddubs_epi16(weights, activations),
            ))
        })
    }

    #[inline(always)]
    fn sum_pairs(self, sums: Self::U) -> Self::U {
        both!(|sums| _mm256_madd_epi16(sums, _mm256_set1_epi16(1)))
    }

    #[inline(always)]
    fn lookup(self, table: &[u8; 16], index: Self::U) -> Self::U {
        // SAFETY: 1, 2.
        let table = unsafe { _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast())) };
        both!(|index| _mm256_shuffle_epi8(table, index))
    }

    #[inline(always)]
    fn u_halves(self, x: [&[u8; 32]; 2]) -> Self::U {
        // SAFETY: 1, 2.
        unsafe {
            [
                _mm256_loadu_si256(x[0].as_ptr().cast()),
                _mm256_loadu_si256(x[1].as_ptr().cast()),
            ]
        }
    }

    #[inline(always)]
    fn u_add(self, a: Self::U, b: Self::U) -> Self::U {
        both!(|a, b| _mm256_add_epi32(a, b))
    }

    #[inline(always)]
    fn u_sub(self, a: Self::U, b: Self::U) -> Self::U {
        both!(|a, b| _mm256_sub_epi32(a, b))
    }

    #[inline(always)]
    fn widen_words(self, x: [&[u8; 16]; 2]) -> Self::U {
        both!(|x| _mm256_cvtepu16_epi32(_mm_loadu_si128(x.as_ptr().cast())))
    }

    #[inline(always)]
    fn f16_each(self, x: [u16; 16]) -> Self::F {
        let x: [i16; 16] = each!(0, |i| x[i] as i16);
        // SAFETY: 1.
        unsafe {
            let low = _mm_setr_epi16(x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]);
            let high = _mm_setr_epi16(x[8], x[9], x[10], x[11], x[12], x[13], x[14], x[15]);
            [_mm256_cvtph_ps(low), _mm256_cvtph_ps(high)]
        }
    }

    #[inline(always)]
    fn dot_unsigned(self, sum: Self::U, weights: Self::U, activations: Self::U) -> Self::U {
        both!(|sum, weights, activations| self.0.dot_unsigned(sum, weights, activations))
    }

    #[inline(always)]
    fn dot_rows<const T: usize>(
        self,
        tile: &Tile<'_>,
        at: usize,
        blocks: [&ActivationBlock<1>; T],
    ) -> [Self::U; T] {
        assert!(
            at + 32 <= tile.row_bytes(),
            "a block at {at} exceeds the row"
        );
        // SAFETY: 1, 3.
        unsafe { self.0.dot_rows(tile, at, &blocks) }
    }

    #[inline(always)]
    fn dot4(self, sum: Self::U, weights: Self::U, activations: Self::U) -> Self::U {
        both!(|sum, weights, activations| self.0.dot4(sum, weights, activations))
    }

    #[inline(always)]
    fn prefetch_line(self, address: *const u8) {
        // SAFETY: a prefetch reads nothing and cannot fault.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
    }

    #[inline(always)]
    fn prefetch_far(self, address: *const u8) {
        // SAFETY: a prefetch reads nothing and cannot fault.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(address.cast()) }
    }
}
