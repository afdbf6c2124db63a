//! EXAONE 4: norms after attention and feed-forward, heads normed; where layers have windows, those
//! without one do not encode positions.

use super::decoder::{decoder, windows};
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::{Mask, ModelSpec, Norms, QkNorm};

pub(crate) const FAMILY: Family = Family {
    name: "exaone4",
    classes: &["Exaone4ForCausalLM"],
    spec,
    naming: Naming {
        parts: &[
            ("post_attention_norm", "post_attention_layernorm"),
            ("post_ffw_norm", "post_feedforward_layernorm"),
        ],
        ..Naming::USUAL
    },
    shapes: &[],
};

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let mut spec = decoder(facts)?;
    let windowed = facts.windowed(spec.layers.len(), 4)?;
    windows(&mut spec, facts, &windowed)?;
    let any = spec.layers.iter().any(|layer| layer.attention.mask != Mask::Causal);
    for layer in &mut spec.layers {
        layer.norms = Norms::After;
        layer.attention.qk_norm = Some(QkNorm::PerHead);
        if any && layer.attention.mask == Mask::Causal {
            layer.attention.rope = None;
        }
    }
    Ok(spec)
}
