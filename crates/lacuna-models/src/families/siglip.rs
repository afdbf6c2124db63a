//! SigLIP as an encoder of images: a Hugging Face folder has it beside the model of language, GGUF in a file of its
//! own (`mmproj`), along with what makes rows of the decoder's width (Gemma 3).

use serde_json::{Map, Value};

use super::facts::Key;
use super::{Description, Facts, Family, Given, Naming, Shape, SpecialTokens, Spelling};
use crate::error::ConfigError;
use crate::spec::{
    Activation, Attention, Biases, FeedForward, Gate, ImageRows, ImageSize, LayerSpec, Mask,
    ModelSpec, Norm, NormKind, Norms, OutputSpec, Patches, Plain, Resampling, ResidualScale,
    Values,
};
use lacuna_files::gguf;
use lacuna_files::huggingface::{Config, Folder};
use lacuna_files::{Metadata, ModelFiles};

pub(super) static SIGLIP: Family = Family {
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
        gguf: &[
            ("attn_norm", "ln1"),
            ("attn_output", "attn_out"),
            ("ffn_norm", "ln2"),
            ("output_norm", "post_ln"),
        ],
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
        special_tokens: SpecialTokens::NoVocabulary,
        tied: true,
        context: 4096,
        rope_theta: 10_000.0,
        rope_factor: None,
        norm_epsilon: USUAL_EPSILON,
        more: &[
            ("projector_type", Given::Text(PROJECTOR)),
            ("image_size", Given::Size(896)),
            ("patch_size", Given::Size(14)),
            ("projection_dim", Given::Size(2560)),
            ("attention.layer_norm_epsilon", Given::Number(USUAL_EPSILON)),
            ("image_mean", Given::Numbers(&USUAL_PIXELS)),
            ("image_std", Given::Numbers(&USUAL_PIXELS)),
        ],
    }],
};

/// What the keys of encoders begin with in GGUF files.
const KEYS: &str = "clip";

/// Projections that are computed, as GGUF names them.
const PROJECTOR: &str = "gemma3";

/// The encoder of images in a model's files, or in the file beside them that has only that; `None` where there is
/// none.
///
/// # Errors
/// [`ConfigError`] for an encoder of another kind, and numbers that are missing or out of range.
pub(crate) fn describe(files: &ModelFiles) -> Result<Option<Description>, ConfigError> {
    match files.metadata() {
        Metadata::Gguf(metadata) => describe_gguf(metadata),
        Metadata::HuggingFace(folder) => {
            let spec = from_folder(folder)?;
            let described = spec.map(|spec| described(spec, Spelling::HuggingFace));
            described.transpose()
        }
    }
}

/// That of a file with this metadata; `None` for a file of a model of language.
///
/// # Errors
/// As [`describe`].
pub(crate) fn describe_gguf(metadata: &gguf::Metadata) -> Result<Option<Description>, ConfigError> {
    let spec = from_gguf(metadata)?;
    spec.map(|spec| described(spec, Spelling::Gguf)).transpose()
}

fn described(spec: ModelSpec, spelling: Spelling) -> Result<Description, ConfigError> {
    spec.validate()?;
    Ok(Description {
        spec,
        family: &SIGLIP,
        spelling,
    })
}

fn from_gguf(metadata: &gguf::Metadata) -> Result<Option<ModelSpec>, ConfigError> {
    if metadata.get::<&str>("general.architecture")? != Some(KEYS) {
        return Ok(None);
    }
    let kind = match metadata.get::<&str>("clip.projector_type")? {
        Some(kind) => Some(kind),
        None => metadata.get::<&str>("clip.vision.projector_type")?,
    };
    if kind != Some(PROJECTOR) {
        return Err(ConfigError::Unsupported {
            feature: format!("a projector of the type {}", kind.unwrap_or("(none)")),
            supported: "gemma3 is",
        });
    }
    let facts = Facts::gguf(metadata, KEYS, 1, &|_| None);
    let merged = facts.get(Key::gguf("vision.projector.scale_factor"))?;
    let three = |key: &str| -> Result<[f32; 3], ConfigError> {
        let found = metadata.get::<Vec<f32>>(key)?;
        Ok(found
            .and_then(|it| it.try_into().ok())
            .unwrap_or(USUAL_PIXELS))
    };
    let encoder = Encoder {
        merged: Merged::Patches(merged.unwrap_or(USUAL_MERGED)),
        width: facts.required(Key::gguf("vision.projection_dim"))?,
        mean: three("clip.vision.image_mean")?,
        deviation: three("clip.vision.image_std")?,
    };
    encoder.spec(&facts).map(Some)
}

