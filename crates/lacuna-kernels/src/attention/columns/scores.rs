//! Dot products of a tile of queries and rows of keys.

use super::super::PARTITION;
use super::super::arithmetic::Arithmetic;
use super::{ORDER, Scores};
use crate::simd::{Chunk, LANES, Registers, Simd, each};

/// Rows whose scores are computed together. With a vector of queries in two registers, sixteen registers hold the
/// sums of six rows, the queries and one element of a row. Thirty-two registers hold those of two vectors, each of
/// one, and those that wait for their sibling.
const ROWS: usize = 6;

/// Keys of one head of a partition, with zeros behind the last element.
#[derive(Clone, Copy)]
pub(in super::super) struct Keys<'a> {
    /// `[PARTITION, steps]`; what is not needed may be anything.
    pub(in super::super) rows: &'a [[f32; LANES]],
    pub(in super::super) steps: usize,
    /// Lanes of the last step that have elements; nothing is computed for the others.
    pub(in super::super) tail: usize,
}

impl Scores<'_, '_> {
    /// Writes scores of keys that are no integers.
    #[inline(always)]
    pub(super) fn of_elements<S: Simd, A: Arithmetic, const V: usize>(
        &mut self,
        s: S,
        arithmetic: A,
        queries: &[Chunk],
        keys: Keys<'_>,
    ) {
        let Keys { rows, steps, tail } = keys;
        let scores = self.scores.as_chunks_mut::<V>().0;
        for start in self.seen.any.clone().step_by(ROWS) {
            self.ahead.fetch::<S, 8>(s);
            // The last ones may be computed twice, or be rows that nobody needs.
            let start = start.min(PARTITION - ROWS);
            let rows = &rows[start * steps..(start + ROWS) * steps];
            let products = Products::<A, V> {
                arithmetic,
                queries: queries.as_chunks().0,
                rows: each!([].as_slice(), |r| &rows[r * steps..(r + 1) * steps]),
                tail,
            };
            let sums = products.sums(s);
            let out: &mut [[Chunk; V]; ROWS] = scores[start..]
                .first_chunk_mut()
                .expect("rows of a partition");
            super::store(s, &sums, out);
        }
    }
}

/// Dot products of `V` vectors of queries and some rows of keys.
#[derive(Clone, Copy)]
struct Products<'a, A, const V: usize> {
    arithmetic: A,
    /// `[LANES, steps]`, lanes in [`ORDER`].
    queries: &'a [[Chunk; V]],
    /// `steps` each.
    rows: [&'a [[f32; LANES]]; ROWS],
    tail: usize,
}

/// Sums of `V` vectors of queries.
type Of<S, const V: usize> = [[<S as Simd>::F; V]; ROWS];

impl<A: Arithmetic, const V: usize> Products<'_, A, V> {
    #[inline(always)]
    fn sums<S: Simd>(self, s: S) -> Of<S, V> {
        match S::REGISTERS {
            Registers::Few => self.tree::<S, { LANES.ilog2() as usize }>(s, Self::lane),
            Registers::Many => self.tree::<S, { (LANES / 4).ilog2() as usize }>(s, Self::four),
        }
    }

    /// Adds up `2^L` leaves of a tree. Those that wait for their sibling are in memory, on purpose: a tree that is written
    /// out leaves it to the compiler which are in registers, and the ones it chooses are moved more often.
    #[inline(always)]
    fn tree<S: Simd, const L: usize>(
        self,
        s: S,
        leaf: impl Fn(Self, S, usize) -> Of<S, V>,
    ) -> Of<S, V> {
        let mut waiting = [[[Chunk::ZERO; V]; ROWS]; L];
        for index in 0..1_usize << L {
            let mut sums = leaf(self, s, index * (LANES >> L));
            let level = index.trailing_ones() as usize;
            for waiting in &waiting[..level] {
                sums = add::<S, V>(s, &super::load(s, waiting), &sums);
            }
            match waiting.get_mut(level) {
                Some(waiting) => super::store(s, &sums, waiting),
                None => return sums,
            }
        }
        unreachable!("the last leaf is added to all that wait")
    }

    #[inline(always)]
    fn four<S: Simd>(self, s: S, first: usize) -> Of<S, V> {
        let (low, high) = (self.two(s, first), self.two(s, first + 2));
        add::<S, V>(s, &low, &high)
    }

    #[inline(always)]
    fn two<S: Simd>(self, s: S, first: usize) -> Of<S, V> {
        let (low, high) = (self.lane(s, first), self.lane(s, first + 1));
        add::<S, V>(s, &low, &high)
    }

    /// The sums of one lane over all steps that have it.
    #[inline(always)]
    fn lane<S: Simd>(self, s: S, index: usize) -> Of<S, V> {
        let all = self.rows[0].len();
        let steps = all - usize::from(ORDER[index] >= self.tail);
        let queries = &self.queries[index * all..][..steps];
        let rows: [_; ROWS] = each!([].as_slice(), |r| &self.rows[r][..steps]);
        let mut sums = [[s.splat(0.0); V]; ROWS];
        for step in 0..steps {
            let queries: [_; V] = each!(s.splat(0.0), |v| s.load(&queries[step][v].0));
            for r in 0..ROWS {
                let element = s.splat(rows[r][step][ORDER[index]]);
                for v in 0..V {
                    sums[r][v] = self.arithmetic.multiply(s, queries[v], element, sums[r][v]);
                }
            }
        }
        sums
    }
}

#[inline(always)]
fn add<S: Simd, const V: usize>(s: S, a: &Of<S, V>, b: &Of<S, V>) -> Of<S, V> {
    let mut sums = *a;
    for r in 0..ROWS {
        for v in 0..V {
            sums[r][v] = s.add(a[r][v], b[r][v]);
        }
    }
    sums
}
