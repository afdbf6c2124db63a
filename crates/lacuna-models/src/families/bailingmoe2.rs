//! Ling 2.0 and Ring 2.0 (Bailing, second version): one matrix for queries, keys and values, part of each head
//! turns, experts scored by sigmoids and chosen in groups after dense first layers.

use super::decoder::decoder;
use super::experts::{give_experts, groups, sigmoid_experts};
use super::facts::Key;
use super::glm4moe::{give_head, leave_out_layers_ahead};
use super::{Facts, Family, Naming};
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
        bare: &["exp_probs_b"],
        ..Naming::USUAL
    },
    shapes: &[],
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
