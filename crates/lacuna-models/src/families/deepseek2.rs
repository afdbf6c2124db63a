//! DeepSeek V2 and V3, GLM 4.7 Flash and others of that kind: latent attention, dense first layers, then
//! experts with a block that all tokens have. One family in GGUF files, several classes elsewhere.

use lacuna_kernels::RopeStyle;

use super::decoder::decoder_of_any_heads;
use super::experts::{self, experts, gating, give_experts, groups, normalized, scale, shared};
use super::facts::Key;
use super::glm4moe::{give_head, leave_out_layers_ahead};
use super::{Facts, Family, Given, Naming, Shape, SpecialTokens};
use crate::error::ConfigError;
use crate::spec::{
    Experts, GroupScore, Latent, ModelSpec, Rope, RopeScaling, Scores, Yarn,
};

pub(crate) const FAMILY: Family = Family {
    name: "deepseek2",
    classes: &[V2, V3, GLM],
    spec,
    naming: Naming {
        parts: &[
            ("attn_q_a", "self_attn.q_a_proj"),
            ("attn_q_a_norm", "self_attn.q_a_layernorm"),
            ("attn_q_b", "self_attn.q_b_proj"),
            ("attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa"),
            ("attn_kv_a_norm", "self_attn.kv_a_layernorm"),
            ("attn_kv_b", "self_attn.kv_b_proj"),
            ("exp_probs_b.bias", "mlp.gate.e_score_correction_bias"),
        ],
        ..Naming::USUAL
    },
    shapes: SHAPES,
};

const V2: &str = "DeepseekV2ForCausalLM";
const V3: &str = "DeepseekV3ForCausalLM";
const GLM: &str = "Glm4MoeLiteForCausalLM";

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let mut spec = decoder_of_any_heads(facts)?;
    leave_out_layers_ahead(&mut spec, facts)?;
    let sizes = Sizes::read(facts)?;
    let [rope, _] = facts.ropes(sizes.turned, sizes.turned)?;
    let (rope, magnitude) = stretched(rope, facts)?;
    let query_rank: Option<usize> = facts.get(Key::new("attention.q_lora_rank", "q_lora_rank"))?;
    let latent = Latent {
        rank: sizes.rank,
        key_dim: sizes.query.saturating_sub(sizes.turned),
        value_dim: sizes.value,
        // GGUF files of models that have none may say that it is 0.
        query_rank: query_rank.filter(|rank| *rank > 0 || !facts.is_gguf()),
    };
    for layer in &mut spec.layers {
        let attention = layer.attention_mut();
        attention.kv_heads = 1;
        attention.head_dim = sizes.rank.saturating_add(sizes.turned);
        attention.scale = magnitude * magnitude / (sizes.query as f32).sqrt();
        attention.latent = Some(latent);
    }
    spec.ropes = vec![rope];
    let count: Option<usize> = facts.get(experts::COUNT)?;
    if count.is_some_and(|count| count > 0) {
        let sparse = sparse_layers(facts, spec.layers.len())?;
        let experts = routed(facts, &mut spec)?;
        give_experts(&mut spec, experts, |layer| sparse[layer]);
    }
    give_head(&mut spec);
    Ok(spec)
}

/// Sizes of heads.
struct Sizes {
    /// Elements of a latent row that positions do not turn.
    rank: usize,
    /// Elements that they do.
    turned: usize,
    /// Elements of a head of queries.
    query: usize,
    /// Elements of a head of values.
    value: usize,
}

