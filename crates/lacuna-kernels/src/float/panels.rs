//! Many tokens: 32 rows at a time are converted and multiplied with all tokens while they are in a cache.
//!
//! ```text
//! each block of columns                 of tokens: in the second-level cache
//!   each part: 32 rows                  converted: in the nearest caches
//!     each tile of tokens
//!       each tile of rows
//! ```
//!
//! Where registers are few, rows are in lanes ([`columns`]). Where they are many, rows go in pairs, eight lanes each, as for fewer
//! tokens, and a tile is four pairs of rows and six tokens: ten loads for 24 products, where processors that multiply two vectors in a cycle load two. (To have rows in
//! all lanes takes no moving of lanes in the end, but 32 loads for 24 products: better only where a product takes
//! a whole cycle.)
//!
//! Tokens are read as they lie in memory: those of a tile are near one another, and to bring them into the
//! order of tiles first takes longer than it saves. Only if they are converted they have a place of their own. While a part
//! is multiplied, the bytes of the next one are prefetched.

use std::ops::Range;

use super::columns;
use super::tile::{prepared_step, rows, sums, widest};
use super::tokens::{MOST_TOKENS, TokenTile, tiles, with_width};
use super::{BLOCK, Element, HALF, Piece, Product, blocks};
use crate::activations::Activations;
use crate::grid::Block;
use crate::matrix::Matrix;
use crate::simd::{Kernel, LANES, Registers, Simd, each, padded};

/// Rows of a part.
pub(super) const PART_ROWS: usize = 2 * LANES;

/// Pairs of rows of a tile where registers are many.
const PAIRS: usize = 4;

/// f32 elements of a part.
pub(super) const PART_LEN: usize = PART_ROWS * BLOCK;

/// Of the tokens of a task, if they are converted to pairs of columns.
pub(super) const TOKENS_LEN: usize = MOST_TOKENS * BLOCK / 2;

/// Some rows and some columns of the weights.
#[derive(Clone)]
struct Part {
    rows: Range<usize>,
    cols: Range<usize>,
}

/// Writes the products of the rows of the output with its tokens.
pub(super) fn multiply<S: Simd, E: Element>(s: S, element: E, product: Product<'_, '_>) {
    let all = product.out.rows();
    // Of converted tokens there is room for so many; those of experts may be more.
    let most = match E::PREPARED {
        true => MOST_TOKENS,
        false => all.len(),
    };
    let mut panels = Panels {
        product,
        element,
        tokens: 0..0,
    };
    for first in all.clone().step_by(most.max(1)) {
        panels.tokens = first..all.end.min(first + most);
        panels.multiply(s);
    }
}

struct Panels<'a, 'b, E> {
    product: Product<'a, 'b>,
    element: E,
    /// Those of the output that are multiplied now.
    tokens: Range<usize>,
}

