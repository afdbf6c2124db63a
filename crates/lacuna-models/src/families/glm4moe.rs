//! GLM 4.5 and later with experts: sigmoids, a bias for choosing only, groups, a block that all tokens
//! have, dense first layers.

use super::decoder::decoder;
use super::experts::{experts, give_experts, normalized, shared};
use super::facts::Key;
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::{Experts, GroupScore, Groups, ModelSpec, QkNorm, Scores};

pub(crate) const FAMILY: Family = Family {
    name: "glm4moe",
    classes: &["Glm4MoeForCausalLM"],
    spec,
    naming: Naming {
        parts: &[("exp_probs_b", "mlp.gate.e_score_correction_bias")],
        gguf: &[("ffn_norm", "post_attention_norm")],
        bare: &["exp_probs_b"],
        ..Naming::USUAL
    },
    shapes: &[],
};

/// The number in `expert_gating_func` that means sigmoids.
const SIGMOID: usize = 2;

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let mut spec = decoder(facts)?;
    leave_out_layers_ahead(&mut spec, facts)?;
    let normed: Option<bool> = facts.get(Key::huggingface("use_qk_norm"))?;
    let normed = match facts.has_tensor("blk.0.attn_q_norm.weight") {
        Some(has) => has,
        None => normed.unwrap_or(false),
    };
    for layer in &mut spec.layers {
        layer.attention.qk_norm = normed.then_some(QkNorm::PerHead);
    }
    let gating = Key::gguf("expert_gating_func");
    facts.expect(gating, SIGMOID, "experts scored by sigmoids are")?;
    let experts = sigmoid_experts(facts, &mut spec)?;
    let dense = Key::new("leading_dense_block_count", "first_k_dense_replace");
    let dense: Option<usize> = facts.get(dense)?;
    give_experts(&mut spec, experts, |layer| layer >= dense.unwrap_or(0));
    Ok(spec)
}

/// Leaves out blocks that foretell more than one token, which come after the others; only GGUF counts them
/// along.
pub(super) fn leave_out_layers_ahead(
    spec: &mut ModelSpec,
    facts: &Facts<'_>,
) -> Result<(), ConfigError> {
    let key = Key::new("nextn_predict_layers", "num_nextn_predict_layers");
    let ahead = facts.get(key)?.unwrap_or(0);
    if facts.is_gguf() {
        let layers = spec.layers.len().saturating_sub(ahead);
        spec.layers.truncate(layers);
    }
    spec.layers_ahead = ahead;
    Ok(())
}

/// Experts scored by sigmoids, in groups, with a bias for choosing.
fn sigmoid_experts(facts: &Facts<'_>, spec: &mut ModelSpec) -> Result<Experts, ConfigError> {
    let mut experts = experts(facts, spec)?;
    let routing = &mut experts.routing;
    routing.scores = Scores::Sigmoid;
    routing.normalized = normalized(facts, true)?;
    let scale = facts.get(Key::new("expert_weights_scale", "routed_scaling_factor"))?;
    routing.scale = scale.unwrap_or(1.0);
    let groups: Option<usize> = facts.get(Key::new("expert_group_count", "n_group"))?;
    let used: Option<usize> = facts.get(Key::new("expert_group_used_count", "topk_group"))?;
    routing.groups = match (groups, used) {
        // All of one group are what all are.
        (None | Some(1), _) => None,
        (Some(count), used) => Some(Groups {
            count,
            used: used.unwrap_or(count),
            score: GroupScore::SumOfTwo,
        }),
    };
    experts.router.selection_bias = true;
    experts.shared = shared(facts, experts.inner, false)?;
    Ok(experts)
}
