//! Many tokens: sixteen rows at a time are converted and multiplied with all tokens while they are in a cache.
//!
//! ```text
//! each block of columns                 of tokens: in the second-level cache
//!   each part: sixteen rows             converted: in the first-level cache
//!     each tile of tokens
//! ```
//!
//! Where registers are many, a lane is a row: the eight partial sums of sixteen rows and a token are eight
//! vectors, which are added up without moving a lane, and of the token single elements are multiplied. Where
//! they are few, eight lanes are columns, as for fewer tokens.
//!
//! Tokens are read as they lie in memory: those of a tile are near one another, and to bring them into the
//! order of tiles first takes longer than it saves. While a part is multiplied, the bytes of the next one are
//! prefetched.

use std::marker::PhantomData;
use std::ops::Range;

use super::tile::{rows, step, sums, widest};
use super::tokens::{TokenTile, tiles, with_width};
use super::{BLOCK, Element, HALF, Product, blocks};
use crate::activations::Activations;
use crate::grid::Block;
use crate::matrix::Matrix;
use crate::simd::{Kernel, LANES, Registers, Simd, each, padded};

/// Rows of a part.
const PART_ROWS: usize = LANES;

/// f32 elements of a part.
pub(super) const PART_LEN: usize = PART_ROWS * BLOCK;

/// Pairs of rows of a tile where eight lanes are columns.
const PAIRS: usize = 1;

/// Tokens whose partial sums 32 registers hold where a lane is a row.
const TOKENS: usize = 3;

/// Some rows and some columns of the weights.
#[derive(Clone)]
struct Part {
    rows: Range<usize>,
    cols: Range<usize>,
}

/// Writes the products of the rows of the output with its tokens.
pub(super) fn multiply<S: Simd, E: Element>(s: S, product: Product<'_, '_>) {
    let mut panels = Panels::<E>(product, PhantomData);
    let rows = panels.0.out.cols();
    for cols in blocks(panels.0.x.cols()) {
        for first in rows.clone().step_by(PART_ROWS) {
            let part = Part {
                rows: first..rows.end.min(first + PART_ROWS),
                cols: cols.clone(),
            };
            // A constant, so that no level compiles the way of another.
            if const { matches!(S::REGISTERS, Registers::Few) } {
                panels.in_pairs(s, &part);
            } else {
                panels.in_lanes(s, &part);
            }
        }
    }
}

struct Panels<'a, 'b, E>(Product<'a, 'b>, PhantomData<E>);

