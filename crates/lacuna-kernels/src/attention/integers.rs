//! Dot products of queries and keys that are integers, in integers.
//!
//! Queries are quantized like activations of a product with a q8_0 matrix, and a dot product takes
//! the same steps: exact integer sums over 32 elements, scaled and added block by block.
//!
//! This takes keys as they are stored, nibbles made bytes sixteen rows at a time: best for few queries;
//! [`columns`](super::columns) come to the same sums.

use super::elements::table;
use super::scores::together;
use super::stored::{HeadTile, StoredRows};
use super::{PARTITION, PARTITION_CHUNKS};
use crate::activations::{ActivationBlock, BLOCK, quantize_block};
use crate::element::ElementType;
use crate::simd::{Chunk, Kernel, LANES, Registers, Simd, each};
use crate::tile::Tile;

/// Thirty-two elements of one query.
pub(super) type QueryBlock = ActivationBlock<1>;

/// Quantizes queries, `[queries, chunks]`, to `[queries, chunks / 2]` blocks.
pub(super) struct QuantizeQueries<'a> {
    pub(super) queries: &'a [Chunk],
    pub(super) out: &'a mut [QueryBlock],
}

impl Kernel for QuantizeQueries<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for (chunks, out) in self.queries.as_chunks::<2>().0.iter().zip(self.out) {
            let mut x = [0.0; BLOCK];
            x[..LANES].copy_from_slice(&chunks[0].0);
            x[LANES..].copy_from_slice(&chunks[1].0);
            quantize_block(s, &x).enter::<S, 1>(0, out);
        }
    }
}

/// Sums of few queries and the keys of a partition, from rows as they are stored: with little to
/// compute, packing would be what the time goes to.
///
/// Goes through memory in order: sixteen rows at a time, all heads of them.
pub(super) struct IntegerRows<'a> {
    pub(super) rows: StoredRows<'a>,
    /// Room for rows that do not lie in one run.
    pub(super) copy: &'a mut [u8],
    /// Room for what nibbles of a head stand for, a block each.
    pub(super) named: &'a mut [Integers],
    /// `[queries, blocks]`.
    pub(super) queries: &'a [QueryBlock],
    /// `[queries, PARTITION_CHUNKS]`.
    pub(super) scores: &'a mut [Chunk],
}

impl Kernel for IntegerRows<'_> {
    type Output = ();

    const MULTIPLIES_BYTES: bool = true;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match table(self.rows.view.layout().element) {
            None => self.scores::<S, false>(s, &[0; 16]),
            Some(table) => self.scores::<S, true>(s, table),
        }
    }
}

impl IntegerRows<'_> {
    /// Of nibbles that name what is in the table, or of bytes.
    #[inline(always)]
    fn scores<S: Simd, const NIBBLES: bool>(self, s: S, table: &[i8; 16]) {
        let per_head = self.rows.queries_per_part;
        let blocks = self.queries.len() / (self.rows.parts.len() * per_head);
        for rows in self.rows.sixteens() {
            for head in 0..self.rows.parts.len() {
                let stored = rows.head(s, head, self.copy);
                if NIBBLES {
                    name(s, table, &stored, self.named);
                }
                let keys = Keys::<NIBBLES> {
                    stored,
                    named: self.named,
                };
                let mut first = head * per_head;
                let end = first + per_head;
                while first < end {
                    let queries = &self.queries[first * blocks..];
                    let place = first * PARTITION_CHUNKS + rows.start % PARTITION / LANES;
                    let scores = &mut self.scores[place..];
                    match (end - first, S::REGISTERS) {
                        (4.., Registers::Many) => {
                            some::<S, NIBBLES, 4>(s, &keys, queries, blocks, scores)
                        }
                        (3, _) => some::<S, NIBBLES, 3>(s, &keys, queries, blocks, scores),
                        (2.., _) => some::<S, NIBBLES, 2>(s, &keys, queries, blocks, scores),
                        _ => some::<S, NIBBLES, 1>(s, &keys, queries, blocks, scores),
                    }
                    first += together(end - first, S::REGISTERS);
                }
            }
        }
    }
}

