//! Laguna (Poolside): gated heads, more of them in layers with a window, and experts scored by sigmoids after dense
//! first layers.

use serde_json::Value;

use super::decoder::{decoder, give_windows, turn_by_window};
use super::experts::{give_experts, sigmoid_experts, sparse_layers};
use super::facts::{Fact, Key};
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::{Activation, Gate, ModelSpec, QkNorm};
use lacuna_files::gguf::Metadata;

pub(crate) const FAMILY: Family = Family {
    name: "laguna",
    classes: &["LagunaForCausalLM"],
    spec,
    naming: Naming {
        parts: &[
            ("attn_gate", "self_attn.g_proj"),
            ("exp_probs_b", "mlp.experts.e_score_correction_bias"),
            ("ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
            ("ffn_up_shexp", "mlp.shared_expert.up_proj"),
            ("ffn_down_shexp", "mlp.shared_expert.down_proj"),
        ],
        bare: &["exp_probs_b"],
        ..Naming::USUAL
    },
    shapes: &[],
};

/// Where neither kind of file says otherwise, the first of every four layers is without a window.
const USUAL_PERIOD: usize = 4;

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let bounds: Option<f64> = facts.get(Key::huggingface("moe_router_logit_softcapping"))?;
    if let Some(bound) = bounds.filter(|bound| *bound > 0.0) {
        return Err(ConfigError::Unsupported {
            feature: format!("moe_router_logit_softcapping {bound}"),
            supported: "routers without bounds are",
        });
    }
    let weighed = Key::huggingface("moe_apply_router_weight_on_input");
    facts.expect(weighed, false, "experts whose results are weighed are")?;
    let mut spec = decoder(facts)?;
    let layers = spec.layers.len();
    let windowed = match facts.layer_types()? {
        Some(windowed) => windowed,
        None if facts.is_gguf() => facts.windowed_after_first(layers, USUAL_PERIOD)?,
        None => vec![false; layers],
    };
    give_windows(&mut spec, facts, &windowed)?;
    turn_by_window(&mut spec, facts)?;
    let gates: Option<Gates> = facts.get(Key::huggingface("gating"))?;
    for (index, layer) in spec.layers.iter_mut().enumerate() {
        let attention = layer.attention_mut();
        attention.qk_norm = Some(QkNorm::PerHead);
        let gates = match facts.rows_of(&format!("blk.{index}.attn_gate.weight")) {
            Some(rows) if rows == attention.query_heads => Gates::PerHead,
            Some(_) => Gates::PerElement,
            None => gates.unwrap_or(Gates::PerHead),
        };
        attention.gate = match gates {
            Gates::PerHead => Gate::PerHead(Activation::Softplus),
            Gates::PerElement => Gate::Apart(Activation::Softplus),
        };
    }
    let experts = sigmoid_experts(facts, &mut spec)?;
    let listed = sparse_layers(facts, layers)?;
    let dense: Option<usize> = facts.get(Key::gguf("leading_dense_block_count"))?;
    let sparse = |layer: usize| match &listed {
        Some(sparse) => sparse[layer],
        // Of a folder that does not say it, the first is dense.
        None => layer >= dense.unwrap_or(usize::from(!facts.is_gguf())),
    };
    give_experts(&mut spec, experts, sparse);
    Ok(spec)
}

/// How many gates a head has.
#[derive(Clone, Copy)]
enum Gates {
    PerHead,
    PerElement,
}

/// GGUF files say it by the size of the matrix alone.
impl Fact for Gates {
    fn from_gguf(_: &Metadata, _: &str) -> Result<Option<Self>, ConfigError> {
        Ok(None)
    }

    fn from_json(value: &Value) -> Option<Self> {
        match (value.as_bool(), value.as_str()) {
            (Some(true), _) | (_, Some("per-head")) => Some(Self::PerHead),
            (_, Some("per-element")) => Some(Self::PerElement),
            _ => None,
        }
    }

    const EXPECTED: &'static str = "`per-head`, `per-element` or true";
}
