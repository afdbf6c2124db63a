//! Which type each tensor of a model gets: the recipes that GGUF files are called after.
//!
//! Recipes are those of llama.cpp (`llama-quant.cpp`), so that a file called `Q4_K_M` is what people
//! expect of one: most matrices in one type, and those in which errors cost most in a finer one.

use std::fmt;
use std::str::FromStr;

use lacuna_files::DType;

/// What a file is quantized to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Recipe {
    /// Every matrix as 32-bit floats.
    F32,
    /// Every matrix as 16-bit floats.
    F16,
    /// Every matrix as 16-bit floats with the range of 32-bit ones.
    Bf16,
    /// 8.5 bits a weight.
    Q8_0,
    /// 4.5 bits a weight, one scale for 32.
    Q4_0,
    /// 5 bits a weight, a scale and an offset for 32.
    Q4_1,
    /// 5.5 bits a weight, one scale for 32.
    Q5_0,
    /// 6 bits a weight, a scale and an offset for 32.
    Q5_1,
    /// 4.5 bits a weight, levels that are closer near 0.
    Iq4Nl,
    /// 4.25 bits a weight, levels that are closer near 0.
    Iq4Xs,
    /// Experts as 4-bit floats with powers of two as scales and the rest as `Q8_0`; of a model without
    /// experts, every matrix but the embedding and the output.
    Mxfp4,
    /// 2.6 bits a weight, and finer ones where errors cost most.
    Q2K,
    /// 3.4 bits a weight.
    Q3KS,
    /// 3.4 bits a weight, and finer ones where errors cost most.
    Q3KM,
    /// The same, and finer still.
    Q3KL,
    /// 4.5 bits a weight, and finer ones in the first layers.
    Q4KS,
    /// 4.5 bits a weight, and finer ones where errors cost most.
    Q4KM,
    /// 5.5 bits a weight.
    Q5KS,
    /// 5.5 bits a weight, and finer ones where errors cost most.
    Q5KM,
    /// 6.6 bits a weight.
    Q6K,
    /// 1.7 bits a weight, for models that were trained with weights of -1, 0 and 1.
    Tq1_0,
    /// 2.1 bits a weight, for the same models; faster.
    Tq2_0,
}

/// Every recipe: its name, the type of most matrices, and llama.cpp's number for it (`enum llama_ftype`).
const ALL: [(Recipe, &str, DType, u32); 22] = [
    (Recipe::F32, "f32", DType::F32, 0),
    (Recipe::F16, "f16", DType::F16, 1),
    (Recipe::Bf16, "bf16", DType::Bf16, 32),
    (Recipe::Q8_0, "q8_0", DType::Q8_0, 7),
    (Recipe::Q6K, "q6_k", DType::Q6K, 18),
    (Recipe::Q5KM, "q5_k_m", DType::Q5K, 17),
    (Recipe::Q5KS, "q5_k_s", DType::Q5K, 16),
    (Recipe::Q4KM, "q4_k_m", DType::Q4K, 15),
    (Recipe::Q4KS, "q4_k_s", DType::Q4K, 14),
    (Recipe::Q3KL, "q3_k_l", DType::Q3K, 13),
    (Recipe::Q3KM, "q3_k_m", DType::Q3K, 12),
    (Recipe::Q3KS, "q3_k_s", DType::Q3K, 11),
    (Recipe::Q2K, "q2_k", DType::Q2K, 10),
    (Recipe::Q5_1, "q5_1", DType::Q5_1, 9),
    (Recipe::Q5_0, "q5_0", DType::Q5_0, 8),
    (Recipe::Q4_1, "q4_1", DType::Q4_1, 3),
    (Recipe::Q4_0, "q4_0", DType::Q4_0, 2),
    (Recipe::Iq4Nl, "iq4_nl", DType::Iq4Nl, 25),
    (Recipe::Iq4Xs, "iq4_xs", DType::Iq4Xs, 30),
    (Recipe::Mxfp4, "mxfp4", DType::Mxfp4, 38),
    (Recipe::Tq1_0, "tq1_0", DType::Tq1_0, 36),
    (Recipe::Tq2_0, "tq2_0", DType::Tq2_0, 37),
];

