//! Granite 3 with experts: weights are a softmax over the chosen, and a block that all tokens have joins
//! them in later models.

use super::experts::{experts, give_experts, shared};
use super::{Facts, Family, Naming, granite};
use crate::error::ConfigError;
use crate::spec::{ModelSpec, Scores};

pub(crate) const FAMILY: Family = Family {
    name: "granitemoe",
    classes: &["GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"],
    spec,
    naming: Naming {
        parts: &[
            ("ffn_gate_inp", "block_sparse_moe.router.layer"),
            ("ffn_gate_up_exps", "block_sparse_moe.input_linear"),
            ("ffn_down_exps", "block_sparse_moe.output_linear"),
            ("ffn_gate_up_shexp", "shared_mlp.input_linear"),
            ("ffn_down_shexp", "shared_mlp.output_linear"),
        ],
        ..Naming::USUAL
    },
    shapes: &[],
};

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let mut spec = granite::spec(facts)?;
    let mut experts = experts(facts, &mut spec)?;
    experts.routing.scores = Scores::SoftmaxOfChosen;
    experts.routing.normalized = false;
    experts.shared = shared(facts, experts.inner, false)?;
    give_experts(&mut spec, experts, |_| true);
    Ok(spec)
}
