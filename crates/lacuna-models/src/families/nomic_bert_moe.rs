//! nomic-embed-text v2: every other layer has experts, none of the blocks has gates. GGUF files alone: what
//! all experts of a layer have added in the end (`mlp.experts.bias`), folders have and converters leave out.

use super::encoder::expect_encoder;
use super::experts::{experts, give_experts};
use super::facts::Key;
use super::nomic_bert::rotated;
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::{Activation, ExpertBlock, FeedForward, ModelSpec, Plain};

pub(crate) const FAMILY: Family = Family {
    name: "nomic-bert-moe",
    classes: &[],
    spec,
    naming: Naming::USUAL,
    shapes: &[],
};

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    expect_encoder(facts)?;
    let mut spec = rotated(facts)?;
    let mut experts = experts(facts, &mut spec)?;
    experts.routing.normalized = false;
    experts.block = ExpertBlock::Plain(Activation::GeluErf);
    for layer in &mut spec.layers {
        let inner = layer.feed_forward.gated_mut().map_or(0, |block| block.inner);
        layer.feed_forward = FeedForward::Plain(Plain {
            inner,
            activation: Activation::GeluErf,
            biases: true,
        });
    }
    // The first has none, and 0 says that none has.
    let every: usize = facts.required(Key::gguf("moe_every_n_layers"))?;
    give_experts(&mut spec, experts, |layer| layer.checked_rem(every) == Some(1));
    Ok(spec)
}
