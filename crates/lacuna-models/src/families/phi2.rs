//! Phi 1, 1.5 and 2: attention and a block without gates read the same layer norm; biases on all products, logits
//! among them.

use super::decoder::{decoder, without_gates};
use super::facts::Key;
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::{Activation, Biases, ModelSpec, NormKind, Norms};

pub(crate) const FAMILY: Family = Family {
    name: "phi2",
    classes: &["PhiForCausalLM"],
    spec,
    naming: Naming {
        parts: &[
            ("output_norm", "model.final_layernorm"),
            ("attn_output", "self_attn.dense"),
            ("ffn_up", "mlp.fc1"),
            ("ffn_down", "mlp.fc2"),
        ],
        ..Naming::USUAL
    },
    shapes: &[],
};

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let supported = "heads without norms are";
    facts.expect(Key::huggingface("qk_layernorm"), false, supported)?;
    let mut spec = decoder(facts)?;
    spec.norm.kind = NormKind::BiasedLayer;
    for layer in &mut spec.layers {
        layer.norms = Norms::Parallel;
        layer.attention_mut().biases = Biases::ALL;
    }
    without_gates(&mut spec, Activation::GeluTanh, true);
    Ok(spec)
}
