//! Pixtral, the encoder of Mistral's models that see: images of their own shapes up to a longest side, positions by row and
//! column, and tokens between the rows of an image. Pixtral 12B has a token for each patch, Mistral Small 3.1 and later for
//! a square of them.

use lacuna_kernels::RopeStyle;
use serde_json::{Map, Value};

use super::facts::Key;
use super::vision::{
    Encoder, GGUF, IMAGE_SIZE, KEYS, PATCH_SIZE, RowsOf, Sizes, expect_type, not_alone, pixels_of,
    pixels_of_gguf, preprocessing, resampling, vision_config,
};
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::{
    Activation, Channels, FeedForward, Frames, Gated, ImageAttention, ImageInput, ImagePlace,
    ImagePrompt, ImageRows, ImageSize, LayerSpec, LearnedPlaces, Merge, ModelSpec, Norm, NormKind,
    PatchOrder, Patches, Resampling, Rope, RopeAxes, RopeScaling,
};
use lacuna_files::gguf;
use lacuna_files::huggingface::Folder;

/// The class of Pixtral 12B's folders, and of those of LLaVA with other encoders.
pub(super) const LLAVA: &str = "LlavaForConditionalGeneration";
/// That of folders of models in which squares of patches become one row.
pub(super) const MISTRAL_3: &str = "Mistral3ForConditionalGeneration";

/// How its images stand in a decoder.
const IMAGES: ImageInput = ImageInput {
    // Files of Mistral's decoders are no others with and without it.
    silent: &["llama", "mistral3"],
    attention: ImageAttention::Causal,
    deepstack: 0,
    prompt: ImagePrompt {
        mark: "[IMG]",
        written: "[IMG]",
        place: ImagePlace::Rows {
            mark: "[IMG]",
            row_end: "[IMG_BREAK]",
            end: "[IMG_END]",
        },
    },
};

/// That of all of them.
pub(super) static ENCODER: Encoder = Encoder {
    family: &PIXTRAL,
    older: None,
    projectors: &["pixtral"],
    classes: &[LLAVA, MISTRAL_3],
    gguf: from_gguf,
    folder: from_folder,
};

static PIXTRAL: Family = Family {
    name: NAME,
    classes: &[],
    spec: not_alone,
    naming: Naming {
        parts: &[
            ("patch_embd", "vision_tower.patch_conv"),
            ("pre_ln", "vision_tower.ln_pre"),
            ("attn_norm", "attention_norm"),
            ("attn_q", "attention.q_proj"),
            ("attn_k", "attention.k_proj"),
            ("attn_v", "attention.v_proj"),
            ("attn_output", "attention.o_proj"),
            ("ffn_norm", "ffn_norm"),
            ("ffn_gate", "feed_forward.gate_proj"),
            ("ffn_up", "feed_forward.up_proj"),
            ("ffn_down", "feed_forward.down_proj"),
            ("mm.input_norm", "multi_modal_projector.norm"),
            (
                "mm.patch_merger",
                "multi_modal_projector.patch_merger.merging_layer",
            ),
            ("mm.1", "multi_modal_projector.linear_1"),
            ("mm.2", "multi_modal_projector.linear_2"),
        ],
        gguf: GGUF,
        gguf_inside: Some("v."),
        layers: "vision_tower.transformer.layers",
        // A row of the decoder's table, which it has itself.
        unused: &["v.token_embd.img_break"],
        ..Naming::USUAL
    },
    shapes: &[],
};

const NAME: &str = "pixtral";

/// What `transformers` takes where a folder does not say it, which Pixtral 12B's leaves out.
const USUAL: &[(&str, usize)] = &[
    ("hidden_size", 1024),
    ("intermediate_size", 4096),
    ("num_hidden_layers", 24),
    ("num_attention_heads", 16),
    ("image_size", 1024),
    ("patch_size", 16),
];
const USUAL_ACTIVATION: &str = "gelu";
const USUAL_THETA: f64 = 10_000.0;
/// Patches of a square's side where a folder of Mistral 3 does not say it.
const USUAL_MERGED: usize = 2;
/// Of the text model of Mistral 3.
const USUAL_TEXT_EPSILON: f32 = 1e-5;
/// That of the encoder, which no folder says.
const EPSILON: f32 = 1e-5;
/// Mean and deviation of pixels where a folder does not say them.
const USUAL_PIXELS: [[f32; 3]; 2] = [
    [0.481_454_66, 0.457_827_5, 0.408_210_73],
    [0.268_629_54, 0.261_302_6, 0.275_777_1],
];

