//! Qwen 2 and 2.5: biases on queries, keys and values.

use super::decoder::{decoder, give_windows};
use super::facts::Key;
use super::{Facts, Family, Naming, Shape, SpecialTokens};
use crate::error::ConfigError;
use crate::spec::{Biases, ModelSpec};

pub(crate) const FAMILY: Family = Family {
    name: "qwen2",
    classes: &["Qwen2ForCausalLM"],
    spec,
    naming: Naming::USUAL,
    shapes: SHAPES,
};

pub(super) fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let mut spec = decoder(facts)?;
    for layer in &mut spec.layers {
        layer.attention_mut().biases = Biases {
            projections: true,
            output: false,
        };
    }
    qwen_windows(&mut spec, facts)?;
    Ok(spec)
}

/// How many layers come before those with a window where a folder that uses one does not say it, as in `transformers`.
const USUAL_FULL_LAYERS: usize = 28;

/// Layers with a window, where it is to be used: those that `layer_types` says, or that come after the
/// first so many.
pub(super) fn qwen_windows(spec: &mut ModelSpec, facts: &Facts<'_>) -> Result<(), ConfigError> {
    let layers = spec.layers.len();
    let used: Option<bool> = facts.get(Key::huggingface("use_sliding_window"))?;
    // Folders name a window that is not used, and need not say so.
    if !facts.is_gguf() && used != Some(true) {
        return Ok(());
    }
    let full: Option<usize> = facts.get(Key::huggingface("max_window_layers"))?;
    let usual = if facts.is_gguf() { 0 } else { USUAL_FULL_LAYERS };
    let full = full.unwrap_or(usual);
    let windowed = match facts.layer_types()? {
        Some(windowed) => windowed,
        None => (0..layers).map(|layer| layer >= full).collect(),
    };
    give_windows(spec, facts, &windowed)
}

/// Published models, smallest first.
const SHAPES: &[Shape] = &[Shape {
    name: "qwen2.5-0.5b",
    family: "qwen2",
    layers: 24,
    hidden: 896,
    feed_forward: 4864,
    heads: 14,
    kv_heads: 2,
    head_size: 64,
    vocabulary: 151_936,
    special_tokens: Some(SpecialTokens::Qwen),
    tied: true,
    context: 32_768,
    rope_theta: 1e6,
    rope_factor: None,
    norm_epsilon: 1e-6,
    more: &[],
}];
