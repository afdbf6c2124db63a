//! MiniMax M2: norms over all of queries and of keys, part of each head turns, experts in every layer, scored by
//! sigmoids.

use super::decoder::decoder;
use super::experts::{give_experts, sigmoid_experts};
use super::facts::Key;
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::{ModelSpec, QkNorm};

pub(crate) const FAMILY: Family = Family {
    name: "minimax-m2",
    classes: &["MiniMaxM2ForCausalLM"],
    spec,
    naming: Naming {
        parts: &[
            ("ffn_gate_inp", "block_sparse_moe.gate"),
            ("exp_probs_b", "block_sparse_moe.e_score_correction_bias"),
            ("ffn_gate_exps", "block_sparse_moe.experts.*.w1"),
            ("ffn_up_exps", "block_sparse_moe.experts.*.w3"),
            ("ffn_down_exps", "block_sparse_moe.experts.*.w2"),
        ],
        bare: &["exp_probs_b"],
        ..Naming::USUAL
    },
    shapes: &[],
};

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let mut spec = decoder(facts)?;
    // Published files say in elements how much of a head turns, and the library's own which part.
    let part: Option<f64> = facts.of_rope("partial_rotary_factor")?;
    let turned: Option<usize> = facts.get(Key::huggingface("rotary_dim"))?;
    if let (None, Some(turned)) = (part, turned) {
        spec.ropes[0].dimensions = turned;
    }
    facts.expect(Key::huggingface("use_qk_norm"), true, "normed queries and keys are")?;
    facts.expect(
        Key::huggingface("qk_norm_type"),
        "per_layer".to_owned(),
        "norms over all of queries and of keys, per_layer, are",
    )?;
    facts.expect(
        Key::huggingface("scoring_func"),
        "sigmoid".to_owned(),
        "experts scored by sigmoids are",
    )?;
    for layer in &mut spec.layers {
        layer.attention_mut().qk_norm = Some(QkNorm::Whole);
    }
    let mut experts = sigmoid_experts(facts, &mut spec)?;
    // No file says it, and all readers of them do it.
    experts.routing.normalized = true;
    give_experts(&mut spec, experts, |_| true);
    Ok(spec)
}
