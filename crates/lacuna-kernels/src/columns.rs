//! Products of a matrix and activations most of which are zero, from the columns that are needed.
//!
//! Of `W x` the columns where `x` is zero add nothing. So the others can lie anywhere, each with the elements of all
//! rows side by side, and the rest need not be in memory at all. Sums have the order of whole matrices' products: of float
//! matrices blocks of 512 columns with eight partial sums each (`float.rs`), of quantized ones blocks of 32
//! (`quantized/mod.rs`). What a zero would have added is a zero, so results are those of
//! [`Cpu::matmul`](crate::Cpu::matmul), bit for bit; only a sum all of whose products are too small for an f32 may have the
//! other sign before its zero.
//!
//! Lanes are rows. A task has some rows, whose sums stay in the first-level cache, and goes through the columns front to
//! back.

use std::ops::Range;

use crate::activations::{BLOCK, quantize_block};
use crate::dtype::DType;
use crate::grid::Block;
use crate::matrix::Matrix;
use crate::quantized::codebooks::CENTRED;
use crate::simd::{Kernel, LANES, Simd, each};

/// Columns of a float matrix whose products are summed before they join the sum of the row, as in `float.rs`. Ranges
/// of columns that are multiplied one after another begin at multiples of it, which are multiples of quantized blocks
/// too.
const SECTION: usize = 512;

/// Partial sums of such a block.
const PARTIAL: usize = 8;

/// Rows that a column's bytes come in: two vectors, which is what a byte of two nibbles belongs to.
const GROUP: usize = 2 * LANES;

/// Rows of a task: of eight partial sums for each, 8 KiB.
pub(crate) const TASK_ROWS: usize = 256;
const TASK_VECTORS: usize = TASK_ROWS / LANES;

/// How the columns of a matrix lie apart from it: each as the elements of all its rows, and where elements are small
/// numbers with a scale for each block of a row, these scales by themselves.
///
/// ```text
/// a column:   element of row 0, row 1, ...           Q4_0: of 32 rows the low nibbles are the first 16
/// scales:     columns 0 to 31: of row 0, row 1, ...; columns 32 to 63: ...     (binary16)
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ColumnLayout {
    dtype: DType,
    rows: usize,
    cols: usize,
}

/// An element or a scale of a matrix that is infinite or no number: what it adds to a zero is no zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("row {row} has an element that is not finite")]
pub struct NotFinite {
    /// Where.
    pub row: usize,
}

impl ColumnLayout {
    /// Ranges of columns that are multiplied one after another begin at multiples of this.
    pub const SECTION: usize = SECTION;

    /// That of a matrix of this type and shape; `None` for types whose blocks have more than a scale, and for rows
    /// that are not whole groups of 32.
    #[must_use]
    pub fn new(dtype: DType, rows: usize, cols: usize) -> Option<Self> {
        let known = matches!(
            dtype,
            DType::F32 | DType::F16 | DType::Bf16 | DType::Q8_0 | DType::Q4_0
        );
        let whole = rows > 0 && rows.is_multiple_of(GROUP) && cols > 0;
        let fits = dtype.row_bytes(cols)?.checked_mul(rows).is_some();
        (known && whole && fits).then_some(Self { dtype, rows, cols })
    }

    /// The type of the matrix.
    #[must_use]
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Its rows: elements of a column.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Its columns.
    #[must_use]
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes of a column.
    #[must_use]
    pub fn column_bytes(&self) -> usize {
        self.rows / GROUP * self.group_bytes()
    }

    /// Bytes of all scales.
    #[must_use]
    pub fn scale_bytes(&self) -> usize {
        match self.dtype.is_quantized() {
            true => self.cols / BLOCK * self.rows * 2,
            false => 0,
        }
    }

    /// Bytes that 32 rows have of a column.
    fn group_bytes(&self) -> usize {
        match self.dtype {
            DType::F32 => F32::BYTES,
            DType::F16 => F16::BYTES,
            DType::Bf16 => Bf16::BYTES,
            DType::Q8_0 => Q8::BYTES,
            _ => Q4::BYTES,
        }
    }

