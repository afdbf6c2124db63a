//! Qwen 2 and 2.5: biases on queries, keys and values.

use super::decoder::{all_windowed, decoder};
use super::facts::Key;
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::{Biases, ModelSpec};

pub(crate) const FAMILY: Family = Family {
    name: "qwen2",
    classes: &["Qwen2ForCausalLM"],
    spec,
    naming: Naming::USUAL,
};

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let mut spec = decoder(facts)?;
    for layer in &mut spec.layers {
        layer.attention.biases = Biases {
            projections: true,
            output: false,
        };
    }
    let used = facts.get(Key::huggingface("use_sliding_window"))?;
    if used != Some(false) {
        let window = facts.get(Key::new("attention.sliding_window", "sliding_window"))?;
        all_windowed(&mut spec, window);
    }
    Ok(spec)
}
