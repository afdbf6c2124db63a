//! One token with NEON: sixteen rows side by side, each multiplied as it lies in memory.
//!
//! A row's products of four columns are a lane of a register of its own; the lanes are added only when
//! there are four rows of them. What an offset of all weights adds is corrected with the sums of the
//! activations, where the sum of a row starts. Scales come from the format, for sixteen rows at once.
//!
//! # Safety
//! 1. Every 64-bit ARM that this is compiled for has NEON.
//! 2. Loads go through references to arrays that are as long.
#![expect(unsafe_code, reason = "intrinsics; see # Safety")]

use std::arch::aarch64::*;
use std::marker::PhantomData;

use super::codebooks::{FLOATS, FLOATS_OFFSET, LEVELS, as_bytes, ternary_digits};
use super::formats::{
    Format, Iq4Nl, Iq4Xs, Mxfp4, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0, Tq1_0,
    Tq2_0, file_block, with_format,
};
use super::grids::{Iq2S, Iq2Xs, Iq2Xxs, Iq3S, Iq3Xxs, weights};
use super::panel::{Extra, HasExtra};
use super::streams::prefetch_next_rows;
use super::{parts, store};
use crate::activations::ActivationRow;
use crate::dtype::DType;
use crate::matrix::Matrix;
use crate::simd::neon::sum_integers;
use crate::simd::{Kernel, LANES, Simd, each};
use crate::tile::Tile;

/// The 32 weights of a row's block, too large by [`Format::OFFSET`].
type Weights = [uint8x16_t; 2];

/// A storage type, a row at a time.
trait Row: Format {
    /// The `part`-th 32 columns of a file block.
    fn weights(block: &[u8], part: usize) -> Weights;
}

/// Implements [`Row`] for a type: how weights are read.
macro_rules! row {
    ($name:ident, |$block:ident, $part:ident| $body:expr) => {
        impl Row for $name {
            #[inline(always)]
            fn weights($block: &[u8], $part: usize) -> Weights {
                // SAFETY: 1.
                unsafe { $body }
            }
        }
    };
}

row!(Q8_0, |block, _part| two(block, 2));
row!(Q4_0, |block, _part| nibbles(block, 2));
row!(Q4_1, |block, _part| nibbles(block, 4));
row!(Q5_0, |block, _part| with_fifth(
    nibbles(block, 6),
    bits(block, 2)
));
row!(Q5_1, |block, _part| with_fifth(
    nibbles(block, 8),
    bits(block, 4)
));
row!(Q4K, |block, part| k_nibbles(block, 16, part));
row!(Q5K, |block, part| with_fifth(
    k_nibbles(block, 48, part),
    two(block, 16).map(|x| vtstq_u8(x, vdupq_n_u8(1 << part)))
));
row!(Q6K, |block, part| {
    let (half, quarter) = (part / 4, part % 4);
    let low = two(block, 64 * half + 32 * (quarter % 2));
    let down = vdupq_n_s8(-4 * (quarter as i8 / 2));
    let high = two(block, 128 + 32 * half);
    let up = vdupq_n_s8(4 - 2 * quarter as i8);
    each!(low[0], |i| {
        let top = vandq_u8(vshlq_u8(high[i], up), vdupq_n_u8(0x30));
        vorrq_u8(vandq_u8(vshlq_u8(low[i], down), vdupq_n_u8(15)), top)
    })
});

row!(Iq4Nl, |block, _part| levels(LEVELS, 0, nibbles(block, 2)));
row!(Iq4Xs, |block, part| levels(
    LEVELS,
    0,
    nibbles(block, 8 + 16 * part)
));
row!(Mxfp4, |block, _part| levels(
    FLOATS,
    FLOATS_OFFSET,
    nibbles(block, 1)
));

row!(Q2K, |block, part| {
    let weights = two_bits(block, 16, part);
    let scale = |half: usize| vdupq_n_u8(block[2 * part + half] & 15);
    each!(weights[0], |half| vmulq_u8(weights[half], scale(half)))
});
row!(Q3K, |block, part| {
    let low = two_bits(block, 32, part);
    let bit = vdupq_n_u8(1 << part);
    let high = two(block, 0).map(|x| vandq_u8(vtstq_u8(x, bit), vdupq_n_u8(4)));
    each!(low[0], |half| vorrq_u8(low[half], high[half]))
});
row!(Tq2_0, |block, part| two_bits(block, 0, part));
row!(Tq1_0, |block, part| eights(ternary_digits(block, part)));

/// Two bits of 32 bytes that four blocks of columns share.
#[target_feature(enable = "neon")]
#[inline]
fn two_bits(block: &[u8], at: usize, part: usize) -> Weights {
    let down = vdupq_n_s8(-2 * (part as i8 % 4));
    let shared = two(block, at + 32 * (part / 4));
    shared.map(|x| vandq_u8(vshlq_u8(x, down), vdupq_n_u8(3)))
}

