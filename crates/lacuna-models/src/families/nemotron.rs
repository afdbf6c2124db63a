//! Nemotron 4 and Minitron: layer norms stored as distances from one, squared ReLU without gates, half of each
//! head turns.

use super::decoder::{decoder, without_gates};
use super::facts::Key;
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::{Activation, ModelSpec, NormKind};

pub(crate) const FAMILY: Family = Family {
    name: "nemotron",
    classes: &["NemotronForCausalLM"],
    spec,
    naming: Naming {
        norm_offset: 1.0,
        ..Naming::USUAL
    },
    shapes: &[],
};

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let mut spec = decoder(facts)?;
    spec.norm.kind = NormKind::BiasedLayer;
    let function = Key::huggingface("hidden_act");
    facts.expect(function, "relu2".to_owned(), "relu2 is")?;
    without_gates(&mut spec, Activation::ReluSquared, false);
    Ok(spec)
}
