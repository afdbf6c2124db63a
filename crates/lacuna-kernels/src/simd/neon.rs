//! NEON: four registers per vector, lanes 0 to 3, 4 to 7, 8 to 11 and 12 to 15.
//!
//! What bytes are multiplied with is a type of its own, [`Bytes`]: the instructions that came later are
//! not in the compiler's library yet, and are written as assembly.
//!
//! # Safety
//! 1. Every 64-bit ARM that this is compiled for has NEON. A [`Dotprod`], or an [`I8mm`], exists only if
//!    the CPU has its instructions too: `detect` is its only maker. So executing them is sound.
//! 2. Loads and stores go through references to arrays that are at least as long.
//! 3. Reads of a [`Tile`] are within its rows (the bounds are asserted once for all rows), and
//!    every row lies within the tile's bytes.
#![expect(unsafe_code, reason = "loads, stores and assembly; see # Safety")]

use std::arch::aarch64::*;
use std::arch::{asm, is_aarch64_feature_detected};

use super::{Kernel, Products, Registers, Simd, SingleToken};
use crate::activations::{ActivationBlock, BLOCK};
use crate::tile::Tile;

/// Registers of a vector.
const PARTS: usize = 4;

/// NEON, and the proof of what it multiplies bytes with.
#[derive(Clone, Copy)]
pub(crate) struct Neon<B>(B);

impl<B: Bytes> Neon<B> {
    /// The level, if this CPU has it.
    pub(crate) fn detect() -> Option<Self> {
        B::detect().map(Self)
    }

    /// [`Bytes::dot`] of words.
    #[inline(always)]
    fn dot_words(self, sum: uint32x4_t, a: uint32x4_t, b: uint32x4_t) -> uint32x4_t {
        // SAFETY: 1.
        unsafe {
            let (a, b) = (vreinterpretq_s8_u32(a), vreinterpretq_s8_u32(b));
            vreinterpretq_u32_s32(self.0.dot(vreinterpretq_s32_u32(sum), a, b))
        }
    }
}

/// Products of signed bytes; a value is the proof that the CPU has the instructions.
pub(crate) trait Bytes: Copy + Send + Sync + 'static {
    /// How packed panels are multiplied.
    const PRODUCTS: Products;

    /// The proof, if this CPU has them.
    fn detect() -> Option<Self>;

    /// Runs `kernel` compiled for these instructions.
    fn enter<K: Kernel>(simd: Neon<Self>, kernel: K) -> K::Output;

    /// Adds to each lane the products of four bytes and four others, which are not -128.
    fn dot(self, sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t;

    /// Adds the products of both halves of `a`, eight bytes, with both of `b`.
    #[inline(always)]
    fn square(self, sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
        // SAFETY: 1.
        unsafe {
            let (zero, halves) = (vdupq_n_s32(0), vreinterpretq_s64_s8(a));
            let first = vreinterpretq_s8_s64(vtrn1q_s64(halves, halves));
            let second = vreinterpretq_s8_s64(vtrn2q_s64(halves, halves));
            let products = vpaddq_s32(self.dot(zero, first, b), self.dot(zero, second, b));
            vaddq_s32(sum, products)
        }
    }
}

/// What every 64-bit ARM has: products of 16 bits.
#[derive(Clone, Copy)]
pub(crate) struct Widening;

impl Bytes for Widening {
    const PRODUCTS: Products = Products::Quads;

    fn detect() -> Option<Self> {
        // Words are read from memory as they are.
        cfg!(target_endian = "little").then_some(Self)
    }

    #[inline(never)]
    fn enter<K: Kernel>(simd: Neon<Self>, kernel: K) -> K::Output {
        kernel.run(simd)
    }

    #[inline(always)]
    fn dot(self, sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
        // Two products fit 16 bits: `128 * 127 * 2 < 2^15`.
        // SAFETY: 1.
        unsafe {
            let low = vmull_s8(vget_low_s8(a), vget_low_s8(b));
            let pairs = vpaddq_s16(low, vmull_high_s8(a, b));
            vpadalq_s16(sum, pairs)
        }
    }
}

/// Proof that the CPU has dot products of bytes.
#[derive(Clone, Copy)]
pub(crate) struct Dotprod(());

