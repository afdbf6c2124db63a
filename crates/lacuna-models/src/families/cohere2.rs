//! Cohere 2 (Command R7B): attention and feed-forward side by side on one layer norm; layers without a
//! window do not encode positions.

use lacuna_kernels::RopeStyle;

use super::decoder::{decoder, tied_unless_said, windows};
use super::facts::Key;
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::{Mask, ModelSpec, NormKind, Norms};

pub(crate) const FAMILY: Family = Family {
    name: "cohere2",
    classes: &["Cohere2ForCausalLM"],
    spec,
    naming: Naming::USUAL,
    shapes: &[],
};

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let mut spec = decoder(facts)?;
    windows(&mut spec, facts, 4)?;
    spec.norm.kind = NormKind::Layer;
    // Neighbours turn together in files of both kinds.
    spec.ropes[0].style = RopeStyle::Interleaved;
    let scale = facts.get(Key::new("logit_scale", "logit_scale"))?;
    if let Some(logits) = spec.logits_mut() {
        logits.scale = scale;
    }
    tied_unless_said(&mut spec, facts)?;
    for layer in &mut spec.layers {
        layer.norms = Norms::Parallel;
        if layer.mask() == Some(Mask::Causal) {
            layer.attention_mut().rope = None;
        }
    }
    Ok(spec)
}
