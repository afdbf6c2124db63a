//! The decoder of Qwen 3 VL, which is Qwen 3: positions of images' tokens have three numbers, which turn pairs in turn.

use super::qwen_vision::give_images;
use super::{Facts, Family, Naming, qwen3};
use crate::error::ConfigError;
use crate::spec::{ModelSpec, RopeAxes};

pub(crate) const FAMILY: Family = Family {
    name: "qwen3vl",
    classes: &["Qwen3VLForConditionalGeneration"],
    spec,
    naming: Naming::USUAL,
    shapes: &[],
};

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let mut spec = qwen3::spec(facts)?;
    give_images(&mut spec, facts, RopeAxes::Interleaved)?;
    Ok(spec)
}
