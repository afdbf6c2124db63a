//! Mellum 2: Qwen 3 with experts in all layers, three of four of which have a window and turn plainly.

use super::decoder::{decoder, turn_by_windows, windows};
use super::experts::{experts, give_experts, normalized};
use super::facts::Key;
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::{ModelSpec, QkNorm};

pub(crate) const FAMILY: Family = Family {
    name: "mellum",
    classes: &["MellumForCausalLM"],
    spec,
    naming: Naming::USUAL,
    shapes: &[],
};

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let mut spec = decoder(facts)?;
    windows(&mut spec, facts, 4)?;
    let head_dim = spec.layers.first_mut().map_or(0, |layer| layer.attention_mut().head_dim);
    turn_by_windows(&mut spec, facts, head_dim)?;
    for layer in &mut spec.layers {
        layer.attention_mut().qk_norm = Some(QkNorm::PerHead);
    }
    let mut experts = experts(facts, &mut spec)?;
    experts.routing.normalized = normalized(facts, true)?;
    let kinds: Option<Vec<String>> = facts.get(Key::huggingface("mlp_layer_types"))?;
    let sparse = |layer| {
        let kind = kinds.as_ref().and_then(|kinds| kinds.get(layer));
        kind.is_none_or(|kind| kind != "dense")
    };
    give_experts(&mut spec, experts, sparse);
    Ok(spec)
}
