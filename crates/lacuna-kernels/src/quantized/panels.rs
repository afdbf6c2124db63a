//! Many tokens: blocks of rows are packed into panels, and every tile of tokens is multiplied with
//! them while they are in a cache.

use std::marker::PhantomData;
use std::ops::Range;

use super::formats::Format;
use super::packing::{Bytes, Lines, Packing, Squares, Vectors};
use super::panel::{HasExtra, Scales, Stored, Sums, step};
use super::streams::Kept;
use super::{load, parts, prefetch_ahead, store};
use crate::activations::{ActivationBlock, Activations, BLOCK};
use crate::grid::Block;
use crate::matrix::Matrix;
use crate::simd::{Chunk, Kernel, LANES, Line, Products, Simd, each};
use crate::tile::Tile;

/// Panels that are packed before tokens are multiplied with them.
const PANELS: usize = 4;

/// Most tiles of rows in a panel.
const MOST_TILES: usize = 2;

/// Most blocks of columns in a panel.
const MOST_BLOCKS: usize = 96;

/// Most lines that the weights of a tile take in a panel: eight per block where panels are longest;
/// twice as many per block take half the blocks.
const MOST_LINES: usize = 8 * MOST_BLOCKS;

/// Tokens for which widening what is packed costs more than it saves.
const FEW_TOKENS: usize = 24;

/// Tokens that all packed panels are multiplied with before the next: a multiple of every level's
/// tile.
const TOKENS_TOGETHER: usize = 96;

/// Blocks of columns of sixteen rows that a [`Buffer`] has room for, as bytes.
pub(super) const BUFFER_BLOCKS: usize = PANELS * MOST_TILES * MOST_BLOCKS;

/// Where a worker packs panels: tile after tile, block after block.
pub(crate) struct Buffer {
    pub(crate) words: Box<[Line]>,
    pub(super) scales: Box<[Scales]>,
    pub(super) sums: Box<Kept>,
}

impl Buffer {
    /// Lines that it has room for.
    pub(crate) const LINES: usize = PANELS * MOST_TILES * MOST_LINES;

    pub(crate) fn new() -> Self {
        Self {
            words: vec![Line::ZERO; Self::LINES].into_boxed_slice(),
            scales: vec![Scales::ZERO; BUFFER_BLOCKS].into_boxed_slice(),
            sums: Box::new([[Chunk::ZERO; LANES]; _]),
        }
    }

    pub(crate) fn bytes(&self) -> usize {
        size_of_val(&*self.words) + size_of_val(&*self.scales) + size_of_val(&*self.sums)
    }
}

/// Weights that will be packed next, fetched a few lines at a time while tokens are multiplied with
/// those packed before.
#[derive(Clone)]
pub(super) struct Ahead {
    next: *const u8,
    /// Bytes left of this row, and of each row after it.
    left: usize,
    row_bytes: usize,
    /// From the end of what is needed of a row to the next one.
    gap: usize,
    rows: usize,
    /// Lines to fetch with each block of columns.
    lines: usize,
}

impl Ahead {
    /// The bytes in `columns` of `rows`, as far as they exist.
    fn new(weights: &Matrix<'_>, rows: &Range<usize>, columns: &Range<usize>) -> Self {
        let rows = rows.start.min(weights.rows())..rows.end.min(weights.rows());
        let stride = weights.row_bytes();
        let start = rows.start * stride + columns.start;
        Self {
            next: weights.bytes().as_ptr().wrapping_add(start),
            left: columns.len(),
            row_bytes: columns.len(),
            gap: stride - columns.len(),
            rows: rows.len(),
            lines: 0,
        }
    }

    /// Spreads the lines over `steps` calls of [`Ahead::fetch`].
    pub(super) fn spread(&mut self, steps: usize) {
        let lines = self.rows * (self.row_bytes.div_ceil(64) + 1);
        self.lines = lines.div_ceil(steps.max(1));
    }

    #[inline(always)]
    pub(super) fn fetch<S: Simd>(&mut self, s: S) {
        if self.rows == 0 {
            return;
        }
        for _ in 0..self.lines {
            s.prefetch_far(self.next);
            let step = self.left.min(64);
            self.next = self.next.wrapping_add(step);
            self.left -= step;
            if self.left == 0 {
                self.next = self.next.wrapping_add(self.gap);
                self.left = self.row_bytes;
                self.rows = self.rows.saturating_sub(1);
            }
        }
    }
}

