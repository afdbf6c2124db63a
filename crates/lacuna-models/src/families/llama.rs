//! Llama 2 and 3, and what is built like them: Mistral 7B and Nemo, SmolLM 2, Yi.

use lacuna_kernels::RopeStyle;

use super::decoder::{decoder, windows};
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::ModelSpec;

pub(crate) const FAMILY: Family = Family {
    name: "llama",
    classes: &["LlamaForCausalLM", "MistralForCausalLM"],
    spec,
    naming: Naming::USUAL,
};

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let mut spec = decoder(facts)?;
    // The converter permutes the rows of queries and keys.
    spec.ropes[0].style = facts.style(RopeStyle::Interleaved);
    let layers = spec.layers.len();
    windows(&mut spec, facts, &vec![true; layers])?;
    Ok(spec)
}
