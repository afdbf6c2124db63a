//! Rows fetched ahead of time.

use std::ops::Range;

use crate::simd::Simd;
use crate::view::View;

/// Rows that will be needed soon. Fetched a few lines at a time, because a burst makes the thread
/// wait.
pub(super) struct Ahead<'a> {
    view: &'a View<'a>,
    rows: Range<usize>,
    heads: Range<usize>,
    rest: &'a [u8],
}

impl<'a> Ahead<'a> {
    /// What is to be fetched while one of `heads` is worked on, so that all heads of `rows` are
    /// fetched once all are done: whole rows where they are contiguous, in the order of addresses.
    pub(super) fn share(
        view: &'a View<'a>,
        rows: Range<usize>,
        heads: &Range<usize>,
        head: usize,
    ) -> Self {
        let rows = rows.start.max(view.rows().start)..rows.end.min(view.rows().end);
        let (rows, heads) = if view.heads_are_adjacent() {
            let part = |done: usize| rows.start + rows.len() * done / heads.len();
            let done = head - heads.start;
            (part(done)..part(done + 1), heads.clone())
        } else {
            (rows, head..head + 1)
        };
        Self {
            view,
            rows,
            heads,
            rest: &[],
        }
    }

    /// Nothing.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn nothing(view: &'a View<'a>) -> Self {
        Self {
            view,
            rows: 0..0,
            heads: 0..0,
            rest: &[],
        }
    }

    /// Prefetches up to `N` lines.
    #[inline(always)]
    pub(super) fn fetch<S: Simd, const N: usize>(&mut self, s: S) {
        if let Some((lines, rest)) = self.rest.split_at_checked(N * 64) {
            s.prefetch_bytes(lines);
            self.rest = rest;
        } else if !(self.rest.is_empty() && self.rows.is_empty()) {
            self.fetch_next(s);
        }
    }

    /// Prefetches what is left of contiguous bytes, and finds the next ones.
    #[cold]
    #[inline(never)]
    fn fetch_next<S: Simd>(&mut self, s: S) {
        s.prefetch_bytes(self.rest);
        self.rest = &[];
        if self.rows.is_empty() {
            return;
        }
        let (layout, row) = (self.view.layout(), self.rows.start);
        // Rows without gaps are one stretch.
        let gapless = layout.row_stride == self.heads.len() * layout.head_bytes();
        let last = if gapless { self.rows.end } else { row + 1 };
        let (count, bytes) = self.view.span(&(row..last), &self.heads);
        self.rows.start += count;
        self.rest = bytes;
    }
}