fn from_folder(folder: &Folder) -> Result<Option<ModelSpec>, ConfigError> {
    let map = folder.config().map();
    let Some(vision) = map.get("vision_config").and_then(Value::as_object) else {
        return Ok(None);
    };
    if folder.config().class() != GEMMA {
        return Ok(None);
    }
    let kind = vision.get("model_type").and_then(Value::as_str);
    if kind != Some(KIND) {
        return Err(ConfigError::Unsupported {
            feature: format!("a vision model of the type {}", kind.unwrap_or("(none)")),
            supported: "siglip_vision_model is",
        });
    }
    let vision = serde_json::to_vec(vision).unwrap_or_default();
    let vision = Config::parse(&vision)?;
    let text = Facts::huggingface(folder.config(), SIGLIP.name);
    let facts = Facts::huggingface(&vision, SIGLIP.name);
    let tokens = text.get(Key::huggingface("mm_tokens_per_image"))?;
    let pixels: Map<String, Value> = folder.json("preprocessor_config.json")?.unwrap_or_default();
    let three = |key: &str| -> [f32; 3] {
        let values = pixels.get(key).and_then(Value::as_array);
        let numbers = values.map(|values| {
            let numbers = values.iter().filter_map(Value::as_f64);
            numbers.map(|number| number as f32).collect::<Vec<_>>()
        });
        let numbers = numbers.and_then(|numbers| numbers.try_into().ok());
        numbers.unwrap_or(USUAL_PIXELS)
    };
    let encoder = Encoder {
        merged: Merged::Rows(tokens.unwrap_or(USUAL_ROWS)),
        width: text.required(Key::huggingface("hidden_size"))?,
        mean: three("image_mean"),
        deviation: three("image_std"),
    };
    encoder.spec(&facts).map(Some)
}

/// Gemma 3 with eyes.
const GEMMA: &str = "Gemma3ForConditionalGeneration";
const KIND: &str = "siglip_vision_model";
/// What `transformers` and llama.cpp take where a file does not say it.
const USUAL_PIXELS: [f32; 3] = [0.5; 3];
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
struct Encoder {
    merged: Merged,
    width: usize,
    mean: [f32; 3],
    deviation: [f32; 3],
}

impl Encoder {
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
            mean: self.mean,
            deviation: self.deviation,
        });
        spec.output = OutputSpec::Image(ImageRows {
            merged,
            norm_epsilon,
            width: self.width,
        });
        Ok(spec)
    }
}

/// The layers; what is before and behind them is for [`Encoder::spec`] to say.
fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
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
    let layer = LayerSpec {
        attention: Some(Attention {
            query_heads: heads,
            kv_heads: heads,
            head_dim,
            mask: Mask::Full,
            rope: None,
            qk_norm: None,
            value_norm: false,
            values: Values::Projected,
            scale: 1.0 / (head_dim as f32).sqrt(),
            soft_cap: None,
            temperature: None,
            shares: None,
            biases: Biases {
                projections: true,
                output: true,
            },
            sinks: false,
            gate: Gate::None,
            latent: None,
        }),
        recurrence: None,
        feed_forward: FeedForward::Plain(Plain {
            inner,
            activation: Activation::GeluTanh,
            biases: true,
        }),
        norms: Norms::Before,
        laurel: None,
        residual_scale: ResidualScale::default(),
        output_scale: false,
    };
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
        output: OutputSpec::Image(ImageRows {
            merged: 1,
            norm_epsilon: USUAL_EPSILON,
            width: hidden,
        }),
    })
}

/// More are out of range, which validation says; as many as a file claims would be a lot of memory first.
const MOST_LAYERS: usize = 4096;
