//! Falcon-H1: attention and Mamba-2 side by side in every layer, and a multiplier on each product, which GGUF
//! files have in their weights.

use super::decoder::decoder;
use super::facts::Key;
use super::mamba2::mamba2;
use super::{Facts, Family, Given, Naming, Shape, SpecialTokens};
use crate::error::ConfigError;
use crate::spec::{Mamba2, ModelSpec, Recurrence, ResidualScale, StateNorm};

pub(crate) const FAMILY: Family = Family {
    name: "falcon-h1",
    classes: &["FalconH1ForCausalLM"],
    spec,
    naming: Naming {
        parts: &[
            ("output_norm", "model.final_layernorm"),
            ("ffn_norm", "pre_ff_layernorm"),
            ("ssm_in", "mamba.in_proj"),
            ("ssm_conv1d", "mamba.conv1d"),
            ("ssm_dt.bias", "mamba.dt_bias"),
            ("ssm_a", "mamba.A_log"),
            ("ssm_d", "mamba.D"),
            ("ssm_norm", "mamba.norm"),
            ("ssm_out", "mamba.out_proj"),
            ("ffn_gate", "feed_forward.gate_proj"),
            ("ffn_up", "feed_forward.up_proj"),
            ("ffn_down", "feed_forward.down_proj"),
        ],
        gguf_bare: &["ffn_norm"],
        ..Naming::USUAL
    },
    shapes: SHAPES,
};

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    // A multiplier that is applied elsewhere than its product would multiply a bias along.
    for option in ["attention_bias", "mlp_bias", "mamba_proj_bias", "projectors_bias"] {
        facts.expect(Key::huggingface(option), false, "products without biases are")?;
    }
    let mut spec = decoder(facts)?;
    let mut mamba = mamba2(facts)?;
    let width = Key::huggingface("mamba_d_ssm");
    facts.expect(width, mamba.width(), "the width of all heads of a state is")?;
    mamba.norm = norm(facts)?;
    if !facts.is_gguf() {
        multiply(&mut spec, &mut mamba, facts)?;
    }
    for layer in &mut spec.layers {
        layer.recurrence = Some(Recurrence::Mamba2(mamba));
    }
    Ok(spec)
}

/// Where states' results are normed: GGUF has no word for it but the norm itself, and llama.cpp gates first.
fn norm(facts: &Facts<'_>) -> Result<StateNorm, ConfigError> {
    if let Some(normed) = facts.has_tensor("blk.0.ssm_norm.weight") {
        return Ok(match normed {
            true => StateNorm::AfterGate,
            false => StateNorm::None,
        });
    }
    let normed: Option<bool> = facts.get(Key::huggingface("mamba_rms_norm"))?;
    let first: Option<bool> = facts.get(Key::huggingface("mamba_norm_before_gate"))?;
    Ok(match (normed.unwrap_or(false), first.unwrap_or(true)) {
        (false, _) => StateNorm::None,
        (true, true) => StateNorm::BeforeGate,
        (true, false) => StateNorm::AfterGate,
    })
}

/// Puts the multipliers of a folder where the fewest numbers are multiplied: those of attention's input and
/// keys in the scale of scores, that of its values, which are summed, in the result.
fn multiply(spec: &mut ModelSpec, mamba: &mut Mamba2, facts: &Facts<'_>) -> Result<(), ConfigError> {
    let one = |name: &'static str| -> Result<f32, ConfigError> {
        Ok(facts.get(Key::huggingface(name))?.unwrap_or(1.0))
    };
    spec.embedding_scale = Some(one("embedding_multiplier")?);
    let logits = one("lm_head_multiplier")?;
    if let Some(output) = spec.logits_mut() {
        output.scale = Some(logits);
    }
    let block: Option<[f64; 2]> = facts.get(Key::huggingface("mlp_multipliers"))?;
    let [gate, down] = block.unwrap_or([1.0; 2]);
    let input = one("attention_in_multiplier")?;
    let scores = input * input * one("key_multiplier")?;
    let residual_scale = ResidualScale {
        attention: Some(input * one("attention_out_multiplier")?),
        recurrence: Some(one("ssm_out_multiplier")?),
        feed_forward: Some(down as f32),
    };
    for layer in &mut spec.layers {
        layer.attention_mut().scale *= scores;
        layer.residual_scale = residual_scale;
        if let Some(block) = layer.feed_forward.gated_mut() {
            block.gate_scale = Some(gate as f32);
        }
    }
    let inputs = one("ssm_in_multiplier")?;
    let parts: Option<[f64; 5]> = facts.get(Key::huggingface("ssm_multipliers"))?;
    let parts = parts.unwrap_or([1.0; 5]);
    mamba.input_scales = Some(parts.map(|part| inputs * part as f32));
    Ok(())
}

/// Published models, smallest first.
const SHAPES: &[Shape] = &[Shape {
    name: "falcon-h1-1.5b",
    family: "falcon-h1",
    layers: 24,
    hidden: 2048,
    feed_forward: 4608,
    heads: 8,
    kv_heads: 2,
    head_size: 128,
    vocabulary: 65_537,
    special_tokens: Some(SpecialTokens::ChatMl),
    tied: false,
    context: 131_072,
    rope_theta: 1e11,
    rope_factor: None,
    norm_epsilon: 1e-5,
    more: &[
        ("ssm.conv_kernel", Given::Size(4)),
        ("ssm.state_size", Given::Size(256)),
        ("ssm.group_count", Given::Size(1)),
        ("ssm.time_step_rank", Given::Size(48)),
        ("ssm.inner_size", Given::Size(3072)),
    ],
}];
