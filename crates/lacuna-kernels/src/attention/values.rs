//! Sums of values times weights, in the order of rows.
//!
//! Each value is converted in a register, best for few queries; many are [`columns`](super::columns). Values that are stored
//! in units stay so: it is the weights that are multiplied by them, sixteen at a time.

use std::marker::PhantomData;
use std::ops::Range;

use super::arithmetic::Arithmetic;
use super::elements::Pair;
use super::softmax::keep;
use super::stored::{HeadTile, StoredRows};
use super::{PARTITION, PARTITION_CHUNKS, Sight};
use crate::simd::{Chunk, Kernel, LANES, Registers, Simd, each};

/// What the values of some rows are added up for.
pub(super) struct Sums<'a> {
    /// `[queries, PARTITION_CHUNKS]`, for the rows of a partition.
    pub(super) weights: &'a [Chunk],
    /// `[queries, 1 + chunks]`.
    pub(super) states: &'a mut [Chunk],
    pub(super) chunks: usize,
    /// What the tokens see, `group` queries each; the queries of all of them are those of one head.
    pub(super) sight: Sight,
    pub(super) group: usize,
    pub(super) queries_per_part: usize,
    /// The first row, and how many there are.
    pub(super) start: usize,
    pub(super) rows: usize,
}

impl Sums<'_> {
    /// The rows that a query sees, by place; not before those of queries before it.
    #[inline(always)]
    fn visible(&self, query: usize) -> Range<usize> {
        let token = query % self.queries_per_part / self.group;
        self.sight.within(token, self.start, self.rows)
    }

    /// The weights of `T` queries for the rows of one chunk.
    #[inline(always)]
    fn weights<const T: usize>(&self, first: usize, chunk: usize) -> [&[f32; LANES]; T] {
        // One check for all, and constant distances.
        let start = first * PARTITION_CHUNKS + chunk;
        let weights = &self.weights[start..=start + (T - 1) * PARTITION_CHUNKS];
        each!(&Chunk::ZERO.0, |t| &weights[t * PARTITION_CHUNKS].0)
    }

    /// `C` chunks of the states of `T` queries.
    #[inline(always)]
    fn load<S: Simd, const T: usize, const C: usize>(
        &self,
        s: S,
        first: usize,
        chunk: usize,
    ) -> [[S::F; C]; T] {
        let mut sums = [[s.splat(0.0); C]; T];
        for t in 0..T {
            let start = (first + t) * (1 + self.chunks) + 1 + chunk;
            let state = &self.states[start..start + C];
            for c in 0..C {
                sums[t][c] = s.load(&state[c].0);
            }
        }
        sums
    }

    #[inline(always)]
    fn store<S: Simd, const T: usize, const C: usize>(
        &mut self,
        s: S,
        first: usize,
        chunk: usize,
        sums: &[[S::F; C]; T],
    ) {
        for t in 0..T {
            let start = (first + t) * (1 + self.chunks) + 1 + chunk;
            let state = &mut self.states[start..start + C];
            for c in 0..C {
                s.store(sums[t][c], &mut state[c].0);
            }
        }
    }
}

/// Adds the rows of a partition as they are stored.
///
/// Goes through memory in order: sixteen rows at a time, all heads of them.
pub(super) struct Stored<'a, E, A> {
    pub(super) arithmetic: A,
    pub(super) rows: StoredRows<'a>,
    /// Room for rows that do not lie in one run.
    pub(super) copy: &'a mut [u8],
    pub(super) sums: Sums<'a>,
    pub(super) element: PhantomData<E>,
}

impl<E: Pair, A: Arithmetic> Kernel for Stored<'_, E, A> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let queries = self.rows.queries_per_part;
        self.sums.rows = LANES;
        for rows in self.rows.sixteens() {
            self.sums.start = rows.start;
            let (earliest, latest) = (self.sums.visible(0), self.sums.visible(queries - 1));
            let all_see_all = latest.start == 0 && earliest.end == LANES;
            for head in 0..self.rows.parts.len() {
                let mut tile = StoredTile::<E, A> {
                    arithmetic: self.arithmetic,
                    rows: rows.head(s, head, self.copy),
                    sums: &mut self.sums,
                    element: PhantomData,
                };
                let queries = head * queries..(head + 1) * queries;
                if !all_see_all {
                    s.vectorize(Singly { tile, queries });
                    continue;
                }
                let mut first = queries.start;
                while first < queries.end {
                    // Not a constant range: a loop over rows that is unrolled runs out of registers.
                    let rows = earliest.clone();
                    match queries.end - first {
                        4.. => tile.add::<S, 4>(s, first, rows),
                        3 => tile.add::<S, 3>(s, first, rows),
                        2 => tile.add::<S, 2>(s, first, rows),
                        _ => tile.add::<S, 1>(s, first, rows),
                    }
                    first += 4;
                }
            }
        }
    }
}

