//! Qwen 3, dense: queries and keys are normed head by head.

use super::decoder::decoder;
use super::qwen2::qwen_windows;
use super::{Facts, Family, Naming, Shape, SpecialTokens};
use crate::error::ConfigError;
use crate::spec::{ModelSpec, QkNorm};

pub(crate) const FAMILY: Family = Family {
    name: "qwen3",
    classes: &["Qwen3ForCausalLM", "Qwen3Model", "Qwen3ForSequenceClassification"],
    spec,
    naming: Naming::USUAL,
    shapes: SHAPES,
};

pub(super) fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let mut spec = decoder(facts)?;
    for layer in &mut spec.layers {
        layer.attention_mut().qk_norm = Some(QkNorm::PerHead);
    }
    qwen_windows(&mut spec, facts)?;
    Ok(spec)
}

const QWEN3: Shape = Shape {
    name: "",
    family: "qwen3",
    layers: 28,
    hidden: 1024,
    feed_forward: 3072,
    heads: 16,
    kv_heads: 8,
    head_size: 128,
    vocabulary: 151_936,
    special_tokens: Some(SpecialTokens::Qwen),
    tied: true,
    context: 40_960,
    rope_theta: 1e6,
    rope_factor: None,
    norm_epsilon: 1e-6,
    more: &[],
};

/// Published models, smallest first.
const SHAPES: &[Shape] = &[
    Shape {
        name: "qwen3-0.6b",
        ..QWEN3
    },
    Shape {
        name: "qwen3-1.7b",
        hidden: 2048,
        feed_forward: 6144,
        ..QWEN3
    },
    Shape {
        name: "qwen3-4b",
        layers: 36,
        hidden: 2560,
        feed_forward: 9728,
        heads: 32,
        ..QWEN3
    },
    Shape {
        name: "qwen3-8b",
        layers: 36,
        hidden: 4096,
        feed_forward: 12_288,
        heads: 32,
        tied: false,
        ..QWEN3
    },
];
