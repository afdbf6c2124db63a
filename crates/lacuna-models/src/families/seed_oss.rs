//! Seed-OSS: biases on queries, keys and values, heads whose size is their own.

use super::decoder::decoder;
use super::facts::Key;
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::{Biases, ModelSpec};

pub(crate) const FAMILY: Family = Family {
    name: "seed_oss",
    classes: &["SeedOssForCausalLM"],
    spec,
    naming: Naming {
        gguf: &[("ffn_norm", "post_attention_norm")],
        ..Naming::USUAL
    },
    shapes: &[],
};

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let mut spec = decoder(facts)?;
    let has = |tensor, name, usual| -> Result<bool, ConfigError> {
        match facts.has_tensor(tensor) {
            Some(has) => Ok(has),
            None => Ok(facts.get(Key::huggingface(name))?.unwrap_or(usual)),
        }
    };
    let biases = Biases {
        projections: has("blk.0.attn_q.bias", "attention_bias", true)?,
        output: has("blk.0.attn_output.bias", "attention_out_bias", false)?,
    };
    for layer in &mut spec.layers {
        layer.attention_mut().biases = biases;
    }
    Ok(spec)
}
