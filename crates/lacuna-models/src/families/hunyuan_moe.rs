//! Hunyuan with experts (A13B): a softmax over all experts, whose chosen sum to one, and a block that all tokens
//! have.

use super::experts;
use super::facts::Key;
use super::hunyuan_dense::hunyuan;
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::{
    Activation, ExpertBlock, Experts, Gating, ModelSpec, Router, Routing, Scores, SharedExpert,
};

pub(crate) const FAMILY: Family = Family {
    name: "hunyuan-moe",
    classes: &["HunYuanMoEV1ForCausalLM"],
    spec,
    naming: Naming {
        parts: &[
            ("attn_q_norm", "self_attn.query_layernorm"),
            ("attn_k_norm", "self_attn.key_layernorm"),
            ("ffn_gate_inp", "mlp.gate.wg"),
            ("ffn_gate_shexp", "mlp.shared_mlp.gate_proj"),
            ("ffn_up_shexp", "mlp.shared_mlp.up_proj"),
            ("ffn_down_shexp", "mlp.shared_mlp.down_proj"),
        ],
        ..Naming::USUAL
    },
    shapes: &[],
};

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let mut spec = hunyuan(facts)?;
    let layers = spec.layers.len();
    let dense = spec.layers.first_mut();
    let dense = dense.and_then(|layer| layer.feed_forward.gated_mut());
    let dense = dense.map_or(0, |block| block.inner);
    // Folders say these for each layer; in published models all are alike.
    let alike = |key: Key, name: &str| -> Result<Option<usize>, ConfigError> {
        let Some(values) = facts.per_layer(key, layers)? else {
            return Ok(None);
        };
        match values.iter().find(|value| **value != values[0]) {
            None => Ok(values.first().copied()),
            Some(other) => Err(ConfigError::Unsupported {
                feature: format!("{name} of {} in one layer and {other} in another", values[0]),
                supported: "experts that are alike in all layers are",
            }),
        }
    };
    let used = alike(Key::new("expert_used_count", "moe_topk"), "experts of a token")?;
    let inner = Key::new("expert_feed_forward_length", "moe_intermediate_size");
    let inner = alike(inner, "a width of experts")?;
    let shared = Key::huggingface("num_shared_expert");
    let shared = alike(shared, "a number of shared experts")?;
    let shared_inner: Option<usize> =
        facts.get(Key::gguf("expert_shared_feed_forward_length"))?;
    let shared_inner =
        shared_inner.unwrap_or_else(|| dense.saturating_mul(shared.unwrap_or(1)));
    let experts = Experts {
        routing: Routing {
            experts: facts.required(experts::COUNT)?,
            used: used.unwrap_or(1),
            scores: Scores::Softmax,
            groups: None,
            normalized: true,
            scale: 1.0,
        },
        router: Router::default(),
        inner: inner.unwrap_or(dense),
        block: ExpertBlock::Gated(Gating::Product(Activation::Silu)),
        latent: None,
        biases: false,
        shared: (shared_inner > 0).then_some(SharedExpert {
            inner: shared_inner,
            gated: false,
        }),
        dense: None,
    };
    experts::give_experts(&mut spec, experts, |_| true);
    Ok(spec)
}
