//! LFM2 with experts: scored by sigmoids, after first layers that are dense.

use super::experts::{give_experts, sigmoid_experts};
use super::facts::Key;
use super::lfm2::{NAMING, convolutions};
use super::{Facts, Family};
use crate::error::ConfigError;
use crate::spec::ModelSpec;

pub(crate) const FAMILY: Family = Family {
    name: "lfm2moe",
    classes: &["Lfm2MoeForCausalLM"],
    spec,
    naming: NAMING,
    shapes: &[],
};

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let mut spec = convolutions(facts)?;
    let mut experts = sigmoid_experts(facts, &mut spec)?;
    let biased: Option<bool> = facts.get(Key::huggingface("use_expert_bias"))?;
    experts.router.selection_bias = biased.unwrap_or(true);
    let dense: Option<usize> =
        facts.get(Key::new("leading_dense_block_count", "num_dense_layers"))?;
    give_experts(&mut spec, experts, |layer| layer >= dense.unwrap_or(0));
    Ok(spec)
}
