//! Encoders of images: a Hugging Face folder has one beside the model of language, GGUF in a file of its own (`mmproj`),
//! along with what makes rows of the decoder's width. One file for each kind.

use serde_json::{Map, Value};

use super::decoder::LAYERS_READ;
use super::facts::Key;
use super::{
    Description, Facts, Family, Spelling, gemma4_vision, idefics3, pixtral, qwen_vision, siglip,
};
use crate::error::ConfigError;
use crate::spec::{
    Attention, FeedForward, ImageRows, LayerSpec, Mask, ModelSpec, Norm, OutputSpec, Resampling,
};
use crate::weights;
use lacuna_files::gguf;
use lacuna_files::huggingface::{Config, Folder};
use lacuna_files::{Metadata, ModelFiles};

/// Rows of the tensor of a name, of all tables where it has several, if there is one.
pub(super) type RowsOf<'a> = &'a dyn Fn(&str) -> Option<usize>;

/// A kind of encoder.
pub(super) struct Encoder {
    /// What it is called in reports, and how its tensors are.
    pub(super) family: &'static Family,
    /// The same where GGUF files have the feed-forward matrices under each other's names, as converters of before
    /// May 2025 wrote them.
    pub(super) older: Option<&'static Family>,
    /// Types of projectors that GGUF files have with it.
    pub(super) projectors: &'static [&'static str],
    /// Classes of models that have it.
    pub(super) classes: &'static [&'static str],
    /// Reads the metadata of a file with such a projector.
    pub(super) gguf: fn(&gguf::Metadata, RowsOf<'_>) -> Result<ModelSpec, ConfigError>,
    /// Reads what a folder says of it, if it does.
    pub(super) folder: fn(&Folder) -> Result<Option<ModelSpec>, ConfigError>,
}

/// All kinds.
static ENCODERS: [&Encoder; 7] = [
    &siglip::ENCODER,
    &gemma4_vision::ENCODER,
    &idefics3::ENCODER,
    &pixtral::ENCODER,
    &qwen_vision::QWEN_3,
    &qwen_vision::QWEN_2_5,
    &qwen_vision::QWEN_2,
];

/// What the keys of encoders begin with in GGUF files.
pub(super) const KEYS: &str = "clip";

/// The encoder of images in a model's files, or in the file beside them that has only that; `None` where there is
/// none.
///
/// # Errors
/// [`ConfigError`] for an encoder of another kind, and numbers that are missing or out of range.
pub(crate) fn describe(files: &ModelFiles) -> Result<Option<Description>, ConfigError> {
    match files.metadata() {
        Metadata::Gguf(metadata) => describe_gguf(metadata, &|name| {
            let tensor = files.tensors().get(name).ok().flatten()?;
            match *tensor.shape() {
                [tables, each, _] => tables.checked_mul(each),
                ref shape => shape.first().copied(),
            }
        }),
        Metadata::HuggingFace(folder) if has_one(files) => described(of_folder(folder)?),
        // Some folders say that there is one, and have it not.
        Metadata::HuggingFace(_) => Ok(None),
    }
}

/// That of a GGUF file with this metadata; `None` for a file of a model of language.
///
/// # Errors
/// As [`describe`].
pub(crate) fn describe_gguf(
    metadata: &gguf::Metadata,
    rows_of: RowsOf<'_>,
) -> Result<Option<Description>, ConfigError> {
    described(of_gguf(metadata, rows_of)?)
}

fn described(found: Found) -> Result<Option<Description>, ConfigError> {
    let Some((family, spelling, spec)) = found else {
        return Ok(None);
    };
    spec.validate()?;
    Ok(Some(Description {
        head: None,
        spec,
        family,
        spelling,
    }))
}

/// Whether there are tensors of one.
fn has_one(files: &ModelFiles) -> bool {
    let mut tensors = files.tensors().iter();
    tensors.any(|tensor| weights::is_of_images(tensor.name))
}

