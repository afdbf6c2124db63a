//! Few queries of each head by AMX, from rows as they are stored: to copy all of a partition would be what the time goes to.
//!
//! Goes through memory in order, some rows at a time, all heads of them. Scores and weights lie as those of other rows do,
//! and sums are those of [`columns`](super::columns), in their order.

use std::marker::PhantomData;
use std::ops::Range;

use super::elements::Pair;
use super::pairs::{BLOCK_ROWS, Pairs, WithoutOutliers};
use super::softmax::keep;
use super::stored::{Sixteen, StoredRows};
use super::values::Sums;
use super::{PARTITION, PARTITION_CHUNKS};
use crate::simd::amx::{self, ROWS, Side, Tiles};
use crate::simd::{Bf16Products, Chunk, Kernel, LANES, Simd, each};

/// Rows of values that are converted before they are multiplied: sums are read and written each time, and what is
/// converted stays in the first-level cache.
const TOGETHER: usize = 2 * BLOCK_ROWS;

/// Lines of their weights.
pub(super) const WEIGHT_LINES: usize = TOGETHER / BLOCK_ROWS * ROWS;

/// Sums of queries and the keys of a partition.
pub(super) struct TileScores<'a, E> {
    pub(super) registers: &'a Tiles,
    pub(super) proof: Bf16Products,
    pub(super) rows: StoredRows<'a>,
    /// Room for rows that do not lie in one run.
    pub(super) copy: &'a mut [u8],
    /// Those of a part as [`PackTiles`](super::columns::PackTiles) has them.
    pub(super) queries: &'a [Chunk],
    pub(super) steps: usize,
    /// Room for sixteen rows of one head.
    pub(super) keys: &'a mut [[f32; LANES]],
    /// `[queries, PARTITION_CHUNKS]`.
    pub(super) scores: &'a mut [Chunk],
    pub(super) element: PhantomData<E>,
}

impl<E: Pair> Kernel for TileScores<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (steps, per_part) = (self.steps, self.rows.queries_per_part);
        let keys = &mut self.keys[..ROWS * steps];
        for rows in self.rows.sixteens() {
            let chunk = rows.start % PARTITION / LANES;
            for part in 0..self.rows.parts.len() {
                let head = rows.head(s, part, self.copy);
                let bytes = size_of::<E::Stored>();
                for (row, keys) in keys.chunks_exact_mut(steps).enumerate() {
                    let stored = E::split(head.tile.row(row)).0;
                    for (step, (stored, out)) in stored.iter().zip(keys).enumerate() {
                        head.prefetch(s, row, step * bytes, bytes);
                        s.store(s.round_pairs(self.proof, E::load(s, stored)), out);
                    }
                }
                let mut sums = [Chunk::ZERO; ROWS];
                self.registers.multiply(
                    steps,
                    Side {
                        tiles: [&*keys],
                        line: steps,
                        block: 1,
                    },
                    Side::packed([&self.queries[part * steps * LANES..]]),
                    amx::Sums {
                        lines: &mut sums,
                        line: 1,
                        first: [[0]],
                    },
                    true,
                );
                let queries = s.transpose(each!(s.splat(0.0), |row| s.load(&sums[row].0)));
                let scores = &mut self.scores[part * per_part * PARTITION_CHUNKS..];
                let scores = scores.iter_mut().skip(chunk).step_by(PARTITION_CHUNKS);
                for (query, scores) in queries[..per_part].iter().zip(scores) {
                    s.store(*query, &mut scores.0);
                }
            }
        }
    }
}

/// Adds values of a partition; says whether there are outliers, which are to be added to all.
pub(super) struct TileValues<'a, E> {
    /// Of tiles of as many rows as there are queries in a part.
    pub(super) registers: &'a Tiles,
    pub(super) proof: Bf16Products,
    pub(super) rows: StoredRows<'a>,
    /// Room for rows that do not lie in one run, ...
    pub(super) copy: &'a mut [u8],
    /// ... for [`WEIGHT_LINES`] ...
    pub(super) weights: &'a mut [Chunk],
    /// ... and for rows of one head that are multiplied together.
    pub(super) values: &'a mut [[f32; LANES]],
    pub(super) sums: Sums<'a>,
    pub(super) element: PhantomData<E>,
}

