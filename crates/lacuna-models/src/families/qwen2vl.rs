//! The text part of Qwen 2 and 2.5 VL, which is Qwen 2: without images, all axes of a position are the
//! same.

use super::{Facts, Family, Naming, qwen2};
use crate::error::ConfigError;
use crate::spec::ModelSpec;

pub(crate) const FAMILY: Family = Family {
    name: "qwen2vl",
    classes: &[
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
    ],
    spec,
    naming: Naming::USUAL,
    shapes: &[],
};

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    qwen2::spec(facts)
}
