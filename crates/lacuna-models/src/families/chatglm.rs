//! GLM 4 9B of 2024 and GLM Edge, which GGUF files call after ChatGLM: half of each head turns, norms before both
//! halves of a layer.

use lacuna_kernels::RopeStyle;

use super::decoder::decoder;
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::ModelSpec;

pub(crate) const FAMILY: Family = Family {
    name: "chatglm",
    classes: &["GlmForCausalLM"],
    spec,
    naming: Naming::USUAL,
    shapes: &[],
};

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let mut spec = decoder(facts)?;
    // Neighbours turn together in files of both kinds.
    spec.ropes[0].style = RopeStyle::Interleaved;
    Ok(spec)
}
