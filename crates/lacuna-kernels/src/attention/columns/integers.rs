//! Dot products of a tile of queries and keys that are integers, in integers.
//!
//! Queries are quantized like activations of a product with a q8_0 matrix, and a dot product takes the same steps:
//! exact integer sums over 32 elements, scaled and added block by block. Four elements of a key are a word that all
//! queries of a tile multiply by.

use std::ops::Range;

use super::super::PARTITION;
use super::super::ahead::Ahead;
use crate::activations::{ActivationBlock, BLOCK, quantize_block};
use crate::simd::{Chunk, Kernel, LANES, Registers, Simd, each};

/// Thirty-two elements of sixteen queries.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(in super::super) struct QueryBlocks {
    words: [[u32; LANES]; BLOCK / 4],
    /// What [`Simd::dot_start`] takes.
    start: [u32; LANES],
    /// What a unit is worth.
    unit: [f32; LANES],
}

impl QueryBlocks {
    pub(in super::super) const ZERO: Self = Self {
        words: [[0; LANES]; BLOCK / 4],
        start: [0; LANES],
        unit: [0.0; LANES],
    };
}

/// Keys of one head of a partition; what is not needed may be anything.
#[derive(Clone, Copy)]
pub(in super::super) struct IntegerKeys<'a> {
    /// The bits of words, as [`Simd::dot4`] takes weights: `[PARTITION, steps]`, two blocks to a step.
    pub(in super::super) rows: &'a [[f32; LANES]],
    pub(in super::super) steps: usize,
    /// What a unit is worth, `[blocks, PARTITION]`.
    pub(in super::super) units: &'a [[f32; PARTITION]],
}

/// Quantizes queries, scaled, and packs them by tiles: `[blocks, vectors]`.
pub(in super::super) struct PackIntegerColumns<'a, Q> {
    /// The elements of a query.
    pub(in super::super) query: Q,
    pub(in super::super) count: usize,
    pub(in super::super) scale: f32,
    pub(in super::super) blocks: usize,
    /// `blocks` for each sixteen queries.
    pub(in super::super) out: &'a mut [QueryBlocks],
}

impl<'q, Q: Fn(usize) -> &'q [f32]> Kernel for PackIntegerColumns<'_, Q> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let tile = super::tile_queries(S::REGISTERS);
        let tiles = self.out.chunks_mut(tile / LANES * self.blocks);
        let scale = s.splat(self.scale);
        for (first, out) in (0..self.count).step_by(tile).zip(tiles) {
            let vectors = out.len() / self.blocks;
            for query in 0..vectors * LANES {
                // Queries that do not exist are the last one again.
                let elements = (self.query)((first + query).min(self.count - 1));
                let blocks = out.chunks_exact_mut(vectors);
                for (elements, out) in elements.as_chunks::<BLOCK>().0.iter().zip(blocks) {
                    let mut scaled = [0.0; BLOCK];
                    for (x, scaled) in elements.as_chunks().0.iter().zip(scaled.as_chunks_mut().0) {
                        s.store(s.mul(s.load(x), scale), scaled);
                    }
                    let mut block = ActivationBlock::<1>::ZERO;
                    quantize_block(s, &scaled).enter::<S, 1>(0, &mut block);
                    let (out, lane) = (&mut out[query / LANES], query % LANES);
                    for (word, out) in block.q[0].iter().zip(&mut out.words) {
                        out[lane] = *word;
                    }
                    out.start[lane] = block.start[0].cast_unsigned();
                    out.unit[lane] = block.scale[0];
                }
            }
        }
    }
}

/// Writes the scores of a tile of queries.
pub(super) struct IntegerScores<'a, 'b, const V: usize> {
    /// `[blocks]`.
    pub(super) queries: &'a [[QueryBlocks; V]],
    pub(super) keys: IntegerKeys<'a>,
    /// Rows that any query sees.
    pub(super) any: Range<usize>,
    /// `[PARTITION]`.
    pub(super) scores: &'a mut [[Chunk; V]],
    pub(super) ahead: &'a mut Ahead<'b>,
}

impl<const V: usize> IntegerScores<'_, '_, V> {
    #[inline(always)]
    pub(super) fn write<S: Simd>(self, s: S) {
        match S::REGISTERS {
            // Twelve sums of integers and of floats.
            Registers::Many => self.rows::<S, 6>(s),
            // Sums of integers of four rows in half of the registers.
            Registers::Few => self.rows::<S, 4>(s),
        }
    }

    /// `R` rows at a time.
    #[inline(always)]
    fn rows<S: Simd, const R: usize>(self, s: S) {
        for start in self.any.step_by(R) {
            self.ahead.fetch::<S, 4>(s);
            // The last ones may be computed twice, or be rows that nobody needs.
            let start = start.min(PARTITION - R);
            let sums = sums::<S, V, R>(s, self.queries, &self.keys, start);
            let out: &mut [[Chunk; V]; R] = self.scores[start..]
                .first_chunk_mut()
                .expect("rows of a partition");
            super::store(s, &sums, out);
        }
    }
}

/// Dot products of `V` vectors of queries and `R` rows.
#[inline(always)]
fn sums<S: Simd, const V: usize, const R: usize>(
    s: S,
    queries: &[[QueryBlocks; V]],
    keys: &IntegerKeys<'_>,
    start: usize,
) -> [[S::F; V]; R] {
    let rows = &keys.rows[start * keys.steps..(start + R) * keys.steps];
    let rows: [_; R] = each!([].as_slice(), |r| rows[r * keys.steps..][..keys.steps]
        .as_flattened()
        .as_chunks::<{ BLOCK / 4 }>()
        .0);
    let mut sums = [[s.splat(0.0); V]; R];
    for (block, (queries, units)) in queries.iter().zip(keys.units).enumerate() {
        let start_of: [_; V] = each!(s.u_splat(0), |v| s.dot_start(s.u_load(&queries[v].start)));
        let words: [_; R] = each!(&[0.0; BLOCK / 4], |r| &rows[r][block]);
        let mut dots = [start_of; R];
        for word in 0..BLOCK / 4 {
            let queries: [_; V] = each!(s.u_splat(0), |v| s.u_load(&queries[v].words[word]));
            for r in 0..R {
                let key = s.u_splat(words[r][word].to_bits());
                for v in 0..V {
                    dots[r][v] = s.dot4(dots[r][v], key, queries[v]);
                }
            }
        }
        let units: &[f32; R] = units[start..].first_chunk().expect("rows of a partition");
        for r in 0..R {
            let scale = s.splat(units[r]);
            for v in 0..V {
                let unit = s.load(&queries[v].unit);
                sums[r][v] = s.dot_end(dots[r][v], scale, unit, sums[r][v]);
            }
        }
    }
    sums
}
