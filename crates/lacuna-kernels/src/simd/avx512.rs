//! AVX-512 with F, BW, DQ, VL and VNNI: one register per vector.
//!
//! Weights are kept as unsigned bytes, 128 too large, because `vpdpbusd` multiplies unsigned by
//! signed. An integer sum starts at the bits of `1.5 * 2^23` less 128 times the sum of the
//! activations, so that at the end its register, read as a float, is exactly `1.5 * 2^23 + dot`
//! (`|dot| <= 255 * 128 * 32 < 2^22`). One fused multiply-add then scales it: `scale` has at most
//! 19 significant bits, so `1.5 * 2^23 * scale` is exact and the result is `round(dot * scale)`.
//!
//! # Safety
//! 1. An [`Avx512Vnni`] exists only if the CPU has all instructions enabled here: `detect` is its
//!    only maker. So calling them is sound.
//! 2. Loads and stores go through references to arrays of the size of the access, unaligned.
//! 3. Reads of a [`Tile`] are within its rows (the bounds are asserted once for all rows), and
//!    every row lies within the tile's bytes.
//! 4. A [`Bf16Products`] exists only if the CPU has AVX-512 BF16. Its instructions are written out, because functions of
//!    this level are not compiled for them; they read and write nothing but registers.
#![expect(unsafe_code, reason = "intrinsics; see # Safety")]

use std::arch::asm;
use std::arch::x86_64::*;
use std::hint::black_box;

use super::amx::Amx;
use super::avx2::{Avx2, bytes_and_sums, named};
use super::{Bf16Products, Kernel, LANES, Products, Registers, Simd, SingleToken};
use crate::activations::ActivationBlock;
use crate::tile::Tile;

/// Proof that the CPU has AVX-512 F, BW, DQ, VL and VNNI, beside AVX2, and that of AMX where the level has it.
#[derive(Clone, Copy)]
pub(crate) struct Avx512Vnni(Avx2, Option<Amx>);

const MAGIC: f32 = 12_582_912.0;

impl Avx512Vnni {
    /// The level, if this CPU has it.
    pub(crate) fn detect() -> Option<Self> {
        let all = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni");
        let avx2 = Avx2::detect().filter(|_| all)?;
        Some(Self(avx2, None))
    }

    /// The level with AMX, if this CPU has it.
    pub(crate) fn detect_amx() -> Option<Self> {
        let Self(avx2, _) = Self::detect()?;
        Some(Self(avx2, Some(Amx::detect()?)))
    }

    /// Proof that the CPU permutes bytes, too.
    pub(crate) fn permutes_bytes(self) -> Option<Avx512Vbmi> {
        let all = is_x86_feature_detected!("avx512vbmi") && is_x86_feature_detected!("gfni");
        all.then_some(Avx512Vbmi(()))
    }
}

/// Proof that the CPU has AVX-512 VBMI and GFNI beside [`Avx512Vnni`], as all have since Ice Lake and Zen 4: no
/// level, because few kernels use them.
#[derive(Clone, Copy)]
pub(crate) struct Avx512Vbmi(());

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
#[inline(never)]
fn enter<K: Kernel>(simd: Avx512Vnni, kernel: K) -> K::Output {
    kernel.run(simd)
}

