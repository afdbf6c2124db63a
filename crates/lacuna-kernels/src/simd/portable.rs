//! The level every CPU has: plain Rust over arrays.

use super::{Kernel, LANES, Products, Registers, Simd, SingleToken};
use crate::tile::Tile;
use half::f16;

/// Plain Rust.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

type F = [f32; LANES];
type U = [u32; LANES];

#[inline(always)]
fn map<T: Copy, R>(x: [T; LANES], f: impl Fn(T) -> R) -> [R; LANES] {
    std::array::from_fn(|i| f(x[i]))
}

#[inline(always)]
fn zip<A: Copy, B: Copy, R>(a: [A; LANES], b: [B; LANES], f: impl Fn(A, B) -> R) -> [R; LANES] {
    std::array::from_fn(|i| f(a[i], b[i]))
}

/// Four bytes times four bytes, all signed.
#[inline(always)]
fn dot_bytes(weights: u32, activations: u32) -> i32 {
    let (w, a) = (weights.to_le_bytes(), activations.to_le_bytes());
    (0..4)
        .map(|i| i32::from(w[i] as i8) * i32::from(a[i] as i8))
        .sum()
}

/// Lanes from their bytes.
#[inline(always)]
fn words<const N: usize, const PARTS: usize>(x: [&[u8; N]; PARTS]) -> U {
    std::array::from_fn(|i| {
        let at = 4 * i % N;
        let part = x[4 * i / N];
        u32::from_le_bytes([part[at], part[at + 1], part[at + 2], part[at + 3]])
    })
}

impl Simd for Portable {
    type F = F;
    type U = U;

    const REGISTERS: Registers = Registers::Few;
    const TOKENS: usize = 2;
    const TILES: usize = 1;
    const PRODUCTS: Products = Products::Quads;
    const SINGLE_TOKEN: SingleToken = SingleToken::Sixteen;
    const START: i32 = 0;

    #[inline(never)]
    fn vectorize<K: Kernel>(self, kernel: K) -> K::Output {
        kernel.run(self)
    }

    #[inline(always)]
    fn splat(self, x: f32) -> F {
        [x; LANES]
    }

    #[inline(always)]
    fn exchange<const APART: usize>(self, x: F) -> F {
        each!(0.0, |i| x[i ^ APART])
    }

    #[inline(always)]
    fn load(self, x: &F) -> F {
        *x
    }

    #[inline(always)]
    fn store(self, x: F, out: &mut F) {
        *out = x;
    }

