//! Dot products of queries and q8_0 keys in integers.
//!
//! Queries are quantized like activations of a product with a q8_0 matrix, and a dot product takes
//! the same steps: exact integer sums over 32 elements, scaled and added block by block.
//!
//! There are two ways to the same sums: [`IntegerRows`] takes keys as they are stored, best for few
//! queries; [`Integers`] reads a packed copy of sixteen keys.

use super::ahead::Ahead;
use super::rows::BlockRows;
use super::scores::together;
use super::softmax::Chunk;
use super::stored::{HeadTile, StoredRows};
use super::{BLOCK_ROWS, PARTITION, PARTITION_CHUNKS};
use crate::activations::{ActivationBlock, BLOCK, quantize_block};
use crate::element::ElementType;
use crate::simd::{Kernel, LANES, Registers, Simd, each};

/// Vectors of keys per block of rows.
pub(super) const HALVES: usize = BLOCK_ROWS / LANES;

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

/// Thirty-two elements of sixteen keys.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct KeyBlock {
    words: [[u32; LANES]; 8],
    scale: [f32; LANES],
}

impl KeyBlock {
    pub(super) const ZERO: Self = Self {
        words: [[0; LANES]; 8],
        scale: [0.0; LANES],
    };
}

/// Packs the keys of a block: `[blocks, HALVES]`.
pub(super) struct PackIntegers<'a, 'b> {
    pub(super) block: &'a BlockRows<'a>,
    /// Room for rows that do not lie in one run.
    pub(super) copy: &'a mut [u8],
    pub(super) out: &'a mut [KeyBlock],
    pub(super) ahead: &'a mut Ahead<'b>,
}

impl Kernel for PackIntegers<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        const BYTES: usize = ElementType::Q8_0.block_bytes();
        for half in 0..HALVES {
            let Some(tile) = self.block.tile(half, self.copy) else {
                continue;
            };
            for block in 0..tile.row_bytes() / BYTES {
                for _ in 0..4 {
                    self.ahead.fetch::<S, 2>(s);
                }
                let out = &mut self.out[block * HALVES + half];
                let at = block * BYTES;
                s.store(s.f16_low(s.gather(&tile, at)), &mut out.scale);
                for quarter in 0..2 {
                    let words = s.columns(&tile, at + 2 + 16 * quarter);
                    for g in 0..4 {
                        let words = s.weights(words[g], 0);
                        s.u_store(words, &mut out.words[4 * quarter + g]);
                    }
                }
            }
        }
    }
}

/// Sums of some queries and the keys of a block.
pub(super) struct Integers<'a> {
    /// See [`PackIntegers`].
    pub(super) keys: &'a [KeyBlock],
    /// `[queries, blocks]`.
    pub(super) queries: &'a [QueryBlock],
    /// The chunks of the block in `[queries, PARTITION_CHUNKS]`.
    pub(super) scores: &'a mut [Chunk],
}

impl Kernel for Integers<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let count = self.scores.len().div_ceil(PARTITION_CHUNKS);
        let many = S::REGISTERS == Registers::Many;
        let mut first = 0;
        while first < count {
            first += match count - first {
                6.. if many => self.tile::<S, 6, HALVES>(s, first, 0),
                2.. if many => self.tile::<S, 2, HALVES>(s, first, 0),
                4.. => self.halves::<S, 4>(s, first),
                _ => self.halves::<S, 1>(s, first),
            };
        }
    }
}

impl Integers<'_> {
    /// `T` queries and one vector of keys after another; returns `T`.
    #[inline(always)]
    fn halves<S: Simd, const T: usize>(&mut self, s: S, first: usize) -> usize {
        for half in 0..HALVES {
            self.tile::<S, T, 1>(s, first, half);
        }
        T
    }

    /// `T` queries and `N` vectors of keys; returns `T`.
    #[inline(always)]
    fn tile<S: Simd, const T: usize, const N: usize>(
        &mut self,
        s: S,
        first: usize,
        half: usize,
    ) -> usize {
        let blocks = self.keys.len() / HALVES;
        let none: &[QueryBlock] = &[];
        let queries: [_; T] = each!(none, |t| &self.queries[(first + t) * blocks..][..blocks]);
        let mut sums = [[s.splat(0.0); N]; T];
        for (block, keys) in self.keys.as_chunks::<HALVES>().0.iter().enumerate() {
            let mut dots: [[S::U; N]; T] = each!([s.u_splat(0); N], |t| [s
                .dot_start(queries[t][block].start[0]);
                N]);
            for g in 0..8 {
                let k: [_; N] = each!(s.u_splat(0), |n| s.u_load(&keys[half + n].words[g]));
                for t in 0..T {
                    for n in 0..N {
                        dots[t][n] = s.dot4(dots[t][n], k[n], queries[t][block].q[0][g]);
                    }
                }
            }
            let scale: [_; N] = each!(s.splat(0.0), |n| s.load(&keys[half + n].scale));
            for t in 0..T {
                let unit = s.splat(queries[t][block].scale[0]);
                for n in 0..N {
                    sums[t][n] = s.dot_end(dots[t][n], scale[n], unit, sums[t][n]);
                }
            }
        }
        for t in 0..T {
            for n in 0..N {
                let out = &mut self.scores[(first + t) * PARTITION_CHUNKS + half + n];
                s.store(sums[t][n], &mut out.0);
            }
        }
        T
    }
}
