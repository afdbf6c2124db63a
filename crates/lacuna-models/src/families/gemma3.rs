//! Gemma 3: five layers with a window to one without, each kind with a rotation of its own; text, or
//! the text part of the models that see.

use super::decoder::{decoder, windows};
use super::gemma2::{NAMING, gemma, score_scale};
use super::{Facts, Family};
use crate::error::ConfigError;
use crate::spec::{Mask, ModelSpec, QkNorm};

pub(crate) const FAMILY: Family = Family {
    name: "gemma3",
    classes: &["Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"],
    spec,
    naming: NAMING,
};

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let mut spec = decoder(facts)?;
    let windowed = facts.windowed(spec.layers.len(), 6)?;
    windows(&mut spec, facts, &windowed)?;
    gemma(&mut spec, facts)?;
    let head_dim = spec.ropes[0].dimensions;
    spec.ropes = facts.ropes(head_dim, head_dim)?.into();
    for layer in &mut spec.layers {
        let full = layer.attention.mask == Mask::Causal;
        layer.attention.rope = Some(usize::from(!full));
        layer.attention.qk_norm = Some(QkNorm::PerHead);
    }
    score_scale(&mut spec, facts, 62)
}
