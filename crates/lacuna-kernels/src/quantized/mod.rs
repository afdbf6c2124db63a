//! Products of quantized matrices and quantized activations.
//!
//! Sixteen rows are the lanes of a vector. Per block of 32 columns the integer dot products are
//! exact; they are scaled and added in f32, block after block. So a result depends on its row and
//! its token alone: not on the other tokens, not on how rows are cut into tasks, and not on the
//! level, as all levels fuse the same operations.
//!
//! One token streams rows from the file layout through registers. Several tokens share them: blocks
//! of one or two tiles are packed into a buffer of the worker that fits its cache, and every tile
//! of tokens is multiplied with it before the next blocks are read.

mod formats;
mod panel;
mod rows;

pub(crate) use panel::StoredBlock;
pub(crate) use rows::Scratch as RowScratch;

use std::marker::PhantomData;
use std::ops::Range;

use crate::activations::{ActivationBlock, Activations, BLOCK, WIDEST};
use crate::dtype::DType;
use crate::grid::Block;
use crate::matrix::Matrix;
use crate::simd::{Kernel, LANES, Registers, Simd, each};
use crate::tile::Tile;
use formats::{Format, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0};
use panel::{Extra, Sums, step};
use rows::Rows;

/// Blocks of columns per packed panel: 512 columns, a multiple of what any file block holds. Two
/// tiles of them and their activations fit a cache of 32 KiB.
const PANEL_BLOCKS: usize = 16;

/// The same for few tokens: so few that the next blocks arrive from memory meanwhile.
const NARROW_PANEL_BLOCKS: usize = 8;

/// Tokens up to which panels are narrow.
const FEW_TOKENS: usize = 16;

/// Blocks that a worker's panel buffer holds.
pub(crate) const PANEL_LEN: usize = 2 * PANEL_BLOCKS;

/// How far ahead of its use a block is prefetched when one token streams the matrix, in bytes of
/// each row.
const PREFETCH_BYTES: usize = 544;

/// One block of columns of the output `[tokens, rows]`; the block covers all tokens.
pub(crate) struct Product<'a, 'b> {
    pub(crate) weights: &'a Matrix<'a>,
    pub(crate) x: &'a Activations<'a>,
    pub(crate) out: Block<'b, f32>,
    pub(crate) panel: &'a mut [StoredBlock],
    pub(crate) rows: &'a mut RowScratch,
}

impl Kernel for Product<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.weights.dtype() {
            DType::Q8_0 => self.format::<S, Q8_0>(s),
            DType::Q4_0 => self.format::<S, Q4_0>(s),
            DType::Q4_1 => self.format::<S, Q4_1>(s),
            DType::Q5_0 => self.format::<S, Q5_0>(s),
            DType::Q5_1 => self.format::<S, Q5_1>(s),
            DType::Q4K => self.format::<S, Q4K>(s),
            DType::Q5K => self.format::<S, Q5K>(s),
            DType::Q6K => self.format::<S, Q6K>(s),
            DType::F32 | DType::F16 | DType::Bf16 => unreachable!("not a quantized matrix"),
        }
    }
}

/// The 32-column blocks of a file block.
#[inline(always)]
fn parts<D: Format>() -> usize {
    D::DTYPE.block_len() / BLOCK
}

impl Product<'_, '_> {
    fn format<S: Simd, D: Format>(mut self, s: S) {
        let rows = self.out.cols();
        if self.x.tokens() == 1 {
            s.vectorize(Rows {
                weights: self.weights,
                x: self.x.single(),
                first: rows.start,
                out: self.out.row(0),
                scratch: self.rows,
                format: PhantomData::<D>,
            });
            return;
        }
        let mut first = rows.start;
        while first < rows.end {
            let tile = Tile::new(self.weights, first);
            let next = first + tile.lanes().len();
            let skinny = S::REGISTERS == Registers::Many && self.x.tokens() <= WIDEST;
            first = if skinny {
                self.stream::<S, D>(s, first, tile)
            } else if S::TILES == 2 && next < rows.end {
                let second = Tile::new(self.weights, next);
                self.panel::<S, D, 2>(s, first, [tile, second])
            } else {
                self.panel::<S, D, 1>(s, first, [tile])
            };
        }
    }

