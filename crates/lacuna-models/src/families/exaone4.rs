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
    naming: Naming::USUAL,
    shapes: &[],
};

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let mut spec = decoder(facts)?;
    windows(&mut spec, facts, 4)?;
    let any = spec.layers.iter().any(|layer| layer.mask() != Some(Mask::Causal));
    for layer in &mut spec.layers {
        layer.norms = Norms::After;
        layer.attention_mut().qk_norm = Some(QkNorm::PerHead);
        if any && layer.mask() == Some(Mask::Causal) {
            layer.attention_mut().rope = None;
        }
    }
    Ok(spec)
}