/// See [`Simd::round_pairs`].
///
/// # Safety
/// The CPU has AVX-512 BF16.
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn round_pairs([first, second]: [__m512; 2]) -> __m512 {
    let pairs;
    // SAFETY: 4, by the caller's promise.
    unsafe {
        asm!(
            "vcvtne2ps2bf16 {}, {}, {}",
            lateout(zmm_reg) pairs, in(zmm_reg) second, in(zmm_reg) first,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    pairs
}

/// See [`Simd::multiply_pairs`].
///
/// # Safety
/// The CPU has AVX-512 BF16.
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn multiply_pairs(a: __m512, b: __m512, sum: __m512) -> __m512 {
    let mut sum = sum;
    // SAFETY: 4, by the caller's promise.
    unsafe {
        asm!(
            "vdpbf16ps {}, {}, {}",
            inout(zmm_reg) sum, in(zmm_reg) a, in(zmm_reg) b,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sum
}

/// Transposes four groups of rows, each four dwords in each 128-bit lane.
#[target_feature(enable = "avx512f")]
#[inline]
fn transpose4(z: [__m512i; 4]) -> [__m512i; 4] {
    let low01 = _mm512_unpacklo_epi32(z[0], z[1]);
    let high01 = _mm512_unpackhi_epi32(z[0], z[1]);
    let low23 = _mm512_unpacklo_epi32(z[2], z[3]);
    let high23 = _mm512_unpackhi_epi32(z[2], z[3]);
    [
        _mm512_unpacklo_epi64(low01, low23),
        _mm512_unpackhi_epi64(low01, low23),
        _mm512_unpacklo_epi64(high01, high23),
        _mm512_unpackhi_epi64(high01, high23),
    ]
}

/// Adds two vectors lane-wise folded in half: the result holds the halves' sums of `a`, then `b`.
#[target_feature(enable = "avx512f")]
#[inline]
fn fold_halves(a: __m512, b: __m512) -> __m512 {
    _mm512_add_ps(
        _mm512_shuffle_f32x4::<0x44>(a, b),
        _mm512_shuffle_f32x4::<0xEE>(a, b),
    )
}

#[target_feature(enable = "avx512f")]
#[inline]
fn fold_quarters(a: __m512, b: __m512) -> __m512 {
    _mm512_add_ps(
        _mm512_shuffle_f32x4::<0x88>(a, b),
        _mm512_shuffle_f32x4::<0xDD>(a, b),
    )
}

#[target_feature(enable = "avx512f")]
#[inline]
fn fold_within(a: __m512, b: __m512) -> __m512 {
    _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b))
}

/// See [`Simd::sum_each`]; the order of each sum is that of [`Simd::sum`].
#[target_feature(enable = "avx512f")]
#[inline]
fn sum_each(x: [__m512; 16]) -> __m512 {
    let halves = |j: usize| fold_halves(x[j], x[j + 4]);
    let quarters = |j: usize| fold_quarters(halves(j), halves(j + 8));
    let pairs = |j: usize| fold_within(quarters(j), quarters(j + 2));
    fold_within(pairs(0), pairs(1))
}

/// See [`Simd::sum_halves`].
#[target_feature(enable = "avx512f")]
#[inline]
fn sum_halves(x: [__m512; 8]) -> __m512 {
    let quarters = |j: usize| fold_quarters(x[j], x[j + 4]);
    let pairs = |j: usize| fold_within(quarters(j), quarters(j + 2));
    let sums = fold_within(pairs(0), pairs(1));
    _mm512_shuffle_f32x4::<0xD8>(sums, sums)
}

#[target_feature(enable = "avx512f,avx512dq,avx512vl")]
#[inline]
fn sum(x: __m512) -> f32 {
    let by8 = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps::<1>(x));
    let by4 = _mm_add_ps(_mm256_castps256_ps128(by8), _mm256_extractf128_ps::<1>(by8));
    let by2 = _mm_add_ps(by4, _mm_movehl_ps(by4, by4));
    _mm_cvtss_f32(_mm_add_ss(by2, _mm_movehdup_ps(by2)))
}

/// See [`Simd::largest`].
#[target_feature(enable = "avx512f,avx512dq")]
#[inline]
fn largest(x: [__m512; 2]) -> f32 {
    let magnitude = |x| _mm512_castps_si512(_mm512_abs_ps(x));
    let both = _mm512_max_epi32(magnitude(x[0]), magnitude(x[1]));
    f32::from_bits(_mm512_reduce_max_epi32(both).cast_unsigned())
}

/// See [`Simd::to_bytes`].
#[target_feature(enable = "avx512f,avx512vl,avx512vnni")]
#[inline]
fn to_bytes(x: [__m512; 2]) -> ([u32; 8], [i32; 2]) {
    let half = |x| _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x));
    let bytes = _mm256_set_m128i(half(x[1]), half(x[0]));
    let quads = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), bytes);
    bytes_and_sums(bytes, quads)
}

/// Byte `at` of every fourth row. The compiler does not see where the pointers come from: it would keep
/// the distances of sixteen rows from the first, which are more than there are registers, and compute
/// them again and again.
///
/// # Safety
/// `at` lies within the rows.
#[expect(
    clippy::pointers_in_nomem_asm_block,
    reason = "nothing is read or written through them"
)]
#[inline(always)]
unsafe fn quarters(tile: &Tile<'_>, at: usize) -> [*const u8; 4] {
    each!(std::ptr::null(), |r| {
        // SAFETY: by the caller's promise.
        let mut row = unsafe { tile.ptr(4 * r, at) };
        // SAFETY: there are no instructions; the operand stays as it is.
        unsafe {
            asm!("/* {} */", inout(reg) row, options(pure, nomem, nostack, preserves_flags));
        }
        row
    })
}

