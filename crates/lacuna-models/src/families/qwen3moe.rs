//! Qwen 3 with experts: Qwen 3 30B-A3B and 235B-A22B.

use super::experts::{experts, normalized};
use super::qwen2moe::give_qwen_experts;
use super::{Facts, Family, Given, Naming, Shape, SpecialTokens, qwen3};
use crate::error::ConfigError;
use crate::spec::ModelSpec;

pub(crate) const FAMILY: Family = Family {
    name: "qwen3moe",
    classes: &["Qwen3MoeForCausalLM"],
    spec,
    naming: Naming::USUAL,
    shapes: SHAPES,
};

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    // No GGUF file says it, and all readers of them do it.
    sparse(facts, facts.is_gguf())
}

/// Of a model whose weights of experts sum to 1 or not where its file does not say it.
pub(super) fn sparse(facts: &Facts<'_>, sums_to_1: bool) -> Result<ModelSpec, ConfigError> {
    let mut spec = qwen3::spec(facts)?;
    let mut experts = experts(facts, &mut spec)?;
    experts.routing.normalized = normalized(facts, sums_to_1)?;
    give_qwen_experts(&mut spec, facts, experts)?;
    Ok(spec)
}

/// Published models, smallest first.
const SHAPES: &[Shape] = &[Shape {
    name: "qwen3-30b-a3b",
    family: "qwen3moe",
    layers: 48,
    hidden: 2048,
    feed_forward: 6144,
    heads: 32,
    kv_heads: 4,
    head_size: 128,
    vocabulary: 151_936,
    special_tokens: Some(SpecialTokens::Qwen),
    tied: false,
    context: 40_960,
    rope_theta: 1e6,
    rope_factor: None,
    norm_epsilon: 1e-6,
    more: &[
        ("expert_count", Given::Size(128)),
        ("expert_used_count", Given::Size(8)),
        ("expert_feed_forward_length", Given::Size(768)),
    ],
}];
