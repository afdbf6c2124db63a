//! Cohere 2 (Command R7B): attention and feed-forward side by side on one layer norm; layers without a
//! window do not encode positions.

use super::command_r::cohere;
use super::decoder::{decoder, windows};
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::{Mask, ModelSpec};

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
    cohere(&mut spec, facts)?;
    for layer in &mut spec.layers {
        if layer.mask() == Some(Mask::Causal) {
            layer.attention_mut().rope = None;
        }
    }
    Ok(spec)
}
