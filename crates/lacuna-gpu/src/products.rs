//! Products with matrices as they are recorded: rows that are quantized, and what workgroups have of a matrix.

use lacuna_models::program::{MatrixId, Op, Rows, Slot};
use lacuna_models::spec::{Activation, Gating};
use lacuna_pages::DeviceError;
use lacuna_pages::vulkan::Bound;

use crate::arranged::{self, BLOCK};
use crate::elementwise::gating_code;
use crate::experts::Sorted;
use crate::kernels::{FEW_TOKENS, NONE, PRODUCT_ROWS, PRODUCT_TOKENS, Product, Quantize, TILE};
use crate::pass::{Pass, grid, number};
use crate::weights::{Placed, Together};

impl<'a> Pass<'a> {
    /// So many rows of so many elements as actions quantize them.
    pub(crate) fn quantized(&self, (rows, columns): (usize, usize)) -> Quantized {
        Quantized::new(self.room.blocks, rows, columns)
    }

    /// The same in a slot of the program's own.
    pub(crate) fn quantized_at(&self, blocks: Slot, (rows, columns): (usize, usize)) -> Quantized {
        Quantized::new(self.word(blocks), rows, columns)
    }

    /// Quantizes the rows of a slot, or what a gate of those lets through of another slot's.
    pub(crate) fn quantize(
        &mut self,
        (source, gate): (Slot, Option<(Slot, Gating)>),
        quantized: &Quantized,
    ) -> Result<(), DeviceError> {
        let fours = 8 * quantized.blocks;
        let (function, [alpha, limit]) = gate.map_or((NONE, [0.0; 2]), |gate| gating_code(gate.1));
        let constants = Quantize {
            source: self.word(source),
            up: gate.map_or(NONE, |(up, _)| self.word(up)),
            function,
            bytes: quantized.bytes,
            scales: quantized.scales,
            sums: quantized.sums,
            fours,
            alpha,
            limit,
        };
        let (kernels, windows) = (self.kernels, self.only_activations());
        self.dispatch(&kernels.quantize, windows, &constants, grid(fours))
    }

    /// Products of several matrices with the same rows, which are quantized once if any of them is.
    pub(crate) fn products(
        &mut self,
        [input, blocks]: [Slot; 2],
        (rows, columns): (Rows, usize),
        outputs: (&[(MatrixId, Slot)], Option<Activation>),
    ) -> Result<(), DeviceError> {
        let rows = self.rows(rows);
        let quantized = self.quantized_at(blocks, (rows, columns));
        let is_quantized =
            |(id, _): &(MatrixId, Slot)| self.placed(Together::One(*id)).dtype.is_quantized();
        if outputs.0.iter().any(is_quantized) {
            self.quantize((input, None), &quantized)?;
            self.recording.barrier()?;
        }
        self.products_with((input, &quantized), rows, outputs)
    }

    /// Products of rows that the action before has quantized.
    pub(crate) fn products_of_quantized(&mut self, op: &Op) -> Result<(), DeviceError> {
        if let Op::ExpertProduct { .. } = op {
            return self.expert_products_of_quantized(op);
        }
        let Op::Product {
            input,
            rows,
            columns,
            ref outputs,
            function,
            ..
        } = *op
        else {
            unreachable!("rows are quantized for products")
        };
        let rows = self.rows(rows);
        let quantized = self.quantized((rows, columns));
        self.products_with((input, &quantized), rows, (outputs, function))
    }

    /// Products of several matrices with the same rows.
    fn products_with(
        &mut self,
        (input, quantized): (Slot, &Quantized),
        rows: usize,
        (outputs, function): (&[(MatrixId, Slot)], Option<Activation>),
    ) -> Result<(), DeviceError> {
        if rows == 0 {
            return Ok(());
        }
        for &(id, output) in outputs {
            let input = (self.word(input), quantized);
            self.product(Together::One(id), input, Shares::All(rows), output)?;
        }
        if let Some(function) = function {
            self.recording.barrier()?;
            for &(id, output) in outputs {
                let count = rows * self.placed(Together::One(id)).rows;
                self.apply(function, output, count)?;
            }
        }
        Ok(())
    }

