//! Cached rows of one head: some pairs of chunks as f32, the heads themselves, and a tile of them.

use std::ops::Range;
use std::slice::Chunks;

use half::f16;

use super::PARTITION;
use super::ahead::Ahead;
use super::arithmetic::Arithmetic;
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

/// One head of some rows of a partition.
pub(super) type Head<'a> = BlockRows<'a>;

impl<'a> BlockRows<'a> {
    /// The bytes of each row of a partition; none of those that are not needed.
    fn partition(&self) -> [&'a [u8]; PARTITION] {
        let bytes = self.view.layout().head_bytes();
        let mut all = [[].as_slice(); PARTITION];
        let mut rows = self.rows.clone();
        while !rows.is_empty() {
            let (count, heads) = self.run(&rows);
            for (head, out) in heads.zip(&mut all[rows.start - self.start..]).take(count) {
                *out = &head[..bytes];
            }
            rows.start += count;
        }
        all
    }
}

/// Copies keys as they are multiplied, with zeros behind the last element.
pub(super) struct CopyKeys<'a, 'b, A> {
    pub(super) arithmetic: A,
    pub(super) keys: Head<'a>,
    /// Vectors of a head.
    pub(super) steps: usize,
    /// `[PARTITION, steps]`.
    pub(super) out: &'a mut [[f32; LANES]],
    pub(super) ahead: &'a mut Ahead<'b>,
}

impl<A: Arithmetic> Kernel for CopyKeys<'_, '_, A> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        with_element!(self.keys.view.layout().element, |E| self.copy::<S, E>(s));
    }
}

impl<A: Arithmetic> CopyKeys<'_, '_, A> {
    #[inline(always)]
    fn copy<S: Simd, E: Pair>(self, s: S) {
        let rows = self.out.chunks_exact_mut(self.steps);
        for (head, out) in self.keys.partition().into_iter().zip(rows) {
            if head.is_empty() {
                continue;
            }
            for (pair, out) in out.chunks_mut(A::VECTORS).enumerate() {
                self.ahead.fetch::<S, 2>(s);
                let elements = E::load(s, &stored::<E>(head, pair));
                let elements = self.arithmetic.neighbours(s, elements);
                for (elements, out) in elements.into_iter().zip(out) {
                    s.store(elements, out);
                }
            }
        }
    }
}

/// Copies values as they are multiplied, as many rows as are multiplied at once in one place, with zeros behind the last
/// element and for a row of such a place that is not needed. Values that have units are left in them.
pub(super) struct CopyValues<'a, A> {
    pub(super) arithmetic: A,
    pub(super) values: Head<'a>,
    pub(super) chunks: usize,
    /// `[PARTITION / rows at once, chunks]`.
    pub(super) out: &'a mut [[f32; LANES]],
    /// What units are worth, `[pairs, PARTITION]`.
    pub(super) units: &'a mut [[f32; PARTITION]],
}

impl<A: Arithmetic> Kernel for CopyValues<'_, A> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        with_element!(self.values.view.layout().element, |E| self.copy::<S, E>(s));
    }
}

impl<A: Arithmetic> CopyValues<'_, A> {
    #[inline(always)]
    fn copy<S: Simd, E: Pair>(self, s: S) {
        let heads = self.values.partition();
        let places = heads
            .chunks(A::AT_ONCE)
            .zip(self.out.chunks_exact_mut(self.chunks));
        for (place, (heads, out)) in places.enumerate() {
            if heads.iter().all(|head| head.is_empty()) {
                continue;
            }
            for (pair, out) in out.chunks_mut(2).enumerate() {
                let mut rows = [[s.splat(0.0); 2]; 2];
                for (at, head) in heads.iter().enumerate() {
                    let mut unit = 0.0;
                    if !head.is_empty() {
                        let stored = stored::<E>(head, pair);
                        rows[at] = E::in_units(s, &stored);
                        if E::UNIT.is_some() {
                            unit = f16::from_bits(E::unit(&stored)).to_f32();
                        }
                    }
                    if E::UNIT.is_some() {
                        self.units[pair][place * A::AT_ONCE + at] = unit;
                    }
                }
                for (chunk, out) in out.iter_mut().enumerate() {
                    let rows = [rows[0][chunk], rows[1][chunk]];
                    s.store(self.arithmetic.rows(s, rows), out);
                }
            }
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