/// What recipes ask about a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Model {
    /// Decoder layers.
    pub(super) layers: usize,
    /// Layers that have values of their own.
    pub(super) value_layers: usize,
    /// Query heads to one head of keys and values.
    pub(super) group: usize,
    /// Experts of a layer; 0 for a dense model.
    pub(super) experts: usize,
    /// Whether the embedding table is the output matrix.
    pub(super) tied: bool,
}

/// One of a model's matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Matrix<'a> {
    /// Its name in GGUF without layer and suffix, such as `attn_v`.
    pub(super) part: &'a str,
    /// Its layer.
    pub(super) layer: usize,
    /// How many layers before its own have values of their own.
    pub(super) value_layer: usize,
    /// Whether there is one for each expert.
    pub(super) stacked: bool,
    /// Elements of a row.
    pub(super) columns: usize,
}

/// What recipes tell apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Output,
    Embedding,
    Values,
    Keys,
    AttentionOutput,
    Down,
    Other,
}

impl Recipe {
    /// The name that the command line takes and reports show.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.entry().1
    }

    /// The names of all recipes, the finest first.
    pub fn names() -> impl Iterator<Item = &'static str> {
        ALL.iter().map(|(_, name, _, _)| *name)
    }

    /// llama.cpp's number for such a file.
    pub(super) fn file_type(self) -> u32 {
        self.entry().3
    }

    fn most(self) -> DType {
        self.entry().2
    }

    fn entry(self) -> &'static (Self, &'static str, DType, u32) {
        let found = ALL.iter().find(|(recipe, ..)| *recipe == self);
        found.expect("the table has every recipe")
    }

    /// The type of a matrix. One whose rows its type cannot hold falls back to a type with smaller blocks.
    pub(super) fn dtype(self, model: &Model, matrix: &Matrix<'_>) -> DType {
        let wanted = self.wanted(model, matrix);
        let fits = |dtype: DType| matrix.columns.is_multiple_of(dtype.block_len());
        if fits(wanted) {
            return wanted;
        }
        let smaller = of_smaller_blocks(wanted);
        if fits(smaller) { smaller } else { DType::F16 }
    }

    fn wanted(self, model: &Model, matrix: &Matrix<'_>) -> DType {
        let most = self.most();
        if !most.is_quantized() {
            return most;
        }
        let role = Role::of(matrix.part);
        if role == Role::Output || (role == Role::Embedding && model.tied) {
            return match most {
                DType::Mxfp4 | DType::Q8_0 => DType::Q8_0,
                _ if !matrix.columns.is_multiple_of(most.block_len()) => DType::Q8_0,
                _ => DType::Q6K,
            };
        }
        match role {
            Role::Embedding => self.of_embedding(),
            _ if self == Self::Mxfp4 => match matrix.stacked || model.experts == 0 {
                true => DType::Mxfp4,
                false => DType::Q8_0,
            },
            Role::Values => self.of_values(model, matrix.value_layer),
            Role::Keys if model.experts == 8 => DType::Q8_0,
            Role::Down => self.of_down(model, matrix.layer),
            Role::AttentionOutput => self.of_attention_output(model),
            _ => most,
        }
    }

    fn of_embedding(self) -> DType {
        match self {
            // Rows are looked up: errors of what was not trained to be ternary would be all there is.
            Self::Tq1_0 | Self::Tq2_0 => DType::Q4K,
            Self::Mxfp4 => DType::Q8_0,
            _ => self.most(),
        }
    }

    fn of_values(self, model: &Model, layer: usize) -> DType {
        // A matrix for eight groups of experts' layers is small beside them.
        if model.experts == 8 {
            return DType::Q8_0;
        }
        let dtype = match self {
            Self::Q2K if model.group >= 4 => DType::Q4K,
            Self::Q2K => DType::Q3K,
            Self::Q3KM if layer < 2 => DType::Q5K,
            Self::Q3KM => DType::Q4K,
            Self::Q3KL => DType::Q5K,
            Self::Iq4Nl | Self::Iq4Xs if model.group >= 4 => DType::Q5K,
            Self::Q4KM | Self::Q5KM if is_finer(layer, model.value_layers) => DType::Q6K,
            Self::Q4KS if layer < 4 => DType::Q5K,
            _ => self.most(),
        };
        // In models of this size eight groups of queries share the values, whose matrix is an eighth of
        // that of queries.
        let is_large = model.layers == 80 && model.group > 1;
        match dtype {
            DType::Q3K | DType::Q4K if is_large => DType::Q5K,
            _ => dtype,
        }
    }

    fn of_down(self, model: &Model, layer: usize) -> DType {
        let layers = model.layers;
        match self {
            Self::Q2K => DType::Q3K,
            Self::Q3KM if layer < layers / 16 => DType::Q5K,
            Self::Q3KM => DType::Q4K,
            Self::Q3KL => DType::Q5K,
            Self::Q4KM | Self::Q5KM if is_finer(layer, layers) => DType::Q6K,
            Self::Q4KS | Self::Iq4Nl | Self::Iq4Xs if layer < layers / 8 => DType::Q5K,
            _ => self.most(),
        }
    }

    fn of_attention_output(self, model: &Model) -> DType {
        let eight = model.experts == 8;
        match self {
            Self::Q2K | Self::Q3KS | Self::Q3KM | Self::Q4KS | Self::Q4KM if eight => DType::Q5K,
            Self::Iq4Nl | Self::Iq4Xs if eight => DType::Q5K,
            Self::Q2K => DType::Q3K,
            Self::Q3KM => DType::Q4K,
            Self::Q3KL if !eight => DType::Q5K,
            _ => self.most(),
        }
    }
}

