//! Granite 4 H: Mamba-2 in most layers and attention in a few, mostly without positions; Granite's
//! multipliers, experts beside a block that all tokens have, or that block alone.

use super::experts::{self, experts, give_experts, shared};
use super::facts::Key;
use super::mamba2::mamba2;
use super::{Facts, Family, Given, Naming, Shape, SpecialTokens, granite};
use crate::error::ConfigError;
use crate::spec::{ModelSpec, Recurrence, Scores};

pub(crate) const FAMILY: Family = Family {
    name: "granitehybrid",
    classes: &["GraniteMoeHybridForCausalLM"],
    spec,
    naming: Naming {
        parts: &[
            ("ssm_in", "mamba.in_proj"),
            ("ssm_conv1d", "mamba.conv1d"),
            ("ssm_dt.bias", "mamba.dt_bias"),
            ("ssm_a", "mamba.A_log"),
            ("ssm_d", "mamba.D"),
            ("ssm_norm", "mamba.norm"),
            ("ssm_out", "mamba.out_proj"),
            ("ffn_gate_inp", "block_sparse_moe.router.layer"),
            ("ffn_gate_up_exps", "block_sparse_moe.input_linear"),
            ("ffn_down_exps", "block_sparse_moe.output_linear"),
            ("ffn_gate_up_shexp", "shared_mlp.input_linear"),
            ("ffn_down_shexp", "shared_mlp.output_linear"),
            // Where it is the only one.
            ("ffn_gate_up", "shared_mlp.input_linear"),
            ("ffn_down", "shared_mlp.output_linear"),
        ],
        ..Naming::USUAL
    },
    shapes: SHAPES,
};

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let mut spec = granite::spec(facts)?;
    let mamba = Recurrence::Mamba2(mamba2(facts)?);
    // In GGUF a key that says something else elsewhere.
    let turned: Option<bool> = facts.get(Key::gguf("rope.scaling.finetuned"))?;
    let positions: Option<String> = facts.get(Key::huggingface("position_embedding_type"))?;
    let turned = match facts.is_gguf() {
        true => turned.unwrap_or(true),
        false => positions.as_deref() == Some("rope"),
    };
    let recurrent = facts.recurrent(spec.layers.len(), &["mamba", "linear_attention"])?;
    let recurrent = recurrent.unwrap_or_else(|| vec![true; spec.layers.len()]);
    for (layer, recurrent) in spec.layers.iter_mut().zip(recurrent) {
        if recurrent {
            layer.attention = None;
            layer.recurrence = Some(mamba);
        } else if !turned {
            layer.attention_mut().rope = None;
        }
    }
    let count: Option<usize> = facts.get(experts::COUNT)?;
    if count.is_some_and(|count| count > 0) {
        let mut experts = experts(facts, &mut spec)?;
        experts.routing.scores = Scores::SoftmaxOfChosen;
        experts.routing.normalized = false;
        experts.shared = shared(facts, experts.inner, false)?;
        give_experts(&mut spec, experts, |_| true);
        return Ok(spec);
    }
    let width: Option<usize> = facts.get(Key::huggingface("shared_intermediate_size"))?;
    for block in spec.layers.iter_mut().filter_map(|layer| layer.feed_forward.gated_mut()) {
        block.inner = width.unwrap_or(block.inner);
    }
    Ok(spec)
}

/// Published models, smallest first.
const SHAPES: &[Shape] = &[Shape {
    name: "granite-4-h-tiny",
    family: "granitehybrid",
    layers: 40,
    hidden: 1536,
    feed_forward: 512,
    heads: 12,
    kv_heads: 4,
    head_size: 128,
    vocabulary: 100_352,
    special_tokens: Some(SpecialTokens::ChatMl),
    tied: true,
    context: 131_072,
    rope_theta: 1e4,
    rope_factor: None,
    norm_epsilon: 1e-5,
    more: &[
        // A tenth of the layers have attention.
        (
            "attention.head_count_kv",
            Given::PerLayer(&[0, 0, 0, 0, 0, 4, 0, 0, 0, 0]),
        ),
        ("rope.scaling.finetuned", Given::Flag(false)),
        ("attention.scale", Given::Number(0.007_812_5)),
        ("embedding_scale", Given::Number(12.0)),
        ("residual_scale", Given::Number(0.22)),
        ("logit_scale", Given::Number(6.0)),
        ("expert_count", Given::Size(64)),
        ("expert_used_count", Given::Size(6)),
        ("expert_shared_feed_forward_length", Given::Size(1024)),
        ("ssm.conv_kernel", Given::Size(4)),
        ("ssm.state_size", Given::Size(128)),
        ("ssm.group_count", Given::Size(1)),
        ("ssm.time_step_rank", Given::Size(48)),
        ("ssm.inner_size", Given::Size(3072)),
    ],
}];
