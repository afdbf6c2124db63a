//! What attention reads: the rows of one side (K or V) of one layer, wherever they lie.
//!
//! A flat range is one run; a block table is many. Views borrow, so they cost nothing to make for
//! a flat range; kernels find a row by searching the runs, or by asking who knows where they are.

use std::ops::Range;

use crate::element::ElementType;

/// Where the elements of rows lie within a run.
///
/// ```text
/// token-major   row 0: [head 0][head 1]..  row 1: [head 0]..     head_stride = one head
/// head-major    head 0: [row 0][row 1]..   head 1: [row 0]..     row_stride = one head
/// interleaved   row 0: [this layer][next layer]..  row 1: ..     row_stride = all layers
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowLayout {
    /// How elements are stored.
    pub element: ElementType,
    /// Heads per row.
    pub heads: usize,
    /// Elements per head, whole blocks.
    pub head_dim: usize,
    /// Bytes between the starts of two rows of a run.
    pub row_stride: usize,
    /// Bytes between the starts of two heads of a row.
    pub head_stride: usize,
}

impl RowLayout {
    /// Rows without gaps, the heads of each behind one another.
    pub const fn token_major(element: ElementType, heads: usize, head_dim: usize) -> Self {
        let head_stride = element.bytes(head_dim);
        Self {
            element,
            heads,
            head_dim,
            row_stride: heads * head_stride,
            head_stride,
        }
    }

    /// Heads without gaps, each with room for `rows` rows.
    pub const fn head_major(
        element: ElementType,
        heads: usize,
        head_dim: usize,
        rows: usize,
    ) -> Self {
        let row_stride = element.bytes(head_dim);
        Self {
            element,
            heads,
            head_dim,
            row_stride,
            head_stride: rows * row_stride,
        }
    }

    /// Bytes of one head of one row.
    pub const fn head_bytes(&self) -> usize {
        self.element.bytes(self.head_dim)
    }

    /// Bytes from the start of the first of `rows` rows to the end of the last.
    fn extent(&self, rows: usize) -> Option<usize> {
        let (Some(last), true) = (rows.checked_sub(1), self.heads > 0) else {
            return Some(0);
        };
        let heads = (self.heads - 1).checked_mul(self.head_stride)?;
        last.checked_mul(self.row_stride)?
            .checked_add(heads)?
            .checked_add(self.head_bytes())
    }
}

/// Rows at equal distances in address space.
#[derive(Clone, Copy)]
pub struct Run<'a> {
    /// The first row this run holds.
    pub start_row: usize,
    /// Number of rows.
    pub rows: usize,
    /// Their bytes; head `h` of row `start_row + i` starts at byte
    /// `i * row_stride + h * head_stride`.
    pub bytes: &'a [u8],
}

/// Rows at equal distances in address space that are lent to be written: what [`Run`] is to readers.
#[derive(Debug)]
pub struct RunMut<'a> {
    /// Where the elements of a row lie.
    pub layout: RowLayout,
    /// Which of the rows to be written these are.
    pub rows: Range<usize>,
    /// Their bytes, laid out like those of a [`Run`].
    pub bytes: &'a mut [u8],
}

/// Knows where rows lie, for a view that asks as it reads: a block table need not be turned into a
/// list of runs first.
pub trait Runs: Sync {
    /// The run that holds `row` of the rows named `stream`; a name means something to the
    /// implementer only.
    fn run(&self, stream: usize, row: usize) -> Run<'_>;
}

/// Runs other than the first.
#[derive(Clone, Copy)]
enum Rest<'a> {
    Listed(&'a [Run<'a>]),
    Asked { runs: &'a dyn Runs, stream: usize },
}

/// Rows that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ViewError {
    /// A stride is smaller than a head.
    #[error("heads of {head_bytes} bytes overlap at a stride of {smallest} bytes")]
    Stride {
        /// Bytes of one head.
        head_bytes: usize,
        /// The smaller one of the strides, in bytes.
        smallest: usize,
    },
    /// A run does not continue where the one before it ended.
    #[error("a run starts at row {found} where row {expected} was expected")]
    Gap {
        /// The row that follows the run before.
        expected: usize,
        /// The row the run starts at.
        found: usize,
    },
    /// A run has fewer bytes than its rows take.
    #[error("the run at row {start_row} has {found} bytes; its rows take {expected}")]
    Short {
        /// The first row of the run.
        start_row: usize,
        /// Bytes its rows take.
        expected: usize,
        /// Bytes it has.
        found: usize,
    },
}

/// Consecutive rows, as one or more runs. Rows before the first one held are out of reach.
#[derive(Clone, Copy)]
pub struct View<'a> {
    layout: RowLayout,
    end: usize,
    first: Run<'a>,
    rest: Rest<'a>,
}

impl<'a> View<'a> {
    /// Token-major rows without gaps, from row 0 on; their number is what fits in `bytes`.
    pub fn flat(element: ElementType, heads: usize, head_dim: usize, bytes: &'a [u8]) -> Self {
        Self::flat_from(element, heads, head_dim, 0, bytes)
    }

