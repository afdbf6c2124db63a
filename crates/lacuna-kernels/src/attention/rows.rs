//! Cached rows of one head, as f32 and as a tile.

use std::ops::Range;
use std::slice::Chunks;

use super::ahead::Ahead;
use super::elements::{Pair, with_element};
use super::softmax::Chunk;
use crate::simd::{Kernel, LANES, Simd};
use crate::tile::Tile;
use crate::view::View;

/// One head of some rows of a block; a block starts at a fixed position.
pub(super) struct BlockRows<'a> {
    pub(super) view: &'a View<'a>,
    pub(super) head: usize,
    /// The first row of the block ...
    pub(super) start: usize,
    /// ... and those of its rows that are needed.
    pub(super) rows: Range<usize>,
}

impl<'a> BlockRows<'a> {
    /// The first ones of some of the rows: how many are in one run, and the bytes of each, which go on
    /// behind those of the head.
    #[inline(always)]
    fn run(&self, rows: &Range<usize>) -> (usize, Chunks<'a, u8>) {
        let (count, bytes) = self.view.span(rows, &(self.head..self.head + 1));
        (count, bytes.chunks(self.view.layout().row_stride))
    }

    /// Sixteen rows of the block, if any of them is needed; for those that are not the nearest one
    /// that is stands. `copy` has room for sixteen heads.
    pub(super) fn tile<'b>(&self, half: usize, copy: &'b mut [u8]) -> Option<Tile<'b>>
    where
        'a: 'b,
    {
        let first = self.start + half * LANES;
        let rows = self.rows.start.max(first)..self.rows.end.min(first + LANES);
        if rows.is_empty() {
            return None;
        }
        let layout = self.view.layout();
        let bytes = layout.head_bytes();
        let (count, span) = self.view.span(&rows, &(self.head..self.head + 1));
        if count == LANES {
            return Some(Tile::strided(span, layout.row_stride, bytes));
        }
        for (lane, copy) in copy.chunks_exact_mut(bytes).take(LANES).enumerate() {
            let row = (first + lane).clamp(rows.start, rows.end - 1);
            copy.copy_from_slice(self.view.head(row, self.head));
        }
        Some(Tile::strided(copy, bytes, bytes))
    }
}

/// Writes rows as f32, zeros behind their last element.
pub(super) struct Convert<'a, 'b> {
    pub(super) block: &'a BlockRows<'a>,
    /// The first pair of chunks of the block's first row.
    pub(super) out: &'a mut [Chunk],
    /// Chunks from a row to the next ...
    pub(super) row_chunks: usize,
    /// ... and from a pair to the next.
    pub(super) pair_chunks: usize,
    pub(super) ahead: &'a mut Ahead<'b>,
}

impl Kernel for Convert<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        with_element!(self.block.view.layout().element, |E| self
            .convert::<S, E>(s));
    }
}

impl Convert<'_, '_> {
    #[inline(always)]
    fn convert<S: Simd, E: Pair>(self, s: S) {
        let bytes = self.block.view.layout().head_bytes();
        let mut rows = self.block.rows.clone();
        while !rows.is_empty() {
            let (count, heads) = self.block.run(&rows);
            let first = (rows.start - self.block.start) * self.row_chunks;
            for (row, head) in heads.enumerate() {
                self.ahead.fetch::<S, 1>(s);
                let out = &mut self.out[first + row * self.row_chunks..];
                let (pairs, tail) = E::split(&head[..bytes]);
                for (index, pair) in pairs.iter().enumerate() {
                    store::<S, E>(s, pair, &mut out[index * self.pair_chunks..]);
                }
                if !tail.is_empty() {
                    let out = &mut out[pairs.len() * self.pair_chunks..];
                    store::<S, E>(s, &E::pad(tail), out);
                }
            }
            rows.start += count;
        }
    }
}

#[inline(always)]
fn store<S: Simd, E: Pair>(s: S, pair: &E::Stored, out: &mut [Chunk]) {
    let [first, second] = E::load(s, pair);
    s.store(first, &mut out[0].0);
    s.store(second, &mut out[1].0);
}
