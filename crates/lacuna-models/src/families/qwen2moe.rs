//! Qwen 1.5 and 2 with experts: weights as the softmax over all experts has them, and a block that all
//! tokens have, with a gate.

use super::experts::{experts, give_experts, normalized, shared};
use super::facts::Key;
use super::{Facts, Family, Naming, qwen2};
use crate::error::ConfigError;
use crate::spec::{Experts, ModelSpec};

pub(crate) const FAMILY: Family = Family {
    name: "qwen2moe",
    classes: &["Qwen2MoeForCausalLM"],
    spec,
    naming: Naming {
        parts: &[
            ("ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
            ("ffn_up_shexp", "mlp.shared_expert.up_proj"),
            ("ffn_down_shexp", "mlp.shared_expert.down_proj"),
        ],
        ..Naming::USUAL
    },
    shapes: &[],
};

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let mut spec = qwen2::spec(facts)?;
    let mut experts = experts(facts, &mut spec)?;
    experts.routing.normalized = normalized(facts, false)?;
    experts.shared = shared(facts, experts.inner, true)?;
    give_qwen_experts(&mut spec, facts, experts)?;
    Ok(spec)
}

/// All layers have experts but those that the file names, and those between every so many.
pub(super) fn give_qwen_experts(
    spec: &mut ModelSpec,
    facts: &Facts<'_>,
    experts: Experts,
) -> Result<(), ConfigError> {
    let dense: Option<Vec<usize>> = facts.get(Key::huggingface("mlp_only_layers"))?;
    let dense = dense.unwrap_or_default();
    let step: Option<usize> = facts.get(Key::huggingface("decoder_sparse_step"))?;
    let step = step.unwrap_or(1);
    give_experts(spec, experts, |layer| {
        !dense.contains(&layer) && (layer + 1).is_multiple_of(step)
    });
    Ok(())
}
