//! Weight matrices in their native file layout.
//!
//! A [`Matrix`] borrows bytes, usually of a file mapping, and checks their length once; the
//! kernels rely on that check and read the bytes at any alignment. Nothing is copied.

use crate::decode::dequantize;
use crate::dtype::DType;

/// A shape that does not fit its storage type or its bytes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ShapeError {
    /// A row does not hold a whole number of blocks.
    #[error("a row of {cols} {dtype} weights is not a whole number of {}-weight blocks", dtype.block_len())]
    PartialBlock {
        /// The storage type.
        dtype: DType,
        /// Weights per row.
        cols: usize,
    },
    /// The matrix would not fit in the address space.
    #[error("{rows} x {cols} {dtype} weights exceed the address space")]
    TooLarge {
        /// The storage type.
        dtype: DType,
        /// Rows asked for.
        rows: usize,
        /// Weights per row.
        cols: usize,
    },
    /// The bytes are not those of the shape.
    #[error("{rows} x {cols} {dtype} weights take {expected} bytes, not {found}")]
    WrongLength {
        /// The storage type.
        dtype: DType,
        /// Rows asked for.
        rows: usize,
        /// Weights per row.
        cols: usize,
        /// Bytes the shape takes.
        expected: usize,
        /// Bytes that were given.
        found: usize,
    },
}

/// `rows x cols` weights, row-major, in the byte layout of their [`DType`].
///
/// The bytes may lie at any alignment.
#[derive(Clone, Copy)]
pub struct Matrix<'a> {
    dtype: DType,
    rows: usize,
    cols: usize,
    row_bytes: usize,
    bytes: &'a [u8],
}

impl<'a> Matrix<'a> {
    /// Checks that `bytes` are exactly `rows x cols` weights of `dtype`.
    ///
    /// # Errors
    /// [`ShapeError`] when a row is not whole blocks, the size overflows, or the length differs.
    pub fn new(
        dtype: DType,
        rows: usize,
        cols: usize,
        bytes: &'a [u8],
    ) -> Result<Self, ShapeError> {
        if !cols.is_multiple_of(dtype.block_len()) {
            return Err(ShapeError::PartialBlock { dtype, cols });
        }
        let too_large = ShapeError::TooLarge { dtype, rows, cols };
        let row_bytes = dtype.row_bytes(cols).ok_or(too_large.clone())?;
        let expected = row_bytes.checked_mul(rows).ok_or(too_large)?;
        if bytes.len() != expected {
            let found = bytes.len();
            return Err(ShapeError::WrongLength {
                dtype,
                rows,
                cols,
                expected,
                found,
            });
        }
        Ok(Self {
            dtype,
            rows,
            cols,
            row_bytes,
            bytes,
        })
    }

    /// The storage type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Number of rows (outputs of a projection).
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Weights per row (inputs of a projection).
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes per row.
    pub fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// All bytes, row after row.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The bytes of one row.
    ///
    /// # Panics
    /// When `row` is out of range.
    pub fn row(&self, row: usize) -> &'a [u8] {
        assert!(
            row < self.rows,
            "row {row} of a matrix with {} rows",
            self.rows
        );
        &self.bytes[row * self.row_bytes..][..self.row_bytes]
    }

    /// Writes the `cols` weights of one row as f32.
    ///
    /// # Panics
    /// When `row` is out of range or `out` does not hold `cols` elements.
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        assert_eq!(
            out.len(),
            self.cols,
            "a dequantized row holds `cols` elements"
        );
        dequantize(self.dtype, self.row(row), out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_checked_against_the_bytes() {
        let bytes = [0_u8; 68];
        assert!(Matrix::new(DType::Q8_0, 2, 32, &bytes).is_ok());
        assert!(matches!(
            Matrix::new(DType::Q8_0, 3, 32, &bytes),
            Err(ShapeError::WrongLength {
                expected: 102,
                found: 68,
                ..
            })
        ));
        assert!(matches!(
            Matrix::new(DType::Q8_0, 2, 33, &bytes),
            Err(ShapeError::PartialBlock { cols: 33, .. })
        ));
        assert!(matches!(
            Matrix::new(DType::F32, usize::MAX, 32, &bytes),
            Err(ShapeError::TooLarge { .. })
        ));
    }

    #[test]
    fn nibbles_of_q4_0_are_low_halves_first() {
        let mut bytes = [0_u8; 18];
        bytes[..2].copy_from_slice(&0x3C00_u16.to_le_bytes());
        bytes[2] = 0x9F;
        let mut out = [0.0; 32];
        let matrix = Matrix::new(DType::Q4_0, 1, 32, &bytes).expect("one block");
        matrix.dequantize_row(0, &mut out);
        assert_eq!((out[0], out[16], out[1]), (7.0, 1.0, -8.0));
    }
}
