//! K-EXAONE: heads normed, windows on three layers of four and positions on those only, dense first layers, then
//! experts scored by sigmoids with a block that all tokens have.

use super::decoder::{decoder, windows};
use super::experts::{give_experts, groups, sigmoid_experts, sparse_layers};
use super::facts::Key;
use super::glm4moe::leave_out_layers_ahead;
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::{GroupScore, Mask, ModelSpec, QkNorm};

pub(crate) const FAMILY: Family = Family {
    name: "exaone-moe",
    // As it was published, and as `transformers` has called it since.
    classes: &["ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM"],
    spec,
    naming: Naming {
        parts: &[("exp_probs_b", "mlp.e_score_correction_bias")],
        bare: &["exp_probs_b"],
        head: Some("mtp"),
        ..Naming::USUAL
    },
    shapes: &[],
};

/// Where neither kind of file says otherwise, every fourth layer is without a window.
const USUAL_PERIOD: usize = 4;

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let mut spec = decoder(facts)?;
    leave_out_layers_ahead(&mut spec, facts)?;
    windows(&mut spec, facts, USUAL_PERIOD)?;
    let any = spec.layers.iter().any(|layer| layer.mask() != Some(Mask::Causal));
    for layer in &mut spec.layers {
        layer.attention_mut().qk_norm = Some(QkNorm::PerHead);
        if any && layer.mask() == Some(Mask::Causal) {
            layer.attention_mut().rope = None;
        }
    }
    facts.expect(
        Key::huggingface("scoring_func"),
        "sigmoid".to_owned(),
        "experts scored by sigmoids are",
    )?;
    let mut experts = sigmoid_experts(facts, &mut spec)?;
    experts.routing.groups = groups(facts, GroupScore::SumOfTwo)?;
    let dense: Option<usize> = facts.get(Key::new(
        "leading_dense_block_count",
        "first_k_dense_replace|first_last_k_dense_replace",
    ))?;
    match sparse_layers(facts, spec.layers.len())? {
        Some(sparse) => give_experts(&mut spec, experts, |layer| sparse[layer]),
        // One where a folder does not say it, as in `transformers`.
        None => give_experts(&mut spec, experts, |layer| layer >= dense.unwrap_or(1)),
    }
    Ok(spec)
}
