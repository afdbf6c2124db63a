//! Cohere 2 (Command R7B): attention and feed-forward side by side on one layer norm; layers without a
//! window do not encode positions.

use lacuna_kernels::RopeStyle;

use super::decoder::{decoder, windows};
use super::facts::Key;
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::{Mask, ModelSpec, NormKind, Norms, OutputMatrix};

pub(crate) const FAMILY: Family = Family {
    name: "cohere2",
    classes: &["Cohere2ForCausalLM"],
    spec,
    naming: Naming::USUAL,
    shapes: &[],
};

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let mut spec = decoder(facts)?;
    let windowed = facts.windowed(spec.layers.len(), 4)?;
    windows(&mut spec, facts, &windowed)?;
    spec.norm.kind = NormKind::Layer;
    // Neighbours turn together in files of both kinds.
    spec.ropes[0].style = RopeStyle::Interleaved;
    spec.output.scale = facts.get(Key::new("logit_scale", "logit_scale"))?;
    if facts.get(Key::huggingface("tie_word_embeddings"))?.is_none_or(|tied| tied)
        && facts.has_tensor("output.weight") != Some(true)
    {
        spec.output.matrix = OutputMatrix::Tied;
    }
    for layer in &mut spec.layers {
        layer.norms = Norms::Parallel;
        if layer.attention.mask == Mask::Causal {
            layer.attention.rope = None;
        }
    }
    Ok(spec)
}
