//! Weight matrices in their native file layout.
//!
//! A [`Matrix`] borrows bytes, usually of a file mapping, and checks their length once; the
//! kernels rely on that check and read the bytes at any alignment. Nothing is copied.

use crate::dtype::DType;
use crate::quantized::codebooks::{FLOATS, LEVELS, power};
use half::f16;

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

/// Decodes whole blocks: `bytes` and `out` are the same number of blocks.
fn dequantize(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    let blocks = bytes.chunks_exact(dtype.block_bytes());
    for (block, out) in blocks.zip(out.chunks_exact_mut(dtype.block_len())) {
        match dtype {
            DType::F32 => out[0] = f32::from_le_bytes([block[0], block[1], block[2], block[3]]),
            DType::F16 => out[0] = f16_at(block, 0),
            DType::Bf16 => out[0] = f32::from_bits(u32::from(u16_at(block, 0)) << 16),
            DType::Q8_0 => affine(out, f16_at(block, 0), 0.0, |i| {
                f32::from(block[2 + i] as i8)
            }),
            DType::Q4_0 => affine(out, f16_at(block, 0), 0.0, |i| nibble(&block[2..], i) - 8.0),
            DType::Q4_1 => {
                affine(out, f16_at(block, 0), f16_at(block, 2), |i| {
                    nibble(&block[4..], i)
                });
            }
            DType::Q5_0 => affine(out, f16_at(block, 0), 0.0, |i| {
                nibble(&block[6..], i) + fifth_bit(&block[2..], i) - 16.0
            }),
            DType::Q5_1 => affine(out, f16_at(block, 0), f16_at(block, 2), |i| {
                nibble(&block[8..], i) + fifth_bit(&block[4..], i)
            }),
            DType::Q4K => k_quant(out, block, |sub, i| k_nibble(&block[16..], sub, i)),
            DType::Q5K => k_quant(out, block, |sub, i| {
                k_nibble(&block[48..], sub, i) + 16.0 * f32::from((block[16 + i] >> sub) & 1)
            }),
            DType::Q6K => q6_k(out, block),
            DType::Iq4Nl => affine(out, f16_at(block, 0), 0.0, |i| {
                f32::from(LEVELS[index(&block[2..], i)])
            }),
            DType::Iq4Xs => iq4_xs(out, block),
            DType::Mxfp4 => affine(out, power(block[0]), 0.0, |i| {
                f32::from(FLOATS[index(&block[1..], i)])
            }),
        }
    }
}

/// `out[i] = scale * q(i) + offset`.
fn affine(out: &mut [f32], scale: f32, offset: f32, q: impl Fn(usize) -> f32) {
    for (i, out) in out.iter_mut().enumerate() {
        *out = scale * q(i) + offset;
    }
}

/// Eight sub-blocks of 32 with scales and minima packed in 6 bits at bytes 4..16.
fn k_quant(out: &mut [f32], block: &[u8], q: impl Fn(usize, usize) -> f32) {
    let (d, dmin) = (f16_at(block, 0), f16_at(block, 2));
    for (sub, out) in out.chunks_exact_mut(32).enumerate() {
        let (scale, min) = k_scale_min(&block[4..16], sub);
        affine(out, d * scale, -(dmin * min), |i| q(sub, i));
    }
}

/// Sixteen sub-blocks of 16 with 8-bit scales.
fn q6_k(out: &mut [f32], block: &[u8]) {
    let d = f16_at(block, 208);
    for (sub, out) in out.chunks_exact_mut(32).enumerate() {
        let (half, quarter) = (sub / 4, sub % 4);
        let low = &block[64 * half + 32 * (quarter % 2)..][..32];
        let high = &block[128 + 32 * half..][..32];
        let scales = &block[192 + 2 * sub..][..2];
        for (i, out) in out.iter_mut().enumerate() {
            let low = (low[i] >> (4 * (quarter / 2))) & 15;
            let high = (high[i] >> (2 * quarter)) & 3;
            let q = i32::from(low | (high << 4)) - 32;
            *out = d * f32::from(scales[i / 16] as i8) * q as f32;
        }
    }
}

/// Eight sub-blocks of 32 with 6-bit scales: the lower four bits at bytes 4..8, the others at 2..4.
fn iq4_xs(out: &mut [f32], block: &[u8]) {
    let (d, high) = (f16_at(block, 0), u16_at(block, 2));
    for (sub, out) in out.chunks_exact_mut(32).enumerate() {
        let low = (block[4 + sub / 2] >> (4 * (sub % 2))) & 15;
        let scale = i32::from(low) + i32::from((high >> (2 * sub)) & 3) * 16 - 32;
        affine(out, d * scale as f32, 0.0, |i| {
            f32::from(LEVELS[index(&block[8 + 16 * sub..], i)])
        });
    }
}

/// Element `i` of 32 nibbles: the low halves of 16 bytes, then the high halves.
fn nibble(bytes: &[u8], i: usize) -> f32 {
    index(bytes, i) as f32
}

/// The same, as what it is the index of.
fn index(bytes: &[u8], i: usize) -> usize {
    usize::from((bytes[i % 16] >> (4 * (i / 16))) & 15)
}

/// Element `i` of 32 bits, as 0 or 16.
fn fifth_bit(bytes: &[u8], i: usize) -> f32 {
    f32::from(((bytes[i / 8] >> (i % 8)) & 1) << 4)
}

/// Element `i` of sub-block `sub`: two sub-blocks share 32 bytes, one in each half.
fn k_nibble(bytes: &[u8], sub: usize, i: usize) -> f32 {
    f32::from((bytes[32 * (sub / 2) + i] >> (4 * (sub % 2))) & 15)
}

/// The 6-bit scale and minimum of a sub-block, from their 12 packed bytes.
fn k_scale_min(packed: &[u8], sub: usize) -> (f32, f32) {
    let (scale, min) = if sub < 4 {
        (packed[sub] & 63, packed[sub + 4] & 63)
    } else {
        let low = packed[sub + 4];
        (
            (low & 15) | ((packed[sub - 4] >> 6) << 4),
            (low >> 4) | ((packed[sub] >> 6) << 4),
        )
    };
    (f32::from(scale), f32::from(min))
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn f16_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_bits(u16_at(bytes, at)).to_f32()
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
