//! Gemma 3: five layers with a window to one without, each kind with a rotation of its own; text, or
//! the text part of the models that see.

use super::decoder::{decoder, windows};
use super::gemma2::{NAMING, gemma, score_scale};
use super::{Facts, Family, Given, Shape, SpecialTokens};
use crate::error::ConfigError;
use crate::spec::{ImageAttention, ImageInput, ImagePlace, ImagePrompt, Mask, ModelSpec, QkNorm};

pub(crate) const FAMILY: Family = Family {
    name: "gemma3",
    classes: &["Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"],
    spec,
    naming: NAMING,
    shapes: SHAPES,
};

/// Each stands on lines of its own.
const IMAGES: ImageInput = ImageInput {
    silent: &[],
    attention: ImageAttention::WholeImage,
    deepstack: 0,
    prompt: ImagePrompt {
        mark: "<start_of_image>",
        written: "\n\n<start_of_image><end_of_image>\n\n",
        place: ImagePlace::Between(["<start_of_image>", "<end_of_image>"]),
    },
};

/// What `transformers` takes for a field that a folder leaves out: those of the models that see say little more than
/// what differs from it.
const DEFAULTS: &[(&str, f64)] = &[
    ("num_attention_heads", 8.0),
    ("num_key_value_heads", 4.0),
    ("head_dim", 256.0),
    ("vocab_size", 262_208.0),
    ("rms_norm_eps", 1e-6),
    ("max_position_embeddings", 131_072.0),
    ("query_pre_attn_scalar", 256.0),
    ("sliding_window", 4096.0),
    ("rope_theta", 1e6),
    ("rope_local_base_freq", 1e4),
];

pub(super) fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let facts = &facts.with_defaults(DEFAULTS);
    let mut spec = decoder(facts)?;
    windows(&mut spec, facts, 6)?;
    gemma(&mut spec, facts)?;
    let head_dim = spec.ropes[0].dimensions;
    spec.ropes = facts.ropes(head_dim, head_dim)?.into();
    for layer in &mut spec.layers {
        let full = layer.mask() == Some(Mask::Causal);
        layer.attention_mut().rope = Some(usize::from(!full));
        layer.attention_mut().qk_norm = Some(QkNorm::PerHead);
    }
    score_scale(&mut spec, facts, 62)?;
    spec.images = Some(IMAGES);
    Ok(spec)
}

const GEMMA3: Shape = Shape {
    name: "",
    family: "gemma3",
    layers: 18,
    hidden: 640,
    feed_forward: 2048,
    heads: 4,
    kv_heads: 1,
    head_size: 256,
    vocabulary: 262_144,
    special_tokens: Some(SpecialTokens::Qwen),
    tied: true,
    context: 32_768,
    rope_theta: 1e6,
    rope_factor: None,
    norm_epsilon: 1e-6,
    more: &[("attention.sliding_window", Given::Size(512))],
};

/// Published models, smallest first.
const SHAPES: &[Shape] = &[
    Shape {
        name: "gemma3-270m",
        ..GEMMA3
    },
    Shape {
        name: "gemma3-1b",
        layers: 26,
        hidden: 1152,
        feed_forward: 6912,
        ..GEMMA3
    },
    Shape {
        name: "gemma3-4b",
        layers: 34,
        hidden: 2560,
        feed_forward: 10_240,
        heads: 8,
        kv_heads: 4,
        context: 131_072,
        more: &[
            ("attention.sliding_window", Given::Size(1024)),
            ("rope.scaling.type", Given::Text("linear")),
            ("rope.scaling.factor", Given::Number(8.0)),
        ],
        ..GEMMA3
    },
];
