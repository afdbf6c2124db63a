//! Sixteen consecutive rows of a matrix, read column by column.
//!
//! # Safety
//! 1. `base + offsets[r] .. + row_bytes` lies within `bytes` for every `r < 16`; [`Tile::new`]
//!    establishes it from the matrix, [`Tile::at`] checks it, and nothing changes it.
//! 2. [`Tile::ptr`] requires that what is read after it lies within the row.
#![expect(
    unsafe_code,
    reason = "rows are read without a bounds check per row; see # Safety"
)]

use crate::matrix::Matrix;
use crate::simd::LANES;

/// Sixteen rows; past the end of the matrix the last row repeats.
pub(crate) struct Tile<'a> {
    bytes: &'a [u8],
    offsets: [u32; LANES],
    row_bytes: usize,
}

impl<'a> Tile<'a> {
    /// The rows from `first` on.
    ///
    /// # Panics
    /// When `first` is out of range or 16 rows exceed 4 GiB.
    #[inline]
    pub(crate) fn new(matrix: &Matrix<'a>, first: usize) -> Self {
        let row_bytes = matrix.row_bytes();
        let count = (matrix.rows().checked_sub(first)).map_or(0, |rest| rest.min(LANES));
        assert!(
            count > 0,
            "row {first} of a matrix with {} rows",
            matrix.rows()
        );
        // Offsets are gathered as signed 32-bit integers.
        assert!(
            row_bytes < (1 << 27),
            "a row of {row_bytes} bytes is too long for a tile"
        );
        let bytes = &matrix.bytes()[first * row_bytes..][..count * row_bytes];
        let offsets = std::array::from_fn(|row| (row.min(count - 1) * row_bytes) as u32);
        Self {
            bytes,
            offsets,
            row_bytes,
        }
    }

    /// Bytes that rows may span, because offsets are gathered as signed 32-bit integers.
    pub(crate) const MAX_BYTES: usize = 1 << 31;

    /// Rows of `row_bytes` at some offsets.
    ///
    /// # Panics
    /// When a row does not lie in `bytes`, or those are more than [`Tile::MAX_BYTES`].
    #[inline]
    pub(crate) fn at(bytes: &'a [u8], offsets: [u32; LANES], row_bytes: usize) -> Self {
        assert!(
            bytes.len() <= Self::MAX_BYTES,
            "rows span {} bytes",
            bytes.len()
        );
        for offset in offsets {
            assert!(
                (bytes.len().checked_sub(row_bytes)).is_some_and(|last| offset as usize <= last),
                "a row of {row_bytes} bytes at {offset} of {}",
                bytes.len()
            );
        }
        Self {
            bytes,
            offsets,
            row_bytes,
        }
    }

    /// Bytes per row.
    #[inline(always)]
    pub(crate) fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// Where the rows start, in bytes from [`Tile::base`].
    #[inline(always)]
    pub(crate) fn offsets(&self) -> &[u32; LANES] {
        &self.offsets
    }

    /// The start of the first row.
    #[inline(always)]
    pub(crate) fn base(&self) -> *const u8 {
        self.bytes.as_ptr()
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
        unsafe {
            self.base()
                .add(*self.offsets.get_unchecked(row) as usize + at)
        }
    }

    /// `size` bytes at `at` of a row.
    #[inline(always)]
    pub(crate) fn bytes<const N: usize>(&self, row: usize, at: usize) -> [u8; N] {
        let start = self.offsets[row] as usize + at;
        let mut out = [0; N];
        out.copy_from_slice(&self.bytes[start..start + N]);
        out
    }
}
