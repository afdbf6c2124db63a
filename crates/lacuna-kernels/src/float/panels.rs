//! Many tokens: a group of them is brought into the order of tiles, and a few rows at a time are
//! multiplied with every tile while it is in a cache.
//!
//! ```text
//! each group of tokens
//!   each block of columns                 packed: in the second-level cache
//!     each part of the rows               converted: in the second-level cache
//!       each tile of tokens               in the first-level cache
//!         each tile of rows
//! ```
//!
//! While a part is multiplied, the bytes of the next one are prefetched.

use std::marker::PhantomData;
use std::ops::Range;

use super::tile::{rows, step, sums};
use super::tokens::{GROUP_TOKENS, TokenTile, pack, tiles, with_width};
use super::{BLOCK, Element, HALF, Product, blocks};
use crate::grid::Block;
use crate::simd::{Kernel, LANES, Registers, Simd, each};

/// Rows of a part.
const PART_ROWS: usize = 16;

/// f32 elements of a part.
pub(super) const PART_LEN: usize = PART_ROWS * BLOCK;

/// Some rows and some columns of the weights.
#[derive(Clone)]
struct Part {
    rows: Range<usize>,
    cols: Range<usize>,
}

/// Writes the products of the rows of the output with its tokens.
pub(super) fn multiply<S: Simd, E: Element>(s: S, product: Product<'_, '_>) {
    // A constant, so that no level compiles the tiles of another.
    if const { matches!(S::REGISTERS, Registers::Few) } {
        Panels::<E, 1>(product, PhantomData).multiply(s);
    } else {
        Panels::<E, 2>(product, PhantomData).multiply(s);
    }
}

/// The product by tiles of `P` pairs of rows.
struct Panels<'a, 'b, E, const P: usize>(Product<'a, 'b>, PhantomData<E>);

impl<'a, E: Element, const P: usize> Panels<'a, '_, E, P> {
    fn multiply<S: Simd>(&mut self, s: S) {
        let (rows, tokens) = (self.0.out.cols(), self.0.out.rows());
        for token in tokens.clone().step_by(GROUP_TOKENS) {
            let group = token..tokens.end.min(token + GROUP_TOKENS);
            for cols in blocks(self.0.x.cols()) {
                let (_, packed) = self.0.buffers.split();
                pack(s, self.0.x, group.clone(), &cols, packed);
                for first in rows.clone().step_by(PART_ROWS) {
                    let part = Part {
                        rows: first..rows.end.min(first + PART_ROWS),
                        cols: cols.clone(),
                    };
                    self.part(s, &part, &group);
                }
            }
        }
    }

    /// Multiplies a part with a group of tokens.
    fn part<S: Simd>(&mut self, s: S, part: &Part, tokens: &Range<usize>) {
        self.convert(s, part);
        let ahead = self.after(part);
        let tiles = tiles::<S>(tokens.clone());
        let steps = tiles.clone().count();
        for (index, tile) in tiles.enumerate() {
            if let Some(ahead) = &ahead {
                self.prefetch(s, ahead, index, steps);
            }
            with_width!(S, tile, T => self.row_tiles::<S, T>(s, part, tile));
        }
    }

    /// The part that comes after `part`.
    fn after(&self, part: &Part) -> Option<Part> {
        let (rows, cols) = (self.0.out.cols(), self.0.x.cols());
        let (first, cols) = if part.rows.end < rows.end {
            (part.rows.end, part.cols.clone())
        } else if part.cols.end < cols {
            (rows.start, part.cols.end..cols.min(part.cols.end + BLOCK))
        } else {
            return None;
        };
        let rows = first..rows.end.min(first + PART_ROWS);
        Some(Part { rows, cols })
    }

    /// Prefetches the `index`-th of `steps` pieces of a part's rows.
    fn prefetch<S: Simd>(&self, s: S, part: &Part, index: usize, steps: usize) {
        let (bytes, count) = (self.0.bytes(&part.cols), part.rows.len());
        for row in count * index / steps..count * (index + 1) / steps {
            let row = &self.0.weights.row(part.rows.start + row)[bytes.clone()];
            for line in row.chunks(64) {
                s.prefetch_far(line.as_ptr());
            }
        }
    }

    /// The rows of a tile over a block of columns. Rows that do not exist repeat the last one.
    fn rows(&self, part: &Part, first: usize) -> [[&'a [u8]; P]; 2] {
        let (weights, bytes) = (self.0.weights, self.0.bytes(&part.cols));
        let row = |r: usize| &weights.row((first + r).min(part.rows.end - 1))[bytes.clone()];
        [0, P].map(|half| std::array::from_fn(|p| row(half + p)))
    }

    /// Where the rows of a tile lie, converted: the `index`-th of a part of columns in `chunks`.
    fn place(index: usize, chunks: usize) -> Range<usize> {
        let start = index * 2 * P * BLOCK;
        start..start + P * LANES * chunks
    }

    /// Converts a part to f32.
    fn convert<S: Simd>(&mut self, s: S, part: &Part) {
        let chunks = part.cols.len().div_ceil(HALF);
        for (index, first) in part.rows.clone().step_by(2 * P).enumerate() {
            let rows = self.rows(part, first);
            let (converted, _) = self.0.buffers.split();
            s.vectorize(Convert::<E, P> {
                rows,
                out: &mut converted[Self::place(index, chunks)],
                element: PhantomData,
            });
        }
    }

    /// Multiplies a part with a tile of tokens.
    fn row_tiles<S: Simd, const T: usize>(&mut self, s: S, part: &Part, tile: TokenTile) {
        let chunks = part.cols.len().div_ceil(HALF);
        let start = self.0.out.cols().start;
        let (converted, group) = self.0.buffers.split();
        let x = tile.columns(group, &part.cols);
        for (index, first) in part.rows.clone().step_by(2 * P).enumerate() {
            let end = part.rows.end.min(first + 2 * P);
            s.vectorize(Tile::<P, T> {
                weights: converted[Self::place(index, chunks)]
                    .as_chunks()
                    .0
                    .as_chunks()
                    .0,
                x,
                tile,
                out: self.0.out.reborrow(),
                place: first - start..end - start,
                first_block: part.cols.start == 0,
            });
        }
    }
}

