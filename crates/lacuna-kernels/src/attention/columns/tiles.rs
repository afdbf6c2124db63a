//! Many queries of one head by AMX: sixteen queries to a tile of its registers, and sixteen rows, or elements of values.
//!
//! Scores and weights lie as those of other columns do. What is multiplied is rounded to bf16: scaled queries and keys,
//! weights and values. A score is the sum of blocks of 32 elements, values are added in blocks of 32 rows of the
//! partition: within one, first those at even places and those at odd ones apart, in order, as
//! [`Tiles::multiply`](crate::simd::amx::Tiles::multiply) says. A row that a query does not see has no weight, so
//! the result does not depend on whether it is there.

use std::marker::PhantomData;
use std::ops::Range;

use super::super::PARTITION;
use super::super::ahead::Ahead;
use super::super::elements::with_element;
use super::super::pairs::{BLOCK_ROWS, BLOCKS, Pairs, WithoutOutliers, places};
use super::super::rows::Head;
use super::{Keys, Scored, Scores, chunk};
use crate::simd::amx::{ROWS, Side, Sums, Tiles};
use crate::simd::{Bf16Products, Chunk, Kernel, LANES, Simd, each};

/// Packs queries, scaled: sixteen after sixteen, `[steps, LANES]` each, of which chunk `j` of a step has elements
/// `2 * j` and `2 * j + 1` of each query.
pub(in super::super) struct PackTiles<'a, Q> {
    pub(in super::super) proof: Bf16Products,
    /// The elements of a query.
    pub(in super::super) query: Q,
    pub(in super::super) count: usize,
    pub(in super::super) scale: f32,
    pub(in super::super) steps: usize,
    /// [`packed_len`](super::packed_len).
    pub(in super::super) out: &'a mut [Chunk],
}

impl<'q, Q: Fn(usize) -> &'q [f32]> Kernel for PackTiles<'_, Q> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let scale = s.splat(self.scale);
        let sixteens = self.out.chunks_exact_mut(self.steps * LANES);
        for (first, out) in (0..self.count).step_by(LANES).zip(sixteens) {
            // Queries that do not exist are the last one again.
            let queries: [_; LANES] = each!([].as_slice(), |q| {
                (self.query)((first + q).min(self.count - 1))
            });
            for (step, out) in out.as_chunks_mut::<LANES>().0.iter_mut().enumerate() {
                let rows = each!(scale, |q| {
                    let elements = &queries[q][step * 2 * LANES..];
                    let chunks = each!(scale, |at| s.mul(chunk(s, elements, at), scale));
                    s.round_pairs(self.proof, chunks)
                });
                let pairs = s.transpose(rows);
                for pair in 0..LANES {
                    s.store(pairs[pair], &mut out[pair].0);
                }
            }
        }
    }
}

/// Copies values as they are multiplied, pairs of rows in one place, with zeros behind the last element, for rows that
/// are not needed beside others of their block, and for elements that are too large; says whether there are such.
pub(in super::super) struct CopyTiles<'a> {
    pub(in super::super) proof: Bf16Products,
    pub(in super::super) values: &'a Head<'a>,
    pub(in super::super) chunks: usize,
    /// `[PARTITION / 2, chunks]`.
    pub(in super::super) out: &'a mut [[f32; LANES]],
}

impl Kernel for CopyTiles<'_> {
    type Output = bool;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> bool {
        let Self { values, .. } = self;
        let heads = values.bytes::<PARTITION>();
        let places = places(values);
        let out = &mut self.out[places.start * self.chunks..places.end * self.chunks];
        let heads = &heads[2 * places.start..2 * places.end];
        with_element!(values.view.layout().element, |E| {
            let has_outliers = {
                let mut pairs = Pairs::new(s, self.proof);
                for (heads, out) in heads
                    .as_chunks()
                    .0
                    .iter()
                    .zip(out.chunks_exact_mut(self.chunks))
                {
                    pairs.write::<E>(heads, out, |_, _| {});
                }
                pairs.have_outliers()
            };
            if has_outliers {
                s.vectorize(WithoutOutliers::<E> {
                    proof: self.proof,
                    heads,
                    chunks: self.chunks,
                    out,
                    element: PhantomData,
                });
            }
            has_outliers
        })
    }
}

/// One tile of queries and the rows of a partition: writes the states of the queries.
pub(in super::super) struct QueryTile<'a, 'b> {
    pub(in super::super) registers: &'a Tiles,
    pub(in super::super) proof: Bf16Products,
    /// Of elements as [`PackTiles`] has them.
    pub(in super::super) scores: Scores<'a, 'b>,
    /// `[PARTITION / 2, chunks]`.
    pub(in super::super) values: &'a [[f32; LANES]],
    pub(in super::super) chunks: usize,
    /// Room for weights as they are multiplied, `[vectors, BLOCKS, queries]` ...
    pub(in super::super) weights: &'a mut [Chunk],
    /// ... and for states, those of queries that do not exist among them.
    pub(in super::super) sums: &'a mut [Chunk],
    /// Values that come next.
    pub(in super::super) ahead: &'a mut Ahead<'b>,
}

impl Kernel for QueryTile<'_, '_> {
    type Output = ();

    const MULTIPLIES_BYTES: bool = true;

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        match self.scores.scored.vectors() {
            1 => self.vectors::<S, 1>(s),
            _ => self.vectors::<S, 2>(s),
        }
    }
}

