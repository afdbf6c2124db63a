//! The bytes of a block of cached rows.

use std::ops::Range;

use super::ROWS;
use super::convert::convert;
use super::softmax::Chunk;
use crate::element::ElementType;
use crate::float::Element;
use crate::simd::{Simd, each};
use crate::view::View;

/// One head of a block's rows, and of those sixteen further on, which will be needed next.
pub(super) struct BlockRows<'a> {
    element: ElementType,
    /// The rows; for those that are not needed the nearest one stands.
    rows: [&'a [u8]; ROWS],
    next: [&'a [u8]; ROWS],
}

impl<'a> BlockRows<'a> {
    /// The block that starts at row `start`, of which `rows` are needed.
    #[inline(always)]
    pub(super) fn find(view: &View<'a>, start: usize, rows: &Range<usize>, head: usize) -> Self {
        let next = (start + ROWS).min(view.rows().end - 1);
        Self {
            element: view.layout().element,
            rows: view.heads(start, rows.clone(), head),
            next: view.heads(next, next..view.rows().end, head),
        }
    }

    pub(super) fn element(&self) -> ElementType {
        self.element
    }

    /// The next rows, to be prefetched.
    #[inline(always)]
    pub(super) fn ahead(&self) -> Ahead<'_> {
        Ahead {
            rows: &self.next,
            rest: &[],
        }
    }

    /// Whole chunks of `E` of each row.
    #[inline(always)]
    pub(super) fn chunks<E: Element>(&self) -> [&'a [E::Chunk]; ROWS] {
        each!([].as_slice(), |j| E::split(self.rows[j]).0)
    }

    /// Writes the rows as f32, `chunks` per row.
    #[inline(always)]
    pub(super) fn convert<S: Simd>(&self, s: S, chunks: usize, out: &mut [Chunk]) {
        for (row, out) in self.rows.iter().zip(out.chunks_exact_mut(chunks)) {
            convert(s, self.element, row, out);
        }
    }
}

/// The rows that [`BlockRows::convert`] wrote.
#[inline(always)]
pub(super) fn converted(copy: &[Chunk], chunks: usize) -> [&[Chunk]; ROWS] {
    each!([].as_slice(), |j| &copy[j * chunks..][..chunks])
}

/// Bytes that will be needed soon. Fetched a few at a time, because a burst makes the thread wait.
#[derive(Default)]
pub(super) struct Ahead<'a> {
    rows: &'a [&'a [u8]],
    rest: &'a [u8],
}

impl Ahead<'_> {
    /// Prefetches up to `N` lines.
    #[inline(always)]
    pub(super) fn fetch<S: Simd, const N: usize>(&mut self, s: S) {
        for _ in 0..N {
            if self.rest.is_empty() {
                let Some((row, rows)) = self.rows.split_first() else {
                    return;
                };
                (self.rows, self.rest) = (rows, row);
            }
            let (line, rest) = self.rest.split_at(self.rest.len().min(64));
            s.prefetch_bytes(line);
            self.rest = rest;
        }
    }

    /// Prefetches all.
    #[inline(always)]
    pub(super) fn fetch_all<S: Simd>(&mut self, s: S) {
        while !(self.rows.is_empty() && self.rest.is_empty()) {
            self.fetch::<S, 1>(s);
        }
    }
}