    /// One product, in windows of rows where the matrix is longer than what a kernel is shown, or of experts where all of
    /// theirs are.
    pub(crate) fn product(
        &mut self,
        id: Together,
        (input, quantized): (u32, &Quantized),
        shares: Shares<'_>,
        output: Slot,
    ) -> Result<(), DeviceError> {
        let weights = self.weights;
        let (placed, piece) = weights.matrices(id);
        let kernels = match shares {
            Shares::All(_) => self.kernels.products(placed.dtype),
            Shares::Sorted(_) => self.kernels.experts().products(placed.dtype),
        };
        let (kernel, side) = match shares.are_many() {
            true => (&kernels.many, [TILE, TILE]),
            false => (&kernels.few, [PRODUCT_ROWS, PRODUCT_TOKENS]),
        };
        let sorted = shares.sorted();
        for part in parts(placed, self.window, self.alignment) {
            let constants = Product {
                input: match placed.dtype.is_quantized() {
                    true => quantized.bytes,
                    false => input,
                },
                scales: quantized.scales,
                sums: quantized.sums,
                output: self.word(output),
                stride: number(placed.rows),
                first_row: number(part.first_row),
                count: number(part.rows),
                row_size: number(placed.row_bytes / 16),
                skip: part.skip / 16,
                columns: number(placed.columns),
                units: number(placed.columns.div_ceil(arranged::unit(placed.dtype))),
                tokens: number(shares.rows()),
                has_bias: placed.has_bias.into(),
                tiles: sorted.map_or(NONE, |sorted| sorted.tiles),
                order: sorted.map_or(NONE, |sorted| sorted.order),
                used: sorted.map_or(1, |sorted| number(sorted.used)),
                first_expert: number(part.first_expert),
                experts: number(part.experts),
                expert_size: number(placed.rows * (placed.row_bytes / 16)),
            };
            let matrix = Bound::Memory {
                memory: piece,
                offset: part.offset,
                length: part.length,
            };
            let windows = [self.activations(), matrix, matrix, self.activations()];
            let down = match sorted {
                Some(sorted) => number(sorted.most),
                None => number(shares.rows()).div_ceil(side[1]),
            };
            let grid = [number(part.rows).div_ceil(side[0]), down, 1];
            self.dispatch(kernel, windows, &constants, grid)?;
        }
        Ok(())
    }

    /// Where a matrix lies, or those of experts.
    pub(crate) fn placed(&self, id: Together) -> &'a Placed {
        self.weights.matrices(id).0
    }
}

/// Where rows prepared for quantized products lie: bytes, then scales, then sums.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Quantized {
    pub(crate) bytes: u32,
    pub(crate) scales: u32,
    pub(crate) sums: u32,
    pub(crate) blocks: u32,
}

impl Quantized {
    /// Of `rows` rows from `word` on: 40 bytes for each block, of which a slot has 52.
    fn new(word: u32, rows: usize, columns: usize) -> Self {
        let blocks = number(rows * (columns / BLOCK));
        let scales = word + 8 * blocks;
        Self {
            bytes: word,
            scales,
            sums: scales + blocks,
            blocks,
        }
    }
}

/// Which rows products are made of.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Shares<'a> {
    /// So many, each with the only matrix.
    All(usize),
    /// Choices, each with its expert's.
    Sorted(&'a Sorted),
}

impl<'a> Shares<'a> {
    fn sorted(self) -> Option<&'a Sorted> {
        match self {
            Self::All(_) => None,
            Self::Sorted(sorted) => Some(sorted),
        }
    }

    fn rows(self) -> usize {
        match self {
            Self::All(rows) => rows,
            Self::Sorted(sorted) => sorted.choices,
        }
    }

    fn are_many(self) -> bool {
        match self {
            Self::All(rows) => rows > FEW_TOKENS,
            Self::Sorted(sorted) => sorted.are_many,
        }
    }
}

/// Rows of a matrix, or of some experts' matrices, that a kernel is shown at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Part {
    /// Whose matrix it begins with, and how many there are.
    first_expert: usize,
    experts: usize,
    /// In each of them.
    first_row: usize,
    rows: usize,
    /// Of the piece that the matrix is in.
    offset: u64,
    length: u64,
    /// Bytes of that before the first row.
    skip: u32,
}