    /// Like [`View::flat`], but the first bytes are those of row `first_row`.
    pub fn flat_from(
        element: ElementType,
        heads: usize,
        head_dim: usize,
        first_row: usize,
        bytes: &'a [u8],
    ) -> Self {
        let layout = RowLayout::token_major(element, heads, head_dim);
        let rows = bytes.len().checked_div(layout.row_stride).unwrap_or(0);
        let first = Run {
            start_row: first_row,
            rows,
            bytes,
        };
        Self {
            layout,
            end: first_row + rows,
            first,
            rest: Rest::Listed(&[]),
        }
    }

    /// Rows scattered over runs, which must be in row order and leave no gap. The view starts at
    /// the first row of `first`.
    ///
    /// # Errors
    /// [`ViewError`] when a stride is smaller than a head, a row is missing or a run is too short.
    pub fn from_runs(
        layout: RowLayout,
        first: Run<'a>,
        rest: &'a [Run<'a>],
    ) -> Result<Self, ViewError> {
        let mut end = first.start_row;
        for run in std::iter::once(&first).chain(rest) {
            if run.start_row != end {
                return Err(ViewError::Gap {
                    expected: end,
                    found: run.start_row,
                });
            }
            check_run(run, &layout)?;
            end += run.rows;
        }
        Ok(Self {
            layout,
            end,
            first,
            rest: Rest::Listed(rest),
        })
    }

    /// The rows `rows` of `stream`, wherever `runs` says they are when they are read. Costs nothing
    /// to make, however many runs there are.
    ///
    /// # Panics
    /// Reading panics when a run that `runs` gives does not hold the row asked for.
    pub fn gather(
        layout: RowLayout,
        rows: Range<usize>,
        runs: &'a dyn Runs,
        stream: usize,
    ) -> Self {
        let first = Run {
            start_row: rows.start,
            rows: 0,
            bytes: &[],
        };
        Self {
            layout,
            end: rows.end,
            first,
            rest: Rest::Asked { runs, stream },
        }
    }

    /// Where the elements of a row lie.
    pub fn layout(&self) -> &RowLayout {
        &self.layout
    }

    /// The rows in reach.
    pub fn rows(&self) -> Range<usize> {
        self.first.start_row..self.end
    }

    /// The same without rows from `end` on.
    #[must_use]
    pub fn up_to(self, end: usize) -> Self {
        let end = self.end.min(end).max(self.first.start_row);
        Self { end, ..self }
    }

    /// The bytes of one head of one row.
    ///
    /// # Panics
    /// When `row` or `head` is out of range.
    #[inline]
    pub fn head(&self, row: usize, head: usize) -> &'a [u8] {
        self.span(&(row..row + 1), &(head..head + 1)).1
    }

    /// Whether the heads of a row lie behind one another without gaps.
    pub(crate) fn heads_are_adjacent(&self) -> bool {
        self.layout.head_stride == self.layout.head_bytes()
    }

    /// The first ones of some rows, as many as are in one run: how many, and their bytes from the
    /// start of `heads` in the first to its end in the last, which must be adjacent heads.
    ///
    /// # Panics
    /// When there is no row, or a row or a head is out of range.
    #[inline]
    pub(crate) fn span(&self, rows: &Range<usize>, heads: &Range<usize>) -> (usize, &'a [u8]) {
        assert!(
            self.first.start_row <= rows.start && rows.end <= self.end,
            "rows {rows:?} of a view of rows {:?}",
            self.rows()
        );
        assert!(heads.end <= self.layout.heads, "heads {heads:?}");
        let run = self.run(rows.start);
        let end = rows.end.min(run.start_row + run.rows);
        let first = self.place(&run, rows.start, heads.start);
        let last = self.place(&run, end - 1, heads.start);
        let bytes = &run.bytes[first..last + heads.len() * self.layout.head_bytes()];
        (end - rows.start, bytes)
    }

    /// Whether the heads of some rows are the first elements of those of `other`, in the same memory.
    ///
    /// # Panics
    /// When a row is out of range.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn begins(&self, other: &View<'_>, rows: &Range<usize>) -> bool {
        let layout = RowLayout {
            head_dim: self.layout.head_dim,
            ..other.layout
        };
        if self.layout != layout || self.layout.head_dim > other.layout.head_dim {
            return false;
        }
        let mut row = rows.start;
        while row < rows.end {
            let [(count, bytes), (other_count, other_bytes)] =
                [self, other].map(|view| view.span(&(row..rows.end), &(0..1)));
            if bytes.as_ptr() != other_bytes.as_ptr() {
                return false;
            }
            row += count.min(other_count);
        }
        true
    }

    /// The bytes of `count` rows from `row` on, and of all heads, if they are in one run.
    ///
    /// # Panics
    /// When `row` is out of range.
    pub(crate) fn run_of(&self, row: usize, count: usize) -> Option<&'a [u8]> {
        assert!(self.rows().contains(&row), "row {row} of {:?}", self.rows());
        let run = self.run(row);
        let ends = row + count > run.start_row + run.rows;
        (!ends).then(|| &run.bytes[self.place(&run, row, 0)..])
    }

    #[inline]
    fn place(&self, run: &Run<'a>, row: usize, head: usize) -> usize {
        (row - run.start_row) * self.layout.row_stride + head * self.layout.head_stride
    }

    /// The run that holds a row in range.
    #[inline]
    fn run(&self, row: usize) -> Run<'a> {
        if row - self.first.start_row < self.first.rows {
            return self.first;
        }
        match self.rest {
            Rest::Listed(rest) => rest[rest.partition_point(|run| run.start_row <= row) - 1],
            Rest::Asked { runs, stream } => runs.run(stream, row),
        }
    }
}

