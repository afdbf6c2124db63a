//! Sums of values times weights, in the order of rows.
//!
//! [`Stored`] converts each value in a register, best for few queries; [`Panels`] reads a copy in f32, a pair of chunks
//! after the other, for many whose scores are integers; other many are [`columns`](super::columns). Values that are stored in
//! units stay so: it is the weights that are multiplied by them, sixteen at a time.

use std::marker::PhantomData;
use std::ops::Range;

use super::ahead::Ahead;
use super::arithmetic::Arithmetic;
use super::elements::Pair;
use super::scores::together;
use super::softmax::Chunk;
use super::stored::{HeadTile, StoredRows};
use super::{PANEL_ROWS, PARTITION, PARTITION_CHUNKS, Sight};
use crate::simd::{Kernel, LANES, Registers, Simd, each};

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
    fn queries(&self) -> usize {
        self.states.len() / (1 + self.chunks)
    }

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

/// Adds the values of rows.
trait Add: Sized {
    fn sums(&self) -> &Sums<'_>;

    /// Adds some rows for `T` queries.
    fn add<S: Simd, const T: usize>(&mut self, s: S, first: usize, rows: Range<usize>);

    /// Adds the rows that each of `T` queries sees: together those that all see.
    #[inline(always)]
    fn add_visible<S: Simd, const T: usize>(&mut self, s: S, first: usize) {
        let (earliest, latest) = (
            self.sums().visible(first),
            self.sums().visible(first + T - 1),
        );
        let common = latest.start..earliest.end.max(latest.start);
        if earliest.start < common.start {
            self.add_singly(s, first..first + T, 0..common.start);
        }
        self.add::<S, T>(s, first, common.clone());
        if common.end < latest.end {
            self.add_singly(s, first..first + T, common.end..latest.end);
        }
    }

    /// Adds those of some rows that each of some queries sees.
    #[inline(always)]
    fn add_singly<S: Simd>(&mut self, s: S, queries: Range<usize>, rows: Range<usize>) {
        s.vectorize(Singly {
            add: self,
            queries,
            rows,
        });
    }
}

/// See [`Add::add_singly`]; it is compiled apart because it is rarely needed.
struct Singly<'a, A> {
    add: &'a mut A,
    queries: Range<usize>,
    rows: Range<usize>,
}

impl<A: Add> Kernel for Singly<'_, A> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for query in self.queries {
            let Range { start, end } = self.add.sums().visible(query);
            let rows = start.max(self.rows.start)..end.min(self.rows.end);
            self.add.add::<S, 1>(s, query, rows);
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
                    rows: rows.head(head, self.copy),
                    sums: &mut self.sums,
                    element: PhantomData,
                };
                let queries = head * queries..(head + 1) * queries;
                if !all_see_all {
                    tile.add_singly(s, queries, 0..LANES);
                    continue;
                }
                let mut first = queries.start;
                while first < queries.end {
                    // Not a constant range: a loop over rows that is unrolled runs out of registers.
                    let rows = earliest.clone();
                    match (queries.end - first, S::REGISTERS) {
                        (4.., Registers::Many) => tile.add::<S, 4>(s, first, rows),
                        (3, Registers::Many) => tile.add::<S, 3>(s, first, rows),
                        (2.., _) => tile.add::<S, 2>(s, first, rows),
                        _ => tile.add::<S, 1>(s, first, rows),
                    }
                    first += together(queries.end - first, S::REGISTERS);
                }
            }
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

impl<E: Pair, A: Arithmetic> Add for StoredTile<'_, '_, E, A> {
    fn sums(&self) -> &Sums<'_> {
        self.sums
    }

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
                pair += self.pairs::<S, T, 4, 8>(s, first, pair, &rows);
            } else if many && T > 2 && left >= 2 {
                pair += self.pairs::<S, T, 2, 4>(s, first, pair, &rows);
            } else {
                pair += self.pairs::<S, T, 1, 2>(s, first, pair, &rows);
            }
        }
    }
}

impl<E: Pair, A: Arithmetic> StoredTile<'_, '_, E, A> {
    /// `P` pairs, which are `C` chunks; returns how many pairs.
    #[inline(always)]
    fn pairs<S: Simd, const T: usize, const P: usize, const C: usize>(
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
                    let weights = self.arithmetic.neighbours(s, [weights, s.splat(0.0)]);
                    s.store(weights[0], &mut multiplied[n][t]);
                }
            }
        }
        let mut sums = self.sums.load::<S, T, C>(s, first, 2 * pair);
        for place in rows.start / A::AT_ONCE..rows.end.div_ceil(A::AT_ONCE) {
            // A row beside another that is not needed is zero, and so is its weight.
            let mut values = [[[s.splat(0.0); 2]; P]; 2];
            for at in 0..A::AT_ONCE {
                let row = place * A::AT_ONCE + at;
                if A::AT_ONCE == 1 || rows.contains(&row) {
                    self.rows.prefetch(s, row, pair * bytes, P * bytes);
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
                    for half in 0..2 {
                        let sum = &mut sums[t][2 * n + half];
                        *sum = self.arithmetic.multiply(s, weight, value[half], *sum);
                    }
                }
            }
        }
        self.sums.store(s, first, 2 * pair, &sums);
        P
    }
}

