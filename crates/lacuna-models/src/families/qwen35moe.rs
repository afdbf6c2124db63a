//! Qwen 3.5 and later with experts: 35B-A3B and larger.

use super::qwen3next::{NAMING, sparse};
use super::{Facts, Family, qwen35};
use crate::error::ConfigError;
use crate::spec::ModelSpec;

pub(crate) const FAMILY: Family = Family {
    name: "qwen35moe",
    classes: &["Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"],
    spec,
    naming: NAMING,
    shapes: &[],
};

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let mut spec = qwen35::spec(facts)?;
    sparse(facts, &mut spec)?;
    Ok(spec)
}
