//! The decoder of Qwen 2 and 2.5 VL, which is Qwen 2: positions of images' tokens have three numbers, each of which turns
//! a section of pairs.

use super::qwen_vision::give_images;
use super::{Facts, Family, Naming, qwen2};
use crate::error::ConfigError;
use crate::spec::{ModelSpec, RopeAxes};

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
    let mut spec = qwen2::spec(facts)?;
    give_images(&mut spec, facts, RopeAxes::Sections)?;
    Ok(spec)
}
