//! Sums of values times weights, in the order of rows.
//!
//! As with scores there are two ways: [`Stored`] converts each value in a register, best for few
//! queries; [`Panels`] reads a copy in f32.

use std::marker::PhantomData;
use std::ops::Range;

use super::ahead::Ahead;
use super::elements::Pair;
use super::softmax::Chunk;
use super::stored::{StoredRows, prefetch};
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
    pub(super) queries_per_head: usize,
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
        let token = query % self.queries_per_head / self.group;
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

    /// `N` pairs of chunks of the states of `T` queries.
    #[inline(always)]
    fn load<S: Simd, const T: usize, const N: usize>(
        &self,
        s: S,
        first: usize,
        pair: usize,
    ) -> [[[S::F; 2]; N]; T] {
        let mut sums = [[[s.splat(0.0); 2]; N]; T];
        for t in 0..T {
            let start = (first + t) * (1 + self.chunks) + 1 + 2 * pair;
            let state = &self.states[start..start + 2 * N];
            for n in 0..N {
                sums[t][n] = [s.load(&state[2 * n].0), s.load(&state[2 * n + 1].0)];
            }
        }
        sums
    }

    #[inline(always)]
    fn store<S: Simd, const T: usize, const N: usize>(
        &mut self,
        s: S,
        first: usize,
        pair: usize,
        sums: &[[[S::F; 2]; N]; T],
    ) {
        for t in 0..T {
            let start = (first + t) * (1 + self.chunks) + 1 + 2 * pair;
            let state = &mut self.states[start..start + 2 * N];
            for n in 0..N {
                s.store(sums[t][n][0], &mut state[2 * n].0);
                s.store(sums[t][n][1], &mut state[2 * n + 1].0);
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
/// Goes through memory in order: eight rows at a time, all heads of them.
pub(super) struct Stored<'a, E> {
    pub(super) rows: &'a StoredRows<'a>,
    pub(super) sums: Sums<'a>,
    /// The bytes of the head at hand.
    pub(super) head: Range<usize>,
    pub(super) element: PhantomData<E>,
}

/// Rows that are taken together.
const GROUP: usize = 8;

impl<E: Pair> Kernel for Stored<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let start = self.sums.start;
        let Range { start: from, end } = self.rows.visible;
        for row in (from / GROUP * GROUP..end).step_by(GROUP) {
            self.sums.start = start + row;
            self.sums.rows = GROUP;
            match self.rows.queries_per_head {
                n if n.is_multiple_of(4) && S::REGISTERS == Registers::Many => {
                    self.all::<S, 4>(s);
                }
                n if n.is_multiple_of(2) => self.all::<S, 2>(s),
                _ => self.all::<S, 1>(s),
            }
        }
    }
}

impl<E: Pair> Add for Stored<'_, E> {
    fn sums(&self) -> &Sums<'_> {
        &self.sums
    }

    #[inline(always)]
    fn add<S: Simd, const T: usize>(&mut self, s: S, first: usize, rows: Range<usize>) {
        let (mut pair, pairs) = (0, self.sums.chunks / 2);
        while pair < pairs && !rows.is_empty() {
            let left = pairs - pair;
            let many = S::REGISTERS == Registers::Many;
            if many && T <= 2 && left >= 4 {
                pair += self.tile::<S, T, 4>(s, first, pair, &rows);
            } else if many && T > 2 && left >= 2 {
                pair += self.tile::<S, T, 2>(s, first, pair, &rows);
            } else {
                pair += self.tile::<S, T, 1>(s, first, pair, &rows);
            }
        }
    }
}

