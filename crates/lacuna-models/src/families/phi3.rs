//! Phi 3, 3.5, 4 and 4 mini: fused products, longrope, part of each head turns.

use super::decoder::{ALL, decoder, windows};
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::ModelSpec;

pub(crate) const FAMILY: Family = Family {
    name: "phi3",
    classes: &["Phi3ForCausalLM"],
    spec,
    naming: Naming::USUAL,
    shapes: &[],
};

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let mut spec = decoder(facts)?;
    windows(&mut spec, facts, ALL)?;
    Ok(spec)
}
