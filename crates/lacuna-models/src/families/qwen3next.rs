//! Qwen3-Next: of four layers three are gated delta nets, the fourth has gated attention of which a quarter
//! of each head turns; experts, and a gated block that all tokens have.

use super::decoder::decoder;
use super::experts::{experts, normalized, shared};
use super::facts::Key;
use super::glm4moe::{give_head, leave_out_layers_ahead};
use super::qwen2moe::give_qwen_experts;
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::{
    DeltaNet, Gate, GatesIn, InputsIn, KeyHeads, ModelSpec, QkNorm, Recurrence,
};

pub(crate) const FAMILY: Family = Family {
    name: "qwen3next",
    classes: &["Qwen3NextForCausalLM"],
    spec,
    naming: NAMING,
    shapes: &[],
};

/// Of this family and of those that came of it.
pub(super) const NAMING: Naming = Naming {
    parts: &[
        ("attn_qkv", "linear_attn.in_proj_qkv"),
        ("attn_gate", "linear_attn.in_proj_z"),
        ("ssm_in", "linear_attn.in_proj_qkvz"),
        ("ssm_beta", "linear_attn.in_proj_b"),
        ("ssm_alpha", "linear_attn.in_proj_a"),
        ("ssm_ba", "linear_attn.in_proj_ba"),
        ("ssm_conv1d", "linear_attn.conv1d"),
        ("ssm_dt.bias", "linear_attn.dt_bias"),
        ("ssm_a", "linear_attn.A_log"),
        ("ssm_norm", "linear_attn.norm"),
        ("ssm_out", "linear_attn.out_proj"),
        ("ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
        ("ffn_up_shexp", "mlp.shared_expert.up_proj"),
        ("ffn_down_shexp", "mlp.shared_expert.down_proj"),
        ("nextn.eh_proj", "fc"),
        ("nextn.enorm", "pre_fc_norm_embedding"),
        ("nextn.hnorm", "pre_fc_norm_hidden"),
        ("nextn.shared_head_norm", "norm"),
    ],
    gguf: &[("ffn_norm", "post_attention_norm")],
    norm_offset: 1.0,
    head: Some("mtp"),
    ..Naming::USUAL
};

/// Where a file does not say which layers have attention: the last of so many.
const USUAL_INTERVAL: usize = 4;

/// What part of a head turns where a folder does not say it.
const USUAL_TURNED: f64 = 0.25;

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let in_order = facts.has_tensor("blk.0.attn_qkv.weight");
    let inputs = match in_order {
        Some(true) => InputsIn::Apart,
        // Folders, and files of older converters.
        Some(false) | None => InputsIn::ByKeyHead,
    };
    let mut spec = delta_nets(facts, |net| DeltaNet {
        inputs,
        gates: GatesIn::ByKeyHead,
        ..net
    })?;
    if !facts.is_gguf() {
        // Folders do not say that they have a head that guesses tokens; where there are no tensors of one, there is none.
        spec.layers_ahead = spec.layers_ahead.max(1);
    }
    sparse(facts, &mut spec)?;
    Ok(spec)
}

/// Experts in all layers that the file does not name.
pub(super) fn sparse(facts: &Facts<'_>, spec: &mut ModelSpec) -> Result<(), ConfigError> {
    let mut experts = experts(facts, spec)?;
    experts.routing.normalized = normalized(facts, true)?;
    experts.shared = shared(facts, experts.inner, true)?;
    give_qwen_experts(spec, facts, experts)?;
    give_head(spec);
    Ok(())
}

/// A decoder most of whose layers are delta nets, each as `change` makes of one whose matrices are apart and
/// whose heads are in groups.
pub(super) fn delta_nets(
    facts: &Facts<'_>,
    change: impl Fn(DeltaNet) -> DeltaNet,
) -> Result<ModelSpec, ConfigError> {
    let mut spec = decoder(facts)?;
    leave_out_layers_ahead(&mut spec, facts)?;
    let net = Recurrence::DeltaNet(change(delta_net(facts)?));
    let interval = Key::new("full_attention_interval", "full_attention_interval");
    let interval: Option<usize> = facts.get(interval)?;
    let interval = interval.unwrap_or(USUAL_INTERVAL);
    // GGUF's lists have layers ahead as well.
    let listed = spec.layers.len() + if facts.is_gguf() { spec.layers_ahead } else { 0 };
    let recurrent = match facts.recurrent(listed, &["linear_attention"])? {
        Some(recurrent) => recurrent,
        None => {
            let layers = 0..spec.layers.len();
            layers.map(|layer| !(layer + 1).is_multiple_of(interval)).collect()
        }
    };
    let gated: Option<bool> = facts.get(Key::huggingface("attn_output_gate"))?;
    for (layer, recurrent) in spec.layers.iter_mut().zip(recurrent) {
        if recurrent {
            layer.attention = None;
            layer.recurrence = Some(net);
            continue;
        }
        let attention = layer.attention_mut();
        attention.qk_norm = Some(QkNorm::PerHead);
        if gated.unwrap_or(true) {
            attention.gate = Gate::InQueries;
        }
    }
    let said: Option<f64> = match facts.of_rope("partial_rotary_factor")? {
        Some(said) => Some(said),
        None => facts.get(Key::huggingface("partial_rotary_factor"))?,
    };
    if let (None, false, [rope]) = (said, facts.is_gguf(), &mut spec.ropes[..]) {
        rope.dimensions = (rope.dimensions as f64 * USUAL_TURNED) as usize;
    }
    Ok(spec)
}

fn delta_net(facts: &Facts<'_>) -> Result<DeltaNet, ConfigError> {
    let value_heads = facts.required(Key::new("ssm.time_step_rank", "linear_num_value_heads"))?;
    let inner: Option<usize> = facts.get(Key::gguf("ssm.inner_size"))?;
    let value_dim = match inner {
        Some(inner) => match usize::checked_rem(inner, value_heads) {
            Some(0) => inner / value_heads,
            _ => return Err(ConfigError::StateWidth { inner, heads: value_heads }),
        },
        None => facts.required(Key::new("ssm.inner_size", "linear_value_head_dim"))?,
    };
    Ok(DeltaNet {
        key_heads: facts.required(Key::new("ssm.group_count", "linear_num_key_heads"))?,
        value_heads,
        key_dim: facts.required(Key::new("ssm.state_size", "linear_key_head_dim"))?,
        value_dim,
        taps: facts.required(Key::new("ssm.conv_kernel", "linear_conv_kernel_dim"))?,
        order: KeyHeads::Grouped,
        inputs: InputsIn::Apart,
        gates: GatesIn::Apart,
    })
}
