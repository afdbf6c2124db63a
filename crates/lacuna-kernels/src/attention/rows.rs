//! Cached rows of one head, and copies of them.

use std::ops::Range;

use half::f16;

use super::PARTITION;
use super::ahead::Ahead;
use super::arithmetic::Arithmetic;
use super::elements::{Pair, table, with_element};
use crate::activations::BLOCK;
use crate::element::ElementType;
use crate::simd::{Kernel, LANES, Simd, each};
use crate::tile::Tile;
use crate::view::View;

/// One head of some rows.
pub(super) struct Head<'a> {
    pub(super) view: &'a View<'a>,
    pub(super) head: usize,
    /// The first row of a partition, or of sixteen ...
    pub(super) start: usize,
    /// ... and the rows that are needed.
    pub(super) rows: Range<usize>,
}

impl<'a> Head<'a> {
    /// The rows that are needed of `N`.
    fn needed<const N: usize>(&self) -> Range<usize> {
        self.rows.start.max(self.start)..self.rows.end.min(self.start + N)
    }

    /// The bytes of each of `N` rows; none of those that are not needed.
    #[inline(always)]
    pub(super) fn bytes<const N: usize>(&self) -> [&'a [u8]; N] {
        let layout = self.view.layout();
        let mut all = [[].as_slice(); N];
        let mut rows = self.needed::<N>();
        while !rows.is_empty() {
            // Rows go on behind the bytes of the head.
            let (count, bytes) = self.view.span(&rows, &(self.head..self.head + 1));
            let heads = bytes.chunks(layout.row_stride);
            for (head, out) in heads.zip(&mut all[rows.start - self.start..]).take(count) {
                *out = &head[..layout.head_bytes()];
            }
            rows.start += count;
        }
        all
    }

    /// Sixteen rows, if any of them is needed; for those that are not the nearest one that is stands. `copy` has room
    /// for them.
    pub(super) fn tile<'b>(&self, copy: &'b mut [u8]) -> Option<Tile<'b>>
    where
        'a: 'b,
    {
        let rows = self.needed::<LANES>();
        if rows.is_empty() {
            return None;
        }
        let layout = self.view.layout();
        let bytes = layout.head_bytes();
        let (count, span) = self.view.span(&rows, &(self.head..self.head + 1));
        if count == LANES {
            return Some(Tile::strided(span, layout.row_stride, bytes));
        }
        let (heads, last) = (self.bytes::<LANES>(), rows.len() - 1);
        for (lane, copy) in copy.chunks_exact_mut(bytes).take(LANES).enumerate() {
            let nearest = (self.start + lane).saturating_sub(rows.start).min(last);
            copy.copy_from_slice(heads[rows.start - self.start + nearest]);
        }
        Some(Tile::strided(copy, bytes, bytes))
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
        for (head, out) in self.keys.bytes::<PARTITION>().into_iter().zip(rows) {
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

/// Copies keys that are integers as words that [`Simd::dot4`] takes for weights.
pub(super) struct CopyIntegerKeys<'a, 'b> {
    pub(super) keys: Head<'a>,
    /// Vectors of a head, each of the words of two blocks.
    pub(super) steps: usize,
    /// Their bits, `[PARTITION, steps]`.
    pub(super) out: &'a mut [[f32; LANES]],
    /// What units are worth, `[blocks, PARTITION]`.
    pub(super) units: &'a mut [[f32; PARTITION]],
    pub(super) ahead: &'a mut Ahead<'b>,
}

impl Kernel for CopyIntegerKeys<'_, '_> {
    type Output = ();

    const MULTIPLIES_BYTES: bool = true;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match table(self.keys.view.layout().element) {
            None => self.copy::<S, { ElementType::Q8_0.block_bytes() }>(s, None),
            table => self.copy::<S, { ElementType::Q4_0.block_bytes() }>(s, table),
        }
    }
}

impl CopyIntegerKeys<'_, '_> {
    /// Of blocks of `BYTES` bytes: see [`integers`].
    #[inline(always)]
    fn copy<S: Simd, const BYTES: usize>(self, s: S, table: Option<&[i8; 16]>) {
        let rows = self.out.chunks_exact_mut(self.steps);
        for (row, (head, out)) in self
            .keys
            .bytes::<PARTITION>()
            .into_iter()
            .zip(rows)
            .enumerate()
        {
            let blocks = head.as_chunks::<BYTES>().0;
            for (step, (blocks, out)) in blocks.chunks(2).zip(out).enumerate() {
                self.ahead.fetch::<S, 2>(s);
                // Of an odd number of blocks the last one twice.
                let two = [&blocks[0], &blocks[blocks.len() - 1]];
                let two: [_; 2] = each!([0; BLOCK], |i| integers(s, table, two[i]));
                let words = s.weights(s.u_halves([&two[0], &two[1]]), 0);
                s.store(s.bits_to_f32(words), out);
                for (block, units) in blocks.iter().zip(&mut self.units[2 * step..]) {
                    units[row] = f16::from_le_bytes([block[0], block[1]]).to_f32();
                }
            }
        }
    }
}

/// The integers of a block, which its unit, two bytes, comes before: bytes, or what nibbles name in a table.
#[inline(always)]
fn integers<S: Simd, const BYTES: usize>(
    s: S,
    table: Option<&[i8; 16]>,
    block: &[u8; BYTES],
) -> [u8; BLOCK] {
    match table {
        None => block[2..].as_chunks().0[0],
        Some(table) => s.named(table, &block[2..].as_chunks().0[0]),
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
        let heads = self.values.bytes::<PARTITION>();
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
