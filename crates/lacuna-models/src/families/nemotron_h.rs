//! Nemotron-H, and Nemotron 3 with its experts: layers that are one thing each, Mamba-2, attention without
//! positions, or a feed-forward block without gates.

use super::decoder::decoder;
use super::experts::{self, groups, sigmoid_experts};
use super::facts::Key;
use super::glm4moe::leave_out_layers_ahead;
use super::mamba2::mamba2;
use super::{Facts, Family, Given, Naming, Shape, SpecialTokens};
use crate::error::ConfigError;
use crate::spec::{
    Activation, ExpertBlock, Experts, FeedForward, GroupScore, LayerSpec, ModelSpec, Plain,
    Recurrence,
};

pub(crate) const FAMILY: Family = Family {
    name: "nemotron_h",
    classes: &["NemotronHForCausalLM"],
    spec,
    naming: NAMING,
    shapes: SHAPES,
};

/// No published model's: attention and wide blocks by turns, to see what it is worth that most of their activations are
/// zero. A neuron of it in f16 is a page.
const SHAPES: &[Shape] = &[Shape {
    name: "relu2-1b",
    family: "nemotron_h",
    layers: 48,
    hidden: 2048,
    feed_forward: 8192,
    heads: 16,
    kv_heads: 4,
    head_size: 128,
    vocabulary: 32_768,
    special_tokens: Some(SpecialTokens::ChatMl),
    tied: false,
    context: 131_072,
    rope_theta: 1e4,
    rope_factor: None,
    norm_epsilon: 1e-5,
    more: &[
        ("attention.head_count_kv", Given::PerLayer(&[4, 0])),
        ("feed_forward_length", Given::PerLayer(&[0, 8192])),
        ("attention.layer_norm_epsilon", Given::Number(1e-5)),
        ("rope.scaling.finetuned", Given::Flag(false)),
        // Of no layer, but each file of the family says it.
        ("ssm.conv_kernel", Given::Size(4)),
        ("ssm.state_size", Given::Size(128)),
        ("ssm.group_count", Given::Size(8)),
        ("ssm.time_step_rank", Given::Size(64)),
        ("ssm.inner_size", Given::Size(4096)),
    ],
}];

/// Of GGUF files with experts too, which say another family.
pub(super) const NAMING: Naming = Naming {
    parts: &[
        ("token_embd", "backbone.embeddings"),
        ("output_norm", "backbone.norm_f"),
        // A layer has one norm, before the one thing that it is.
        ("attn_norm", "norm"),
        ("ffn_norm", "norm"),
        ("ssm_in", "mixer.in_proj"),
        ("ssm_conv1d", "mixer.conv1d"),
        ("ssm_dt.bias", "mixer.dt_bias"),
        ("ssm_a", "mixer.A_log"),
        ("ssm_d", "mixer.D"),
        ("ssm_norm", "mixer.norm"),
        ("ssm_out", "mixer.out_proj"),
        ("attn_q", "mixer.q_proj"),
        ("attn_k", "mixer.k_proj"),
        ("attn_v", "mixer.v_proj"),
        ("attn_output", "mixer.o_proj"),
        ("ffn_up", "mixer.up_proj"),
        ("ffn_down", "mixer.down_proj"),
        ("ffn_gate_inp", "mixer.gate"),
        ("exp_probs_b.bias", "mixer.gate.e_score_correction_bias"),
        ("ffn_up_exps", "mixer.experts.*.up_proj"),
        ("ffn_down_exps", "mixer.experts.*.down_proj"),
        ("ffn_up_shexp", "mixer.shared_experts.up_proj"),
        ("ffn_down_shexp", "mixer.shared_experts.down_proj"),
        ("ffn_latent_down", "mixer.fc1_latent_proj"),
        ("ffn_latent_up", "mixer.fc2_latent_proj"),
    ],
    gguf: &[("ffn_norm", "attn_norm")],
    layers: "backbone.layers",
    ..Naming::USUAL
};

/// What a layer is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    State,
    Attention,
    Dense,
    Experts,
}

