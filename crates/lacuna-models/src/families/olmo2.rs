//! OLMo 2 and 3: norms after attention and feed-forward only, and over all of queries and of keys;
//! OLMo 3 has windows and stretches the rotation of its full layers.

use super::decoder::{decoder, turn_by_window, windows};
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::{ModelSpec, Norms, QkNorm};

pub(crate) const FAMILY: Family = Family {
    name: "olmo2",
    classes: &["Olmo2ForCausalLM", "Olmo3ForCausalLM"],
    spec,
    naming: Naming::USUAL,
    shapes: &[],
};

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let mut spec = decoder(facts)?;
    windows(&mut spec, facts, 4)?;
    turn_by_window(&mut spec, facts)?;
    for layer in &mut spec.layers {
        layer.attention_mut().qk_norm = Some(QkNorm::Whole);
        layer.norms = Norms::After;
    }
    Ok(spec)
}
