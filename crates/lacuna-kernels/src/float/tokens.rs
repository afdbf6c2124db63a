//! Groups of tokens in the order in which tiles multiply them.
//!
//! Over a block of columns, a tile of `T` tokens is stored as eight columns of each token, then the
//! next eight of each, so that a kernel reads it front to back.

use std::ops::Range;

use super::tile::{MOST_ROWS, MOST_TOKENS};
use super::{BLOCK, HALF};
use crate::activations::Activations;
use crate::grid::Block;
use crate::simd::{Kernel, Registers, Simd, each, padded};

/// Tokens of the largest group, a multiple of every level's tile: what they have in a block of columns
/// fills about a fifth of a second-level cache of 1 MiB, and weights are read once for all of them.
pub(crate) const GROUP_TOKENS: usize = 96;

/// f32 elements of the largest group.
pub(super) const GROUP_LEN: usize = GROUP_TOKENS * BLOCK;

/// Tokens that are multiplied together.
#[derive(Clone, Copy)]
pub(super) struct TokenTile {
    /// The first one.
    pub(super) token: usize,
    /// How many there are, at most [`MOST_TOKENS`].
    pub(super) width: usize,
    /// Where their columns lie in the group.
    start: usize,
}

/// Calls with the width of a tile of level `$S` as a constant; widths that the level does not have are
/// not compiled.
macro_rules! with_width {
    ($S:ident, $tile:expr, $T:ident => $call:expr) => {
        with_width!($S, $tile.width, $T => $call, 1 2 3 4 5 6 7 8 9 10 11 12)
    };
    ($S:ident, $width:expr, $T:ident => $call:expr, $($value:literal)*) => {
        match $width {
            $($value if const { $value <= crate::float::tokens::widest::<$S>() } => {
                const $T: usize = $value;
                $call
            })*
            width => unreachable!("a tile of {width} tokens"),
        }
    };
}
pub(super) use with_width;

/// Tokens of the widest tile of a level.
pub(super) const fn widest<S: Simd>() -> usize {
    match S::REGISTERS {
        Registers::Few => MOST_TOKENS / 2,
        Registers::Many => MOST_TOKENS,
    }
}

/// Cuts tokens into tiles of about the same width.
pub(super) fn tiles<S: Simd>(tokens: Range<usize>) -> impl Iterator<Item = TokenTile> + Clone {
    let widest = widest::<S>();
    let first = tokens.start;
    let tile = move |token: usize| {
        let left = tokens.end - token;
        let width = left.div_ceil(left.div_ceil(widest).max(1));
        let start = (token - first) * BLOCK;
        (width > 0).then_some(TokenTile {
            token,
            width,
            start,
        })
    };
    std::iter::successors(tile(first), move |last| tile(last.token + last.width))
}

/// Brings a group of tokens, at most [`GROUP_TOKENS`], into the order of tiles.
pub(super) fn pack<S: Simd>(
    s: S,
    x: &Activations<'_>,
    tokens: Range<usize>,
    cols: &Range<usize>,
    group: &mut [f32],
) {
    for tile in tiles::<S>(tokens) {
        let len = tile.width * cols.len().next_multiple_of(HALF);
        let out = &mut group[tile.start..][..len];
        with_width!(S, tile, T => s.vectorize(Pack::<T> {
            x: std::array::from_fn(|t| &x.row(tile.token + t)[cols.clone()]),
            out: out.as_chunks_mut().0.as_chunks_mut().0,
        }));
    }
}

impl TokenTile {
    /// The tile's columns in its group, eight at a time.
    pub(super) fn columns<'a, const T: usize>(
        &self,
        group: &'a [f32],
        cols: &Range<usize>,
    ) -> &'a [[[f32; HALF]; T]] {
        let len = T * cols.len().next_multiple_of(HALF);
        group[self.start..][..len].as_chunks().0.as_chunks().0
    }

    /// Adds the sums of a block of columns to the rows at `place` of the output; the first block's
    /// start them.
    #[inline(always)]
    pub(super) fn add<const T: usize>(
        &self,
        dots: &[[f32; MOST_ROWS]; T],
        out: &mut Block<'_, f32>,
        place: Range<usize>,
        first_block: bool,
    ) {
        for (t, dots) in dots.iter().enumerate() {
            let out = &mut out.row(self.token + t)[place.clone()];
            // Whole tiles of constant length, as one vector.
            if let Some(out) = out.as_mut_array::<MOST_ROWS>() {
                for r in 0..MOST_ROWS {
                    out[r] = if first_block {
                        dots[r]
                    } else {
                        out[r] + dots[r]
                    };
                }
            } else {
                for (out, dot) in out.iter_mut().zip(dots) {
                    *out = if first_block { *dot } else { *out + dot };
                }
            }
        }
    }
}

/// Copies the columns of `T` tokens to their places in a tile; columns that do not exist are zeros.
struct Pack<'a, const T: usize> {
    x: [&'a [f32]; T],
    out: &'a mut [[[f32; HALF]; T]],
}

impl<const T: usize> Kernel for Pack<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let chunks = self.x[0].len() / HALF;
        let x: [&[[f32; HALF]]; T] = each!(&[][..], |t| &self.x[t].as_chunks().0[..chunks]);
        let (out, tail) = self.out.split_at_mut(chunks);
        for (chunk, out) in out.iter_mut().enumerate() {
            for t in 0..T {
                out[t] = x[t][chunk];
            }
        }
        for out in tail {
            for t in 0..T {
                out[t] = padded(self.x[t].as_chunks::<HALF>().1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::portable::Portable;

    #[test]
    fn tiles_cover_the_tokens_in_order_and_are_about_as_wide() {
        for count in 1..=GROUP_TOKENS {
            let tiles: Vec<TokenTile> = tiles::<Portable>(5..5 + count).collect();
            let mut token = 5;
            for tile in &tiles {
                assert_eq!((tile.token, tile.start), (token, (token - 5) * BLOCK));
                token += tile.width;
            }
            assert_eq!(token, 5 + count);
            let widths = tiles.iter().map(|tile| tile.width);
            assert!(widths.clone().max() <= Some(MOST_TOKENS / 2));
            assert!(widths.clone().max() <= widths.min().map(|least| least + 1));
        }
    }
}
