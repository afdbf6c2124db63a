//! Storage types of weight matrices, with the block layouts of the GGUF file format.
//!
//! A row is a whole number of blocks. The layouts are those of `ggml-common.h`; all integers and
//! floats are little-endian.

use std::fmt;
use std::str::FromStr;

/// How the weights of a [`Matrix`](crate::Matrix) are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// The upper half of a binary32.
    Bf16,
    /// 32 weights: `d: f16`, `q: [i8; 32]`; weight `d * q`.
    Q8_0,
    /// 32 weights: `d: f16`, 32 nibbles; weight `d * (q - 8)`.
    Q4_0,
    /// 32 weights: `d: f16`, `m: f16`, 32 nibbles; weight `d * q + m`.
    Q4_1,
    /// 32 weights: `d: f16`, 32 fifth bits, 32 nibbles; weight `d * (q - 16)`.
    Q5_0,
    /// 32 weights: `d: f16`, `m: f16`, 32 fifth bits, 32 nibbles; weight `d * q + m`.
    Q5_1,
    /// 256 weights in 8 sub-blocks with 6-bit scales and minima and 4-bit weights.
    Q4K,
    /// 256 weights in 8 sub-blocks with 6-bit scales and minima and 5-bit weights.
    Q5K,
    /// 256 weights in 16 sub-blocks with 8-bit scales and 6-bit weights.
    Q6K,
    /// 32 weights: `d: f16`, 32 nibbles; weight `d * TABLE[q]`, of sixteen levels that are closer
    /// near 0.
    Iq4Nl,
    /// 256 weights in 8 sub-blocks with 6-bit scales and the levels of [`DType::Iq4Nl`].
    Iq4Xs,
    /// 32 weights: an exponent `e: u8`, 32 nibbles of which each is a float of 4 bits (E2M1); weight
    /// `2^(e - 127) * float`. The OCP microscaling format.
    Mxfp4,
    /// 256 weights in 16 sub-blocks with 4-bit scales and minima and 2-bit weights.
    Q2K,
    /// 256 weights in 16 sub-blocks with 6-bit scales and 3-bit weights.
    Q3K,
    /// 256 weights of -1, 0 or 1, five to a byte, and a scale.
    Tq1_0,
    /// 256 weights of -1, 0 or 1 in 2 bits, and a scale.
    Tq2_0,
    /// 256 weights in 8 sub-blocks with 4-bit scales: points of four of 512, and signs.
    Iq3S,
    /// 256 weights in 8 sub-blocks with 4-bit scales: points of four of 256, and signs.
    Iq3Xxs,
    /// 256 weights in 16 sub-blocks with 4-bit scales: points of eight of 1024, and signs.
    Iq2S,
    /// 256 weights in 16 sub-blocks with 4-bit scales: points of eight of 512, and signs.
    Iq2Xs,
    /// 256 weights in 8 sub-blocks with 4-bit scales: points of eight of 256, and signs.
    Iq2Xxs,
}

impl DType {
    /// Every storage type, in declaration order.
    pub const ALL: [DType; 23] = [
        DType::F32,
        DType::F16,
        DType::Bf16,
        DType::Q8_0,
        DType::Q4_0,
        DType::Q4_1,
        DType::Q5_0,
        DType::Q5_1,
        DType::Q4K,
        DType::Q5K,
        DType::Q6K,
        DType::Iq4Nl,
        DType::Iq4Xs,
        DType::Mxfp4,
        DType::Q2K,
        DType::Q3K,
        DType::Tq1_0,
        DType::Tq2_0,
        DType::Iq3S,
        DType::Iq3Xxs,
        DType::Iq2S,
        DType::Iq2Xs,
        DType::Iq2Xxs,
    ];

    /// Weights per block.
    pub const fn block_len(self) -> usize {
        match self {
            DType::F32 | DType::F16 | DType::Bf16 => 1,
            DType::Q8_0 | DType::Q4_0 | DType::Q4_1 | DType::Q5_0 | DType::Q5_1 => 32,
            DType::Iq4Nl | DType::Mxfp4 => 32,
            DType::Q2K | DType::Q3K | DType::Q4K | DType::Q5K | DType::Q6K => 256,
            DType::Iq4Xs | DType::Tq1_0 | DType::Tq2_0 => 256,
            DType::Iq3S | DType::Iq3Xxs => 256,
            DType::Iq2S | DType::Iq2Xs | DType::Iq2Xxs => 256,
        }
    }