impl Sizes {
    fn read(facts: &Facts<'_>) -> Result<Self, ConfigError> {
        let rank = facts.required(Key::new("attention.kv_lora_rank", "kv_lora_rank"))?;
        let turned = facts.required(Key::new("rope.dimension_count", "qk_rope_head_dim"))?;
        if !facts.is_gguf() {
            let plain: usize = facts.required(Key::huggingface("qk_nope_head_dim"))?;
            return Ok(Self {
                rank,
                turned,
                query: plain.saturating_add(turned),
                value: facts.required(Key::huggingface("v_head_dim"))?,
            });
        }
        // Files that were made before there were latent rows have the sizes of heads under the names that
        // later ones have those of latent rows under.
        let either = |latent, older| match facts.get(Key::gguf(latent))? {
            Some(size) => Ok(size),
            None => facts.required(Key::gguf(older)),
        };
        Ok(Self {
            rank,
            turned,
            query: either("attention.key_length_mla", "attention.key_length")?,
            value: either("attention.value_length_mla", "attention.value_length")?,
        })
    }
}

/// The rotary embedding, and what scores are multiplied by twice where it is stretched.
fn stretched(mut rope: Rope, facts: &Facts<'_>) -> Result<(Rope, f32), ConfigError> {
    let pairs: Option<bool> = facts.get(Key::huggingface("rope_interleave"))?;
    rope.style = match pairs {
        Some(false) => RopeStyle::HalfSplit,
        _ => RopeStyle::Interleaved,
    };
    let RopeScaling::Yarn(yarn) = &mut rope.scaling else {
        return Ok((rope, 1.0));
    };
    let all = match facts.is_gguf() {
        false => facts.of_rope::<f64>("mscale_all_dim")?,
        true => {
            let logged: Option<f64> = facts.get(Key::gguf("rope.scaling.yarn_log_multiplier"))?;
            let factor: Option<f64> = facts.get(Key::gguf("rope.scaling.attn_factor"))?;
            // In all published models what GGUF leaves out cancels what it has.
            yarn.attention_factor = match logged {
                Some(_) => factor.unwrap_or(1.0),
                None => yarn.attention_factor,
            };
            // There with the factor of 0.1 that is part of the magnitude.
            logged.map(|logged| 10.0 * logged)
        }
    };
    let magnitude = all.map_or(1.0, |all| Yarn::magnitude(yarn.factor, all));
    Ok((rope, magnitude as f32))
}

/// Experts scored by a softmax, or by sigmoids with a bias for choosing.
fn routed(facts: &Facts<'_>, spec: &mut ModelSpec) -> Result<Experts, ConfigError> {
    let mut experts = experts(facts, spec)?;
    let scores = scores(facts, spec.layers.len())?;
    let routing = &mut experts.routing;
    routing.scores = scores;
    routing.normalized = normalized(facts, scores == Scores::Sigmoid)?;
    routing.scale = scale(facts)?;
    routing.groups = match chooses_groups(facts)? {
        true if scores == Scores::Sigmoid => groups(facts, GroupScore::SumOfTwo)?,
        true => groups(facts, GroupScore::Largest)?,
        false => None,
    };
    experts.router.selection_bias = scores == Scores::Sigmoid;
    experts.shared = shared(facts, experts.inner, false)?;
    Ok(experts)
}

fn scores(facts: &Facts<'_>, layers: usize) -> Result<Scores, ConfigError> {
    match facts.class() {
        Some(V2) => return Ok(Scores::Softmax),
        Some(_) => return Ok(Scores::Sigmoid),
        None => {}
    }
    match facts.get(gating::KEY)? {
        Some(gating::SOFTMAX) => Ok(Scores::Softmax),
        Some(gating::SIGMOID) => Ok(Scores::Sigmoid),
        Some(other) => Err(ConfigError::Unsupported {
            feature: format!("expert_gating_func {other}"),
            supported: "1, a softmax, and 2, sigmoids, are",
        }),
        // Older files do not say it, and only sigmoids come with a bias for choosing.
        None => {
            let bias = |layer| format!("blk.{layer}.exp_probs_b.bias");
            let has_bias = |layer| facts.has_tensor(&bias(layer)) == Some(true);
            Ok(match (0..layers).any(has_bias) {
                true => Scores::Sigmoid,
                false => Scores::Softmax,
            })
        }
    }
}

