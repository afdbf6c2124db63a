//! Streams of rows that advance together.
//!
//! Rows come from memory as fast as it delivers them if each of those that are read side by side is a stream of its own, which
//! the processor's prefetcher follows; of neighbours several are in one page, where it follows one. So the rows of a task are cut
//! into as many streams as are read side by side.

use std::ops::Range;

use crate::grid::Block;
use crate::simd::{Chunk, Kernel, LANES, Simd, each};

/// Bytes after which addresses fall into the same sets of a first-level cache.
const WAY_BYTES: usize = 4 << 10;

/// How far ahead of its use a line of each stream is prefetched.
pub(super) const AHEAD_BYTES: usize = 1 << 10;

/// The most tokens whose sums are kept.
pub(super) const FEW_TOKENS: usize = 16;

/// Most rows of a stream that are left over so that streams lie better.
const SPARED: usize = 4;

/// Rows of a task: `N` streams of them, one behind the other, and some that are left over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Streams<const N: usize> {
    /// Rows of a stream.
    pub(super) each: usize,
    /// Rows behind all streams.
    pub(super) rest: usize,
}

impl<const N: usize> Streams<N> {
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
    /// A row of each stream: its number in them.
    Streams(usize),
}

/// Sums of some tokens and rows of streams, kept until there are as many neighbours as lanes: to write each where it belongs
/// would read a line for it.
pub(crate) struct Kept(Box<[Chunk]>);

impl Kept {
    pub(crate) fn new() -> Self {
        Self(vec![Chunk::ZERO; FEW_TOKENS * LANES].into_boxed_slice())
    }

    pub(crate) fn bytes(&self) -> usize {
        size_of_val(&*self.0)
    }

    /// The sums of a token and a row of each stream.
    #[inline(always)]
    pub(super) fn of(&mut self, token: usize, row: usize) -> &mut [f32; LANES] {
        &mut self.0[token * LANES + row % LANES].0
    }

    /// Writes the sums of a token and some rows of each stream, the first a multiple of [`LANES`].
    #[inline(always)]
    fn write<S: Simd>(
        &self,
        s: S,
        token: usize,
        rows: &Range<usize>,
        each: usize,
        out: &mut [f32],
    ) {
        let sums = &self.0[token * LANES..][..LANES];
        if rows.len() == LANES {
            let streams = s.transpose(each!(s.splat(0.0), |row| s.load(&sums[row].0)));
            for (stream, sums) in streams.into_iter().enumerate() {
                let out = out[stream * each + rows.start..].first_chunk_mut();
                s.store(sums, out.expect("a stream has these rows"));
            }
            return;
        }
        for (row, sums) in rows.clone().zip(sums) {
            for (sum, out) in sums.0.iter().zip(out[row..].iter_mut().step_by(each)) {
                *out = *sum;
            }
        }
    }
}

/// Writes the sums of all tokens.
pub(super) struct Write<'a, 'b> {
    pub(super) kept: &'a Kept,
    pub(super) tokens: usize,
    /// Rows of a stream, of which the first is a multiple of [`LANES`].
    pub(super) rows: Range<usize>,
    /// How many a stream has.
    pub(super) each: usize,
    pub(super) out: &'a mut Block<'b, f32>,
}

impl Kernel for Write<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for token in 0..self.tokens {
            let out = self.out.row(token);
            self.kept.write(s, token, &self.rows, self.each, out);
        }
    }
}

/// How many of `N` streams at this distance read ahead in the sets of the first, but for those that cannot be elsewhere.
fn crowd<const N: usize>(distance: usize) -> usize {
    let near = |stream: &usize| {
        let place = stream * distance % WAY_BYTES;
        !(AHEAD_BYTES..=WAY_BYTES - AHEAD_BYTES).contains(&place)
    };
    let fewest = N * 2 * AHEAD_BYTES / WAY_BYTES;
    (1..N).filter(near).count().max(fewest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_are_all_rows_and_not_all_in_the_same_sets() {
        for row_bytes in [34, 576, 1088, 2176, 3264, 4096, 144 * 11] {
            for rows in 0..300 {
                let Streams { each, rest } = Streams::<16>::of(rows, row_bytes);
                assert_eq!(16 * each + rest, rows);
                assert!(rest < 16 * (SPARED + 1), "{rows} {rest}");
                assert!(rows < 16 || each > 0);
            }
        }
        // Sixteen times 64 rows of 1,088 bytes would begin at multiples of 4 KiB.
        assert_eq!(
            Streams::<16>::of(1024, 1088),
            Streams { each: 63, rest: 16 }
        );
        assert_eq!(Streams::<16>::of(1008, 1088), Streams { each: 63, rest: 0 });
    }
}