impl<'a, E: Element> Panels<'a, '_, E> {
    /// Multiplies one block of columns after another, part by part.
    fn multiply<S: Simd>(&mut self, s: S) {
        let rows = self.product.out.cols();
        for cols in blocks(self.product.x.cols()) {
            if const { E::PREPARED } {
                s.vectorize(Prepare {
                    x: self.product.x,
                    tokens: self.tokens.clone(),
                    cols: cols.clone(),
                    out: self.product.buffers.parts()[1],
                    element: self.element,
                });
            }
            for first in rows.clone().step_by(PART_ROWS) {
                let part = Part {
                    rows: first..rows.end.min(first + PART_ROWS),
                    cols: cols.clone(),
                };
                self.part(s, &part);
            }
        }
    }

    /// Multiplies a part with all tokens.
    fn part<S: Simd>(&mut self, s: S, part: &Part) {
        let (element, cols) = (self.element, part.cols.clone());
        let rows: [_; PART_ROWS] = std::array::from_fn(|index| self.row(part, index));
        let widest = match S::REGISTERS {
            Registers::Few => columns::TILE_TOKENS,
            Registers::Many => widest::<S>(PAIRS),
        };
        let ahead = self.ahead(part, tiles(self.tokens.clone(), widest).count());
        let start = self.product.out.cols().start;
        let place = part.rows.start - start..part.rows.end - start;
        let [converted, prepared] = self.product.buffers.parts();
        // A constant, so that no level compiles the tiles of another.
        if const { matches!(S::REGISTERS, Registers::Few) } {
            s.vectorize(columns::Transpose {
                rows,
                out: converted,
                element,
            });
            s.vectorize(columns::Tiles {
                converted,
                x: self.product.x,
                tokens: self.tokens.clone(),
                cols,
                out: self.product.out.reborrow(),
                place,
                ahead,
            });
            return;
        }
        s.vectorize(Convert {
            rows,
            out: converted,
            element,
        });
        let x = match E::PREPARED {
            true => Tokens::Prepared(prepared, self.tokens.start),
            false => Tokens::AsTheyLie(self.product.x),
        };
        s.vectorize(Tiles {
            converted,
            x,
            tokens: self.tokens.clone(),
            cols,
            out: self.product.out.reborrow(),
            place,
            ahead,
            element,
        });
    }

    /// The columns of a row of a part. Rows that do not exist are the last one again.
    fn row(&self, part: &Part, index: usize) -> &'a [u8] {
        let row = (part.rows.start + index).min(part.rows.end - 1);
        &self.product.weights.row(row)[self.product.bytes(&part.cols)]
    }

    /// What is prefetched while a part is multiplied with so many tiles of tokens: the part after it.
    fn ahead(&self, part: &Part, tiles: usize) -> Ahead<'a> {
        let (rows, cols) = (self.product.out.cols(), self.product.x.cols());
        let (first, cols) = if part.rows.end < rows.end {
            (part.rows.end, part.cols.clone())
        } else if part.cols.end < cols {
            (rows.start, part.cols.end..cols.min(part.cols.end + BLOCK))
        } else {
            (rows.end, part.cols.clone())
        };
        let rows = first..rows.end.min(first + PART_ROWS);
        let bytes = self.product.bytes(&cols);
        let lines = rows.len() * bytes.len().div_ceil(LINE);
        Ahead {
            weights: self.product.weights,
            at: bytes.start,
            rows,
            bytes,
            per_tile: lines.div_ceil(tiles.max(1)),
        }
    }
}

/// Bytes of a cache line.
const LINE: usize = 64;

/// Rows that are fetched a few lines at a time.
pub(super) struct Ahead<'a> {
    weights: &'a Matrix<'a>,
    rows: Range<usize>,
    /// What of each row is needed ...
    bytes: Range<usize>,
    /// ... and from where on of the first of those that are left.
    at: usize,
    per_tile: usize,
}

impl Ahead<'_> {
    /// Prefetches what is to be fetched for a tile.
    #[inline(always)]
    pub(super) fn prefetch<S: Simd>(&mut self, s: S) {
        for _ in 0..self.per_tile {
            if self.rows.is_empty() {
                return;
            }
            s.prefetch_far(self.weights.row(self.rows.start)[self.at..].as_ptr());
            self.at += LINE;
            if self.at >= self.bytes.end {
                (self.rows.start, self.at) = (self.rows.start + 1, self.bytes.start);
            }
        }
    }
}

/// Converts tokens over a block of columns, one after the other.
struct Prepare<'a, E> {
    x: &'a Activations<'a>,
    tokens: Range<usize>,
    cols: Range<usize>,
    out: &'a mut [[f32; HALF]],
    element: E,
}

impl<E: Element> Kernel for Prepare<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let chunks = self.cols.len().div_ceil(E::COLUMNS);
        for (token, out) in self.tokens.zip(self.out.chunks_exact_mut(chunks)) {
            let (whole, tail) = E::Columns::split(&self.x.row(token)[self.cols.clone()]);
            let (out, last) = out.split_at_mut(whole.len());
            for (columns, out) in whole.iter().zip(out) {
                self.element.prepare(s, columns, out);
            }
            for out in last {
                self.element.prepare(s, &E::Columns::pad(tail), out);
            }
        }
    }
}

/// The rows of a part over a block of columns, two to a vector, as many vectors at a time as a tile has.
struct Convert<'a, E> {
    rows: [&'a [u8]; PART_ROWS],
    out: &'a mut [[f32; HALF]],
    element: E,
}

