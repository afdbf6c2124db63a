//! Many queries of one head, a query to each lane.
//!
//! All of a step is done for one tile of queries before the next one: scores for the rows of a partition, weights,
//! values. What a tile writes in between stays in the first-level cache. Rows are copies, read element by element
//! (or pair by pair): an element is what all queries of a tile share, so that heads of any size fill vectors, and
//! neither the largest score nor a sum goes across lanes.
//!
//! Sums are those of the other ways, in their order: a dot product is sixteen partial sums, `l` over the elements
//! `l, l + 16, ..`, added as [`Simd::sum`] adds lanes; so is the sum of weights; values are added row by row. With
//! [two at once](Arithmetic::AT_ONCE) read pairs of elements for elements, and pairs of rows for rows. Those of q8_0 keys
//! are [integers].

mod integers;
mod scores;
mod seen;
#[cfg(target_arch = "x86_64")]
mod tiles;
mod values;

use super::ahead::Ahead;
use super::arithmetic::Arithmetic;
use crate::elementwise::activation::{Function, SoftCap};
use crate::simd::{Chunk, Kernel, LANES, Registers, Simd, each, exp, padded};
use integers::IntegerScores;
pub(super) use integers::{IntegerKeys, PackIntegerColumns, QueryBlocks};
pub(super) use scores::Keys;
pub(super) use seen::Seen;
#[cfg(target_arch = "x86_64")]
pub(super) use tiles::{CopyTiles, PackTiles, QueryTile};
pub(super) use values::Values;

/// Vectors of queries of a tile, where there are as many.
const fn tile_vectors(registers: Registers) -> usize {
    match registers {
        Registers::Few => 1,
        Registers::Many => 2,
    }
}

/// Most queries of a tile.
pub(super) const MOST_QUERIES: usize = tile_vectors(Registers::Many) * LANES;

/// Queries of a tile.
pub(super) const fn tile_queries(registers: Registers) -> usize {
    tile_vectors(registers) * LANES
}

/// Chunks that `queries` of `steps` each take when they are packed.
pub(super) fn packed_len(queries: usize, steps: usize) -> usize {
    queries.div_ceil(LANES) * LANES * steps
}

/// The lanes in the order in which [`Simd::sum`] adds them as a tree.
const ORDER: [usize; LANES] = [0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15];

/// Packs queries by tiles, scaled: `[LANES, steps, vectors]`, lanes in [`ORDER`]; a step is what sixteen lanes
/// multiply at once. The last tile has as many vectors as it needs.
pub(super) struct PackColumns<'a, A, Q> {
    pub(super) arithmetic: A,
    /// The elements of a query.
    pub(super) query: Q,
    pub(super) count: usize,
    pub(super) scale: f32,
    pub(super) steps: usize,
    /// [`packed_len`].
    pub(super) out: &'a mut [Chunk],
}

impl<'q, A: Arithmetic, Q: Fn(usize) -> &'q [f32]> Kernel for PackColumns<'_, A, Q> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let steps = self.steps;
        let tile = tile_queries(S::REGISTERS);
        let tiles = self.out.chunks_mut(tile * steps);
        for (first, out) in (0..self.count).step_by(tile).zip(tiles) {
            let vectors = out.len() / (LANES * steps);
            for v in 0..vectors {
                let first = first + v * LANES;
                // Queries that do not exist are the last one again.
                let queries: [_; LANES] = each!([].as_slice(), |q| {
                    (self.query)((first + q).min(self.count - 1))
                });
                for step in 0..steps {
                    let scale = s.splat(self.scale);
                    let rows = each!(scale, |q| {
                        let elements = &queries[q][step * LANES * A::AT_ONCE..];
                        let mut chunks = [s.splat(0.0); 2];
                        for at in 0..A::AT_ONCE {
                            chunks[at] = s.mul(chunk(s, elements, at), scale);
                        }
                        self.arithmetic.neighbours(s, chunks)[0]
                    });
                    let lanes = s.transpose(rows);
                    for index in 0..LANES {
                        let place = (index * steps + step) * vectors + v;
                        s.store(lanes[ORDER[index]], &mut out[place].0);
                    }
                }
            }
        }
    }
}

