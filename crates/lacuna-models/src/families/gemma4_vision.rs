//! The encoder of Gemma 4: images of their own shapes, as large as their tokens have room for, positions by column and row,
//! products between bounds in the small models, and a mean of each square of patches.

use lacuna_kernels::RopeStyle;
use serde_json::{Map, Value};

use super::facts::Key;
use super::vision::{
    Encoder, KEYS, PATCH_SIZE, RowsOf, Sizes, expect_type, not_alone, pixels_of, pixels_of_gguf,
    preprocessing, resampling, vision_config,
};
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::{
    Activation, Attention, Channels, FeedForward, Frames, Gated, ImageRows, ImageSize, LayerSpec,
    LearnedPlaces, Merge, ModelSpec, Norm, NormKind, Norms, PatchOrder, Patches, QkNorm,
    Resampling, Rope, RopeAxes, RopeScaling,
};
use lacuna_files::gguf;
use lacuna_files::huggingface::Folder;

pub(super) static ENCODER: Encoder = Encoder {
    family: &VISION,
    older: None,
    projectors: &["gemma4v"],
    classes: &["Gemma4ForConditionalGeneration"],
    gguf: from_gguf,
    folder: from_folder,
};

static VISION: Family = Family {
    name: NAME,
    classes: &[],
    spec: not_alone,
    naming: Naming {
        parts: &[
            ("patch_embd", "vision_tower.patch_embedder.input_proj"),
            (
                "position_embd.weight",
                "vision_tower.patch_embedder.position_embedding_table",
            ),
            ("attn_q", "self_attn.q_proj.linear"),
            ("attn_k", "self_attn.k_proj.linear"),
            ("attn_v", "self_attn.v_proj.linear"),
            ("attn_output", "self_attn.o_proj.linear"),
            ("ffn_norm", "pre_feedforward_layernorm"),
            ("ffn_gate", "mlp.gate_proj.linear"),
            ("ffn_up", "mlp.up_proj.linear"),
            ("ffn_down", "mlp.down_proj.linear"),
            ("std_bias", "vision_tower.std_bias"),
            ("std_scale", "vision_tower.std_scale"),
            ("mm.pooled_projection", "embed_vision.embedding_projection"),
        ],
        gguf: &[
            ("attn_norm", "ln1"),
            ("attn_output", "attn_out"),
            ("post_attention_norm", "attn_post_norm"),
            ("ffn_norm", "ln2"),
            ("post_ffw_norm", "ffn_post_norm"),
            ("mm.pooled_projection", "mm.input_projection"),
        ],
        gguf_inside: Some("v."),
        bare: &["std_bias", "std_scale"],
        gguf_bare: &["std_bias", "std_scale"],
        layers: "vision_tower.encoder.layers",
        ..Naming::USUAL
    },
    shapes: &[],
};

const NAME: &str = "gemma4-vision";

/// What `transformers` takes where a folder does not say it.
const USUAL: &[(&str, usize)] = &[
    ("hidden_size", 768),
    ("intermediate_size", 3072),
    ("num_hidden_layers", 16),
    ("num_attention_heads", 12),
    ("patch_size", 16),
    ("position_embedding_size", 10_240),
    ("pooling_kernel_size", USUAL_POOLED),
];
/// Patches of the side of a square that becomes one row.
const USUAL_POOLED: usize = 3;
/// Rows of an image at most.
const USUAL_ROWS: usize = 280;
const USUAL_THETA: f64 = 100.0;
const USUAL_EPSILON: f32 = 1e-6;
/// Values of pixels as they are, which only the encoder itself brings to -1 to 1.
const USUAL_PIXELS: [[f32; 3]; 2] = [[0.0; 3], [1.0; 3]];

fn from_gguf(metadata: &gguf::Metadata, rows_of: RowsOf<'_>) -> Result<ModelSpec, ConfigError> {
    let facts = Facts::gguf(metadata, KEYS, 1, rows_of);
    let pooled = facts.get(Key::gguf("vision.projector.scale_factor"))?;
    let epsilon = facts.get(Key::gguf("vision.attention.layer_norm_epsilon"))?;
    let places = rows_of("v.position_embd.weight").unwrap_or(0);
    let tower = Tower {
        sizes: Sizes::read(&facts)?,
        patch: facts.required(PATCH_SIZE)?,
        channels: Channels::Apart,
        places: places / 2,
        pooled: pooled.unwrap_or(USUAL_POOLED),
        rows: USUAL_ROWS,
        resampling: Resampling::Bicubic,
        pixels: match metadata.get::<Vec<f32>>("clip.vision.image_mean")? {
            Some(_) => pixels_of_gguf(metadata)?,
            None => USUAL_PIXELS,
        },
        theta: USUAL_THETA,
        epsilon: epsilon.unwrap_or(USUAL_EPSILON),
        bounded: rows_of("v.blk.0.attn_q.input_max").is_some(),
        standardized: rows_of("v.std_bias").is_some(),
        width: facts.required(Key::gguf("vision.projection_dim"))?,
    };
    Ok(tower.spec())
}

