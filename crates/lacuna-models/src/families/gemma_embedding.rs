//! EmbeddingGemma: Gemma 3 whose tokens see to both sides, pooled, with products of what comes of it.

use super::encoder::{pooled, see_both_sides};
use super::facts::Key;
use super::gemma2::NAMING;
use super::gemma3;
use super::{Facts, Family};
use crate::error::ConfigError;
use crate::spec::{Dense, ModelSpec, OutputSpec, Pooled};

pub(crate) const FAMILY: Family = Family {
    name: "gemma-embedding",
    classes: &["Gemma3TextModel"],
    spec,
    naming: NAMING,
    shapes: &[],
};

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let mut spec = gemma3::spec(facts)?;
    let both_sides: Option<bool> = facts.get(Key::huggingface("use_bidirectional_attention"))?;
    if both_sides.unwrap_or(facts.is_gguf()) {
        see_both_sides(&mut spec);
    }
    let mut pooled = Pooled {
        final_norm: true,
        ..pooled(facts, None)?
    };
    // GGUF files have them if they were converted with sentence-transformers' modules.
    let widths = ["dense_2.weight", "dense_3.weight"].map(|name| facts.rows_of(name));
    pooled.dense = widths.map(|width| width.map(Dense::plain));
    spec.output = OutputSpec::Pooled(pooled);
    Ok(spec)
}
