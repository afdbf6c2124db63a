//! Rows that are read side by side, far from each other.
//!
//! One token's rows come from memory as fast as it delivers if each of those that are read together is a stream of its own, which
//! the processor's prefetcher follows; of neighbours several are in one page, where it follows one. So the rows of a task are cut
//! in as many runs as are read together.

use std::ops::Range;

use crate::grid::Block;
use crate::simd::{Chunk, Kernel, LANES, Simd, each};

/// Bytes after which addresses fall into the same sets of a first-level cache.
const WAY_BYTES: usize = 4 << 10;

/// What is read ahead of each run, which runs should not have in the same sets.
pub(super) const AHEAD_BYTES: usize = 1 << 10;

/// The most tokens whose sums are kept.
pub(super) const FEW_TOKENS: usize = 16;

/// Most rows that are left over for runs that lie better.
const SPARED: usize = 4;

/// Rows of a task, `N` runs of them and some that are left over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Runs<const N: usize> {
    /// Rows of a run.
    pub(super) each: usize,
    /// Rows behind all runs.
    pub(super) rest: usize,
}

impl<const N: usize> Runs<N> {
    /// Cuts so many rows.
    pub(super) fn of(rows: usize, row_bytes: usize) -> Self {
        let most = rows / N;
        let candidates = (most.saturating_sub(SPARED).max(1)..=most).rev();
        // The first of those that are as good.
        let best = candidates.min_by_key(|each| crowd::<N>(each * row_bytes));
        let each = best.unwrap_or(0);
        Self {
            each,
            rest: rows - N * each,
        }
    }
}

/// Sixteen rows of a block of the output.
pub(super) enum Place {
    /// The lanes in the range are neighbours, the first of them here.
    Neighbours(usize, Range<usize>),
    /// A row of each run: its number in them.
    Runs(usize),
}

/// Sums of some tokens and rows of runs, kept until there are as many neighbours as lanes: to write each where it belongs would
/// read a line for it.
pub(crate) struct Kept(Box<[Chunk]>);

impl Kept {
    pub(crate) fn new() -> Self {
        Self(vec![Chunk::ZERO; FEW_TOKENS * LANES].into_boxed_slice())
    }

    pub(crate) fn bytes(&self) -> usize {
        size_of_val(&*self.0)
    }

    /// The sums of a token and a row of each run.
    #[inline(always)]
    pub(super) fn of(&mut self, token: usize, row: usize) -> &mut [f32; LANES] {
        &mut self.0[token * LANES + row % LANES].0
    }

    /// Writes the sums of a token and some rows of each run, the first a multiple of [`LANES`].
    #[inline(always)]
    fn write<S: Simd>(&self, s: S, token: usize, rows: Range<usize>, each: usize, out: &mut [f32]) {
        let sums = &self.0[token * LANES..][..LANES];
        let runs = s.transpose(each!(s.splat(0.0), |row| s.load(&sums[row].0)));
        for (run, sums) in runs.into_iter().enumerate() {
            let mut all = [0.0; LANES];
            s.store(sums, &mut all);
            let out = &mut out[run * each..][rows.clone()];
            out.copy_from_slice(&all[..rows.len()]);
        }
    }
}

/// Writes the sums of all tokens.
pub(super) struct Write<'a, 'b> {
    pub(super) kept: &'a Kept,
    pub(super) tokens: usize,
    /// Rows of a run, of which the first is a multiple of [`LANES`].
    pub(super) rows: Range<usize>,
    /// How many a run has.
    pub(super) each: usize,
    pub(super) out: &'a mut Block<'b, f32>,
}

impl Kernel for Write<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for token in 0..self.tokens {
            let (rows, out) = (self.rows.clone(), self.out.row(token));
            self.kept.write(s, token, rows, self.each, out);
        }
    }
}

/// How many of `N` runs at this distance read ahead in the sets of the first, but for those that cannot be elsewhere.
fn crowd<const N: usize>(distance: usize) -> usize {
    let near = |run: &usize| {
        let place = run * distance % WAY_BYTES;
        !(AHEAD_BYTES..=WAY_BYTES - AHEAD_BYTES).contains(&place)
    };
    let fewest = N * 2 * AHEAD_BYTES / WAY_BYTES;
    (1..N).filter(near).count().max(fewest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_all_rows_and_not_all_in_the_same_sets() {
        for row_bytes in [34, 576, 1088, 2176, 3264, 4096, 144 * 11] {
            for rows in 0..300 {
                let Runs { each, rest } = Runs::<16>::of(rows, row_bytes);
                assert_eq!(16 * each + rest, rows);
                assert!(rest < 16 * (SPARED + 1), "{rows} {rest}");
                assert!(rows < 16 || each > 0);
            }
        }
        // Sixteen times 64 rows of 1,088 bytes would begin at multiples of 4 KiB.
        assert_eq!(Runs::<16>::of(1024, 1088), Runs { each: 63, rest: 16 });
        assert_eq!(Runs::<16>::of(1008, 1088), Runs { each: 63, rest: 0 });
    }
}
