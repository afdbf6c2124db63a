//! Rows of keys and values as they are recorded: new ones that are made ready and stored, and what kernels are shown of a
//! sequence's.

use std::ops::Range;

use lacuna_kv::{DeviceRows, Layer, Side};
use lacuna_models::Segment;
use lacuna_models::program::Slot;
use lacuna_pages::DeviceError;
use lacuna_pages::device::{Access, Address};
use lacuna_pages::vulkan::Bound;

use crate::arranged::BLOCK;
use crate::capability::element_code;
use crate::elementwise::pairs_of;
use crate::fused::Heads;
use crate::kernels::{
    HADAMARD_ELEMENTS, Hadamard, Heads as HeadsConstants, NONE, Store, StoreBlocks, THREADS,
};
use crate::pass::{Pass, grid, number, whole};

impl<'a> Pass<'a> {
    /// New queries, keys and values are made ready, and the latter go to the buffers of their sequences.
    pub(crate) fn heads(
        &mut self,
        heads: &Heads,
        segments: &[Segment<'_>],
    ) -> Result<(), DeviceError> {
        let mut start = 0;
        for (index, segment) in segments.iter().enumerate() {
            let layer = Layer(heads.layer);
            let [keys, values] = self.new_rows(layer, Side::BOTH, segment);
            let windows = [
                self.activations(),
                whole(self.weights.vectors()),
                keys.shown.bound,
                values.shown.bound,
            ];
            let constants = self.heads_constants(heads, [index, start], [&keys, &values]);
            let shape = &heads.shape;
            let tokens = segment.tokens.len();
            let grid = [
                number(shape.query_heads + 2 * shape.kv_heads),
                number(tokens),
                1,
            ];
            let kernels = self.kernels;
            self.dispatch(&kernels.heads, windows, &constants, grid)?;
            start += tokens;
        }
        Ok(())
    }

    /// Of the `segment`-th segment, which begins with the token `start`.
    fn heads_constants(
        &self,
        heads: &Heads,
        [segment, start]: [usize; 2],
        [keys, values]: [&NewRows<'_>; 2],
    ) -> HeadsConstants {
        let shape = &heads.shape;
        let row = |slot, heads: usize| self.word(slot) + number(start * heads * shape.head_dim);
        let turn = heads.turn;
        let (pairs, apart, step) =
            turn.map_or((0, 0, 0), |turn| pairs_of(turn.dimensions, turn.style));
        let weights = heads
            .norms
            .map(|norms| norms.map(|(_, weight)| self.vector(weight)));
        let [query_weight, key_weight] = weights.unwrap_or([NONE; 2]);
        HeadsConstants {
            queries: row(heads.queries, shape.query_heads),
            keys: row(heads.keys, shape.kv_heads),
            values: row(heads.values, shape.kv_heads),
            table: turn.map_or(0, |turn| self.word(turn.table) + number(start * 2 * pairs)),
            query_heads: number(shape.query_heads),
            kv_heads: number(shape.kv_heads),
            head_dim: number(shape.head_dim),
            norms: u32::from(heads.norms.is_some()),
            query_weight,
            key_weight,
            epsilon: heads.norms.map_or(0.0, |[(norm, _), _]| norm.epsilon),
            pairs: number(pairs),
            apart: number(apart),
            step: number(step),
            position: self.position(segment),
            first_row: keys.first_row,
            key_to: keys.shown.skip / 4,
            key_stride: keys.stride,
            value_to: values.shown.skip / 4,
            value_stride: values.stride,
            elements: keys.element + 4 * values.element,
        }
    }

    /// The word that has the position of the first token of a segment.
    pub(crate) fn position(&self, segment: usize) -> u32 {
        self.room.positions + number(segment)
    }

    /// Where a segment's new rows of some sides of a layer go.
    fn new_rows<const N: usize>(
        &self,
        layer: Layer,
        sides: [Side; N],
        segment: &Segment<'_>,
    ) -> [NewRows<'a>; N] {
        let sides = sides.map(|side| device_rows(segment, layer, side));
        let first = segment.sequence.len();
        let rows = first..first + segment.tokens.len();
        let (shown, first_row) = self.rows_of(segment, sides, &rows, Access::ReadWrite);
        std::array::from_fn(|side| {
            let layout = sides[side].layout;
            NewRows {
                shown: shown[side],
                first_row: number(first_row),
                stride: number(layout.row_stride / 4),
                element: element_code(layout.element).unwrap_or(NONE),
            }
        })
    }

    /// Rows of some sides of a layer as a kernel is shown them, and the first row that it is shown: with others that the sequence
    /// may have, so that the next step is shown the same.
    pub(crate) fn rows_of<const N: usize>(
        &self,
        segment: &Segment<'_>,
        sides: [DeviceRows; N],
        rows: &Range<usize>,
        access: Access,
    ) -> ([Shown<'a>; N], usize) {
        let row_bytes = |side: &DeviceRows| (side.layout.heads * side.layout.head_stride) as u64;
        let stride = |side: &DeviceRows| side.layout.row_stride as u64;
        let most = sides.iter().map(|side| {
            let others = self.window.saturating_sub(self.alignment + row_bytes(side));
            others / stride(side).max(1) + 1
        });
        let most = most.min().map_or(usize::MAX, |most| most as usize);
        let seen = shown_rows(rows, segment.sequence.capacity(), most);
        let shown = sides.map(|side| {
            let bytes = |rows: usize| (rows as u64 - 1) * stride(&side) + row_bytes(&side);
            let offset = side.address.offset + seen.start as u64 * stride(&side);
            let bound = Bound::Reserved {
                address: Address {
                    offset,
                    ..side.address
                },
                length: bytes(seen.len()),
                untouched: (rows.start - seen.start) as u64 * stride(&side),
                touched: bytes(rows.len()),
                access,
            };
            let skip = (offset % self.shown_alignment) as u32;
            Shown { bound, skip }
        });
        (shown, seen.start)
    }

    /// New rows of one side of a layer go to the buffers of their sequences.
    pub(crate) fn store(
        &mut self,
        (layer, side): (Layer, Side),
        slot: Slot,
        width: usize,
        segments: &[Segment<'_>],
    ) -> Result<(), DeviceError> {
        let mut start = 0;
        for (index, segment) in segments.iter().enumerate() {
            let tokens = segment.tokens.len();
            let [rows] = self.new_rows(layer, [side], segment);
            let element = device_rows(segment, layer, side).layout.element;
            let windows = [
                self.activations(),
                rows.shown.bound,
                Bound::Unused,
                Bound::Unused,
            ];
            let kernels = self.kernels;
            if element.block_len() > 1 {
                let count = number(tokens * width / (2 * BLOCK));
                let constants = StoreBlocks {
                    source: self.word(slot) + number(start * width),
                    position: self.position(index),
                    first_row: rows.first_row,
                    to: rows.shown.skip / 4,
                    stride: rows.stride,
                    width: number(width),
                    count,
                };
                self.dispatch(&kernels.blocks().store, windows, &constants, grid(count))?;
                start += tokens;
                continue;
            }
            let words = element.bytes(width) / 4;
            let count = number(words * tokens);
            let constants = Store {
                source: self.word(slot) + number(start * width),
                position: self.position(index),
                first_row: rows.first_row,
                to: rows.shown.skip / 4,
                stride: rows.stride,
                width: number(width),
                words: number(words),
                element: rows.element,
                count,
            };
            self.dispatch(&kernels.store, windows, &constants, grid(count))?;
            start += tokens;
        }
        Ok(())
    }

    /// Transforms what goes with the rows of one side of a layer as these are, rows to be stored or queries of them, or
    /// back again what has been made of them: so many elements of each token. Ends with a barrier, if it does anything.
    pub(crate) fn transform(
        &mut self,
        (layer, side): (Layer, Side),
        (values, width): (Slot, usize),
        segments: &[Segment<'_>],
    ) -> Result<(), DeviceError> {
        // Sequences of one cache have one geometry.
        let rotation = segments
            .first()
            .and_then(|segment| segment.sequence.geometry().rotation(layer, side));
        let Some(block) = rotation else {
            return Ok(());
        };
        let count = number(self.size.tokens * width);
        let constants = Hadamard {
            values: self.word(values),
            block: number(block.get()),
            count,
        };
        // A workgroup has four elements for each thread.
        let grid = grid(count.div_ceil(HADAMARD_ELEMENTS / THREADS));
        let (kernels, windows) = (self.kernels, self.only_activations());
        self.dispatch(&kernels.blocks().hadamard, windows, &constants, grid)?;
        self.recording.barrier()?;
        Ok(())
    }

    /// Bytes of a reservation from `start` bytes behind `address` on, as a kernel is shown them.
    pub(crate) fn mapped(
        &self,
        address: Address,
        start: u64,
        bytes: u64,
        access: Access,
    ) -> Shown<'a> {
        let offset = address.offset + start;
        let skip = offset % self.shown_alignment;
        Shown {
            bound: Bound::Mapped {
                address: Address { offset, ..address },
                length: bytes,
                access,
            },
            skip: skip as u32,
        }
    }
}

/// Which rows a kernel is shown that touches `rows` of `capacity`, where it can be shown `most`: all of them, or from a
/// multiple of half as many on, or as many as it can be from the first of more. So they stay the same for as long as may be.
fn shown_rows(rows: &Range<usize>, capacity: usize, most: usize) -> Range<usize> {
    let half = (most / 2).max(1);
    let start = match rows.len() <= half {
        _ if capacity <= most => 0,
        true => rows.start / half * half,
        false => rows.start,
    };
    let end = capacity.min(start.saturating_add(most));
    start..end.max(rows.end)
}

/// A part of a reservation, and the bytes before it that kernels are shown too.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shown<'a> {
    pub(crate) bound: Bound<'a>,
    pub(crate) skip: u32,
}

/// Where new rows of a side go, as a kernel is shown it.
struct NewRows<'a> {
    shown: Shown<'a>,
    /// The first row that is shown.
    first_row: u32,
    /// Words from one row to the next.
    stride: u32,
    element: u32,
}

/// Where a sequence's rows of one side of a layer are.
pub(crate) fn device_rows(segment: &Segment<'_>, layer: Layer, side: Side) -> DeviceRows {
    let rows = segment.sequence.device_rows(layer, side);
    rows.expect("sequences of the device's own cache lie at equal distances")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shown_has_what_is_touched_and_changes_seldom() {
        for (capacity, most) in [(100, 100), (100, 101), (1000, 100), (1000, 7), (1000, 2)] {
            for len in 1..=most.min(capacity) {
                let mut changes = 0;
                let mut last = None;
                for start in 0..=capacity - len {
                    let rows = start..start + len;
                    let shown = shown_rows(&rows, capacity, most);
                    assert!(shown.start <= rows.start && rows.end <= shown.end);
                    assert!(shown.end <= capacity && shown.len() <= most);
                    changes += usize::from(last.replace(shown.clone()) != Some(shown));
                }
                if len <= (most / 2).max(1) {
                    assert!(changes <= capacity.div_ceil((most / 2).max(1)), "{changes}");
                }
            }
            // All up to a row that goes on, as attention sees them.
            let grown = |end| shown_rows(&(0..end), capacity, most);
            assert!((1..most.min(capacity)).all(|end| grown(end) == grown(1)));
        }
        // One row where there is no room for one: the device says so.
        assert_eq!(shown_rows(&(5..9), 100, 1), 5..9);
    }
}
