//! Gemma 2: norms on both sides, every other layer with a window, scores and logits bounded.

use super::decoder::{decoder, tied_unless_said, windows};
use super::facts::Key;
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::{Activation, ModelSpec, Norms};

pub(crate) const FAMILY: Family = Family {
    name: "gemma2",
    classes: &["Gemma2ForCausalLM"],
    spec,
    naming: NAMING,
    shapes: &[],
};

pub(super) const NAMING: Naming = Naming {
    parts: &[
        ("ffn_norm", "pre_feedforward_layernorm"),
    ],
    norm_offset: 1.0,
    ..Naming::USUAL
};

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let mut spec = decoder(facts)?;
    windows(&mut spec, facts, 2)?;
    gemma(&mut spec, facts)?;
    score_scale(&mut spec, facts, 46)?;
    Ok(spec)
}

/// What all of the family have in common.
pub(super) fn gemma(spec: &mut ModelSpec, facts: &Facts<'_>) -> Result<(), ConfigError> {
    spec.embedding_scale = Some((spec.hidden as f32).sqrt());
    tied_unless_said(spec, facts)?;
    let soft_cap = facts.get(Key::new(
        "final_logit_softcapping",
        "final_logit_softcapping",
    ))?;
    if let Some(logits) = spec.logits_mut() {
        logits.soft_cap = soft_cap;
    }
    let soft_cap = facts.get(Key::new("attn_logit_softcapping", "attn_logit_softcapping"))?;
    for layer in &mut spec.layers {
        layer.norms = Norms::Both;
        layer.attention_mut().soft_cap = soft_cap;
        if let Some(block) = layer.feed_forward.gated_mut() {
            block.activation = Activation::GeluTanh;
        }
    }
    Ok(())
}

/// What scores are multiplied by. GGUF files do not say it, but the largest model of a generation,
/// which is known by its number of layers, divides by what a head would have if they shared the width.
pub(super) fn score_scale(
    spec: &mut ModelSpec,
    facts: &Facts<'_>,
    layers_of_largest: usize,
) -> Result<(), ConfigError> {
    let stated: Option<f32> = facts.get(Key::huggingface("query_pre_attn_scalar"))?;
    let largest = spec.layers.len() == layers_of_largest && stated.is_none();
    for layer in &mut spec.layers {
        let attention = layer.attention_mut();
        let width = match stated {
            Some(width) => width,
            None if largest => (spec.hidden / attention.query_heads) as f32,
            None => attention.head_dim as f32,
        };
        attention.scale = 1.0 / width.sqrt();
    }
    Ok(())
}