    /// Bytes per block.
    pub const fn block_bytes(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::F16 | DType::Bf16 => 2,
            DType::Q8_0 => 34,
            DType::Q4_0 => 18,
            DType::Q4_1 => 20,
            DType::Q5_0 => 22,
            DType::Q5_1 => 24,
            DType::Q4K => 144,
            DType::Q5K => 176,
            DType::Q6K => 210,
            DType::Iq4Nl => 18,
            DType::Iq4Xs => 136,
            DType::Mxfp4 => 17,
            DType::Q2K => 84,
            DType::Q3K => 110,
            DType::Tq1_0 => 54,
            DType::Tq2_0 => 66,
            DType::Iq3S => 110,
            DType::Iq3Xxs => 98,
            DType::Iq2S => 82,
            DType::Iq2Xs => 74,
            DType::Iq2Xxs => 66,
        }
    }

    /// Bytes of a row of `cols` weights, or `None` if that is no whole number of blocks or does
    /// not fit in memory.
    pub const fn row_bytes(self, cols: usize) -> Option<usize> {
        if !cols.is_multiple_of(self.block_len()) {
            return None;
        }
        (cols / self.block_len()).checked_mul(self.block_bytes())
    }

    /// Whether the weights are small numbers with block scales.
    pub const fn is_quantized(self) -> bool {
        self.block_len() > 1
    }

    /// The name used on the command line and in reports, such as `q8_0` or `q4_k`.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::Bf16 => "bf16",
            DType::Q8_0 => "q8_0",
            DType::Q4_0 => "q4_0",
            DType::Q4_1 => "q4_1",
            DType::Q5_0 => "q5_0",
            DType::Q5_1 => "q5_1",
            DType::Q4K => "q4_k",
            DType::Q5K => "q5_k",
            DType::Q6K => "q6_k",
            DType::Iq4Nl => "iq4_nl",
            DType::Iq4Xs => "iq4_xs",
            DType::Mxfp4 => "mxfp4",
            DType::Q2K => "q2_k",
            DType::Q3K => "q3_k",
            DType::Tq1_0 => "tq1_0",
            DType::Tq2_0 => "tq2_0",
            DType::Iq3S => "iq3_s",
            DType::Iq3Xxs => "iq3_xxs",
            DType::Iq2S => "iq2_s",
            DType::Iq2Xs => "iq2_xs",
            DType::Iq2Xxs => "iq2_xxs",
        }
    }
}

impl DType {
    /// The names of all types, in declaration order.
    pub fn names() -> [&'static str; Self::ALL.len()] {
        Self::ALL.map(Self::name)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A name that is no storage type.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown weight type `{0}`; use {all}", all = DType::names().join(", "))]
pub struct UnknownDType(pub String);

impl FromStr for DType {
    type Err = UnknownDType;

    fn from_str(name: &str) -> Result<Self, UnknownDType> {
        DType::ALL
            .into_iter()
            .find(|dtype| dtype.name().eq_ignore_ascii_case(name))
            .ok_or_else(|| UnknownDType(name.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_unknown_ones_are_refused() {
        for dtype in DType::ALL {
            assert_eq!(dtype.name().parse(), Ok(dtype));
            assert_eq!(dtype.name().to_uppercase().parse(), Ok(dtype));
        }
        let error = "q4_x".parse::<DType>().expect_err("no type").to_string();
        assert!(error.contains("q4_x") && error.contains("mxfp4"), "{error}");
    }

    #[test]
    fn a_row_is_whole_blocks_and_fits_in_memory() {
        assert_eq!(DType::Q8_0.row_bytes(1024), Some(32 * 34));
        assert_eq!(DType::Q8_0.row_bytes(1000), None);
        assert_eq!(DType::Q6K.row_bytes(512), Some(420));
        assert_eq!(DType::F32.row_bytes(usize::MAX), None);
    }
}