impl<E: Pair> Kernel for TileValues<'_, E> {
    type Output = bool;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> bool {
        let (mut sums, mut have_outliers) = (self.sums, false);
        let queries = self.rows.queries_per_part;
        let mut sixteens = self.rows.sixteens().peekable();
        while let Some(first) = sixteens.next() {
            let end = (first.start / TOGETHER + 1) * TOGETHER;
            // From the first row of a block on, of which the other half may not be needed.
            let start = first.start / BLOCK_ROWS * BLOCK_ROWS;
            let mut group = [const { None }; TOGETHER / ROWS];
            let mut len = (first.start - start) / ROWS;
            group[len] = Some(first);
            while let Some(next) = sixteens.next_if(|rows| rows.start < end) {
                len += 1;
                group[len] = Some(next);
            }
            let blocks = len / 2 + 1;
            for part in 0..self.rows.parts.len() {
                let values = self.values.chunks_exact_mut(ROWS / 2 * sums.chunks);
                for (rows, out) in group[..2 * blocks].iter().zip(values) {
                    let Some(rows) = rows else {
                        out.fill([0.0; LANES]);
                        continue;
                    };
                    let convert = Convert::<E> {
                        proof: self.proof,
                        rows,
                        part,
                        chunks: sums.chunks,
                        out,
                        element: PhantomData,
                    };
                    have_outliers |= convert.write(s, self.copy);
                }
                sums.weigh(
                    s,
                    self.proof,
                    part * queries..(part + 1) * queries,
                    start,
                    &mut self.weights[..blocks * ROWS],
                );
                sums.add_tiles(
                    self.registers,
                    part * queries,
                    self.weights,
                    self.values,
                    blocks,
                );
            }
        }
        have_outliers
    }
}

/// Sixteen rows of one head, as they are multiplied.
struct Convert<'a, 'b, 'c, E> {
    proof: Bf16Products,
    rows: &'a Sixteen<'b, 'c>,
    part: usize,
    chunks: usize,
    /// `[ROWS / 2, chunks]`.
    out: &'a mut [[f32; LANES]],
    element: PhantomData<E>,
}

impl<E: Pair> Convert<'_, '_, '_, E> {
    /// Writes them without outliers; says whether there were some.
    #[inline(always)]
    fn write<S: Simd>(self, s: S, copy: &mut [u8]) -> bool {
        let head = self.rows.head(s, self.part, copy);
        let heads: [_; ROWS] = each!([].as_slice(), |row| match self.rows.needs(row) {
            true => head.tile.row(row),
            false => &[],
        });
        let mut pairs = Pairs::new(s, self.proof);
        let places = heads
            .as_chunks()
            .0
            .iter()
            .zip(self.out.chunks_exact_mut(self.chunks));
        for (place, (heads, out)) in places.enumerate() {
            pairs.write::<E>(heads, out, |at, pair| {
                let bytes = size_of::<E::Stored>();
                head.prefetch(s, 2 * place + at, pair * bytes, bytes);
            });
        }
        let have_outliers = pairs.have_outliers();
        if have_outliers {
            s.vectorize(WithoutOutliers::<E> {
                proof: self.proof,
                heads: &heads,
                chunks: self.chunks,
                out: self.out,
                element: PhantomData,
            });
        }
        have_outliers
    }
}

impl Sums<'_> {
    /// Writes weights of some queries of a part as they are multiplied, those of a query for a block from row `start` on
    /// in a line.
    #[inline(always)]
    fn weigh<S: Simd>(
        &self,
        s: S,
        proof: Bf16Products,
        queries: Range<usize>,
        start: usize,
        lines: &mut [Chunk],
    ) {
        for (token, query) in queries
            .clone()
            .enumerate()
            .map(|(n, query)| (n / self.group, query))
        {
            for (block, lines) in lines.as_chunks_mut::<ROWS>().0.iter_mut().enumerate() {
                let row = start + block * BLOCK_ROWS;
                let visible = self.sight.within(token, row, BLOCK_ROWS);
                let place = query * PARTITION_CHUNKS + row % PARTITION / LANES;
                let halves = each!(s.splat(0.0), |half| {
                    let lane = |row: usize| row.saturating_sub(half * LANES).min(LANES);
                    let weights = s.load(&self.weights[place + half].0);
                    keep(
                        s,
                        weights,
                        lane(visible.start)..lane(visible.end),
                        s.splat(0.0),
                    )
                });
                let line = &mut lines[query - queries.start];
                s.store(s.round_pairs(proof, halves), &mut line.0);
            }
        }
    }

    /// Adds `blocks` of values to the sums of the queries from `first` on, as many as tiles have rows.
    #[inline(always)]
    fn add_tiles(
        &mut self,
        registers: &Tiles,
        first: usize,
        weights: &[Chunk],
        values: &[[f32; LANES]],
        blocks: usize,
    ) {
        let chunks = self.chunks;
        let states = &mut self.states[first * (1 + chunks)..];
        // Chunks of values that are stored so are whole pairs.
        for chunk in (0..chunks).step_by(2) {
            registers.multiply(
                blocks,
                Side::packed([weights]),
                Side {
                    tiles: [&values[chunk..], &values[chunk + 1..]],
                    line: chunks,
                    block: ROWS * chunks,
                },
                amx::Sums {
                    lines: &mut *states,
                    line: 1 + chunks,
                    first: [[1 + chunk, 2 + chunk]],
                },
                false,
            );
        }
    }
}