impl QueryTile<'_, '_> {
    #[inline(always)]
    fn vectors<S: Simd, const V: usize>(&mut self, s: S) {
        match self.scores.scored {
            Scored::Elements { queries, keys } => self.scores::<S, V>(s, queries, keys),
            Scored::Integers { queries, keys } => {
                self.scores.of_integers::<S, V>(s, queries, keys);
            }
        }
        self.scores.soften::<S, V>(s);
        self.weigh::<S, V>(s);
        self.values::<S, V>(s);
    }

    /// Dot products with all keys of which some query sees one of sixteen.
    #[inline(always)]
    fn scores<S: Simd, const V: usize>(&mut self, s: S, queries: &[Chunk], keys: Keys<'_>) {
        let end = self.scores.seen.any.end;
        let mut row = self.scores.seen.any.start / ROWS * ROWS;
        while row < end {
            self.scores.ahead.fetch::<S, 16>(s);
            row += match end - row > ROWS {
                true => self.some_scores::<V, 2>(row, queries, &keys),
                false => self.some_scores::<V, 1>(row, queries, &keys),
            };
        }
    }

    /// Those of `R` times sixteen keys; returns how many that are.
    #[inline(always)]
    fn some_scores<const V: usize, const R: usize>(
        &mut self,
        row: usize,
        queries: &[Chunk],
        keys: &Keys<'_>,
    ) -> usize {
        let steps = keys.steps;
        let rows: Side<'_, _, R> = Side {
            tiles: std::array::from_fn(|r| &keys.rows[(row + r * ROWS) * steps..]),
            line: steps,
            block: 1,
        };
        let queries: [_; V] = std::array::from_fn(|v| &queries[v * steps * LANES..]);
        let sums = Sums {
            lines: self.scores.scores,
            line: V,
            first: std::array::from_fn(|r| std::array::from_fn(|v| (row + r * ROWS) * V + v)),
        };
        self.registers
            .multiply(steps, rows, Side::packed(queries), sums, true);
        R * ROWS
    }

    /// The blocks of rows of which some query sees one.
    fn blocks(&self) -> Range<usize> {
        let any = &self.scores.seen.any;
        any.start / BLOCK_ROWS..any.end.div_ceil(BLOCK_ROWS)
    }

    /// Writes weights as they are multiplied, those of a query in a line.
    #[inline(always)]
    fn weigh<S: Simd, const V: usize>(&mut self, s: S) {
        let any = &self.scores.seen.any;
        let scores = self.scores.scores.as_chunks::<V>().0;
        for block in self.blocks() {
            for v in 0..V {
                let weight = |row: usize| match any.contains(&row) {
                    true => s.load(&scores[row][v].0),
                    false => s.splat(0.0),
                };
                let pairs = each!(s.splat(0.0), |pair| {
                    let row = block * BLOCK_ROWS + 2 * pair;
                    s.round_rows(self.proof, [weight(row), weight(row + 1)])
                });
                let queries = s.transpose(pairs);
                let out = &mut self.weights.as_chunks_mut::<LANES>().0[v * BLOCKS + block];
                for query in 0..LANES {
                    s.store(queries[query], &mut out[query].0);
                }
            }
        }
    }

    /// Sums of values times weights.
    #[inline(always)]
    fn values<S: Simd, const V: usize>(&mut self, s: S) {
        let (blocks, chunks) = (self.blocks(), self.chunks);
        let per_query = 1 + chunks;
        // Registers are written whole.
        let all_exist = self.scores.states.len() == V * LANES * per_query;
        let mut chunk = 0;
        while chunk < chunks {
            self.ahead.fetch::<S, 32>(s);
            let lines = match all_exist {
                true => &mut *self.scores.states,
                false => &mut *self.sums,
            };
            let products = Products {
                registers: self.registers,
                weights: self.weights,
                values: self.values,
                chunks,
                blocks: blocks.clone(),
                lines,
            };
            chunk += match chunks - chunk {
                1 => products.add_up::<V, 1>(chunk),
                _ => products.add_up::<V, 2>(chunk),
            };
        }
        if !all_exist {
            let sums = self.sums.chunks_exact(per_query);
            for (state, sums) in self.scores.states.chunks_exact_mut(per_query).zip(sums) {
                state[1..].copy_from_slice(&sums[1..]);
            }
        }
    }
}

/// Some chunks of values for a tile of queries.
struct Products<'a> {
    registers: &'a Tiles,
    weights: &'a [Chunk],
    values: &'a [[f32; LANES]],
    chunks: usize,
    blocks: Range<usize>,
    /// `[queries, 1 + chunks]`.
    lines: &'a mut [Chunk],
}

impl Products<'_> {
    /// `T` chunks; returns how many that are.
    #[inline(always)]
    fn add_up<const V: usize, const T: usize>(self, chunk: usize) -> usize {
        let Self { chunks, blocks, .. } = self;
        let weights: [_; V] =
            std::array::from_fn(|v| &self.weights[(v * BLOCKS + blocks.start) * LANES..]);
        let values = Side {
            tiles: std::array::from_fn(|t| {
                &self.values[blocks.start * ROWS * chunks + chunk + t..]
            }),
            line: chunks,
            block: ROWS * chunks,
        };
        let sums = Sums {
            lines: self.lines,
            line: 1 + chunks,
            first: std::array::from_fn(|v| {
                std::array::from_fn::<_, T, _>(|t| v * ROWS * (1 + chunks) + 1 + chunk + t)
            }),
        };
        let weights = Side::packed(weights);
        self.registers
            .multiply(blocks.len(), weights, values, sums, true);
        T
    }
}