/// Eight masks of bytes, on a line.
#[repr(align(64))]
struct Masks([__mmask64; 8]);

/// Mask `g` has the bits `4 * g ..` of each of sixteen lanes, one lane after the other.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn masks_of_nibbles(lanes: __m512i) -> Masks {
    // Of four lanes byte 0 of each, then byte 1 of each, and so on; and then of all.
    let order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    let bytes = _mm512_shuffle_epi8(lanes, _mm512_broadcast_i32x4(order));
    let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    let bytes = _mm512_permutexvar_epi32(order, bytes);
    // Nibbles of two lanes side by side in a byte, in the lower half of 16 bits.
    let nibble = _mm512_set1_epi8(15);
    let pairs = |bytes| {
        let nibbles = _mm512_and_si512(bytes, nibble);
        _mm512_maddubs_epi16(nibbles, _mm512_set1_epi16(0x1001))
    };
    let [even, odd] = [pairs(bytes), pairs(_mm512_srli_epi16::<4>(bytes))];
    let mut masks = Masks([0; 8]);
    // SAFETY: 2.
    unsafe { _mm512_storeu_si512(masks.0.as_mut_ptr().cast(), _mm512_packus_epi16(even, odd)) };
    masks
}

/// Sixteen bytes of the `j`-th rows behind those that [`quarters`] points to, `stride` bytes apart.
///
/// # Safety
/// They can be read.
#[target_feature(enable = "avx512f")]
#[inline]
unsafe fn load_rows(quarters: [*const u8; 4], j: usize, stride: usize) -> __m512i {
    // SAFETY: by the caller's promise.
    unsafe {
        let row = |r: usize| _mm_loadu_si128(quarters[r].add(j * stride).cast());
        // Halves first: to insert rows one by one takes longer.
        let low = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(row(0)), row(1));
        let high = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(row(2)), row(3));
        _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high)
    }
}

/// See [`Simd::transpose`].
#[target_feature(enable = "avx512f")]
#[inline]
fn transpose(x: [__m512; 16]) -> [__m512; 16] {
    let zero = _mm512_setzero_si512();
    let rows: [_; 16] = each!(zero, |r| _mm512_castps_si512(x[r]));
    let quarters = |i: usize| transpose4([rows[i], rows[i + 1], rows[i + 2], rows[i + 3]]);
    let quarters = [quarters(0), quarters(4), quarters(8), quarters(12)];
    // Columns `k`, `k + 4`, `k + 8` and `k + 12`. All of it is written out: a loop that the compiler
    // leaves rolled would keep the rows in memory.
    let columns = |k: usize| {
        let q: [_; 4] = each!(x[0], |i| _mm512_castsi512_ps(quarters[i][k]));
        let even = |a, b| _mm512_shuffle_f32x4::<0x88>(a, b);
        let odd = |a, b| _mm512_shuffle_f32x4::<0xDD>(a, b);
        let (first, second) = (even(q[0], q[1]), odd(q[0], q[1]));
        let (third, fourth) = (even(q[2], q[3]), odd(q[2], q[3]));
        [
            even(first, third),
            even(second, fourth),
            odd(first, third),
            odd(second, fourth),
        ]
    };
    let [a, b, c, d] = [columns(0), columns(1), columns(2), columns(3)];
    [
        a[0], b[0], c[0], d[0], a[1], b[1], c[1], d[1], a[2], b[2], c[2], d[2], a[3], b[3], c[3],
        d[3],
    ]
}

impl Simd for Avx512Vnni {
    type F = __m512;
    type U = __m512i;

    const REGISTERS: Registers = Registers::Many;
    const TOKENS: usize = 6;
    const TILES: usize = 2;
    const PRODUCTS: Products = Products::Quads;
    const SINGLE_TOKEN: SingleToken = SingleToken::Eight;
    const START: i32 = MAGIC.to_bits() as i32;
    const MAY_HAVE_AMX: bool = true;

    #[inline(always)]
    fn avx2(self) -> Option<Avx2> {
        Some(self.0)
    }

