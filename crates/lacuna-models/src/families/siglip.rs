//! SigLIP as an encoder of images: a Hugging Face folder has it beside the model of language, GGUF in a file of its
//! own (`mmproj`), along with what makes rows of the decoder's width (Gemma 3).

use serde_json::Value;

use super::facts::Key;
use super::vision::{
    Encoder, KEYS, RowsOf, USUAL_PIXELS, pixels_of, pixels_of_gguf, preprocessing, vision_config,
};
use super::{Facts, Family, Given, Naming, Shape};
use crate::error::ConfigError;
use crate::spec::{
    Activation, Attention, Biases, FeedForward, Frames, ImageRows, ImageSize, LayerSpec,
    LearnedPlaces, Mask, Merge, ModelSpec, Norm, NormKind, OutputSpec, PatchOrder, Patches, Plain,
    Resampling,
};
use lacuna_files::gguf;
use lacuna_files::huggingface::Folder;

pub(super) static SIGLIP: Family = USUAL;

/// The same in older GGUF files.
static OLDER: Family = Family {
    naming: Naming {
        gguf: OLDER_GGUF,
        ..USUAL.naming
    },
    ..USUAL
};

const USUAL: Family = Family {
    name: "siglip",
    classes: &[],
    spec,
    naming: Naming {
        parts: &[
            (
                "patch_embd",
                "vision_tower.vision_model.embeddings.patch_embedding",
            ),
            (
                "position_embd",
                "vision_tower.vision_model.embeddings.position_embedding",
            ),
            ("attn_norm", "layer_norm1"),
            ("attn_output", "self_attn.out_proj"),
            ("ffn_norm", "layer_norm2"),
            ("ffn_up", "mlp.fc1"),
            ("ffn_down", "mlp.fc2"),
            ("output_norm", "vision_tower.vision_model.post_layernorm"),
            ("mm.soft_emb_norm", "multi_modal_projector.mm_soft_emb_norm"),
            (
                "mm.input_projection",
                "multi_modal_projector.mm_input_projection_weight",
            ),
        ],
        gguf: GGUF,
        gguf_inside: Some("v."),
        bare: &["mm.input_projection"],
        layers: "vision_tower.vision_model.encoder.layers",
        ..Naming::USUAL
    },
    shapes: &[Shape {
        name: "gemma3-4b-mmproj",
        family: "clip.vision",
        layers: 27,
        hidden: 1152,
        feed_forward: 4304,
        heads: 16,
        kv_heads: 16,
        head_size: 72,
        vocabulary: 1,
        special_tokens: None,
        tied: true,
        context: 4096,
        rope_theta: 10_000.0,
        rope_factor: None,
        norm_epsilon: USUAL_EPSILON,
        more: &[
            ("projector_type", Given::Text("gemma3")),
            ("image_size", Given::Size(896)),
            ("patch_size", Given::Size(14)),
            ("projection_dim", Given::Size(2560)),
            ("attention.layer_norm_epsilon", Given::Number(USUAL_EPSILON)),
            ("image_mean", Given::Numbers(&USUAL_PIXELS)),
            ("image_std", Given::Numbers(&USUAL_PIXELS)),
        ],
    }],
};

/// What GGUF files call parts of encoders otherwise than those of decoders.
pub(super) const GGUF: &[(&str, &str)] = &[
    ("attn_norm", "ln1"),
    ("attn_output", "attn_out"),
    ("ffn_norm", "ln2"),
    ("output_norm", "post_ln"),
];

/// The same where feed-forward matrices have each other's names.
pub(super) const OLDER_GGUF: &[(&str, &str)] = &[
    ("attn_norm", "ln1"),
    ("attn_output", "attn_out"),
    ("ffn_norm", "ln2"),
    ("output_norm", "post_ln"),
    ("ffn_up", "ffn_down"),
    ("ffn_down", "ffn_up"),
];

/// Gemma 3's.
pub(super) static ENCODER: Encoder = Encoder {
    family: &SIGLIP,
    older: Some(&OLDER),
    projectors: &["gemma3"],
    classes: &["Gemma3ForConditionalGeneration"],
    gguf: from_gguf,
    folder: from_folder,
};

fn from_gguf(metadata: &gguf::Metadata, _: RowsOf<'_>) -> Result<ModelSpec, ConfigError> {
    let facts = Facts::gguf(metadata, KEYS, 1, &|_| None);
    let merged = facts.get(Key::gguf("vision.projector.scale_factor"))?;
    let [mean, deviation] = pixels_of_gguf(metadata)?;
    let tower = Tower {
        merged: Merged::Patches(merged.unwrap_or(USUAL_MERGED)),
        width: facts.required(Key::gguf("vision.projection_dim"))?,
        mean,
        deviation,
    };
    tower.spec(&facts)
}

