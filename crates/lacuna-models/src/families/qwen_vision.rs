//! The encoders of Qwen 2 VL, 2.5 VL, 3 VL and 3.5: images of their own shapes, positions by row and column, and squares of
//! patches side by side. And what their decoders have of it: positions of several numbers.

use lacuna_kernels::RopeStyle;
use serde_json::{Map, Value};

use super::facts::Key;
use super::vision::{
    Encoder, GGUF, KEYS, PATCH_SIZE, RowsOf, Sizes, USUAL_PIXELS, not_alone, pixels_of,
    pixels_of_gguf, preprocessing, resampling, vision_config,
};
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::{
    Activation, Attention, Biases, Channels, FeedForward, Frames, Gated, ImageAttention,
    ImageInput, ImagePlace, ImagePrompt, ImageRows, ImageSize, LayerSpec, LearnedPlaces, Merge,
    ModelSpec, Norm, NormKind, PatchOrder, Patches, Plain, Resampling, Rope, RopeAxes, RopeScaling,
    Tap, Windows,
};
use lacuna_files::gguf::{self, FromValue};
use lacuna_files::huggingface::Folder;

static QWEN: Family = Family {
    name: "qwen-vision",
    classes: &[],
    spec: not_alone,
    naming: Naming {
        parts: &[
            ("patch_embd", "visual.patch_embed.proj"),
            ("position_embd", "visual.pos_embed"),
            ("attn_norm", "norm1"),
            ("attn_qkv", "attn.qkv"),
            ("attn_output", "attn.proj"),
            ("ffn_norm", "norm2"),
            ("ffn_up", "mlp.linear_fc1"),
            ("ffn_down", "mlp.linear_fc2"),
            ("output_norm", "visual.merger.norm"),
            ("mm.0", "visual.merger.linear_fc1"),
            ("mm.2", "visual.merger.linear_fc2"),
        ],
        gguf: GGUF,
        gguf_inside: Some("v."),
        gguf_bare: &[crate::layers::SECOND_FRAME],
        numbered: &[
            (
                "deepstack.norm",
                ["v.deepstack.*.norm", "visual.deepstack_merger_list.*.norm"],
            ),
            (
                "deepstack.fc1",
                [
                    "v.deepstack.*.fc1",
                    "visual.deepstack_merger_list.*.linear_fc1",
                ],
            ),
            (
                "deepstack.fc2",
                [
                    "v.deepstack.*.fc2",
                    "visual.deepstack_merger_list.*.linear_fc2",
                ],
            ),
        ],
        layers: "visual.blocks",
        ..Naming::USUAL
    },
    shapes: &[],
};

/// With the names of Qwen 2 and 2.5 VL.
static OLDER: Family = Family {
    naming: Naming {
        parts: &[
            ("patch_embd", "visual.patch_embed.proj"),
            ("attn_norm", "norm1"),
            ("attn_qkv", "attn.qkv"),
            ("attn_output", "attn.proj"),
            ("ffn_norm", "norm2"),
            ("output_norm", "visual.merger.ln_q"),
            ("mm.0", "visual.merger.mlp.0"),
            ("mm.2", "visual.merger.mlp.2"),
        ],
        numbered: &[],
        ..QWEN.naming
    },
    ..QWEN
};

/// With those of the feed-forward blocks of Qwen 2 VL.
static OLDEST: Family = Family {
    naming: Naming {
        parts: &[
            ("patch_embd", "visual.patch_embed.proj"),
            ("attn_norm", "norm1"),
            ("attn_qkv", "attn.qkv"),
            ("attn_output", "attn.proj"),
            ("ffn_norm", "norm2"),
            ("ffn_up", "mlp.fc1"),
            ("ffn_down", "mlp.fc2"),
            ("output_norm", "visual.merger.ln_q"),
            ("mm.0", "visual.merger.mlp.0"),
            ("mm.2", "visual.merger.mlp.2"),
        ],
        ..OLDER.naming
    },
    ..QWEN
};

