//! Tokens in tiles, and in tasks of many.

use std::ops::Range;

use super::tile::RowSums;
use crate::grid::Block;

/// Tokens of a task at most: rows are converted once for all of them, and what they have in a block of columns
/// fills half of a second-level cache of 1 MiB.
pub(super) const MOST_TOKENS: usize = 258;

/// Tokens of the widest tile of many tokens where registers are many.
const TILE_TOKENS: usize = 6;

/// Tokens of a task of many: about as many in each, because threads would wait for the last ones of a few
/// that are larger than others; whole tiles.
pub(crate) fn band_tokens(tokens: usize) -> usize {
    let bands = tokens.div_ceil(MOST_TOKENS).max(1);
    tokens.div_ceil(bands).next_multiple_of(TILE_TOKENS)
}

/// Tokens that are multiplied together.
#[derive(Clone, Copy)]
pub(super) struct TokenTile {
    /// The first one.
    pub(super) token: usize,
    /// How many there are.
    pub(super) width: usize,
}

/// Calls with the width of a tile, `$widest` at most, as a constant; wider ones are not compiled.
macro_rules! with_width {
    ($widest:expr, $tile:expr, $T:ident => $call:expr) => {
        with_width!($widest, $tile.width, $T => $call, 1 2 3 4 5 6 7 8 9 10 11 12)
    };
    ($widest:expr, $width:expr, $T:ident => $call:expr, $($value:literal)*) => {
        match $width {
            $($value if const { $value <= $widest } => {
                const $T: usize = $value;
                $call
            })*
            width => unreachable!("a tile of {width} tokens"),
        }
    };
}
pub(super) use with_width;

/// Cuts tokens into tiles of about the same width, which is `widest` at most.
pub(super) fn tiles(
    tokens: Range<usize>,
    widest: usize,
) -> impl Iterator<Item = TokenTile> + Clone {
    let first = tokens.start;
    let tile = move |token: usize| {
        let left = tokens.end - token;
        let width = left.div_ceil(left.div_ceil(widest).max(1));
        (width > 0).then_some(TokenTile { token, width })
    };
    std::iter::successors(tile(first), move |last| tile(last.token + last.width))
}

impl TokenTile {
    /// Adds the sums of a block of columns to the rows at `place` of the output; the first block's
    /// start them.
    #[inline(always)]
    pub(super) fn add<const P: usize, const T: usize>(
        &self,
        dots: &[RowSums<P>; T],
        out: &mut Block<'_, f32>,
        place: Range<usize>,
        first_block: bool,
    ) {
        for (t, dots) in dots.iter().enumerate() {
            let out = &mut out.row(self.token + t)[place.clone()];
            // Whole tiles of constant length, as vectors.
            if let Some(out) = out.as_chunks_mut::<P>().0.as_mut_array::<2>() {
                for half in 0..2 {
                    for p in 0..P {
                        out[half][p] = if first_block {
                            dots[half][p]
                        } else {
                            out[half][p] + dots[half][p]
                        };
                    }
                }
            } else {
                for (out, dot) in out.iter_mut().zip(dots.as_flattened()) {
                    *out = if first_block { *dot } else { *out + dot };
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bands_are_whole_tiles_of_about_as_many_tokens() {
        for tokens in 1..10 * MOST_TOKENS {
            let band = band_tokens(tokens);
            assert!(band.is_multiple_of(TILE_TOKENS) && band <= MOST_TOKENS);
            let bands = tokens.div_ceil(band);
            assert!(bands <= tokens.div_ceil(MOST_TOKENS));
            // What rounding up to whole tiles leaves to the last one.
            assert!(tokens - (bands - 1) * band + TILE_TOKENS * bands > band);
        }
    }

    #[test]
    fn tiles_cover_the_tokens_in_order_and_are_about_as_wide() {
        for count in 1..=MOST_TOKENS {
            let tiles: Vec<TokenTile> = tiles(5..5 + count, 6).collect();
            let mut token = 5;
            for tile in &tiles {
                assert_eq!(tile.token, token);
                token += tile.width;
            }
            assert_eq!(token, 5 + count);
            let widths = tiles.iter().map(|tile| tile.width);
            assert!(widths.clone().max() <= Some(6));
            assert!(widths.clone().max() <= widths.min().map(|least| least + 1));
        }
    }
}
