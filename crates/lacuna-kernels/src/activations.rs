//! Activations, quantized once for all the matrices they are multiplied with.
//!
//! Each token's row is cut into blocks of 32 values; a block is 32 signed bytes and one f32 scale,
//! `max |x| / 127`. Tokens are stored in tiles of a few tokens, block by block, so that a kernel
//! reads a tile front to back; a single token may be stored as one array per field instead. Each
//! token-block also holds sums that correct for offsets in the weights, 52 bytes in all.
//!
//! A block with a value that is not finite gets a scale that is not finite, so that what is
//! computed from it is not finite either.
//!
//! # Safety
//! 1. A [`Plain`] type consists of `u32`, `i32` and `f32` without padding, so any bytes are a valid
//!    value.
//! 2. A cast checks that the bytes are aligned for it and a whole number of values.
#![expect(
    unsafe_code,
    reason = "caller-provided bytes hold the blocks; see # Safety"
)]

use std::ops::Range;

use crate::level::Level;
use crate::simd::{Kernel, Products, Registers, Simd, SingleToken, each};

/// Values per block.
pub(crate) const BLOCK: usize = 32;

/// The most tokens of a tile.
const WIDEST: usize = 8;

/// The most tokens that stream weights from the file layout where registers are many. More would
/// be read again for every sixteen rows, which a panel has more of.
const STREAMED: usize = 64;

/// Tokens of a tile that AMX multiplies.
pub(crate) const TILE: usize = 16;

/// The most tokens that vectors multiply where there is AMX: of fewer, packing weights for tiles takes what tiles save.
const BESIDE_TILES: usize = 32;

/// Bytes per token and block.
const BLOCK_BYTES: usize = size_of::<ActivationBlock<1>>();

/// Below this a block counts as zero; its reciprocal would overflow.
pub(crate) const SMALLEST: f32 = 1e-35;

/// One block of `N` tokens.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ActivationBlock<const N: usize> {
    /// The values, four to a word.
    pub(crate) q: [[u32; 8]; N],
    /// What one unit is worth.
    pub(crate) scale: [f32; N],
    /// `scale` times the sum of the values: the factor of a weight block's minimum.
    pub(crate) scaled_sum: [f32; N],
    /// [`Simd::START`] less 128 times the sum of the values: the start of a sum with weights that
    /// are 128 too large, over all values ...
    pub(crate) start: [i32; N],
    /// ... and over the first and the second half.
    pub(crate) start_halves: [[i32; 2]; N],
}

impl<const N: usize> ActivationBlock<N> {
    /// A block of zeros, to be filled.
    pub(crate) const ZERO: Self = Self {
        q: [[0; 8]; N],
        scale: [0.0; N],
        scaled_sum: [0.0; N],
        start: [0; N],
        start_halves: [[0; 2]; N],
    };
}

/// The blocks of a single token, one array per field; see [`ActivationBlock`].
#[derive(Clone, Copy)]
pub(crate) struct ActivationRow<'a> {
    pub(crate) q: &'a [[u32; 8]],
    pub(crate) scale: &'a [f32],
    pub(crate) scaled_sum: &'a [f32],
    /// Sums of the values of the first and of the second half.
    pub(crate) half_sums: [&'a [i32]; 2],
}

/// The most tokens that stream weights from the file layout sixteen rows at a time.
pub(crate) const fn streamed<S: Simd>() -> usize {
    match (S::REGISTERS, S::SINGLE_TOKEN) {
        (Registers::Many, _) => STREAMED,
        (Registers::Few, SingleToken::Sixteen) => 1,
        (Registers::Few, SingleToken::Eight | SingleToken::EachRow) => 0,
    }
}

/// The most tokens that are multiplied one by one, with rows as they lie in memory, unpacked for each. Where registers are few,
/// more share panels, which take three times as long to pack as a token is multiplied; a little less where products are summed
/// in 32 bits.
pub(crate) const fn one_by_one<S: Simd>() -> usize {
    match (S::REGISTERS, S::SINGLE_TOKEN, S::PRODUCTS) {
        (Registers::Few, SingleToken::Eight, Products::Quads) => 2,
        (Registers::Few, SingleToken::Eight, _) => 3,
        _ => 1,
    }
}