/// Qwen 3 VL's, which Qwen 3.5 has too.
pub(super) static QWEN_3: Encoder = Encoder {
    family: &QWEN,
    older: None,
    projectors: &["qwen3vl_merger"],
    classes: &[
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
    ],
    gguf: |metadata, rows_of| of_gguf(Kind::Three, metadata, rows_of),
    folder: |folder| of_folder(Kind::Three, folder),
};

/// Qwen 2.5 VL's.
pub(super) static QWEN_2_5: Encoder = Encoder {
    family: &OLDER,
    older: None,
    projectors: &["qwen2.5vl_merger"],
    classes: &["Qwen2_5_VLForConditionalGeneration"],
    gguf: |metadata, rows_of| of_gguf(Kind::TwoAndAHalf, metadata, rows_of),
    folder: |folder| of_folder(Kind::TwoAndAHalf, folder),
};

/// Qwen 2 VL's.
pub(super) static QWEN_2: Encoder = Encoder {
    family: &OLDEST,
    older: None,
    projectors: &["qwen2vl_merger"],
    classes: &["Qwen2VLForConditionalGeneration"],
    gguf: |metadata, rows_of| of_gguf(Kind::Two, metadata, rows_of),
    folder: |folder| of_folder(Kind::Two, folder),
};

// --- decoders --------------------------------------------------------------------------------

/// How images stand in the prompts of all of them.
const PROMPT: ImagePrompt = ImagePrompt {
    mark: "<|image_pad|>",
    written: "<|image_pad|>",
    place: ImagePlace::Instead("<|image_pad|>"),
};

/// Makes a decoder one that takes images: its positions have three numbers, of which `axes` says how they turn heads.
pub(super) fn give_images(
    spec: &mut ModelSpec,
    facts: &Facts<'_>,
    axes: fn([usize; 3]) -> RopeAxes,
) -> Result<(), ConfigError> {
    let taps: Option<Vec<usize>> = facts.of_vision("deepstack_visual_indexes")?;
    let deepstack = match facts.get(Key::gguf("n_deepstack_layers"))? {
        Some(count) => count,
        None => taps.map_or(0, |taps| taps.len()),
    };
    if deepstack > ImageRows::MOST_DEEPSTACK.min(spec.layers.len()) {
        return Err(ConfigError::OutOfRange {
            field: "layers that parts of images' rows are added to",
            value: deepstack,
            limit: ImageRows::MOST_DEEPSTACK.min(spec.layers.len()),
        });
    }
    let (Some(sections), Some(rope)) = (facts.rope_sections()?, spec.ropes.first_mut()) else {
        // Text alone turns all pairs alike, so a file that does not say how is of use without images.
        return Ok(());
    };
    rope.axes = axes(sections);
    spec.images = Some(ImageInput {
        silent: &[],
        attention: ImageAttention::Causal,
        deepstack,
        prompt: PROMPT,
    });
    Ok(())
}

// --- encoders --------------------------------------------------------------------------------

/// What differs between them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Two,
    /// Windows, gates, and norms by the root mean square.
    TwoAndAHalf,
    /// Learned places, and rows of inner layers.
    Three,
}

/// Tokens of an image at most, whatever its file says: as many as Qwen 2 VL's processor takes, and as Qwen recommends. The
/// processors of later models take more than ten times as many, whose encoding takes gigabytes of memory.
const MOST_TOKENS: usize = 1280;

/// What llama.cpp takes at least where a file does not say it.
const LEAST_TOKENS: usize = 8;

/// What `transformers` and llama.cpp take where a file does not say it.
const USUAL_MERGED: usize = 2;
const USUAL_WINDOW_PIXELS: usize = 112;
const USUAL_THETA: f64 = 10_000.0;
/// That of all of them.
const EPSILON: f32 = 1e-6;

/// What files say in ways of their own.
struct Tower {
    kind: Kind,
    hidden: usize,
    inner: usize,
    /// Patches of the side of a square.
    merged: usize,
    frames: Frames,
    places: LearnedPlaces,
    taps: Vec<Tap>,
    /// Of so many layers the last sees all of the image.
    full_every: Option<usize>,
    width: usize,
    /// Fewest and most pixels of an image.
    bounds: [Option<usize>; 2],
    resampling: Resampling,
    mean: [f32; 3],
    deviation: [f32; 3],
}

