//! AfMoE (Arcee's Trinity): gated attention, windows on three layers of four and positions on those
//! only, norms around both halves of a layer, experts scored by sigmoids after dense first layers.

use super::decoder::{decoder, give_windows};
use super::experts::{give_experts, sigmoid_experts};
use super::facts::Key;
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::{Activation, Gate, ModelSpec, Norms, QkNorm};

pub(crate) const FAMILY: Family = Family {
    name: "afmoe",
    classes: &["AfmoeForCausalLM"],
    spec,
    naming: Naming {
        parts: &[
            ("attn_gate", "self_attn.gate_proj"),
            ("ffn_norm", "pre_mlp_layernorm"),
            ("post_ffw_norm", "post_mlp_layernorm"),
            ("ffn_gate_inp", "mlp.router.gate"),
            ("exp_probs_b", "mlp.expert_bias"),
        ],
        bare: &["exp_probs_b"],
        ..Naming::USUAL
    },
    shapes: &[],
};

/// Where neither kind of file says otherwise, every fourth layer is without a window.
const USUAL_PERIOD: usize = 4;

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let mut spec = decoder(facts)?;
    let period = facts.get(Key::huggingface("global_attn_every_n_layers"))?;
    let windowed = facts.windowed(spec.layers.len(), period.unwrap_or(USUAL_PERIOD))?;
    give_windows(&mut spec, facts, &windowed)?;
    // GGUF has no key for it: its files are of models that have it.
    let scaled: Option<bool> = facts.get(Key::huggingface("mup_enabled"))?;
    if scaled.unwrap_or(facts.is_gguf()) {
        spec.embedding_scale = Some((spec.hidden as f32).sqrt());
    }
    for (layer, windowed) in spec.layers.iter_mut().zip(&windowed) {
        let attention = layer.attention_mut();
        attention.rope = windowed.then_some(0);
        attention.qk_norm = Some(QkNorm::PerHead);
        attention.gate = Gate::Apart(Activation::Sigmoid);
        layer.norms = Norms::Both;
    }
    let supported = "experts scored by sigmoids are";
    facts.expect(Key::huggingface("score_func"), "sigmoid".to_owned(), supported)?;
    let experts = sigmoid_experts(facts, &mut spec)?;
    let dense: Option<usize> =
        facts.get(Key::new("leading_dense_block_count", "num_dense_layers"))?;
    give_experts(&mut spec, experts, |layer| layer >= dense.unwrap_or(0));
    Ok(spec)
}
