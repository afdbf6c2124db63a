//! OLMoE: norms over all of queries and of keys, and weights as the softmax over all experts has them.

use super::decoder::decoder;
use super::experts::{experts, give_experts, normalized};
use super::facts::Key;
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::{ModelSpec, QkNorm};

pub(crate) const FAMILY: Family = Family {
    name: "olmoe",
    classes: &["OlmoeForCausalLM"],
    spec,
    naming: Naming::USUAL,
    shapes: &[],
};

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let clip: Option<f32> = facts.get(Key::new("attention.clamp_kqv", "clip_qkv"))?;
    if let Some(bound) = clip.filter(|bound| *bound > 0.0) {
        return Err(ConfigError::Unsupported {
            feature: format!("clip_qkv {bound}"),
            supported: "queries, keys and values without bounds are",
        });
    }
    let mut spec = decoder(facts)?;
    for layer in &mut spec.layers {
        layer.attention_mut().qk_norm = Some(QkNorm::Whole);
    }
    let mut experts = experts(facts, &mut spec)?;
    experts.routing.normalized = normalized(facts, false)?;
    give_experts(&mut spec, experts, |_| true);
    Ok(spec)
}
