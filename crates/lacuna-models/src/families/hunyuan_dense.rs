//! Hunyuan, dense (0.5B to 7B, and the translators of HY-MT): heads are normed once they are turned, by a base
//! that is stretched once.

use super::decoder::decoder;
use super::facts::Key;
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::{ModelSpec, QkNorm};

pub(crate) const FAMILY: Family = Family {
    name: "hunyuan-dense",
    classes: &["HunYuanDenseV1ForCausalLM"],
    spec,
    naming: Naming {
        parts: &[
            ("attn_q_norm", "self_attn.query_layernorm"),
            ("attn_k_norm", "self_attn.key_layernorm"),
        ],
        ..Naming::USUAL
    },
    shapes: &[],
};

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    hunyuan(facts)
}

/// What dense models and those with experts have in common.
pub(super) fn hunyuan(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let shares = Key::huggingface("use_cla");
    facts.expect(shares, false, "layers with keys and values of their own are")?;
    let mut spec = decoder(facts)?;
    for layer in &mut spec.layers {
        layer.attention_mut().qk_norm = Some(QkNorm::Turned);
    }
    Ok(spec)
}