    /// Two to [`WIDEST`] tokens and a tile; returns the row after it.
    fn stream<S: Simd, D: Format>(&mut self, s: S, first: usize, tile: Tile<'_>) -> usize {
        match self.x.tile {
            2 => self.stream_tile::<S, D, 2>(s, first, tile),
            4 => self.stream_tile::<S, D, 4>(s, first, tile),
            8 => self.stream_tile::<S, D, 8>(s, first, tile),
            count => unreachable!("a tile of {count} tokens"),
        }
    }

    fn stream_tile<S: Simd, D: Format, const T: usize>(
        &mut self,
        s: S,
        first: usize,
        tile: Tile<'_>,
    ) -> usize {
        s.vectorize(Stream {
            tile: &tile,
            x: self.x.padded_tile::<T>(),
            tokens: self.x.tokens(),
            start: first - self.out.cols().start,
            out: &mut self.out,
            format: PhantomData::<D>,
        });
        first + tile.lanes().len()
    }

    /// All tokens, `R` tiles of rows; returns the row after them.
    fn panel<S: Simd, D: Format, const R: usize>(
        &mut self,
        s: S,
        first: usize,
        tiles: [Tile<'_>; R],
    ) -> usize {
        let blocks = self.weights.cols() / BLOCK;
        let together = if self.x.tokens() <= FEW_TOKENS {
            NARROW_PANEL_BLOCKS
        } else {
            PANEL_BLOCKS
        };
        for start in (0..blocks).step_by(together) {
            let columns = start..blocks.min(start + together);
            let panel = &mut self.panel.as_chunks_mut::<R>().0[..columns.len()];
            s.vectorize(Pack {
                tiles: &tiles,
                start,
                panel,
                format: PhantomData::<D>,
            });
            match D::EXTRA {
                Extra::Nothing => self.tokens::<S, Plain, R>(s, first, &tiles, &columns),
                Extra::Minimum => self.tokens::<S, WithMinimum, R>(s, first, &tiles, &columns),
                Extra::SecondScale => {
                    self.tokens::<S, WithSecondScale, R>(s, first, &tiles, &columns);
                }
            }
        }
        first + tiles.iter().map(|tile| tile.lanes().len()).sum::<usize>()
    }

    /// Multiplies the packed blocks with all tokens.
    fn tokens<S: Simd, E: HasExtra, const R: usize>(
        &mut self,
        s: S,
        first: usize,
        tiles: &[Tile<'_>; R],
        columns: &Range<usize>,
    ) {
        let tokens = self.x.tokens();
        for token in (0..tokens).step_by(S::TOKENS) {
            match (tokens - token).min(S::TOKENS) {
                1 => self.token_tile::<S, E, R, 1>(s, first, token, tiles, columns),
                2 if S::TOKENS >= 2 => {
                    self.token_tile::<S, E, R, 2>(s, first, token, tiles, columns)
                }
                3 if S::TOKENS >= 3 => {
                    self.token_tile::<S, E, R, 3>(s, first, token, tiles, columns)
                }
                4 if S::TOKENS >= 4 => {
                    self.token_tile::<S, E, R, 4>(s, first, token, tiles, columns)
                }
                5 if S::TOKENS >= 5 => {
                    self.token_tile::<S, E, R, 5>(s, first, token, tiles, columns)
                }
                6 if S::TOKENS >= 6 => {
                    self.token_tile::<S, E, R, 6>(s, first, token, tiles, columns)
                }
                count => unreachable!("a tile of {count} tokens"),
            }
        }
    }

    fn token_tile<S: Simd, E: HasExtra, const R: usize, const T: usize>(
        &mut self,
        s: S,
        first: usize,
        token: usize,
        tiles: &[Tile<'_>; R],
        columns: &Range<usize>,
    ) {
        s.vectorize(TokenTile::<E, R, T> {
            panel: &self.panel.as_chunks::<R>().0[..columns.len()],
            x: &self.x.tile::<T>(token)[columns.clone()],
            token,
            start: first - self.out.cols().start,
            lanes: std::array::from_fn(|r| tiles[r].lanes()),
            continues: columns.start > 0,
            out: &mut self.out,
            extra: PhantomData,
        });
    }
}

/// Sums so far of a tile's rows: `lanes` are in `out`, the others 0.
#[inline(always)]
fn load<S: Simd>(s: S, out: &[f32], lanes: &Range<usize>) -> S::F {
    if let (LANES, Some(all)) = (lanes.len(), out.first_chunk()) {
        return s.load(all);
    }
    let mut sums = [0.0; LANES];
    sums[lanes.clone()].copy_from_slice(&out[..lanes.len()]);
    s.load(&sums)
}

/// Writes what [`load`] reads.
#[inline(always)]
fn store<S: Simd>(s: S, sums: S::F, out: &mut [f32], lanes: &Range<usize>) {
    if let (LANES, Some(all)) = (lanes.len(), out.first_chunk_mut()) {
        return s.store(sums, all);
    }
    let mut all = [0.0; LANES];
    s.store(sums, &mut all);
    out[..lanes.len()].copy_from_slice(&all[lanes.clone()]);
}

/// A few tokens and sixteen rows, from the file layout.
struct Stream<'a, 'b, 'c, D, const T: usize> {
    tile: &'a Tile<'b>,
    x: &'a [ActivationBlock<T>],
    /// How many of the `T` exist.
    tokens: usize,
    /// Where the tile's rows are in the block of the output.
    start: usize,
    out: &'a mut Block<'c, f32>,
    format: PhantomData<D>,
}

impl<D: Format, const T: usize> Kernel for Stream<'_, '_, '_, D, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let mut sums: Sums<S, 1, T> = [[s.splat(0.0); T]];
        for (index, x) in self.x.chunks_exact(parts::<D>()).enumerate() {
            prefetch_ahead::<S, D>(s, self.tile, index, LANES);
            let header = D::header(s, self.tile, index);
            for (part, x) in x.iter().enumerate() {
                let block = D::block(s, self.tile, index, part, &header);
                step(s, D::EXTRA, &[block], x, &mut sums);
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

/// Packs the blocks of columns from `start` on, as many as the panel holds.
struct Pack<'a, 'b, D, const R: usize> {
    tiles: &'a [Tile<'b>; R],
    start: usize,
    panel: &'a mut [[StoredBlock; R]],
    format: PhantomData<D>,
}

impl<D: Format, const R: usize> Kernel for Pack<'_, '_, D, R> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let first = self.start / parts::<D>();
        // Tile by tile: 16 streams of rows at a time are easier to prefetch than 32.
        for (r, tile) in self.tiles.iter().enumerate() {
            for (index, panel) in self.panel.chunks_exact_mut(parts::<D>()).enumerate() {
                prefetch_ahead::<S, D>(s, tile, first + index, R * LANES);
                let header = D::header(s, tile, first + index);
                for (part, out) in panel.iter_mut().enumerate() {
                    out[r].store(s, &D::block(s, tile, first + index, part, &header));
                }
            }
        }
    }
}

/// Adds the products of a packed panel and a tile of tokens.
struct TokenTile<'a, 'b, E, const R: usize, const T: usize> {
    panel: &'a [[StoredBlock; R]],
    x: &'a [ActivationBlock<T>],
    /// The first token.
    token: usize,
    /// Where the panel's rows are in the block of the output.
    start: usize,
    lanes: [Range<usize>; R],
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
        for (weights, x) in self.panel.iter().zip(self.x) {
            step(s, E::EXTRA, weights, x, &mut sums);
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

/// Prefetches what will be read [`PREFETCH_BYTES`] after a file block, in this tile or the one
/// `next` rows further on.
#[inline(always)]
fn prefetch_ahead<S: Simd, D: Format>(s: S, tile: &Tile<'_>, index: usize, next: usize) {
    let len = D::DTYPE.block_bytes();
    let mut ahead = index * len + PREFETCH_BYTES;
    if ahead >= tile.row_bytes() {
        ahead += (next - 1) * tile.row_bytes();
    }
    let mut line = ahead.next_multiple_of(64);
    while line < ahead + len {
        s.prefetch(tile, line);
        line += 64;
    }
}
