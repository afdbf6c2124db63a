//! The decoder of Qwen 3 VL with experts, 30B-A3B and 235B-A22B, which is Qwen 3's with experts: positions as those of the
//! dense one.

use super::qwen_vision::give_images;
use super::{Facts, Family, Naming, qwen3moe};
use crate::error::ConfigError;
use crate::spec::{ModelSpec, RopeAxes};

pub(crate) const FAMILY: Family = Family {
    name: "qwen3vlmoe",
    classes: &["Qwen3VLMoeForConditionalGeneration"],
    spec,
    naming: Naming::USUAL,
    shapes: &[],
};

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    // Newer folders do not say that weights sum to 1, which they always do.
    let mut spec = qwen3moe::sparse(facts, true)?;
    give_images(&mut spec, facts, RopeAxes::Interleaved)?;
    Ok(spec)
}