impl<'a, E: Element> Panels<'a, '_, E> {
    /// Multiplies a part with all tokens, a row to each lane.
    fn in_lanes<S: Simd>(&mut self, s: S, part: &Part) {
        let chunks = part.cols.len().div_ceil(HALF);
        let rows = std::array::from_fn(|r| self.row(part, r));
        let tiles = self.0.out.rows().len().div_ceil(TOKENS);
        let ahead = self.ahead(part, tiles);
        let place = self.place(part);
        let converted: &mut [[[f32; LANES]; HALF]] =
            self.0.buffers.part().as_chunks_mut().0.as_chunks_mut().0;
        s.vectorize(Transpose::<E> {
            rows,
            out: &mut converted[..chunks],
            element: PhantomData,
        });
        s.vectorize(Lanes {
            weights: &converted[..chunks],
            x: self.0.x,
            cols: part.cols.clone(),
            out: self.0.out.reborrow(),
            place,
            ahead,
        });
    }

    /// Multiplies a part with all tokens, eight columns to each half of the lanes.
    fn in_pairs<S: Simd>(&mut self, s: S, part: &Part) {
        let len = part.cols.len().div_ceil(HALF) * PAIRS * LANES;
        for first in (0..part.rows.len()).step_by(2 * PAIRS) {
            let pair = |half| std::array::from_fn(|p| self.row(part, first + half * PAIRS + p));
            let rows = [pair(0), pair(1)];
            let start = first / (2 * PAIRS) * len;
            s.vectorize(Convert::<E> {
                rows,
                out: &mut self.0.buffers.part()[start..start + len],
                element: PhantomData,
            });
        }
        let tiles = tiles(self.0.out.rows(), widest::<S>(PAIRS));
        let mut ahead = self.ahead(part, tiles.clone().count());
        for tile in tiles {
            ahead.prefetch(s);
            with_width!(S, PAIRS, tile, T => self.row_tiles::<S, T>(s, part, tile));
        }
    }

    /// Multiplies the pairs of a part with a tile of tokens.
    fn row_tiles<S: Simd, const T: usize>(&mut self, s: S, part: &Part, tile: TokenTile) {
        let (x, place) = (self.0.x, self.place(part));
        s.vectorize(RowTiles::<T> {
            converted: self.0.buffers.part(),
            x: std::array::from_fn(|t| &x.row(tile.token + t)[part.cols.clone()]),
            tile,
            out: self.0.out.reborrow(),
            place,
            first_block: part.cols.start == 0,
        });
    }

    /// Where the rows of a part are among the columns of the output's block.
    fn place(&self, part: &Part) -> Range<usize> {
        let start = self.0.out.cols().start;
        part.rows.start - start..part.rows.end - start
    }

    /// The columns of a row of a part. Rows that do not exist are the last one again.
    fn row(&self, part: &Part, index: usize) -> &'a [u8] {
        let row = (part.rows.start + index).min(part.rows.end - 1);
        &self.0.weights.row(row)[self.0.bytes(&part.cols)]
    }

    /// What is prefetched while a part is multiplied with so many tiles: the part after it.
    fn ahead(&self, part: &Part, tiles: usize) -> Ahead<'a> {
        let (rows, cols) = (self.0.out.cols(), self.0.x.cols());
        let (first, cols) = if part.rows.end < rows.end {
            (part.rows.end, part.cols.clone())
        } else if part.cols.end < cols {
            (rows.start, part.cols.end..cols.min(part.cols.end + BLOCK))
        } else {
            (rows.end, part.cols.clone())
        };
        let rows = first..rows.end.min(first + PART_ROWS);
        let bytes = self.0.bytes(&cols);
        let lines = rows.len() * bytes.len().div_ceil(LINE);
        Ahead {
            weights: self.0.weights,
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
struct Ahead<'a> {
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
    fn prefetch<S: Simd>(&mut self, s: S) {
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

/// The columns of sixteen rows, eight at a time: a row to each lane. Those that do not exist are zeros.
struct Transpose<'a, E> {
    rows: [&'a [u8]; LANES],
    out: &'a mut [[[f32; LANES]; HALF]],
    element: PhantomData<E>,
}

impl<E: Element> Kernel for Transpose<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let whole = E::split(self.rows[0]).0.len();
        let chunks: [&[E::Chunk]; LANES] = each!(&[][..], |r| &E::split(self.rows[r]).0[..whole]);
        let (twos, rest) = self.out.split_at_mut(whole / 2 * 2);
        for (pair, out) in twos.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            let columns = s.transpose(each!(s.splat(0.0), |r| {
                E::load(s, [&chunks[r][2 * pair], &chunks[r][2 * pair + 1]])
            }));
            for (c, out) in out.as_flattened_mut().iter_mut().enumerate() {
                s.store(columns[c], out);
            }
        }
        if rest.is_empty() {
            return;
        }
        let columns = s.transpose(each!(s.splat(0.0), |r| {
            let tail = E::pad(E::split(self.rows[r]).1);
            match whole % 2 {
                0 => E::load(s, [&tail, &E::pad(&[])]),
                _ => E::load(s, [&chunks[r][whole - 1], &tail]),
            }
        }));
        for (column, out) in columns.into_iter().zip(rest.as_flattened_mut()) {
            s.store(column, out);
        }
    }
}

/// Sixteen rows times the tokens of the output over a block of columns.
struct Lanes<'a, 'b> {
    weights: &'a [[[f32; LANES]; HALF]],
    x: &'a Activations<'a>,
    cols: Range<usize>,
    out: Block<'b, f32>,
    /// Which columns of the output are the rows.
    place: Range<usize>,
    ahead: Ahead<'a>,
}

impl Kernel for Lanes<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let Range { start, end } = self.out.rows();
        let whole = start + (end - start) / TOKENS * TOKENS;
        for token in (start..whole).step_by(TOKENS) {
            self.ahead.prefetch(s);
            self.tile::<S, TOKENS>(s, token);
        }
        match end - whole {
            1 => self.tile::<S, 1>(s, whole),
            2 => self.tile::<S, 2>(s, whole),
            _ => {}
        }
    }
}