impl<E: Element> Kernel for Convert<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let whole = E::Chunk::split(self.rows[0]).0.len();
        let chunks = whole + usize::from(!E::Chunk::split(self.rows[0]).1.is_empty());
        let out: &mut [[[f32; LANES]; PAIRS]] = vectors_mut(self.out).as_chunks_mut().0;
        let tiles = self.rows.chunks_exact(2 * PAIRS);
        for (rows, out) in tiles.zip(out.chunks_exact_mut(chunks)) {
            let (out, last) = out.split_at_mut(whole);
            for p in 0..PAIRS {
                let [(a, a_tail), (b, b_tail)] = [rows[p], rows[p + PAIRS]].map(E::Chunk::split);
                for (out, (a, b)) in out.iter_mut().zip(a.iter().zip(b)) {
                    s.store(self.element.load(s, [a, b]), &mut out[p]);
                }
                for out in &mut *last {
                    let (a, b) = (E::Chunk::pad(a_tail), E::Chunk::pad(b_tail));
                    s.store(self.element.load(s, [&a, &b]), &mut out[p]);
                }
            }
        }
    }
}

/// Whole vectors.
fn vectors(halves: &[[f32; HALF]]) -> &[[f32; LANES]] {
    halves.as_flattened().as_chunks().0
}

fn vectors_mut(halves: &mut [[f32; HALF]]) -> &mut [[f32; LANES]] {
    halves.as_flattened_mut().as_chunks_mut().0
}

/// Where tokens are.
#[derive(Clone, Copy)]
enum Tokens<'a> {
    /// As they lie in memory.
    AsTheyLie(&'a Activations<'a>),
    /// Converted, from the one of a number on.
    Prepared(&'a [[f32; HALF]], usize),
}

impl<'a> Tokens<'a> {
    /// Some columns of a token: whole chunks, of which there are so many, and columns after them.
    #[inline(always)]
    fn columns(
        self,
        token: usize,
        cols: &Range<usize>,
        chunks: usize,
    ) -> (&'a [[f32; HALF]], &'a [f32]) {
        match self {
            Self::AsTheyLie(x) => x.row(token)[cols.clone()].as_chunks(),
            Self::Prepared(all, first) => (&all[(token - first) * chunks..][..chunks], &[]),
        }
    }
}

/// The rows of a part, some pairs at a time, times some tokens over a block of columns.
struct Tiles<'a, 'b, E> {
    /// The rows, one tile after another.
    converted: &'a [[f32; HALF]],
    x: Tokens<'a>,
    tokens: Range<usize>,
    cols: Range<usize>,
    out: Block<'b, f32>,
    /// Which columns of the output are the rows.
    place: Range<usize>,
    ahead: Ahead<'a>,
    element: E,
}

impl<E: Element> Kernel for Tiles<'_, '_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        for tile in tiles(self.tokens.clone(), widest::<S>(PAIRS)) {
            self.ahead.prefetch(s);
            with_width!(widest::<S>(PAIRS), tile, T => self.tile::<S, T>(s, tile));
        }
    }
}

impl<E: Element> Tiles<'_, '_, E> {
    /// All rows times a tile of `T` tokens.
    #[inline(always)]
    fn tile<S: Simd, const T: usize>(&mut self, s: S, tile: TokenTile) {
        let chunks = self.cols.len().div_ceil(E::COLUMNS);
        let x: [(&[[f32; HALF]], &[f32]); T] = each!((&[][..], &[][..]), |t| {
            self.x.columns(tile.token + t, &self.cols, chunks)
        });
        let whole = x[0].0.len();
        let columns: [&[[f32; HALF]]; T] = each!(&[][..], |t| &x[t].0[..whole]);
        let last: [[f32; HALF]; T] = each!([0.0; HALF], |t| padded(x[t].1));
        let weights: &[[[f32; LANES]; PAIRS]] = vectors(self.converted).as_chunks().0;
        let starts = self.place.clone().step_by(2 * PAIRS);
        for (first, weights) in starts.zip(weights.chunks_exact(chunks)) {
            let mut partial = [[s.splat(0.0); T]; PAIRS];
            let (weights, tail) = weights.split_at(whole);
            for (chunk, w) in weights.iter().enumerate() {
                let w = each!(s.splat(0.0), |p| s.load(&w[p]));
                let x = each!(&columns[0][chunk], |t| &columns[t][chunk]);
                prepared_step(s, self.element, w, x, &mut partial);
            }
            for w in tail {
                let w = each!(s.splat(0.0), |p| s.load(&w[p]));
                prepared_step(s, self.element, w, last.each_ref(), &mut partial);
            }
            let dots = rows::<S, PAIRS, T>(s, &sums(s, &partial));
            let place = first..self.place.end.min(first + 2 * PAIRS);
            tile.add(&dots, &mut self.out, place, self.cols.start == 0);
        }
    }
}
