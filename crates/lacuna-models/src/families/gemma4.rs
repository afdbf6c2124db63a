//! Gemma 4: layers with a window and wider ones without; the last layers share keys and values, and
//! each layer may have an input of its own, or experts beside its dense block.

use std::num::NonZeroUsize;

use super::decoder::{decoder, windows};
use super::experts;
use super::facts::Key;
use super::gemma2::gemma;
use super::{Facts, Family, Given, Naming, Shape, SpecialTokens};
use crate::error::ConfigError;
use crate::spec::{
    Activation, FeedForward, ImageAttention, ImageInput, ImagePlace, ImagePrompt, Mask, ModelSpec,
    PerLayerInputs, QkNorm, Values,
};

pub(crate) const FAMILY: Family = Family {
    name: "gemma4",
    classes: &["Gemma4ForCausalLM", "Gemma4ForConditionalGeneration"],
    spec,
    naming: Naming {
        parts: &[
            ("ffn_norm", "pre_feedforward_layernorm"),
            ("per_layer_token_embd", "model.embed_tokens_per_layer"),
            ("per_layer_model_proj", "model.per_layer_model_projection"),
            ("per_layer_proj_norm", "model.per_layer_projection_norm"),
            ("inp_gate", "per_layer_input_gate"),
            ("proj", "per_layer_projection"),
            ("post_norm", "post_per_layer_input_norm"),
            ("layer_output_scale", "layer_scalar"),
            ("ffn_gate_inp", "router.proj"),
            ("ffn_gate_inp.scale", "router.scale"),
            ("ffn_gate_up_exps", "experts.gate_up_proj"),
            ("ffn_down_exps", "experts.down_proj"),
            ("ffn_down_exps.scale", "router.per_expert_scale"),
            ("post_ffw_norm_1", "post_feedforward_layernorm_1"),
            ("pre_ffw_norm_2", "pre_feedforward_layernorm_2"),
            ("post_ffw_norm_2", "post_feedforward_layernorm_2"),
        ],
        bare: &["layer_output_scale"],
        ..Naming::USUAL
    },
    shapes: SHAPES,
};

/// How its images stand in a decoder, whose templates write one mark for each.
const IMAGES: ImageInput = ImageInput {
    silent: &[],
    attention: ImageAttention::Causal,
    deepstack: 0,
    prompt: ImagePrompt {
        mark: "<|image|>",
        written: "<|image><image|>",
        place: ImagePlace::Between(["<|image>", "<image|>"]),
    },
};

/// Of no published model: the table of its layers' inputs is four times all else, to measure what it takes to have
/// that in a file.
const SHAPES: &[Shape] = &[Shape {
    name: "gemma4-e-table",
    family: "gemma4",
    layers: 30,
    hidden: 768,
    feed_forward: 3072,
    heads: 4,
    kv_heads: 1,
    head_size: 256,
    vocabulary: 262_144,
    special_tokens: Some(SpecialTokens::Qwen),
    tied: true,
    context: 32_768,
    rope_theta: 1_000_000.0,
    rope_factor: None,
    norm_epsilon: 1e-6,
    more: &[
        ("embedding_length_per_layer_input", Given::Size(256)),
        ("attention.sliding_window", Given::Size(512)),
        ("attention.sliding_window_pattern", Given::Size(6)),
        ("rope.freq_base_swa", Given::Number(10_000.0)),
    ],
}];

/// Its layers without what differs from one to the next beside their windows.
pub(super) fn layers_alike(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let mut spec = decoder(facts)?;
    windows(&mut spec, facts, 6)?;
    gemma(&mut spec, facts)?;
    heads(&mut spec, facts)?;
    Ok(spec)
}

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let mut spec = decoder(facts)?;
    windows(&mut spec, facts, 6)?;
    gemma(&mut spec, facts)?;
    experts_beside(&mut spec, facts)?;
    heads(&mut spec, facts)?;
    share(&mut spec, facts)?;
    per_layer_inputs(&mut spec, facts)?;
    spec.images = Some(ImageInput {
        attention: image_attention(&spec, facts)?,
        ..IMAGES
    });
    Ok(spec)
}

/// How tokens of images see one another.
fn image_attention(spec: &ModelSpec, facts: &Facts<'_>) -> Result<ImageAttention, ConfigError> {
    let said: Option<String> = facts.get(Key::huggingface("use_bidirectional_attention"))?;
    match said.as_deref() {
        Some("vision") => Ok(ImageAttention::WholeImageInWindows),
        Some(other) => Err(ConfigError::Unsupported {
            feature: format!("use_bidirectional_attention {other}"),
            supported: "vision is",
        }),
        // No GGUF file says it: of the published models it is those that have nothing of their own for each layer.
        None if facts.is_gguf() && spec.per_layer_inputs.is_none() => {
            Ok(ImageAttention::WholeImageInWindows)
        }
        None => Ok(ImageAttention::Causal),
    }
}