/// The chunk of some elements that begins so many chunks on, with zeros behind the last element.
#[inline(always)]
fn chunk<S: Simd>(s: S, elements: &[f32], at: usize) -> S::F {
    let elements = elements.get(at * LANES..).unwrap_or_default();
    // Whole chunks without a copy of unknown length.
    match elements.first_chunk() {
        Some(whole) => s.load(whole),
        None => s.load(&padded(elements)),
    }
}

/// A tile of queries, as it was packed, and the keys of a partition.
#[derive(Clone, Copy)]
pub(super) enum Scored<'a> {
    Elements {
        queries: &'a [Chunk],
        keys: Keys<'a>,
    },
    Integers {
        queries: &'a [QueryBlocks],
        keys: IntegerKeys<'a>,
    },
}

impl Scored<'_> {
    /// Vectors of queries.
    fn vectors(&self) -> usize {
        match self {
            Self::Elements { queries, keys } => queries.len() / (LANES * keys.steps),
            Self::Integers { queries, keys } => queries.len() / keys.units.len(),
        }
    }
}

/// One tile of queries and the rows of a partition: writes the states of the queries.
pub(super) struct Tile<'a, 'b, A> {
    pub(super) arithmetic: A,
    pub(super) scores: Scores<'a, 'b>,
    pub(super) values: Values<'a>,
    /// Room for weights as they are multiplied, `[PARTITION, vectors]` ...
    pub(super) weights: &'a mut [Chunk],
    /// ... and for sums of values, `[elements of whole chunks, vectors]`.
    pub(super) sums: &'a mut [Chunk],
    /// Values that come next.
    pub(super) ahead: &'a mut Ahead<'b>,
}

impl<A: Arithmetic> Kernel for Tile<'_, '_, A> {
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

impl<A: Arithmetic> Tile<'_, '_, A> {
    #[inline(always)]
    fn vectors<S: Simd, const V: usize>(&mut self, s: S) {
        let (scores, arithmetic) = (&mut self.scores, self.arithmetic);
        match scores.scored {
            Scored::Elements { queries, keys } => {
                scores.of_elements::<S, A, V>(s, arithmetic, queries, keys);
            }
            Scored::Integers { queries, keys } => scores.of_integers::<S, V>(s, queries, keys),
        }
        scores.soften::<S, V>(s);
        match S::REGISTERS {
            Registers::Many => self.values::<S, V, 8>(s),
            Registers::Few => self.values::<S, V, 6>(s),
        }
        self.states::<S, V>(s);
    }

    /// Writes the sums of values to states.
    #[inline(always)]
    fn states<S: Simd, const V: usize>(&mut self, s: S) {
        let chunks = self.values.chunks;
        let sums = self.sums.as_chunks::<V>().0;
        let queries = self.scores.states.chunks_mut(LANES * (1 + chunks));
        for (v, states) in queries.enumerate() {
            for (chunk, sums) in sums.as_chunks::<LANES>().0[..chunks].iter().enumerate() {
                let queries = s.transpose(each!(s.splat(0.0), |d| s.load(&sums[d][v].0)));
                for (query, state) in states.chunks_exact_mut(1 + chunks).enumerate() {
                    s.store(queries[query], &mut state[1 + chunk].0);
                }
            }
        }
    }
}

/// The scores of a tile of queries, which become weights.
pub(super) struct Scores<'a, 'b> {
    pub(super) scored: Scored<'a>,
    pub(super) seen: &'a Seen,
    pub(super) cap: Option<SoftCap>,
    /// Room for them, `[PARTITION, vectors]`.
    pub(super) scores: &'a mut [Chunk],
    /// `[queries, per_query]`, of queries that exist: a header, and the chunks of its values.
    pub(super) states: &'a mut [Chunk],
    pub(super) per_query: usize,
    /// Keys that come next.
    pub(super) ahead: &'a mut Ahead<'b>,
}

impl Scores<'_, '_> {
    /// Writes scores of keys that are integers.
    #[inline(always)]
    fn of_integers<S: Simd, const V: usize>(
        &mut self,
        s: S,
        queries: &[QueryBlocks],
        keys: IntegerKeys<'_>,
    ) {
        let scores = IntegerScores {
            queries: queries.as_chunks::<V>().0,
            keys,
            any: self.seen.any.clone(),
            scores: self.scores.as_chunks_mut().0,
            ahead: self.ahead,
        };
        scores.write(s);
    }