    /// Writes some columns of `matrix` one after another.
    ///
    /// # Errors
    /// [`NotFinite`].
    ///
    /// # Panics
    /// When the matrix or `out` is not of this layout, or the columns are not the matrix's.
    pub fn pack(
        &self,
        matrix: &Matrix<'_>,
        columns: Range<usize>,
        out: &mut [u8],
    ) -> Result<(), NotFinite> {
        self.check(matrix);
        let bytes = self.column_bytes();
        assert!(
            columns.end <= self.cols && out.len() == columns.len() * bytes,
            "room for columns of the matrix"
        );
        let group_bytes = self.group_bytes();
        for group in 0..self.rows / GROUP {
            let rows: [&[u8]; GROUP] = std::array::from_fn(|row| matrix.row(group * GROUP + row));
            for (column, out) in columns.clone().zip(out.chunks_exact_mut(bytes)) {
                let out = &mut out[group * group_bytes..][..group_bytes];
                let packed = self.pack_group(&rows, column, out);
                packed.map_err(|row| NotFinite {
                    row: group * GROUP + row,
                })?;
            }
        }
        Ok(())
    }

    /// The elements that 32 rows have in a column; the number of one that is not finite.
    fn pack_group(
        &self,
        rows: &[&[u8]; GROUP],
        column: usize,
        out: &mut [u8],
    ) -> Result<(), usize> {
        // The exponent's bits, of which all are set where a number is not finite.
        let exponent: u32 = match self.dtype {
            DType::F32 => 0x7F80_0000,
            DType::F16 => 0x7C00,
            DType::Bf16 => 0x7F80,
            _ => 0,
        };
        let (block, within) = (column / BLOCK, column % BLOCK);
        match self.dtype {
            DType::F32 | DType::F16 | DType::Bf16 => {
                let size = self.dtype.block_bytes();
                for (number, (row, out)) in rows.iter().zip(out.chunks_exact_mut(size)).enumerate()
                {
                    let element = &row[column * size..][..size];
                    let mut bits = [0; 4];
                    bits[..size].copy_from_slice(element);
                    if u32::from_le_bytes(bits) & exponent == exponent {
                        return Err(number);
                    }
                    out.copy_from_slice(element);
                }
            }
            DType::Q8_0 => {
                for (row, out) in rows.iter().zip(out) {
                    *out = row[block * DType::Q8_0.block_bytes() + 2 + within];
                }
            }
            _ => {
                let nibble = |row: &[u8]| {
                    let byte = row[block * DType::Q4_0.block_bytes() + 2 + within % LANES];
                    byte >> (within / LANES * 4) & 15
                };
                for (index, out) in out.iter_mut().enumerate() {
                    *out = nibble(rows[index]) | nibble(rows[index + LANES]) << 4;
                }
            }
        }
        Ok(())
    }

    /// Writes all scales of `matrix`.
    ///
    /// # Errors
    /// [`NotFinite`].
    ///
    /// # Panics
    /// When the matrix or `out` is not of this layout.
    pub fn pack_scales(&self, matrix: &Matrix<'_>, out: &mut [u8]) -> Result<(), NotFinite> {
        self.check(matrix);
        assert_eq!(out.len(), self.scale_bytes(), "room for all scales");
        if !self.dtype.is_quantized() {
            return Ok(());
        }
        let block_bytes = self.dtype.block_bytes();
        for row in 0..self.rows {
            let blocks = matrix.row(row).chunks_exact(block_bytes);
            for (block, out) in blocks.zip(out.chunks_exact_mut(2 * self.rows)) {
                let scale = [block[0], block[1]];
                if u16::from_le_bytes(scale) & 0x7C00 == 0x7C00 {
                    return Err(NotFinite { row });
                }
                out[2 * row..][..2].copy_from_slice(&scale);
            }
        }
        Ok(())
    }

