//! GLM 4, dense: norms on both sides, part of each head turns.

use lacuna_kernels::RopeStyle;

use super::decoder::decoder;
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::{ModelSpec, Norms};

pub(crate) const FAMILY: Family = Family {
    name: "glm4",
    classes: &["Glm4ForCausalLM"],
    spec,
    naming: Naming {
        parts: &[
            ("post_attention_norm", "post_self_attn_layernorm"),
            ("post_ffw_norm", "post_mlp_layernorm"),
        ],
        ..Naming::USUAL
    },
    shapes: &[],
};

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let mut spec = decoder(facts)?;
    // Neighbours turn together in files of both kinds.
    spec.ropes[0].style = RopeStyle::Interleaved;
    for layer in &mut spec.layers {
        layer.norms = Norms::Both;
    }
    Ok(spec)
}