/// The rows of a tile over a block of columns, two to a vector.
struct Convert<'a, E, const P: usize> {
    rows: [[&'a [u8]; P]; 2],
    out: &'a mut [f32],
    element: PhantomData<E>,
}

impl<E: Element, const P: usize> Kernel for Convert<'_, E, P> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let out: &mut [[[f32; LANES]; P]] = self.out.as_chunks_mut().0.as_chunks_mut().0;
        let (out, tail) = out.split_at_mut(E::split(self.rows[0][0]).0.len());
        for p in 0..P {
            let [(a, a_tail), (b, b_tail)] = [0, 1].map(|half: usize| E::split(self.rows[half][p]));
            for (out, (a, b)) in out.iter_mut().zip(a.iter().zip(b)) {
                s.store(E::load(s, [a, b]), &mut out[p]);
            }
            for out in &mut *tail {
                let (a, b) = (E::pad(a_tail), E::pad(b_tail));
                s.store(E::load(s, [&a, &b]), &mut out[p]);
            }
        }
    }
}

/// `P` pairs of rows times `T` tokens over a block of columns.
struct Tile<'a, 'b, const P: usize, const T: usize> {
    weights: &'a [[[f32; LANES]; P]],
    x: &'a [[[f32; HALF]; T]],
    /// Which tokens they are ...
    tile: TokenTile,
    out: Block<'b, f32>,
    /// ... and which columns of the output are the rows.
    place: Range<usize>,
    first_block: bool,
}

impl<const P: usize, const T: usize> Kernel for Tile<'_, '_, P, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let mut partial = [[s.splat(0.0); T]; P];
        for (w, x) in self.weights.iter().zip(self.x) {
            let w = each!(s.splat(0.0), |p| s.load(&w[p]));
            step(s, w, each!(&x[0], |t| &x[t]), &mut partial);
        }
        let dots = rows::<S, P, T>(s, &sums(s, &partial));
        (self.tile).add(&dots, &mut self.out, self.place, self.first_block);
    }
}