    /// Turns scores to weights, relative to the largest of each query, and writes the headers of states.
    #[inline(always)]
    fn soften<S: Simd, const V: usize>(&mut self, s: S) {
        let seen = self.seen;
        let scores = self.scores.as_chunks_mut::<V>().0;
        let (none, zero) = (s.splat(f32::NEG_INFINITY), s.splat(0.0));
        if let Some(cap) = self.cap {
            for scores in scores[seen.any.clone()].as_flattened_mut() {
                s.store(cap.of(s, s.load(&scores.0)), &mut scores.0);
            }
        }
        // What a query does not see has no part in the largest score, and a weight of exactly zero: `exp` of what is
        // that small is.
        for row in seen.some() {
            for v in 0..V {
                let score = &mut scores[row][v].0;
                s.store(seen.keep(s, s.load(score), row, v, none), score);
            }
        }
        let mut most = [none; V];
        for scores in &scores[seen.any.clone()] {
            for v in 0..V {
                most[v] = s.max(s.load(&scores[v].0), most[v]);
            }
        }
        // Sixteen sums, as if rows were lanes.
        let mut sums = [[zero; V]; LANES];
        for index in 0..LANES {
            let first = seen.any.start + (ORDER[index] + LANES - seen.any.start % LANES) % LANES;
            for row in (first..seen.any.end).step_by(LANES) {
                for v in 0..V {
                    let scores = &mut scores[row][v].0;
                    let weight = exp(s, s.sub(s.load(scores), most[v]));
                    sums[index][v] = s.add(sums[index][v], weight);
                    s.store(weight, scores);
                }
            }
        }
        let mut len = LANES;
        while len > 1 {
            len /= 2;
            for index in 0..len {
                sums[index] = each!(zero, |v| s.add(sums[2 * index][v], sums[2 * index + 1][v]));
            }
        }
        let mut header = [[[0.0; LANES]; V]; 2];
        for v in 0..V {
            s.store(most[v], &mut header[0][v]);
            s.store(sums[0][v], &mut header[1][v]);
        }
        let [most, sum] = [header[0].as_flattened(), header[1].as_flattened()];
        let states = self.states.chunks_exact_mut(self.per_query);
        for ((state, most), sum) in states.zip(most).zip(sum) {
            state[0] = Chunk::ZERO;
            state[0].0[..2].copy_from_slice(&[*most, *sum]);
        }
    }
}

#[inline(always)]
fn load<S: Simd, const V: usize, const D: usize>(s: S, from: &[[Chunk; V]; D]) -> [[S::F; V]; D] {
    let mut sums = [[s.splat(0.0); V]; D];
    for d in 0..D {
        for v in 0..V {
            sums[d][v] = s.load(&from[d][v].0);
        }
    }
    sums
}

#[inline(always)]
fn store<S: Simd, const V: usize, const D: usize>(
    s: S,
    sums: &[[S::F; V]; D],
    out: &mut [[Chunk; V]; D],
) {
    for d in 0..D {
        for v in 0..V {
            s.store(sums[d][v], &mut out[d][v].0);
        }
    }
}