    #[inline(always)]
    fn avx512(self) -> Option<Self> {
        Some(self)
    }

    #[inline(always)]
    fn amx(self) -> Option<Amx> {
        self.1
    }

    #[inline]
    fn vectorize<K: Kernel>(self, kernel: K) -> K::Output {
        // SAFETY: 1.
        unsafe { enter(self, kernel) }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        // SAFETY: 1.
        unsafe { _mm512_set1_ps(x) }
    }

    #[inline(always)]
    fn load(self, x: &[f32; 16]) -> __m512 {
        // SAFETY: 1, 2.
        unsafe { _mm512_loadu_ps(x.as_ptr()) }
    }

    #[inline(always)]
    fn store(self, x: __m512, out: &mut [f32; 16]) {
        // SAFETY: 1, 2.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), x) }
    }

    #[inline(always)]
    fn load_f32_bytes(self, x: &[u8; 64]) -> __m512 {
        // SAFETY: 1, 2.
        unsafe { _mm512_loadu_ps(x.as_ptr().cast()) }
    }

    #[inline(always)]
    fn load_f16(self, x: &[u8; 32]) -> __m512 {
        // SAFETY: 1, 2.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(x.as_ptr().cast())) }
    }

    #[inline(always)]
    fn load_bf16(self, x: &[u8; 32]) -> __m512 {
        // SAFETY: 1, 2.
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(x.as_ptr().cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }

    #[inline(always)]
    fn load_i8(self, x: &[u8; 16]) -> __m512 {
        // SAFETY: 1, 2.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(x.as_ptr().cast()))) }
    }

    #[inline(always)]
    fn load_named(self, table: &[i8; 16], x: &[u8; 16]) -> [__m512; 2] {
        // SAFETY: 1, 2. The permutation looks at the low nibbles of its indices only.
        unsafe {
            let table = _mm_loadu_si128(table.as_ptr().cast());
            let table = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(table));
            let low = _mm512_cvtepu8_epi32(_mm_loadu_si128(x.as_ptr().cast()));
            let high = _mm512_srli_epi32::<4>(low);
            [low, high].map(|index| _mm512_permutexvar_ps(index, table))
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
    fn load_f16_halves(self, x: [&[u8; 16]; 2]) -> __m512 {
        // SAFETY: 1, 2.
        unsafe {
            let half = |i: usize| _mm_loadu_si128(x[i].as_ptr().cast());
            _mm512_cvtph_ps(_mm256_set_m128i(half(1), half(0)))
        }
    }

    #[inline(always)]
    fn load_twice(self, x: &[f32; 8]) -> __m512 {
        // SAFETY: 1, 2.
        unsafe { _mm512_broadcast_f32x8(_mm256_loadu_ps(x.as_ptr())) }
    }

    #[inline(always)]
    fn splat_f16(self, x: u16) -> __m512 {
        // SAFETY: 1.
        unsafe { _mm512_cvtph_ps(_mm256_set1_epi16(x.cast_signed())) }
    }

    #[inline(always)]
    fn store_f16(self, x: __m512, out: &mut [u8; 32]) {
        // SAFETY: 1, 2.
        unsafe {
            let narrow = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x);
            _mm256_storeu_si256(out.as_mut_ptr().cast(), narrow);
        }
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: 1.
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: 1.
        unsafe { _mm512_sub_ps(a, b) }
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: 1.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: 1.
        unsafe { _mm512_div_ps(a, b) }
    }

    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: 1.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn fused(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        self.fma(a, b, c)
    }

    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: 1.
        unsafe { _mm512_max_ps(a, b) }
    }

    #[inline(always)]
    fn exp2_whole(self, x: __m512) -> __m512 {
        // SAFETY: 1.
        unsafe {
            let exponent = _mm512_add_epi32(_mm512_cvtps_epi32(x), _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(exponent))
        }
    }

    #[inline(always)]
    fn keep_first(self, x: __m512, n: usize, fill: __m512) -> __m512 {
        let mask = if n >= LANES { u16::MAX } else { (1 << n) - 1 };
        // SAFETY: 1.
        unsafe { _mm512_mask_mov_ps(fill, mask, x) }
    }

    #[inline(always)]
    fn sum(self, x: __m512) -> f32 {
        // SAFETY: 1.
        unsafe { sum(x) }
    }

