//! Nemotron-H with experts, which GGUF files call a family of their own.

use super::nemotron_h::{NAMING, spec};
use super::{Family, Given, Shape, SpecialTokens};

pub(crate) const FAMILY: Family = Family {
    name: "nemotron_h_moe",
    classes: &[],
    spec,
    naming: NAMING,
    shapes: SHAPES,
};

/// Published models, smallest first.
const SHAPES: &[Shape] = &[Shape {
    name: "nemotron-3-nano-30b-a3b",
    family: "nemotron_h_moe",
    layers: 52,
    hidden: 2688,
    feed_forward: 1856,
    heads: 32,
    kv_heads: 2,
    head_size: 128,
    vocabulary: 131_072,
    special_tokens: Some(SpecialTokens::ChatMl),
    tied: false,
    context: 262_144,
    rope_theta: 1e4,
    rope_factor: None,
    norm_epsilon: 1e-5,
    more: &[
        ("attention.head_count_kv", Given::PerLayer(&KV_HEADS)),
        ("feed_forward_length", Given::PerLayer(&FEED_FORWARD)),
        ("expert_count", Given::Size(128)),
        ("expert_used_count", Given::Size(6)),
        ("expert_feed_forward_length", Given::Size(1856)),
        ("expert_shared_feed_forward_length", Given::Size(3712)),
        ("expert_weights_norm", Given::Flag(true)),
        // Beside that of the root of the mean square, which other engines ask for.
        ("attention.layer_norm_epsilon", Given::Number(1e-5)),
        ("expert_weights_scale", Given::Number(2.5)),
        ("ssm.conv_kernel", Given::Size(4)),
        ("ssm.state_size", Given::Size(128)),
        ("ssm.group_count", Given::Size(8)),
        ("ssm.time_step_rank", Given::Size(64)),
        ("ssm.inner_size", Given::Size(4096)),
    ],
}];

/// Those of layers with attention, and the width of experts in layers with those; the others keep a state.
const KV_HEADS: [usize; 52] = [0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0];
const FEED_FORWARD: [usize; 52] = [0, 1856, 0, 1856, 0, 0, 1856, 0, 1856, 0, 1856, 0, 0, 1856, 0, 1856, 0, 1856, 0, 0, 1856, 0, 1856, 0, 1856, 0, 0, 1856, 0, 1856, 0, 1856, 0, 0, 1856, 0, 1856, 0, 1856, 0, 1856, 0, 0, 1856, 0, 1856, 0, 1856, 0, 1856, 0, 1856];