row!(Iq3S, |block, part| eights(weights::<Iq3S>(block, part)));
row!(Iq3Xxs, |block, part| eights(weights::<Iq3Xxs>(block, part)));
row!(Iq2S, |block, part| eights(weights::<Iq2S>(block, part)));
row!(Iq2Xs, |block, part| eights(weights::<Iq2Xs>(block, part)));
row!(Iq2Xxs, |block, part| eights(weights::<Iq2Xxs>(block, part)));

/// Bytes, eight to a word.
#[target_feature(enable = "neon")]
#[inline]
fn eights(words: [u64; 4]) -> Weights {
    // SAFETY: 2.
    let two = |half: &[u64; 2]| unsafe { vreinterpretq_u8_u64(vld1q_u64(half.as_ptr())) };
    let [first, second] = words.as_chunks::<2>().0 else {
        unreachable!("four words")
    };
    [two(first), two(second)]
}

/// What the nibbles name in a table, `offset` larger.
#[target_feature(enable = "neon")]
#[inline]
fn levels(table: [i8; 16], offset: u8, nibbles: Weights) -> Weights {
    let table = sixteen(&as_bytes(table, offset), 0);
    nibbles.map(|nibbles| vqtbl1q_u8(table, nibbles))
}

/// Sixteen bytes at `at`.
#[target_feature(enable = "neon")]
#[inline]
fn sixteen(block: &[u8], at: usize) -> uint8x16_t {
    let bytes: &[u8; 16] = block[at..].first_chunk().expect("inside the block");
    // SAFETY: 2.
    unsafe { vld1q_u8(bytes.as_ptr()) }
}

/// Thirty-two bytes at `at`.
#[target_feature(enable = "neon")]
#[inline]
fn two(block: &[u8], at: usize) -> Weights {
    [sixteen(block, at), sixteen(block, at + 16)]
}

/// The low nibbles of sixteen bytes at `at`, then the high ones.
#[target_feature(enable = "neon")]
#[inline]
fn nibbles(block: &[u8], at: usize) -> Weights {
    let both = sixteen(block, at);
    [vandq_u8(both, vdupq_n_u8(15)), vshrq_n_u8::<4>(both)]
}

/// The low nibbles of 32 bytes, or the high ones.
#[target_feature(enable = "neon")]
#[inline]
fn k_nibble(both: Weights, high: usize) -> Weights {
    match high {
        0 => both.map(|x| vandq_u8(x, vdupq_n_u8(15))),
        _ => both.map(|x| vshrq_n_u8::<4>(x)),
    }
}

/// The nibbles of a sub-block, from 32 bytes that two share.
#[target_feature(enable = "neon")]
#[inline]
fn k_nibbles(block: &[u8], at: usize, part: usize) -> Weights {
    k_nibble(two(block, at + 32 * (part / 2)), part % 2)
}

/// All ones in the bytes whose bit, of the 32 at `at`, is set.
#[target_feature(enable = "neon")]
#[inline]
fn bits(block: &[u8], at: usize) -> Weights {
    const BYTE: [u8; 16] = [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1];
    const BIT: u64 = 0x8040_2010_0804_0201;
    let bits: &[u8; 4] = block[at..].first_chunk().expect("inside the block");
    let all = vreinterpretq_u8_u32(vdupq_n_u32(u32::from_le_bytes(*bits)));
    let bit = vreinterpretq_u8_u64(vdupq_n_u64(BIT));
    let byte = sixteen(&BYTE, 0);
    [byte, vaddq_u8(byte, vdupq_n_u8(2))].map(|byte| vtstq_u8(vqtbl1q_u8(all, byte), bit))
}

/// Sets bit 4 of the weights that `set` is all ones for.
#[target_feature(enable = "neon")]
#[inline]
fn with_fifth(weights: Weights, set: Weights) -> Weights {
    let fifth = |i: usize| vorrq_u8(weights[i], vandq_u8(set[i], vdupq_n_u8(16)));
    [fifth(0), fifth(1)]
}

/// What rows are multiplied with: 32 values, and what the sums of the first and of the last sixteen start
/// with, in any lane, because the lanes of a row are added in the end.
struct Values {
    q: [int8x16_t; 2],
    starts: [int32x4_t; 2],
}

impl Values {
    #[inline(always)]
    fn of<D: Row>(x: &ActivationRow<'_>, at: usize) -> Self {
        let lacking: [i32; 2] = each!(0, |half| -i32::from(D::OFFSET) * x.half_sums[half][at]);
        let starts = match D::Extra::EXTRA {
            Extra::SecondScale => lacking,
            _ => [lacking[0] + lacking[1], 0],
        };
        let words = x.q[at].as_chunks::<4>().0;
        // SAFETY: 1, 2.
        unsafe {
            let zero = vdupq_n_s32(0);
            Self {
                q: [0, 1].map(|half| vreinterpretq_s8_u32(vld1q_u32(words[half].as_ptr()))),
                starts: starts.map(|start| vsetq_lane_s32::<0>(start, zero)),
            }
        }
    }
}