    #[inline(always)]
    fn max_lane(self, x: __m512) -> f32 {
        // SAFETY: 1.
        unsafe { _mm512_reduce_max_ps(x) }
    }

    #[inline(always)]
    fn sum_each(self, x: [__m512; 16]) -> __m512 {
        // SAFETY: 1.
        unsafe { sum_each(x) }
    }

    #[inline(always)]
    fn sum_halves(self, x: [__m512; 8]) -> __m512 {
        // SAFETY: 1.
        unsafe { sum_halves(x) }
    }

    #[inline(always)]
    fn transpose(self, x: [__m512; 16]) -> [__m512; 16] {
        // SAFETY: 1.
        unsafe { transpose(x) }
    }

    #[inline(always)]
    fn u_splat(self, x: u32) -> __m512i {
        // SAFETY: 1.
        unsafe { _mm512_set1_epi32(x as i32) }
    }

    #[inline(always)]
    fn u_load(self, x: &[u32; 16]) -> __m512i {
        // SAFETY: 1, 2.
        unsafe { _mm512_loadu_si512(x.as_ptr().cast()) }
    }

    #[inline(always)]
    fn u_store(self, x: __m512i, out: &mut [u32; 16]) {
        // SAFETY: 1, 2.
        unsafe { _mm512_storeu_si512(out.as_mut_ptr().cast(), x) }
    }

    #[inline(always)]
    fn u_and(self, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: 1.
        unsafe { _mm512_and_si512(a, b) }
    }

    #[inline(always)]
    fn u_or(self, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: 1.
        unsafe { _mm512_or_si512(a, b) }
    }

    #[inline(always)]
    fn u_xor(self, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: 1.
        unsafe { _mm512_xor_si512(a, b) }
    }

    #[inline(always)]
    fn u_mul(self, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: 1.
        unsafe { _mm512_mullo_epi32(a, b) }
    }

    #[inline(always)]
    fn u_shl(self, x: __m512i, bits: u32) -> __m512i {
        // SAFETY: 1.
        unsafe { _mm512_sll_epi32(x, _mm_cvtsi32_si128(bits as i32)) }
    }

    #[inline(always)]
    fn u_shr(self, x: __m512i, bits: u32) -> __m512i {
        // SAFETY: 1.
        unsafe { _mm512_srl_epi32(x, _mm_cvtsi32_si128(bits as i32)) }
    }

    #[inline(always)]
    fn i_shr(self, x: __m512i, bits: u32) -> __m512i {
        // SAFETY: 1.
        unsafe { _mm512_sra_epi32(x, _mm_cvtsi32_si128(bits as i32)) }
    }

    #[inline(always)]
    fn with_signs(self, magnitudes: [__m512i; 8], bits: __m512i) -> [__m512i; 8] {
        // SAFETY: 1.
        unsafe {
            let masks = masks_of_nibbles(bits);
            // In memory, from where masks are loaded: the compiler would take them out of the register through numbers.
            let masks = black_box(&masks);
            let offsets = _mm512_set1_epi8(64);
            each!(bits, |g| {
                let positive = _mm512_add_epi8(offsets, magnitudes[g]);
                _mm512_mask_sub_epi8(positive, masks.0[g], offsets, magnitudes[g])
            })
        }
    }

    #[inline(always)]
    fn bits_to_f32(self, x: __m512i) -> __m512 {
        // SAFETY: 1.
        unsafe { _mm512_castsi512_ps(x) }
    }

    #[inline(always)]
    fn to_bits(self, x: __m512) -> __m512i {
        // SAFETY: 1.
        unsafe { _mm512_castps_si512(x) }
    }

    #[inline(always)]
    fn i_to_f32(self, x: __m512i) -> __m512 {
        // SAFETY: 1.
        unsafe { _mm512_cvtepi32_ps(x) }
    }

    #[inline(always)]
    fn f16_low(self, x: __m512i) -> __m512 {
        // SAFETY: 1.
        unsafe { _mm512_cvtph_ps(_mm512_cvtepi32_epi16(x)) }
    }

    #[inline(always)]
    fn f16_column(self, tile: &Tile<'_>, at: usize) -> __m512 {
        assert!(
            at + 2 <= tile.row_bytes(),
            "a column at {at} exceeds the row"
        );
        // SAFETY: 3.
        unsafe {
            let (quarters, stride) = (quarters(tile, at), tile.stride());
            self.f16_each(each!(0, |r| {
                let row = quarters[r / 4].add(r % 4 * stride);
                row.cast::<u16>().read_unaligned()
            }))
        }
    }

