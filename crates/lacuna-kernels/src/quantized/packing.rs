//! How packed blocks lie in a panel, and their integer products.
//!
//! What is fastest depends on the level and on how large weights are. Where an instruction adds
//! products of bytes in 32 bits, weights are packed as bytes ([`Bytes`], or [`Squares`] where it takes
//! two tokens at once, or `Signed` where it takes tiles of them). Elsewhere products of two bytes are
//! added in 16 bits first: small weights stay bytes and several products are added before they are
//! widened ([`Narrow`]), and weights of 8 bits are packed as 16-bit numbers ([`Wide`]). The sums are
//! the same integers.

use std::hint::black_box;
use std::ops::Range;

use super::panel::PackedBlock;
use crate::activations::ActivationBlock;
use crate::simd::{Line, Simd, each};

/// The weights of a block, of which a buffer holds many.
pub(super) trait Lines: Copy + 'static {
    /// The whole blocks of a buffer.
    fn blocks(lines: &[Line]) -> &[Self];
    fn blocks_mut(lines: &mut [Line]) -> &mut [Self];
}

impl<const N: usize> Lines for [Line; N] {
    #[inline(always)]
    fn blocks(lines: &[Line]) -> &[Self] {
        lines.as_chunks().0
    }

    #[inline(always)]
    fn blocks_mut(lines: &mut [Line]) -> &mut [Self] {
        lines.as_chunks_mut().0
    }
}

/// Integer sums of `R` tiles of sixteen rows and `T` tokens.
pub(super) type Dots<S, const R: usize, const T: usize> = [[<S as Simd>::U; T]; R];

/// A kind of packed weights.
pub(super) trait Packing: 'static {
    /// Thirty-two columns of sixteen rows.
    type Words: Lines;

    /// Blocks of columns per panel, a multiple of what any file block holds.
    const PANEL_BLOCKS: usize;

    /// Packs the weights of a block, whose bytes are `offset` too large.
    fn pack<S: Simd>(s: S, block: &PackedBlock<S>, offset: u8, out: &mut Self::Words);
}

/// Packed weights that are multiplied in vectors.
pub(super) trait Vectors: Packing {
    /// Sums over the columns of the words in `range`, of eight. `start` is what [`ActivationBlock`]
    /// has for these columns.
    fn dots<S: Simd, const R: usize, const T: usize>(
        s: S,
        weights: &[&Self::Words; R],
        x: &ActivationBlock<T>,
        start: &[i32; T],
        range: Range<usize>,
    ) -> Dots<S, R, T>;
}

/// Bytes, multiplied by [`Simd::dot4`].
pub(super) struct Bytes;

impl Packing for Bytes {
    type Words = [Line; 8];
    // Long panels stream from the second-level cache. Shorter ones would fit the first, but write and
    // read the sums more often, which costs more.
    const PANEL_BLOCKS: usize = 96;

    #[inline(always)]
    fn pack<S: Simd>(s: S, block: &PackedBlock<S>, offset: u8, out: &mut Self::Words) {
        for g in 0..8 {
            let word = s.weights(block.words[g], offset.wrapping_neg() as i8);
            s.u_store(word, &mut out[g].0);
        }
    }
}

impl Vectors for Bytes {
    #[inline(always)]
    fn dots<S: Simd, const R: usize, const T: usize>(
        s: S,
        weights: &[&Self::Words; R],
        x: &ActivationBlock<T>,
        start: &[i32; T],
        range: Range<usize>,
    ) -> Dots<S, R, T> {
        let start: [_; T] = each!(s.u_splat(0), |t| s
            .dot_start(s.u_splat(start[t].cast_unsigned())));
        let mut sums = [start; R];
        for g in range {
            for r in 0..R {
                let word = s.u_load(&weights[r][g].0);
                for t in 0..T {
                    sums[r][t] = s.dot4(sums[r][t], word, s.u_splat(x.q[t][g]));
                }
            }
        }
        sums
    }
}

/// Bytes, eight columns of a row side by side, multiplied by [`Simd::dot_squares`]: line `2 * g` holds words
/// `2 * g` and `2 * g + 1` of the first eight rows, the next one of the others.
pub(super) struct Squares;

impl Packing for Squares {
    type Words = [Line; 8];
    const PANEL_BLOCKS: usize = Bytes::PANEL_BLOCKS;

    #[inline(always)]
    fn pack<S: Simd>(s: S, block: &PackedBlock<S>, offset: u8, out: &mut Self::Words) {
        let word = |g: usize| s.weights(block.words[g], offset.wrapping_neg() as i8);
        for g in (0..8).step_by(2) {
            let [first, second] = s.zip(word(g), word(g + 1));
            s.u_store(first, &mut out[g].0);
            s.u_store(second, &mut out[g + 1].0);
        }
    }
}

impl Vectors for Squares {
    #[inline(always)]
    fn dots<S: Simd, const R: usize, const T: usize>(
        s: S,
        weights: &[&Self::Words; R],
        x: &ActivationBlock<T>,
        _: &[i32; T],
        range: Range<usize>,
    ) -> Dots<S, R, T> {
        debug_assert_eq!(S::START, 0, "sums start at 0");
        // Of tokens `t` and `t + 1`, where `t` is even: of eight rows, and of eight more. The last token
        // of an odd number is multiplied twice.
        let mut squares = [[[s.u_splat(0); 2]; T]; R];
        for g in range.step_by(2) {
            for t in (0..T).step_by(2) {
                let (first, second) = (&x.q[t], &x.q[(t + 1).min(T - 1)]);
                let values = [first[g], first[g + 1], second[g], second[g + 1]];
                for r in 0..R {
                    for half in 0..2 {
                        let word = s.u_load(&weights[r][g + half].0);
                        let sums = &mut squares[r][t][half];
                        *sums = s.dot_squares(*sums, word, values);
                    }
                }
            }
        }
        let mut sums = [[s.u_splat(0); T]; R];
        for r in 0..R {
            for t in (0..T).step_by(2) {
                let [even, odd] = s.unzip(squares[r][t][0], squares[r][t][1]);
                sums[r][t] = even;
                if t + 1 < T {
                    sums[r][t + 1] = odd;
                }
            }
        }
        sums
    }
}

