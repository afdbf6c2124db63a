//! The bytes of a block of cached rows.

use std::ops::Range;

use super::ROWS;
use super::softmax::Chunk;
use crate::float::{Element, F16, F32};
use crate::simd::{Simd, each};
use crate::view::{ElementType, View};

/// A block's rows, and those sixteen further on, which will be needed next.
#[derive(Clone, Copy)]
pub(super) struct BlockRows<'a> {
    pub(super) element: ElementType,
    /// The rows; past `count` the last one repeats.
    pub(super) rows: [&'a [u8]; ROWS],
    pub(super) count: usize,
    next: [&'a [u8]; ROWS],
}

impl<'a> BlockRows<'a> {
    /// At most sixteen rows of a view that has them.
    #[inline(always)]
    pub(super) fn find(view: &View<'a>, rows: &Range<usize>) -> Self {
        let none: &[u8] = &[];
        let last = view.len() - 1;
        Self {
            element: view.element(),
            rows: each!(none, |j| view.row((rows.start + j).min(rows.end - 1))),
            count: rows.len(),
            next: each!(none, |j| view.row((rows.start + ROWS + j).min(last))),
        }
    }

    /// Only some elements of each row.
    #[inline(always)]
    pub(super) fn columns(&self, part: &Range<usize>) -> Self {
        let none: &[u8] = &[];
        let bytes = self.element.bytes(part.start)..self.element.bytes(part.end);
        Self {
            element: self.element,
            rows: each!(none, |j| &self.rows[j][bytes.clone()]),
            count: self.count,
            next: each!(none, |j| &self.next[j][bytes.clone()]),
        }
    }

    #[inline(always)]
    pub(super) fn prefetch_next<S: Simd>(&self, s: S) {
        for row in &self.next {
            s.prefetch_bytes(row);
        }
    }

    /// Writes the rows as f32; what is behind them keeps its old values.
    #[inline(always)]
    pub(super) fn convert<S: Simd>(&self, s: S, out: &mut [[Chunk; ROWS]]) {
        match self.element {
            ElementType::F32 => self.convert_as::<S, F32>(s, out),
            ElementType::F16 => self.convert_as::<S, F16>(s, out),
        }
    }

    #[inline(always)]
    fn convert_as<S: Simd, E: Element>(&self, s: S, out: &mut [[Chunk; ROWS]]) {
        for (j, row) in self.rows[..self.count].iter().enumerate() {
            let (chunks, tail) = E::split(row);
            for (chunk, out) in chunks.iter().zip(out.iter_mut()) {
                s.store(E::load(s, chunk), &mut out[j].0);
            }
            if !tail.is_empty() {
                s.store(E::load(s, &E::pad(tail)), &mut out[chunks.len()][j].0);
            }
        }
    }
}
