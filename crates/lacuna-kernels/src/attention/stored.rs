//! The rows of a partition as they are stored, for kernels that go through memory in order.

use std::ops::Range;

use super::rows::Head;
use crate::simd::{LANES, Registers, Simd};
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
                in_order: self.are_all_of(view.layout()),
            }
        })
    }
}

impl StoredRows<'_> {
    /// Whether these are all heads of rows that lie behind one another without gaps.
    fn are_all_of(&self, layout: &RowLayout) -> bool {
        self.parts.len() == layout.heads * self.parts_per_head
            && layout.row_stride == layout.heads * layout.head_bytes()
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
    /// Whether that can be fetched in the order of addresses, whatever the head.
    in_order: bool,
}

impl<'b> Sixteen<'_, 'b> {
    /// Whether one of them is needed.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn needs(&self, row: usize) -> bool {
        self.rows.rows.contains(&(self.start + row))
    }

    /// The head that one of the parts reads. `copy` has room for it.
    #[inline(always)]
    pub(super) fn head<'c, S: Simd>(&self, _: S, part: usize, copy: &'c mut [u8]) -> HeadTile<'c>
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
        // The next line in the order of addresses, not rows away, which processors then fetch ahead too. Where registers are
        // many a row's part is longer and comes in order by itself; there it has not been measured.
        let in_order = self.in_order && S::REGISTERS == Registers::Few;
        let next = match in_order {
            true => head * LANES * self.next_layout.head_bytes(),
            false => head * self.next_layout.head_stride,
        };
        HeadTile {
            tile,
            next: self.next.wrapping_add(next),
            stride: self.next_layout.row_stride,
            in_order,
        }
    }
}

/// A head of sixteen rows, and of those that are fetched meanwhile.
pub(super) struct HeadTile<'a> {
    pub(super) tile: Tile<'a>,
    next: *const u8,
    stride: usize,
    in_order: bool,
}

impl HeadTile<'_> {
    /// Fetches `bytes` from `at` on of a later row to the second-level cache, for who goes through one row after another.
    #[inline(always)]
    pub(super) fn prefetch<S: Simd>(&self, s: S, row: usize, at: usize, bytes: usize) {
        let before = row * self.tile.row_bytes() + at;
        self.fetch(s, before, row * self.stride + at, bytes);
    }

    /// The same for who goes through all rows before more of their bytes.
    #[inline(always)]
    pub(super) fn prefetch_across<S: Simd>(&self, s: S, row: usize, at: usize, bytes: usize) {
        let before = at * LANES + row * bytes;
        self.fetch(s, before, row * self.stride + at, bytes);
    }

    /// Fetches what is in its turn: behind so many bytes, or at this place of the head.
    #[inline(always)]
    fn fetch<S: Simd>(&self, s: S, before: usize, place: usize, bytes: usize) {
        let next = match self.in_order {
            true => before,
            false => place,
        };
        for line in (0..bytes).step_by(64) {
            s.prefetch_far(self.next.wrapping_add(next + line));
        }
    }
}