impl<E: Pair> Stored<'_, E> {
    /// All queries, `T` of a head together.
    #[inline(always)]
    fn all<S: Simd, const T: usize>(&mut self, s: S) {
        let queries = self.rows.queries_per_head;
        let (earliest, latest) = (self.sums.visible(0), self.sums.visible(queries - 1));
        let all_see_all = latest.start == 0 && earliest.end == GROUP;
        for head in 0..self.rows.heads.len() {
            self.head = self.rows.head_range(head);
            let queries = head * queries..(head + 1) * queries;
            if all_see_all {
                for first in queries.step_by(T) {
                    self.add::<S, T>(s, first, 0..GROUP);
                }
            } else {
                self.add_singly(s, queries, 0..GROUP);
            }
        }
    }

    /// `N` pairs of chunks; returns `N`.
    #[inline(always)]
    fn tile<S: Simd, const T: usize, const N: usize>(
        &mut self,
        s: S,
        first: usize,
        pair: usize,
        rows: &Range<usize>,
    ) -> usize {
        let head = self.head.clone();
        let first_row = self.sums.start % PARTITION;
        let weights = self.sums.weights::<T>(first, first_row / LANES);
        let mut sums = self.sums.load::<S, T, N>(s, first, pair);
        for row in rows.start..rows.end.min(GROUP) {
            let row = first_row + row;
            let next = self.rows.ahead(row + GROUP, &head);
            let value = &self.rows.pairs::<E>(row, &head)[pair..][..N];
            let mut values = [[s.splat(0.0); 2]; N];
            for n in 0..N {
                prefetch::<S, E>(s, next, pair + n);
                values[n] = E::load(s, &value[n]);
            }
            add(s, &weights, row % LANES, &values, &mut sums);
        }
        self.sums.store(s, first, pair, &sums);
        N
    }
}

/// Adds `N` pairs of one row for `T` queries.
#[inline(always)]
fn add<S: Simd, const T: usize, const N: usize>(
    s: S,
    weights: &[&[f32; LANES]; T],
    lane: usize,
    value: &[[S::F; 2]; N],
    sums: &mut [[[S::F; 2]; N]; T],
) {
    for t in 0..T {
        let weight = s.splat(weights[t][lane]);
        for n in 0..N {
            for half in 0..2 {
                sums[t][n][half] = s.fma(weight, value[n][half], sums[t][n][half]);
            }
        }
    }
}

/// Adds rows from a copy, one pair of chunks after another, for the queries of one head.
pub(super) struct Panels<'a, 'b> {
    /// `[pairs, PANEL_ROWS]`.
    pub(super) values: &'a [[Chunk; 2]],
    pub(super) sums: Sums<'a>,
    /// The pair at hand.
    pub(super) pair: usize,
    pub(super) ahead: &'a mut Ahead<'b>,
}

impl Kernel for Panels<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let count = self.sums.queries();
        let (earliest, latest) = (self.sums.visible(0), self.sums.visible(count - 1));
        let all_see_all = latest.start == 0 && earliest.end == PANEL_ROWS;
        for pair in 0..self.sums.chunks / 2 {
            self.pair = pair;
            let mut first = 0;
            while first < count {
                self.ahead.fetch::<S, 8>(s);
                match count - first {
                    12.. if S::REGISTERS == Registers::Many => {
                        self.tile::<S, 12>(s, first, all_see_all);
                        first += 12;
                    }
                    4.. => {
                        self.tile::<S, 4>(s, first, all_see_all);
                        first += 4;
                    }
                    left => {
                        self.add_singly(s, first..count, 0..PANEL_ROWS);
                        first += left;
                    }
                }
            }
        }
    }
}

impl Panels<'_, '_> {
    #[inline(always)]
    fn tile<S: Simd, const T: usize>(&mut self, s: S, first: usize, all_see_all: bool) {
        if all_see_all {
            self.add::<S, T>(s, first, 0..PANEL_ROWS);
        } else {
            self.add_visible::<S, T>(s, first);
        }
    }
}

impl Add for Panels<'_, '_> {
    fn sums(&self) -> &Sums<'_> {
        &self.sums
    }

    #[inline(always)]
    fn add<S: Simd, const T: usize>(&mut self, s: S, first: usize, rows: Range<usize>) {
        if rows.is_empty() {
            return;
        }
        let values = &self.values[self.pair * PANEL_ROWS..][..PANEL_ROWS]
            .as_chunks::<LANES>()
            .0;
        let mut sums = self.sums.load::<S, T, 1>(s, first, self.pair);
        for chunk in rows.start / LANES..rows.end.div_ceil(LANES) {
            let place = self.sums.start % PARTITION / LANES + chunk;
            let weights = self.sums.weights::<T>(first, place);
            let values = &values[chunk];
            let lane = |row: usize| row.saturating_sub(chunk * LANES).min(LANES);
            for lane in lane(rows.start)..lane(rows.end) {
                let value = [[s.load(&values[lane][0].0), s.load(&values[lane][1].0)]];
                add(s, &weights, lane, &value, &mut sums);
            }
        }
        self.sums.store(s, first, self.pair, &sums);
    }
}