/// Few tokens are stored in whole tiles: of 8, then one of 1, 2, 4 or 8.
const fn padded(tokens: usize) -> usize {
    match tokens % WIDEST {
        rest if rest > 0 && tokens <= STREAMED => tokens - rest + rest.next_power_of_two(),
        _ => tokens,
    }
}

/// How a level cuts tokens into tiles.
#[derive(Clone, Copy)]
pub(crate) struct Tiling {
    /// Tokens that its vectors multiply at a time, of many.
    pub(crate) widest: usize,
    /// Up to so many are stored one by one.
    pub(crate) one_by_one: usize,
    /// Up to so many a tile has as many as registers hold at once.
    pub(crate) streamed: usize,
    /// Whether it multiplies tiles of [`TILE`].
    pub(crate) amx: bool,
}

impl Tiling {
    pub(crate) fn of<S: Simd>(s: S) -> Self {
        #[cfg(target_arch = "x86_64")]
        let amx = s.amx().is_some();
        #[cfg(not(target_arch = "x86_64"))]
        let (amx, _) = (false, s);
        Self {
            widest: S::TOKENS,
            one_by_one: one_by_one::<S>(),
            streamed: streamed::<S>(),
            amx,
        }
    }

    /// Tokens per tile.
    pub(crate) fn tile(self, tokens: usize) -> usize {
        match tokens {
            one if one <= self.one_by_one => 1,
            many if self.amx && many > BESIDE_TILES => TILE,
            few if few <= self.streamed => padded(few).min(WIDEST),
            _ => self.widest,
        }
    }

    /// Tokens that there is storage for: those of a small batch fill their tiles.
    pub(crate) fn stored(self, tokens: usize) -> usize {
        match self.tile(tokens) {
            TILE => tokens.next_multiple_of(TILE),
            1 => tokens,
            _ if tokens <= self.streamed => padded(tokens),
            _ => tokens,
        }
    }

    /// Whether rows of quantized matrices are read once for all tokens.
    pub(crate) fn streams(self, tokens: usize) -> bool {
        tokens <= self.streamed.max(self.one_by_one) && self.tile(tokens) != TILE
    }
}

/// What bytes may be cast to.
///
/// # Safety
/// 1 holds.
unsafe trait Plain {}

// SAFETY: 1: a number, or an array of numbers.
unsafe impl Plain for u32 {}
// SAFETY: 1: a number, or an array of numbers.
unsafe impl Plain for i32 {}
// SAFETY: 1: a number, or an array of numbers.
unsafe impl Plain for f32 {}
// SAFETY: 1: a number, or an array of numbers.
unsafe impl Plain for [u32; 8] {}
// SAFETY: 1: `repr(C)` arrays of four-byte numbers, which leave no gaps.
unsafe impl<const N: usize> Plain for ActivationBlock<N> {}

fn cast<T: Plain>(bytes: &[u8]) -> &[T] {
    // SAFETY: 1; checked by 2.
    let (head, values, tail) = unsafe { bytes.align_to::<T>() };
    assert!(
        head.is_empty() && tail.is_empty(),
        "the storage is misaligned"
    );
    values
}

fn cast_mut<T: Plain>(bytes: &mut [u8]) -> &mut [T] {
    // SAFETY: 1; checked by 2.
    let (head, values, tail) = unsafe { bytes.align_to_mut::<T>() };
    assert!(
        head.is_empty() && tail.is_empty(),
        "the storage is misaligned"
    );
    values
}

/// Rows of values, one for each token.
#[derive(Clone, Copy)]
pub(crate) struct Input<'a> {
    pub(crate) x: &'a [f32],
    pub(crate) cols: usize,
    /// Which row of `x` each token has; its own number where there are none.
    pub(crate) rows: Option<&'a [u32]>,
}

impl<'a> Input<'a> {
    /// The row of a token.
    #[inline]
    pub(crate) fn row(&self, token: usize) -> &'a [f32] {
        let row = self.rows.map_or(token, |rows| rows[token] as usize);
        &self.x[row * self.cols..][..self.cols]
    }
}

/// Activations of some tokens, ready to be multiplied with matrices; see
/// [`Cpu::activations`](crate::Cpu::activations).
pub struct Activations<'a> {
    pub(crate) input: Input<'a>,
    pub(crate) tokens: usize,
    /// Tokens per tile, all but the last.
    pub(crate) tile: usize,
    /// The level they were prepared on.
    pub(crate) level: Level,
    /// Tiles of `ActivationBlock`s, or nothing.
    pub(crate) quantized: &'a [u8],
}

