//! Streams of rows that advance together.
//!
//! Rows come from memory as fast as it delivers them if each of those that are read side by side is a stream of its own, which
//! the processor's prefetcher follows; of neighbours several are in one page, where it follows one. So the rows of a task are cut
//! into as many streams as are read side by side.

use std::ops::Range;

use super::formats::Format;
use super::parts;
use crate::grid::Block;
use crate::processor::prefers_short_prefetches;
use crate::simd::{Chunk, Kernel, LANES, Simd, each};
use crate::tile::Tile;

/// Bytes after which addresses fall into the same sets of a first-level cache.
const WAY_BYTES: usize = 4 << 10;

/// The furthest that a line of each stream is prefetched ahead of its use.
const MOST_AHEAD_BYTES: usize = 1 << 10;

/// How far ahead of its use a line of each stream is prefetched: four lines where that [is faster](prefers_short_prefetches),
/// else [`MOST_AHEAD_BYTES`].
pub(super) fn ahead_bytes() -> usize {
    match prefers_short_prefetches() {
        true => 4 * 64,
        false => MOST_AHEAD_BYTES,
    }
}

/// The most tokens whose sums are kept.
pub(super) const FEW_TOKENS: usize = 16;

/// Most rows of a stream that are left over so that streams lie better.
const SPARED: usize = 4;

/// Prefetches the first `ahead` bytes of `N` streams, the first of which begins at `first`: the rest of each is prefetched by what
/// is read before it, and without this a task would wait for memory line by line until it has come so far.
#[inline(always)]
pub(super) fn prefetch_beginnings<const N: usize>(
    first: *const u8,
    stream_bytes: usize,
    ahead: usize,
    prefetch: impl Fn(*const u8),
) {
    // A line of each in turn: the order in which they are read.
    for line in (0..ahead.min(stream_bytes)).step_by(64) {
        for stream in 0..N {
            prefetch(first.wrapping_add(stream * stream_bytes + line));
        }
    }
}

/// How many rows of a task each of `N` streams has, one stream behind the other; what is left over follows them.
pub(super) fn rows_of_streams<const N: usize>(rows: usize, row_bytes: usize) -> usize {
    let most = rows / N;
    let candidates = (most.saturating_sub(SPARED).max(1)..=most).rev();
    // The most of those that are as good.
    let best = candidates.min_by_key(|each| crowd::<N>(each * row_bytes));
    best.unwrap_or(0)
}

/// Sixteen rows of a block of the output.
pub(super) enum Place {
    /// The lanes in the range are neighbours, the first of them here.
    Neighbours(usize, Range<usize>),
    /// A row of each stream: its number in them.
    Streams(usize),
}

/// Prefetches what is read after a file block, for its `part`-th 32 columns: of the next sixteen rows, front to back.
#[inline(always)]
pub(super) fn prefetch_next_rows<S: Simd, D: Format>(
    s: S,
    tile: &Tile<'_>,
    index: usize,
    part: usize,
) {
    let bytes = LANES * D::DTYPE.block_bytes();
    for line in share_of_part::<D>(bytes.div_ceil(64), part) {
        s.prefetch_far(tile.address(LANES, index * bytes + 64 * line));
    }
}

/// The same of these sixteen rows, so many bytes further on.
#[inline(always)]
pub(super) fn prefetch_same_rows<S: Simd, D: Format>(
    s: S,
    tile: &Tile<'_>,
    index: usize,
    part: usize,
    ahead: usize,
) {
    prefetch_rows::<S, D>(s, tile, index * D::DTYPE.block_bytes(), part, ahead);
}

/// Prefetches what lies so far ahead of the bytes of a file block from `start` on, in some of sixteen rows.
#[inline(always)]
pub(super) fn prefetch_rows<S: Simd, D: Format>(
    s: S,
    tile: &Tile<'_>,
    start: usize,
    part: usize,
    ahead: usize,
) {
    let bytes = D::DTYPE.block_bytes();
    let first = start.next_multiple_of(64);
    let lines = bytes / 64;
    let one_more = first + 64 * lines < start + bytes;
    for row in share_of_part::<D>(LANES, part) {
        // All lines but one are constants, because a branch for each takes as long as the fetch.
        for line in 0..lines {
            s.prefetch_line(tile.address(row, first + 64 * line + ahead));
        }
        if one_more {
            s.prefetch_line(tile.address(row, first + 64 * lines + ahead));
        }
    }
}