/// Adds the rows that each of some queries sees; it is compiled apart because it is rarely needed.
struct Singly<'a, 'b, E, A> {
    tile: StoredTile<'a, 'b, E, A>,
    queries: Range<usize>,
}

impl<E: Pair, A: Arithmetic> Kernel for Singly<'_, '_, E, A> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        for query in self.queries {
            let rows = self.tile.sums.visible(query);
            self.tile.add::<S, 1>(s, query, rows);
        }
    }
}

/// One head of sixteen rows as they are stored.
struct StoredTile<'a, 'b, E, A> {
    arithmetic: A,
    rows: HeadTile<'a>,
    sums: &'a mut Sums<'b>,
    element: PhantomData<E>,
}

impl<E: Pair, A: Arithmetic> StoredTile<'_, '_, E, A> {
    /// Adds some rows for `T` queries.
    #[inline(always)]
    fn add<S: Simd, const T: usize>(&mut self, s: S, first: usize, rows: Range<usize>) {
        if rows.is_empty() {
            return;
        }
        let pairs = self.sums.chunks / 2;
        let many = S::REGISTERS == Registers::Many;
        let mut pair = 0;
        while pair < pairs {
            let left = pairs - pair;
            if many && T <= 2 && left >= 4 {
                pair += self.pairs::<S, T, 4, 8, 0>(s, first, pair, &rows);
            } else if many && T > 2 && left >= 2 {
                pair += self.pairs::<S, T, 2, 4, 0>(s, first, pair, &rows);
            } else if many || T <= 2 {
                pair += self.pairs::<S, T, 1, 2, 0>(s, first, pair, &rows);
            } else {
                // Sums of whole pairs would take all registers. Half of each value is left out, not converted twice.
                self.pairs::<S, T, 1, 1, 0>(s, first, pair, &rows);
                pair += self.pairs::<S, T, 1, 1, 1>(s, first, pair, &rows);
            }
        }
    }

    /// `P` pairs, which are `C` chunks, or of one pair chunk `HALF` alone; returns how many pairs.
    #[inline(always)]
    fn pairs<S: Simd, const T: usize, const P: usize, const C: usize, const HALF: usize>(
        &mut self,
        s: S,
        first: usize,
        pair: usize,
        rows: &Range<usize>,
    ) -> usize {
        let bytes = size_of::<E::Stored>();
        let weights = self
            .sums
            .weights::<T>(first, self.sums.start % PARTITION / LANES);
        // Weights as they are multiplied; those of all pairs are the same where there are no units.
        let mut multiplied = [[[0.0; LANES]; T]; P];
        let kinds = if E::UNIT.is_some() { P } else { 1 };
        if E::UNIT.is_some() || A::AT_ONCE > 1 {
            for n in 0..kinds {
                for t in 0..T {
                    let mut weights = s.load(weights[t]);
                    if let Some(at) = E::UNIT {
                        let unit = s.f16_column(&self.rows.tile, (pair + n) * bytes + at);
                        weights = s.mul(weights, unit);
                    }
                    if E::UNIT.is_some() && A::AT_ONCE > 1 {
                        // The unit of a row that is not needed may not be finite, and stands beside one that is.
                        weights = keep(s, weights, rows.clone(), s.splat(0.0));
                    }
                    let weights = self.arithmetic.neighbours(s, [weights, s.splat(0.0)]);
                    s.store(weights[0], &mut multiplied[n][t]);
                }
            }
        }
        let mut sums = self.sums.load::<S, T, C>(s, first, 2 * pair + HALF);
        for place in rows.start / A::AT_ONCE..rows.end.div_ceil(A::AT_ONCE) {
            // A row beside another that is not needed is zero, and so is its weight.
            let mut values = [[[s.splat(0.0); 2]; P]; 2];
            for at in 0..A::AT_ONCE {
                let row = place * A::AT_ONCE + at;
                if A::AT_ONCE == 1 || rows.contains(&row) {
                    if HALF == 0 {
                        self.rows.prefetch_across(s, row, pair * bytes, P * bytes);
                    }
                    let value = &E::split(self.rows.tile.row(row)).0[pair..];
                    let value: &[E::Stored; P] = value.first_chunk().expect("pairs of a head");
                    values[at] = each!([s.splat(0.0); 2], |n| E::in_units(s, &value[n]));
                }
            }
            for n in 0..P {
                let value: [_; 2] = each!(s.splat(0.0), |half| {
                    let rows = [values[0][n][half], values[1][n][half]];
                    self.arithmetic.rows(s, rows)
                });
                for t in 0..T {
                    let weight = match E::UNIT.is_some() || A::AT_ONCE > 1 {
                        true => multiplied[n % kinds][t][place],
                        false => weights[t][place],
                    };
                    let weight = s.splat(weight);
                    for half in 0..C / P {
                        let sum = &mut sums[t][C / P * n + half];
                        *sum = self
                            .arithmetic
                            .multiply(s, weight, value[HALF + half], *sum);
                    }
                }
            }
        }
        self.sums.store(s, first, 2 * pair + HALF, &sums);
        P
    }
}