/// Products of four rows and 32 columns, each row's in a lane: all of them, or the first half and the
/// second one where they have scales of their own.
#[inline(always)]
fn four<S: Simd, D: Row>(
    s: S,
    block: &Tile<'_>,
    first: usize,
    part: usize,
    x: &Values,
) -> [uint32x4_t; 2] {
    let mut sums = [x.starts; 4];
    for r in 0..4 {
        let weights = D::weights(block.row(first + r), part);
        for half in 0..2 {
            // SAFETY: 1.
            let weights = unsafe { vreinterpretq_s8_u8(weights[half]) };
            // Both halves are one sum where there is one scale.
            let to = if D::Extra::EXTRA == Extra::SecondScale {
                half
            } else {
                0
            };
            sums[r][to] = s.dot_sixteen(sums[r][to], weights, x.q[half]);
        }
    }
    // SAFETY: 1.
    [0, 1].map(|half| unsafe { sum_integers(each!(x.starts[0], |r| sums[r][half])) })
}

/// [`four`], of sixteen rows.
#[inline(always)]
fn dots<S: Simd, D: Row>(s: S, block: &Tile<'_>, part: usize, x: &Values) -> [S::U; 2] {
    let quarters = [
        four::<S, D>(s, block, 0, part, x),
        four::<S, D>(s, block, 4, part, x),
        four::<S, D>(s, block, 8, part, x),
        four::<S, D>(s, block, 12, part, x),
    ];
    each!(s.u_splat(0), |half| {
        let mut lanes = [0; LANES];
        for (four, quarter) in lanes.as_chunks_mut::<4>().0.iter_mut().zip(&quarters) {
            // SAFETY: 1, 2.
            unsafe { vst1q_u32(four.as_mut_ptr(), quarter[half]) };
        }
        s.u_load(&lanes)
    })
}

/// A file block of sixteen rows.
struct Place<'a, S: Simd, D: Row> {
    tile: &'a Tile<'a>,
    index: usize,
    block: Tile<'a>,
    header: D::Header<S>,
}

impl<S: Simd, D: Row> Place<'_, S, D> {
    /// Adds the products of the `part`-th 32 columns.
    #[inline(always)]
    fn add(&self, s: S, part: usize, x: &ActivationRow<'_>, sums: S::F) -> S::F {
        let at = self.index * parts::<D>() + part;
        let [all, second] = dots::<S, D>(s, &self.block, part, &Values::of::<D>(x, at));
        let [scale, extra, second_minimum] =
            D::scales(s, self.tile, self.index, part, &self.header);
        let unit = s.splat(x.scale[at]);
        let sums = s.dot_end(all, scale, unit, sums);
        match D::Extra::EXTRA {
            Extra::Nothing => sums,
            Extra::SecondScale => s.dot_end(second, extra, unit, sums),
            Extra::Minimum => s.fused(extra, s.splat(x.scaled_sum[at]), sums),
            Extra::TwoMinima => {
                let unit = |half: usize| s.splat(x.scale[at] * x.half_sums[half][at] as f32);
                let sums = s.fused(extra, unit(0), sums);
                s.fused(second_minimum, unit(1), sums)
            }
        }
    }
}

/// Writes the products of the rows from `first` on, as many as `out` holds, with one token.
pub(super) fn multiply<S: Simd>(
    s: S,
    weights: &Matrix<'_>,
    x: &ActivationRow<'_>,
    first: usize,
    out: &mut [f32],
) {
    let call = Call {
        weights,
        x,
        first,
        out,
    };
    with_format!(weights.dtype(), |D| s
        .vectorize(Rows::<D>(call, PhantomData)));
}

/// What [`multiply`] is given.
struct Call<'a> {
    weights: &'a Matrix<'a>,
    x: &'a ActivationRow<'a>,
    first: usize,
    out: &'a mut [f32],
}

/// [`multiply`] of one storage type.
struct Rows<'a, D>(Call<'a>, PhantomData<D>);

impl<D: Row> Kernel for Rows<'_, D> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Call {
            weights,
            x,
            mut first,
            mut out,
        } = self.0;
        let blocks = weights.cols() / D::DTYPE.block_len();
        while !out.is_empty() {
            let tile = Tile::new(weights, first);
            let mut sums = s.splat(0.0);
            for index in 0..blocks {
                let place = Place::<S, D> {
                    tile: &tile,
                    index,
                    block: file_block::<D>(&tile, index),
                    header: D::header(s, &tile, index),
                };
                // Two at a time, so that which nibbles are read is known when this is compiled.
                for part in (0..parts::<D>()).step_by(2) {
                    prefetch_next_rows::<S, D>(s, &tile, index, part);
                    sums = place.add(s, part, x, sums);
                    if parts::<D>() > 1 {
                        prefetch_next_rows::<S, D>(s, &tile, index, part + 1);
                        sums = place.add(s, part + 1, x, sums);
                    }
                }
            }
            let lanes = tile.lanes();
            let count = lanes.len().min(out.len());
            store(s, sums, out, &(lanes.start..lanes.start + count));
            out = &mut out[count..];
            first += count;
        }
    }
}
