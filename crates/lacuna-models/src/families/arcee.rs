//! Arcee Foundation Models (AFM 4.5B): built like Llama with squared ReLU without gates.

use lacuna_kernels::RopeStyle;

use super::decoder::{decoder, without_gates};
use super::facts::Key;
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::{Activation, ModelSpec};

pub(crate) const FAMILY: Family = Family {
    name: "arcee",
    classes: &["ArceeForCausalLM"],
    spec,
    naming: Naming::USUAL,
    shapes: &[],
};

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let mut spec = decoder(facts)?;
    // The converter permutes the rows of queries and keys.
    spec.ropes[0].style = facts.style(RopeStyle::Interleaved);
    let function = Key::huggingface("hidden_act");
    facts.expect(function, "relu2".to_owned(), "relu2 is")?;
    without_gates(&mut spec, Activation::ReluSquared, false);
    Ok(spec)
}
