//! Many tokens where registers are few: sixteen rows in the lanes of a vector, one column after the other.
//!
//! A tile is sixteen rows and six tokens: with AVX2 their sums are twelve of sixteen registers. Each of the eight partial sums
//! that a block of columns has is computed by itself, over every eighth column. So a lane is of one row all the way, a number
//! of a token is read for sixteen rows at once, eight loads go with twelve products, and no lanes are moved in the end. For
//! that, rows are transposed when they are converted, once for all tokens of a task; of 17 to 40 tokens this takes
//! longer than it saves, by a tenth at most.
//!
//! A tile is compiled by itself ([`apart`]): as a part of the loops around it the compiler keeps sums in memory.

use std::ops::Range;

use super::panels::{Ahead, PART_ROWS};
use super::tile::FEW_PARTIAL;
use super::tokens::{TokenTile, tiles, with_width};
use super::{Element, HALF, Piece};
use crate::activations::Activations;
use crate::grid::Block;
use crate::simd::{Kernel, LANES, Simd, apart, each};

/// Tokens of a tile.
pub(super) const TILE_TOKENS: usize = FEW_PARTIAL;

/// The partial sums in the order in which they are computed: each is added to the last one that waits as soon as it can be
/// in the order of [`Simd::sum_halves`].
const ORDER: [usize; HALF] = [0, 4, 2, 6, 1, 5, 3, 7];

/// How many wait at most.
const WAITING: usize = ORDER.len().ilog2() as usize;

/// The rows of a part over a block of columns, sixteen to a vector: of the first sixteen rows all columns of the first
/// partial sum, then those of the next.
pub(super) struct Transpose<'a, E> {
    pub(super) rows: [&'a [u8]; PART_ROWS],
    pub(super) out: &'a mut [[f32; HALF]],
    pub(super) element: E,
}

impl<E: Element> Kernel for Transpose<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let whole = E::Chunk::split(self.rows[0]).0.len();
        let chunks = self.rows[0].len().div_ceil(size_of::<E::Chunk>());
        let out: &mut [[f32; LANES]] = self.out.as_flattened_mut().as_chunks_mut().0;
        let rows = self.rows.as_chunks::<LANES>().0;
        for (rows, out) in rows.iter().zip(out.chunks_exact_mut(HALF * chunks)) {
            let pieces: [&[E::Chunk]; LANES] =
                each!(&[][..], |r| &E::Chunk::split(rows[r]).0[..whole]);
            for chunk in 0..whole {
                let columns = s.transpose_halves(each!(s.splat(0.0), |r| {
                    let rows = [&pieces[r][chunk], &pieces[r + HALF][chunk]];
                    self.element.load(s, rows)
                }));
                put(s, columns, chunk, chunks, out);
            }
            if whole < chunks {
                let tail = |r: usize| E::Chunk::pad(E::Chunk::split(rows[r]).1);
                let columns = s.transpose_halves(each!(s.splat(0.0), |r| {
                    self.element.load(s, [&tail(r), &tail(r + HALF)])
                }));
                put(s, columns, whole, chunks, out);
            }
        }
    }
}

/// Writes the columns of a chunk to where they are multiplied.
#[inline(always)]
fn put<S: Simd>(
    s: S,
    columns: [S::F; HALF],
    chunk: usize,
    chunks: usize,
    out: &mut [[f32; LANES]],
) {
    for (pass, column) in ORDER.into_iter().enumerate() {
        s.store(columns[column], &mut out[pass * chunks + chunk]);
    }
}

/// Evaluates an expression for each pass, whose number is a constant.
macro_rules! for_each_pass {
    ($PASS:ident => $call:expr) => {
        for_each_pass!($PASS => $call, 0 1 2 3 4 5 6 7)
    };
    ($PASS:ident => $call:expr, $($value:literal)*) => {
        $({
            const $PASS: usize = $value;
            $call;
        })*
    };
}

