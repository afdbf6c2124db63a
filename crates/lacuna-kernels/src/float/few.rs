//! A few tokens, more than registers hold: rows are streamed as they lie in memory, and a block of
//! their columns is read again, from the first-level cache, for each further tile of tokens.
//!
//! Rows are converted anew for each tile, which costs less than to store them converted. To take a
//! block of columns of many rows in turn would keep those of the tokens in the first-level cache,
//! but memory delivers the pieces of rows more slowly than whole ones, which costs more.

use std::ops::Range;

use super::tile::{Partial, RowSums, rows, step, sums, widest};
use super::tokens::{tiles, with_width};
use super::{CHUNKS, Element, FEW_TOKENS, PREFETCH_BYTES, Piece, Product, blocks, prefetch_chunks};
use crate::simd::{Kernel, Registers, Simd, each};

/// Most tokens that take less time so than by rows in lanes.
pub(super) const fn most_tokens<S: Simd>() -> usize {
    match S::REGISTERS {
        // Rows are transposed for their lanes there.
        Registers::Few => 22,
        Registers::Many => FEW_TOKENS,
    }
}

/// Writes the products of the rows of the output with all tokens.
pub(super) fn multiply<S: Simd, E: Element>(s: S, element: E, product: Product<'_, '_>) {
    // A constant, so that no level compiles the tiles of another.
    if const { matches!(S::REGISTERS, Registers::Few) } {
        pairs::<S, E, 1>(s, element, product);
    } else {
        pairs::<S, E, 2>(s, element, product);
    }
}

fn pairs<S: Simd, E: Element, const P: usize>(s: S, element: E, mut product: Product<'_, '_>) {
    let per_stream = product.out.cols().len().div_ceil(2 * P);
    for index in 0..per_stream {
        for cols in blocks(product.x.cols()) {
            block::<S, E, P>(s, element, &mut product, |r| r * per_stream + index, &cols);
        }
    }
}

/// A block of columns of `P` pairs of rows, which are at `place` of the output, times all tokens.
fn block<S: Simd, E: Element, const P: usize>(
    s: S,
    element: E,
    product: &mut Product<'_, '_>,
    place: impl Fn(usize) -> usize,
    cols: &Range<usize>,
) {
    let (all, bytes) = (product.out.cols(), product.bytes(cols));
    let (weights, x) = (product.weights, product.x);
    // A stream that has ended repeats the last row.
    let row = |r: usize| &weights.row((all.start + place(r)).min(all.end - 1))[bytes.clone()];
    let tiles = tiles(0..x.tokens(), widest::<S>(P));
    let passes = tiles.clone().count();
    for (pass, tile) in tiles.enumerate() {
        with_width!(widest::<S>(P), tile, T => {
            let dots = s.vectorize(Tile::<E, P, T> {
                rows: [0, P].map(|half| std::array::from_fn(|p| row(half + p))),
                x: std::array::from_fn(|t| &x.row(tile.token + t)[cols.clone()]),
                pass,
                passes,
                element,
            });
            for (t, dots) in dots.iter().enumerate() {
                let out = product.out.row(tile.token + t);
                for r in 0..2 * P {
                    if let Some(out) = out.get_mut(place(r)) {
                        let dot = dots.as_flattened()[r];
                        *out = if cols.start == 0 { dot } else { *out + dot };
                    }
                }
            }
        });
    }
}

/// `P` pairs of rows times `T` tokens over a block of columns.
struct Tile<'a, E, const P: usize, const T: usize> {
    rows: [[&'a [u8]; P]; 2],
    x: [&'a [f32]; T],
    /// The one of the `passes` over these rows, of which each prefetches a part.
    pass: usize,
    passes: usize,
    element: E,
}

impl<E: Element, const P: usize, const T: usize> Kernel for Tile<'_, E, P, T> {
    type Output = [RowSums<P>; T];

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Self::Output {
        let mut partial = [[s.splat(0.0); T]; P];
        self.whole(s, &mut partial);
        let element = self.element;
        if !self.x[0].len().is_multiple_of(E::COLUMNS) {
            let pad = |half: usize, p: usize| E::Chunk::pad(E::Chunk::split(self.rows[half][p]).1);
            let w = each!(s.splat(0.0), |p| element.load(s, [&pad(0, p), &pad(1, p)]));
            let x: [E::Columns; T] = self.x.map(|x| E::Columns::pad(E::Columns::split(x).1));
            step(s, element, w, x.each_ref(), &mut partial);
        }
        rows::<S, P, T>(s, &sums(s, &partial))
    }
}

impl<E: Element, const P: usize, const T: usize> Tile<'_, E, P, T> {
    /// Adds the products of whole chunks of columns.
    #[inline(always)]
    fn whole<S: Simd>(&self, s: S, partial: &mut Partial<S, P, T>) {
        let (element, chunks) = (self.element, self.x[0].len() / E::COLUMNS);
        let w: [[&[E::Chunk]; P]; 2] = each!([&[][..]; P], |half| {
            each!(&[][..], |p| &E::Chunk::split(self.rows[half][p]).0
                [..chunks])
        });
        let x: [&[E::Columns]; T] = each!(&[][..], |t| &E::Columns::split(self.x[t]).0[..chunks]);
        // Whole groups apart, so that their loop is unrolled.
        let groups = chunks / CHUNKS;
        let group_w: [[&[[E::Chunk; CHUNKS]]; P]; 2] = each!([&[][..]; P], |half| {
            each!(&[][..], |p| &w[half][p].as_chunks().0[..groups])
        });
        let group_x: [&[[E::Columns; CHUNKS]]; T] =
            each!(&[][..], |t| &x[t].as_chunks().0[..groups]);
        let share = groups * self.pass / self.passes..groups * (self.pass + 1) / self.passes;
        for group in 0..groups {
            if share.contains(&group) {
                for row in w.as_flattened() {
                    let ahead = row.as_ptr().cast::<u8>().wrapping_add(PREFETCH_BYTES);
                    prefetch_chunks::<S, E>(s, ahead, group * CHUNKS);
                }
            }
            for chunk in 0..CHUNKS {
                let w = each!(s.splat(0.0), |p| {
                    let rows = [&group_w[0][p][group][chunk], &group_w[1][p][group][chunk]];
                    element.load(s, rows)
                });
                let x = each!(&group_x[0][group][chunk], |t| &group_x[t][group][chunk]);
                step(s, element, w, x, partial);
            }
        }
        for chunk in groups * CHUNKS..chunks {
            let w = each!(s.splat(0.0), |p| {
                element.load(s, [&w[0][p][chunk], &w[1][p][chunk]])
            });
            let x = each!(&x[0][chunk], |t| &x[t][chunk]);
            step(s, element, w, x, partial);
        }
    }
}