/// Matrices in parts of no more than `window` bytes: all of them, or some whole ones, or some rows of one.
fn parts(placed: &Placed, window: u64, alignment: u64) -> impl Iterator<Item = Part> {
    let row_bytes = placed.row_bytes as u64;
    let whole = placed.bytes().next_multiple_of(4) <= window;
    // Up to an alignment before them is shown too, and the rest of a word behind.
    let room = window.saturating_sub(alignment + 4);
    let experts = match whole {
        true => placed.experts,
        false => ((room / placed.matrix_bytes().max(1)) as usize).clamp(1, placed.experts.max(1)),
    };
    let rows = match whole || experts as u64 * placed.matrix_bytes() <= room {
        true => placed.rows,
        // In whole workgroups.
        false => {
            let rows = (room / row_bytes.max(1)) as usize;
            (rows / PRODUCT_ROWS as usize).max(1) * PRODUCT_ROWS as usize
        }
    };
    let placed = *placed;
    let starts = (0..placed.experts).step_by(experts.max(1));
    let starts = starts.flat_map(move |first_expert| {
        let starts = (0..placed.rows).step_by(rows.max(1));
        starts.map(move |first_row| (first_expert, first_row))
    });
    starts.map(move |(first_expert, first_row)| {
        let experts = experts.min(placed.experts - first_expert);
        let count = rows.min(placed.rows - first_row);
        let from = placed.offset
            + first_expert as u64 * placed.matrix_bytes()
            + first_row as u64 * row_bytes;
        let skip = from % alignment;
        let shown = (experts as u64 - 1) * placed.matrix_bytes() + count as u64 * row_bytes;
        Part {
            first_expert,
            experts,
            first_row,
            rows: count,
            offset: from - skip,
            length: (skip + shown).next_multiple_of(4),
            skip: skip as u32,
        }
    })
}

#[cfg(test)]
mod tests {
    use lacuna_kernels::DType;

    use super::*;

    fn placed(rows: usize, row_bytes: usize, offset: u64) -> Placed {
        Placed {
            dtype: DType::Q8_0,
            experts: 1,
            rows,
            columns: 32,
            row_bytes,
            piece: 0,
            offset,
            has_bias: false,
        }
    }

    #[test]
    fn a_matrix_that_fits_is_one_part() {
        let parts: Vec<Part> = parts(&placed(7, 34, 256), 1000, 16).collect();
        let one = Part {
            first_expert: 0,
            experts: 1,
            first_row: 0,
            rows: 7,
            offset: 256,
            length: 240,
            skip: 0,
        };
        assert_eq!(parts, [one]);
    }

    #[test]
    fn parts_are_whole_workgroups_that_fit_and_have_every_row_once() {
        for (rows, row_bytes, window, alignment) in
            [(100, 34, 600, 16), (64, 210, 2000, 64), (33, 18, 180, 16)]
        {
            let placed = placed(rows, row_bytes, 512);
            let mut next = 0;
            for part in parts(&placed, window, alignment) {
                assert_eq!(part.first_row, next);
                assert!(part.first_row.is_multiple_of(8), "whole workgroups");
                assert!(part.length <= window, "{} of {window}", part.length);
                assert!(part.offset.is_multiple_of(alignment));
                let first = part.offset + u64::from(part.skip);
                assert_eq!(first, 512 + (next * row_bytes) as u64);
                let bytes = (part.rows * row_bytes) as u64;
                assert!(u64::from(part.skip) + bytes <= part.length);
                next += part.rows;
            }
            assert_eq!(next, rows);
        }
    }

    #[test]
    fn experts_are_in_one_part_or_in_whole_ones_or_in_rows_of_one() {
        let experts = Placed {
            experts: 5,
            ..placed(16, 48, 256)
        };
        let in_windows = |window| {
            let parts = parts(&experts, window, 16);
            let parts = parts.map(|part| {
                assert!(part.length <= window, "{} of {window}", part.length);
                assert_eq!(part.skip, 0, "rows are multiples of the alignment");
                let first = part.first_expert * 16 + part.first_row;
                assert_eq!(part.offset, 256 + 48 * first as u64);
                [part.first_expert, part.experts, part.first_row, part.rows]
            });
            parts.collect::<Vec<_>>()
        };
        assert_eq!(in_windows(5 * 768), [[0, 5, 0, 16]]);
        assert_eq!(
            in_windows(2 * 768 + 20),
            [[0, 2, 0, 16], [2, 2, 0, 16], [4, 1, 0, 16]]
        );
        let rows = in_windows(8 * 48 + 20);
        assert_eq!(rows.len(), 10);
        assert_eq!(rows[..3], [[0, 1, 0, 8], [0, 1, 8, 8], [1, 1, 0, 8]]);
    }
}