/// The rows of a part times some tokens over a block of columns.
pub(super) struct Tiles<'a, 'b> {
    /// What [`Transpose`] wrote.
    pub(super) converted: &'a [[f32; HALF]],
    pub(super) x: &'a Activations<'a>,
    pub(super) tokens: Range<usize>,
    pub(super) cols: Range<usize>,
    pub(super) out: Block<'b, f32>,
    /// Which columns of the output are the rows.
    pub(super) place: Range<usize>,
    pub(super) ahead: Ahead<'a>,
}

impl Kernel for Tiles<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        for tile in tiles(self.tokens.clone(), TILE_TOKENS) {
            self.ahead.prefetch(s);
            with_width!(TILE_TOKENS, tile, T => self.tile::<S, T>(s, tile));
        }
    }
}

impl Tiles<'_, '_> {
    /// All rows times a tile of `T` tokens.
    #[inline(always)]
    fn tile<S: Simd, const T: usize>(&mut self, s: S, tile: TokenTile) {
        let x: [&[f32]; T] = each!(&[][..], |t| &self.x.row(tile.token + t)[self.cols.clone()]);
        let chunks = self.cols.len().div_ceil(HALF);
        let starts = self.place.clone().step_by(LANES);
        let weights = self.converted.as_flattened().as_chunks().0;
        for (first, weights) in starts.zip(weights.chunks_exact(HALF * chunks)) {
            let dots = apart(s, Tile { weights, x });
            let place = first..self.place.end.min(first + LANES);
            for (t, dots) in dots.iter().enumerate() {
                let out = &mut self.out.row(tile.token + t)[place.clone()];
                for (out, dot) in out.iter_mut().zip(dots) {
                    *out = match self.cols.start {
                        0 => *dot,
                        _ => *out + *dot,
                    };
                }
            }
        }
    }
}

/// Sixteen rows times `T` tokens over a block of columns.
struct Tile<'a, const T: usize> {
    weights: &'a [[f32; LANES]],
    x: [&'a [f32]; T],
}

impl<const T: usize> Kernel for Tile<'_, T> {
    type Output = [[f32; LANES]; T];

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Self::Output {
        let mut waiting = [[[0.0; LANES]; T]; WAITING];
        let mut passes = self.weights.chunks_exact(self.weights.len() / HALF);
        // Written out, so that what each pass adds up is known when it is compiled.
        for_each_pass!(PASS => {
            self.pass::<S, PASS>(s, passes.next().expect("eight passes"), &mut waiting);
        });
        waiting[0]
    }
}

impl<const T: usize> Tile<'_, T> {
    /// Computes a partial sum, and adds it to those that wait for it.
    #[inline(always)]
    fn pass<S: Simd, const PASS: usize>(
        &self,
        s: S,
        weights: &[[f32; LANES]],
        waiting: &mut [[[f32; LANES]; T]; WAITING],
    ) {
        let column = ORDER[PASS];
        let whole = self.x[0].len() / HALF;
        let x: [(&[[f32; HALF]], &[f32]); T] = each!((&[][..], &[][..]), |t| self.x[t].as_chunks());
        let columns: [&[[f32; HALF]]; T] = each!(&[][..], |t| &x[t].0[..whole]);
        let (weights, tail) = weights.split_at(whole);
        let mut sums = [s.splat(0.0); T];
        for (chunk, w) in weights.iter().enumerate() {
            let w = s.load(w);
            for t in 0..T {
                sums[t] = s.fma(w, s.splat(columns[t][chunk][column]), sums[t]);
            }
        }
        for w in tail {
            let w = s.load(w);
            for t in 0..T {
                let x = x[t].1.get(column).copied().unwrap_or(0.0);
                sums[t] = s.fma(w, s.splat(x), sums[t]);
            }
        }
        // As many wait as the number of the pass has ones in binary; those of its last digits are added.
        let count = PASS.count_ones() as usize;
        let place = count - PASS.trailing_ones() as usize;
        for earlier in waiting[place..count].iter().rev() {
            for t in 0..T {
                sums[t] = s.add(s.load(&earlier[t]), sums[t]);
            }
        }
        for t in 0..T {
            s.store(sums[t], &mut waiting[place][t]);
        }
    }
}
