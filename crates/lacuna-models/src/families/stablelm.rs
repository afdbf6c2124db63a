//! StableLM 3B, StableLM 2 1.6B and Stable Code 3B: layer norms, part of each head turns. Attention and
//! feed-forward blocks may read the same input.

use super::decoder::decoder;
use super::facts::Key;
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::{ModelSpec, NormKind, Norms};

pub(crate) const FAMILY: Family = Family {
    name: "stablelm",
    classes: &["StableLmForCausalLM"],
    spec,
    naming: Naming::USUAL,
    shapes: &[],
};

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let normed = match facts.has_tensor("blk.0.attn_q_norm.weight") {
        Some(has) => has,
        None => facts.get(Key::huggingface("qk_layernorm"))?.unwrap_or(false),
    };
    if normed {
        return Err(ConfigError::Unsupported {
            feature: "norms of heads with weights for each head (StableLM 2 12B)".to_owned(),
            supported: "StableLM without norms of heads is",
        });
    }
    let mut spec = decoder(facts)?;
    spec.norm.kind = NormKind::BiasedLayer;
    let said = facts.get(Key::new("use_parallel_residual", "use_parallel_residual"))?;
    // Whether there is a second norm is what other programs go by.
    let parallel = match facts.has_tensor("blk.0.ffn_norm.weight") {
        Some(has) => !has,
        None => said.unwrap_or(false),
    };
    if parallel {
        for layer in &mut spec.layers {
            layer.norms = Norms::Parallel;
        }
    }
    Ok(spec)
}
