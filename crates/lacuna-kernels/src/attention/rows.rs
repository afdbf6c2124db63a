//! Cached rows of one head: some pairs of chunks as f32, the heads themselves, and a tile of them.

use std::ops::Range;
use std::slice::Chunks;

use half::f16;

use super::PARTITION;
use super::ahead::Ahead;
use super::elements::{Pair, with_element};
use super::softmax::Chunk;
use crate::simd::{Kernel, LANES, Simd};
use crate::tile::Tile;
use crate::view::View;

/// One head of some rows of a block; a block starts at a fixed position.
pub(super) struct BlockRows<'a> {
    pub(super) view: &'a View<'a>,
    pub(super) head: usize,
    /// The first row of the block ...
    pub(super) start: usize,
    /// ... and those of its rows that are needed.
    pub(super) rows: Range<usize>,
}

impl<'a> BlockRows<'a> {
    /// The first ones of some of the rows: how many are in one run, and the bytes of each, which go on
    /// behind those of the head.
    #[inline(always)]
    fn run(&self, rows: &Range<usize>) -> (usize, Chunks<'a, u8>) {
        let (count, bytes) = self.view.span(rows, &(self.head..self.head + 1));
        (count, bytes.chunks(self.view.layout().row_stride))
    }

    /// The rows that are needed of sixteen.
    fn needed(&self, half: usize) -> Range<usize> {
        let first = self.start + half * LANES;
        self.rows.start.max(first)..self.rows.end.min(first + LANES)
    }

    /// Sixteen rows of the block, if any of them is needed; for those that are not the nearest one
    /// that is stands.
    #[inline(always)]
    pub(super) fn heads(&self, half: usize) -> Option<[&'a [u8]; LANES]> {
        let needed = self.needed(half);
        if needed.is_empty() {
            return None;
        }
        let (first, bytes) = (self.start + half * LANES, self.view.layout().head_bytes());
        let mut heads = [&[][..]; LANES];
        let mut rows = needed.clone();
        while !rows.is_empty() {
            let (count, run) = self.run(&rows);
            for (head, out) in run.zip(&mut heads[rows.start - first..]).take(count) {
                *out = &head[..bytes];
            }
            rows.start += count;
        }
        let place = needed.start - first..needed.end - first;
        for lane in 0..LANES {
            heads[lane] = heads[lane.clamp(place.start, place.end - 1)];
        }
        Some(heads)
    }

    /// The same as a tile. `copy` has room for sixteen heads.
    pub(super) fn tile<'b>(&self, half: usize, copy: &'b mut [u8]) -> Option<Tile<'b>>
    where
        'a: 'b,
    {
        let rows = self.needed(half);
        if rows.is_empty() {
            return None;
        }
        let layout = self.view.layout();
        let bytes = layout.head_bytes();
        let (count, span) = self.view.span(&rows, &(self.head..self.head + 1));
        if count == LANES {
            return Some(Tile::strided(span, layout.row_stride, bytes));
        }
        for (copy, head) in copy.chunks_exact_mut(bytes).zip(self.heads(half)?) {
            copy.copy_from_slice(head);
        }
        Some(Tile::strided(copy, bytes, bytes))
    }
}

/// Writes one pair of chunks of each row as f32, in units, zeros behind the last element.
pub(super) struct Convert<'a, 'b> {
    pub(super) block: &'a BlockRows<'a>,
    /// Which pair.
    pub(super) pair: usize,
    /// Those of the rows of the block.
    pub(super) out: &'a mut [[Chunk; 2]],
    /// What their units are worth.
    pub(super) units: &'a mut [u16],
    pub(super) ahead: &'a mut Ahead<'b>,
}

impl Kernel for Convert<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        with_element!(self.block.view.layout().element, |E| self
            .convert::<S, E>(s));
    }
}

impl Convert<'_, '_> {
    #[inline(always)]
    fn convert<S: Simd, E: Pair>(self, s: S) {
        let bytes = self.block.view.layout().head_bytes();
        let mut rows = self.block.rows.clone();
        while !rows.is_empty() {
            let (count, heads) = self.block.run(&rows);
            let first = rows.start - self.block.start;
            let out = self.out[first..first + count].iter_mut();
            let out = out.zip(&mut self.units[first..first + count]);
            for (head, (out, unit)) in heads.zip(out) {
                self.ahead.fetch::<S, 1>(s);
                let stored = stored::<E>(&head[..bytes], self.pair);
                *unit = E::unit(&stored);
                let [first, second] = E::in_units(s, &stored);
                s.store(first, &mut out[0].0);
                s.store(second, &mut out[1].0);
            }
            rows.start += count;
        }
    }
}

/// Copies rows as f32, in whole chunks with zeros behind the last element.
pub(super) struct Copy<'a, 'b> {
    pub(super) block: &'a BlockRows<'a>,
    pub(super) chunks: usize,
    /// `[rows of the block, chunks]`.
    pub(super) out: &'a mut [[f32; LANES]],
    /// What the units of pairs are worth, `[pairs, rows of the block]`, if elements are left in theirs.
    pub(super) units: Option<&'a mut [[f32; PARTITION]]>,
    pub(super) ahead: &'a mut Ahead<'b>,
}

impl Kernel for Copy<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        with_element!(self.block.view.layout().element, |E| self.copy::<S, E>(s));
    }
}

impl Copy<'_, '_> {
    #[inline(always)]
    fn copy<S: Simd, E: Pair>(mut self, s: S) {
        let bytes = self.block.view.layout().head_bytes();
        let mut rows = self.block.rows.clone();
        while !rows.is_empty() {
            let (count, heads) = self.block.run(&rows);
            let first = rows.start - self.block.start;
            let out = self.out[first * self.chunks..].chunks_exact_mut(self.chunks);
            for (row, (head, out)) in heads.zip(out).take(count).enumerate() {
                for (pair, out) in out.chunks_mut(2).enumerate() {
                    self.ahead.fetch::<S, 2>(s);
                    let stored = stored::<E>(&head[..bytes], pair);
                    let elements = match &mut self.units {
                        Some(units) => {
                            units[pair][first + row] = f16::from_bits(E::unit(&stored)).to_f32();
                            E::in_units(s, &stored)
                        }
                        None => E::load(s, &stored),
                    };
                    for (elements, out) in elements.into_iter().zip(out) {
                        s.store(elements, out);
                    }
                }
            }
            rows.start += count;
        }
    }
}

/// A pair of a head, which may be its end.
#[inline(always)]
pub(super) fn stored<E: Pair>(head: &[u8], pair: usize) -> E::Stored {
    let (pairs, tail) = E::split(head);
    match pairs.get(pair) {
        Some(pair) => *pair,
        None => E::pad(tail),
    }
}
