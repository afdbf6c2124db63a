//! StarCoder 2: layer norms, blocks without gates, biases on all products.

use super::decoder::{ALL, decoder, tied_unless_said, windows, without_gates};
use super::facts::Key;
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::{Activation, Biases, ModelSpec, NormKind};

pub(crate) const FAMILY: Family = Family {
    name: "starcoder2",
    classes: &["Starcoder2ForCausalLM"],
    spec,
    naming: Naming {
        parts: &[("ffn_up", "mlp.c_fc"), ("ffn_down", "mlp.c_proj")],
        ..Naming::USUAL
    },
    shapes: &[],
};

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let mut spec = decoder(facts)?;
    spec.norm.kind = NormKind::BiasedLayer;
    tied_unless_said(&mut spec, facts)?;
    windows(&mut spec, facts, ALL)?;
    let biases = facts.get(Key::huggingface("use_bias"))?.unwrap_or(true);
    for layer in &mut spec.layers {
        layer.attention_mut().biases = Biases {
            projections: biases,
            output: biases,
        };
    }
    // GGUF files do not say it.
    let said = spec.layers.first_mut();
    let said = said.and_then(|layer| layer.feed_forward.gated_mut());
    let said = said.filter(|_| !facts.is_gguf());
    let activation = said.map_or(Activation::GeluTanh, |block| block.activation);
    without_gates(&mut spec, activation, biases);
    Ok(spec)
}