impl Role {
    fn of(part: &str) -> Self {
        match part {
            "output" => Self::Output,
            "token_embd" | "per_layer_token_embd" => Self::Embedding,
            "attn_v" | "attn_qkv" | "attn_kv_b" => Self::Values,
            "attn_k" => Self::Keys,
            "attn_output" => Self::AttentionOutput,
            part if part.starts_with("ffn_down") => Self::Down,
            _ => Self::Other,
        }
    }
}

/// The type of 32 weights a block that stands for one of 256 where rows are no whole blocks of it.
pub(crate) fn of_smaller_blocks(dtype: DType) -> DType {
    match dtype {
        DType::Iq4Xs => DType::Iq4Nl,
        DType::Q2K | DType::Q3K | DType::Tq1_0 | DType::Tq2_0 => DType::Q4_0,
        DType::Q4K => DType::Q5_0,
        DType::Q5K => DType::Q5_1,
        DType::Q6K => DType::Q8_0,
        other => other,
    }
}

/// Whether one of so many layers is among those that mixtures store finer: the first and the last eighth,
/// and every third between.
pub(crate) fn is_finer(layer: usize, layers: usize) -> bool {
    let eighth = layers / 8;
    let at_an_end = layer < eighth || layer >= 7 * layers / 8;
    at_an_end || (layer - eighth) % 3 == 2
}

impl fmt::Display for Recipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A name that is no recipe, or one of a type that is not made here.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UnknownRecipe {
    /// No recipe is called so.
    #[error("there is no type `{name}` to quantize to; use {}", names())]
    Name {
        /// What was asked for.
        name: String,
    },
    /// The type is known, and good only with knowledge of a model's activations.
    #[error(
        "`{name}` needs to know which weights are used most (an importance matrix), which is not measured \
         here; use q2_k, q3_k_m or iq4_xs"
    )]
    NeedsImportance {
        /// What was asked for.
        name: String,
    },
}

fn names() -> String {
    Recipe::names().collect::<Vec<_>>().join(", ")
}

impl FromStr for Recipe {
    type Err = UnknownRecipe;