impl<'a> Activations<'a> {
    /// Bytes of storage that [`Cpu::activations`](crate::Cpu::activations) takes to quantize
    /// `tokens` rows of `cols` values, or `None` when they cannot be quantized because `cols` is
    /// no multiple of 32 (no quantized matrix has such rows) or the size overflows.
    pub const fn storage_bytes(tokens: usize, cols: usize) -> Option<usize> {
        if !cols.is_multiple_of(BLOCK) {
            return None;
        }
        // Of any level.
        let stored = match tokens > BESIDE_TILES {
            true => tokens.checked_next_multiple_of(TILE),
            false => Some(padded(tokens)),
        };
        let Some(stored) = stored else { return None };
        match stored.checked_mul(cols / BLOCK) {
            Some(blocks) => blocks.checked_mul(BLOCK_BYTES),
            None => None,
        }
    }

    /// Number of rows.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Values per row.
    pub fn cols(&self) -> usize {
        self.input.cols
    }

    /// A row.
    ///
    /// # Panics
    /// When there is no such token.
    pub(crate) fn row(&self, token: usize) -> &'a [f32] {
        self.input.row(token)
    }

    /// Whether they are cut for tiles that AMX multiplies.
    pub(crate) fn are_of_tiles(&self) -> bool {
        self.tile == TILE
    }

    /// The tiles of a few tokens: where each starts, and how many tokens it has room for.
    pub(crate) fn padded_tiles(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let (tokens, tile) = (self.tokens, self.tile);
        let starts = (0..tokens).step_by(tile);
        starts.map(move |start| (start, padded(tokens - start).min(tile)))
    }

    /// Blocks of the tile that starts at `token` and has room for `N` tokens.
    ///
    /// # Panics
    /// When the activations are not quantized.
    #[inline]
    pub(crate) fn tile<const N: usize>(&self, token: usize) -> &'a [ActivationBlock<N>] {
        assert!(
            !self.quantized.is_empty(),
            "activations for a quantized matrix need storage"
        );
        debug_assert!(token.is_multiple_of(self.tile));
        let per_token = self.cols() / BLOCK * BLOCK_BYTES;
        cast(&self.quantized[token * per_token..][..N * per_token])
    }

    /// The blocks of a token, of a level that has a way of its own for one.
    ///
    /// # Panics
    /// When tokens are not stored one by one, or not quantized, or there is no such token.
    pub(crate) fn single(&self, token: usize) -> ActivationRow<'a> {
        assert!(
            self.tile == 1 && token < self.tokens && !self.quantized.is_empty(),
            "a token that is quantized and stored alone"
        );
        let blocks = self.cols() / BLOCK;
        let bytes = &self.quantized[token * blocks * BLOCK_BYTES..][..blocks * BLOCK_BYTES];
        let (q, rest) = bytes.split_at(BLOCK * blocks);
        let mut fields = rest.chunks_exact(4 * blocks);
        let mut next = || fields.next().expect("a token has all its fields");
        ActivationRow {
            q: cast(q),
            scale: cast(next()),
            scaled_sum: cast(next()),
            half_sums: [cast(next()), cast(next())],
        }
    }
}

/// Quantizes the rows of one tile into its bytes.
pub(crate) struct Quantize<'a> {
    pub(crate) input: Input<'a>,
    /// At most `tile` of them.
    pub(crate) tokens: Range<usize>,
    /// Tokens that the tile has room for.
    pub(crate) tile: usize,
    pub(crate) out: &'a mut [u8],
}

impl Kernel for Quantize<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.tile {
            1 => self.tile::<S, 1>(s),
            2 => self.tile::<S, 2>(s),
            3 => self.tile::<S, 3>(s),
            4 => self.tile::<S, 4>(s),
            5 => self.tile::<S, 5>(s),
            6 => self.tile::<S, 6>(s),
            7 => self.tile::<S, 7>(s),
            8 => self.tile::<S, 8>(s),
            TILE => self.tile::<S, TILE>(s),
            tokens => unreachable!("a tile of {tokens} tokens"),
        }
    }
}

