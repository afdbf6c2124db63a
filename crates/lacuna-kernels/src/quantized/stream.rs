//! A few tokens: sixteen rows at a time are unpacked in registers and multiplied with all of them.

use std::marker::PhantomData;
use std::ops::Range;

use super::formats::Format;
use super::panel::{Sums, step};
use super::{parts, store};
use crate::activations::{ActivationBlock, Activations, streamed};
use crate::grid::Block;
use crate::matrix::Matrix;
use crate::simd::{Kernel, LANES, Simd};
use crate::tile::Tile;

/// Writes the products of the rows of `out` with at most [`streamed`] tokens.
pub(super) fn multiply<S: Simd, D: Format>(
    s: S,
    weights: &Matrix<'_>,
    x: &Activations<'_>,
    out: &mut Block<'_, f32>,
) {
    let (mut start, end) = (0, out.cols().len());
    while start < end {
        let tile = Tile::new(weights, out.cols().start + start);
        for (token, room) in x.padded_tiles() {
            let call = Call {
                tile: &tile,
                x,
                tokens: token..x.tokens().min(token + room),
                start,
                out,
            };
            match room {
                1 => call.run::<S, D, 1>(s),
                2 => call.run::<S, D, 2>(s),
                4 => call.run::<S, D, 4>(s),
                8 => call.run::<S, D, 8>(s),
                count => unreachable!("a tile of {count} tokens"),
            }
        }
        start += tile.lanes().len();
    }
}

/// Sixteen rows and a tile of tokens.
struct Call<'a, 'b> {
    tile: &'a Tile<'a>,
    x: &'a Activations<'a>,
    /// Those of the tile that exist.
    tokens: Range<usize>,
    /// Where the rows are in the block of the output.
    start: usize,
    out: &'a mut Block<'b, f32>,
}

impl Call<'_, '_> {
    fn run<S: Simd, D: Format, const T: usize>(self, s: S) {
        // A constant, so that kernels which a level does not have are not compiled.
        if const { T > streamed::<S>() } {
            unreachable!("{T} tokens, of at most {}", streamed::<S>());
        }
        s.vectorize(Stream::<D, T> {
            x: self.x.tile(self.tokens.start),
            call: self,
            format: PhantomData,
        });
    }
}

/// A [`Call`] whose tile has room for `T` tokens.
struct Stream<'a, 'b, D, const T: usize> {
    call: Call<'a, 'b>,
    x: &'a [ActivationBlock<T>],
    format: PhantomData<D>,
}

impl<D: Format, const T: usize> Kernel for Stream<'_, '_, D, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Call {
            tile,
            tokens,
            start,
            out,
            ..
        } = self.call;
        let group_bytes = LANES * D::DTYPE.block_bytes();
        let mut sums: Sums<S, 1, T> = [[s.splat(0.0); T]];
        for (index, x) in self.x.chunks_exact(parts::<D>()).enumerate() {
            // Tokens after the first ones find the rows in a cache. While they are read, the next
            // sixteen are fetched front to back.
            if tokens.start == 0 {
                for line in (0..group_bytes).step_by(64) {
                    s.prefetch_far(tile.address(LANES, index * group_bytes + line));
                }
            }
            let header = D::header(s, tile, index);
            for (part, x) in x.iter().enumerate() {
                let mut block = D::block(s, tile, index, part, &header);
                for g in 0..8 {
                    block.words[g] = s.weights(block.words[g], D::OFFSET.wrapping_neg() as i8);
                }
                step(s, D::EXTRA, &block, x, &mut sums);
            }
        }
        for (t, sums) in sums[0].iter().enumerate().take(tokens.len()) {
            let out = &mut out.row(tokens.start + t)[start..];
            store(s, *sums, out, &tile.lanes());
        }
    }
}
