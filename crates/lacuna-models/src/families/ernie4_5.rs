//! ERNIE 4.5, dense: built like Llama, neighbours turn together.

use lacuna_kernels::RopeStyle;

use super::decoder::{decoder, tied_unless_said};
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::ModelSpec;

pub(crate) const FAMILY: Family = Family {
    name: "ernie4_5",
    classes: &["Ernie4_5ForCausalLM"],
    spec,
    naming: Naming::USUAL,
    shapes: &[],
};

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let mut spec = decoder(facts)?;
    // In files of both kinds.
    spec.ropes[0].style = RopeStyle::Interleaved;
    tied_unless_said(&mut spec, facts)?;
    Ok(spec)
}
