//! Sixteen rows of a matrix, read column by column.
//!
//! # Safety
//! 1. `base + row * stride .. + row_bytes` lies within `bytes` for every `row < 16`; [`Tile::new`]
//!    establishes it from the matrix, [`Tile::strided`] checks it, [`Tile::part`] ends before a row of
//!    another tile does, and nothing changes it.
//! 2. [`Tile::ptr`] requires that what is read after it lies within the row.
#![expect(
    unsafe_code,
    reason = "rows are read without a bounds check per row; see # Safety"
)]

use std::ops::Range;

use crate::matrix::Matrix;
use crate::simd::LANES;

/// A cache line, wherever it lies.
#[cfg(target_arch = "x86_64")]
pub(crate) type LineBytes = [u8; 64];

/// Sixteen rows at equal distances.
pub(crate) struct Tile<'a> {
    bytes: &'a [u8],
    stride: usize,
    row_bytes: usize,
    lanes: Range<usize>,
}

impl<'a> Tile<'a> {
    /// Rows from `first` on: sixteen, or fewer where the matrix ends; [`Tile::lanes`] are theirs.
    ///
    /// # Panics
    /// When `first` is out of range.
    #[inline]
    pub(crate) fn new(matrix: &Matrix<'a>, first: usize) -> Self {
        let (rows, row_bytes) = (matrix.rows(), matrix.row_bytes());
        assert!(first < rows, "row {first} of a matrix with {rows} rows");
        // A tile that would exceed the matrix starts earlier, and in a matrix of fewer rows than
        // lanes all lanes are one row.
        let (start, count, stride, lanes) = match rows.checked_sub(LANES) {
            Some(last) if first <= last => (first, LANES, row_bytes, 0..LANES),
            Some(last) => (last, LANES, row_bytes, first - last..LANES),
            None => (first, 1, 0, 0..1),
        };
        Self {
            bytes: &matrix.bytes()[start * row_bytes..][..count * row_bytes],
            stride,
            row_bytes,
            lanes,
        }
    }

    /// Sixteen rows of `row_bytes`, `stride` bytes apart.
    ///
    /// # Panics
    /// When a row does not lie in `bytes`.
    #[inline]
    pub(crate) fn strided(bytes: &'a [u8], stride: usize, row_bytes: usize) -> Self {
        let needed = (LANES - 1).checked_mul(stride);
        let needed = needed.and_then(|last| last.checked_add(row_bytes));
        assert!(
            needed.is_some_and(|needed| needed <= bytes.len()),
            "{LANES} rows of {row_bytes} bytes, {stride} apart, in {}",
            bytes.len()
        );
        Self {
            bytes,
            stride,
            row_bytes,
            lanes: 0..LANES,
        }
    }

    /// `len` bytes at `at` of each row: with a constant length, reads in them need no check of their own.
    ///
    /// # Panics
    /// When they exceed the row.
    #[inline(always)]
    pub(crate) fn part(&self, at: usize, len: usize) -> Self {
        let fits = self
            .row_bytes
            .checked_sub(len)
            .is_some_and(|last| at <= last);
        assert!(fits, "{len} bytes at {at} exceed the row");
        // 1: a part of a row ends where the row does, or before.
        Self {
            bytes: &self.bytes[at..],
            stride: self.stride,
            row_bytes: len,
            lanes: self.lanes.clone(),
        }
    }

    /// Bytes per row.
    #[inline(always)]
    pub(crate) fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// Bytes from a row to the next.
    #[cfg_attr(
        not(target_arch = "x86_64"),
        expect(dead_code, reason = "read by levels of x86-64")
    )]
    #[inline(always)]
    pub(crate) fn stride(&self) -> usize {
        self.stride
    }

    /// The bytes of all rows in lines, and how many of them a row is behind the one before; rows are whole lines, and a whole number
    /// of them apart.
    #[cfg(target_arch = "x86_64")]
    pub(crate) fn lines(&self) -> Option<(&'a [LineBytes], usize)> {
        let whole = |bytes: usize| bytes.is_multiple_of(size_of::<LineBytes>());
        let are_whole = whole(self.stride) && whole(self.row_bytes);
        are_whole.then(|| {
            (
                self.bytes.as_chunks().0,
                self.stride / size_of::<LineBytes>(),
            )
        })
    }

    /// The lanes of the rows asked for.
    pub(crate) fn lanes(&self) -> Range<usize> {
        self.lanes.clone()
    }

    /// A row.
    ///
    /// # Panics
    /// When `row` is not below 16.
    #[inline(always)]
    pub(crate) fn row(&self, row: usize) -> &'a [u8] {
        assert!(row < LANES, "row {row} of {LANES}");
        // SAFETY: by 1 all rows lie within `bytes`.
        unsafe {
            let start = self.bytes.as_ptr().add(row * self.stride);
            std::slice::from_raw_parts(start, self.row_bytes)
        }
    }

    /// The address of byte `at` of a row, which need not exist.
    #[inline(always)]
    pub(crate) fn address(&self, row: usize, at: usize) -> *const u8 {
        self.bytes.as_ptr().wrapping_add(row * self.stride + at)
    }

    /// A pointer to byte `at` of a row.
    ///
    /// # Safety
    /// `at` and what is read through the pointer lie within the row: `at + size <= row_bytes`, and
    /// `row < 16`.
    #[inline(always)]
    pub(crate) unsafe fn ptr(&self, row: usize, at: usize) -> *const u8 {
        debug_assert!(row < LANES && at <= self.row_bytes);
        // SAFETY: by the caller's promise and 1 the result lies within `bytes`.
        unsafe { self.bytes.as_ptr().add(row * self.stride + at) }
    }

    /// `size` bytes at `at` of a row.
    #[inline(always)]
    pub(crate) fn bytes<const N: usize>(&self, row: usize, at: usize) -> [u8; N] {
        let start = row * self.stride + at;
        let mut out = [0; N];
        out.copy_from_slice(&self.bytes[start..start + N]);
        out
    }
}

/// The rows of a tile of a block of the output.
#[cfg(target_arch = "x86_64")]
pub(crate) struct Rows {
    /// Where they begin in the block.
    pub(crate) start: usize,
    /// Their lanes in the tile.
    pub(crate) lanes: Range<usize>,
}

#[cfg(target_arch = "x86_64")]
impl Rows {
    pub(crate) const NONE: Self = Self {
        start: 0,
        lanes: 0..0,
    };

    /// The tiles of some of the rows of a block: those from `start` on, as many as there is room for. `start` is behind
    /// them then.
    pub(crate) fn cut<'a>(
        matrix: &Matrix<'_>,
        rows: &Range<usize>,
        start: &mut usize,
        tiles: &'a mut [Self],
    ) -> &'a [Self] {
        let mut count = 0;
        for tile in &mut *tiles {
            if *start == rows.len() {
                break;
            }
            let lanes = Tile::new(matrix, rows.start + *start).lanes();
            let next = *start + lanes.len();
            *tile = Self {
                start: *start,
                lanes,
            };
            (*start, count) = (next, count + 1);
        }
        &tiles[..count]
    }
}
