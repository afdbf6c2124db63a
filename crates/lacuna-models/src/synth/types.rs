//! Which storage type each matrix of a synthetic model has.

use std::fmt;
use std::str::FromStr;

use crate::layers::{PATCHES, PLACES, PROJECTION};
use crate::program::TensorName;
use crate::quantize::recipe::{is_finer, of_smaller_blocks};
use lacuna_files::DType;

/// The storage types of a model's matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Types {
    /// One type for all.
    Uniform(DType),
    /// The mixture that GGUF files called `Q4_K_M` have: `Q4_K`, and `Q6_K` where errors cost most:
    /// the output, and the values and the second feed-forward matrix of half of the layers.
    Q4KM,
}

/// The storage types within one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LayerTypes {
    /// Of most matrices.
    pub(super) most: DType,
    /// Of `attn_v` and `ffn_down`.
    pub(super) fine: DType,
}

impl Types {
    /// The name that the command line takes and reports show.
    pub const fn name(self) -> &'static str {
        match self {
            Types::Uniform(dtype) => dtype.name(),
            Types::Q4KM => "q4_k_m",
        }
    }

    /// The type of the embedding table, which may be the output matrix too.
    pub(super) fn embedding(self, is_output: bool) -> DType {
        match self {
            Types::Q4KM if !is_output => DType::Q4K,
            _ => self.output(),
        }
    }

    pub(super) fn output(self) -> DType {
        match self {
            Types::Uniform(dtype) => dtype,
            Types::Q4KM => DType::Q6K,
        }
    }

    /// The types of one of so many layers.
    pub(super) fn layer(self, layer: usize, layers: usize) -> LayerTypes {
        let (most, finest) = match self {
            Types::Uniform(dtype) => (dtype, dtype),
            Types::Q4KM => (DType::Q4K, DType::Q6K),
        };
        let fine = match is_finer(layer, layers) {
            true => finest,
            false => most,
        };
        LayerTypes { most, fine }
    }

    /// The type of one matrix with rows of so many columns, of a model of so many layers whose output
    /// matrix may be its embedding. In a mixture, rows that are no whole blocks have the next finer type of
    /// smaller ones, as llama.cpp does it.
    pub(super) fn of(self, name: TensorName, columns: usize, layers: usize, tied: bool) -> DType {
        let dtype = self.of_part(name, layers, tied);
        match self {
            Types::Q4KM if !columns.is_multiple_of(dtype.block_len()) => of_smaller_blocks(dtype),
            _ => dtype,
        }
    }

    fn of_part(self, name: TensorName, layers: usize, tied: bool) -> DType {
        match (name.layer, name.part) {
            // A router's choices are not left to rounding, and it is small.
            (_, "ffn_gate_inp" | "ffn_gate_inp_shexp") => DType::F32,
            // Of rows of four, one for each residual stream.
            (_, "altup_predict_coef" | "altup_correct_coef") => DType::F32,
            // Of encoders of images, as llama.cpp's converter has it.
            (None, PATCHES | PLACES) => DType::F32,
            (None, PROJECTION) => DType::F16,
            (Some(layer), "attn_v" | "ffn_down" | "ffn_down_exps" | "ffn_down_shexp") => {
                self.layer(layer, layers).fine
            }
            (Some(layer), _) => self.layer(layer, layers).most,
            (None, "output") => self.output(),
            (None, _) => self.embedding(tied),
        }
    }

    /// llama.cpp's number for such a file (`enum llama_ftype`).
    pub(super) fn file_type(self) -> u32 {
        match self {
            Types::Uniform(DType::F32) => 0,
            Types::Uniform(DType::F16) => 1,
            Types::Uniform(DType::Q4_0) => 2,
            Types::Uniform(DType::Q4_1) => 3,
            Types::Uniform(DType::Q8_0) => 7,
            Types::Uniform(DType::Q5_0) => 8,
            Types::Uniform(DType::Q5_1) => 9,
            Types::Uniform(DType::Q2K) => 10,
            Types::Uniform(DType::Q3K) => 11,
            Types::Uniform(DType::Q4K) => 14,
            Types::Q4KM => 15,
            Types::Uniform(DType::Q5K) => 16,
            Types::Uniform(DType::Q6K) => 18,
            Types::Uniform(DType::Iq2Xxs) => 19,
            Types::Uniform(DType::Iq2Xs) => 20,
            Types::Uniform(DType::Iq3Xxs) => 23,
            Types::Uniform(DType::Iq4Nl) => 25,
            Types::Uniform(DType::Iq3S) => 26,
            Types::Uniform(DType::Iq2S) => 28,
            Types::Uniform(DType::Iq4Xs) => 30,
            Types::Uniform(DType::Bf16) => 32,
            Types::Uniform(DType::Tq1_0) => 36,
            Types::Uniform(DType::Tq2_0) => 37,
            Types::Uniform(DType::Mxfp4) => 38,
        }
    }
}

impl From<DType> for Types {
    fn from(dtype: DType) -> Self {
        Types::Uniform(dtype)
    }
}

impl fmt::Display for Types {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A name that is no storage type and no mixture of them.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown weight type `{0}`; use q4_k_m, {all}", all = DType::names().join(", "))]
pub struct UnknownTypes(pub String);

impl FromStr for Types {
    type Err = UnknownTypes;

    fn from_str(name: &str) -> Result<Self, UnknownTypes> {
        if name.eq_ignore_ascii_case(Types::Q4KM.name()) {
            return Ok(Types::Q4KM);
        }
        let dtype: Result<DType, _> = name.parse();
        dtype
            .map(Types::Uniform)
            .map_err(|_| UnknownTypes(name.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_unknown_ones_are_refused() {
        for types in [Types::Q4KM, Types::Uniform(DType::Q4K)] {
            assert_eq!(types.name().parse(), Ok(types));
            assert_eq!(types.name().to_uppercase().parse(), Ok(types));
        }
        assert!("q4_k_x".parse::<Types>().is_err());
    }

    #[test]
    fn rows_that_are_no_whole_blocks_of_a_mixture_have_smaller_ones() {
        let of = |types: Types, part, columns| {
            let layer = Some(0);
            types.of(TensorName { layer, part }, columns, 8, false)
        };
        assert_eq!(of(Types::Q4KM, "attn_q", 1408), DType::Q5_0);
        assert_eq!(of(Types::Q4KM, "ffn_down_exps", 1408), DType::Q8_0);
        assert_eq!(of(Types::Q4KM, "ffn_down_exps", 1536), DType::Q6K);
        assert_eq!(of(DType::Q4K.into(), "attn_q", 1408), DType::Q4K);
    }

    #[test]
    fn half_of_the_layers_of_a_mixture_are_stored_finer() {
        let fine = |layer: &usize| Types::Q4KM.layer(*layer, 28).fine == DType::Q6K;
        let found: Vec<usize> = (0..28).filter(fine).collect();
        assert_eq!(found, [0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 24, 25, 26, 27]);
        assert_eq!(Types::Q4KM.layer(0, 1).most, DType::Q4K);
        assert_eq!(
            Types::from(DType::Q8_0).layer(3, 28).fine,
            DType::Q8_0,
            "one type is one type"
        );
    }
}