    fn check(&self, matrix: &Matrix<'_>) {
        let of = (matrix.dtype(), matrix.rows(), matrix.cols());
        assert_eq!(
            of,
            (self.dtype, self.rows, self.cols),
            "a matrix of this layout"
        );
    }
}

/// Columns of a matrix that are in memory.
pub struct Columns<'a, F> {
    /// How they lie.
    pub layout: ColumnLayout,
    /// All scales of the matrix.
    pub scales: &'a [u8],
    /// The columns of the matrix that are multiplied with: from a multiple of [`ColumnLayout::SECTION`] to another, or to
    /// the last.
    pub range: Range<usize>,
    /// Those of them that are there, in ascending order: all in which an activation is not zero.
    pub numbers: &'a [u32],
    /// The bytes of each, by its place in `numbers`.
    pub bytes: F,
}

/// Products of some rows of a matrix with all tokens.
pub(crate) struct Product<'a, 'b, F> {
    pub(crate) columns: &'a Columns<'a, F>,
    /// `[tokens, columns of the matrix]`
    pub(crate) x: &'a [f32],
    pub(crate) out: Block<'b, f32>,
}

impl<'c, F: Fn(usize) -> &'c [u8]> Kernel for Product<'_, '_, F> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.columns.layout.dtype {
            DType::F32 => self.float::<S, F32>(s),
            DType::F16 => self.float::<S, F16>(s),
            DType::Bf16 => self.float::<S, Bf16>(s),
            DType::Q8_0 => self.quantized::<S, Q8>(s),
            _ => self.quantized::<S, Q4>(s),
        }
    }
}

/// Sums of a task's rows.
type Sums = [[f32; LANES]; TASK_VECTORS];

impl<'c, F: Fn(usize) -> &'c [u8]> Product<'_, '_, F> {
    #[inline(always)]
    fn float<S: Simd, E: Elements>(mut self, s: S) {
        let Columns { layout, range, .. } = self.columns;
        let rows = self.out.cols();
        for token in self.out.rows() {
            let x = &self.x[token * layout.cols..][..layout.cols];
            let out = self.out.row(token).as_chunks_mut::<LANES>().0;
            let mut next = 0;
            for start in range.clone().step_by(SECTION) {
                let mut partial: [Sums; PARTIAL] = [[[0.0; LANES]; TASK_VECTORS]; PARTIAL];
                while let Some((at, column)) = self.columns.next(&mut next, start + SECTION) {
                    if x[column] != 0.0 {
                        let bytes = self.columns.part::<E>(at, &rows);
                        let sums = &mut partial[column % PARTIAL];
                        add::<S, E>(s, bytes, x[column], sums);
                    }
                }
                for (vector, out) in out.iter_mut().enumerate() {
                    let p: [S::F; PARTIAL] = each!(s.splat(0.0), |l| s.load(&partial[l][vector]));
                    let pairs: [S::F; 4] = each!(p[0], |l| s.add(p[l], p[l + 4]));
                    let even = s.add(pairs[0], pairs[2]);
                    let odd = s.add(pairs[1], pairs[3]);
                    let sum = s.add(even, odd);
                    let total = match start {
                        0 => sum,
                        _ => s.add(s.load(out), sum),
                    };
                    s.store(total, out);
                }
            }
        }
    }