/// One block of columns of the output, by packed panels.
pub(super) struct Panels<'a, 'b, D> {
    pub(super) weights: &'a Matrix<'a>,
    pub(super) x: &'a Activations<'a>,
    pub(super) out: &'a mut Block<'b, f32>,
    /// Where the rows begin that this thread probably goes on with.
    pub(super) next_row: usize,
    pub(super) buffer: &'a mut Buffer,
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
        // Constants, so that no level compiles the packings of another.
        #[cfg(target_arch = "x86_64")]
        if const { S::MAY_HAVE_AMX } && self.x.are_of_tiles() {
            return self.tiles(s);
        }
        if const { matches!(S::PRODUCTS, Products::Quads) } {
            return self.packed::<S, Bytes>(s);
        }
        if const { matches!(S::PRODUCTS, Products::Squares) } {
            return self.packed::<S, Squares>(s);
        }
        if self.x.tokens() <= FEW_TOKENS {
            self.packed::<S, D::FewPairs>(s);
        } else {
            self.packed::<S, D::Pairs>(s);
        }
    }

    fn packed<S: Simd, P: Vectors>(&mut self, s: S) {
        // In a matrix of fewer rows than lanes a tile is one row.
        let tile_rows = if self.weights.rows() < LANES {
            1
        } else {
            LANES
        };
        let panel_rows = S::TILES * tile_rows;
        let rows = self.out.cols();
        let blocks = self.weights.cols() / BLOCK;
        for first in rows.clone().step_by(PANELS * panel_rows) {
            let rows = first..rows.end.min(first + PANELS * panel_rows);
            for start in (0..blocks).step_by(P::PANEL_BLOCKS) {
                let columns = start..blocks.min(start + P::PANEL_BLOCKS);
                for (index, first) in rows.clone().step_by(tile_rows).enumerate() {
                    self.pack::<S, P>(
                        s,
                        index * P::PANEL_BLOCKS,
                        &Tile::new(self.weights, first),
                        &columns,
                    );
                }
                let mut ahead = self.ahead(&rows, columns.end, P::PANEL_BLOCKS);
                let tiles = self.x.tokens().div_ceil(S::TOKENS);
                ahead.spread(rows.len().div_ceil(panel_rows) * tiles * columns.len());
                for token in (0..self.x.tokens()).step_by(TOKENS_TOGETHER) {
                    let end = self.x.tokens().min(token + TOKENS_TOGETHER);
                    let part = Part {
                        tokens: token..end,
                        columns: columns.clone(),
                    };
                    for (panel, first) in rows.clone().step_by(panel_rows).enumerate() {
                        self.rows::<S, P>(s, panel, first..rows.end, &part, &mut ahead);
                    }
                }
            }
        }
    }

    /// What is packed after `rows` and the columns before `column`: the next columns, or else the
    /// first ones of the next rows.
    pub(super) fn ahead(&self, rows: &Range<usize>, column: usize, blocks: usize) -> Ahead {
        let count = self.weights.cols() / BLOCK;
        let (rows, start) = if column < count {
            (rows.clone(), column)
        } else if rows.end < self.out.cols().end {
            (rows.end..rows.end + rows.len(), 0)
        } else {
            (self.next_row..self.next_row + rows.len(), 0)
        };
        let byte = |block: usize| block / parts::<D>() * D::DTYPE.block_bytes();
        let columns = byte(start)..byte(count.min(start + blocks));
        Ahead::new(self.weights, &rows, &columns)
    }

    /// Multiplies a packed panel, whose first row is that of `rows`, with some tokens.
    fn rows<S: Simd, P: Vectors>(
        &mut self,
        s: S,
        panel: usize,
        rows: Range<usize>,
        part: &Part,
        ahead: &mut Ahead,
    ) {
        let first = rows.start;
        let tile = Tile::new(self.weights, first);
        // A constant, so that the kernels of two tiles are not compiled where there are none.
        if const { S::TILES < MOST_TILES } {
            return self.panel::<S, P, 1>(s, panel, first, &[tile], part, ahead);
        }
        let next = first + tile.lanes().len();
        if next < rows.end {
            let tiles = [tile, Tile::new(self.weights, next)];
            self.panel::<S, P, MOST_TILES>(s, panel, first, &tiles, part, ahead);
        } else {
            self.panel::<S, P, 1>(s, panel, first, &[tile], part, ahead);
        }
    }

    /// Packs some columns of a tile of rows, from a block of the buffer on.
    pub(super) fn pack<S: Simd, P: Packing>(
        &mut self,
        s: S,
        first: usize,
        tile: &Tile<'_>,
        columns: &Range<usize>,
    ) {
        let words = P::Words::blocks_mut(&mut self.buffer.words);
        s.vectorize(Pack::<D, P> {
            tile,
            start: columns.start,
            words: &mut words[first..][..columns.len()],
            scales: &mut self.buffer.scales[first..][..columns.len()],
            format: PhantomData,
        });
    }

    /// Multiplies a packed panel with some tokens.
    fn panel<S: Simd, P: Vectors, const R: usize>(
        &mut self,
        s: S,
        panel: usize,
        first: usize,
        tiles: &[Tile<'_>; R],
        part: &Part,
        ahead: &mut Ahead,
    ) {
        let words = P::Words::blocks(&self.buffer.words);
        let range = |r: usize| {
            let first = (panel * S::TILES + r) * P::PANEL_BLOCKS;
            first..first + part.columns.len()
        };
        let mut call = TokenTiles::<P, R> {
            words: std::array::from_fn(|r| &words[range(r)]),
            scales: std::array::from_fn(|r| &self.buffer.scales[range(r)]),
            x: self.x,
            start: first - self.out.cols().start,
            lanes: std::array::from_fn(|r| tiles[r].lanes()),
            part: part.clone(),
            ahead,
            out: self.out,
        };
        call.run::<S, D::Extra>(s);
    }
}