/// Makes the decoder of a folder one that takes images, if it is one of these.
pub(super) fn give_images(spec: &mut ModelSpec, facts: &Facts<'_>) -> Result<(), ConfigError> {
    let sees = |class| [LLAVA, MISTRAL_3].contains(&class);
    if !facts.class().is_some_and(sees) {
        return Ok(());
    }
    let kind: Option<String> = facts.of_vision("model_type")?;
    if kind.as_deref() == Some(NAME) {
        spec.images = Some(IMAGES);
    }
    Ok(())
}

fn from_gguf(metadata: &gguf::Metadata, rows_of: RowsOf<'_>) -> Result<ModelSpec, ConfigError> {
    let facts = Facts::gguf(metadata, KEYS, 1, rows_of);
    let epsilon = facts.get(Key::gguf("vision.attention.layer_norm_epsilon"))?;
    let silu: Option<bool> = facts.get(Key::gguf("use_silu"))?;
    let gelu: Option<bool> = facts.get(Key::gguf("use_gelu"))?;
    let reduces = rows_of("mm.patch_merger.weight").is_some();
    let tower = Tower {
        epsilon: epsilon.unwrap_or(EPSILON),
        activation: match (silu, gelu) {
            (Some(true), _) => Activation::Silu,
            (_, Some(true)) => Activation::GeluErf,
            _ => {
                return Err(ConfigError::Unsupported {
                    feature: "an encoder of neither SiLU nor GELU".to_owned(),
                    supported: "`clip.use_silu` and `clip.use_gelu` are",
                });
            }
        },
        merged: facts
            .get(Key::gguf("vision.spatial_merge_size"))?
            .unwrap_or(1),
        reduced: reduces.then_some(epsilon.unwrap_or(EPSILON)),
        longest_edge: facts.required(Key::gguf("vision.image_size"))?,
        width: facts.required(Key::gguf("vision.projection_dim"))?,
        resampling: Resampling::Bicubic,
        pixels: pixels_of_gguf(metadata)?,
    };
    tower.spec(&facts)
}

fn from_folder(folder: &Folder) -> Result<Option<ModelSpec>, ConfigError> {
    let Some(vision) = vision_config(folder, USUAL)? else {
        return Ok(None);
    };
    expect_type(&vision, &[NAME], "pixtral is")?;
    let facts = Facts::huggingface(&vision, NAME);
    let model = Facts::huggingface(folder.config(), NAME);
    expect_last_rows(&model)?;
    let preprocessing = preprocessing(folder)?;
    let activation: Option<String> = facts.get(Key::huggingface("hidden_act"))?;
    let reduces = folder.config().class() == MISTRAL_3;
    let epsilon: Option<f32> = model.get(Key::huggingface("rms_norm_eps"))?;
    let merged = model.get(Key::huggingface("spatial_merge_size"))?;
    let tower = Tower {
        epsilon: EPSILON,
        activation: match activation.as_deref().unwrap_or(USUAL_ACTIVATION) {
            "silu" => Activation::Silu,
            "gelu" => Activation::GeluErf,
            other => {
                return Err(ConfigError::Unsupported {
                    feature: format!("hidden_act `{other}` of the vision model"),
                    supported: "silu and gelu are",
                });
            }
        },
        merged: match reduces {
            true => merged.unwrap_or(USUAL_MERGED),
            false => 1,
        },
        reduced: reduces.then_some(epsilon.unwrap_or(USUAL_TEXT_EPSILON)),
        longest_edge: match longest_edge(&preprocessing) {
            Some(longest) => longest,
            None => facts.required(IMAGE_SIZE)?,
        },
        width: model.required(Key::huggingface("hidden_size"))?,
        resampling: resampling(&preprocessing, Resampling::Bicubic)?,
        pixels: pixels_of(&preprocessing, USUAL_PIXELS),
    };
    tower.spec(&facts).map(Some)
}

