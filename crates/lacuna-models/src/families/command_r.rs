//! Cohere's first (Command R, Aya 23 and Expanse): attention and feed-forward side by side on one layer norm.

use lacuna_kernels::RopeStyle;

use super::decoder::{decoder, tied_unless_said};
use super::facts::Key;
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::{ModelSpec, NormKind, Norms};

pub(crate) const FAMILY: Family = Family {
    name: "command-r",
    classes: &["CohereForCausalLM"],
    spec,
    naming: Naming::USUAL,
    shapes: &[],
};

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let normed = match facts.has_tensor("blk.0.attn_q_norm.weight") {
        Some(has) => has,
        None => facts.get(Key::huggingface("use_qk_norm"))?.unwrap_or(false),
    };
    if normed {
        return Err(ConfigError::Unsupported {
            feature: "norms of heads with weights for each head (Command R+)".to_owned(),
            supported: "Command R without norms of heads is",
        });
    }
    let mut spec = decoder(facts)?;
    cohere(&mut spec, facts)?;
    Ok(spec)
}

/// What both generations have in common.
pub(super) fn cohere(spec: &mut ModelSpec, facts: &Facts<'_>) -> Result<(), ConfigError> {
    spec.norm.kind = NormKind::Layer;
    // Neighbours turn together in files of both kinds.
    spec.ropes[0].style = RopeStyle::Interleaved;
    let scale = facts.get(Key::new("logit_scale", "logit_scale"))?;
    if let Some(logits) = spec.logits_mut() {
        logits.scale = scale;
    }
    tied_unless_said(spec, facts)?;
    for layer in &mut spec.layers {
        layer.norms = Norms::Parallel;
    }
    Ok(())
}
