//! Qwen 3.5 and later, dense: Qwen3-Next's layers with matrices of their own for each part. GGUF files have
//! heads of values in another order, in which they take turns at heads of keys.

use super::glm4moe::give_head;
use super::qwen_vision::give_images;
use super::qwen3next::{NAMING, delta_nets};
use super::{Facts, Family, Given, Shape, SpecialTokens};
use crate::error::ConfigError;
use crate::spec::{DeltaNet, KeyHeads, ModelSpec, RopeAxes};

pub(crate) const FAMILY: Family = Family {
    name: "qwen35",
    classes: &["Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"],
    spec,
    naming: NAMING,
    shapes: SHAPES,
};

pub(super) fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let order = match facts.is_gguf() {
        true => KeyHeads::Tiled,
        false => KeyHeads::Grouped,
    };
    let mut spec = delta_nets(facts, |net| DeltaNet { order, ..net })?;
    give_images(&mut spec, facts, RopeAxes::Interleaved)?;
    give_head(&mut spec);
    Ok(spec)
}

const fn more(value_heads: usize, inner: usize) -> [(&'static str, Given); 8] {
    [
        ("rope.dimension_count", Given::Size(64)),
        // Of positions in time, height and width; text has one position for all. Other engines ask for it.
        ("rope.dimension_sections", Given::Sizes(&[11, 11, 10, 0])),
        ("ssm.conv_kernel", Given::Size(4)),
        ("ssm.state_size", Given::Size(128)),
        ("ssm.group_count", Given::Size(16)),
        ("ssm.time_step_rank", Given::Size(value_heads)),
        ("ssm.inner_size", Given::Size(inner)),
        ("full_attention_interval", Given::Size(4)),
    ]
}

/// Heads of values of smaller models and of larger ones.
const MORE_16: [(&str, Given); 8] = more(16, 2048);
const MORE_32: [(&str, Given); 8] = more(32, 4096);

const QWEN35: Shape = Shape {
    name: "",
    family: "qwen35",
    layers: 24,
    hidden: 1024,
    feed_forward: 3584,
    heads: 8,
    kv_heads: 2,
    head_size: 256,
    vocabulary: 248_320,
    special_tokens: Some(SpecialTokens::Qwen),
    tied: true,
    context: 262_144,
    rope_theta: 1e7,
    rope_factor: None,
    norm_epsilon: 1e-6,
    more: &MORE_16,
};

/// Published models, smallest first.
const SHAPES: &[Shape] = &[
    Shape {
        name: "qwen3.5-0.8b",
        ..QWEN35
    },
    Shape {
        name: "qwen3.5-4b",
        layers: 32,
        hidden: 2560,
        feed_forward: 9216,
        heads: 16,
        kv_heads: 4,
        more: &MORE_32,
        ..QWEN35
    },
    Shape {
        name: "qwen3.5-9b",
        layers: 32,
        hidden: 4096,
        feed_forward: 12_288,
        heads: 16,
        kv_heads: 4,
        tied: false,
        more: &MORE_32,
        ..QWEN35
    },
];
