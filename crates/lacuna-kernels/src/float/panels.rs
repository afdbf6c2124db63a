//! Many tokens: rows and tokens are brought into panels of f32, every tile of which is multiplied
//! while it is in a cache.
//!
//! ```text
//! each block of columns
//!   each panel of rows                    in the second-level cache
//!     each group of tokens                in the second-level cache
//!       each part of the panel            packed when first met
//!         each tile of tokens             in the first-level cache
//!           each tile of rows
//! ```
//!
//! While a part is multiplied for the first time, the bytes of the next one are prefetched.

use std::marker::PhantomData;
use std::ops::Range;

use super::tile::{MOST_ROWS, rows, step, sums};
use super::tokens::{GROUP_TOKENS, TokenTile, pack, tiles, with_width};
use super::{BLOCK, Element, HALF, Product, blocks};
use crate::simd::{Kernel, LANES, Registers, Simd, each};

/// Rows of a panel.
const PANEL_ROWS: usize = 64;

/// f32 elements of a panel.
pub(super) const PANEL_LEN: usize = PANEL_ROWS * BLOCK;

/// Rows of a part of a panel.
const PART_ROWS: usize = 16;

/// Some rows and some columns of the weights.
#[derive(Clone)]
struct Part {
    rows: Range<usize>,
    cols: Range<usize>,
}

/// Writes the products of the rows of the output with all tokens.
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

impl<E: Element, const P: usize> Panels<'_, '_, E, P> {
    fn multiply<S: Simd>(&mut self, s: S) {
        let (all, tokens) = (self.0.out.cols(), self.0.x.tokens());
        for cols in blocks(self.0.x.cols()) {
            for first in all.clone().step_by(PANEL_ROWS) {
                let panel = Part {
                    rows: first..all.end.min(first + PANEL_ROWS),
                    cols: cols.clone(),
                };
                for token in (0..tokens).step_by(GROUP_TOKENS) {
                    let group = token..tokens.min(token + GROUP_TOKENS);
                    // A single group serves all panels.
                    if first == all.start || tokens > GROUP_TOKENS {
                        let (_, packed) = self.0.buffers.split();
                        pack(s, self.0.x, group.clone(), &cols, packed);
                    }
                    self.panel(s, &panel, &group);
                }
            }
        }
    }

    /// Multiplies a panel with a group of tokens.
    fn panel<S: Simd>(&mut self, s: S, panel: &Part, tokens: &Range<usize>) {
        for first in panel.rows.clone().step_by(PART_ROWS) {
            let part = Part {
                rows: first..panel.rows.end.min(first + PART_ROWS),
                cols: panel.cols.clone(),
            };
            let start = (first - panel.rows.start) * BLOCK;
            let mut ahead = None;
            if tokens.start == 0 {
                self.pack(s, start, &part);
                ahead = self.after(&part);
            }
            let tiles = tiles::<S>(tokens.clone());
            let steps = tiles.clone().count();
            for (index, tile) in tiles.enumerate() {
                if let Some(ahead) = &ahead {
                    self.prefetch(s, ahead, index, steps);
                }
                with_width!(S, tile, T => self.row_tiles::<S, T>(s, start, &part, tile));
            }
        }
    }

    /// The part that is packed after `part`.
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

    /// Prefetches the `index`-th of `steps` pieces of a part's bytes.
    fn prefetch<S: Simd>(&self, s: S, part: &Part, index: usize, steps: usize) {
        let bytes = self.0.bytes(&part.cols);
        let lines = bytes.len().div_ceil(64);
        let all = part.rows.len() * lines;
        for line in all * index / steps..all * (index + 1) / steps {
            let row = self.0.weights.row(part.rows.start + line / lines);
            s.prefetch_line(row.as_ptr().wrapping_add(bytes.start + line % lines * 64));
        }
    }

    /// Converts a part of a panel to its place, which is `start` of the buffer.
    fn pack<S: Simd>(&mut self, s: S, start: usize, part: &Part) {
        let (bytes, chunks) = (self.0.bytes(&part.cols), part.cols.len().div_ceil(HALF));
        let (panel, _) = self.0.buffers.split();
        for (index, first) in part.rows.clone().step_by(2 * P).enumerate() {
            // Rows that do not exist repeat the last one.
            let row = |r: usize| {
                let row = self.0.weights.row((first + r).min(part.rows.end - 1));
                &row[bytes.clone()]
            };
            s.vectorize(Pack::<E, P> {
                rows: [0, P].map(|half| std::array::from_fn(|p| row(half + p))),
                out: &mut panel[start + index * 2 * P * BLOCK..][..P * LANES * chunks],
                element: PhantomData,
            });
        }
    }

    /// Multiplies a packed part with a tile of tokens.
    fn row_tiles<S: Simd, const T: usize>(
        &mut self,
        s: S,
        start: usize,
        part: &Part,
        tile: TokenTile,
    ) {
        let (all, chunks) = (self.0.out.cols(), part.cols.len().div_ceil(HALF));
        let (panel, group) = self.0.buffers.split();
        for (index, first) in part.rows.clone().step_by(2 * P).enumerate() {
            let end = part.rows.end.min(first + 2 * P);
            let panel = &panel[start + index * 2 * P * BLOCK..][..P * LANES * chunks];
            let dots = s.vectorize(Tile::<P, T> {
                weights: panel.as_chunks().0.as_chunks().0,
                x: tile.columns(group, &part.cols),
            });
            let place = first - all.start..end - all.start;
            tile.add(&dots, &mut self.0.out, place, part.cols.start == 0);
        }
    }
}

/// The rows of a tile over a block of columns, two to a vector.
struct Pack<'a, E, const P: usize> {
    rows: [[&'a [u8]; P]; 2],
    out: &'a mut [f32],
    element: PhantomData<E>,
}

impl<E: Element, const P: usize> Kernel for Pack<'_, E, P> {
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
struct Tile<'a, const P: usize, const T: usize> {
    weights: &'a [[[f32; LANES]; P]],
    x: &'a [[[f32; HALF]; T]],
}

impl<const P: usize, const T: usize> Kernel for Tile<'_, P, T> {
    type Output = [[f32; MOST_ROWS]; T];

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Self::Output {
        let mut partial = [[s.splat(0.0); T]; P];
        for (w, x) in self.weights.iter().zip(self.x) {
            let w = each!(s.splat(0.0), |p| s.load(&w[p]));
            step(s, w, each!(&x[0], |t| &x[t]), &mut partial);
        }
        rows::<S, P, T>(s, &sums(s, &partial))
    }
}