    #[inline(always)]
    fn quantized<S: Simd, E: Elements>(mut self, s: S) {
        let Columns { layout, range, .. } = self.columns;
        let rows = self.out.cols();
        for token in self.out.rows() {
            let x = &self.x[token * layout.cols..][..layout.cols];
            let out = self.out.row(token).as_chunks_mut::<LANES>().0;
            let mut next = 0;
            for start in range.clone().step_by(BLOCK) {
                let block = x[start..].first_chunk::<BLOCK>().expect("whole blocks");
                let mut sums: Sums = [[0.0; LANES]; TASK_VECTORS];
                // Of blocks without a column all terms are zero.
                let mut quantized = None;
                while let Some((at, column)) = self.columns.next(&mut next, start + BLOCK) {
                    if x[column] != 0.0 {
                        let block = match &quantized {
                            Some(block) => block,
                            None => quantized.insert(quantize_block(s, block)),
                        };
                        let within = column % BLOCK;
                        let unit = block.q[within / 4].to_le_bytes()[within % 4].cast_signed();
                        let bytes = self.columns.part::<E>(at, &rows);
                        // Sums of 32 products of bytes are whole numbers that an f32 holds.
                        add::<S, E>(s, bytes, f32::from(unit), &mut sums);
                    }
                }
                let scales = self.columns.scales[2 * (start / BLOCK * layout.rows + rows.start)..]
                    .as_chunks::<{ 2 * LANES }>()
                    .0;
                let unit = s.splat(match &quantized {
                    Some(block) => block.scale,
                    None => 0.0,
                });
                for (vector, out) in out.iter_mut().enumerate() {
                    let before = match start {
                        0 => s.splat(0.0),
                        _ => s.load(out),
                    };
                    let dot = s.load(&sums[vector]);
                    let term = s.mul(dot, s.load_f16(&scales[vector]));
                    s.store(s.fused(term, unit, before), out);
                }
            }
        }
    }
}

/// Adds the products of some rows' elements in a column with a number.
#[inline(always)]
fn add<S: Simd, E: Elements>(s: S, bytes: &[u8], x: f32, sums: &mut Sums) {
    let x = s.splat(x);
    let groups = bytes.chunks_exact(E::BYTES);
    for (bytes, sums) in groups.zip(sums.as_chunks_mut::<2>().0) {
        let [low, high] = E::load(s, bytes);
        s.store(s.fma(low, x, s.load(&sums[0])), &mut sums[0]);
        s.store(s.fma(high, x, s.load(&sums[1])), &mut sums[1]);
    }
}

impl<'c, F: Fn(usize) -> &'c [u8]> Columns<'_, F> {
    /// The next column that is there, if it is before `end`: its place among them, and its number.
    #[inline(always)]
    fn next(&self, next: &mut usize, end: usize) -> Option<(usize, usize)> {
        let column = *self.numbers.get(*next)? as usize;
        (column < end).then(|| {
            *next += 1;
            (*next - 1, column)
        })
    }

    /// What some rows have of a column.
    #[inline(always)]
    fn part<E: Elements>(&self, at: usize, rows: &Range<usize>) -> &'c [u8] {
        &(self.bytes)(at)[rows.start / GROUP * E::BYTES..rows.end / GROUP * E::BYTES]
    }
}

/// A type of elements, of 32 rows at a time.
trait Elements {
    /// Bytes of 32.
    const BYTES: usize;

    /// The first sixteen and the others.
    fn load<S: Simd>(s: S, bytes: &[u8]) -> [S::F; 2];
}

macro_rules! elements {
    ($name:ident, $bytes:literal, |$s:ident, $half:ident| $load:expr) => {
        struct $name;

        impl Elements for $name {
            const BYTES: usize = 2 * $bytes;

            #[inline(always)]
            fn load<S: Simd>($s: S, bytes: &[u8]) -> [S::F; 2] {
                let halves = bytes.as_chunks::<$bytes>().0;
                let $half = &halves[0];
                let low = $load;
                let $half = &halves[1];
                [low, $load]
            }
        }
    };
}

elements!(F32, 64, |s, half| s.load_f32_bytes(half));
elements!(F16, 32, |s, half| s.load_f16(half));
elements!(Bf16, 32, |s, half| s.load_bf16(half));
elements!(Q8, 16, |s, half| s.load_i8(half));

struct Q4;

impl Elements for Q4 {
    const BYTES: usize = 16;

    #[inline(always)]
    fn load<S: Simd>(s: S, bytes: &[u8]) -> [S::F; 2] {
        s.load_named(&CENTRED, bytes.first_chunk().expect("sixteen bytes"))
    }
}