impl Lanes<'_, '_> {
    /// All rows times `T` tokens from `first` on.
    #[inline(always)]
    fn tile<S: Simd, const T: usize>(&mut self, s: S, first: usize) {
        let x: [&[f32]; T] = each!(&[][..], |t| &self.x.row(first + t)[self.cols.clone()]);
        let chunks = x[0].len() / HALF;
        let columns: [&[[f32; HALF]]; T] = each!(&[][..], |t| &x[t].as_chunks().0[..chunks]);
        let (whole, tail) = self.weights.split_at(chunks);
        let mut partial = [[s.splat(0.0); HALF]; T];
        for (chunk, weights) in whole.iter().enumerate() {
            let x = each!(&[0.0; HALF], |t| &columns[t][chunk]);
            add_columns(s, weights, x, &mut partial);
        }
        if let [weights] = tail {
            let x: [[f32; HALF]; T] = each!([0.0; HALF], |t| padded(x[t].as_chunks::<HALF>().1));
            add_columns(s, weights, x.each_ref(), &mut partial);
        }
        for t in 0..T {
            // The order of `Simd::sum_halves`.
            let two = |l: usize| s.add(partial[t][l], partial[t][l + 4]);
            let four = |l: usize| s.add(two(l), two(l + 2));
            let dots = s.add(four(0), four(1));
            let out = &mut self.out.row(first + t)[self.place.clone()];
            let sum = |before: S::F| match self.cols.start {
                0 => dots,
                _ => s.add(before, dots),
            };
            match out.as_mut_array() {
                Some(out) => s.store(sum(s.load(out)), out),
                None => {
                    let mut lanes = padded(out);
                    s.store(sum(s.load(&lanes)), &mut lanes);
                    out.copy_from_slice(&lanes[..out.len()]);
                }
            }
        }
    }
}

/// Adds the products of eight columns of sixteen rows and of `T` tokens to the partial sums of each.
#[inline(always)]
fn add_columns<S: Simd, const T: usize>(
    s: S,
    weights: &[[f32; LANES]; HALF],
    x: [&[f32; HALF]; T],
    partial: &mut [[S::F; HALF]; T],
) {
    for c in 0..HALF {
        let w = s.load(&weights[c]);
        for t in 0..T {
            partial[t][c] = s.fma(w, s.splat(x[t][c]), partial[t][c]);
        }
    }
}

/// The rows of a tile over a block of columns, two to a vector.
struct Convert<'a, E> {
    rows: [[&'a [u8]; PAIRS]; 2],
    out: &'a mut [f32],
    element: PhantomData<E>,
}

impl<E: Element> Kernel for Convert<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let out: &mut [[[f32; LANES]; PAIRS]] = self.out.as_chunks_mut().0.as_chunks_mut().0;
        let (out, tail) = out.split_at_mut(E::split(self.rows[0][0]).0.len());
        for p in 0..PAIRS {
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

/// The rows of a part, [`PAIRS`] at a time, times `T` tokens over a block of columns.
struct RowTiles<'a, 'b, const T: usize> {
    /// The rows, one tile after another.
    converted: &'a [f32],
    x: [&'a [f32]; T],
    /// Which tokens they are ...
    tile: TokenTile,
    out: Block<'b, f32>,
    /// ... and which columns of the output are the rows.
    place: Range<usize>,
    first_block: bool,
}

impl<const T: usize> Kernel for RowTiles<'_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let chunks = self.x[0].len() / HALF;
        let x: [&[[f32; HALF]]; T] = each!(&[][..], |t| &self.x[t].as_chunks().0[..chunks]);
        let last: Option<[[f32; HALF]; T]> = (!self.x[0].len().is_multiple_of(HALF))
            .then(|| each!([0.0; HALF], |t| padded(self.x[t].as_chunks::<HALF>().1)));
        let weights: &[[[f32; LANES]; PAIRS]] = self.converted.as_chunks().0.as_chunks().0;
        let tiles = weights.chunks_exact(self.x[0].len().div_ceil(HALF));
        for (first, weights) in self.place.clone().step_by(2 * PAIRS).zip(tiles) {
            let mut partial = [[s.splat(0.0); T]; PAIRS];
            for (chunk, w) in weights[..chunks].iter().enumerate() {
                let w = each!(s.splat(0.0), |p| s.load(&w[p]));
                step(s, w, each!(&[0.0; HALF], |t| &x[t][chunk]), &mut partial);
            }
            if let Some(x) = &last {
                let w = each!(s.splat(0.0), |p| s.load(&weights[chunks][p]));
                step(s, w, x.each_ref(), &mut partial);
            }
            let dots = rows::<S, PAIRS, T>(s, &sums(s, &partial));
            let place = first..self.place.end.min(first + 2 * PAIRS);
            (self.tile).add(&dots, &mut self.out, place, self.first_block);
        }
    }
}
