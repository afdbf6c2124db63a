//! What attention reads: the rows of one side (K or V) of one layer, wherever they lie.
//!
//! A flat range is one run; a block table is many. Views borrow, so they cost nothing to make for
//! a flat range; kernels find a row by searching the runs.

use std::str::FromStr;

/// How the elements of a cached row are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ElementType {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
}

impl ElementType {
    /// Bytes of `width` consecutive elements.
    pub const fn bytes(self, width: usize) -> usize {
        match self {
            ElementType::F32 => 4 * width,
            ElementType::F16 => 2 * width,
        }
    }

    /// The name used on the command line and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            ElementType::F32 => "f32",
            ElementType::F16 => "f16",
        }
    }
}

/// A name that is no element type.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown element type `{0}`; use f16 or f32")]
pub struct UnknownElementType(pub String);

impl FromStr for ElementType {
    type Err = UnknownElementType;

    fn from_str(name: &str) -> Result<Self, UnknownElementType> {
        let mut known = [ElementType::F32, ElementType::F16].into_iter();
        known
            .find(|element| element.name() == name)
            .ok_or_else(|| UnknownElementType(name.into()))
    }
}

/// Rows that are contiguous in address space.
#[derive(Clone, Copy)]
pub struct Run<'a> {
    /// The first row this run holds.
    pub start_row: usize,
    /// Number of rows.
    pub rows: usize,
    /// Their bytes; row `start_row + i` starts at byte `i * row_stride`.
    pub bytes: &'a [u8],
}

/// Runs that are no consecutive rows, or a run shorter than its rows.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ViewError {
    /// The stride between rows is smaller than a row.
    #[error("rows of {row_bytes} bytes overlap at a stride of {row_stride} bytes")]
    Stride {
        /// Bytes of one row.
        row_bytes: usize,
        /// Bytes between the starts of two rows.
        row_stride: usize,
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

/// Consecutive rows starting at row 0, as one or more runs.
///
/// Each row is `width` elements (`kv_heads * head_dim`).
#[derive(Clone, Copy)]
pub struct View<'a> {
    element: ElementType,
    width: usize,
    row_stride: usize,
    len: usize,
    first: Run<'a>,
    rest: &'a [Run<'a>],
}

impl<'a> View<'a> {
    /// Rows that follow each other without gaps; their number is what fits in `bytes`.
    pub fn flat(element: ElementType, width: usize, bytes: &'a [u8]) -> Self {
        let row_stride = element.bytes(width);
        let rows = bytes.len().checked_div(row_stride).unwrap_or(0);
        let first = Run {
            start_row: 0,
            rows,
            bytes,
        };
        Self {
            element,
            width,
            row_stride,
            len: rows,
            first,
            rest: &[],
        }
    }

    /// Rows scattered over runs, which must be in row order, start at row 0 and leave no gap.
    ///
    /// `row_stride` is the distance in bytes between two rows of a run.
    ///
    /// # Errors
    /// [`ViewError`] when rows overlap, a row is missing or a run is too short.
    pub fn from_runs(
        element: ElementType,
        width: usize,
        row_stride: usize,
        first: Run<'a>,
        rest: &'a [Run<'a>],
    ) -> Result<Self, ViewError> {
        let row_bytes = element.bytes(width);
        if row_stride < row_bytes {
            return Err(ViewError::Stride {
                row_bytes,
                row_stride,
            });
        }
        let mut len = 0;
        for run in std::iter::once(&first).chain(rest) {
            if run.start_row != len {
                return Err(ViewError::Gap {
                    expected: len,
                    found: run.start_row,
                });
            }
            check_length(run, row_bytes, row_stride)?;
            len += run.rows;
        }
        Ok(Self {
            element,
            width,
            row_stride,
            len,
            first,
            rest,
        })
    }

    /// How elements are stored.
    pub fn element(&self) -> ElementType {
        self.element
    }

    /// Elements per row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Number of rows.
    #[expect(
        clippy::len_without_is_empty,
        reason = "a length in rows, not a collection"
    )]
    pub fn len(&self) -> usize {
        self.len
    }

    /// The bytes of one row.
    ///
    /// # Panics
    /// When `row` is out of range.
    pub fn row(&self, row: usize) -> &'a [u8] {
        assert!(row < self.len, "row {row} of a view of {} rows", self.len);
        self.in_run(self.run(row), row)
    }

    /// The bytes of `N` rows from `first` on; past row `last` that one repeats.
    ///
    /// Finds the run once, unless the rows are in several.
    ///
    /// # Panics
    /// When `last` is out of range or before `first`.
    #[inline]
    pub(crate) fn rows<const N: usize>(&self, first: usize, last: usize) -> [&'a [u8]; N] {
        assert!(
            first <= last && last < self.len,
            "rows {first} to {last} of a view of {} rows",
            self.len
        );
        let mut run = self.run(first);
        std::array::from_fn(|index| {
            let row = last.min(first + index);
            if row - run.start_row >= run.rows {
                run = self.run(row);
            }
            self.in_run(run, row)
        })
    }

    /// The run that holds a row in range.
    #[inline]
    fn run(&self, row: usize) -> &Run<'a> {
        if row < self.first.rows {
            &self.first
        } else {
            &self.rest[self.rest.partition_point(|run| run.start_row <= row) - 1]
        }
    }

    #[inline]
    fn in_run(&self, run: &Run<'a>, row: usize) -> &'a [u8] {
        let start = (row - run.start_row) * self.row_stride;
        &run.bytes[start..][..self.element.bytes(self.width)]
    }
}

fn check_length(run: &Run<'_>, row_bytes: usize, row_stride: usize) -> Result<(), ViewError> {
    let found = run.bytes.len();
    let expected = match run.rows.checked_sub(1) {
        None => 0,
        Some(last) => last
            .checked_mul(row_stride)
            .and_then(|n| n.checked_add(row_bytes))
            .unwrap_or(usize::MAX),
    };
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

    #[test]
    fn a_row_is_found_in_its_run() {
        let bytes: Vec<u8> = (0..40).collect();
        let rest = [
            Run {
                start_row: 2,
                rows: 1,
                bytes: &bytes[16..24],
            },
            Run {
                start_row: 3,
                rows: 2,
                bytes: &bytes[24..],
            },
        ];
        let first = Run {
            start_row: 0,
            rows: 2,
            bytes: &bytes[..16],
        };
        let view = View::from_runs(ElementType::F16, 2, 8, first, &rest).expect("no gaps");
        assert_eq!(view.len(), 5);
        for row in 0..5 {
            assert_eq!(view.row(row), &bytes[8 * row..8 * row + 4]);
        }
    }

    #[test]
    fn gaps_overlaps_and_short_runs_are_refused() {
        let bytes = [0_u8; 16];
        let first = Run {
            start_row: 0,
            rows: 2,
            bytes: &bytes,
        };
        let gap = [Run {
            start_row: 3,
            rows: 1,
            bytes: &bytes,
        }];
        let from = |stride, first, rest| View::from_runs(ElementType::F32, 2, stride, first, rest);
        assert_eq!(
            from(8, first, &gap).err(),
            Some(ViewError::Gap {
                expected: 2,
                found: 3
            })
        );
        assert!(matches!(
            from(4, first, &[]).err(),
            Some(ViewError::Stride { .. })
        ));
        let short = Run {
            start_row: 0,
            rows: 3,
            bytes: &bytes,
        };
        assert!(matches!(
            from(8, short, &[]).err(),
            Some(ViewError::Short { .. })
        ));
    }
}
