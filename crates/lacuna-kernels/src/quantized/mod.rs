//! Products of quantized matrices and quantized activations.
//!
//! Per block of 32 columns the integer dot products are exact; they are scaled and added in f32,
//! block after block. So a result depends on its row and its token alone: not on the other tokens,
//! not on how rows are cut into tasks, and not on the level, as all levels fuse the same operations.
//!
//! One token and a few read rows from the file layout: one eight rows at a time (`eight`, with AVX2,
//! where two or three are multiplied one by one too) or sixteen (`rows`, with NEON), a few sixteen, which
//! they share in registers if there are many ([`stream`]). Where those rows lie: [`streams`]. Others share panels that are packed into a buffer of the worker ([`panels`]),
//! as the level multiplies them fastest ([`packing`]).

pub(crate) mod codebooks;
#[cfg(target_arch = "x86_64")]
mod eight;
mod formats;
pub(crate) mod grids;
mod packing;
mod panel;
mod panels;
#[cfg(target_arch = "aarch64")]
mod rows;
mod stream;
mod streams;
#[cfg(target_arch = "x86_64")]
mod tiles;

pub(crate) use panels::Buffer as PanelBuffer;

use std::marker::PhantomData;
use std::ops::Range;

#[cfg(target_arch = "x86_64")]
use crate::activations::one_by_one;
use crate::activations::{Activations, BLOCK, streamed};
use crate::dtype::DType;
use crate::grid::Block;
use crate::matrix::Matrix;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use crate::simd::SingleToken;
use crate::simd::{Kernel, LANES, Simd};
use crate::tile::Tile;
use formats::{Format, with_format};
use panels::Panels;
use streams::prefetch_rows;

/// How far ahead of its use a tile's block is prefetched, in bytes of each row.
const PREFETCH_BYTES: usize = 544;

/// One block of columns of the output `[tokens, rows]`; the block covers all tokens.
pub(crate) struct Product<'a, 'b> {
    pub(crate) weights: &'a Matrix<'a>,
    pub(crate) x: &'a Activations<'a>,
    pub(crate) out: Block<'b, f32>,
    /// Threads that share the rows.
    pub(crate) threads: usize,
    pub(crate) panel: &'a mut PanelBuffer,
}

impl Kernel for Product<'_, '_> {
    type Output = ();

    const MULTIPLIES_BYTES: bool = true;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        with_format!(self.weights.dtype(), |D| self.format::<S, D>(s));
    }
}

impl Product<'_, '_> {
    fn format<S: Simd, D: Format>(mut self, s: S) {
        let tokens = self.x.tokens();
        // Constants, so that no level compiles the ways of another.
        #[cfg(target_arch = "x86_64")]
        if const { matches!(S::SINGLE_TOKEN, SingleToken::Eight) } && tokens <= one_by_one::<S>() {
            return eight::multiply(s, self.weights, self.x, &mut self.out);
        }
        #[cfg(target_arch = "aarch64")]
        if const { matches!(S::SINGLE_TOKEN, SingleToken::EachRow) } && tokens == 1 {
            let first = self.out.cols().start;
            return rows::multiply(s, self.weights, &self.x.single(0), first, self.out.row(0));
        }
        if const { streamed::<S>() > 0 } && tokens <= streamed::<S>() && !self.x.are_of_tiles() {
            return stream::multiply::<S, D>(s, self.weights, self.x, &mut self.out, self.panel);
        }
        // The others take the rows between.
        let rows = self.out.cols();
        let next_row = rows.end + (self.threads - 1) * rows.len();
        Panels {
            next_row,
            weights: self.weights,
            x: self.x,
            out: &mut self.out,
            buffer: self.panel,
            format: PhantomData::<D>,
        }
        .multiply(s);
    }
}

/// The 32-column blocks of a file block.
#[inline(always)]
fn parts<D: Format>() -> usize {
    D::DTYPE.block_len() / BLOCK
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

/// Prefetches a share of what will be read [`PREFETCH_BYTES`] after a file block, in this tile or the one
/// `next` rows further on: that of its `part`-th 32 columns.
#[inline(always)]
fn prefetch_ahead<S: Simd, D: Format>(
    s: S,
    tile: &Tile<'_>,
    index: usize,
    part: usize,
    next: usize,
) {
    let len = D::DTYPE.block_bytes();
    let mut ahead = index * len + PREFETCH_BYTES;
    if ahead >= tile.row_bytes() {
        ahead += (next - 1) * tile.row_bytes();
    }
    prefetch_rows::<S, D>(s, tile, ahead, part, 0);
}
