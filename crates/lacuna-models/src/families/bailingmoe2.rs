//! Ling 2.0 and Ring 2.0 (Bailing, second version): one matrix for queries, keys and values, part of each head
//! turns, experts scored by sigmoids and chosen in groups after dense first layers.

use super::decoder::decoder;
use super::experts::{gating, give_experts, groups, sigmoid_experts};
use super::facts::Key;
use super::glm4moe::{give_head, leave_out_layers_ahead};
use super::{Facts, Family, Given, Naming, Shape, SpecialTokens};
use crate::error::ConfigError;
use crate::spec::{GroupScore, ModelSpec, QkNorm};

pub(crate) const FAMILY: Family = Family {
    name: "bailingmoe2",
    classes: &["BailingMoeV2ForCausalLM"],
    spec,
    naming: Naming {
        parts: &[
            ("token_embd", "model.word_embeddings"),
            ("attn_qkv", "attention.query_key_value"),
            ("attn_q_norm", "attention.query_layernorm"),
            ("attn_k_norm", "attention.key_layernorm"),
            ("attn_output", "attention.dense"),
            ("exp_probs_b", "mlp.gate.expert_bias"),
            ("nextn.shared_head_norm", "final_layernorm"),
        ],
        gguf: &[("nextn.shared_head_norm", "layer_output_norm")],
        gguf_fused: &["attn_qkv"],
        bare: &["exp_probs_b"],
        ..Naming::USUAL
    },
    shapes: SHAPES,
};

/// What the published class takes configurations to mean that do not say it.
const DEFAULTS: [(&str, f64); 1] = [("partial_rotary_factor", 0.5)];

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let facts = &facts.with_defaults(&DEFAULTS);
    let mut spec = decoder(facts)?;
    leave_out_layers_ahead(&mut spec, facts)?;
    let normed: Option<bool> = facts.get(Key::huggingface("use_qk_norm"))?;
    for layer in &mut spec.layers {
        let normed = normed.unwrap_or(true);
        layer.attention_mut().qk_norm = normed.then_some(QkNorm::PerHead);
    }
    let supported = "experts scored by sigmoids are";
    facts.expect(
        Key::huggingface("score_function"),
        "sigmoid".to_owned(),
        supported,
    )?;
    let mut experts = sigmoid_experts(facts, &mut spec)?;
    experts.routing.groups = groups(facts, GroupScore::SumOfTwo)?;
    let dense = Key::new("leading_dense_block_count", "first_k_dense_replace");
    let dense: Option<usize> = facts.get(dense)?;
    give_experts(&mut spec, experts, |layer| layer >= dense.unwrap_or(0));
    give_head(&mut spec);
    Ok(spec)
}

/// Published models, smallest first.
const SHAPES: &[Shape] = &[Shape {
    name: "ling-mini-2",
    family: "bailingmoe2",
    layers: 20,
    hidden: 2048,
    feed_forward: 5120,
    heads: 16,
    kv_heads: 4,
    head_size: 128,
    vocabulary: 157_184,
    // Its own are of another kind of text; a synthetic vocabulary needs some.
    special_tokens: Some(SpecialTokens::Qwen),
    tied: false,
    context: 32_768,
    rope_theta: 6e5,
    rope_factor: None,
    norm_epsilon: 1e-6,
    more: &[
        ("rope.dimension_count", Given::Size(64)),
        ("leading_dense_block_count", Given::Size(1)),
        ("expert_count", Given::Size(256)),
        ("expert_used_count", Given::Size(8)),
        ("expert_group_count", Given::Size(8)),
        ("expert_group_used_count", Given::Size(4)),
        ("expert_shared_count", Given::Size(1)),
        ("expert_feed_forward_length", Given::Size(512)),
        ("expert_shared_feed_forward_length", Given::Size(512)),
        ("expert_gating_func", Given::Size(gating::SIGMOID)),
        ("expert_weights_norm", Given::Flag(true)),
        ("expert_weights_scale", Given::Number(2.5)),
    ],
}];
