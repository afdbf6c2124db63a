//! dots.llm1: heads normed, dense first layers, then experts scored by sigmoids with a block that all tokens have.

use super::decoder::{decoder, give_windows};
use super::experts::{give_experts, groups, normalized, sigmoid_experts};
use super::facts::Key;
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::{GroupScore, ModelSpec, QkNorm};

pub(crate) const FAMILY: Family = Family {
    name: "dots1",
    classes: &["Dots1ForCausalLM"],
    spec,
    naming: Naming {
        parts: &[("exp_probs_b", "mlp.gate.e_score_correction_bias")],
        bare: &["exp_probs_b"],
        ..Naming::USUAL
    },
    shapes: &[],
};

/// How many layers come before those with a window where a folder that names one does not say it, as in `transformers`.
const USUAL_FULL_LAYERS: usize = 62;

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let mut spec = decoder(facts)?;
    let layers = spec.layers.len();
    let full: Option<usize> = facts.get(Key::huggingface("max_window_layers"))?;
    let full = full.unwrap_or(USUAL_FULL_LAYERS);
    let windowed = match facts.layer_types()? {
        Some(windowed) => windowed,
        None => (0..layers).map(|layer| layer >= full).collect(),
    };
    // No GGUF file has windows.
    if !facts.is_gguf() {
        give_windows(&mut spec, facts, &windowed)?;
    }
    for layer in &mut spec.layers {
        layer.attention_mut().qk_norm = Some(QkNorm::PerHead);
    }
    let mut experts = sigmoid_experts(facts, &mut spec)?;
    experts.routing.normalized = normalized(facts, false)?;
    experts.routing.groups = groups(facts, GroupScore::SumOfTwo)?;
    let dense = Key::new("leading_dense_block_count", "first_k_dense_replace");
    let dense: Option<usize> = facts.get(dense)?;
    give_experts(&mut spec, experts, |layer| layer >= dense.unwrap_or(0));
    Ok(spec)
}
