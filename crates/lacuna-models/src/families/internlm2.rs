//! InternLM 2 and 2.5 from GGUF: Llama, whose converter permutes the rows of queries and keys. Folders have queries,
//! keys and values of a group of heads in turn, in one matrix, and are not read.

use lacuna_kernels::RopeStyle;

use super::decoder::decoder;
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::ModelSpec;

pub(crate) const FAMILY: Family = Family {
    name: "internlm2",
    classes: &[],
    spec,
    naming: Naming::USUAL,
    shapes: &[],
};

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let mut spec = decoder(facts)?;
    spec.ropes[0].style = RopeStyle::Interleaved;
    Ok(spec)
}
