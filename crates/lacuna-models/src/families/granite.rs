//! Granite 3 and 4, dense: multipliers on embeddings, residuals, scores and logits.

use lacuna_kernels::RopeStyle;

use super::decoder::decoder;
use super::facts::Key;
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::{ModelSpec, ResidualScale};

pub(crate) const FAMILY: Family = Family {
    name: "granite",
    classes: &["GraniteForCausalLM"],
    spec,
    naming: Naming::USUAL,
    shapes: &[],
};

pub(super) fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let mut spec = decoder(facts)?;
    spec.ropes[0].style = facts.style(RopeStyle::Interleaved);
    spec.embedding_scale = facts.get(Key::new("embedding_scale", "embedding_multiplier"))?;
    let divisor: Option<f32> = facts.get(Key::new("logit_scale", "logits_scaling"))?;
    if let Some(logits) = spec.logits_mut() {
        logits.scale = divisor.map(|divisor| 1.0 / divisor);
    }
    let residual = facts.get(Key::new("residual_scale", "residual_multiplier"))?;
    let scale: Option<f32> = facts.get(Key::new("attention.scale", "attention_multiplier"))?;
    for layer in &mut spec.layers {
        layer.residual_scale = ResidualScale::all(residual);
        let attention = layer.attention_mut();
        attention.scale = scale.unwrap_or(attention.scale);
    }
    Ok(spec)
}
