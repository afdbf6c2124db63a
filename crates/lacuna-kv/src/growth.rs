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

    /// The sizes it comes through until it has room for `tokens` tokens that arrive one at a time, as
    /// a few runs of equal steps: any number of tokens takes no time.
    pub(crate) fn runs(self, tokens: usize, capacity: usize, cell_bytes: usize) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        let mut held = 0;
        while held < tokens {
            let next = self.cells(held, held..held + 1, capacity, cell_bytes);
            let step = next - held;
            let count = match self {
                // All steps are equal, so that the first run is the only one.
                Self::Mlx => tokens.div_ceil(step),
                // The last step of linear growth may be shorter, and is a run of its own.
                Self::DoubleLinear { switch_cells } if held >= switch_cells.max(Self::STEP) => {
                    ((tokens.min(capacity) - held) / step).max(1)
                }
                Self::DoubleLinear { .. } => 1,
            };
            runs.push(Run {
                first: next,
                step,
                count,
            });
            held = next + step * (count - 1);
        }
        runs
    }

    /// Where the schedule is after `tokens` tokens, one at a time.
    #[must_use]
    pub fn after(self, tokens: usize, capacity: usize, cell_bytes: usize) -> Growth {
        let grow = |growth: Growth, run: Run| Growth {
            cells: run.last(),
            resizes: growth.resizes + run.count - usize::from(growth.cells == 0),
            copied_cells: saturated(
                (growth.copied_cells + growth.cells) as u128 + run.sum() - run.last() as u128,
            ),
        };
        self.runs(tokens, capacity, cell_bytes)
            .into_iter()
            .fold(Growth::default(), grow)
    }
}

/// Sizes in cells: `first`, `first + step`, and so on, `count` of them, at least one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) first: usize,
    pub(crate) step: usize,
    pub(crate) count: usize,
}

impl Run {
    /// The last size.
    pub(crate) fn last(self) -> usize {
        self.first + self.step * (self.count - 1)
    }

    /// The size before the last, which for a run of one is the last of the run before.
    pub(crate) fn last_but_one(self) -> usize {
        self.last() - self.step
    }

    /// All sizes together.
    pub(crate) fn sum(self) -> u128 {
        let (first, last) = (self.first as u128, self.last() as u128);
        (first + last) * self.count as u128 / 2
    }

    /// All sizes together in pages of `page_bytes`, each rounded up by itself, with cells of
    /// `cell_bytes`.
    pub(crate) fn pages(self, cell_bytes: usize, page_bytes: usize) -> u128 {
        let (cell, page) = (cell_bytes as u128, page_bytes as u128);
        let start = self.first as u128 * cell + page - 1;
        sum_of_quotients(self.count as u128, page, self.step as u128 * cell, start)
    }
}

/// The sum of `(step * i + start) / divisor`, rounded down, over `i` below `count`: what is whole is
/// taken out, and the rest counted the other way round, as Euclid's algorithm goes.
fn sum_of_quotients(mut count: u128, mut divisor: u128, mut step: u128, mut start: u128) -> u128 {
    let mut sum = 0;
    loop {
        sum += count * (count - 1) / 2 * (step / divisor) + count * (start / divisor);
        (step, start) = (step % divisor, start % divisor);
        let end = step * count + start;
        (count, start) = (end / divisor, end % divisor);
        if count == 0 {
            return sum;
        }
        (divisor, step) = (step, divisor);
    }
}

/// A number that is absurd in any case, as large as can be said.
pub(crate) fn saturated(number: u128) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const CONTEXT: usize = 131_072;
    const CELL: usize = 64 << 10;

    fn rows(switch_cells: usize) -> impl Fn(usize) -> (usize, usize, usize) {
        let schedule = GrowthSchedule::DoubleLinear { switch_cells };
        move |tokens| {
            let growth = schedule.after(tokens, CONTEXT, CELL);
            (growth.cells, (growth.cells * CELL) >> 20, growth.resizes)
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
        assert_eq!((CONTEXT * CELL) >> 20, 8_192, "dense");
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
        assert_eq!((growth.copied_cells * CELL) >> 20, 11_248, "about 11 GiB");
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

    /// One size after the other.
    fn sizes(schedule: GrowthSchedule, tokens: usize, capacity: usize, cell: usize) -> Vec<usize> {
        let mut sizes = vec![0];
        while let Some(&held) = sizes.last().filter(|&&held| held < tokens) {
            sizes.push(schedule.cells(held, held..held + 1, capacity, cell));
        }
        sizes.split_off(1)
    }

    proptest! {
        #[test]
        fn runs_are_the_sizes_one_after_the_other(
            switch_cells in prop::option::of(0usize..20_000),
            tokens in 0usize..40_000,
            beyond in 0usize..20_000,
            cell in prop::sample::select(vec![1usize << 16, 1 << 20, 3 << 20, 2 << 30]),
            page in prop::sample::select(vec![4096usize, 65_536, 2 << 20]),
            row in 1usize..5000,
        ) {
            let schedule = switch_cells.map_or(GrowthSchedule::Mlx, |switch_cells| {
                GrowthSchedule::DoubleLinear { switch_cells }
            });
            let capacity = tokens + beyond;
            let sizes = sizes(schedule, tokens, capacity, cell);
            let runs = schedule.runs(tokens, capacity, cell);
            let listed = runs.iter().flat_map(|run| (0..run.count).map(|i| run.first + run.step * i));
            prop_assert_eq!(listed.collect::<Vec<_>>(), &sizes[..]);
            let pages: u128 = runs.iter().map(|run| run.pages(row, page)).sum();
            let expected: usize = sizes.iter().map(|cells| (cells * row).div_ceil(page)).sum();
            prop_assert_eq!(pages, expected as u128);
            let growth = schedule.after(tokens, capacity, cell);
            let last = sizes.last().copied().unwrap_or(0);
            prop_assert_eq!((growth.cells, growth.resizes), (last, sizes.len().saturating_sub(1)));
            prop_assert_eq!(growth.copied_cells, sizes.iter().sum::<usize>() - last);
        }
    }

    #[test]
    fn growth_is_linear_from_the_switch_on() {
        let schedule = GrowthSchedule::DoubleLinear { switch_cells: 4096 };
        let after = |cells: usize| schedule.cells(cells, cells..cells + 1, 1 << 30, 1 << 20);
        let to = |end: usize| schedule.cells(256, 256..end, 1 << 30, 1 << 20);
        assert_eq!((to(512), to(513)), (512, 1024), "enough is enough");
        assert_eq!(
            [2048, 4096, 5120].map(after),
            [4096, 4096 + 1024, 5120 + 1024]
        );
        let growth = schedule.after(10_000, 1 << 30, 1 << 20);
        assert_eq!((growth.cells, growth.resizes), (10_240, 4 + 6));
    }

    #[test]
    fn an_absurd_context_takes_no_time() {
        let tokens = 60_000_000_000;
        let growth = GrowthSchedule::Mlx.after(tokens, tokens, CELL);
        assert_eq!((growth.cells, growth.resizes), (tokens, tokens / 256 - 1));
        let steps = (tokens / 256) as u128;
        assert_eq!(growth.copied_cells as u128, 256 * steps * (steps - 1) / 2);
        let schedule = GrowthSchedule::DoubleLinear { switch_cells: 1 };
        assert!(schedule.runs(tokens, tokens, 2 << 30).len() < 4);
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