#[target_feature(enable = "dotprod")]
#[inline(never)]
fn enter_dotprod<K: Kernel>(simd: Neon<Dotprod>, kernel: K) -> K::Output {
    kernel.run(simd)
}

#[target_feature(enable = "dotprod")]
#[inline]
fn sdot(sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    let mut sum = sum;
    // SAFETY: 1; it reads and writes these registers only.
    unsafe {
        asm!(
            "sdot {sum:v}.4s, {a:v}.16b, {b:v}.16b",
            sum = inout(vreg) sum,
            a = in(vreg) a,
            b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sum
}

impl Bytes for Dotprod {
    const PRODUCTS: Products = Products::Quads;

    fn detect() -> Option<Self> {
        Widening::detect().filter(|_| is_aarch64_feature_detected!("dotprod"))?;
        Some(Self(()))
    }

    #[inline]
    fn enter<K: Kernel>(simd: Neon<Self>, kernel: K) -> K::Output {
        // SAFETY: 1.
        unsafe { enter_dotprod(simd, kernel) }
    }

    #[inline(always)]
    fn dot(self, sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
        // SAFETY: 1.
        unsafe { sdot(sum, a, b) }
    }
}

/// Proof that the CPU has products of small matrices of bytes, beside dot products.
#[derive(Clone, Copy)]
pub(crate) struct I8mm(Dotprod);

#[target_feature(enable = "dotprod,i8mm")]
#[inline(never)]
fn enter_i8mm<K: Kernel>(simd: Neon<I8mm>, kernel: K) -> K::Output {
    kernel.run(simd)
}

#[target_feature(enable = "i8mm")]
#[inline]
fn smmla(sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    let mut sum = sum;
    // SAFETY: 1; it reads and writes these registers only.
    unsafe {
        asm!(
            "smmla {sum:v}.4s, {a:v}.16b, {b:v}.16b",
            sum = inout(vreg) sum,
            a = in(vreg) a,
            b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sum
}

impl Bytes for I8mm {
    const PRODUCTS: Products = Products::Squares;

    fn detect() -> Option<Self> {
        Dotprod::detect()
            .filter(|_| is_aarch64_feature_detected!("i8mm"))
            .map(Self)
    }

    #[inline]
    fn enter<K: Kernel>(simd: Neon<Self>, kernel: K) -> K::Output {
        // SAFETY: 1.
        unsafe { enter_i8mm(simd, kernel) }
    }

    #[inline(always)]
    fn dot(self, sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
        self.0.dot(sum, a, b)
    }

    #[inline(always)]
    fn square(self, sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
        // SAFETY: 1.
        unsafe { smmla(sum, a, b) }
    }
}

/// Four floats from `at` on.
#[target_feature(enable = "neon")]
#[inline]
fn floats<const N: usize>(x: &[f32; N], at: usize) -> float32x4_t {
    let x: &[f32; 4] = x[at..].first_chunk().expect("inside the array");
    // SAFETY: 2.
    unsafe { vld1q_f32(x.as_ptr()) }
}

/// Sixteen bytes from `at` on.
#[target_feature(enable = "neon")]
#[inline]
fn bytes<const N: usize>(x: &[u8; N], at: usize) -> uint8x16_t {
    let x: &[u8; 16] = x[at..].first_chunk().expect("inside the array");
    // SAFETY: 2.
    unsafe { vld1q_u8(x.as_ptr()) }
}

/// Eight binary16 as floats.
#[target_feature(enable = "neon")]
#[inline]
fn from_f16(x: uint8x16_t) -> [float32x4_t; 2] {
    let x = vreinterpretq_f16_u8(x);
    [vcvt_f32_f16(vget_low_f16(x)), vcvt_high_f32_f16(x)]
}

/// Element `c` of row `r` becomes element `r` of row `c`.
#[target_feature(enable = "neon")]
#[inline]
fn transpose4(x: [uint32x4_t; 4]) -> [uint32x4_t; 4] {
    let pairs = |a, b| [vtrn1q_u32(a, b), vtrn2q_u32(a, b)].map(|x| vreinterpretq_u64_u32(x));
    let ([a, b], [c, d]) = (pairs(x[0], x[1]), pairs(x[2], x[3]));
    [
        vtrn1q_u64(a, c),
        vtrn1q_u64(b, d),
        vtrn2q_u64(a, c),
        vtrn2q_u64(b, d),
    ]
    .map(|x| vreinterpretq_u32_u64(x))
}

/// Lane `j` is the sum of the lanes of `x[j]`: of `i` and `i + 2` first.
#[target_feature(enable = "neon")]
#[inline]
fn sum_fours(x: [float32x4_t; 4]) -> float32x4_t {
    let halves = |a, b| {
        let (a, b) = (vreinterpretq_f64_f32(a), vreinterpretq_f64_f32(b));
        let (low, high) = (vtrn1q_f64(a, b), vtrn2q_f64(a, b));
        vaddq_f32(vreinterpretq_f32_f64(low), vreinterpretq_f32_f64(high))
    };
    vpaddq_f32(halves(x[0], x[1]), halves(x[2], x[3]))
}

/// Lane `j` is the sum of the lanes of `x[j]`.
#[target_feature(enable = "neon")]
#[inline]
pub(crate) fn sum_integers(x: [int32x4_t; 4]) -> uint32x4_t {
    let pairs = [vpaddq_s32(x[0], x[1]), vpaddq_s32(x[2], x[3])];
    vreinterpretq_u32_s32(vpaddq_s32(pairs[0], pairs[1]))
}

/// Sixteen bytes at `at` of a row.
///
/// # Safety
/// `at + 16` does not exceed the row, and `row < 16`.
#[target_feature(enable = "neon")]
#[inline]
unsafe fn row_bytes(tile: &Tile<'_>, row: usize, at: usize) -> uint8x16_t {
    // SAFETY: 3, by the caller's promise.
    unsafe { vld1q_u8(tile.ptr(row, at)) }
}

/// Sixteen bytes at `at` of four rows, transposed.
///
/// # Safety
/// `at + 16` does not exceed the rows.
#[target_feature(enable = "neon")]
#[inline]
unsafe fn columns(tile: &Tile<'_>, part: usize, at: usize) -> [uint32x4_t; 4] {
    // SAFETY: by the caller's promise.
    let row = |r: usize| unsafe { row_bytes(tile, 4 * part + r, at) };
    transpose4(std::array::from_fn(|r| vreinterpretq_u32_u8(row(r))))
}

/// The binary16 at `at` of four rows.
///
/// # Safety
/// `at + 2` does not exceed the rows.
#[target_feature(enable = "neon")]
#[inline]
unsafe fn f16_of_rows(tile: &Tile<'_>, part: usize, at: usize) -> float32x4_t {
    // SAFETY: 3, by the caller's promise; a lane is loaded from any address.
    let x = unsafe {
        let row = |r: usize| tile.ptr(4 * part + r, at).cast();
        let x = vld1_lane_u16::<0>(row(0), vdup_n_u16(0));
        let x = vld1_lane_u16::<1>(row(1), x);
        vld1_lane_u16::<3>(row(3), vld1_lane_u16::<2>(row(2), x))
    };
    vcvt_f32_f16(vreinterpret_f16_u16(x))
}

/// The word at `at` of four rows.
///
/// # Safety
/// `at + 4` does not exceed the rows.
#[target_feature(enable = "neon")]
#[inline]
unsafe fn words_of_rows(tile: &Tile<'_>, part: usize, at: usize) -> uint32x4_t {
    // SAFETY: 3, by the caller's promise; a lane is loaded from any address.
    unsafe {
        let row = |r: usize| tile.ptr(4 * part + r, at).cast();
        let x = vld1q_lane_u32::<0>(row(0), vdupq_n_u32(0));
        let x = vld1q_lane_u32::<1>(row(1), x);
        vld1q_lane_u32::<3>(row(3), vld1q_lane_u32::<2>(row(2), x))
    }
}

/// See [`Simd::largest`].
#[target_feature(enable = "neon")]
#[inline]
fn largest(x: [[float32x4_t; PARTS]; 2]) -> f32 {
    let bits = |x| vandq_u32(vreinterpretq_u32_f32(x), vdupq_n_u32(0x7FFF_FFFF));
    let most = |x: [float32x4_t; PARTS]| {
        let [a, b, c, d] = x.map(bits);
        vmaxq_u32(vmaxq_u32(a, b), vmaxq_u32(c, d))
    };
    f32::from_bits(vmaxvq_u32(vmaxq_u32(most(x[0]), most(x[1]))))
}

/// To the nearest whole numbers, as bytes.
#[target_feature(enable = "neon")]
#[inline]
fn narrow(x: [float32x4_t; PARTS]) -> int8x16_t {
    let [a, b, c, d] = x.map(|x| vqmovn_s32(vcvtnq_s32_f32(x)));
    let [low, high] = [vcombine_s16(a, b), vcombine_s16(c, d)].map(|x| vqmovn_s16(x));
    vcombine_s8(low, high)
}

/// Signed bytes as floats.
#[target_feature(enable = "neon")]
#[inline]
fn from_i8(x: int8x16_t) -> [float32x4_t; PARTS] {
    let (low, high) = (vmovl_s8(vget_low_s8(x)), vmovl_high_s8(x));
    [
        vmovl_s16(vget_low_s16(low)),
        vmovl_high_s16(low),
        vmovl_s16(vget_low_s16(high)),
        vmovl_high_s16(high),
    ]
    .map(|x| vcvtq_f32_s32(x))
}

/// Applies an operation to all registers, or to the index of each.
macro_rules! four {
    (|$($x:ident),+| $body:expr) => {
        four!(i => { $(let $x = $x[i];)+ $body })
    };
    ($i:ident => $body:expr) => {
        // SAFETY: 1, and where it loads 2 or 3: bounds are asserted before.
        std::array::from_fn(|$i| unsafe { $body })
    };
}

impl<B: Bytes> Simd for Neon<B> {
    type F = [float32x4_t; PARTS];
    type U = [uint32x4_t; PARTS];

    const REGISTERS: Registers = Registers::Few;
    const TOKENS: usize = 4;
    const TILES: usize = 1;
    const PRODUCTS: Products = B::PRODUCTS;
    const SINGLE_TOKEN: SingleToken = SingleToken::EachRow;
    const START: i32 = 0;

    #[inline(always)]
    fn dot_sixteen(self, sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
        self.0.dot(sum, a, b)
    }

    #[inline(always)]
    fn vectorize<K: Kernel>(self, kernel: K) -> K::Output {
        B::enter(self, kernel)
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        // SAFETY: 1.
        unsafe { [vdupq_n_f32(x); PARTS] }
    }

    #[inline(always)]
    fn load(self, x: &[f32; 16]) -> Self::F {
        four!(i => floats(x, 4 * i))
    }

    #[inline(always)]
    fn store(self, x: Self::F, out: &mut [f32; 16]) {
        for (x, out) in x.into_iter().zip(out.as_chunks_mut::<4>().0) {
            // SAFETY: 1, 2.
            unsafe { vst1q_f32(out.as_mut_ptr(), x) };
        }
    }

    #[inline(always)]
    fn load_f32_bytes(self, x: &[u8; 64]) -> Self::F {
        four!(i => vreinterpretq_f32_u8(bytes(x, 16 * i)))
    }

    #[inline(always)]
    fn load_f16(self, x: &[u8; 32]) -> Self::F {
        four!(i => from_f16(bytes(x, i / 2 * 16))[i % 2])
    }

    #[inline(always)]
    fn load_bf16(self, x: &[u8; 32]) -> Self::F {
        four!(i => {
            let both = vreinterpretq_u16_u8(bytes(x, i / 2 * 16));
            vreinterpretq_f32_u32(match i % 2 {
                0 => vshll_n_u16::<16>(vget_low_u16(both)),
                _ => vshll_high_n_u16::<16>(both),
            })
        })
    }

    #[inline(always)]
    fn load_i8(self, x: &[u8; 16]) -> Self::F {
        // SAFETY: 1.
        unsafe { from_i8(vreinterpretq_s8_u8(bytes(x, 0))) }
    }

    #[inline(always)]
    fn load_named(self, table: &[i8; 16], x: &[u8; 16]) -> [Self::F; 2] {
        // SAFETY: 1, 2.
        unsafe {
            let (table, x) = (vld1q_s8(table.as_ptr()), bytes(x, 0));
            [
                from_i8(vqtbl1q_s8(table, vandq_u8(x, vdupq_n_u8(15)))),
                from_i8(vqtbl1q_s8(table, vshrq_n_u8::<4>(x))),
            ]
        }
    }

    #[inline(always)]
    fn named(self, table: &[i8; 16], x: &[u8; 16]) -> [u8; 32] {
        let mut out = [0; 32];
        // SAFETY: 1, 2.
        unsafe {
            let (table, x) = (vld1q_s8(table.as_ptr()), bytes(x, 0));
            let low = vqtbl1q_s8(table, vandq_u8(x, vdupq_n_u8(15)));
            let high = vqtbl1q_s8(table, vshrq_n_u8::<4>(x));
            vst1q_u8(out.as_mut_ptr(), vreinterpretq_u8_s8(low));
            vst1q_u8(out[16..].as_mut_ptr(), vreinterpretq_u8_s8(high));
        }
        out
    }

    #[inline(always)]
    fn load_f16_halves(self, x: [&[u8; 16]; 2]) -> Self::F {
        four!(i => from_f16(bytes(x[i / 2], 0))[i % 2])
    }

    #[inline(always)]
    fn load_twice(self, x: &[f32; 8]) -> Self::F {
        four!(i => floats(x, i % 2 * 4))
    }

    #[inline(always)]
    fn splat_f16(self, x: u16) -> Self::F {
        // SAFETY: 1.
        unsafe { [vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(x))); PARTS] }
    }

    #[inline(always)]
    fn store_f16(self, x: Self::F, out: &mut [u8; 32]) {
        for (x, out) in x.as_chunks::<2>().0.iter().zip(out.as_chunks_mut::<16>().0) {
            // SAFETY: 1, 2.
            unsafe {
                let narrow = vcvt_high_f16_f32(vcvt_f16_f32(x[0]), x[1]);
                vst1q_u8(out.as_mut_ptr(), vreinterpretq_u8_f16(narrow));
            }
        }
    }

    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        four!(|a, b| vaddq_f32(a, b))
    }

    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        four!(|a, b| vsubq_f32(a, b))
    }

    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        four!(|a, b| vmulq_f32(a, b))
    }

    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        four!(|a, b| vdivq_f32(a, b))
    }

    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        four!(|a, b, c| vfmaq_f32(c, a, b))
    }

    #[inline(always)]
    fn fused(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        self.fma(a, b, c)
    }

    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        // The instruction for it returns what is not a number.
        four!(|a, b| vbslq_f32(vcgtq_f32(a, b), a, b))
    }

    #[inline(always)]
    fn exp2_whole(self, x: Self::F) -> Self::F {
        four!(|x| {
            let exponent = vaddq_s32(vcvtnq_s32_f32(x), vdupq_n_s32(127));
            vreinterpretq_f32_s32(vshlq_n_s32::<23>(exponent))
        })
    }

    #[inline(always)]
    fn keep_first(self, x: Self::F, n: usize, fill: Self::F) -> Self::F {
        let index = self.u_load(&each!(0, |i| i as u32));
        let n = self.u_splat(n as u32);
        four!(|x, fill, index, n| vbslq_f32(vcgtq_u32(n, index), x, fill))
    }

    #[inline(always)]
    fn sum(self, x: Self::F) -> f32 {
        // SAFETY: 1.
        unsafe {
            let by4 = vaddq_f32(vaddq_f32(x[0], x[2]), vaddq_f32(x[1], x[3]));
            vaddv_f32(vadd_f32(vget_low_f32(by4), vget_high_f32(by4)))
        }
    }

    #[inline(always)]
    fn max_lane(self, x: Self::F) -> f32 {
        // SAFETY: 1.
        unsafe { vmaxvq_f32(vmaxq_f32(vmaxq_f32(x[0], x[1]), vmaxq_f32(x[2], x[3]))) }
    }

    #[inline(always)]
    fn sum_each(self, x: [Self::F; 16]) -> Self::F {
        four!(part => sum_fours(each!(x[0][0], |j| {
            let x = x[4 * part + j];
            vaddq_f32(vaddq_f32(x[0], x[2]), vaddq_f32(x[1], x[3]))
        })))
    }

    #[inline(always)]
    fn sum_halves(self, x: [Self::F; 8]) -> Self::F {
        four!(part => sum_fours(each!(x[0][0], |j| {
            let x = x[part % 2 * 4 + j];
            vaddq_f32(x[part / 2 * 2], x[part / 2 * 2 + 1])
        })))
    }

    #[inline(always)]
    fn transpose_halves(self, x: [Self::F; 8]) -> [Self::F; 8] {
        let squares: [[[_; 4]; PARTS]; 2] = each!([[x[0][0]; 4]; PARTS], |rows| {
            four!(columns => {
                let row = |r: usize| vreinterpretq_u32_f32(x[4 * rows + r][columns]);
                let square = transpose4([row(0), row(1), row(2), row(3)]);
                each!(x[0][0], |c| vreinterpretq_f32_u32(square[c]))
            })
        });
        // Of each half, the first four rows and the others.
        each!(x[0], |c| each!(x[0][0], |part| {
            squares[part % 2][part / 2 * 2 + c / 4][c % 4]
        }))
    }

    #[inline(always)]
    fn transpose(self, x: [Self::F; 16]) -> [Self::F; 16] {
        let squares: [[[_; 4]; PARTS]; PARTS] = each!([[x[0][0]; 4]; PARTS], |rows| {
            four!(columns => {
                let row = |r: usize| vreinterpretq_u32_f32(x[4 * rows + r][columns]);
                let square = transpose4([row(0), row(1), row(2), row(3)]);
                each!(x[0][0], |c| vreinterpretq_f32_u32(square[c]))
            })
        });
        each!(x[0], |c| each!(x[0][0], |rows| squares[rows][c / 4][c % 4]))
    }

    #[inline(always)]
    fn u_splat(self, x: u32) -> Self::U {
        // SAFETY: 1.
        unsafe { [vdupq_n_u32(x); PARTS] }
    }

    #[inline(always)]
    fn u_load(self, x: &[u32; 16]) -> Self::U {
        four!(i => vld1q_u32(x.as_chunks::<4>().0[i].as_ptr()))
    }

    #[inline(always)]
    fn u_store(self, x: Self::U, out: &mut [u32; 16]) {
        for (x, out) in x.into_iter().zip(out.as_chunks_mut::<4>().0) {
            // SAFETY: 1, 2.
            unsafe { vst1q_u32(out.as_mut_ptr(), x) };
        }
    }

    #[inline(always)]
    fn u_and(self, a: Self::U, b: Self::U) -> Self::U {
        four!(|a, b| vandq_u32(a, b))
    }

    #[inline(always)]
    fn u_or(self, a: Self::U, b: Self::U) -> Self::U {
        four!(|a, b| vorrq_u32(a, b))
    }

    #[inline(always)]
    fn u_xor(self, a: Self::U, b: Self::U) -> Self::U {
        four!(|a, b| veorq_u32(a, b))
    }

    #[inline(always)]
    fn u_mul(self, a: Self::U, b: Self::U) -> Self::U {
        four!(|a, b| vmulq_u32(a, b))
    }

    #[inline(always)]
    fn u_shl(self, x: Self::U, bits: u32) -> Self::U {
        let bits = self.u_splat(bits);
        four!(|x, bits| vshlq_u32(x, vreinterpretq_s32_u32(bits)))
    }

    #[inline(always)]
    fn u_shr(self, x: Self::U, bits: u32) -> Self::U {
        // The instruction shifts left, by what may be negative.
        let bits = self.u_splat(bits.wrapping_neg());
        four!(|x, bits| vshlq_u32(x, vreinterpretq_s32_u32(bits)))
    }

    #[inline(always)]
    fn i_shr(self, x: Self::U, bits: u32) -> Self::U {
        let bits = self.u_splat(bits.wrapping_neg());
        four!(|x, bits| {
            let shifted = vshlq_s32(vreinterpretq_s32_u32(x), vreinterpretq_s32_u32(bits));
            vreinterpretq_u32_s32(shifted)
        })
    }

    #[inline(always)]
    fn bits_to_f32(self, x: Self::U) -> Self::F {
        four!(|x| vreinterpretq_f32_u32(x))
    }

    #[inline(always)]
    fn i_to_f32(self, x: Self::U) -> Self::F {
        four!(|x| vcvtq_f32_s32(vreinterpretq_s32_u32(x)))
    }

    #[inline(always)]
    fn f16_low(self, x: Self::U) -> Self::F {
        four!(|x| vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32(x))))
    }

    #[inline(always)]
    fn f16_column(self, tile: &Tile<'_>, at: usize) -> Self::F {
        assert!(
            at + 2 <= tile.row_bytes(),
            "a column at {at} exceeds the row"
        );
        four!(part => f16_of_rows(tile, part, at))
    }

    #[inline(always)]
    fn gather(self, tile: &Tile<'_>, at: usize) -> Self::U {
        assert!(
            at + 4 <= tile.row_bytes(),
            "a gather at {at} exceeds the row"
        );
        four!(part => words_of_rows(tile, part, at))
    }

    #[inline(always)]
    fn columns(self, tile: &Tile<'_>, at: usize) -> [Self::U; 4] {
        assert!(
            at + 16 <= tile.row_bytes(),
            "columns at {at} exceed the row"
        );
        let parts: [[_; 4]; PARTS] = four!(part => columns(tile, part, at));
        each!(parts[0], |group| each!(parts[0][0], |part| parts[part]
            [group]))
    }

    #[inline(always)]
    fn largest(self, x: [Self::F; 2]) -> f32 {
        // SAFETY: 1.
        unsafe { largest(x) }
    }

    #[inline(always)]
    fn to_bytes(self, x: [Self::F; 2]) -> ([u32; 8], [i32; 2]) {
        let mut words = [0; 8];
        let mut sums = [0; 2];
        for half in 0..2 {
            // SAFETY: 1, 2.
            unsafe {
                let bytes = narrow(x[half]);
                sums[half] = vaddlvq_s8(bytes).into();
                vst1q_u32(
                    words[4 * half..][..4].as_mut_ptr(),
                    vreinterpretq_u32_s8(bytes),
                );
            }
        }
        (words, sums)
    }

    #[inline(always)]
    fn exchange<const APART: usize>(self, x: Self::F) -> Self::F {
        match APART {
            // SAFETY: 1.
            1 => each!(x[0], |i| unsafe { vrev64q_f32(x[i]) }),
            // SAFETY: 1.
            2 => each!(x[0], |i| unsafe { vextq_f32::<2>(x[i], x[i]) }),
            apart => each!(x[0], |i| x[i ^ (apart / 4)]),
        }
    }

    #[inline(always)]
    fn weights(self, bytes: Self::U, offset: i8) -> Self::U {
        let offset = self.u_splat(u32::from_ne_bytes([offset.cast_unsigned(); 4]));
        four!(|bytes, offset| {
            let (bytes, offset) = (vreinterpretq_u8_u32(bytes), vreinterpretq_u8_u32(offset));
            vreinterpretq_u32_u8(vaddq_u8(bytes, offset))
        })
    }

    #[inline(always)]
    fn lookup(self, table: &[u8; 16], index: Self::U) -> Self::U {
        four!(i => {
            let table = vld1q_u8(table.as_ptr());
            vreinterpretq_u32_u8(vqtbl1q_u8(table, vreinterpretq_u8_u32(index[i])))
        })
    }

    #[inline(always)]
    fn u_halves(self, x: [&[u8; 32]; 2]) -> Self::U {
        four!(i => vreinterpretq_u32_u8(bytes(x[i / 2], i % 2 * 16)))
    }

    #[inline(always)]
    fn u_add(self, a: Self::U, b: Self::U) -> Self::U {
        four!(|a, b| vaddq_u32(a, b))
    }

    #[inline(always)]
    fn u_sub(self, a: Self::U, b: Self::U) -> Self::U {
        four!(|a, b| vsubq_u32(a, b))
    }

    #[inline(always)]
    fn widen_words(self, x: [&[u8; 16]; 2]) -> Self::U {
        four!(i => {
            let both = vreinterpretq_u16_u8(bytes(x[i / 2], 0));
            match i % 2 {
                0 => vmovl_u16(vget_low_u16(both)),
                _ => vmovl_high_u16(both),
            }
        })
    }

    #[inline(always)]
    fn f16_each(self, x: [u16; 16]) -> Self::F {
        four!(i => vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(
            x.as_chunks::<4>().0[i].as_ptr()
        ))))
    }

    #[inline(always)]
    fn dot_unsigned(self, sum: Self::U, weights: Self::U, activations: Self::U) -> Self::U {
        // Those below 128 are the same signed.
        each!(sum[0], |i| self.dot_words(
            sum[i],
            weights[i],
            activations[i]
        ))
    }

    #[inline(always)]
    fn dot_rows<const T: usize>(
        self,
        tile: &Tile<'_>,
        at: usize,
        blocks: [&ActivationBlock<1>; T],
    ) -> [Self::U; T] {
        assert!(
            at + BLOCK <= tile.row_bytes(),
            "a block at {at} exceeds the row"
        );
        // SAFETY: 1, 2.
        let (zero, q) = unsafe {
            let words = |t: usize, half: usize| blocks[t].q[0].as_chunks::<4>().0[half].as_ptr();
            let q: [[_; 2]; T] = each!([vdupq_n_s8(0); 2], |t| each!(vdupq_n_s8(0), |half| {
                vreinterpretq_s8_u32(vld1q_u32(words(t, half)))
            }));
            (vdupq_n_s32(0), q)
        };
        let mut out = [self.u_splat(0); T];
        for part in 0..PARTS {
            let mut sums = [[zero; 4]; T];
            for r in 0..4 {
                // SAFETY: 1, 3.
                let row: [_; 2] = each!(q[0][0], |half| unsafe {
                    vreinterpretq_s8_u8(row_bytes(tile, 4 * part + r, at + 16 * half))
                });
                for t in 0..T {
                    let first = self.0.dot(zero, row[0], q[t][0]);
                    sums[t][r] = self.0.dot(first, row[1], q[t][1]);
                }
            }
            for t in 0..T {
                // SAFETY: 1.
                out[t][part] = unsafe { sum_integers(sums[t]) };
            }
        }
        out
    }

    #[inline(always)]
    fn zip(self, a: Self::U, b: Self::U) -> [Self::U; 2] {
        each!(a, |half| four!(i => {
            let (a, b) = (a[2 * half + i / 2], b[2 * half + i / 2]);
            if i % 2 == 0 { vzip1q_u32(a, b) } else { vzip2q_u32(a, b) }
        }))
    }

    #[inline(always)]
    fn unzip(self, a: Self::U, b: Self::U) -> [Self::U; 2] {
        let all = [a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]];
        [
            four!(i => vuzp1q_u32(all[2 * i], all[2 * i + 1])),
            four!(i => vuzp2q_u32(all[2 * i], all[2 * i + 1])),
        ]
    }

    #[inline(always)]
    fn dot_squares(self, sums: Self::U, weights: Self::U, activations: [u32; 4]) -> Self::U {
        // SAFETY: 1, 2.
        let x = unsafe { vreinterpretq_s8_u32(vld1q_u32(activations.as_ptr())) };
        // SAFETY: 1.
        each!(sums[0], |i| unsafe {
            let (sum, weights) = (
                vreinterpretq_s32_u32(sums[i]),
                vreinterpretq_s8_u32(weights[i]),
            );
            vreinterpretq_u32_s32(self.0.square(sum, weights, x))
        })
    }

    #[inline(always)]
    fn prefetch_line(self, address: *const u8) {
        // SAFETY: a prefetch reads nothing and cannot fault.
        unsafe {
            asm!("prfm pldl1keep, [{}]", in(reg) address, options(readonly, nostack, preserves_flags));
        }
    }

    #[inline(always)]
    fn prefetch_far(self, address: *const u8) {
        // SAFETY: a prefetch reads nothing and cannot fault.
        unsafe {
            asm!("prfm pldl2keep, [{}]", in(reg) address, options(readonly, nostack, preserves_flags));
        }
    }
}

/// [`Simd::dot_sixteen`] of words, to test it.
#[cfg(test)]
#[inline(always)]
pub(super) fn dot_sixteen<S: Simd>(s: S, sum: [u32; 4], a: [u32; 4], b: [u32; 4]) -> [u32; 4] {
    let mut out = [0; 4];
    // SAFETY: 1, 2.
    unsafe {
        let [sum, a, b] = [sum, a, b].map(|x| vld1q_u32(x.as_ptr()));
        let (a, b) = (vreinterpretq_s8_u32(a), vreinterpretq_s8_u32(b));
        let sums = s.dot_sixteen(vreinterpretq_s32_u32(sum), a, b);
        vst1q_u32(out.as_mut_ptr(), vreinterpretq_u32_s32(sums));
    }
    out
}
