//! A few tokens: sixteen rows at a time are unpacked in registers and multiplied with all of them.

use std::marker::PhantomData;

use super::formats::Format;
use super::panel::{Sums, step};
use super::{parts, prefetch_ahead, store};
use crate::activations::{ActivationBlock, Activations};
use crate::grid::Block;
use crate::matrix::Matrix;
use crate::simd::{Kernel, LANES, Simd};
use crate::tile::Tile;

/// Writes the products of the rows of `out` with two to eight tokens.
pub(super) fn multiply<S: Simd, D: Format>(
    s: S,
    weights: &Matrix<'_>,
    x: &Activations<'_>,
    out: &mut Block<'_, f32>,
    format: PhantomData<D>,
) {
    match x.tile {
        2 => tiles::<S, D, 2>(s, weights, x, out, format),
        4 => tiles::<S, D, 4>(s, weights, x, out, format),
        8 => tiles::<S, D, 8>(s, weights, x, out, format),
        count => unreachable!("a tile of {count} tokens"),
    }
}

fn tiles<S: Simd, D: Format, const T: usize>(
    s: S,
    weights: &Matrix<'_>,
    x: &Activations<'_>,
    out: &mut Block<'_, f32>,
    format: PhantomData<D>,
) {
    let (mut start, end) = (0, out.cols().len());
    while start < end {
        let tile = Tile::new(weights, out.cols().start + start);
        let count = tile.lanes().len();
        s.vectorize(Stream {
            tile,
            x: x.padded_tile::<T>(),
            tokens: x.tokens(),
            start,
            out,
            format,
        });
        start += count;
    }
}

/// A few tokens and sixteen rows, from the file layout.
struct Stream<'a, 'b, D, const T: usize> {
    tile: Tile<'a>,
    x: &'a [ActivationBlock<T>],
    /// How many of the `T` exist.
    tokens: usize,
    /// Where the tile's rows are in the block of the output.
    start: usize,
    out: &'a mut Block<'b, f32>,
    format: PhantomData<D>,
}

impl<D: Format, const T: usize> Kernel for Stream<'_, '_, D, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut sums: Sums<S, 1, T> = [[s.splat(0.0); T]];
        for (index, x) in self.x.chunks_exact(parts::<D>()).enumerate() {
            prefetch_ahead::<S, D>(s, &self.tile, index, LANES);
            let header = D::header(s, &self.tile, index);
            for (part, x) in x.iter().enumerate() {
                let mut block = D::block(s, &self.tile, index, part, &header);
                for g in 0..8 {
                    block.words[g] = s.weights(block.words[g], D::OFFSET.wrapping_neg() as i8);
                }
                step(s, D::EXTRA, &block, x, &mut sums);
            }
        }
        for t in 0..T {
            if t < self.tokens {
                let out = &mut self.out.row(t)[self.start..];
                store(s, sums[0][t], out, &self.tile.lanes());
            }
        }
    }
}
