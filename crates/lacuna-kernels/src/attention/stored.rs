//! The rows of a partition as they are stored, for kernels that go through memory in order.

use std::ops::Range;

use super::PARTITION;
use super::elements::Pair;
use crate::simd::Simd;
use crate::view::View;

/// How many rows before its use a row is fetched: what a memory access takes, a few times over, and
/// little beside the second-level cache.
const AHEAD: usize = 24;

/// The rows of a partition and some of their heads.
pub(super) struct StoredRows<'a> {
    /// See [`View::extents`].
    rows: [&'a [u8]; PARTITION],
    /// Which of them are needed.
    pub(super) visible: Range<usize>,
    view: &'a View<'a>,
    pub(super) heads: Range<usize>,
    pub(super) queries_per_head: usize,
    /// Where rows go on behind those that are needed.
    next: Next<'a>,
}

/// Rows that will be needed soon.
#[derive(Clone, Copy)]
pub(super) struct Next<'a> {
    pub(super) view: &'a View<'a>,
    pub(super) first_row: usize,
}

impl<'a> StoredRows<'a> {
    pub(super) fn new(
        view: &'a View<'a>,
        rows: &Range<usize>,
        heads: Range<usize>,
        queries_per_head: usize,
        next: Next<'a>,
    ) -> Self {
        let start = rows.start / PARTITION * PARTITION;
        Self {
            rows: view.extents(start, rows),
            visible: rows.start - start..rows.end - start,
            view,
            heads,
            queries_per_head,
            next,
        }
    }

    /// Where one of the heads lies in a row.
    #[inline(always)]
    pub(super) fn head_range(&self, index: usize) -> Range<usize> {
        self.view.head_range(self.heads.start + index)
    }

    /// One head of a row.
    #[inline(always)]
    pub(super) fn pairs<E: Pair>(&self, row: usize, head: &Range<usize>) -> &'a [E::Stored] {
        E::split(&self.rows[row][head.clone()]).0
    }

    /// Where a head is of the row that is to be fetched when `row` is used.
    #[inline(always)]
    pub(super) fn ahead(&self, row: usize, head: &Range<usize>) -> *const u8 {
        let row = row + AHEAD;
        if row < self.visible.end {
            self.rows[row].as_ptr().wrapping_add(head.start)
        } else {
            self.behind(row - self.visible.end, head)
        }
    }

    #[cold]
    fn behind(&self, row: usize, head: &Range<usize>) -> *const u8 {
        let Next { view, first_row } = self.next;
        let row = first_row + row;
        // The head's place may differ, but all heads are asked for.
        match view.rows().contains(&row) {
            true => view.head(row, 0).as_ptr().wrapping_add(head.start),
            false => self.rows[self.visible.start].as_ptr(),
        }
    }
}

/// Fetches a pair to the second-level cache.
#[inline(always)]
pub(super) fn prefetch<S: Simd, E: Pair>(s: S, head: *const u8, pair: usize) {
    let bytes = size_of::<E::Stored>();
    for line in 0..bytes.div_ceil(64) {
        s.prefetch_far(head.wrapping_add(pair * bytes + 64 * line));
    }
}