type Found = Option<(&'static Family, Spelling, ModelSpec)>;

fn of_gguf(metadata: &gguf::Metadata, rows_of: RowsOf<'_>) -> Result<Found, ConfigError> {
    if metadata.get::<&str>("general.architecture")? != Some(KEYS) {
        return Ok(None);
    }
    let kind = match metadata.get::<&str>("clip.projector_type")? {
        Some(kind) => Some(kind),
        None => metadata.get::<&str>("clip.vision.projector_type")?,
    };
    let kind = kind.unwrap_or("(none)");
    let Some(encoder) = ENCODERS.iter().find(|it| it.projectors.contains(&kind)) else {
        return Err(ConfigError::Unsupported {
            feature: format!("a projector of the type {kind}"),
            supported: "gemma3, gemma4v, idefics3, pixtral, qwen2vl_merger, qwen2.5vl_merger and qwen3vl_merger are",
        });
    };
    let spec = (encoder.gguf)(metadata, rows_of)?;
    let older = encoder.older.filter(|_| is_swapped(rows_of, &spec));
    let family = older.unwrap_or(encoder.family);
    Ok(Some((family, Spelling::Gguf, spec)))
}

/// Whether the matrix that is called the last of a feed-forward block is as long as its first.
fn is_swapped(rows_of: RowsOf<'_>, spec: &ModelSpec) -> bool {
    let first = spec.layers.first().map(|layer| layer.feed_forward);
    match first {
        Some(FeedForward::Plain(block)) => {
            let rows = rows_of("v.blk.0.ffn_down.weight");
            rows == Some(block.inner) && block.inner != spec.hidden
        }
        _ => false,
    }
}

fn of_folder(folder: &Folder) -> Result<Found, ConfigError> {
    let class = folder.config().class();
    let Some(encoder) = ENCODERS.iter().find(|it| it.classes.contains(&class)) else {
        return Ok(None);
    };
    let spec = (encoder.folder)(folder)?;
    Ok(spec.map(|spec| (encoder.family, Spelling::HuggingFace, spec)))
}

/// What a folder says of its model's encoder, if it says something. Numbers that it leaves out are the `usual`.
pub(super) fn vision_config(
    folder: &Folder,
    usual: &[(&str, usize)],
) -> Result<Option<Config>, ConfigError> {
    let vision = folder.config().map().get("vision_config");
    let Some(vision) = vision.and_then(Value::as_object) else {
        return Ok(None);
    };
    let mut vision = vision.clone();
    // Older folders do not say what is clear from the model's class.
    vision
        .entry("model_type")
        .or_insert_with(|| "vision".into());
    for (name, usual) in usual {
        vision.entry(*name).or_insert_with(|| (*usual).into());
    }
    let vision = serde_json::to_vec(&vision).unwrap_or_default();
    Ok(Some(Config::parse(&vision)?))
}

/// Refuses encoders of other types than these, which `supported` says in words.
pub(super) fn expect_type(
    vision: &Config,
    types: &[&str],
    supported: &'static str,
) -> Result<(), ConfigError> {
    let found = vision.map().get("model_type").and_then(Value::as_str);
    match found {
        Some(found) if types.contains(&found) => Ok(()),
        _ => Err(ConfigError::Unsupported {
            feature: format!("a vision model of the type {}", found.unwrap_or("(none)")),
            supported,
        }),
    }
}

/// What the metadata of an encoder's file is to a reader of models: files of encoders are read by their projector's type.
pub(super) fn not_alone(_: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    Err(ConfigError::Unsupported {
        feature: "an encoder of images as a model".to_owned(),
        supported: "beside a model of language it is",
    })
}

/// What GGUF files call parts of encoders otherwise than those of decoders.
pub(super) const GGUF: &[(&str, &str)] = &[
    ("attn_norm", "ln1"),
    ("attn_output", "attn_out"),
    ("ffn_norm", "ln2"),
    ("output_norm", "post_ln"),
];

/// Pixels of an image's side.
pub(super) const IMAGE_SIZE: Key = Key::new("vision.image_size", "image_size");
/// Pixels of a patch's side.
pub(super) const PATCH_SIZE: Key = Key::new("vision.patch_size", "patch_size");

/// How large the layers of an encoder are, and how many it has.
pub(super) struct Sizes {
    /// Width of a patch's row.
    hidden: usize,
    /// Inner width of feed-forward blocks.
    pub(super) inner: usize,
    heads: usize,
    pub(super) head_dim: usize,
    layers: usize,
}

impl Sizes {
    /// Of a width of rows and of feed-forward blocks, heads, and layers.
    ///
    /// # Errors
    /// [`ConfigError::OutOfRange`] for a width that is not divided by the heads.
    pub(super) fn new(
        [hidden, inner]: [usize; 2],
        heads: usize,
        layers: usize,
    ) -> Result<Self, ConfigError> {
        match usize::checked_rem(hidden, heads) {
            Some(0) => Ok(Self {
                hidden,
                inner,
                heads,
                head_dim: hidden / heads,
                layers,
            }),
            _ => Err(ConfigError::OutOfRange {
                field: "heads of the vision model",
                value: heads,
                limit: hidden,
            }),
        }
    }

    /// By the keys that most files have.
    pub(super) fn read(facts: &Facts<'_>) -> Result<Self, ConfigError> {
        let heads = Key::new("vision.attention.head_count", "num_attention_heads");
        let inner = Key::new("vision.feed_forward_length", "intermediate_size");
        Self::new(
            [
                facts.required(Key::new("vision.embedding_length", "hidden_size"))?,
                facts.required(inner)?,
            ],
            facts.required(heads)?,
            facts.required(Key::new("vision.block_count", "num_hidden_layers"))?,
        )
    }

    /// Patches see all of the image, by their places.
    pub(super) fn attention(&self) -> Attention {
        Attention {
            mask: Mask::Full,
            ..Attention::usual(self.heads, self.head_dim)
        }
    }

    /// An encoder all of whose layers are like `layer`. What it makes of images before them is to be said still.
    pub(super) fn spec(
        &self,
        family: &'static str,
        norm: Norm,
        layer: LayerSpec,
        rows: ImageRows,
    ) -> ModelSpec {
        ModelSpec {
            hidden: self.hidden,
            // It has none; nothing is as large as this.
            vocabulary: 1,
            context_tokens: 1,
            norm,
            layers: vec![layer; self.layers.min(LAYERS_READ)],
            ..ModelSpec::usual(family, OutputSpec::Image(rows))
        }
    }
}

/// What a folder says of how images are made ready.
pub(super) fn preprocessing(folder: &Folder) -> Result<Map<String, Value>, ConfigError> {
    if let Some(own) = folder.json("preprocessor_config.json")? {
        return Ok(own);
    }
    // Newer ones say it along with what is made of texts.
    let all: Option<Map<String, Value>> = folder.json("processor_config.json")?;
    let image = all.and_then(|mut all| all.remove("image_processor"));
    Ok(match image {
        Some(Value::Object(image)) => image,
        _ => Map::new(),
    })
}

/// Mean and deviation of pixels where a file does not say them, as `transformers` and llama.cpp have them.
pub(super) const USUAL_PIXELS: [f32; 3] = [0.5; 3];

/// Mean and deviation of pixels, of which a folder that does not say them has the `usual`.
pub(super) fn pixels_of(preprocessing: &Map<String, Value>, usual: [[f32; 3]; 2]) -> [[f32; 3]; 2] {
    let said = ["image_mean", "image_std"].map(|key| {
        let values = preprocessing.get(key).and_then(Value::as_array);
        let numbers = values.map(|values| {
            let numbers = values.iter().filter_map(Value::as_f64);
            numbers.map(|number| number as f32).collect::<Vec<_>>()
        });
        numbers.and_then(|numbers| numbers.try_into().ok())
    });
    let [mean, deviation] = said;
    [mean.unwrap_or(usual[0]), deviation.unwrap_or(usual[1])]
}

/// What images' sizes are changed with, of Pillow's numbers.
pub(super) fn resampling(
    preprocessing: &Map<String, Value>,
    usual: Resampling,
) -> Result<Resampling, ConfigError> {
    let Some(said) = preprocessing.get("resample").filter(|it| !it.is_null()) else {
        return Ok(usual);
    };
    let number = said
        .as_u64()
        .and_then(|number| usize::try_from(number).ok());
    let found = number.and_then(Resampling::of_pillow);
    found.ok_or_else(|| ConfigError::Unsupported {
        feature: format!("resampling by Pillow's filter {said}"),
        supported: "1 (Lanczos), 2 (bilinear) and 3 (bicubic) are",
    })
}

/// The same of a GGUF file.
pub(super) fn pixels_of_gguf(metadata: &gguf::Metadata) -> Result<[[f32; 3]; 2], ConfigError> {
    let three = |key: &str| -> Result<[f32; 3], ConfigError> {
        let found = metadata.get::<Vec<f32>>(key)?;
        Ok(found
            .and_then(|it| it.try_into().ok())
            .unwrap_or(USUAL_PIXELS))
    };
    Ok([
        three("clip.vision.image_mean")?,
        three("clip.vision.image_std")?,
    ])
}
