//! Sums of values times the weights of a tile of queries.

use std::ops::Range;

use super::super::PARTITION;
use super::super::arithmetic::Arithmetic;
use super::{Seen, Tile, load, store};
use crate::simd::{Chunk, Kernel, LANES, Simd, each};

/// Values of one head of a partition, which may be in units, with zeros behind the last element.
#[derive(Clone, Copy)]
pub(in super::super) struct Values<'a> {
    /// As many rows as are multiplied at once lie together: `[PARTITION / rows at once, chunks]`. What is not needed may
    /// be anything, but where others of the same place are.
    pub(in super::super) rows: &'a [[f32; LANES]],
    pub(in super::super) chunks: usize,
    /// Elements of a row.
    pub(in super::super) dim: usize,
    /// What a unit is worth, `[pairs, PARTITION]`; empty where it is 1.
    pub(in super::super) units: &'a [[f32; PARTITION]],
}

/// Elements that a unit is for.
const UNIT_ELEMENTS: usize = 2 * LANES;

impl<A: Arithmetic> Tile<'_, '_, A> {
    /// Adds up values, `D` elements of all rows at a time.
    #[inline(always)]
    pub(super) fn values<S: Simd, const V: usize, const D: usize>(&mut self, s: S) {
        let Values {
            chunks, dim, units, ..
        } = self.values;
        let of_one_unit = match units.is_empty() {
            true => dim,
            false => UNIT_ELEMENTS,
        };
        for first in (0..dim).step_by(of_one_unit) {
            let elements = first..dim.min(first + of_one_unit);
            let units = units.get(first / UNIT_ELEMENTS);
            let as_they_are = units.is_none() && A::AT_ONCE == 1;
            if !as_they_are {
                self.weigh::<S, V>(s, units);
            }
            for start in elements.clone().step_by(D) {
                self.ahead.fetch::<S, 8>(s);
                // The last ones may be computed twice, or be zeros behind a short row.
                let start = start.min(elements.end.saturating_sub(D));
                let columns = Columns::<A, V, D> {
                    arithmetic: self.arithmetic,
                    values: &self.values,
                    weights: match as_they_are {
                        true => self.scores.scores.as_chunks().0,
                        false => self.weights.as_chunks().0,
                    },
                    seen: self.scores.seen,
                    start,
                };
                let sums = self.sums.as_chunks_mut().0[start..].first_chunk_mut();
                columns.add_up(s, sums.expect("sums of whole chunks"));
            }
        }
        let rest = dim.max(D)..chunks * LANES;
        self.sums.as_chunks_mut::<V>().0[rest].fill([Chunk::ZERO; V]);
    }

    /// Writes weights as they are multiplied: times the units of rows, those of rows that are multiplied at once in one
    /// place.
    #[inline(always)]
    fn weigh<S: Simd, const V: usize>(&mut self, s: S, units: Option<&[f32; PARTITION]>) {
        let seen = self.scores.seen;
        let (any, all) = (places::<A>(&seen.any), whole_places::<A>(&seen.all));
        self.weigh_places::<S, V>(s, units, any.start..all.start, true);
        self.weigh_places::<S, V>(s, units, all.clone(), false);
        self.weigh_places::<S, V>(s, units, all.end..any.end, true);
    }

    /// The same for some places; `some` if not all queries see all of their rows: one that a query does not see may stand
    /// beside one that it sees, and its unit may not be finite.
    #[inline(always)]
    fn weigh_places<S: Simd, const V: usize>(
        &mut self,
        s: S,
        units: Option<&[f32; PARTITION]>,
        places: Range<usize>,
        some: bool,
    ) {
        let scores = self.scores.scores.as_chunks::<V>().0;
        let weights = self.weights.as_chunks_mut::<V>().0;
        for place in places {
            let mut rows = [[s.splat(0.0); V]; 2];
            for at in 0..A::AT_ONCE {
                let row = place * A::AT_ONCE + at;
                for v in 0..V {
                    let mut weight = s.load(&scores[row][v].0);
                    if let Some(units) = units {
                        weight = s.mul(weight, s.splat(units[row]));
                    }
                    if some {
                        weight = self.scores.seen.keep(s, weight, row, v, s.splat(0.0));
                    }
                    rows[at][v] = weight;
                }
            }
            for v in 0..V {
                let rows = [rows[0][v], rows[1][v]];
                s.store(self.arithmetic.rows(s, rows), &mut weights[place][v].0);
            }
        }
    }
}

