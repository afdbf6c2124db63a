//! Idefics 3 and SmolVLM: SigLIP over tiles of an image, and rows of squares of patches joined for a decoder that is a
//! Llama.

use serde_json::{Map, Value};

use super::facts::{Fact, Key};
use super::siglip::{self, OLDER_GGUF};
use super::vision::{
    Encoder, GGUF, IMAGE_SIZE, KEYS, PATCH_SIZE, RowsOf, USUAL_PIXELS, expect_type, not_alone,
    pixels_of, pixels_of_gguf, preprocessing, resampling, vision_config,
};
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::{
    Channels, Frames, ImageAttention, ImageInput, ImagePlace, ImagePrompt, ImageRows, ImageSize,
    LearnedPlaces, Merge, ModelSpec, PatchOrder, Patches, Resampling, TileMarks, Tiling,
};
use lacuna_files::gguf;
use lacuna_files::huggingface::Folder;

/// Classes of folders with such an encoder.
pub(super) const CLASSES: &[&str] = &[
    "Idefics3ForConditionalGeneration",
    "SmolVLMForConditionalGeneration",
];

/// How its images stand in a decoder.
pub(super) const IMAGES: ImageInput = ImageInput {
    // Files of SmolLM2 and of Llama 3 are no others with and without it.
    silent: &["llama"],
    attention: ImageAttention::Causal,
    deepstack: 0,
    prompt: ImagePrompt {
        mark: "<image>",
        written: "<image>",
        place: ImagePlace::Tiles {
            mark: "<image>",
            marks: TileMarks {
                tile: ["<fake_token_around_image><row_", "_col_", ">"],
                row_end: "\n",
                before_whole: "\n<fake_token_around_image><global-img>",
                before_alone: "<fake_token_around_image><global-img>",
                end: "<fake_token_around_image>",
            },
        },
    },
};

/// SigLIP with Idefics 3's connector.
pub(super) static ENCODER: Encoder = Encoder {
    family: &IDEFICS3,
    older: Some(&OLDER),
    projectors: &["idefics3"],
    classes: CLASSES,
    gguf: from_gguf,
    folder: from_folder,
};

static IDEFICS3: Family = family(GGUF);
static OLDER: Family = family(OLDER_GGUF);
const NAME: &str = "idefics3";

const fn family(gguf: &'static [(&'static str, &'static str)]) -> Family {
    Family {
        name: NAME,
        classes: &[],
        spec: not_alone,
        naming: Naming {
            parts: &[
                ("patch_embd", "vision_model.embeddings.patch_embedding"),
                (
                    "position_embd",
                    "vision_model.embeddings.position_embedding",
                ),
                ("attn_norm", "layer_norm1"),
                ("attn_output", "self_attn.out_proj"),
                ("ffn_norm", "layer_norm2"),
                ("ffn_up", "mlp.fc1"),
                ("ffn_down", "mlp.fc2"),
                ("output_norm", "vision_model.post_layernorm"),
                ("mm.model.fc", "connector.modality_projection.proj"),
            ],
            gguf,
            gguf_inside: Some("v."),
            layers: "vision_model.encoder.layers",
            ..Naming::USUAL
        },
        shapes: &[],
    }
}

/// Types of the encoder's part in `config.json`.
const TYPES: &[&str] = &["idefics3", "idefics3_vision", "smolvlm_vision", "vision"];
/// What `transformers` takes where a folder does not say it: of the encoder, its rows, and preprocessing.
const USUAL: &[(&str, usize)] = &[
    ("hidden_size", 1152),
    ("intermediate_size", 3072),
    ("num_hidden_layers", 12),
    ("num_attention_heads", 16),
    ("image_size", 224),
    ("patch_size", 32),
];
const USUAL_SCALE: usize = 2;
const USUAL_TILE: usize = 364;
const USUAL_TILES: usize = 4;