/// Folders of V2 name their way of choosing; V2 Lite's has no groups, whatever their number.
fn chooses_groups(facts: &Facts<'_>) -> Result<bool, ConfigError> {
    if facts.class() != Some(V2) {
        return Ok(true);
    }
    let method: Option<String> = facts.get(Key::huggingface("topk_method"))?;
    Ok(method.as_deref() == Some("group_limited_greedy"))
}

/// Whether each of so many layers has experts.
fn sparse_layers(facts: &Facts<'_>, layers: usize) -> Result<Vec<bool>, ConfigError> {
    facts.expect(
        Key::huggingface("moe_layer_freq"),
        1,
        "models whose layers all have experts after the first are",
    )?;
    if let Some(sparse) = experts::sparse_layers(facts, layers)? {
        return Ok(sparse);
    }
    let dense = Key::new("leading_dense_block_count", "first_k_dense_replace");
    let dense = match (facts.get(dense)?, facts.class()) {
        (Some(dense), _) => dense,
        // What `transformers` takes it to be.
        (None, Some(V3)) => 3,
        (None, Some(GLM)) => 1,
        (None, _) => 0,
    };
    Ok((0..layers).map(|layer| layer >= dense).collect())
}

const LITE: Shape = Shape {
    name: "deepseek-v2-lite",
    family: "deepseek2",
    layers: 27,
    hidden: 2048,
    feed_forward: 10_944,
    heads: 16,
    kv_heads: 1,
    head_size: 576,
    vocabulary: 102_400,
    special_tokens: Some(SpecialTokens::DeepSeek),
    tied: false,
    context: 163_840,
    rope_theta: 1e4,
    rope_factor: None,
    norm_epsilon: 1e-6,
    more: &[
        ("attention.value_length", Given::Size(512)),
        ("attention.key_length_mla", Given::Size(192)),
        ("attention.value_length_mla", Given::Size(128)),
        ("attention.kv_lora_rank", Given::Size(512)),
        ("rope.dimension_count", Given::Size(64)),
        ("rope.scaling.type", Given::Text("yarn")),
        ("rope.scaling.factor", Given::Number(40.0)),
        ("rope.scaling.original_context_length", Given::Size(4096)),
        ("rope.scaling.yarn_log_multiplier", Given::Number(0.0707)),
        ("leading_dense_block_count", Given::Size(1)),
        ("expert_count", Given::Size(64)),
        ("expert_used_count", Given::Size(6)),
        ("expert_shared_count", Given::Size(2)),
        ("expert_feed_forward_length", Given::Size(1408)),
        ("expert_gating_func", Given::Size(gating::SOFTMAX)),
        ("expert_weights_scale", Given::Number(1.0)),
    ],
};

/// Published models, smallest first.
const SHAPES: &[Shape] = &[
    LITE,
    Shape {
        name: "glm-4.7-flash",
        layers: 47,
        feed_forward: 10_240,
        heads: 20,
        vocabulary: 154_880,
        // Its own are of another kind of text; a synthetic vocabulary needs some.
        special_tokens: Some(SpecialTokens::Qwen),
        context: 202_752,
        rope_theta: 1e6,
        norm_epsilon: 1e-5,
        more: &[
            ("attention.value_length", Given::Size(512)),
            ("attention.key_length_mla", Given::Size(256)),
            ("attention.value_length_mla", Given::Size(256)),
            ("attention.kv_lora_rank", Given::Size(512)),
            ("attention.q_lora_rank", Given::Size(768)),
            ("rope.dimension_count", Given::Size(64)),
            ("leading_dense_block_count", Given::Size(1)),
            ("expert_count", Given::Size(64)),
            ("expert_used_count", Given::Size(4)),
            ("expert_shared_count", Given::Size(1)),
            ("expert_feed_forward_length", Given::Size(1536)),
            ("expert_gating_func", Given::Size(gating::SIGMOID)),
            ("expert_weights_scale", Given::Number(1.8)),
        ],
        ..LITE
    },
];
