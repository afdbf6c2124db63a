//! SigLIP as an encoder of images: a Hugging Face folder has it beside the model of language, GGUF in a file of its
//! own (`mmproj`), along with what makes rows of the decoder's width (Gemma 3).

use super::facts::Key;
use super::vision::{
    Encoder, GGUF, IMAGE_SIZE, KEYS, PATCH_SIZE, RowsOf, Sizes, USUAL_PIXELS, expect_type,
    not_alone, pixels_of, pixels_of_gguf, preprocessing, vision_config,
};
use super::{Facts, Family, Given, Naming, Shape};
use crate::error::ConfigError;
use crate::spec::{
    Activation, Attention, Biases, Channels, FeedForward, Frames, ImageRows, ImageSize, LayerSpec,
    LearnedPlaces, Merge, ModelSpec, Norm, NormKind, PatchOrder, Patches, Plain, Resampling,
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
    spec: not_alone,
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

/// [`GGUF`] where feed-forward matrices have each other's names.
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
    let Some(vision) = vision_config(folder, &[])? else {
        return Ok(None);
    };
    expect_type(&vision, &["siglip_vision_model"], "siglip_vision_model is")?;
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
        let image = facts.required(IMAGE_SIZE)?;
        let pixels = facts.required(PATCH_SIZE)?;
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
        let rows = ImageRows {
            merged,
            merge: Merge::Mean {
                norm_epsilon: epsilon(facts)?,
            },
            width: self.width,
            deepstack: [None; ImageRows::MOST_DEEPSTACK],
        };
        Ok(ModelSpec {
            // Validated later; a product of what is out of range must not overflow before.
            context_tokens: per_side.saturating_mul(per_side),
            patches: Some(Patches {
                pixels,
                size: ImageSize::Square { per_side },
                resampling: Resampling::Bilinear,
                frames: Frames::One,
                channels: Channels::Apart,
                order: PatchOrder::Rows,
                places: LearnedPlaces::Each,
                normed: false,
                mean: self.mean,
                deviation: self.deviation,
            }),
            ..spec(SIGLIP.name, facts, rows)?
        })
    }
}

fn epsilon(facts: &Facts<'_>) -> Result<f32, ConfigError> {
    let epsilon = facts.get(Key::new(
        "vision.attention.layer_norm_epsilon",
        "layer_norm_eps",
    ))?;
    Ok(epsilon.unwrap_or(USUAL_EPSILON))
}

/// The layers, and `rows` of what they make. What is before them is for those to say that have them.
pub(super) fn spec(
    family: &'static str,
    facts: &Facts<'_>,
    rows: ImageRows,
) -> Result<ModelSpec, ConfigError> {
    let sizes = Sizes::read(facts)?;
    facts.expect(
        Key::huggingface("hidden_act"),
        "gelu_pytorch_tanh".to_owned(),
        "gelu_pytorch_tanh is",
    )?;
    let layer = LayerSpec::usual(
        Attention {
            rope: None,
            biases: Biases::ALL,
            ..sizes.attention()
        },
        FeedForward::Plain(Plain {
            inner: sizes.inner,
            activation: Activation::GeluTanh,
            biases: true,
        }),
    );
    let norm = Norm {
        kind: NormKind::BiasedLayer,
        epsilon: epsilon(facts)?,
    };
    Ok(sizes.spec(family, norm, layer, rows))
}