fn from_folder(folder: &Folder) -> Result<Option<ModelSpec>, ConfigError> {
    let Some(vision) = vision_config(folder, USUAL)? else {
        return Ok(None);
    };
    expect_type(&vision, &["gemma4_vision"], "gemma4_vision is")?;
    let facts = Facts::huggingface(&vision, KEYS);
    let model = Facts::huggingface(folder.config(), KEYS);
    let required = |name| facts.required(Key::huggingface(name));
    let flag = |name| facts.get::<bool>(Key::huggingface(name));
    facts.expect(
        Key::huggingface("hidden_activation"),
        "gelu_pytorch_tanh".to_owned(),
        "gelu_pytorch_tanh is",
    )?;
    let mut sizes = Sizes::read(&facts)?;
    if let Some(head_dim) = facts.get(Key::huggingface("head_dim"))? {
        sizes.head_dim = head_dim;
    }
    let heads: usize = required("num_attention_heads")?;
    facts.expect(
        Key::huggingface("num_key_value_heads"),
        heads,
        "as many as those of queries are",
    )?;
    let preprocessing = preprocessing(folder)?;
    let epsilon = facts.get(Key::huggingface("rms_norm_eps"))?;
    let tower = Tower {
        sizes,
        patch: required("patch_size")?,
        channels: Channels::Together,
        places: required("position_embedding_size")?,
        pooled: required("pooling_kernel_size")?,
        rows: rows(&preprocessing)?,
        resampling: resampling(&preprocessing, Resampling::Bicubic)?,
        pixels: match preprocessing.get("do_normalize").and_then(Value::as_bool) {
            Some(true) => pixels_of(&preprocessing, USUAL_PIXELS),
            _ => USUAL_PIXELS,
        },
        theta: facts.of_rope("rope_theta")?.unwrap_or(USUAL_THETA),
        epsilon: epsilon.unwrap_or(USUAL_EPSILON),
        bounded: flag("use_clipped_linears")?.unwrap_or(false),
        standardized: flag("standardize")?.unwrap_or(false),
        width: model.required(Key::huggingface("hidden_size"))?,
    };
    Ok(Some(tower.spec()))
}

/// Rows of an image at most, as a folder says how images are made ready.
fn rows(preprocessing: &Map<String, Value>) -> Result<usize, ConfigError> {
    let Some(said) = preprocessing
        .get("max_soft_tokens")
        .filter(|it| !it.is_null())
    else {
        return Ok(USUAL_ROWS);
    };
    let number = said.as_u64().and_then(|rows| usize::try_from(rows).ok());
    number.ok_or_else(|| ConfigError::Unsupported {
        feature: format!("`max_soft_tokens` {said} of preprocessing"),
        supported: "a whole number is",
    })
}

/// What a file says.
struct Tower {
    sizes: Sizes,
    /// Pixels of a patch's side.
    patch: usize,
    channels: Channels,
    /// Rows of the table of columns, and of that of rows.
    places: usize,
    /// Patches of the side of a square that becomes one row.
    pooled: usize,
    /// Those of an image at most.
    rows: usize,
    resampling: Resampling,
    /// Mean and deviation, before values are brought from 0 to 1 to -1 to 1.
    pixels: [[f32; 3]; 2],
    theta: f64,
    epsilon: f32,
    bounded: bool,
    standardized: bool,
    /// Elements of a row.
    width: usize,
}

impl Tower {
    fn spec(&self) -> ModelSpec {
        let attention = Attention {
            qk_norm: Some(QkNorm::PerHead),
            value_norm: true,
            scale: 1.0,
            ..self.sizes.attention()
        };
        let block = Gated::usual(self.sizes.inner, Activation::GeluTanh);
        let layer = LayerSpec {
            norms: Norms::Both,
            ..LayerSpec::usual(attention, FeedForward::Gated(block))
        };
        let norm = Norm {
            kind: NormKind::Rms,
            epsilon: self.epsilon,
        };
        let rows = ImageRows {
            merged: self.pooled,
            merge: Merge::Pooled {
                standardized: self.standardized,
                norm_epsilon: self.epsilon,
            },
            width: self.width,
            deepstack: [None; ImageRows::MOST_DEEPSTACK],
        };
        let rope = Rope {
            style: RopeStyle::HalvesSplit,
            dimensions: self.sizes.head_dim,
            theta: self.theta,
            scaling: RopeScaling::None,
            file_factors: false,
            axes: RopeAxes::PatchByColumn,
        };
        let squared = self.pooled.saturating_mul(self.pooled);
        ModelSpec {
            // As below.
            context_tokens: self.rows.saturating_mul(squared).max(1),
            patches: Some(self.patches()),
            bounded: self.bounded,
            ropes: vec![rope],
            ..self.sizes.spec(NAME, norm, layer, rows)
        }
    }

    fn patches(&self) -> Patches {
        // Validated later; products of what is out of range must not overflow before.
        let unit = self.patch.saturating_mul(self.pooled);
        let [mean, deviation] = self.pixels;
        let half = |channel: usize| deviation[channel] / 2.0;
        Patches {
            pixels: self.patch,
            size: ImageSize::Filled {
                square: self.pooled,
                most_pixels: self.rows.saturating_mul(unit.saturating_mul(unit)),
            },
            resampling: self.resampling,
            frames: Frames::One,
            channels: self.channels,
            order: PatchOrder::Rows,
            places: LearnedPlaces::Axes { each: self.places },
            normed: false,
            // What is x after that becomes 2 x - 1.
            mean: [0, 1, 2].map(|channel| mean[channel] + half(channel)),
            deviation: [0, 1, 2].map(half),
        }
    }
}
