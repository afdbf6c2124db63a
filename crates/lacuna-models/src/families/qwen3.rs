//! Qwen 3, dense: queries and keys are normed head by head.

use super::decoder::decoder;
use super::qwen2::qwen_windows;
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::{ModelSpec, QkNorm};

pub(crate) const FAMILY: Family = Family {
    name: "qwen3",
    classes: &["Qwen3ForCausalLM"],
    spec,
    naming: Naming::USUAL,
};

pub(super) fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let mut spec = decoder(facts)?;
    for layer in &mut spec.layers {
        layer.attention.qk_norm = Some(QkNorm::PerHead);
    }
    qwen_windows(&mut spec, facts)?;
    Ok(spec)
}
