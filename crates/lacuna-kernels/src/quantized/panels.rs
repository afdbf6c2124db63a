//! Many tokens: blocks of rows are packed into panels, and every tile of tokens is multiplied with
//! them while they are in a cache.
//!
//! Panels of 1024 columns stream from the second-level cache. Shorter ones would fit the first, but
//! write and read the sums more often, which costs more.

use std::marker::PhantomData;
use std::ops::Range;

use super::formats::Format;
use super::panel::{Extra, StoredBlock, Sums, step};
use super::{load, parts, prefetch_ahead, store};
use crate::activations::{ActivationBlock, Activations, BLOCK};
use crate::grid::Block;
use crate::matrix::Matrix;
use crate::simd::{Kernel, LANES, Simd, each};
use crate::tile::Tile;

/// Blocks of columns per panel, a multiple of what any file block holds.
const PANEL_BLOCKS: usize = 32;

/// Stored blocks of a panel: two tiles of rows.
const PANEL_LEN: usize = 2 * PANEL_BLOCKS;

/// Panels that are packed before tokens are multiplied with them.
const PANELS: usize = 4;

/// Blocks that a worker's buffer holds.
pub(crate) const BUFFER_LEN: usize = PANELS * PANEL_LEN;

/// Tokens that all packed panels are multiplied with before the next: a multiple of every level's
/// tile.
const TOKENS_TOGETHER: usize = 96;

/// One block of columns of the output, by packed panels.
pub(super) struct Panels<'a, 'b, D> {
    pub(super) weights: &'a Matrix<'a>,
    pub(super) x: &'a Activations<'a>,
    pub(super) out: &'a mut Block<'b, f32>,
    pub(super) buffer: &'a mut [StoredBlock],
    pub(super) format: PhantomData<D>,
}

/// Some tokens and some blocks of columns.
#[derive(Clone)]
struct Part {
    tokens: Range<usize>,
    columns: Range<usize>,
}

impl<D: Format> Panels<'_, '_, D> {
    pub(super) fn multiply<S: Simd>(&mut self, s: S) {
        let tile_rows = self.weights.rows().min(LANES);
        // In a matrix of fewer rows than lanes a tile is one row.
        let tile_rows = if tile_rows < LANES { 1 } else { LANES };
        let panel_rows = S::TILES * tile_rows;
        let rows = self.out.cols();
        let blocks = self.weights.cols() / BLOCK;
        for first in rows.clone().step_by(PANELS * panel_rows) {
            let rows = first..rows.end.min(first + PANELS * panel_rows);
            for start in (0..blocks).step_by(PANEL_BLOCKS) {
                let columns = start..blocks.min(start + PANEL_BLOCKS);
                for (index, first) in rows.clone().step_by(tile_rows).enumerate() {
                    self.pack(s, index, &Tile::new(self.weights, first), &columns);
                }
                for token in (0..self.x.tokens()).step_by(TOKENS_TOGETHER) {
                    let end = self.x.tokens().min(token + TOKENS_TOGETHER);
                    let part = Part {
                        tokens: token..end,
                        columns: columns.clone(),
                    };
                    for (panel, first) in rows.clone().step_by(panel_rows).enumerate() {
                        let tile = Tile::new(self.weights, first);
                        if S::TILES == 2 && first + tile_rows < rows.end {
                            let tiles = [tile, Tile::new(self.weights, first + tile_rows)];
                            self.panel::<S, 2>(s, panel, first, &tiles, &part);
                        } else {
                            self.panel::<S, 1>(s, panel, first, &[tile], &part);
                        }
                    }
                }
            }
        }
    }

    /// Packs the `index`-th tile of rows.
    fn pack<S: Simd>(&mut self, s: S, index: usize, tile: &Tile<'_>, columns: &Range<usize>) {
        let (panel, r) = (index / S::TILES, index % S::TILES);
        s.vectorize(Pack {
            tile,
            start: columns.start,
            out: &mut self.buffer[panel * PANEL_LEN..][r * PANEL_BLOCKS..][..columns.len()],
            format: PhantomData::<D>,
        });
    }

