//! Rows that are read side by side, far from each other.
//!
//! One token's rows come from memory as fast as it delivers if each of those that are read together is a stream of its own, which
//! the processor's prefetcher follows; of neighbours several are in one page, where it follows one. So the rows of a task are cut
//! in as many runs as are read together.

/// Bytes after which addresses fall into the same sets of a first-level cache.
const WAY_BYTES: usize = 4 << 10;

/// What is read ahead of each run, which runs should not have in the same sets.
pub(super) const AHEAD_BYTES: usize = 1 << 10;

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

/// How many of `N` runs at this distance read ahead in the sets of the first, but for those that cannot be elsewhere.
fn crowd<const N: usize>(distance: usize) -> usize {
    let near = |run: &usize| {
        let place = run * distance % WAY_BYTES;
        place < AHEAD_BYTES || place > WAY_BYTES - AHEAD_BYTES
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