/// Signed bytes, multiplied by tiles of them: see [`super::tiles`].
#[cfg(target_arch = "x86_64")]
pub(super) struct Signed;

#[cfg(target_arch = "x86_64")]
impl Packing for Signed {
    type Words = [Line; 8];
    const PANEL_BLOCKS: usize = Bytes::PANEL_BLOCKS;

    #[inline(always)]
    fn pack<S: Simd>(s: S, block: &PackedBlock<S>, offset: u8, out: &mut Self::Words) {
        // What the level adds to make bytes unsigned is taken off.
        let offset = offset.wrapping_neg() ^ 0x80;
        for g in 0..8 {
            s.u_store(s.weights(block.words[g], offset as i8), &mut out[g].0);
        }
    }
}

/// Signed bytes as 16-bit numbers: line `2 * g` holds bytes 0 and 1 of word `g`, the next one 2 and 3.
pub(super) struct Wide;

impl Packing for Wide {
    type Words = [Line; 16];
    // What fits the first-level cache beside the activations.
    const PANEL_BLOCKS: usize = 16;

    #[inline(always)]
    fn pack<S: Simd>(s: S, block: &PackedBlock<S>, offset: u8, out: &mut Self::Words) {
        debug_assert_eq!(offset, 0, "weights of 8 bits are signed");
        for g in 0..8 {
            let [first, second] = s.widen(block.words[g]);
            s.u_store(first, &mut out[2 * g].0);
            s.u_store(second, &mut out[2 * g + 1].0);
        }
    }
}

impl Vectors for Wide {
    #[inline(always)]
    fn dots<S: Simd, const R: usize, const T: usize>(
        s: S,
        weights: &[&Self::Words; R],
        x: &ActivationBlock<T>,
        _: &[i32; T],
        range: Range<usize>,
    ) -> Dots<S, R, T> {
        let x: [_; T] = each!([0; 16], |t| s.widen_all(&x.q[t]));
        // In memory, where a word is spread to all lanes by its load.
        let x = black_box(&x);
        let mut sums = [[s.u_splat(0); T]; R];
        for g in 2 * range.start..2 * range.end {
            for r in 0..R {
                let word = s.u_load(&weights[r][g].0);
                for t in 0..T {
                    sums[r][t] = s.dot2(sums[r][t], word, x[t][g]);
                }
            }
        }
        sums
    }
}

/// Unsigned bytes of `BITS` bits, `OFFSET` larger than the weights: the products of some words are
/// added in 16 bits.
pub(super) struct Narrow<const BITS: u32, const OFFSET: i32>;

impl<const BITS: u32, const OFFSET: i32> Narrow<BITS, OFFSET> {
    /// Words whose products of two columns cannot leave 16 bits together.
    const TOGETHER: usize = 1 << (7 - BITS);
    const _FITS: () = {
        let largest = ((1 << BITS) - 1) * 128;
        assert!(2 * Self::TOGETHER * largest <= 1 << 15);
    };
}

impl<const BITS: u32, const OFFSET: i32> Packing for Narrow<BITS, OFFSET> {
    type Words = [Line; 8];
    const PANEL_BLOCKS: usize = 16;

    #[inline(always)]
    fn pack<S: Simd>(s: S, block: &PackedBlock<S>, offset: u8, out: &mut Self::Words) {
        debug_assert_eq!(i32::from(offset), OFFSET, "the offset of the format");
        for g in 0..8 {
            s.u_store(block.words[g], &mut out[g].0);
        }
    }
}

impl<const BITS: u32, const OFFSET: i32> Vectors for Narrow<BITS, OFFSET> {
    #[inline(always)]
    fn dots<S: Simd, const R: usize, const T: usize>(
        s: S,
        weights: &[&Self::Words; R],
        x: &ActivationBlock<T>,
        start: &[i32; T],
        range: Range<usize>,
    ) -> Dots<S, R, T> {
        let () = Self::_FITS;
        debug_assert_eq!(S::START, 0, "the start is a multiple of 128");
        debug_assert!(range.len().is_multiple_of(Self::TOGETHER));
        // `start` corrects weights that are 128 too large.
        let start: [_; T] = each!(s.u_splat(0), |t| s
            .u_splat(((start[t] >> 7) * OFFSET) as u32));
        let mut sums = [start; R];
        for first in range.step_by(Self::TOGETHER) {
            let mut pairs = [[s.u_splat(0); T]; R];
            for g in first..first + Self::TOGETHER {
                for r in 0..R {
                    let word = s.u_load(&weights[r][g].0);
                    for t in 0..T {
                        pairs[r][t] = s.add_pairs(pairs[r][t], word, x.q[t][g]);
                    }
                }
            }
            for r in 0..R {
                for t in 0..T {
                    sums[r][t] = s.u_add(sums[r][t], s.sum_pairs(pairs[r][t]));
                }
            }
        }
        sums
    }
}
