//! ERNIE 4.5 with experts: a softmax over all experts, a bias for choosing only, a block that all tokens
//! have; layers before the first with experts, and some between, are dense.

use lacuna_kernels::RopeStyle;

use super::decoder::decoder;
use super::experts::{experts, give_experts, shared};
use super::facts::Key;
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::ModelSpec;

pub(crate) const FAMILY: Family = Family {
    name: "ernie4_5-moe",
    classes: &["Ernie4_5_MoeForCausalLM"],
    spec,
    naming: Naming {
        parts: &[("exp_probs_b", "mlp.moe_statics.e_score_correction_bias")],
        bare: &["exp_probs_b"],
        ..Naming::USUAL
    },
    shapes: &[],
};

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let mut spec = decoder(facts)?;
    // Neighbours turn together in files of both kinds.
    spec.ropes[0].style = RopeStyle::Interleaved;
    let mut experts = experts(facts, &mut spec)?;
    experts.router.selection_bias = true;
    experts.shared = shared(facts, experts.inner, false)?;
    let first: Option<usize> = facts.get(Key::new(
        "leading_dense_block_count",
        "moe_layer_start_index",
    ))?;
    // -1 where that is the last layer of all.
    let last: Option<f64> = facts.get(Key::huggingface("moe_layer_end_index"))?;
    let last = last.filter(|last| *last >= 0.0);
    let step: Option<usize> =
        facts.get(Key::new("interleave_moe_layer_step", "moe_layer_interval"))?;
    let (first, step) = (first.unwrap_or(1), step.unwrap_or(1));
    give_experts(&mut spec, experts, |layer| {
        let in_range = layer >= first && last.is_none_or(|last| layer as f64 <= last);
        in_range && (layer + 1).is_multiple_of(step)
    });
    Ok(spec)
}
