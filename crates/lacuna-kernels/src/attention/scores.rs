//! Dot products of queries and the keys of one block.
//!
//! In f32 a dot product is sixteen partial sums, lane `l` over the elements `l, l + 16, ..`, added
//! in the order of [`Simd::sum`]. [`Rows`] takes a chunk of elements per vector and adds up the lanes,
//! best for few queries; many go through the elements one by one
//! ([`columns`](super::columns)).

use std::marker::PhantomData;

use super::arithmetic::Arithmetic;
use super::elements::Pair;
use super::stored::{HeadTile, StoredRows};
use super::{PARTITION, PARTITION_CHUNKS};
use crate::simd::{Chunk, Kernel, LANES, Registers, Simd, each};

/// Sums of few queries and the keys of a partition, from rows as they are stored: with little to
/// compute, a copy would be what the time goes to.
///
/// Goes through memory in order: sixteen rows at a time, all heads of them.
pub(super) struct Rows<'a, E, A> {
    pub(super) arithmetic: A,
    pub(super) rows: StoredRows<'a>,
    /// Room for rows that do not lie in one run.
    pub(super) copy: &'a mut [u8],
    /// `[queries, pairs, vectors]`.
    pub(super) queries: &'a [Chunk],
    /// `[queries, PARTITION_CHUNKS]`.
    pub(super) scores: &'a mut [Chunk],
    pub(super) element: PhantomData<E>,
}

/// Rows that share each load of a query.
const GROUP: usize = 4;

/// Those of them where registers are few: a sum per query and row stays in a register.
const FEW_ROWS: usize = 2;

impl<E: Pair, A: Arithmetic> Kernel for Rows<'_, E, A> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let per_head = self.rows.queries_per_part;
        let per_query = self.queries.len() / (self.rows.parts.len() * per_head);
        let many = S::REGISTERS == Registers::Many;
        for rows in self.rows.sixteens() {
            let chunk = rows.start % PARTITION / LANES;
            for head in 0..self.rows.parts.len() {
                let keys = rows.head(s, head, self.copy);
                let mut first = head * per_head;
                let end = first + per_head;
                while first < end {
                    let mut some = Some::<E, A> {
                        arithmetic: self.arithmetic,
                        keys: &keys,
                        queries: &self.queries[first * per_query..],
                        per_query,
                        scores: &mut self.scores[first * PARTITION_CHUNKS + chunk..],
                        element: PhantomData,
                    };
                    match (end - first, many) {
                        (4.., true) => some.scores::<S, 4, GROUP>(s),
                        (3, true) => some.scores::<S, 3, GROUP>(s),
                        (2.., true) => some.scores::<S, 2, GROUP>(s),
                        (3, false) => some.scores::<S, 3, 1>(s),
                        (2.., false) => some.scores::<S, 2, FEW_ROWS>(s),
                        _ => some.scores::<S, 1, GROUP>(s),
                    }
                    first += together(end - first, S::REGISTERS);
                }
            }
        }
    }
}

/// How many of so many queries go through rows as they are stored together.
pub(super) fn together(queries: usize, registers: Registers) -> usize {
    match (queries, registers) {
        // Rather than two and one, though a row has to do without another beside it. Four are no faster than two and two.
        (3, Registers::Few) => 3,
        (_, Registers::Few) => queries.min(2),
        (_, Registers::Many) => queries.min(4),
    }
}

/// Some queries of a head and sixteen of its rows.
struct Some<'a, E, A> {
    arithmetic: A,
    keys: &'a HeadTile<'a>,
    /// `[queries, pairs, vectors]`, of which only the first ones are meant.
    queries: &'a [Chunk],
    per_query: usize,
    /// `[queries, PARTITION_CHUNKS]`, from the chunk of the rows on.
    scores: &'a mut [Chunk],
    element: PhantomData<E>,
}

impl<E: Pair, A: Arithmetic> Some<'_, E, A> {
    /// `T` queries with `R` rows at a time.
    #[inline(always)]
    fn scores<S: Simd, const T: usize, const R: usize>(&mut self, s: S) {
        // Rows whose sums are one vector per query and row.
        let rows = (LANES / T.next_power_of_two()).max(R);
        let queries = &self.queries[..T * self.per_query];
        for row in (0..LANES).step_by(rows) {
            let mut sums = [s.splat(0.0); LANES];
            for place in (0..rows).step_by(R) {
                let first = row + place;
                let dots = dots::<S, E, A, T, R>(s, self.arithmetic, self.keys, first, queries);
                for t in 0..T {
                    for j in 0..R {
                        sums[t * rows + place + j] = dots[t][j];
                    }
                }
            }
            let mut scores = [0.0; LANES];
            s.store(s.sum_each(sums), &mut scores);
            let scores = scores.chunks_exact(rows).take(T);
            for (scores, out) in scores.zip(self.scores.iter_mut().step_by(PARTITION_CHUNKS)) {
                out.0[row..row + rows].copy_from_slice(scores);
            }
        }
    }
}

/// Lane-wise sums of products of `T` queries of one head and `R` rows from `first` on.
#[inline(always)]
fn dots<S: Simd, E: Pair, A: Arithmetic, const T: usize, const R: usize>(
    s: S,
    arithmetic: A,
    keys: &HeadTile<'_>,
    first: usize,
    queries: &[Chunk],
) -> [[S::F; R]; T] {
    let per_query = queries.len() / T;
    let (pairs, bytes) = (per_query / A::VECTORS, size_of::<E::Stored>());
    let q: [_; T] = each!([].as_slice(), |t| &queries[t * per_query..][..per_query]);
    let rows: [&[E::Stored]; R] = each!([].as_slice(), |j| {
        &E::split(keys.tile.row(first + j)).0[..pairs]
    });
    let zero = s.splat(0.0);
    let mut dots = [[zero; R]; T];
    for pair in 0..pairs {
        for j in 0..R {
            keys.prefetch(s, first + j, pair * bytes, bytes);
        }
        let k: [_; R] = each!([zero; 2], |j| {
            arithmetic.neighbours(s, E::load(s, &rows[j][pair]))
        });
        for vector in 0..A::VECTORS {
            for t in 0..T {
                let q = s.load(&q[t][pair * A::VECTORS + vector].0);
                for j in 0..R {
                    dots[t][j] = arithmetic.multiply(s, q, k[j][vector], dots[t][j]);
                }
            }
        }
    }
    dots
}
