//! The bytes of a block of cached rows.

use std::ops::Range;

use super::ROWS;
use super::softmax::Chunk;
use crate::float::{Element, F16, F32};
use crate::simd::{Simd, each};
use crate::view::{ElementType, View};

/// A block's rows, and those sixteen further on, which will be needed next.
pub(super) struct BlockRows<'a> {
    pub(super) element: ElementType,
    /// The rows; past `count` the last one repeats.
    rows: [&'a [u8]; ROWS],
    pub(super) count: usize,
    next: [&'a [u8]; ROWS],
}

impl<'a> BlockRows<'a> {
    /// At most sixteen rows of a view that has them.
    #[inline(always)]
    pub(super) fn find(view: &View<'a>, rows: &Range<usize>) -> Self {
        let next = (rows.start + ROWS).min(view.len() - 1);
        Self {
            element: view.element(),
            rows: view.rows(rows.start, rows.end - 1),
            count: rows.len(),
            next: view.rows(next, view.len() - 1),
        }
    }

    /// The bytes of the elements `part` of a row.
    #[inline(always)]
    fn bytes(&self, part: &Range<usize>) -> Range<usize> {
        self.element.bytes(part.start)..self.element.bytes(part.end)
    }

    /// The elements `part` of some of the next rows, to be prefetched.
    #[inline(always)]
    pub(super) fn ahead(&self, rows: Range<usize>, part: &Range<usize>) -> Ahead<'_> {
        Ahead {
            rows: &self.next[rows],
            part: self.bytes(part),
            rest: &[],
        }
    }

    /// The elements `part` of each row, whole chunks of `E`.
    #[inline(always)]
    pub(super) fn chunks<E: Element>(&self, part: &Range<usize>) -> [&'a [E::Chunk]; ROWS] {
        let part = self.bytes(part);
        each!([].as_slice(), |j| E::split(&self.rows[j][part.clone()]).0)
    }

    /// Writes the elements `part` of the rows as f32, `chunks` per row; what is behind the rows
    /// keeps its old values.
    #[inline(always)]
    pub(super) fn convert<S: Simd>(
        &self,
        s: S,
        part: &Range<usize>,
        chunks: usize,
        out: &mut [Chunk],
    ) {
        match self.element {
            ElementType::F32 => self.convert_as::<S, F32>(s, part, chunks, out),
            ElementType::F16 => self.convert_as::<S, F16>(s, part, chunks, out),
        }
    }

    #[inline(always)]
    fn convert_as<S: Simd, E: Element>(
        &self,
        s: S,
        part: &Range<usize>,
        chunks: usize,
        out: &mut [Chunk],
    ) {
        let part = self.bytes(part);
        for (row, out) in self.rows[..self.count]
            .iter()
            .zip(out.chunks_exact_mut(chunks))
        {
            let (whole, tail) = E::split(&row[part.clone()]);
            for (chunk, out) in whole.iter().zip(out.iter_mut()) {
                s.store(E::load(s, chunk), &mut out.0);
            }
            if !tail.is_empty() {
                s.store(E::load(s, &E::pad(tail)), &mut out[whole.len()].0);
            }
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
    part: Range<usize>,
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
                (self.rows, self.rest) = (rows, &row[self.part.clone()]);
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
