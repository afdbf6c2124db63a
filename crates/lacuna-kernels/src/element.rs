//! How the elements of a cached row are stored.

use std::fmt;
use std::num::NonZeroUsize;
use std::str::FromStr;

use crate::elementwise::hadamard::block_len;

/// How the elements of a cached row are stored. Blocks have the layouts of the GGUF file format;
/// everything is little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ElementType {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// The upper half of a binary32.
    Bf16,
    /// 32 elements: `d: f16`, `q: [i8; 32]`; element `d * q`.
    Q8_0,
    /// 32 elements: `d: f16`, 32 nibbles, `i` and `i + 16` in one byte; element `d * (q - 8)`.
    Q4_0,
    /// 32 elements: `d: f16`, 32 nibbles like those of [`ElementType::Q4_0`]; element `d * level[q]`, of the levels of
    /// [`DType::Iq4Nl`](crate::DType::Iq4Nl), which lie closer where elements are small and many.
    Iq4Nl,
}

impl ElementType {
    /// Every element type, in declaration order.
    pub const ALL: [ElementType; 6] = [
        ElementType::F32,
        ElementType::F16,
        ElementType::Bf16,
        ElementType::Q8_0,
        ElementType::Q4_0,
        ElementType::Iq4Nl,
    ];

    /// Elements per block; a head is whole blocks.
    pub const fn block_len(self) -> usize {
        match self {
            ElementType::F32 | ElementType::F16 | ElementType::Bf16 => 1,
            ElementType::Q8_0 | ElementType::Q4_0 | ElementType::Iq4Nl => 32,
        }
    }

    /// Bytes per block.
    pub const fn block_bytes(self) -> usize {
        match self {
            ElementType::F32 => 4,
            ElementType::F16 | ElementType::Bf16 => 2,
            ElementType::Q8_0 => 34,
            ElementType::Q4_0 | ElementType::Iq4Nl => 18,
        }
    }

    /// Whether elements are whole multiples of a unit of their block: what is multiplied with keys of them is summed in integers.
    pub const fn is_in_units(self) -> bool {
        self.block_len() > 1
    }

    /// Bytes of `width` consecutive elements; a part of a block takes a whole one.
    pub const fn bytes(self, width: usize) -> usize {
        width.div_ceil(self.block_len()) * self.block_bytes()
    }

    /// Whether heads of `head_dim` elements can be stored.
    ///
    /// # Errors
    /// [`HeadDimError`] when they are no whole number of blocks.
    pub const fn check_head_dim(self, head_dim: usize) -> Result<(), HeadDimError> {
        if head_dim.is_multiple_of(self.block_len()) {
            Ok(())
        } else {
            Err(HeadDimError {
                element: self,
                head_dim,
            })
        }
    }

    /// Elements of the blocks in which heads are transformed by [`Cpu::hadamard`](crate::Cpu::hadamard) before they are
    /// stored, or `None` where they are stored as they are; `dims` are the sizes of the heads, or of parts of heads,
    /// that are read alike.
    ///
    /// Elements of one block have one scale, so a channel that is large for all tokens, as keys have some, leaves the
    /// others few codes. The largest power of two that divides all sizes is what can be transformed back.
    pub fn rotation(self, dims: &[usize]) -> Option<NonZeroUsize> {
        match self {
            ElementType::F32 | ElementType::F16 | ElementType::Bf16 => None,
            ElementType::Q8_0 | ElementType::Q4_0 | ElementType::Iq4Nl => {
                NonZeroUsize::new(block_len(dims))
            }
        }
    }

    /// Whether keys are to be smoothed before they are stored: elements with few codes are rounded far enough to be felt.
    pub const fn gains_from_smoothing(self) -> bool {
        match self {
            ElementType::F32 | ElementType::F16 | ElementType::Bf16 | ElementType::Q8_0 => false,
            ElementType::Q4_0 | ElementType::Iq4Nl => true,
        }
    }

    /// The name used on the command line and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            ElementType::F32 => "f32",
            ElementType::F16 => "f16",
            ElementType::Bf16 => "bf16",
            ElementType::Q8_0 => "q8_0",
            ElementType::Q4_0 => "q4_0",
            ElementType::Iq4Nl => "iq4_nl",
        }
    }
}

impl fmt::Display for ElementType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Heads that an element type cannot hold, because they are no whole number of its blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{element} stores blocks of {} elements, which heads of {head_dim} are no multiple of; use f16, bf16 or f32",
    element.block_len()
)]
pub struct HeadDimError {
    /// The element type.
    pub element: ElementType,
    /// Elements per head.
    pub head_dim: usize,
}

/// A name that is no element type.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown element type `{0}`; use f16, f32, bf16, q8_0, iq4_nl or q4_0")]
pub struct UnknownElementType(pub String);

impl FromStr for ElementType {
    type Err = UnknownElementType;

    fn from_str(name: &str) -> Result<Self, UnknownElementType> {
        ElementType::ALL
            .into_iter()
            .find(|element| element.name().eq_ignore_ascii_case(name))
            .ok_or_else(|| UnknownElementType(name.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_unknown_ones_are_refused() {
        for element in ElementType::ALL {
            assert_eq!(element.name().parse(), Ok(element));
            assert_eq!(element.to_string().to_uppercase().parse(), Ok(element));
        }
        let error = "q5_0".parse::<ElementType>().expect_err("not a cache type");
        for element in ElementType::ALL {
            assert!(error.to_string().contains(element.name()));
        }
    }

    #[test]
    fn heads_are_whole_blocks() {
        assert_eq!(ElementType::Q8_0.bytes(128), 4 * 34);
        assert_eq!(ElementType::Q4_0.bytes(33), 2 * 18);
        assert_eq!(ElementType::Bf16.bytes(20), 40);
        assert_eq!(ElementType::Q4_0.check_head_dim(96), Ok(()));
        let error = ElementType::Q8_0
            .check_head_dim(80)
            .expect_err("80 is 2.5 blocks");
        assert_eq!((error.element, error.head_dim), (ElementType::Q8_0, 80));
        assert_eq!(ElementType::F16.check_head_dim(20), Ok(()));
    }
}