fn from_gguf(metadata: &gguf::Metadata, _: RowsOf<'_>) -> Result<ModelSpec, ConfigError> {
    let facts = Facts::gguf(metadata, KEYS, 1, &|_| None);
    let side = facts.required(IMAGE_SIZE)?;
    // Files of before it was written are of models that were then run on the whole alone.
    let longest: Option<usize> = facts.get(Key::gguf("vision.preproc_image_size"))?;
    let tower = Tower {
        tiling: Tiling {
            side,
            longest_edge: longest.unwrap_or(side),
            split: true,
        },
        resampling: Resampling::Lanczos,
        merged: facts.get(Key::gguf("vision.projector.scale_factor"))?,
        width: facts.required(Key::gguf("vision.projection_dim"))?,
        pixels: pixels_of_gguf(metadata)?,
    };
    tower.spec(&facts)
}

fn from_folder(folder: &Folder) -> Result<Option<ModelSpec>, ConfigError> {
    let Some(vision) = vision_config(folder, USUAL)? else {
        return Ok(None);
    };
    expect_type(&vision, TYPES, "idefics3_vision and smolvlm_vision are")?;
    let facts = Facts::huggingface(&vision, KEYS);
    let model = Facts::huggingface(folder.config(), KEYS);
    let preprocessing = preprocessing(folder)?;
    let tiling = tiling(&preprocessing, facts.required(IMAGE_SIZE)?)?;
    let tower = Tower {
        tiling,
        resampling: resampling(&preprocessing, Resampling::Lanczos)?,
        merged: model.get(Key::huggingface("scale_factor"))?,
        width: model.required(Key::huggingface("hidden_size"))?,
        pixels: pixels_of(&preprocessing, [USUAL_PIXELS; 2]),
    };
    tower.spec(&facts).map(Some)
}

/// What is said beside the encoder's own description.
struct Tower {
    tiling: Tiling,
    resampling: Resampling,
    merged: Option<usize>,
    width: usize,
    /// Mean and deviation.
    pixels: [[f32; 3]; 2],
}

impl Tower {
    fn spec(&self, facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
        let pixels = facts.required(PATCH_SIZE)?;
        let per_side = usize::checked_div(self.tiling.side, pixels).unwrap_or(0);
        let [mean, deviation] = self.pixels;
        let rows = ImageRows {
            merged: self.merged.unwrap_or(USUAL_SCALE),
            merge: Merge::Joined,
            width: self.width,
            deepstack: [None; ImageRows::MOST_DEEPSTACK],
        };
        Ok(ModelSpec {
            // Validated later; a product of what is out of range must not overflow before.
            context_tokens: per_side.saturating_mul(per_side).max(1),
            patches: Some(Patches {
                pixels,
                size: ImageSize::Tiles(self.tiling),
                resampling: self.resampling,
                frames: Frames::One,
                channels: Channels::Apart,
                order: PatchOrder::Rows,
                places: LearnedPlaces::Each,
                normed: false,
                mean,
                deviation,
            }),
            images: Some(IMAGES),
            ..siglip::spec(NAME, facts, rows)?
        })
    }
}

/// How a folder says that images are cut for an encoder of images of `side` pixels.
fn tiling(said: &Map<String, Value>, side: usize) -> Result<Tiling, ConfigError> {
    let edge = |field: &'static str| number::<usize>(said, &[field, "longest_edge"]);
    let tile = edge("max_image_size")?.unwrap_or(USUAL_TILE);
    if tile != side {
        return Err(ConfigError::Unsupported {
            feature: format!("tiles of {tile} pixels for an encoder of images of {side}"),
            supported: "tiles of its own size are",
        });
    }
    Ok(Tiling {
        side,
        longest_edge: edge("size")?.unwrap_or(USUAL_TILES * USUAL_TILE),
        split: number(said, &["do_image_splitting"])?.unwrap_or(true),
    })
}

/// A fact by the names of fields from the outermost on.
fn number<T: Fact>(said: &Map<String, Value>, names: &[&str]) -> Result<Option<T>, ConfigError> {
    let (first, inner) = names.split_first().map_or(("", &[][..]), |(a, b)| (*a, b));
    let found = inner
        .iter()
        .fold(said.get(first), |found, name| found?.get(*name));
    let Some(value) = found.filter(|value| !value.is_null()) else {
        return Ok(None);
    };
    match T::from_json(value) {
        Some(fact) => Ok(Some(fact)),
        None => Err(ConfigError::Unsupported {
            feature: format!("`{}` {value} of preprocessing", names.join(".")),
            supported: T::EXPECTED,
        }),
    }
}
