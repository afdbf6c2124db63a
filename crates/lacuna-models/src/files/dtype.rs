//! The element types a weight can have, and how many bytes they take.
//!
//! The same names as the arithmetic crate's type, so that one `use` swaps it in.

use std::fmt;
use std::str::FromStr;

/// How the elements of a tensor are stored.
///
/// Quantized types store rows as blocks of [`block_len`](Self::block_len) elements, so a row's length
/// must be a multiple of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DType {
    /// 32-bit floating point.
    F32,
    /// 16-bit IEEE floating point.
    F16,
    /// The upper half of a 32-bit floating-point number.
    Bf16,
    /// 8-bit integers with one scale per 32.
    Q8_0,
    /// 4-bit integers with one scale per 32.
    Q4_0,
    /// 4-bit integers with a scale and a minimum per 32.
    Q4_1,
    /// 5-bit integers with one scale per 32.
    Q5_0,
    /// 5-bit integers with a scale and a minimum per 32.
    Q5_1,
    /// 4-bit integers, blocks of 256 with 6-bit scales and minima per 32.
    Q4K,
    /// 5-bit integers, blocks of 256 with 6-bit scales and minima per 32.
    Q5K,
    /// 6-bit integers, blocks of 256 with 8-bit scales per 16.
    Q6K,
}

impl DType {
    /// Every type, in declaration order.
    pub const ALL: [Self; 11] = [
        Self::F32,
        Self::F16,
        Self::Bf16,
        Self::Q8_0,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
    ];

    /// Elements per block: 1 for floating point.
    pub const fn block_len(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 1,
            Self::Q8_0 | Self::Q4_0 | Self::Q4_1 | Self::Q5_0 | Self::Q5_1 => 32,
            Self::Q4K | Self::Q5K | Self::Q6K => 256,
        }
    }

    /// Bytes per block.
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Q8_0 => 34,
            Self::Q4_0 => 18,
            Self::Q4_1 => 20,
            Self::Q5_0 => 22,
            Self::Q5_1 => 24,
            Self::Q4K => 144,
            Self::Q5K => 176,
            Self::Q6K => 210,
        }
    }

    /// Bytes of a row of `cols` elements, or `None` when that is not a whole number of blocks or
    /// does not fit in memory.
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        let whole = cols.is_multiple_of(self.block_len());
        whole
            .then(|| (cols / self.block_len()).checked_mul(self.block_bytes()))
            .flatten()
    }

    /// The usual lower-case name, such as `q8_0`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Q8_0 => "q8_0",
            Self::Q4_0 => "q4_0",
            Self::Q4_1 => "q4_1",
            Self::Q5_0 => "q5_0",
            Self::Q5_1 => "q5_1",
            Self::Q4K => "q4_k",
            Self::Q5K => "q5_k",
            Self::Q6K => "q6_k",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A name that is no element type.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{name}` is not an element type; use one of f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1, q4_k, q5_k, q6_k"
)]
pub struct UnknownDType {
    /// What was given.
    pub name: String,
}

impl FromStr for DType {
    type Err = UnknownDType;

    fn from_str(name: &str) -> Result<Self, UnknownDType> {
        let found = Self::ALL
            .into_iter()
            .find(|dtype| dtype.name().eq_ignore_ascii_case(name));
        found.ok_or_else(|| UnknownDType {
            name: name.to_owned(),
        })
    }
}