pub(super) fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    for (option, function) in [("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu")] {
        let supported = "relu2 in feed-forward blocks and silu in states are";
        facts.expect(Key::huggingface(option), function.to_owned(), supported)?;
    }
    let mut spec = decoder(facts)?;
    leave_out_layers_ahead(&mut spec, facts)?;
    spec.ropes.clear();
    let mamba = mamba2(facts)?;
    let kinds = match folder_kinds(facts, spec.layers.len())? {
        Some(kinds) => kinds,
        None => gguf_kinds(facts, &mut spec)?,
    };
    let experts = kinds.contains(&Kind::Experts);
    let experts = experts.then(|| experts_of(facts, &mut spec)).transpose()?;
    for (layer, kind) in spec.layers.iter_mut().zip(kinds) {
        let dense = layer.feed_forward.gated_mut().map_or(0, |block| block.inner);
        layer.feed_forward = match (kind, experts) {
            (Kind::Experts, Some(experts)) => FeedForward::Experts(experts),
            (Kind::Dense, _) => FeedForward::Plain(Plain {
                inner: dense,
                activation: Activation::ReluSquared,
                biases: false,
            }),
            _ => FeedForward::None,
        };
        match kind {
            Kind::Attention => layer.attention_mut().rope = None,
            _ => layer.attention = None,
        }
        if kind == Kind::State {
            layer.recurrence = Some(Recurrence::Mamba2(mamba));
        }
    }
    Ok(spec)
}

fn experts_of(facts: &Facts<'_>, spec: &mut ModelSpec) -> Result<Experts, ConfigError> {
    let mut experts = sigmoid_experts(facts, spec)?;
    experts.routing.groups = groups(facts, GroupScore::SumOfTwo)?;
    experts.block = ExpertBlock::Plain(Activation::ReluSquared);
    experts.latent = facts.get(Key::new("moe_latent_size", "moe_latent_size"))?;
    Ok(experts)
}

/// What a `config.json` says of each layer: a list of names, or a letter each.
fn folder_kinds(facts: &Facts<'_>, layers: usize) -> Result<Option<Vec<Kind>>, ConfigError> {
    let field = "hybrid_override_pattern";
    let pattern: Option<String> = facts.get(Key::huggingface(field))?;
    let names = match (facts.layer_kinds()?, pattern) {
        (Some(names), _) => names,
        (None, Some(pattern)) => pattern.chars().map(String::from).collect(),
        (None, None) => return Ok(None),
    };
    if names.len() != layers {
        let found = names.len();
        return Err(ConfigError::LayerList {
            field,
            found,
            layers,
        });
    }
    let kinds = names.iter().map(|name| match name.as_str() {
        "M" | "mamba" | "linear_attention" => Ok(Kind::State),
        "*" | "attention" | "full_attention" => Ok(Kind::Attention),
        "-" | "mlp" => Ok(Kind::Dense),
        "E" | "moe" => Ok(Kind::Experts),
        other => Err(ConfigError::Unsupported {
            feature: format!("layer type `{other}`"),
            supported: "mamba (M), attention (*), mlp (-) and moe (E) are",
        }),
    });
    kinds.collect::<Result<_, _>>().map(Some)
}

/// What GGUF says of each layer: those with KV heads have attention, those of some width a block, and the
/// others a state.
fn gguf_kinds(facts: &Facts<'_>, spec: &mut ModelSpec) -> Result<Vec<Kind>, ConfigError> {
    let experts: Option<usize> = facts.get(experts::COUNT)?;
    let block = match experts {
        None | Some(0) => Kind::Dense,
        Some(_) => Kind::Experts,
    };
    let kind = |layer: &mut LayerSpec| {
        let width = layer.feed_forward.gated_mut().map_or(0, |block| block.inner);
        match (layer.attention_mut().kv_heads, width) {
            (0, 0) => Ok(Kind::State),
            (_, 0) => Ok(Kind::Attention),
            (0, _) => Ok(block),
            _ => Err(ConfigError::Unsupported {
                feature: "a layer with KV heads and a feed-forward block".to_owned(),
                supported: "one of the two, or a state, is",
            }),
        }
    };
    let kinds = spec.layers.iter_mut().map(kind).enumerate();
    let kinds = kinds.map(|(layer, kind)| {
        kind.map_err(|source| ConfigError::Layer {
            layer,
            source: Box::new(source),
        })
    });
    kinds.collect()
}