    fn from_str(name: &str) -> Result<Self, UnknownRecipe> {
        let lower = name.to_ascii_lowercase();
        let called = match lower.as_str() {
            // What is usual, where people leave out which.
            "q3_k" => "q3_k_m",
            "q4_k" => "q4_k_m",
            "q5_k" => "q5_k_m",
            other => other,
        };
        if let Some((recipe, ..)) = ALL.iter().find(|(_, known, ..)| *known == called) {
            return Ok(*recipe);
        }
        let name = name.to_owned();
        let coarse = ["iq1_", "iq2_", "iq3_"];
        match coarse.iter().any(|start| lower.starts_with(start)) {
            true => Err(UnknownRecipe::NeedsImportance { name }),
            false => Err(UnknownRecipe::Name { name }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DENSE: Model = Model {
        layers: 28,
        value_layers: 28,
        group: 2,
        experts: 0,
        tied: false,
    };

    fn dtype(recipe: Recipe, model: &Model, part: &str, layer: usize, columns: usize) -> DType {
        let matrix = Matrix {
            part,
            layer,
            value_layer: layer,
            stacked: part.ends_with("_exps"),
            columns,
        };
        recipe.dtype(model, &matrix)
    }

    #[test]
    fn names_round_trip_and_others_say_what_to_do() {
        for (recipe, name, ..) in ALL {
            assert_eq!(name.parse(), Ok(recipe));
            assert_eq!(name.to_uppercase().parse(), Ok(recipe));
            assert_eq!(recipe.to_string(), name);
        }
        assert_eq!("Q4_K".parse(), Ok(Recipe::Q4KM));
        let error = |name: &str| name.parse::<Recipe>().expect_err(name).to_string();
        assert!(error("q7_k").contains("q4_k_m"), "{}", error("q7_k"));
        for name in ["iq2_xxs", "IQ1_S", "iq3_s"] {
            assert!(error(name).contains("importance"), "{}", error(name));
        }
    }

    #[test]
    fn numbers_of_recipes_are_distinct() {
        for (recipe, ..) in ALL {
            let same = ALL.iter().filter(|other| other.3 == recipe.file_type());
            assert_eq!(same.count(), 1, "{recipe}");
        }
    }

    #[test]
    fn a_mixture_is_finer_where_errors_cost_most() {
        let of = |part, layer| dtype(Recipe::Q4KM, &DENSE, part, layer, 1024);
        assert_eq!(of("output", 0), DType::Q6K);
        assert_eq!(of("token_embd", 0), DType::Q4K);
        assert_eq!(of("attn_q", 0), DType::Q4K);
        let finer = |part| (0..28).filter(move |layer| of(part, *layer) == DType::Q6K);
        let expected = [0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 24, 25, 26, 27];
        assert!(finer("attn_v").eq(expected), "values");
        assert!(finer("ffn_down").eq(expected), "second matrices");
        let tied = Model {
            tied: true,
            ..DENSE
        };
        assert_eq!(
            dtype(Recipe::Q4KM, &tied, "token_embd", 0, 1024),
            DType::Q6K
        );
        assert_eq!(
            dtype(Recipe::Q8_0, &tied, "token_embd", 0, 1024),
            DType::Q8_0
        );
        assert_eq!(dtype(Recipe::F16, &tied, "token_embd", 0, 1024), DType::F16);
    }

    #[test]
    fn rows_that_a_type_cannot_hold_fall_back_to_smaller_blocks() {
        let of = |recipe, part, columns| dtype(recipe, &DENSE, part, 4, columns);
        assert_eq!(of(Recipe::Q4KM, "attn_q", 576), DType::Q5_0);
        assert_eq!(of(Recipe::Q4KM, "output", 576), DType::Q8_0);
        assert_eq!(of(Recipe::Q5KS, "attn_q", 576), DType::Q5_1);
        assert_eq!(of(Recipe::Q6K, "attn_q", 576), DType::Q8_0);
        assert_eq!(of(Recipe::Iq4Xs, "attn_q", 576), DType::Iq4Nl);
        assert_eq!(of(Recipe::Q2K, "attn_q", 576), DType::Q4_0);
        assert_eq!(of(Recipe::Q4KM, "attn_q", 40), DType::F16);
        assert_eq!(of(Recipe::Q8_0, "attn_q", 40), DType::F16);
        assert_eq!(of(Recipe::F16, "attn_q", 7), DType::F16);
    }

    #[test]
    fn only_experts_are_floats_of_4_bits_where_there_are_some() {
        let mixture = Model {
            experts: 32,
            ..DENSE
        };
        let of = |model, part| dtype(Recipe::Mxfp4, model, part, 0, 1024);
        assert_eq!(of(&mixture, "ffn_down_exps"), DType::Mxfp4);
        assert_eq!(of(&mixture, "attn_q"), DType::Q8_0);
        assert_eq!(of(&DENSE, "ffn_down"), DType::Mxfp4);
        assert_eq!(of(&DENSE, "token_embd"), DType::Q8_0);
    }
}