    #[inline(always)]
    fn load_f32_bytes(self, x: &[u8; 64]) -> F {
        std::array::from_fn(|i| {
            f32::from_le_bytes([x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]])
        })
    }

    #[inline(always)]
    fn load_f16(self, x: &[u8; 32]) -> F {
        std::array::from_fn(|i| f16::from_le_bytes([x[2 * i], x[2 * i + 1]]).to_f32_const())
    }

    #[inline(always)]
    fn load_bf16(self, x: &[u8; 32]) -> F {
        std::array::from_fn(|i| f32::from_bits(u32::from_le_bytes([0, 0, x[2 * i], x[2 * i + 1]])))
    }

    #[inline(always)]
    fn load_i8(self, x: &[u8; 16]) -> F {
        map(*x, |x| f32::from(x as i8))
    }

    #[inline(always)]
    fn load_named(self, table: &[i8; 16], x: &[u8; 16]) -> [F; 2] {
        [
            map(*x, |x| f32::from(table[usize::from(x & 15)])),
            map(*x, |x| f32::from(table[usize::from(x >> 4)])),
        ]
    }

    #[inline(always)]
    fn load_f16_halves(self, x: [&[u8; 16]; 2]) -> F {
        self.f16_low(self.widen_words(x))
    }

    #[inline(always)]
    fn load_twice(self, x: &[f32; 8]) -> F {
        std::array::from_fn(|i| x[i % 8])
    }

    #[inline(always)]
    fn splat_f16(self, x: u16) -> F {
        [f16::from_bits(x).to_f32_const(); LANES]
    }

    #[inline(always)]
    fn store_f16(self, x: F, out: &mut [u8; 32]) {
        for (out, x) in out.as_chunks_mut::<2>().0.iter_mut().zip(x) {
            *out = f16::from_f32_const(x).to_le_bytes();
        }
    }

    #[inline(always)]
    fn add(self, a: F, b: F) -> F {
        zip(a, b, |a, b| a + b)
    }

    #[inline(always)]
    fn sub(self, a: F, b: F) -> F {
        zip(a, b, |a, b| a - b)
    }

    #[inline(always)]
    fn mul(self, a: F, b: F) -> F {
        zip(a, b, |a, b| a * b)
    }

    #[inline(always)]
    fn div(self, a: F, b: F) -> F {
        zip(a, b, |a, b| a / b)
    }

    #[inline(always)]
    fn fma(self, a: F, b: F, c: F) -> F {
        std::array::from_fn(|i| a[i] * b[i] + c[i])
    }

    #[inline(always)]
    fn fused(self, a: F, b: F, c: F) -> F {
        std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
    }

    #[inline(always)]
    fn max(self, a: F, b: F) -> F {
        zip(a, b, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn exp2_whole(self, x: F) -> F {
        map(x, |x| {
            f32::from_bits(((x as i32).wrapping_add(127) as u32) << 23)
        })
    }

    #[inline(always)]
    fn keep_first(self, x: F, n: usize, fill: F) -> F {
        std::array::from_fn(|i| if i < n { x[i] } else { fill[i] })
    }

    #[inline(always)]
    fn sum(self, x: F) -> f32 {
        let by8: [f32; 8] = std::array::from_fn(|i| x[i] + x[i + 8]);
        let by4: [f32; 4] = std::array::from_fn(|i| by8[i] + by8[i + 4]);
        (by4[0] + by4[2]) + (by4[1] + by4[3])
    }

    #[inline(always)]
    fn max_lane(self, x: F) -> f32 {
        x.into_iter()
            .fold(f32::NEG_INFINITY, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn sum_each(self, x: [F; 16]) -> F {
        map(x, |x| self.sum(x))
    }

    #[inline(always)]
    fn sum_halves(self, x: [F; 8]) -> F {
        std::array::from_fn(|i| {
            let half = &x[i % 8][i / 8 * 8..];
            let by4: [f32; 4] = std::array::from_fn(|i| half[i] + half[i + 4]);
            (by4[0] + by4[2]) + (by4[1] + by4[3])
        })
    }

    #[inline(always)]
    fn u_splat(self, x: u32) -> U {
        [x; LANES]
    }

    #[inline(always)]
    fn u_load(self, x: &U) -> U {
        *x
    }

    #[inline(always)]
    fn u_store(self, x: U, out: &mut U) {
        *out = x;
    }

    #[inline(always)]
    fn u_and(self, a: U, b: U) -> U {
        zip(a, b, |a, b| a & b)
    }

    #[inline(always)]
    fn u_or(self, a: U, b: U) -> U {
        zip(a, b, |a, b| a | b)
    }

    #[inline(always)]
    fn u_xor(self, a: U, b: U) -> U {
        zip(a, b, |a, b| a ^ b)
    }

    #[inline(always)]
    fn u_mul(self, a: U, b: U) -> U {
        zip(a, b, u32::wrapping_mul)
    }

    #[inline(always)]
    fn u_shl(self, x: U, bits: u32) -> U {
        map(x, |x| x << bits)
    }

    #[inline(always)]
    fn u_shr(self, x: U, bits: u32) -> U {
        map(x, |x| x >> bits)
    }

    #[inline(always)]
    fn i_shr(self, x: U, bits: u32) -> U {
        map(x, |x| (x as i32 >> bits) as u32)
    }

    #[inline(always)]
    fn bits_to_f32(self, x: U) -> F {
        map(x, f32::from_bits)
    }

    #[inline(always)]
    fn i_to_f32(self, x: U) -> F {
        map(x, |x| x as i32 as f32)
    }

    #[inline(always)]
    fn f16_low(self, x: U) -> F {
        map(x, |x| f16::from_bits(x as u16).to_f32_const())
    }

    #[inline(always)]
    fn f16_column(self, tile: &Tile<'_>, at: usize) -> F {
        std::array::from_fn(|r| f16::from_le_bytes(tile.bytes(r, at)).to_f32_const())
    }

    #[inline(always)]
    fn gather(self, tile: &Tile<'_>, at: usize) -> U {
        assert!(
            at + 4 <= tile.row_bytes(),
            "a gather at {at} exceeds the row"
        );
        std::array::from_fn(|row| u32::from_le_bytes(tile.bytes(row, at)))
    }

    #[inline(always)]
    fn columns(self, tile: &Tile<'_>, at: usize) -> [U; 4] {
        assert!(
            at + 16 <= tile.row_bytes(),
            "columns at {at} exceed the row"
        );
        std::array::from_fn(|group| {
            std::array::from_fn(|row| u32::from_le_bytes(tile.bytes(row, at + 4 * group)))
        })
    }

    #[inline(always)]
    fn weights(self, bytes: U, offset: i8) -> U {
        map(bytes, |x| {
            u32::from_le_bytes(x.to_le_bytes().map(|b| b.wrapping_add_signed(offset)))
        })
    }

    #[inline(always)]
    fn u_halves(self, x: [&[u8; 32]; 2]) -> U {
        words(x)
    }

    #[inline(always)]
    fn u_add(self, a: U, b: U) -> U {
        zip(a, b, u32::wrapping_add)
    }

    #[inline(always)]
    fn u_sub(self, a: U, b: U) -> U {
        zip(a, b, u32::wrapping_sub)
    }

    #[inline(always)]
    fn widen_words(self, x: [&[u8; 16]; 2]) -> U {
        std::array::from_fn(|i| {
            let at = 2 * (i % 8);
            u32::from(u16::from_le_bytes([x[i / 8][at], x[i / 8][at + 1]]))
        })
    }

    #[inline(always)]
    fn f16_each(self, x: [u16; 16]) -> F {
        map(x, |x| f16::from_bits(x).to_f32_const())
    }

    #[inline(always)]
    fn dot_unsigned(self, sum: U, weights: U, activations: U) -> U {
        // Those below 128 are the same signed.
        each!(0, |i| {
            dot_bytes(weights[i], activations[i]).wrapping_add_unsigned(sum[i]) as u32
        })
    }

    #[inline(always)]
    fn prefetch_line(self, _address: *const u8) {}

    #[inline(always)]
    fn prefetch_far(self, _: *const u8) {}
}