fn of_gguf(
    kind: Kind,
    metadata: &gguf::Metadata,
    rows_of: RowsOf<'_>,
) -> Result<ModelSpec, ConfigError> {
    let facts = Facts::gguf(metadata, KEYS, 1, rows_of);
    let pixels: usize = facts.required(Key::gguf("vision.patch_size"))?;
    let image: usize = facts.get(Key::gguf("vision.image_size"))?.unwrap_or(0);
    let tapped: Option<Flags> = metadata.get("clip.vision.is_deepstack_layers")?;
    let tapped = tapped.map_or_else(Vec::new, |Flags(tapped)| tapped);
    let tapped = tapped.into_iter().enumerate();
    let [mean, deviation] = pixels_of_gguf(metadata)?;
    let full_every = match kind {
        Kind::TwoAndAHalf => Some(facts.required(Key::gguf("vision.n_wa_pattern"))?),
        Kind::Two | Kind::Three => None,
    };
    let tower = Tower {
        kind,
        hidden: facts.required(Key::gguf("vision.embedding_length"))?,
        // Converters write another width for Qwen 2 VL.
        inner: match rows_of("v.blk.0.ffn_up.weight") {
            Some(inner) => inner,
            None => facts.required(Key::gguf("vision.feed_forward_length"))?,
        },
        merged: facts
            .get(Key::gguf("vision.spatial_merge_size"))?
            .unwrap_or(USUAL_MERGED),
        frames: Frames::TwoApart,
        places: places(kind, usize::checked_div(image, pixels).unwrap_or(0)),
        taps: tapped
            .filter(|(_, tapped)| *tapped)
            .map(|(layer, _)| Tap {
                layer,
                number: layer,
            })
            .collect(),
        full_every,
        width: facts.required(Key::gguf("vision.projection_dim"))?,
        bounds: [
            facts.get(Key::gguf("vision.image_min_pixels"))?,
            facts.get(Key::gguf("vision.image_max_pixels"))?,
        ],
        resampling: Resampling::Bicubic,
        mean,
        deviation,
    };
    tower.spec(&facts)
}

fn of_folder(kind: Kind, folder: &Folder) -> Result<Option<ModelSpec>, ConfigError> {
    let Some(vision) = vision_config(folder, &[])? else {
        return Ok(None);
    };
    let facts = Facts::huggingface(&vision, QWEN.name);
    let text = Facts::huggingface(folder.config(), QWEN.name);
    let preprocessing = preprocessing(folder)?;
    let (hidden, inner) = match kind {
        Kind::Two => {
            let hidden: usize = facts.required(Key::huggingface("embed_dim"))?;
            let ratio: usize = facts.required(Key::huggingface("mlp_ratio"))?;
            (hidden, hidden.saturating_mul(ratio))
        }
        Kind::TwoAndAHalf | Kind::Three => (
            facts.required(Key::huggingface("hidden_size"))?,
            facts.required(Key::huggingface("intermediate_size"))?,
        ),
    };
    let activation = match kind {
        Kind::Two => "quick_gelu",
        Kind::TwoAndAHalf => "silu",
        Kind::Three => "gelu_pytorch_tanh",
    };
    facts.expect(
        Key::huggingface("hidden_act"),
        activation.to_owned(),
        "the family's own is",
    )?;
    facts.expect(
        Key::huggingface("temporal_patch_size"),
        2,
        "patches of two frames are",
    )?;
    facts.expect(
        Key::huggingface("in_channels|in_chans"),
        3,
        "three channels are",
    )?;
    let count: usize = facts
        .get(Key::huggingface("num_position_embeddings"))?
        .unwrap_or(0);
    let layers = facts.required(LAYERS)?;
    let [mean, deviation] = pixels_of(&preprocessing, [USUAL_PIXELS; 2]);
    let tower = Tower {
        kind,
        hidden,
        inner,
        merged: facts
            .get(Key::huggingface("spatial_merge_size"))?
            .unwrap_or(USUAL_MERGED),
        frames: Frames::TwoTogether,
        places: places(kind, count.isqrt()),
        taps: taps(&facts)?,
        full_every: match kind {
            Kind::TwoAndAHalf => Some(full_every(&facts, layers)?),
            Kind::Two | Kind::Three => None,
        },
        width: match facts.get(Key::huggingface("out_hidden_size"))? {
            Some(width) => width,
            None => text.required(Key::huggingface("hidden_size"))?,
        },
        bounds: bounds(&preprocessing),
        resampling: resampling(&preprocessing, Resampling::Bicubic)?,
        mean,
        deviation,
    };
    tower.spec(&facts).map(Some)
}