/// The places of rows that are multiplied at once that some rows are in.
fn places<A: Arithmetic>(rows: &Range<usize>) -> Range<usize> {
    rows.start / A::AT_ONCE..rows.end.div_ceil(A::AT_ONCE)
}

/// The places of such rows that are all among some rows.
fn whole_places<A: Arithmetic>(rows: &Range<usize>) -> Range<usize> {
    let start = rows.start.div_ceil(A::AT_ONCE);
    start..(rows.end / A::AT_ONCE).max(start)
}

/// `D` elements of values, from `start` on, for `V` vectors of queries.
#[derive(Clone, Copy)]
struct Columns<'a, A, const V: usize, const D: usize> {
    arithmetic: A,
    values: &'a Values<'a>,
    /// By place.
    weights: &'a [[Chunk; V]],
    seen: &'a Seen,
    start: usize,
}

impl<A: Arithmetic, const V: usize, const D: usize> Columns<'_, A, V, D> {
    #[inline(always)]
    fn add_up<S: Simd>(self, s: S, out: &mut [[Chunk; V]; D]) {
        let any = places::<A>(&self.seen.any);
        let all = whole_places::<A>(&self.seen.all);
        *out = [[Chunk::ZERO; V]; D];
        self.singly(s, any.start..all.start, out);
        let mut sums = load(s, out);
        for place in all.clone() {
            let (weights, values) = (self.weights(s, place), self.values(place));
            for d in 0..D {
                let value = s.splat(values[d]);
                for v in 0..V {
                    sums[d][v] = self.arithmetic.multiply(s, weights[v], value, sums[d][v]);
                }
            }
        }
        store(s, &sums, out);
        self.singly(s, all.end..any.end, out);
    }

    #[inline(always)]
    fn singly<S: Simd>(self, s: S, places: Range<usize>, out: &mut [[Chunk; V]; D]) {
        if !places.is_empty() {
            s.vectorize(Singly {
                columns: self,
                places,
                out,
            });
        }
    }

    #[inline(always)]
    fn values(&self, place: usize) -> &[f32; D] {
        let Values { rows, chunks, .. } = self.values;
        let values = rows[place * chunks..(place + 1) * chunks].as_flattened();
        let values = values[self.start..].first_chunk();
        values.expect("elements of a row")
    }

    #[inline(always)]
    fn weights<S: Simd>(&self, s: S, place: usize) -> [S::F; V] {
        each!(s.splat(0.0), |v| s.load(&self.weights[place][v].0))
    }
}

/// Adds rows for the queries that see them; it is compiled apart because it is rarely needed.
struct Singly<'a, 'b, A, const V: usize, const D: usize> {
    columns: Columns<'a, A, V, D>,
    places: Range<usize>,
    out: &'b mut [[Chunk; V]; D],
}

impl<A: Arithmetic, const V: usize, const D: usize> Kernel for Singly<'_, '_, A, V, D> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Columns {
            arithmetic, seen, ..
        } = self.columns;
        let mut sums = load(s, self.out);
        for place in self.places {
            let weights = self.columns.weights(s, place);
            let values = self.columns.values(place);
            let row = place * A::AT_ONCE;
            for d in 0..D {
                for v in 0..V {
                    let sum = sums[d][v];
                    let add = |value| arithmetic.multiply(s, weights[v], s.splat(value), sum);
                    sums[d][v] = match A::AT_ONCE {
                        1 => seen.keep(s, add(values[d]), row, v, sum),
                        // A row that a query does not see has no weight, but may not be finite.
                        _ => {
                            let [first, second] = only(values[d]);
                            let with = seen.keep(s, add(values[d]), row, v, add(second));
                            let without = seen.keep(s, add(first), row, v, sum);
                            seen.keep(s, with, row + 1, v, without)
                        }
                    };
                }
            }
        }
        store(s, &sums, self.out);
    }
}

/// One of two bf16, and zero for the other.
fn only(pair: f32) -> [f32; 2] {
    [0xFFFF, 0xFFFF_0000].map(|mask| f32::from_bits(pair.to_bits() & mask))
}