/// The dense block of each layer gets experts beside it, in models that have some.
fn experts_beside(spec: &mut ModelSpec, facts: &Facts<'_>) -> Result<(), ConfigError> {
    let count: Option<usize> = facts.get(experts::COUNT)?;
    let enabled = facts.get(Key::huggingface("enable_moe_block"))?;
    if count.unwrap_or(0) == 0 || enabled == Some(false) {
        return Ok(());
    }
    let mut experts = experts::experts(facts, spec)?;
    experts.router.own_input = true;
    experts.router.expert_scales = true;
    for layer in &mut spec.layers {
        experts.dense = layer.feed_forward.gated_mut().copied();
        layer.feed_forward = FeedForward::Experts(experts);
    }
    Ok(())
}

/// Layers with a window have heads of one size, those without of another, and perhaps fewer of them.
fn heads(spec: &mut ModelSpec, facts: &Facts<'_>) -> Result<(), ConfigError> {
    let stated = spec.layers.first_mut().map_or(0, |layer| layer.attention_mut().head_dim);
    // GGUF's plain key is of full layers, `config.json`'s of windowed ones.
    let windowed = facts.get(Key::gguf("attention.key_length_swa"))?;
    let windowed = windowed.unwrap_or(stated);
    let full = match facts.get(Key::huggingface("global_head_dim"))? {
        Some(full) => full,
        None => stated,
    };
    let full_heads: Option<usize> = match facts.get(Key::huggingface("attention_k_eq_v"))? {
        Some(true) => facts.get(Key::huggingface("num_global_key_value_heads"))?,
        _ => None,
    };
    let mut full_dim = full;
    for (index, layer) in spec.layers.iter_mut().enumerate() {
        let attention = layer.attention_mut();
        let is_full = attention.mask == Mask::Causal;
        attention.head_dim = if is_full { full } else { windowed };
        if let (true, Some(heads)) = (is_full, full_heads) {
            attention.kv_heads = heads;
        }
        if let Some(size) = facts.of_layer(index, "head_dim")? {
            attention.head_dim = size;
        }
        if let Some(heads) = facts.of_layer(index, "num_key_value_heads")? {
            attention.kv_heads = heads;
        }
        if is_full {
            full_dim = attention.head_dim;
        }
        attention.rope = Some(usize::from(!is_full));
        attention.qk_norm = Some(QkNorm::PerHead);
        attention.value_norm = true;
        attention.scale = 1.0;
        attention.values = match is_full && keys_are_values(facts, index)? {
            true => Values::Keys,
            false => Values::Projected,
        };
        layer.output_scale = true;
    }
    spec.ropes = facts.ropes(full_dim, windowed)?.into();
    Ok(())
}

/// Whether a layer without a window has no values of its own.
fn keys_are_values(facts: &Facts<'_>, layer: usize) -> Result<bool, ConfigError> {
    match facts.has_tensor(&format!("blk.{layer}.attn_v.weight")) {
        Some(own) => Ok(!own),
        None => Ok(facts.get(Key::huggingface("attention_k_eq_v"))?.unwrap_or(false)),
    }
}

/// The last layers read the keys and values of the last layer of their kind that has some.
pub(super) fn share(spec: &mut ModelSpec, facts: &Facts<'_>) -> Result<(), ConfigError> {
    let shared = facts.get(Key::new("attention.shared_kv_layers", "num_kv_shared_layers"))?;
    let own = spec.layers.len().saturating_sub(shared.unwrap_or(0));
    let wide = facts.get(Key::huggingface("use_double_wide_mlp"))?.unwrap_or(false);
    let (first, rest) = spec.layers.split_at_mut(own);
    for layer in rest {
        let kind = layer.mask();
        let source = first.iter().rposition(|other| other.mask() == kind);
        // Of a kind that no layer has, the first: the check of shapes refuses it by name.
        layer.attention_mut().shares = Some(source.unwrap_or(0));
        layer.attention_mut().values = Values::Projected;
        if let (true, Some(block)) = (wide, layer.feed_forward.gated_mut()) {
            block.inner *= 2;
        }
    }
    Ok(())
}

pub(super) fn per_layer_inputs(
    spec: &mut ModelSpec,
    facts: &Facts<'_>,
) -> Result<(), ConfigError> {
    let width = facts.get(Key::new(
        "embedding_length_per_layer_input",
        "hidden_size_per_layer_input",
    ))?;
    let Some(width) = width.and_then(NonZeroUsize::new) else {
        return Ok(());
    };
    let rows = facts.get(Key::huggingface("vocab_size_per_layer_input"))?;
    spec.per_layer_inputs = Some(PerLayerInputs {
        width: width.get(),
        rows: rows.unwrap_or(spec.vocabulary),
        activation: Activation::GeluTanh,
    });
    Ok(())
}