/// A list of yes and no.
struct Flags(Vec<bool>);

impl<'a> FromValue<'a> for Flags {
    const EXPECTED: &'static str = "true or false for each layer";

    fn from_value(value: gguf::Value<'a>) -> Option<Self> {
        let gguf::Value::Array(array) = value else {
            return None;
        };
        let flags = array.scalars()?.map(bool::from_value);
        flags.collect::<Option<_>>().map(Self)
    }
}

const LAYERS: Key = Key::new("vision.block_count", "depth|num_hidden_layers");

fn places(kind: Kind, per_side: usize) -> LearnedPlaces {
    match kind {
        Kind::Three => LearnedPlaces::Between { per_side },
        Kind::Two | Kind::TwoAndAHalf => LearnedPlaces::None,
    }
}

/// The layers whose rows become parts of an image's, which a folder numbers by their order.
fn taps(facts: &Facts<'_>) -> Result<Vec<Tap>, ConfigError> {
    let layers: Option<Vec<usize>> = facts.get(Key::huggingface("deepstack_visual_indexes"))?;
    let taps = layers.unwrap_or_default().into_iter().enumerate();
    let mut taps: Vec<Tap> = taps.map(|(number, layer)| Tap { layer, number }).collect();
    taps.sort_by_key(|tap| tap.layer);
    Ok(taps)
}

/// Of how many layers the last sees all of an image, where the file lists those that do.
fn full_every(facts: &Facts<'_>, layers: usize) -> Result<usize, ConfigError> {
    let full: Vec<usize> = facts.required(Key::huggingface("fullatt_block_indexes"))?;
    let Some(first) = full.first() else {
        // None of them is so far behind.
        return Ok(layers.saturating_add(1));
    };
    let every = first.saturating_add(1);
    let regular = (0..layers).filter(|layer| (layer + 1).is_multiple_of(every));
    if !regular.eq(full.iter().copied()) {
        return Err(ConfigError::Unsupported {
            feature: format!("{layers} layers of which {full:?} see all of an image"),
            supported: "every so many layers one is",
        });
    }
    Ok(every)
}

/// Fewest and most pixels of an image, which folders say in several ways.
fn bounds(preprocessing: &Map<String, Value>) -> [Option<usize>; 2] {
    let size = preprocessing.get("size").and_then(Value::as_object);
    [
        ("min_pixels", "shortest_edge"),
        ("max_pixels", "longest_edge"),
    ]
    .map(|(name, other)| {
        let within = |name: &str| size.and_then(|size| size.get(name)?.as_u64());
        let own = preprocessing.get(name).and_then(Value::as_u64);
        let found = own.or_else(|| within(name)).or_else(|| within(other));
        found.and_then(|pixels| usize::try_from(pixels).ok())
    })
}

impl Kind {
    fn layer(self, sizes: &Sizes) -> LayerSpec {
        let attention = Attention {
            biases: Biases::ALL,
            ..sizes.attention()
        };
        let plain = |activation| {
            FeedForward::Plain(Plain {
                inner: sizes.inner,
                activation,
                biases: true,
            })
        };
        let block = match self {
            Self::Two => plain(Activation::QuickGelu),
            Self::TwoAndAHalf => FeedForward::Gated(Gated::usual(sizes.inner, Activation::Silu)),
            Self::Three => plain(Activation::GeluTanh),
        };
        LayerSpec::usual(attention, block)
    }
}