impl Quantize<'_> {
    #[inline(always)]
    fn tile<S: Simd, const N: usize>(self, s: S) {
        let blocks = cast_mut::<ActivationBlock<N>>(self.out);
        for (token, row) in self.tokens.enumerate() {
            let rows = self.input.row(row).as_chunks::<BLOCK>().0;
            assert_eq!(
                rows.len(),
                blocks.len(),
                "the storage is not that of the tile"
            );
            for (x, block) in rows.iter().zip(blocks.iter_mut()) {
                quantize_block(s, x).enter::<S, N>(token, block);
            }
        }
    }
}

/// Quantizes a single row into its bytes, as the level multiplies it.
pub(crate) struct QuantizeSingle<'a> {
    pub(crate) x: &'a [f32],
    pub(crate) out: &'a mut [u8],
}

impl Kernel for QuantizeSingle<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { x, out } = self;
        if const { matches!(S::SINGLE_TOKEN, SingleToken::Sixteen) } {
            let input = Input {
                x,
                cols: x.len(),
                rows: None,
            };
            let tokens = 0..1;
            return Quantize {
                input,
                tokens,
                tile: 1,
                out,
            }
            .run(s);
        }
        let blocks = x.len() / BLOCK;
        let (q, rest) = out.split_at_mut(BLOCK * blocks);
        let q = cast_mut::<[u32; 8]>(q);
        let (scale, rest) = rest.split_at_mut(4 * blocks);
        let (scaled_sum, rest) = rest.split_at_mut(4 * blocks);
        let (scale, scaled_sum) = (cast_mut::<f32>(scale), cast_mut::<f32>(scaled_sum));
        let (first, second) = rest.split_at_mut(4 * blocks);
        let (first, second) = (cast_mut::<i32>(first), cast_mut::<i32>(second));
        for (index, x) in x.as_chunks::<BLOCK>().0.iter().enumerate() {
            let quantized = quantize_block(s, x);
            q[index] = quantized.q;
            scale[index] = quantized.scale;
            scaled_sum[index] = quantized.scaled_sum;
            [first[index], second[index]] = quantized.half_sums;
        }
    }
}

/// One block of one token.
pub(crate) struct QuantizedBlock {
    pub(crate) q: [u32; 8],
    pub(crate) scale: f32,
    scaled_sum: f32,
    half_sums: [i32; 2],
}

impl QuantizedBlock {
    /// Makes it the block of `token` in a block of several tokens.
    #[inline(always)]
    pub(crate) fn enter<S: Simd, const N: usize>(
        self,
        token: usize,
        block: &mut ActivationBlock<N>,
    ) {
        let start = |sum: i32| S::START - 128 * sum;
        block.q[token] = self.q;
        block.scale[token] = self.scale;
        block.scaled_sum[token] = self.scaled_sum;
        block.start[token] = start(self.half_sums[0] + self.half_sums[1]);
        block.start_halves[token] = self.half_sums.map(start);
    }
}

/// Quantizes a block; to the same at every level.
#[inline(always)]
pub(crate) fn quantize_block<S: Simd>(s: S, x: &[f32; BLOCK]) -> QuantizedBlock {
    let [first, second] = each!(s.splat(0.0), |i| s.load(&x.as_chunks().0[i]));
    let largest = s.largest([first, second]);
    let [scale, inverse] = if largest < SMALLEST {
        [0.0; 2]
    } else {
        [largest / 127.0, 127.0 / largest]
    };
    let inverse = s.splat(inverse);
    let (q, half_sums) = s.to_bytes([s.mul(first, inverse), s.mul(second, inverse)]);
    QuantizedBlock {
        q,
        scale,
        scaled_sum: scale * (half_sums[0] + half_sums[1]) as f32,
        half_sums,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_as_large_as_documented() {
        assert_eq!(BLOCK_BYTES, 52);
        assert_eq!(size_of::<ActivationBlock<6>>(), 312);
        assert_eq!(Activations::storage_bytes(9, 64), Some(936));
        assert_eq!(Activations::storage_bytes(3, 64), Some(416), "a tile of 4");
        assert_eq!(
            Activations::storage_bytes(11, 64),
            Some(12 * 104),
            "8 and 4"
        );
        assert_eq!(Activations::storage_bytes(17, 64), Some(17 * 104));
        assert_eq!(
            Activations::storage_bytes(33, 64),
            Some(48 * 104),
            "three of 16"
        );
        assert_eq!(Activations::storage_bytes(3, 60), None);
    }
}