/// Which of `count` prefetches of a file block are made for its `part`-th 32 columns, at least. All at once are more than a
/// processor waits for at a time, and what is read meanwhile would wait for them.
#[inline(always)]
fn share_of_part<D: Format>(count: usize, part: usize) -> Range<usize> {
    let each = count.div_ceil(parts::<D>());
    part * each..(part + 1) * each
}

/// Sums of some tokens and rows of streams, kept until there are as many neighbours as lanes: to write each where it belongs
/// would read a line for it. Of each token there are rows, and of each of these the lanes are those of the streams.
pub(crate) type Kept = [[Chunk; LANES]; FEW_TOKENS];

/// Writes the sums of all tokens.
pub(super) struct Write<'a, 'b> {
    pub(super) kept: &'a Kept,
    pub(super) tokens: usize,
    /// Rows of a stream, as many as lanes at most.
    pub(super) rows: Range<usize>,
    /// How many a stream has.
    pub(super) each: usize,
    pub(super) out: &'a mut Block<'b, f32>,
}

impl Kernel for Write<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { rows, each, .. } = self;
        for (token, sums) in self.kept[..self.tokens].iter().enumerate() {
            let out = self.out.row(token);
            if rows.len() == LANES {
                let streams = s.transpose(each!(s.splat(0.0), |row| s.load(&sums[row].0)));
                for (stream, sums) in streams.into_iter().enumerate() {
                    let out = out[stream * each + rows.start..].first_chunk_mut();
                    s.store(sums, out.expect("a stream has these rows"));
                }
                continue;
            }
            for (row, sums) in rows.clone().zip(sums) {
                for (sum, out) in sums.0.iter().zip(out[row..].iter_mut().step_by(each)) {
                    *out = *sum;
                }
            }
        }
    }
}

/// How many of `N` streams at this distance read ahead in the sets of the first, but for those that cannot be elsewhere.
fn crowd<const N: usize>(distance: usize) -> usize {
    let near = |stream: &usize| {
        let place = stream * distance % WAY_BYTES;
        !(MOST_AHEAD_BYTES..=WAY_BYTES - MOST_AHEAD_BYTES).contains(&place)
    };
    let fewest = N * 2 * MOST_AHEAD_BYTES / WAY_BYTES;
    (1..N).filter(near).count().max(fewest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_beginning_of_each_stream_is_prefetched_and_no_more() {
        let cases =
            [256, MOST_AHEAD_BYTES].map(|ahead| [0, 40, 360, 5000].map(|bytes| (ahead, bytes)));
        for &(ahead, stream_bytes) in cases.as_flattened() {
            let lines = std::cell::RefCell::new(Vec::new());
            prefetch_beginnings::<4>(std::ptr::null(), stream_bytes, ahead, |line| {
                lines.borrow_mut().push(line.addr());
            });
            let mut lines = lines.into_inner();
            assert!(lines.is_sorted_by_key(|line| line % stream_bytes.max(1)));
            lines.sort_unstable();
            let each = stream_bytes.min(ahead).div_ceil(64);
            let expected = (0..4).flat_map(|i| (0..each).map(move |j| i * stream_bytes + 64 * j));
            assert_eq!(lines, expected.collect::<Vec<_>>());
        }
    }

    #[test]
    fn streams_have_most_rows_and_are_not_all_in_the_same_sets() {
        for row_bytes in [34, 576, 1088, 2176, 3264, 4096, 144 * 11] {
            for rows in 0..300 {
                let each = rows_of_streams::<16>(rows, row_bytes);
                let most = rows / 16;
                assert!(each <= most && each + SPARED >= most, "{rows} {each}");
                assert!(rows < 16 || each > 0, "{rows}");
            }
        }
        // Sixteen times 64 rows of 1,088 bytes would begin at multiples of 4 KiB.
        assert_eq!(rows_of_streams::<16>(1024, 1088), 63);
        assert_eq!(rows_of_streams::<16>(1008, 1088), 63);
        // Rows of 4 KiB do wherever they begin.
        assert_eq!(rows_of_streams::<16>(1024, 4096), 64);
    }
}
