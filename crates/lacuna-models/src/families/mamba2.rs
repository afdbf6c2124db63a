//! Mamba-2 by itself: layers that keep a state, without attention and feed-forward blocks.

use super::decoder::{LAYERS_READ, epsilon, logits};
use super::facts::Key;
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::{
    FeedForward, LayerSpec, Mamba2, ModelSpec, Norm, NormKind,
    Recurrence, StateNorm, TimeStepLimits,
};

pub(crate) const FAMILY: Family = Family {
    name: "mamba2",
    classes: &["Mamba2ForCausalLM"],
    spec,
    naming: Naming {
        parts: &[
            ("token_embd", "backbone.embeddings"),
            ("output_norm", "backbone.norm_f"),
            ("attn_norm", "norm"),
            ("ssm_in", "mixer.in_proj"),
            ("ssm_conv1d", "mixer.conv1d"),
            ("ssm_dt.bias", "mixer.dt_bias"),
            ("ssm_a", "mixer.A_log"),
            ("ssm_d", "mixer.D"),
            ("ssm_norm", "mixer.norm"),
            ("ssm_out", "mixer.out_proj"),
        ],
        layers: "backbone.layers",
        ..Naming::USUAL
    },
    shapes: &[],
};

/// Tokens of a context where a folder does not say how many the model was made for: its states forget, and
/// take no more memory with more. llama.cpp's converter writes the same.
const USUAL_CONTEXT: usize = 1 << 20;

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let count: usize = facts.required(Key::new("block_count", "num_hidden_layers"))?;
    let context: Option<usize> = facts.get(Key::gguf("context_length"))?;
    let layer = LayerSpec {
        recurrence: Some(Recurrence::Mamba2(mamba2(facts)?)),
        ..LayerSpec::without_attention(FeedForward::None)
    };
    Ok(ModelSpec {
        hidden: facts.required(Key::new("embedding_length", "hidden_size"))?,
        vocabulary: facts.vocabulary()?,
        context_tokens: context.unwrap_or(USUAL_CONTEXT),
        norm: Norm {
            kind: NormKind::Rms,
            epsilon: epsilon(facts)?,
        },
        layers: vec![layer; count.min(LAYERS_READ)],
        ..ModelSpec::usual(facts.family(), logits(facts)?)
    })
}

/// What a file says of its states.
pub(super) fn mamba2(facts: &Facts<'_>) -> Result<Mamba2, ConfigError> {
    let heads = facts.required(Key::new(
        "ssm.time_step_rank",
        "mamba_n_heads|mamba_num_heads|num_heads",
    ))?;
    let inner: Option<usize> = facts.get(Key::gguf("ssm.inner_size"))?;
    let head_dim = match inner {
        Some(inner) => match usize::checked_rem(inner, heads) {
            Some(0) => inner / heads,
            _ => return Err(ConfigError::StateWidth { inner, heads }),
        },
        None => facts.required(Key::new(
            "ssm.inner_size",
            "mamba_d_head|mamba_head_dim|head_dim",
        ))?,
    };
    let supported = "convolutions with biases are";
    facts.expect(Key::huggingface("mamba_conv_bias|use_conv_bias"), true, supported)?;
    let state_dim = Key::new("ssm.state_size", "mamba_d_state|ssm_state_size|state_size");
    Ok(Mamba2 {
        heads,
        head_dim,
        groups: facts.required(Key::new("ssm.group_count", "mamba_n_groups|n_groups"))?,
        state_dim: facts.required(state_dim)?,
        taps: facts.required(Key::new("ssm.conv_kernel", "mamba_d_conv|conv_kernel"))?,
        norm: StateNorm::AfterGate,
        time_steps: time_steps(facts)?,
        input_scales: None,
    })
}

/// What a folder says that time steps are held between; GGUF has no word for it.
fn time_steps(facts: &Facts<'_>) -> Result<Option<TimeStepLimits>, ConfigError> {
    let limits: Option<[f64; 2]> = facts.get(Key::huggingface("time_step_limit|mamba_dt_limit"))?;
    Ok(limits.and_then(|[least, most]| TimeStepLimits::new(least as f32, most as f32)))
}