fn from_folder(folder: &Folder) -> Result<Option<ModelSpec>, ConfigError> {
    let Some(vision) = vision_config(folder)? else {
        return Ok(None);
    };
    let kind = vision.map().get("model_type").and_then(Value::as_str);
    if kind != Some(KIND) {
        return Err(ConfigError::Unsupported {
            feature: format!("a vision model of the type {}", kind.unwrap_or("(none)")),
            supported: "siglip_vision_model is",
        });
    }
    let text = Facts::huggingface(folder.config(), SIGLIP.name);
    let facts = Facts::huggingface(&vision, SIGLIP.name);
    let tokens = text.get(Key::huggingface("mm_tokens_per_image"))?;
    let [mean, deviation] = pixels_of(&preprocessing(folder)?, [USUAL_PIXELS; 2]);
    let tower = Tower {
        merged: Merged::Rows(tokens.unwrap_or(USUAL_ROWS)),
        width: text.required(Key::huggingface("hidden_size"))?,
        mean,
        deviation,
    };
    tower.spec(&facts).map(Some)
}

const KIND: &str = "siglip_vision_model";
/// What `transformers` and llama.cpp take where a file does not say it.
const USUAL_ROWS: usize = 256;
const USUAL_MERGED: usize = 4;
const USUAL_EPSILON: f32 = 1e-6;

/// How many patches become one row.
enum Merged {
    /// So many of a side.
    Patches(usize),
    /// As many as leave so many rows of an image.
    Rows(usize),
}

/// What is said beside the encoder's own description.
struct Tower {
    merged: Merged,
    width: usize,
    mean: [f32; 3],
    deviation: [f32; 3],
}

impl Tower {
    fn spec(&self, facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
        let image = facts.required(Key::new("vision.image_size", "image_size"))?;
        let pixels = facts.required(Key::new("vision.patch_size", "patch_size"))?;
        let per_side = usize::checked_div(image, pixels).unwrap_or(0);
        if image != per_side * pixels {
            return Err(ConfigError::Unsupported {
                feature: format!("images of {image} pixels in patches of {pixels}"),
                supported: "whole patches are",
            });
        }
        let merged = match self.merged {
            Merged::Patches(merged) => merged,
            Merged::Rows(rows) => usize::checked_div(per_side, rows.isqrt()).unwrap_or(0),
        };
        let mut spec = spec(facts)?;
        let norm_epsilon = spec.norm.epsilon;
        // Validated later; a product of what is out of range must not overflow before.
        spec.context_tokens = per_side.saturating_mul(per_side);
        spec.patches = Some(Patches {
            pixels,
            size: ImageSize::Square { per_side },
            resampling: Resampling::Bilinear,
            frames: Frames::One,
            order: PatchOrder::Rows,
            places: LearnedPlaces::Each,
            normed: false,
            mean: self.mean,
            deviation: self.deviation,
        });
        spec.output = OutputSpec::Image(ImageRows {
            merged,
            merge: Merge::Mean { norm_epsilon },
            width: self.width,
            deepstack: [None; ImageRows::MOST_DEEPSTACK],
        });
        Ok(spec)
    }
}

/// The layers; what is before and behind them is for [`Tower::spec`] to say.
pub(super) fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let hidden: usize = facts.required(Key::new("vision.embedding_length", "hidden_size"))?;
    let heads = facts.required(Key::new(
        "vision.attention.head_count",
        "num_attention_heads",
    ))?;
    let head_dim = usize::checked_div(hidden, heads).unwrap_or(0);
    if hidden != head_dim * heads {
        return Err(ConfigError::OutOfRange {
            field: "heads of the vision model",
            value: heads,
            limit: hidden,
        });
    }
    facts.expect(
        Key::huggingface("hidden_act"),
        "gelu_pytorch_tanh".to_owned(),
        "gelu_pytorch_tanh is",
    )?;
    let epsilon = facts.get(Key::new(
        "vision.attention.layer_norm_epsilon",
        "layer_norm_eps",
    ))?;
    let layers: usize = facts.required(Key::new("vision.block_count", "num_hidden_layers"))?;
    let inner = facts.required(Key::new("vision.feed_forward_length", "intermediate_size"))?;
    let layer = LayerSpec::usual(
        Attention {
            mask: Mask::Full,
            rope: None,
            biases: Biases::ALL,
            ..Attention::usual(heads, head_dim)
        },
        FeedForward::Plain(Plain {
            inner,
            activation: Activation::GeluTanh,
            biases: true,
        }),
    );
    Ok(ModelSpec {
        family: SIGLIP.name,
        hidden,
        // It has none; nothing is as large as this.
        vocabulary: 1,
        context_tokens: 1,
        norm: Norm {
            kind: NormKind::BiasedLayer,
            epsilon: epsilon.unwrap_or(USUAL_EPSILON),
        },
        embedding_scale: None,
        patches: None,
        images: None,
        learned_input: None,
        per_layer_inputs: None,
        altup: None,
        ropes: Vec::new(),
        layers: vec![layer; layers.min(MOST_LAYERS + 1)],
        layers_ahead: 0,
        head: None,
        output: OutputSpec::Image(ImageRows {
            merged: 1,
            merge: Merge::Mean {
                norm_epsilon: USUAL_EPSILON,
            },
            width: hidden,
            deepstack: [None; ImageRows::MOST_DEEPSTACK],
        }),
    })
}

/// More are out of range, which validation says; as many as a file claims would be a lot of memory first.
const MOST_LAYERS: usize = 4096;
