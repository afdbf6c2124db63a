//! The rows of a partition as they are stored, for kernels that go through memory in order.

use std::ops::Range;

use super::rows::Head;
use crate::simd::{LANES, Simd};
use crate::tile::Tile;
use crate::view::{RowLayout, View};

/// How many rows before its use a row is fetched: what a memory access takes, a few times over, and
/// little beside the second-level cache.
const AHEAD: usize = 24;

/// Rows that will be needed soon.
#[derive(Clone, Copy)]
pub(super) struct Next<'a> {
    pub(super) view: &'a View<'a>,
    pub(super) first_row: usize,
}

/// The rows of a partition and the heads that some parts read, sixteen rows at a time.
pub(super) struct StoredRows<'a> {
    pub(super) view: &'a View<'a>,
    /// Those that are needed.
    pub(super) rows: Range<usize>,
    /// Parts of query heads, of which so many read the same head.
    pub(super) parts: Range<usize>,
    pub(super) parts_per_head: usize,
    pub(super) queries_per_part: usize,
    /// Where rows go on behind those that are needed.
    pub(super) next: Next<'a>,
}

impl<'a> StoredRows<'a> {
    /// All sixteens of which some rows are needed.
    pub(super) fn sixteens(&self) -> impl Iterator<Item = Sixteen<'_, 'a>> {
        let first = self.rows.start / LANES * LANES;
        (first..self.rows.end).step_by(LANES).map(|start| {
            let needed = self.rows.start <= start && start + LANES <= self.rows.end;
            let (view, next) = match start + AHEAD {
                next if next < self.rows.end => (self.view, next),
                next => (self.next.view, self.next.first_row + next - self.rows.end),
            };
            let next = match view.rows().contains(&next) {
                true => view.head(next, 0),
                false => self.view.head(self.rows.start, 0),
            };
            Sixteen {
                rows: self,
                start,
                run: needed.then(|| self.view.run_of(start, LANES)).flatten(),
                next: next.as_ptr(),
                next_layout: view.layout(),
            }
        })
    }
}

/// Sixteen rows of which some are needed.
pub(super) struct Sixteen<'a, 'b> {
    rows: &'a StoredRows<'b>,
    /// The first of them.
    pub(super) start: usize,
    /// Their bytes, if all are needed and lie in one run.
    run: Option<&'b [u8]>,
    /// What is fetched meanwhile.
    next: *const u8,
    next_layout: &'b RowLayout,
}

impl<'b> Sixteen<'_, 'b> {
    /// Whether one of them is needed.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn needs(&self, row: usize) -> bool {
        self.rows.rows.contains(&(self.start + row))
    }

    /// The head that one of the parts reads. `copy` has room for it.
    #[inline(always)]
    pub(super) fn head<'c>(&self, part: usize, copy: &'c mut [u8]) -> HeadTile<'c>
    where
        'b: 'c,
    {
        let StoredRows { view, rows, .. } = self.rows;
        let head = match self.rows.parts_per_head {
            // Nearly always; dividing takes as long as some rows do.
            1 => self.rows.parts.start + part,
            more => (self.rows.parts.start + part) / more,
        };
        let layout = view.layout();
        let tile = match self.run {
            Some(bytes) => {
                let bytes = &bytes[head * layout.head_stride..];
                Tile::strided(bytes, layout.row_stride, layout.head_bytes())
            }
            None => {
                let sixteen = Head {
                    view,
                    head,
                    start: self.start,
                    rows: rows.clone(),
                };
                let tile = sixteen.tile(copy);
                tile.expect("some of the rows are needed")
            }
        };
        HeadTile {
            tile,
            next: self.next.wrapping_add(head * self.next_layout.head_stride),
            stride: self.next_layout.row_stride,
        }
    }
}

/// A head of sixteen rows, and of those that are fetched meanwhile.
pub(super) struct HeadTile<'a> {
    pub(super) tile: Tile<'a>,
    next: *const u8,
    stride: usize,
}

impl HeadTile<'_> {
    /// Fetches `bytes` from `at` on of a later row to the second-level cache.
    #[inline(always)]
    pub(super) fn prefetch<S: Simd>(&self, s: S, row: usize, at: usize, bytes: usize) {
        let next = self.next.wrapping_add(row * self.stride + at);
        for line in (0..bytes).step_by(64) {
            s.prefetch_far(next.wrapping_add(line));
        }
    }
}