    /// Multiplies a packed panel with some tokens.
    fn panel<S: Simd, const R: usize>(
        &mut self,
        s: S,
        panel: usize,
        first: usize,
        tiles: &[Tile<'_>; R],
        part: &Part,
    ) {
        let panel = &self.buffer[panel * PANEL_LEN..][..PANEL_LEN];
        let mut call = TokenTiles::<R> {
            panel: std::array::from_fn(|r| &panel[r * PANEL_BLOCKS..][..part.columns.len()]),
            x: self.x,
            start: first - self.out.cols().start,
            lanes: std::array::from_fn(|r| tiles[r].lanes()),
            part: part.clone(),
            out: self.out,
        };
        match D::EXTRA {
            Extra::Nothing => call.run::<S, Plain>(s),
            Extra::Minimum => call.run::<S, WithMinimum>(s),
            Extra::SecondScale => call.run::<S, WithSecondScale>(s),
        }
    }
}

/// A packed panel and some tokens; independent of the storage type.
struct TokenTiles<'a, 'b, const R: usize> {
    panel: [&'a [StoredBlock]; R],
    x: &'a Activations<'a>,
    /// Where the panel's rows are in the block of the output.
    start: usize,
    lanes: [Range<usize>; R],
    part: Part,
    out: &'a mut Block<'b, f32>,
}

impl<const R: usize> TokenTiles<'_, '_, R> {
    fn run<S: Simd, E: HasExtra>(&mut self, s: S) {
        for token in self.part.tokens.clone().step_by(S::TOKENS) {
            match (self.part.tokens.end - token).min(S::TOKENS) {
                1 => self.tile::<S, E, 1>(s, token),
                2 if S::TOKENS >= 2 => self.tile::<S, E, 2>(s, token),
                3 if S::TOKENS >= 3 => self.tile::<S, E, 3>(s, token),
                4 if S::TOKENS >= 4 => self.tile::<S, E, 4>(s, token),
                5 if S::TOKENS >= 5 => self.tile::<S, E, 5>(s, token),
                6 if S::TOKENS >= 6 => self.tile::<S, E, 6>(s, token),
                count => unreachable!("a tile of {count} tokens"),
            }
        }
    }

    fn tile<S: Simd, E: HasExtra, const T: usize>(&mut self, s: S, token: usize) {
        let columns = &self.part.columns;
        s.vectorize(TokenTile::<E, R, T> {
            panel: self.panel,
            x: &self.x.tile::<T>(token)[columns.clone()],
            token,
            start: self.start,
            lanes: &self.lanes,
            continues: columns.start > 0,
            out: self.out,
            extra: PhantomData,
        });
    }
}

/// Packs the blocks of columns from `start` on, as many as `out` holds.
struct Pack<'a, 'b, D> {
    tile: &'a Tile<'b>,
    start: usize,
    out: &'a mut [StoredBlock],
    format: PhantomData<D>,
}

impl<D: Format> Kernel for Pack<'_, '_, D> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let first = self.start / parts::<D>();
        for (index, out) in self.out.chunks_exact_mut(parts::<D>()).enumerate() {
            prefetch_ahead::<S, D>(s, self.tile, first + index, S::TILES * LANES);
            let header = D::header(s, self.tile, first + index);
            for (part, out) in out.iter_mut().enumerate() {
                out.store(s, &D::block(s, self.tile, first + index, part, &header));
            }
        }
    }
}

/// Adds the products of a packed panel and a tile of tokens.
struct TokenTile<'a, 'b, E, const R: usize, const T: usize> {
    panel: [&'a [StoredBlock]; R],
    x: &'a [ActivationBlock<T>],
    /// The first token.
    token: usize,
    /// Where the panel's rows are in the block of the output.
    start: usize,
    lanes: &'a [Range<usize>; R],
    /// Whether the output holds the sums of the columns before.
    continues: bool,
    out: &'a mut Block<'b, f32>,
    extra: PhantomData<E>,
}

impl<E: HasExtra, const R: usize, const T: usize> Kernel for TokenTile<'_, '_, E, R, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut sums: Sums<S, R, T> = [[s.splat(0.0); T]; R];
        if self.continues {
            for t in 0..T {
                let mut out = &self.out.row(self.token + t)[self.start..];
                for r in 0..R {
                    sums[r][t] = load(s, out, &self.lanes[r]);
                    out = &out[self.lanes[r].len()..];
                }
            }
        }
        // Where sums are written at the end of this tile, or read at the start of the next one.
        let ahead = self.token + if self.continues { T } else { 0 };
        for t in 0..T {
            for r in 0..R {
                s.prefetch_line(self.out.address(ahead + t, self.start + r * LANES));
            }
        }
        let second = self.panel[R - 1].iter();
        for ((first, second), x) in self.panel[0].iter().zip(second).zip(self.x) {
            let weights: [&StoredBlock; R] = each!(first, |r| if r == 0 { first } else { second });
            step(s, E::EXTRA, &weights, x, &mut sums);
        }
        for t in 0..T {
            let mut out = &mut self.out.row(self.token + t)[self.start..];
            for r in 0..R {
                store(s, sums[r][t], out, &self.lanes[r]);
                out = &mut out[self.lanes[r].len()..];
            }
        }
    }
}

/// [`Extra`] as a type, so that one kernel serves all storage types that share it.
trait HasExtra {
    const EXTRA: Extra;
}

struct Plain;
struct WithMinimum;
struct WithSecondScale;

impl HasExtra for Plain {
    const EXTRA: Extra = Extra::Nothing;
}

impl HasExtra for WithMinimum {
    const EXTRA: Extra = Extra::Minimum;
}

impl HasExtra for WithSecondScale {
    const EXTRA: Extra = Extra::SecondScale;
}