/// Thirty-two integers of each of sixteen rows.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Integers([[u8; BLOCK]; LANES]);

impl Integers {
    pub(super) const ZERO: Self = Self([[0; BLOCK]; LANES]);
}

/// What the nibbles of a head of sixteen rows stand for: once for all queries of it. What comes after it is fetched
/// here.
#[inline(always)]
fn name<S: Simd>(s: S, table: &[i8; 16], keys: &HeadTile<'_>, out: &mut [Integers]) {
    const BYTES: usize = ElementType::Q4_0.block_bytes();
    for row in 0..LANES {
        keys.prefetch(s, row, 0, keys.tile.row_bytes());
        let blocks = keys.tile.row(row).as_chunks::<BYTES>().0;
        for (block, out) in blocks.iter().zip(&mut *out) {
            out.0[row] = s.named(table, &block[2..].as_chunks().0[0]);
        }
    }
}

/// Sixteen keys of one head.
struct Keys<'a, const NIBBLES: bool> {
    /// Blocks: what a unit is worth, and integers or nibbles.
    stored: HeadTile<'a>,
    /// What nibbles stand for.
    named: &'a [Integers],
}

impl<const NIBBLES: bool> Keys<'_, NIBBLES> {
    /// Units of a block, its integers, and where in rows they are.
    #[inline(always)]
    fn block<S: Simd>(&self, s: S, block: usize) -> (S::F, Tile<'_>, usize) {
        let tile = &self.stored.tile;
        if NIBBLES {
            const BYTES: usize = ElementType::Q4_0.block_bytes();
            let unit = s.f16_column(&tile.part(block * BYTES, 2), 0);
            let integers = self.named[block].0.as_flattened();
            (unit, Tile::strided(integers, BLOCK, BLOCK), 0)
        } else {
            const BYTES: usize = ElementType::Q8_0.block_bytes();
            let at = block * BYTES;
            for row in 0..LANES {
                self.stored.prefetch_across(s, row, at, BYTES);
            }
            let of_block = tile.part(at, BYTES);
            (s.f16_column(&of_block, 0), of_block, 2)
        }
    }
}

/// Scores of the first `T` queries, of `blocks` each, and sixteen keys of their head.
#[inline(always)]
fn some<S: Simd, const NIBBLES: bool, const T: usize>(
    s: S,
    keys: &Keys<'_, NIBBLES>,
    queries: &[QueryBlock],
    blocks: usize,
    scores: &mut [Chunk],
) {
    let sums = tile::<S, NIBBLES, T>(s, keys, &queries[..T * blocks]);
    let scores = scores.iter_mut().step_by(PARTITION_CHUNKS);
    for (sums, scores) in sums.into_iter().zip(scores) {
        s.store(sums, &mut scores.0);
    }
}

/// Sums of sixteen keys of one head and `T` of its queries.
#[inline(always)]
fn tile<S: Simd, const NIBBLES: bool, const T: usize>(
    s: S,
    keys: &Keys<'_, NIBBLES>,
    queries: &[QueryBlock],
) -> [S::F; T] {
    let blocks = queries.len() / T;
    let queries: [_; T] = each!(queries, |t| &queries[t * blocks..][..blocks]);
    let mut sums = [s.splat(0.0); T];
    for block in 0..blocks {
        let (scale, integers, at) = keys.block(s, block);
        let of_block = each!(&queries[0][block], |t| &queries[t][block]);
        let dots = s.dot_rows::<T>(&integers, at, of_block);
        for t in 0..T {
            let unit = s.splat(queries[t][block].scale[0]);
            sums[t] = s.dot_end(dots[t], scale, unit, sums[t]);
        }
    }
    sums
}