/// A packed panel and some tokens; independent of the storage type.
struct TokenTiles<'a, 'b, P: Packing, const R: usize> {
    words: [&'a [P::Words]; R],
    scales: [&'a [Scales]; R],
    x: &'a Activations<'a>,
    /// Where the panel's rows are in the block of the output.
    start: usize,
    lanes: [Range<usize>; R],
    part: Part,
    ahead: &'a mut Ahead,
    out: &'a mut Block<'b, f32>,
}

impl<P: Vectors, const R: usize> TokenTiles<'_, '_, P, R> {
    fn run<S: Simd, E: HasExtra>(&mut self, s: S) {
        for token in self.part.tokens.clone().step_by(S::TOKENS) {
            match (self.part.tokens.end - token).min(S::TOKENS) {
                1 => self.tile::<S, E, 1>(s, token),
                2 => self.tile::<S, E, 2>(s, token),
                3 => self.tile::<S, E, 3>(s, token),
                4 => self.tile::<S, E, 4>(s, token),
                5 => self.tile::<S, E, 5>(s, token),
                6 => self.tile::<S, E, 6>(s, token),
                count => unreachable!("a tile of {count} tokens"),
            }
        }
    }

    fn tile<S: Simd, E: HasExtra, const T: usize>(&mut self, s: S, token: usize) {
        // A constant, so that kernels which a level does not have are not compiled.
        if const { T > S::TOKENS } {
            unreachable!("a tile of {T} tokens, of at most {}", S::TOKENS);
        }
        let columns = &self.part.columns;
        s.vectorize(TokenTile::<P, E, R, T> {
            words: self.words,
            scales: self.scales,
            x: &self.x.tile::<T>(token)[columns.clone()],
            token,
            start: self.start,
            lanes: &self.lanes,
            continues: columns.start > 0,
            ahead: self.ahead,
            out: self.out,
            extra: PhantomData,
        });
    }
}

/// Packs the blocks of columns from `start` on, as many as there is room for.
struct Pack<'a, 'b, D, P: Packing> {
    tile: &'a Tile<'b>,
    start: usize,
    words: &'a mut [P::Words],
    scales: &'a mut [Scales],
    format: PhantomData<D>,
}

impl<D: Format, P: Packing> Kernel for Pack<'_, '_, D, P> {
    type Output = ();

    const MULTIPLIES_BYTES: bool = true;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let first = self.start / parts::<D>();
        let words = self.words.chunks_exact_mut(parts::<D>());
        let scales = self.scales.chunks_exact_mut(parts::<D>());
        for (index, (words, scales)) in words.zip(scales).enumerate() {
            let header = D::header(s, self.tile, first + index);
            for group in 0..parts::<D>() / D::SHARING {
                let shared = D::shared(s, self.tile, first + index, group);
                for part in group * D::SHARING..(group + 1) * D::SHARING {
                    prefetch_ahead::<S, D>(s, self.tile, first + index, part, S::TILES * LANES);
                    let block = D::block(s, self.tile, first + index, part, &header, &shared);
                    P::pack(s, &block, D::OFFSET, &mut words[part]);
                    scales[part].store(s, D::Extra::EXTRA, &block);
                }
            }
        }
    }
}

/// Adds the products of a packed panel and a tile of tokens.
struct TokenTile<'a, 'b, P: Packing, E, const R: usize, const T: usize> {
    words: [&'a [P::Words]; R],
    scales: [&'a [Scales]; R],
    x: &'a [ActivationBlock<T>],
    /// The first token.
    token: usize,
    /// Where the panel's rows are in the block of the output.
    start: usize,
    lanes: &'a [Range<usize>; R],
    /// Whether the output holds the sums of the columns before.
    continues: bool,
    ahead: &'a mut Ahead,
    out: &'a mut Block<'b, f32>,
    extra: PhantomData<E>,
}

impl<P: Vectors, E: HasExtra, const R: usize, const T: usize> Kernel
    for TokenTile<'_, '_, P, E, R, T>
{
    type Output = ();

    const MULTIPLIES_BYTES: bool = true;

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
        let count = self.x.len();
        let words: [_; R] = each!(&self.words[0][..count], |r| &self.words[r][..count]);
        let scales: [_; R] = each!(&self.scales[0][..count], |r| &self.scales[r][..count]);
        for (index, x) in self.x.iter().enumerate() {
            let weights = Stored::<P, R> {
                words: each!(&words[0][index], |r| &words[r][index]),
                scales: each!(&scales[0][index], |r| &scales[r][index]),
            };
            self.ahead.fetch(s);
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