/// Adds one pair of chunks of rows, from a copy, for the queries of one head.
pub(super) struct Panels<'a, 'b, const HAVE_UNITS: bool> {
    pub(super) values: &'a [[Chunk; 2]; PANEL_ROWS],
    /// What their units are worth.
    pub(super) units: &'a [u16; PANEL_ROWS],
    pub(super) sums: Sums<'a>,
    /// Which pair.
    pub(super) pair: usize,
    pub(super) ahead: &'a mut Ahead<'b>,
}

impl<const HAVE_UNITS: bool> Kernel for Panels<'_, '_, HAVE_UNITS> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let count = self.sums.queries();
        let (earliest, latest) = (self.sums.visible(0), self.sums.visible(count - 1));
        let all_see_all = latest.start == 0 && earliest.end == PANEL_ROWS;
        let mut first = 0;
        while first < count {
            self.ahead.fetch::<S, 8>(s);
            match count - first {
                12.. if S::REGISTERS == Registers::Many => {
                    self.tile::<S, 12>(s, first, all_see_all);
                    first += 12;
                }
                6.. if S::REGISTERS == Registers::Few => {
                    self.tile::<S, 6>(s, first, all_see_all);
                    first += 6;
                }
                4.. => {
                    self.tile::<S, 4>(s, first, all_see_all);
                    first += 4;
                }
                2.. => {
                    self.tile::<S, 2>(s, first, all_see_all);
                    first += 2;
                }
                left => {
                    self.add_singly(s, first..count, 0..PANEL_ROWS);
                    first += left;
                }
            }
        }
    }
}

impl<const HAVE_UNITS: bool> Panels<'_, '_, HAVE_UNITS> {
    #[inline(always)]
    fn tile<S: Simd, const T: usize>(&mut self, s: S, first: usize, all_see_all: bool) {
        if all_see_all {
            self.add::<S, T>(s, first, 0..PANEL_ROWS);
        } else {
            self.add_visible::<S, T>(s, first);
        }
    }
}

impl<const HAVE_UNITS: bool> Add for Panels<'_, '_, HAVE_UNITS> {
    fn sums(&self) -> &Sums<'_> {
        &self.sums
    }

    #[inline(always)]
    fn add<S: Simd, const T: usize>(&mut self, s: S, first: usize, rows: Range<usize>) {
        if rows.is_empty() {
            return;
        }
        let whole = 2 * self.pair + 1 < self.sums.chunks;
        if whole && S::REGISTERS == Registers::Many {
            return self.chunks::<S, T, 2>(s, first, 0, &rows);
        }
        // One chunk at a time, so that the sums of several queries stay in registers.
        self.chunks::<S, T, 1>(s, first, 0, &rows);
        if whole {
            self.chunks::<S, T, 1>(s, first, 1, &rows);
        }
    }
}

impl<const HAVE_UNITS: bool> Panels<'_, '_, HAVE_UNITS> {
    /// The weights of `T` queries for one chunk of rows.
    #[inline(always)]
    fn weights<const T: usize>(&self, first: usize, chunk: usize) -> [&[f32; LANES]; T] {
        let place = self.sums.start % PARTITION / LANES + chunk;
        self.sums.weights(first, place)
    }

    /// Multiplies them by the units of the rows; `out` holds those of an even and of an odd chunk.
    #[inline(always)]
    fn multiply<S: Simd, const T: usize>(
        &self,
        s: S,
        first: usize,
        chunk: usize,
        out: &mut [[[f32; LANES]; T]; 2],
    ) {
        if HAVE_UNITS {
            let units = s.f16_each(self.units.as_chunks().0[chunk]);
            let weights = self.weights::<T>(first, chunk);
            for t in 0..T {
                s.store(s.mul(s.load(weights[t]), units), &mut out[chunk % 2][t]);
            }
        }
    }

    /// Adds `C` chunks of the pair at hand, from `half` on, of some rows for `T` queries.
    #[inline(always)]
    fn chunks<S: Simd, const T: usize, const C: usize>(
        &mut self,
        s: S,
        first: usize,
        half: usize,
        rows: &Range<usize>,
    ) {
        let values = self.values.as_chunks::<LANES>().0;
        let place = 2 * self.pair + half;
        let mut sums = self.sums.load::<S, T, C>(s, first, place);
        let chunks = rows.start / LANES..rows.end.div_ceil(LANES);
        let mut in_units = [[[0.0; LANES]; T]; 2];
        self.multiply(s, first, chunks.start, &mut in_units);
        for chunk in chunks.clone() {
            // One chunk ahead, because what was just written takes long to be read.
            if chunk + 1 < chunks.end {
                self.multiply(s, first, chunk + 1, &mut in_units);
            }
            let weights = match HAVE_UNITS {
                true => each!(&in_units[0][0], |t| &in_units[chunk % 2][t]),
                false => self.weights::<T>(first, chunk),
            };
            let values = &values[chunk];
            let lane = |row: usize| row.saturating_sub(chunk * LANES).min(LANES);
            for lane in lane(rows.start)..lane(rows.end) {
                let value: [_; C] = each!(s.splat(0.0), |c| s.load(&values[lane][half + c].0));
                for t in 0..T {
                    let weight = s.splat(weights[t][lane]);
                    for c in 0..C {
                        sums[t][c] = s.fma(weight, value[c], sums[t][c]);
                    }
                }
            }
        }
        self.sums.store(s, first, place, &sums);
    }
}