    #[inline(always)]
    fn gather(self, tile: &Tile<'_>, at: usize) -> __m512i {
        assert!(
            at + 4 <= tile.row_bytes(),
            "a gather at {at} exceeds the row"
        );
        // SAFETY: 3.
        let x: [i32; LANES] = unsafe {
            let (quarters, stride) = (quarters(tile, at), tile.stride());
            each!(0, |r| {
                let row = quarters[r / 4].add(r % 4 * stride);
                row.cast::<i32>().read_unaligned()
            })
        };
        // SAFETY: 1. Lanes are inserted one by one: a gather is slower.
        unsafe {
            let z = _mm512_castsi128_si512(_mm_setr_epi32(x[0], x[1], x[2], x[3]));
            let z = _mm512_inserti32x4::<1>(z, _mm_setr_epi32(x[4], x[5], x[6], x[7]));
            let z = _mm512_inserti32x4::<2>(z, _mm_setr_epi32(x[8], x[9], x[10], x[11]));
            _mm512_inserti32x4::<3>(z, _mm_setr_epi32(x[12], x[13], x[14], x[15]))
        }
    }

    #[inline(always)]
    fn columns(self, tile: &Tile<'_>, at: usize) -> [__m512i; 4] {
        assert!(
            at + 16 <= tile.row_bytes(),
            "columns at {at} exceed the row"
        );
        // SAFETY: 1, 3.
        unsafe {
            let (quarters, stride) = (quarters(tile, at), tile.stride());
            transpose4([
                load_rows(quarters, 0, stride),
                load_rows(quarters, 1, stride),
                load_rows(quarters, 2, stride),
                load_rows(quarters, 3, stride),
            ])
        }
    }

    #[inline(always)]
    fn largest(self, x: [__m512; 2]) -> f32 {
        // SAFETY: 1.
        unsafe { largest(x) }
    }

    #[inline(always)]
    fn to_bytes(self, x: [__m512; 2]) -> ([u32; 8], [i32; 2]) {
        // SAFETY: 1.
        unsafe { to_bytes(x) }
    }

    #[inline(always)]
    fn weights(self, bytes: __m512i, offset: i8) -> __m512i {
        let biased = offset.wrapping_add(-128);
        // SAFETY: 1.
        unsafe { _mm512_add_epi8(bytes, _mm512_set1_epi8(biased)) }
    }

    #[inline(always)]
    fn exchange<const APART: usize>(self, x: __m512) -> __m512 {
        // SAFETY: 1.
        unsafe {
            match APART {
                1 => _mm512_permute_ps::<0b10_11_00_01>(x),
                2 => _mm512_permute_ps::<0b01_00_11_10>(x),
                4 => _mm512_shuffle_f32x4::<0b10_11_00_01>(x, x),
                _ => _mm512_shuffle_f32x4::<0b01_00_11_10>(x, x),
            }
        }
    }

    #[inline(always)]
    fn dot_start(self, bias: __m512i) -> __m512i {
        bias
    }

