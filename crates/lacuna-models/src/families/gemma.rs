//! Gemma, the first: an embedding scaled by the root of the width, gates by GELU, norms stored as distances from one.

use super::decoder::{decoder, tied_unless_said};
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::{Activation, ModelSpec};

pub(crate) const FAMILY: Family = Family {
    name: "gemma",
    classes: &["GemmaForCausalLM"],
    spec,
    naming: Naming {
        norm_offset: 1.0,
        ..Naming::USUAL
    },
    shapes: &[],
};

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let mut spec = decoder(facts)?;
    spec.embedding_scale = Some((spec.hidden as f32).sqrt());
    tied_unless_said(&mut spec, facts)?;
    for layer in &mut spec.layers {
        if let Some(block) = layer.feed_forward.gated_mut() {
            // Published folders say `gelu` and mean its approximation.
            block.activation = Activation::GeluTanh;
        }
    }
    Ok(spec)
}
