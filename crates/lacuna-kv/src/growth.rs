//! When a cache without a page table grows, and to what size. Pure.

use std::ops::Range;

/// How many cells (tokens' worth of K and V) a cache is given that holds its rows in one piece and
/// must copy them to grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GrowthSchedule {
    /// 256 tokens at a time, as mlx-lm does: each layer's K and V is replaced by a longer one.
    Mlx,
    /// Starts with 256 cells, doubles until there are `switch_cells`, then adds 1 GiB at a time, as
    /// llama.cpp's dynamic cache does: a whole second cache is filled beside the first.
    DoubleLinear {
        /// Cells from which on growth is linear.
        switch_cells: usize,
    },
}

/// Where a schedule has come to when tokens arrived one by one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Growth {
    /// Cells there are.
    pub cells: usize,
    /// Times the rows were moved.
    pub resizes: usize,
    /// Rows moved, counting a row each time.
    pub copied_cells: usize,
}

impl GrowthSchedule {
    /// The switch point of the table published with llama.cpp's dynamic cache.
    pub const TABLE_SWITCH_CELLS: usize = 32_768;
    /// The switch point of its code.
    pub const CODE_SWITCH_CELLS: usize = 4_096;

    /// Tokens mlx-lm adds at a time, and the cells llama.cpp starts with.
    const STEP: usize = 256;
    const LINEAR_BYTES: usize = 1 << 30;

    /// The cells to have when `rows` are to follow what `cells` hold, in a context of `capacity`
    /// tokens with cells of `cell_bytes`. Not fewer than `cells`.
    #[must_use]
    pub fn cells(
        self,
        cells: usize,
        rows: Range<usize>,
        capacity: usize,
        cell_bytes: usize,
    ) -> usize {
        if rows.end <= cells {
            return cells;
        }
        match self {
            Self::Mlx => rows.start + rows.len().next_multiple_of(Self::STEP),
            Self::DoubleLinear { switch_cells } => {
                let linear = (Self::LINEAR_BYTES / cell_bytes.max(1)).max(1);
                let mut cells = cells.max(Self::STEP);
                while cells < rows.end {
                    cells += if cells < switch_cells { cells } else { linear };
                }
                cells.min(capacity.max(rows.end))
            }
        }
    }

    /// The sizes it comes through, in cells, until it has room for `tokens` tokens that arrive one at
    /// a time.
    pub fn sizes(
        self,
        tokens: usize,
        capacity: usize,
        cell_bytes: usize,
    ) -> impl Iterator<Item = usize> {
        let mut held = 0;
        std::iter::from_fn(move || {
            let full = held < tokens;
            held = self.cells(held, held..held + usize::from(full), capacity, cell_bytes);
            full.then_some(held)
        })
    }

    /// Where the schedule is after `tokens` tokens, one at a time.
    #[must_use]
    pub fn after(self, tokens: usize, capacity: usize, cell_bytes: usize) -> Growth {
        let grow = |growth: Growth, cells| Growth {
            cells,
            resizes: growth.resizes + usize::from(growth.cells > 0),
            copied_cells: growth.copied_cells + growth.cells,
        };
        self.sizes(tokens, capacity, cell_bytes)
            .fold(Growth::default(), grow)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONTEXT: usize = 131_072;
    const CELL: usize = 64 << 10;

    fn rows(switch_cells: usize) -> impl Fn(usize) -> (usize, usize, usize) {
        let schedule = GrowthSchedule::DoubleLinear { switch_cells };
        move |tokens| {
            let growth = schedule.after(tokens, CONTEXT, CELL);
            (growth.cells, growth.cells * CELL >> 20, growth.resizes)
        }
    }

    #[test]
    fn the_published_table_comes_out_exactly() {
        let row = rows(GrowthSchedule::TABLE_SWITCH_CELLS);
        assert_eq!(row(89), (256, 16, 0));
        assert_eq!(row(809), (1_024, 64, 2));
        assert_eq!(row(6_409), (8_192, 512, 5));
        assert_eq!(row(25_609), (32_768, 2_048, 7));
        assert_eq!(row(40_009), (49_152, 3_072, 8));
        assert_eq!(row(64_009), (65_536, 4_096, 9));
        assert_eq!(row(80_009), (81_920, 5_120, 10));
        assert_eq!(CONTEXT * CELL >> 20, 8_192, "dense");
    }

    #[test]
    fn the_published_code_switches_earlier() {
        let row = rows(GrowthSchedule::CODE_SWITCH_CELLS);
        assert_eq!(row(89), (256, 16, 0));
        assert_eq!(row(809), (1_024, 64, 2));
        assert_eq!(row(4_096), (4_096, 256, 4));
        assert_eq!(row(6_409), (20_480, 1_280, 5));
        assert_eq!(row(25_609), (36_864, 2_304, 6));
        assert_eq!(row(40_009), (53_248, 3_328, 7));
        assert_eq!(row(64_009), (69_632, 4_352, 8));
        assert_eq!(row(80_009), (86_016, 5_376, 9));
        assert_eq!(
            row(CONTEXT),
            (CONTEXT, 8_192, 12),
            "no more than the context"
        );
    }

    #[test]
    fn reaching_81920_cells_moves_eleven_gibibytes() {
        let schedule = GrowthSchedule::DoubleLinear {
            switch_cells: GrowthSchedule::TABLE_SWITCH_CELLS,
        };
        let growth = schedule.after(80_009, CONTEXT, CELL);
        assert_eq!(growth.copied_cells, 179_968);
        assert_eq!(growth.copied_cells * CELL >> 20, 11_248, "about 11 GiB");
    }

    #[test]
    fn mlx_adds_steps_behind_the_rows_there_are() {
        let cells = |cells, rows| GrowthSchedule::Mlx.cells(cells, rows, CONTEXT, CELL);
        assert_eq!(cells(0, 0..1), 256);
        assert_eq!(cells(256, 255..256), 256);
        assert_eq!(cells(256, 256..257), 512);
        assert_eq!(cells(256, 100..612), 612, "what was spare is cut off first");
        let growth = GrowthSchedule::Mlx.after(1_000, CONTEXT, CELL);
        assert_eq!((growth.cells, growth.resizes), (1_024, 3));
        assert_eq!(growth.copied_cells, 256 + 512 + 768);
    }

    #[test]
    fn nothing_needs_no_cells_and_cells_larger_than_the_step_still_grow() {
        for schedule in [
            GrowthSchedule::Mlx,
            GrowthSchedule::DoubleLinear { switch_cells: 1 },
        ] {
            assert_eq!(schedule.after(0, CONTEXT, CELL), Growth::default());
            assert!(schedule.after(1_000, CONTEXT, 2 << 30).cells >= 1_000);
        }
    }
}
