//! Sums of values times weights.

use std::ops::Range;

use super::rows::Ahead;
use super::scores::HALVES;
use super::softmax::Chunk;
use super::{BLOCK_ROWS, Sight};
use crate::simd::{Kernel, LANES, Registers, Simd, each};

/// Adds weight times value of the rows of one block to states, in the order of rows.
pub(super) struct Values<'a, 'b> {
    /// `[BLOCK_ROWS, chunks]`.
    pub(super) values: &'a [Chunk],
    pub(super) chunks: usize,
    /// `[queries, HALVES]`.
    pub(super) weights: &'a [Chunk],
    /// `[queries, 1 + chunks]`.
    pub(super) states: &'a mut [Chunk],
    /// What the tokens see, `group` queries each, and where the block starts.
    pub(super) sight: Sight,
    pub(super) group: usize,
    pub(super) start: usize,
    pub(super) ahead: &'a mut Ahead<'b>,
}

impl Kernel for Values<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let count = self.weights.len() / HALVES;
        let mut first = 0;
        while first < count {
            first += match count - first {
                6.. => self.queries::<S, 6>(s, first),
                4.. => self.queries::<S, 4>(s, first),
                2.. => self.queries::<S, 2>(s, first),
                _ => self.queries::<S, 1>(s, first),
            };
        }
    }
}

impl Values<'_, '_> {
    /// The rows of the block that a query sees, by place; not before those of queries before it.
    fn visible(&self, query: usize) -> Range<usize> {
        let token = query / self.group;
        self.sight.within(token, self.start, BLOCK_ROWS)
    }

    /// `T` queries; returns `T`.
    #[inline(always)]
    fn queries<S: Simd, const T: usize>(&mut self, s: S, first: usize) -> usize {
        let (earliest, latest) = (self.visible(first), self.visible(first + T - 1));
        let common = latest.start..earliest.end.max(latest.start);
        for query in first..first + T {
            let Range { start, end } = self.visible(query);
            self.rows::<S, 1>(s, query, start..end.min(common.start));
        }
        self.rows::<S, T>(s, first, common.clone());
        for query in first..first + T {
            let Range { start, end } = self.visible(query);
            self.rows::<S, 1>(s, query, start.max(common.end)..end);
        }
        T
    }

    /// Some rows for `T` queries.
    #[inline(always)]
    fn rows<S: Simd, const T: usize>(&mut self, s: S, first: usize, rows: Range<usize>) {
        if rows.is_empty() {
            return;
        }
        let mut chunk = 0;
        while chunk < self.chunks {
            let left = self.chunks - chunk;
            chunk += match S::REGISTERS {
                Registers::Many if left >= 8 && T <= 2 => {
                    self.tile::<S, T, 8>(s, first, chunk, &rows)
                }
                Registers::Many if left >= 4 => self.tile::<S, T, 4>(s, first, chunk, &rows),
                Registers::Few if left >= 2 && T <= 2 => {
                    self.tile::<S, T, 2>(s, first, chunk, &rows)
                }
                _ => self.tile::<S, T, 1>(s, first, chunk, &rows),
            };
        }
    }

    /// `N` chunks of `T` queries; returns `N`.
    #[inline(always)]
    fn tile<S: Simd, const T: usize, const N: usize>(
        &mut self,
        s: S,
        first: usize,
        chunk: usize,
        rows: &Range<usize>,
    ) -> usize {
        let zero = s.splat(0.0);
        let per_query = 1 + self.chunks;
        let weights = &self.weights[first * HALVES..][..T * HALVES];
        let weights: &[[Chunk; HALVES]; T] = weights.as_chunks().0.try_into().expect("T queries");
        let mut sums = [[zero; N]; T];
        for t in 0..T {
            let state = &self.states[(first + t) * per_query + 1 + chunk..][..N];
            sums[t] = each!(zero, |n| s.load(&state[n].0));
        }
        for row in rows.start..rows.end.min(HALVES * LANES) {
            // With more queries the values are not what the time goes to.
            if T <= 2 {
                self.ahead.fetch::<S, 4>(s);
            }
            let value = &self.values[row * self.chunks + chunk..][..N];
            let value: [_; N] = each!(zero, |n| s.load(&value[n].0));
            for t in 0..T {
                let weight = s.splat(weights[t][row / LANES].0[row % LANES]);
                for n in 0..N {
                    sums[t][n] = s.fma(weight, value[n], sums[t][n]);
                }
            }
        }
        for t in 0..T {
            let state = &mut self.states[(first + t) * per_query + 1 + chunk..][..N];
            for n in 0..N {
                s.store(sums[t][n], &mut state[n].0);
            }
        }
        N
    }
}
