//! The text part of Qwen 3 VL, which is Qwen 3: without images, all axes of a position are the same.

use super::{Facts, Family, Naming, qwen3};
use crate::error::ConfigError;
use crate::spec::ModelSpec;

pub(crate) const FAMILY: Family = Family {
    name: "qwen3vl",
    classes: &["Qwen3VLForConditionalGeneration"],
    spec,
    naming: Naming::USUAL,
    shapes: &[],
};

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    qwen3::spec(facts)
}