fn check_run(run: &Run<'_>, layout: &RowLayout) -> Result<(), ViewError> {
    let (head_bytes, smallest) = (
        layout.head_bytes(),
        layout.row_stride.min(layout.head_stride),
    );
    if smallest < head_bytes {
        return Err(ViewError::Stride {
            head_bytes,
            smallest,
        });
    }
    let found = run.bytes.len();
    let expected = layout.extent(run.rows).unwrap_or(usize::MAX);
    if found < expected {
        return Err(ViewError::Short {
            start_row: run.start_row,
            expected,
            found,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(start_row: usize, rows: usize, bytes: &[u8]) -> Run<'_> {
        Run {
            start_row,
            rows,
            bytes,
        }
    }

    #[test]
    fn a_head_is_found_in_its_run() {
        let bytes: Vec<u8> = (0..40).collect();
        let layout = RowLayout {
            row_stride: 8,
            ..RowLayout::token_major(ElementType::F16, 2, 1)
        };
        let rest = [run(5, 1, &bytes[16..24]), run(6, 2, &bytes[24..])];
        let view = View::from_runs(layout, run(3, 2, &bytes[..16]), &rest).expect("no gaps");
        assert_eq!(view.rows(), 3..8);
        for row in 3..8 {
            for head in 0..2 {
                let start = 8 * (row - 3) + 2 * head;
                assert_eq!(view.head(row, head), &bytes[start..start + 2]);
            }
        }
    }

    #[test]
    fn heads_may_lie_apart() {
        let bytes: Vec<u8> = (0..32).collect();
        let layout = RowLayout::head_major(ElementType::F32, 2, 1, 4);
        let view = View::from_runs(layout, run(0, 3, &bytes), &[]).expect("three of four rows");
        assert_eq!(view.head(2, 0), &bytes[8..12]);
        assert_eq!(view.head(2, 1), &bytes[24..28]);
        let short = View::from_runs(layout, run(0, 3, &bytes[..27]), &[]).err();
        assert!(matches!(short, Some(ViewError::Short { expected: 28, .. })));
    }

    #[test]
    fn a_flat_view_may_start_behind_row_zero() {
        let bytes: Vec<u8> = (0..16).collect();
        let view = View::flat_from(ElementType::F16, 2, 2, 7, &bytes);
        assert_eq!(view.rows(), 7..9);
        assert_eq!(view.head(8, 1), &bytes[12..]);
    }

    /// Rows of one head of two bytes, two to a block, the blocks in reverse.
    struct Blocks(Vec<u8>);

    impl Runs for Blocks {
        fn run(&self, stream: usize, row: usize) -> Run<'_> {
            let block = row / 2;
            let start = stream + self.0.len() - 4 * (block + 1);
            run(2 * block, 2, &self.0[start..][..4])
        }
    }

    #[test]
    fn rows_are_found_where_a_block_table_says() {
        let blocks = Blocks((0..32).collect());
        let layout = RowLayout::token_major(ElementType::F16, 1, 1);
        let view = View::gather(layout, 3..8, &blocks, 0);
        assert_eq!(view.rows(), 3..8);
        assert_eq!(view.head(3, 0), &[26, 27]);
        assert_eq!(view.head(4, 0), &[20, 21]);
        assert_eq!(view.span(&(3..6), &(0..1)), (1, &[26, 27][..]));
        assert_eq!(view.span(&(4..8), &(0..1)), (2, &[20, 21, 22, 23][..]));
    }

    #[test]
    fn gaps_overlaps_and_short_runs_are_refused() {
        let bytes = [0_u8; 16];
        let layout = RowLayout::token_major(ElementType::F32, 1, 2);
        let error = |layout, rows, rest| View::from_runs(layout, run(0, rows, &bytes), rest).err();
        let gap = [run(3, 1, &bytes)];
        assert_eq!(
            error(layout, 2, &gap),
            Some(ViewError::Gap {
                expected: 2,
                found: 3
            })
        );
        let overlapping = RowLayout {
            row_stride: 4,
            ..layout
        };
        assert!(matches!(
            error(overlapping, 2, &[]),
            Some(ViewError::Stride { .. })
        ));
        assert!(matches!(
            error(layout, 3, &[]),
            Some(ViewError::Short { .. })
        ));
        assert!(matches!(
            error(layout, usize::MAX, &[]),
            Some(ViewError::Short { .. })
        ));
    }
}
