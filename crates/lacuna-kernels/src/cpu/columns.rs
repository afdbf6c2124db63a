//! Products with the columns of a matrix that are needed.

use super::Cpu;
use crate::columns::{ColumnLayout, Columns, Product, TASK_ROWS};
use crate::grid::Grid;

impl Cpu {
    /// Products of a matrix with all tokens, as [`Cpu::matmul`] makes them of the whole matrix and with the same results,
    /// from columns that are there: those in which `x`, `[tokens, columns of the matrix]`, is not zero.
    ///
    /// Columns may come by ranges one after another, each in a call of its own; the first begins at 0. `out`,
    /// `[tokens, rows]`, has the products when the last is over.
    ///
    /// # Panics
    /// When shapes do not fit together, or columns are not in ascending order, in the range.
    pub fn matmul_columns<'c, F>(&self, out: &mut [f32], x: &[f32], columns: &Columns<'_, F>)
    where
        F: Fn(usize) -> &'c [u8] + Sync,
    {
        let layout = columns.layout;
        let tokens = x.len() / layout.cols();
        assert_eq!(x.len(), tokens * layout.cols(), "whole rows of activations");
        assert_eq!(
            out.len(),
            tokens * layout.rows(),
            "the output is [tokens, rows]"
        );
        assert_eq!(columns.scales.len(), layout.scale_bytes(), "all scales");
        let range = &columns.range;
        let whole = |at: usize| at.is_multiple_of(ColumnLayout::SECTION);
        assert!(
            whole(range.start) && (whole(range.end) || range.end == layout.cols()),
            "columns from a section's first to another's last"
        );
        let ascend = columns.numbers.windows(2).all(|two| two[0] < two[1]);
        let within = |at: Option<&u32>| at.is_none_or(|at| range.contains(&(*at as usize)));
        assert!(
            ascend && within(columns.numbers.first()) && within(columns.numbers.last()),
            "columns ascend, in their range"
        );
        if tokens == 0 {
            return;
        }
        Grid::new(out, layout.rows(), tokens, TASK_ROWS).run(&self.pool, |out, _| {
            self.proof.run(Product { columns, x, out });
        });
    }
}