    #[inline(always)]
    fn lookup(self, table: &[u8; 16], index: __m512i) -> __m512i {
        // SAFETY: 1, 2.
        unsafe {
            let table = _mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast()));
            _mm512_shuffle_epi8(table, index)
        }
    }

    #[inline(always)]
    fn round_pairs(self, _: Bf16Products, x: [__m512; 2]) -> __m512 {
        // SAFETY: 1, 4.
        unsafe { round_pairs(x) }
    }

    #[inline(always)]
    fn round_rows(self, _: Bf16Products, x: [__m512; 2]) -> __m512 {
        /// Word `i` of the lower half beside word `i` of the upper half.
        const BESIDE: [u16; 32] = {
            let mut words = [0; 32];
            let mut i = 0;
            while i < 32 {
                words[i] = (i / 2 + 16 * (i % 2)) as u16;
                i += 1;
            }
            words
        };
        // SAFETY: 1, 2, 4.
        unsafe {
            let halves = _mm512_castps_si512(round_pairs(x));
            let beside = _mm512_loadu_si512(BESIDE.as_ptr().cast());
            _mm512_castsi512_ps(_mm512_permutexvar_epi16(beside, halves))
        }
    }

    #[inline(always)]
    fn rows_of_pairs(self, _: Bf16Products, rows: [__m512; 2]) -> [__m512; 2] {
        /// Word `i` of one beside word `i` of the other: those of the lower halves, and of the upper.
        const BESIDE: [[u16; 32]; 2] = {
            let mut words = [[0; 32]; 2];
            let mut i = 0;
            while i < 64 {
                words[i / 32][i % 32] = (i / 2 + 32 * (i % 2)) as u16;
                i += 1;
            }
            words
        };
        let [first, second] = rows.map(|row| self.to_bits(row));
        // SAFETY: 1, 2.
        BESIDE.map(|beside| unsafe {
            let beside = _mm512_loadu_si512(beside.as_ptr().cast());
            _mm512_castsi512_ps(_mm512_permutex2var_epi16(first, beside, second))
        })
    }

    #[inline(always)]
    fn multiply_pairs(self, _: Bf16Products, a: __m512, b: __m512, sum: __m512) -> __m512 {
        // SAFETY: 1, 4.
        unsafe { multiply_pairs(a, b, sum) }
    }

    #[inline(always)]
    fn u_halves(self, x: [&[u8; 32]; 2]) -> __m512i {
        // SAFETY: 1, 2.
        unsafe {
            let low = _mm512_castsi256_si512(_mm256_loadu_si256(x[0].as_ptr().cast()));
            _mm512_inserti64x4::<1>(low, _mm256_loadu_si256(x[1].as_ptr().cast()))
        }
    }

    #[inline(always)]
    fn u_add(self, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: 1.
        unsafe { _mm512_add_epi32(a, b) }
    }

    #[inline(always)]
    fn u_sub(self, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: 1.
        unsafe { _mm512_sub_epi32(a, b) }
    }

    #[inline(always)]
    fn widen_words(self, x: [&[u8; 16]; 2]) -> __m512i {
        // SAFETY: 1, 2.
        unsafe {
            let half = |i: usize| _mm_loadu_si128(x[i].as_ptr().cast());
            _mm512_cvtepu16_epi32(_mm256_set_m128i(half(1), half(0)))
        }
    }

    #[inline(always)]
    fn f16_each(self, x: [u16; 16]) -> __m512 {
        let x: [i16; 16] = each!(0, |i| x[i] as i16);
        // SAFETY: 1. Lanes are inserted one by one: a gather is slower.
        unsafe {
            let low = _mm_setr_epi16(x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]);
            let high = _mm_setr_epi16(x[8], x[9], x[10], x[11], x[12], x[13], x[14], x[15]);
            _mm512_cvtph_ps(_mm256_set_m128i(high, low))
        }
    }

    #[inline(always)]
    fn dot_unsigned(self, sum: __m512i, weights: __m512i, activations: __m512i) -> __m512i {
        // SAFETY: 1.
        unsafe { _mm512_dpbusd_epi32(sum, weights, activations) }
    }

    #[inline(always)]
    fn dot_rows<const T: usize>(
        self,
        tile: &Tile<'_>,
        at: usize,
        blocks: [&ActivationBlock<1>; T],
    ) -> [__m512i; T] {
        // A function with the instructions would be called, and what is in registers stored, where two kernels do.
        let mut sums = each!(self.u_splat(0), |t| self.u_splat(blocks[t].start[0] as u32));
        for half in 0..2 {
            let words = self.columns(tile, at + 16 * half);
            for g in 0..4 {
                let word = self.u_xor(words[g], self.u_splat(0x8080_8080));
                for t in 0..T {
                    let values = self.u_splat(blocks[t].q[0][4 * half + g]);
                    // SAFETY: 1.
                    sums[t] = unsafe { _mm512_dpbusd_epi32(sums[t], word, values) };
                }
            }
        }
        sums
    }

    #[inline(always)]
    fn dot_end(self, sum: __m512i, scale: __m512, activation_scale: __m512, acc: __m512) -> __m512 {
        // SAFETY: 1.
        unsafe {
            let shift = _mm512_mul_ps(scale, _mm512_set1_ps(-MAGIC));
            let scaled = _mm512_fmadd_ps(_mm512_castsi512_ps(sum), scale, shift);
            _mm512_fmadd_ps(scaled, activation_scale, acc)
        }
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
