//! Dot products of queries and q8_0 keys in integers.
//!
//! Queries are quantized like activations of a product with a q8_0 matrix, and a dot product takes
//! the same steps: exact integer sums over 32 elements, scaled and added block by block.
//!
//! This takes keys as they are stored, best for few queries; [`columns`](super::columns) come to the same sums.

use super::scores::together;
use super::stored::{HeadTile, StoredRows};
use super::{PARTITION, PARTITION_CHUNKS};
use crate::activations::{ActivationBlock, BLOCK, quantize_block};
use crate::element::ElementType;
use crate::simd::{Chunk, Kernel, LANES, Registers, Simd, each};

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
        let per_head = self.rows.queries_per_part;
        let blocks = self.queries.len() / (self.rows.parts.len() * per_head);
        for rows in self.rows.sixteens() {
            for head in 0..self.rows.parts.len() {
                let keys = rows.head(head, self.copy);
                let mut first = head * per_head;
                let end = first + per_head;
                while first < end {
                    let queries = &self.queries[first * blocks..];
                    let place = first * PARTITION_CHUNKS + rows.start % PARTITION / LANES;
                    let scores = &mut self.scores[place..];
                    match (end - first, S::REGISTERS) {
                        (4.., Registers::Many) => some::<S, 4>(s, &keys, queries, blocks, scores),
                        (3, Registers::Many) => some::<S, 3>(s, &keys, queries, blocks, scores),
                        (2.., _) => some::<S, 2>(s, &keys, queries, blocks, scores),
                        _ => some::<S, 1>(s, &keys, queries, blocks, scores),
                    }
                    first += together(end - first, S::REGISTERS);
                }
            }
        }
    }
}

/// Scores of the first `T` queries, of `blocks` each, and sixteen keys of their head.
#[inline(always)]
fn some<S: Simd, const T: usize>(
    s: S,
    keys: &HeadTile<'_>,
    queries: &[QueryBlock],
    blocks: usize,
    scores: &mut [Chunk],
) {
    let sums = tile::<S, T>(s, keys, &queries[..T * blocks]);
    let scores = scores.iter_mut().step_by(PARTITION_CHUNKS);
    for (sums, scores) in sums.into_iter().zip(scores) {
        s.store(sums, &mut scores.0);
    }
}

/// Sums of sixteen keys of one head and `T` of its queries.
#[inline(always)]
fn tile<S: Simd, const T: usize>(s: S, keys: &HeadTile<'_>, queries: &[QueryBlock]) -> [S::F; T] {
    const BYTES: usize = ElementType::Q8_0.block_bytes();
    let blocks = queries.len() / T;
    let queries: [_; T] = each!(queries, |t| &queries[t * blocks..][..blocks]);
    let mut sums = [s.splat(0.0); T];
    for block in 0..blocks {
        let at = block * BYTES;
        for row in 0..LANES {
            keys.prefetch(s, row, at, BYTES);
        }
        let of_block = keys.tile.part(at, BYTES);
        let scale = s.f16_column(&of_block, 0);
        let dots = s.dot_rows::<T>(
            &of_block,
            2,
            each!(&queries[0][block], |t| &queries[t][block]),
        );
        for t in 0..T {
            let unit = s.splat(queries[t][block].scale[0]);
            sums[t] = s.dot_end(dots[t], scale, unit, sums[t]);
        }
    }
    sums
}
