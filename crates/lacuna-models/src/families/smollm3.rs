//! SmolLM 3: every fourth layer does not encode positions.

use lacuna_kernels::RopeStyle;

use super::decoder::{decoder, tied_unless_said};
use super::facts::Key;
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::ModelSpec;

pub(crate) const FAMILY: Family = Family {
    name: "smollm3",
    classes: &["SmolLM3ForCausalLM"],
    spec,
    naming: Naming::USUAL,
    shapes: &[],
};

/// No file of either kind needs to say it.
const USUAL_INTERVAL: usize = 4;

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let mut spec = decoder(facts)?;
    spec.ropes[0].style = facts.style(RopeStyle::Interleaved);
    tied_unless_said(&mut spec, facts)?;
    // The list has 1 where a layer turns its heads.
    let turns = facts.per_layer(Key::huggingface("no_rope_layers"), spec.layers.len())?;
    let interval = facts.get(Key::huggingface("no_rope_layer_interval"))?;
    let interval: usize = interval.unwrap_or(USUAL_INTERVAL);
    for (index, layer) in spec.layers.iter_mut().enumerate() {
        let turned = match &turns {
            Some(turns) => turns[index] != 0,
            None => interval == 0 || !(index + 1).is_multiple_of(interval),
        };
        layer.attention_mut().rope = turned.then_some(0);
    }
    Ok(spec)
}
