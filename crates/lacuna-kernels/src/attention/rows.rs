//! Cached rows of one head: read as f32, and fetched ahead of time.

use std::marker::PhantomData;
use std::ops::Range;
use std::slice::{Chunks, ChunksExactMut};

use super::softmax::Chunk;
use crate::element::ElementType;
use crate::float::{Bf16, Element, F16, F32};
use crate::simd::{Kernel, LANES, Simd};
use crate::tile::Tile;
use crate::view::View;

/// One head of some rows of a block; a block starts at a multiple of [`super::BLOCK_ROWS`].
pub(super) struct BlockRows<'a> {
    pub(super) view: &'a View<'a>,
    pub(super) head: usize,
    /// The first row of the block ...
    pub(super) start: usize,
    /// ... and those of its rows that are needed.
    pub(super) rows: Range<usize>,
}

impl<'a> BlockRows<'a> {
    /// Sixteen rows of the block, if any of them is needed; for those that are not the nearest one
    /// that is stands. `copy` has room for sixteen heads.
    pub(super) fn tile<'b>(&self, half: usize, copy: &'b mut [u8]) -> Option<Tile<'b>>
    where
        'a: 'b,
    {
        let first = self.start + half * LANES;
        let rows = self.rows.start.max(first)..self.rows.end.min(first + LANES);
        if rows.is_empty() {
            return None;
        }
        let layout = self.view.layout();
        let bytes = layout.head_bytes();
        let (count, span) = self.view.span(&rows, &(self.head..self.head + 1));
        let (span, stride) = if count == rows.len() && span.len() < Tile::MAX_BYTES {
            (span, layout.row_stride)
        } else {
            for (row, copy) in rows.clone().zip(copy.chunks_exact_mut(bytes)) {
                copy.copy_from_slice(self.view.head(row, self.head));
            }
            (&*copy, bytes)
        };
        let place = |lane: usize| (first + lane).clamp(rows.start, rows.end - 1) - rows.start;
        let offsets = std::array::from_fn(|lane| (place(lane) * stride) as u32);
        Some(Tile::at(span, offsets, bytes))
    }
}

/// Writes rows as f32, at their place in the block, each padded with zeros to whole chunks.
pub(super) struct Convert<'a, 'b> {
    pub(super) block: &'a BlockRows<'a>,
    pub(super) out: &'a mut [Chunk],
    pub(super) ahead: &'a mut Ahead<'b>,
}

impl Kernel for Convert<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let BlockRows {
            view,
            head,
            start,
            ref rows,
        } = *self.block;
        let layout = view.layout();
        let chunks = layout.head_dim.div_ceil(LANES);
        let mut rows = rows.clone();
        while !rows.is_empty() {
            let (count, bytes) = view.span(&rows, &(head..head + 1));
            let mut part = Rows {
                bytes: bytes.chunks(layout.row_stride),
                head_bytes: layout.head_bytes(),
                out: self.out[(rows.start - start) * chunks..].chunks_exact_mut(chunks),
                ahead: self.ahead,
            };
            match layout.element {
                ElementType::F32 => part.convert::<S, Floats<F32>>(s),
                ElementType::F16 => part.convert::<S, Floats<F16>>(s),
                ElementType::Bf16 => part.convert::<S, Floats<Bf16>>(s),
                ElementType::Q8_0 => part.convert::<S, Q8_0>(s),
                ElementType::Q4_0 => part.convert::<S, Q4_0>(s),
            }
            rows.start += count;
        }
    }
}

/// Rows of one run and where they go.
struct Rows<'a, 'b> {
    /// One row each, and what is between it and the next.
    bytes: Chunks<'a, u8>,
    head_bytes: usize,
    out: ChunksExactMut<'a, Chunk>,
    ahead: &'a mut Ahead<'b>,
}

impl Rows<'_, '_> {
    #[inline(always)]
    fn convert<S: Simd, E: Decode>(&mut self, s: S) {
        for (bytes, out) in (&mut self.bytes).zip(&mut self.out) {
            self.ahead.fetch::<S, 1>(s);
            E::decode(s, &bytes[..self.head_bytes], out);
        }
    }
}

/// How one head of a row is turned to f32.
trait Decode {
    fn decode<S: Simd>(s: S, bytes: &[u8], out: &mut [Chunk]);
}

struct Floats<E>(PhantomData<E>);

impl<E: Element> Decode for Floats<E> {
    #[inline(always)]
    fn decode<S: Simd>(s: S, bytes: &[u8], out: &mut [Chunk]) {
        let (whole, tail) = E::split(bytes);
        for (chunk, out) in whole.iter().zip(out.iter_mut()) {
            s.store(E::load(s, chunk), &mut out.0);
        }
        if !tail.is_empty() {
            s.store(E::load(s, &E::pad(tail)), &mut out[whole.len()].0);
        }
    }
}

struct Q8_0;

impl Decode for Q8_0 {
    #[inline(always)]
    fn decode<S: Simd>(s: S, bytes: &[u8], out: &mut [Chunk]) {
        let blocks = bytes.as_chunks::<34>().0.iter();
        for (block, out) in blocks.zip(out.as_chunks_mut::<2>().0) {
            let scale = s.splat_f16([block[0], block[1]]);
            let q = block[2..].as_chunks::<LANES>().0;
            for (q, out) in q.iter().zip(out) {
                s.store(s.mul(scale, s.load_i8(q)), &mut out.0);
            }
        }
    }
}

struct Q4_0;

impl Decode for Q4_0 {
    #[inline(always)]
    fn decode<S: Simd>(s: S, bytes: &[u8], out: &mut [Chunk]) {
        let blocks = bytes.as_chunks::<18>().0.iter();
        for (block, out) in blocks.zip(out.as_chunks_mut::<2>().0) {
            let scale = s.splat_f16([block[0], block[1]]);
            let q = &block[2..].as_chunks::<LANES>().0[0];
            let [low, high] = s.load_nibbles(q);
            s.store(s.mul(scale, low), &mut out[0].0);
            s.store(s.mul(scale, high), &mut out[1].0);
        }
    }
}

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

    /// Prefetches all.
    pub(super) fn fetch_all<S: Simd>(&mut self, s: S) {
        while !(self.rows.is_empty() && self.rest.is_empty()) {
            self.fetch_next(s);
        }
    }
}
