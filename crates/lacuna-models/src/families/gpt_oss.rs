//! gpt-oss: sinks, windows on every other layer, biases everywhere, experts with gates that are clamped.

use super::decoder::{decoder, windows};
use super::experts::{experts, give_experts};
use super::{Facts, Family, Given, Naming, Shape, SpecialTokens};
use crate::error::ConfigError;
use crate::spec::{Biases, ExpertBlock, Gating, ModelSpec, RopeScaling, Scores};

pub(crate) const FAMILY: Family = Family {
    name: "gpt-oss",
    classes: &["GptOssForCausalLM"],
    spec,
    naming: Naming {
        parts: &[
            ("ffn_gate_inp", "mlp.router"),
            ("attn_sinks", "self_attn.sinks"),
        ],
        gguf: &[("ffn_norm", "post_attention_norm")],
        bare: &["attn_sinks"],
        ..Naming::USUAL
    },
    shapes: SHAPES,
};

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let mut spec = decoder(facts)?;
    windows(&mut spec, facts, 2)?;
    for rope in &mut spec.ropes {
        if let RopeScaling::Yarn(yarn) = &mut rope.scaling {
            // As the model was trained; GGUF has no key for it, and folders say the same.
            yarn.truncate = false;
        }
    }
    for layer in &mut spec.layers {
        layer.attention_mut().sinks = true;
        layer.attention_mut().biases = Biases::ALL;
    }
    let mut experts = experts(facts, &mut spec)?;
    experts.routing.scores = Scores::SoftmaxOfChosen;
    experts.routing.normalized = false;
    experts.router.bias = true;
    experts.biases = true;
    experts.block = ExpertBlock::Gated(Gating::Clamped {
        // Those of both published models; GGUF has no keys for them, and folders say the same.
        alpha: 1.702,
        limit: 7.0,
    });
    give_experts(&mut spec, experts, |_| true);
    Ok(spec)
}

/// Published models, smallest first.
const SHAPES: &[Shape] = &[Shape {
    name: "gpt-oss-20b",
    family: "gpt-oss",
    layers: 24,
    hidden: 2880,
    feed_forward: 2880,
    heads: 64,
    kv_heads: 8,
    head_size: 64,
    vocabulary: 201_088,
    // Their own are of another kind of text; a synthetic vocabulary needs some.
    special_tokens: Some(SpecialTokens::Llama3),
    tied: false,
    context: 131_072,
    rope_theta: 150_000.0,
    rope_factor: None,
    norm_epsilon: 1e-5,
    more: &[
        ("expert_count", Given::Size(32)),
        ("expert_used_count", Given::Size(4)),
        ("expert_feed_forward_length", Given::Size(2880)),
        ("attention.sliding_window", Given::Size(128)),
        ("rope.scaling.type", Given::Text("yarn")),
        ("rope.scaling.factor", Given::Number(32.0)),
        ("rope.scaling.original_context_length", Given::Size(4096)),
    ],
}];
