//! LFM2: short convolutions between gates, and attention in the layers that the file says.

use super::decoder::{decoder, tied_unless_said};
use super::facts::Key;
use super::{Facts, Family, Given, Naming, Shape, SpecialTokens};
use crate::error::ConfigError;
use crate::spec::{ModelSpec, QkNorm, Recurrence, ShortConvolution};

pub(crate) const FAMILY: Family = Family {
    name: "lfm2",
    classes: &["Lfm2ForCausalLM"],
    spec,
    naming: NAMING,
    shapes: SHAPES,
};

/// Of this family and of that with experts.
pub(super) const NAMING: Naming = Naming {
    parts: &[
        ("output_norm", "model.embedding_norm"),
        ("attn_norm", "operator_norm"),
        ("attn_output", "self_attn.out_proj"),
        ("attn_q_norm", "self_attn.q_layernorm"),
        ("attn_k_norm", "self_attn.k_layernorm"),
        ("shortconv.in_proj", "conv.in_proj"),
        ("shortconv.conv", "conv.conv"),
        ("shortconv.out_proj", "conv.out_proj"),
        ("ffn_norm", "ffn_norm"),
        ("ffn_gate", "feed_forward.w1"),
        ("ffn_up", "feed_forward.w3"),
        ("ffn_down", "feed_forward.w2"),
        ("ffn_gate_inp", "feed_forward.gate"),
        ("exp_probs_b.bias", "feed_forward.expert_bias"),
        ("ffn_gate_exps", "feed_forward.experts.*.w1"),
        ("ffn_up_exps", "feed_forward.experts.*.w3"),
        ("ffn_down_exps", "feed_forward.experts.*.w2"),
    ],
    gguf: &[("output_norm", "token_embd_norm")],
    ..Naming::USUAL
};

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let mut spec = convolutions(facts)?;
    let inner = adjusted(facts)?;
    for block in spec.layers.iter_mut().filter_map(|layer| layer.feed_forward.gated_mut()) {
        block.inner = inner.unwrap_or(block.inner);
    }
    Ok(spec)
}

/// A decoder whose layers have short convolutions, or attention where the file says so.
pub(super) fn convolutions(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let facts = &facts.with_defaults(&[("rope_theta", 1e6)]);
    let mut spec = decoder(facts)?;
    tied_unless_said(&mut spec, facts)?;
    facts.expect(Key::huggingface("conv_bias"), false, "convolutions without biases are")?;
    let taps = facts.required(Key::new("shortconv.l_cache", "conv_L_cache"))?;
    let recurrent = facts.recurrent(spec.layers.len(), &["conv"])?;
    let recurrent = match recurrent {
        Some(recurrent) => recurrent,
        None => {
            let full: Option<Vec<usize>> = facts.get(Key::huggingface("full_attn_idxs"))?;
            let is_full = |layer| full.as_ref().is_none_or(|full| full.contains(&layer));
            (0..spec.layers.len()).map(|layer| !is_full(layer)).collect()
        }
    };
    for (layer, recurrent) in spec.layers.iter_mut().zip(recurrent) {
        if recurrent {
            layer.attention = None;
            layer.recurrence = Some(Recurrence::ShortConvolution(ShortConvolution { taps }));
        } else {
            layer.attention_mut().qk_norm = Some(QkNorm::PerHead);
        }
    }
    Ok(spec)
}

/// The width of feed-forward blocks where a folder says another than they have: two thirds of that, times a
/// number, up to a whole multiple. GGUF has the result.
fn adjusted(facts: &Facts<'_>) -> Result<Option<usize>, ConfigError> {
    let adjusts: Option<bool> = facts.get(Key::huggingface("block_auto_adjust_ff_dim"))?;
    if facts.is_gguf() || adjusts == Some(false) {
        return Ok(None);
    }
    let said: usize = facts.required(Key::huggingface("block_ff_dim|intermediate_size"))?;
    let factor: Option<f64> = facts.get(Key::huggingface("block_ffn_dim_multiplier"))?;
    let multiple: Option<usize> = facts.get(Key::huggingface("block_multiple_of"))?;
    let width = (said / 3 * 2 + said % 3 * 2 / 3) as f64 * factor.unwrap_or(1.0);
    let multiple = multiple.unwrap_or(256).max(1);
    Ok(Some((width as usize).div_ceil(multiple).saturating_mul(multiple)))
}

/// Published models, smallest first.
const SHAPES: &[Shape] = &[Shape {
    name: "lfm2-1.2b",
    family: "lfm2",
    layers: 16,
    hidden: 2048,
    feed_forward: 8192,
    heads: 32,
    kv_heads: 8,
    head_size: 64,
    vocabulary: 65_536,
    special_tokens: Some(SpecialTokens::ChatMl),
    tied: true,
    context: 128_000,
    rope_theta: 1e6,
    rope_factor: None,
    norm_epsilon: 1e-5,
    more: &[
        ("attention.head_count_kv", Given::PerLayer(&LFM2_KV_HEADS)),
        ("shortconv.l_cache", Given::Size(3)),
    ],
}];

/// Those of layers with attention.
const LFM2_KV_HEADS: [usize; 16] = [0, 0, 8, 0, 0, 8, 0, 0, 8, 0, 8, 0, 8, 0, 8, 0];