/// Refuses models whose decoder is given what other layers than the last have made, or has another function between
/// its products.
fn expect_last_rows(model: &Facts<'_>) -> Result<(), ConfigError> {
    // What `transformers` takes where the file does not say it.
    let (usual_layer, usual_strategy) = match model.class() {
        Some(LLAVA) => (-2.0, "default"),
        _ => (-1.0, "full"),
    };
    let layer: Option<f64> = model.get(Key::huggingface("vision_feature_layer"))?;
    let strategy: Option<String> = model.get(Key::huggingface("vision_feature_select_strategy"))?;
    let (layer, strategy) = (
        layer.unwrap_or(usual_layer),
        strategy.as_deref().unwrap_or(usual_strategy),
    );
    if layer != -1.0 || strategy != "full" {
        return Err(ConfigError::Unsupported {
            feature: format!(
                "rows of the vision model's layer {layer} by the strategy `{strategy}`"
            ),
            supported: "all of the last, which is -1 and `full`, are",
        });
    }
    model.expect(
        Key::huggingface("projector_hidden_act"),
        "gelu".to_owned(),
        "gelu is",
    )
}

/// Pixels of an image's longer side at most, as preprocessing has it.
fn longest_edge(preprocessing: &Map<String, Value>) -> Option<usize> {
    let size = preprocessing.get("size")?;
    let longest = size.get("longest_edge").unwrap_or(size).as_u64()?;
    usize::try_from(longest).ok()
}

/// What files say in ways of their own.
struct Tower {
    epsilon: f32,
    activation: Activation,
    /// Patches of a square's side.
    merged: usize,
    /// Of the norm before squares become one patch, where they do.
    reduced: Option<f32>,
    /// Pixels.
    longest_edge: usize,
    width: usize,
    resampling: Resampling,
    /// Mean and deviation.
    pixels: [[f32; 3]; 2],
}

impl Tower {
    fn spec(&self, facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
        let sizes = Sizes::read(facts)?;
        let theta = match facts.of_rope("rope_theta")? {
            Some(theta) => Some(theta),
            None => facts.get(Key::huggingface("rope_theta"))?,
        };
        let rope = Rope {
            // The converter permutes the rows of queries and keys.
            style: facts.style(RopeStyle::Interleaved),
            dimensions: sizes.head_dim,
            theta: theta.unwrap_or(USUAL_THETA),
            scaling: RopeScaling::None,
            file_factors: false,
            axes: RopeAxes::PatchInTurn,
        };
        let patches = self.patches(facts)?;
        let layer = LayerSpec::usual(
            sizes.attention(),
            FeedForward::Gated(Gated::usual(sizes.inner, self.activation)),
        );
        let norm = Norm {
            kind: NormKind::Rms,
            epsilon: self.epsilon,
        };
        let rows = ImageRows {
            merged: self.merged,
            merge: Merge::Apart {
                reduced: self.reduced,
            },
            width: self.width,
            deepstack: [None; ImageRows::MOST_DEEPSTACK],
        };
        Ok(ModelSpec {
            context_tokens: patches.most(),
            patches: Some(patches),
            images: Some(IMAGES),
            ropes: vec![rope],
            ..sizes.spec(NAME, norm, layer, rows)
        })
    }

    fn patches(&self, facts: &Facts<'_>) -> Result<Patches, ConfigError> {
        let pixels: usize = facts.required(PATCH_SIZE)?;
        let most = Patches::MOST_PER_SIDE * Patches::MOST_PIXELS;
        let unit = pixels.saturating_mul(self.merged);
        if unit == 0 || unit > most || self.longest_edge > most {
            return Err(ConfigError::OutOfRange {
                field: "pixels of a side of an image, or of a square of patches",
                value: unit.max(self.longest_edge),
                limit: most,
            });
        }
        let longest = self.longest_edge.next_multiple_of(unit);
        let [mean, deviation] = self.pixels;
        Ok(Patches {
            pixels,
            size: ImageSize::Own {
                square: self.merged,
                least_pixels: 1,
                most_pixels: longest * longest,
                longest_edge: Some(self.longest_edge),
            },
            resampling: self.resampling,
            frames: Frames::One,
            channels: Channels::Apart,
            order: PatchOrder::Rows,
            places: LearnedPlaces::None,
            normed: true,
            mean,
            deviation,
        })
    }
}
