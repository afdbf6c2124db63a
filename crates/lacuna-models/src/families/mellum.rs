//! Mellum 2: Qwen 3 with experts whose layers with windows rotate plainly, and the others by YaRN.

use super::decoder::{decoder, give_windows, turn_by_window};
use super::experts::{experts, give_experts, normalized, sparse_layers};
use super::glm4moe::leave_out_layers_ahead;
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::{ModelSpec, QkNorm};

pub(crate) const FAMILY: Family = Family {
    name: "mellum",
    classes: &["MellumForCausalLM"],
    spec,
    naming: Naming {
        head: Some("mtp"),
        ..Naming::USUAL
    },
    shapes: &[],
};

/// Where a GGUF file does not say otherwise, every fourth layer is without a window.
const USUAL_PERIOD: usize = 4;

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let mut spec = decoder(facts)?;
    leave_out_layers_ahead(&mut spec, facts)?;
    let layers = spec.layers.len();
    let windowed = match facts.layer_types()? {
        // A folder that does not list its layers has no windows, as in `transformers`.
        None if !facts.is_gguf() => vec![false; layers],
        _ => facts.windowed(layers, USUAL_PERIOD)?,
    };
    give_windows(&mut spec, facts, &windowed)?;
    turn_by_window(&mut spec, facts)?;
    for layer in &mut spec.layers {
        layer.attention_mut().qk_norm = Some(QkNorm::PerHead);
    }
    let mut experts = experts(facts, &mut spec)?;
    experts.routing.normalized = normalized(facts, true)?;
    let sparse = sparse_layers(facts, layers)?;
    give_experts(&mut spec, experts, |layer| {
        sparse.as_ref().is_none_or(|sparse| sparse[layer])
    });
    Ok(spec)
}