impl Tower {
    fn spec(self, facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
        let pixels: usize = facts.required(PATCH_SIZE)?;
        let heads = facts.required(Key::new("vision.attention.head_count", "num_heads"))?;
        let layers = facts.required(LAYERS)?;
        let sizes = Sizes::new([self.hidden, self.inner], heads, layers)?;
        let epsilon: Option<f32> = facts.get(Key::gguf("vision.attention.layer_norm_epsilon"))?;
        let windows = match self.full_every {
            None => None,
            Some(full_every) => Some(self.windows(facts, pixels, full_every)?),
        };
        let patches = self.patches(pixels, windows)?;
        let mut deepstack = [None; ImageRows::MOST_DEEPSTACK];
        if self.taps.len() > deepstack.len() {
            return Err(ConfigError::OutOfRange {
                field: "layers that become parts of images' rows",
                value: self.taps.len(),
                limit: deepstack.len(),
            });
        }
        let slots = deepstack.iter_mut().zip(&self.taps);
        slots.for_each(|(slot, tap)| *slot = Some(*tap));
        let rope = Rope {
            style: RopeStyle::HalfSplit,
            dimensions: sizes.head_dim,
            theta: facts.of_rope("rope_theta")?.unwrap_or(USUAL_THETA),
            scaling: RopeScaling::None,
            file_factors: false,
            axes: RopeAxes::Patch,
        };
        let norm = Norm {
            kind: match self.kind {
                Kind::TwoAndAHalf => NormKind::Rms,
                Kind::Two | Kind::Three => NormKind::BiasedLayer,
            },
            epsilon: epsilon.unwrap_or(EPSILON),
        };
        let rows = ImageRows {
            merged: self.merged,
            merge: Merge::SideBySide,
            width: self.width,
            deepstack,
        };
        Ok(ModelSpec {
            context_tokens: patches.most(),
            patches: Some(patches),
            ropes: vec![rope],
            ..sizes.spec(QWEN.name, norm, self.kind.layer(&sizes), rows)
        })
    }

    fn windows(
        &self,
        facts: &Facts<'_>,
        pixels: usize,
        full_every: usize,
    ) -> Result<Windows, ConfigError> {
        let window = facts.get(Key::new("vision.window_size", "window_size"))?;
        let window: usize = window.unwrap_or(USUAL_WINDOW_PIXELS);
        let squares = usize::checked_div(window, self.merged);
        Ok(Windows {
            side: squares.and_then(|it| it.checked_div(pixels)).unwrap_or(0),
            full_every,
        })
    }

    fn patches(&self, pixels: usize, windows: Option<Windows>) -> Result<Patches, ConfigError> {
        let unit = pixels.saturating_mul(self.merged);
        let unit_pixels = unit.saturating_mul(unit);
        if unit_pixels == 0 || unit_pixels > MOST_UNIT_PIXELS {
            return Err(ConfigError::OutOfRange {
                field: "pixels of a square of patches",
                value: unit_pixels,
                limit: MOST_UNIT_PIXELS,
            });
        }
        let most = MOST_TOKENS * unit_pixels;
        let [least_pixels, most_pixels] = self.bounds;
        let most_pixels = most_pixels.unwrap_or(most).clamp(unit_pixels, most);
        let least_pixels = least_pixels.unwrap_or(LEAST_TOKENS * unit_pixels);
        Ok(Patches {
            pixels,
            size: ImageSize::Own {
                square: self.merged,
                least_pixels: least_pixels.clamp(1, most_pixels),
                most_pixels,
                longest_edge: None,
            },
            resampling: self.resampling,
            frames: self.frames,
            channels: Channels::Apart,
            order: PatchOrder::Squares {
                side: self.merged,
                windows,
            },
            places: self.places,
            normed: false,
            mean: self.mean,
            deviation: self.deviation,
        })
    }
}

/// Pixels of a square of patches, which keeps products of sizes small.
const MOST_UNIT_PIXELS: usize = 1 << 20;
