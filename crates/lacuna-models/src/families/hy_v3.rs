//! Hunyuan 3 (Hy3): heads normed, dense first layers, then experts scored by sigmoids with a block that all tokens
//! have.

use super::decoder::decoder;
use super::experts::{give_experts, sigmoid_experts, sparse_layers};
use super::facts::Key;
use super::glm4moe::{give_head, leave_out_layers_ahead};
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::{ModelSpec, QkNorm};

pub(crate) const FAMILY: Family = Family {
    name: "hy_v3",
    classes: &["HYV3ForCausalLM"],
    spec,
    naming: Naming {
        parts: &[
            ("ffn_gate_inp", "mlp.router.gate"),
            ("exp_probs_b", "mlp.expert_bias"),
            ("ffn_gate_shexp", "mlp.shared_mlp.gate_proj"),
            ("ffn_up_shexp", "mlp.shared_mlp.up_proj"),
            ("ffn_down_shexp", "mlp.shared_mlp.down_proj"),
            ("nextn.shared_head_norm", "final_layernorm"),
        ],
        bare: &["exp_probs_b"],
        gguf_bare: &["exp_probs_b"],
        ..Naming::USUAL
    },
    shapes: &[],
};

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let mut spec = decoder(facts)?;
    leave_out_layers_ahead(&mut spec, facts)?;
    for layer in &mut spec.layers {
        layer.attention_mut().qk_norm = Some(QkNorm::PerHead);
    }
    let experts = sigmoid_experts(facts, &mut spec)?;
    let dense: Option<usize> = facts.get(Key::huggingface("first_k_dense_replace"))?;
    let listed = sparse_layers(facts, spec.layers.len())?;
    let sparse = |layer: usize| {
        // GGUF has no key for it: layers with experts are those with a router.
        let router = facts.has_tensor(&format!("blk.{layer}.ffn_gate_inp.weight"));
        let listed = listed.as_ref().map(|sparse| sparse[layer]);
        // One dense layer where a folder does not say it, as in `transformers`.
        router.or(listed).unwrap_or(layer >= dense.unwrap_or(1))
    };
    give_experts(&mut spec, experts, sparse);
    give_head(&mut spec);
    Ok(spec)
}
