//! What a model file says, whichever of the two ways it says it.

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt::Display;
use std::path::Path;
use std::rc::Rc;

use lacuna_kernels::RopeStyle;
use serde_json::{Map, Value};

use crate::error::ConfigError;
use crate::spec::{LongRope, LongRopeFactors, Rope, RopeAxes, RopeScaling, Yarn};
use lacuna_files::gguf::{FromValue, Metadata};
use lacuna_files::huggingface::{Config, Error as HuggingFaceError};

/// A fact by its names in both kinds of files: in GGUF without the family's name in front, in
/// `config.json` with other spellings after a `|`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Key {
    gguf: Option<&'static str>,
    huggingface: Option<&'static str>,
}

impl Key {
    pub(crate) const fn new(gguf: &'static str, huggingface: &'static str) -> Self {
        Self {
            gguf: Some(gguf),
            huggingface: Some(huggingface),
        }
    }

    /// A fact that `config.json` does not have.
    pub(crate) const fn gguf(name: &'static str) -> Self {
        Self {
            gguf: Some(name),
            huggingface: None,
        }
    }

    /// A fact that GGUF does not have.
    pub(crate) const fn huggingface(name: &'static str) -> Self {
        Self {
            gguf: None,
            huggingface: Some(name),
        }
    }
}

/// A model file's description of its model.
pub(crate) struct Facts<'a> {
    family: &'static str,
    source: Source<'a>,
    /// What a `config.json` was found to say that GGUF has a name for.
    found: Rc<RefCell<Found>>,
}

/// Facts by GGUF's names, without the family's in front.
pub(crate) type Found = BTreeMap<&'static str, Given>;

/// A value as GGUF metadata has it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Given {
    Size(u32),
    Sizes(Vec<u32>),
    Number(f32),
    Flag(bool),
    Text(String),
}

enum Source<'a> {
    Gguf {
        metadata: &'a Metadata,
        vocabulary: usize,
        rows_of: &'a dyn Fn(&str) -> Option<usize>,
    },
    HuggingFace(Cow<'a, Config>),
}

/// What a fact can be read as.
pub(crate) trait Fact: Sized {
    fn from_gguf(metadata: &Metadata, key: &str) -> Result<Option<Self>, ConfigError>;

    /// `None` for a value of another kind.
    fn from_json(value: &Value) -> Option<Self>;

    /// As GGUF has it; `None` for facts that GGUF says otherwise.
    fn given(&self) -> Option<Given> {
        None
    }

    const EXPECTED: &'static str;
}

macro_rules! facts {
    ($($target:ty, $read:ty, $expected:literal, $json:expr, $given:expr;)*) => {$(
        impl Fact for $target {
            fn from_gguf(metadata: &Metadata, key: &str) -> Result<Option<Self>, ConfigError> {
                Ok(metadata.get::<$read>(key)?.map(Into::into))
            }

            fn from_json(value: &Value) -> Option<Self> {
                let read: fn(&Value) -> Option<Self> = $json;
                read(value)
            }

            fn given(&self) -> Option<Given> {
                let given: fn(&Self) -> Option<Given> = $given;
                given(self)
            }

            const EXPECTED: &'static str = $expected;
        }
    )*};
}

/// The largest size of anything; more would overflow what is computed from it.
const LARGEST: u64 = i32::MAX as u64;

facts! {
    usize, usize, "a number from 0 to 2147483647", |value| {
        // Some files write whole numbers as 4096.0.
        let whole = |number: f64| (number.fract() == 0.0 && number >= 0.0).then_some(number as u64);
        let number = value.as_u64().or_else(|| value.as_f64().and_then(whole))?;
        (number <= LARGEST).then_some(number as usize)
    }, |size| Some(Given::Size(*size as u32));
    f32, f32, "a number", |value| value.as_f64().map(|number| number as f32),
        |number| Some(Given::Number(*number));
    f64, f32, "a number", Value::as_f64, |number| Some(Given::Number(*number as f32));
    bool, bool, "true or false", Value::as_bool, |flag| Some(Given::Flag(*flag));
    String, &str, "text", |value| value.as_str().map(str::to_owned), |text| Some(Given::Text(text.clone()));
    Vec<String>, Strings, "a list of texts", |value| {
        let texts = value.as_array()?.iter();
        texts.map(|text| text.as_str().map(str::to_owned)).collect()
    }, |_| None;
}

/// A few numbers, infinite ones among them, which only `config.json` has.
impl<const N: usize> Fact for [f64; N] {
    fn from_gguf(_: &Metadata, _: &str) -> Result<Option<Self>, ConfigError> {
        Ok(None)
    }

    fn from_json(value: &Value) -> Option<Self> {
        let numbers = value.as_array()?.iter();
        let numbers: Option<Vec<f64>> = numbers.map(number).collect();
        numbers?.try_into().ok()
    }

    const EXPECTED: &'static str = "a list of as many numbers as models of this family have";
}

/// A number, which JSON has no way to write if it is infinite: `transformers` names those.
fn number(value: &Value) -> Option<f64> {
    match value.get("__float__") {
        None => value.as_f64(),
        Some(name) => match name.as_str()? {
            "Infinity" => Some(f64::INFINITY),
            "-Infinity" => Some(f64::NEG_INFINITY),
            _ => None,
        },
    }
}

/// A list of numbers, which only `config.json` has.
impl Fact for Vec<usize> {
    fn from_gguf(_: &Metadata, _: &str) -> Result<Option<Self>, ConfigError> {
        Ok(None)
    }

    fn from_json(value: &Value) -> Option<Self> {
        let numbers = value.as_array()?.iter();
        numbers.map(usize::from_json).collect()
    }

    const EXPECTED: &'static str = "a list of numbers";
}

/// Texts of GGUF metadata.
struct Strings(Vec<String>);

impl<'a> FromValue<'a> for Strings {
    const EXPECTED: &'static str = <Vec<&str>>::EXPECTED;

    fn from_value(value: lacuna_files::gguf::Value<'a>) -> Option<Self> {
        let texts = <Vec<&str>>::from_value(value)?;
        Some(Self(texts.into_iter().map(str::to_owned).collect()))
    }
}

impl From<Strings> for Vec<String> {
    fn from(Strings(texts): Strings) -> Self {
        texts
    }
}

/// One value for all layers, or one for each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PerLayer<T> {
    All(T),
    Each(Vec<T>),
}

impl<T: Copy> PerLayer<T> {
    /// The value of each of `layers` layers.
    pub(crate) fn of(self, layers: usize, field: &'static str) -> Result<Vec<T>, ConfigError> {
        match self {
            Self::All(value) => Ok(vec![value; layers]),
            Self::Each(values) if values.len() == layers => Ok(values),
            Self::Each(values) => Err(ConfigError::LayerList {
                field,
                found: values.len(),
                layers,
            }),
        }
    }
}

impl<'a, T: FromValue<'a>> FromValue<'a> for PerLayer<T>
where
    Vec<T>: FromValue<'a>,
{
    const EXPECTED: &'static str = T::EXPECTED;

    fn from_value(value: lacuna_files::gguf::Value<'a>) -> Option<Self> {
        match value {
            lacuna_files::gguf::Value::Array(_) => Vec::from_value(value).map(Self::Each),
            one => T::from_value(one).map(Self::All),
        }
    }
}

impl<T> Fact for PerLayer<T>
where
    T: Fact + for<'a> FromValue<'a>,
    for<'a> Vec<T>: FromValue<'a>,
{
    fn from_gguf(metadata: &Metadata, key: &str) -> Result<Option<Self>, ConfigError> {
        Ok(metadata.get(key)?)
    }

    fn from_json(value: &Value) -> Option<Self> {
        match value.as_array() {
            None => T::from_json(value).map(Self::All),
            Some(values) => {
                let values = values.iter().map(T::from_json);
                values.collect::<Option<_>>().map(Self::Each)
            }
        }
    }

    fn given(&self) -> Option<Given> {
        match self {
            Self::All(value) => value.given(),
            Self::Each(values) => {
                let sizes = values.iter().map(|value| match value.given() {
                    Some(Given::Size(size)) => Some(size),
                    _ => None,
                });
                sizes.collect::<Option<_>>().map(Given::Sizes)
            }
        }
    }

    const EXPECTED: &'static str = "a number, or one for each layer";
}

/// Which layers have a window.
enum WindowPattern {
    /// All but the last of so many; all for 0.
    Period(usize),
    Each(Vec<bool>),
}

impl<'a> FromValue<'a> for WindowPattern {
    const EXPECTED: &'static str = "a number, or true or false for each layer";

    fn from_value(value: lacuna_files::gguf::Value<'a>) -> Option<Self> {
        match value {
            lacuna_files::gguf::Value::Array(array) => {
                let windowed = array.scalars()?.map(bool::from_value);
                windowed.collect::<Option<_>>().map(Self::Each)
            }
            one => usize::from_value(one).map(Self::Period),
        }
    }
}

impl Fact for WindowPattern {
    fn from_gguf(metadata: &Metadata, key: &str) -> Result<Option<Self>, ConfigError> {
        Ok(metadata.get(key)?)
    }

    fn from_json(value: &Value) -> Option<Self> {
        usize::from_json(value).map(Self::Period)
    }

    const EXPECTED: &'static str = "a number";
}

impl<'a> Facts<'a> {
    pub(crate) fn gguf(
        metadata: &'a Metadata,
        family: &'static str,
        vocabulary: usize,
        rows_of: &'a dyn Fn(&str) -> Option<usize>,
    ) -> Self {
        let source = Source::Gguf {
            metadata,
            vocabulary,
            rows_of,
        };
        Self {
            family,
            source,
            found: Rc::default(),
        }
    }

    pub(crate) fn huggingface(config: &'a Config, family: &'static str) -> Self {
        let source = Source::HuggingFace(Cow::Borrowed(config));
        Self {
            family,
            source,
            found: Rc::default(),
        }
    }

    /// The same where a `config.json` leaves out what `transformers` knows of its class, which published folders do.
    /// GGUF files say all of it.
    pub(crate) fn with_defaults(&self, defaults: &[(&'static str, f64)]) -> Facts<'_> {
        let source = match &self.source {
            Source::Gguf {
                metadata,
                vocabulary,
                rows_of,
            } => Source::Gguf {
                metadata,
                vocabulary: *vocabulary,
                rows_of,
            },
            Source::HuggingFace(config) => {
                let defaults: Vec<(&str, Value)> = defaults
                    .iter()
                    .map(|(name, number)| (*name, Value::from(*number)))
                    .collect();
                Source::HuggingFace(Cow::Owned(config.with_defaults(&defaults)))
            }
        };
        Facts {
            family: self.family,
            source,
            found: Rc::clone(&self.found),
        }
    }

    /// What was asked for and found in a `config.json`, and has a name in GGUF.
    pub(crate) fn into_found(self) -> Found {
        self.found.take()
    }

    /// The family's name.
    pub(crate) fn family(&self) -> &'static str {
        self.family
    }

    /// Rows of the embedding table.
    pub(crate) fn vocabulary(&self) -> Result<usize, ConfigError> {
        match self.source {
            Source::Gguf { vocabulary, .. } => Ok(vocabulary),
            Source::HuggingFace(_) => self.required(Key::huggingface("vocab_size")),
        }
    }

    /// Whether it is a GGUF file's.
    pub(crate) fn is_gguf(&self) -> bool {
        matches!(self.source, Source::Gguf { .. })
    }

    /// The class in `transformers` that a `config.json` names.
    pub(crate) fn class(&self) -> Option<&str> {
        match &self.source {
            Source::Gguf { .. } => None,
            Source::HuggingFace(config) => Some(config.class()),
        }
    }

    /// Whether a GGUF file has a tensor of this name; `None` for other files.
    pub(crate) fn has_tensor(&self, name: &str) -> Option<bool> {
        match self.source {
            Source::Gguf { rows_of, .. } => Some(rows_of(name).is_some()),
            Source::HuggingFace(_) => None,
        }
    }

    /// Rows of a tensor of a GGUF file.
    pub(crate) fn rows_of(&self, name: &str) -> Option<usize> {
        match self.source {
            Source::Gguf { rows_of, .. } => rows_of(name),
            Source::HuggingFace(_) => None,
        }
    }

    /// `in_gguf` for GGUF files; Hugging Face files split halves.
    pub(crate) fn style(&self, in_gguf: RopeStyle) -> RopeStyle {
        match self.source {
            Source::Gguf { .. } => in_gguf,
            Source::HuggingFace(_) => RopeStyle::HalfSplit,
        }
    }

    /// What the file says, if it does.
    pub(crate) fn get<T: Fact>(&self, key: Key) -> Result<Option<T>, ConfigError> {
        match (&self.source, key.gguf, key.huggingface) {
            (Source::Gguf { metadata, .. }, Some(name), _) => {
                T::from_gguf(metadata, &format!("{}.{name}", self.family))
            }
            (Source::HuggingFace(config), gguf, Some(names)) => {
                let fact: Option<T> = json(config.path(), config.map(), names)?;
                let given = fact.as_ref().and_then(Fact::given);
                if let (Some(name), Some(given)) = (gguf, given) {
                    self.found.borrow_mut().insert(name, given);
                }
                Ok(fact)
            }
            _ => Ok(None),
        }
    }

    /// What the file says of each of `layers` layers, if it does.
    pub(crate) fn per_layer(
        &self,
        key: Key,
        layers: usize,
    ) -> Result<Option<Vec<usize>>, ConfigError> {
        let field = key.gguf.or(key.huggingface).unwrap_or_default();
        let found: Option<PerLayer<usize>> = self.get(key)?;
        found.map(|values| values.of(layers, field)).transpose()
    }

    /// For each of `layers` layers, whether it has a window, where the file says so or else every
    /// layer but the last of `period`.
    pub(crate) fn windowed(&self, layers: usize, period: usize) -> Result<Vec<bool>, ConfigError> {
        let is_full = |layer: usize, period: usize| layer % period == period - 1;
        self.windowed_but(layers, period, is_full)
    }

    /// The same of families where it is every layer but the first of `period`.
    pub(crate) fn windowed_after_first(
        &self,
        layers: usize,
        period: usize,
    ) -> Result<Vec<bool>, ConfigError> {
        self.windowed_but(layers, period, |layer, period| layer % period == 0)
    }

    fn windowed_but(
        &self,
        layers: usize,
        period: usize,
        is_full: impl Fn(usize, usize) -> bool,
    ) -> Result<Vec<bool>, ConfigError> {
        if let Some(windowed) = self.layer_types()? {
            return Ok(windowed);
        }
        let every = |period: usize| {
            let layers = 0..layers;
            layers
                .map(|layer| period == 0 || !is_full(layer, period))
                .collect()
        };
        let name = "attention.sliding_window_pattern";
        let key = Key::new(
            name,
            "sliding_window_pattern|_sliding_window_pattern|global_attn_every_n_layers",
        );
        match self.get::<WindowPattern>(key)? {
            None => Ok(every(period)),
            Some(WindowPattern::Period(period)) => Ok(every(period)),
            Some(WindowPattern::Each(windowed)) if windowed.len() == layers => Ok(windowed),
            Some(WindowPattern::Each(windowed)) => Err(ConfigError::LayerList {
                field: name,
                found: windowed.len(),
                layers,
            }),
        }
    }

    /// What `layer_types` says of each layer, where a `config.json` has it.
    pub(crate) fn layer_kinds(&self) -> Result<Option<Vec<String>>, ConfigError> {
        let key = Key::huggingface("layer_types|layers_block_type");
        let Some(types) = self.get::<Vec<String>>(key)? else {
            return Ok(None);
        };
        let layers: Option<usize> = self.get(Key::huggingface("num_hidden_layers"))?;
        match layers.filter(|layers| *layers != types.len()) {
            None => Ok(Some(types)),
            Some(layers) => Err(ConfigError::LayerList {
                field: "layer_types",
                found: types.len(),
                layers,
            }),
        }
    }

    /// How many layers there are, which a `config.json` that lists their kinds may leave at that.
    pub(crate) fn layers(&self) -> Result<usize, ConfigError> {
        let key = Key::new("block_count", "num_hidden_layers|n_layer|num_layers");
        let said: Option<usize> = self.get(key)?;
        let listed = match said {
            Some(_) => None,
            None => self.layer_kinds()?.map(|kinds| kinds.len()),
        };
        said.or(listed).map_or_else(|| self.required(key), Ok)
    }

    /// What `layer_types` says of windows, where a `config.json` has it.
    pub(crate) fn layer_types(&self) -> Result<Option<Vec<bool>>, ConfigError> {
        let Some(types) = self.layer_kinds()? else {
            return Ok(None);
        };
        let windowed = types.iter().map(|kind| match kind.as_str() {
            "sliding_attention" => Ok(true),
            "full_attention" => Ok(false),
            other => Err(ConfigError::Unsupported {
                feature: format!("layer type `{other}`"),
                supported: "full_attention and sliding_attention are",
            }),
        });
        windowed.collect::<Result<_, _>>().map(Some)
    }

    /// For each of `layers` layers, whether it keeps a state, where the file says so: in a `config.json` those
    /// whose kind is one of `state`, in GGUF those of a list or without KV heads.
    pub(crate) fn recurrent(
        &self,
        layers: usize,
        state: &'static [&'static str],
    ) -> Result<Option<Vec<bool>>, ConfigError> {
        if let Some(kinds) = self.layer_kinds()? {
            let recurrent = kinds.iter().map(|kind| match kind.as_str() {
                "full_attention" | "attention" => Ok(false),
                other if state.contains(&other) => Ok(true),
                other => Err(ConfigError::Unsupported {
                    feature: format!("layer type `{other}`"),
                    supported: "attention and the family's own kind of state are",
                }),
            });
            return recurrent.collect::<Result<_, _>>().map(Some);
        }
        let field = "attention.recurrent_layers";
        match self.get::<WindowPattern>(Key::gguf(field))? {
            Some(WindowPattern::Each(recurrent)) if recurrent.len() == layers => {
                return Ok(Some(recurrent));
            }
            Some(WindowPattern::Each(recurrent)) => {
                let found = recurrent.len();
                return Err(ConfigError::LayerList {
                    field,
                    found,
                    layers,
                });
            }
            Some(WindowPattern::Period(_)) | None => {}
        }
        let heads = self.get::<PerLayer<usize>>(Key::gguf("attention.head_count_kv"))?;
        match heads {
            Some(heads @ PerLayer::Each(_)) => {
                let heads = heads.of(layers, "attention.head_count_kv")?;
                Ok(Some(heads.into_iter().map(|heads| heads == 0).collect()))
            }
            _ => Ok(None),
        }
    }

    /// What the file must say.
    pub(crate) fn required<T: Fact>(&self, key: Key) -> Result<T, ConfigError> {
        self.get(key)?.ok_or_else(|| match (&self.source, key) {
            (Source::HuggingFace(config), Key { huggingface, .. }) => wrong(
                config.path(),
                huggingface.unwrap_or_default(),
                "missing".to_owned(),
                T::EXPECTED,
            ),
            (Source::Gguf { .. }, Key { gguf, .. }) => {
                let name = gguf.unwrap_or_default();
                lacuna_files::gguf::Error::MissingKey {
                    key: format!("{}.{name}", self.family),
                }
                .into()
            }
        })
    }

    /// Refuses a file that says something else than `value`.
    pub(crate) fn expect<T: Fact + PartialEq + Display>(
        &self,
        key: Key,
        value: T,
        supported: &'static str,
    ) -> Result<(), ConfigError> {
        match self.get::<T>(key)? {
            Some(found) if found != value => Err(ConfigError::Unsupported {
                feature: format!(
                    "{} {found}",
                    key.gguf.or(key.huggingface).unwrap_or_default()
                ),
                supported,
            }),
            _ => Ok(()),
        }
    }

    /// The rotary embedding of layers without a window, and of those with one, which is not stretched.
    pub(crate) fn ropes(&self, full: usize, windowed: usize) -> Result<[Rope; 2], ConfigError> {
        let Source::HuggingFace(config) = &self.source else {
            let full = self.gguf_rope(full)?;
            let theta: Option<f64> = self.get(Key::gguf("rope.freq_base_swa"))?;
            let dimensions = self.get(Key::gguf("rope.dimension_count_swa"))?;
            let windowed = Rope {
                style: full.style,
                dimensions: dimensions.unwrap_or(windowed),
                theta: theta.unwrap_or(DEFAULT_THETA),
                scaling: RopeScaling::None,
                file_factors: false,
                axes: RopeAxes::One,
            };
            return Ok([full, windowed]);
        };
        let (field, map) = rope_map(config);
        let kinds = ["full_attention", "sliding_attention"];
        let kinds = kinds.map(|kind| map.get(kind).and_then(Value::as_object));
        let theta: Option<f64> =
            self.get(Key::huggingface("rope_local_base_freq|local_rope_theta"))?;
        if let [Some(one), Some(other)] = kinds {
            let full = self.json_rope(config, field, one, full)?;
            let mut windowed = self.json_rope(config, field, other, windowed)?;
            if let Some(theta) = theta.filter(|_| !other.contains_key("rope_theta")) {
                windowed.theta = theta;
            }
            return Ok([full, windowed]);
        }
        let full = self.json_rope(config, field, map, full)?;
        let windowed = Rope {
            dimensions: windowed,
            theta: theta.unwrap_or(full.theta),
            scaling: RopeScaling::None,
            ..full.clone()
        };
        Ok([full, windowed])
    }

    /// A parameter of rotation that `config.json` has among the others.
    pub(crate) fn of_rope<T: Fact>(&self, name: &'static str) -> Result<Option<T>, ConfigError> {
        match &self.source {
            Source::Gguf { .. } => Ok(None),
            Source::HuggingFace(config) => json(config.path(), rope_map(config).1, name),
        }
    }

    /// Pairs that turn by the time, the row and the column of a position, where it has all of them.
    pub(crate) fn rope_sections(&self) -> Result<Option<[usize; 3]>, ConfigError> {
        let sections: Option<Vec<usize>> = match &self.source {
            Source::Gguf { metadata, .. } => {
                metadata.get(&format!("{}.rope.dimension_sections", self.family))?
            }
            Source::HuggingFace(_) => self.of_rope("mrope_section")?,
        };
        // GGUF has a fourth, which is of no use.
        Ok(sections.and_then(|sections| sections.first_chunk().copied()))
    }

    /// A field of the part that sees, which `config.json` describes in a field of its own.
    pub(crate) fn of_vision<T: Fact>(&self, name: &'static str) -> Result<Option<T>, ConfigError> {
        self.of_field("vision_config", name)
    }

    /// What a field of `config.json` that has others in it says.
    pub(crate) fn of_field<T: Fact>(
        &self,
        field: &'static str,
        name: &'static str,
    ) -> Result<Option<T>, ConfigError> {
        let Source::HuggingFace(config) = &self.source else {
            return Ok(None);
        };
        let map = config.map().get(field).and_then(Value::as_object);
        map.map_or(Ok(None), |map| json(config.path(), map, name))
    }

    /// What `per_layer_config` of a `config.json` says of one layer.
    pub(crate) fn of_layer<T: Fact>(
        &self,
        layer: usize,
        name: &'static str,
    ) -> Result<Option<T>, ConfigError> {
        let Source::HuggingFace(config) = &self.source else {
            return Ok(None);
        };
        let layers = config.map().get("per_layer_config");
        let map = layers.and_then(|layers| layers.get(layer.to_string())?.as_object());
        map.map_or(Ok(None), |map| json(config.path(), map, name))
    }

    fn gguf_rope(&self, head_dim: usize) -> Result<Rope, ConfigError> {
        let theta: Option<f64> = self.get(Key::gguf("rope.freq_base"))?;
        let dimensions = self.get(Key::gguf("rope.dimension_count"))?;
        Ok(Rope {
            style: RopeStyle::HalfSplit,
            dimensions: dimensions.unwrap_or(head_dim),
            theta: theta.unwrap_or(DEFAULT_THETA),
            scaling: self.gguf_scaling()?,
            file_factors: true,
            axes: RopeAxes::One,
        })
    }

    fn gguf_scaling(&self) -> Result<RopeScaling, ConfigError> {
        let kind: Option<String> = self.get(Key::gguf("rope.scaling.type"))?;
        // Where the type is not written, the tables of longrope are what says it.
        let tables = self.has_tensor("rope_factors_long.weight") == Some(true);
        if tables && kind.is_none() {
            return self.gguf_longrope().map(RopeScaling::LongRope);
        }
        let factor: Option<f64> = self.get(Key::gguf("rope.scaling.factor"))?;
        match (kind.as_deref(), factor) {
            (None | Some("none"), _) | (Some("linear"), None) => Ok(RopeScaling::None),
            (Some("linear"), Some(factor)) => Ok(RopeScaling::Linear { factor }),
            (Some("yarn"), Some(factor)) => self.gguf_yarn(factor).map(RopeScaling::Yarn),
            (Some("longrope"), _) => self.gguf_longrope().map(RopeScaling::LongRope),
            (Some(kind), _) => Err(ConfigError::Unsupported {
                feature: format!("rope scaling `{kind}`"),
                supported: "none, linear, yarn with a factor, and longrope are",
            }),
        }
    }

    fn original_context(&self) -> Result<usize, ConfigError> {
        match self.get(Key::gguf("rope.scaling.original_context_length"))? {
            Some(tokens) => Ok(tokens),
            None => self.required(Key::gguf("context_length")),
        }
    }

    fn gguf_yarn(&self, factor: f64) -> Result<Yarn, ConfigError> {
        let beta = |name| self.get::<f64>(Key::gguf(name));
        let attention: Option<f64> = self.get(Key::gguf("rope.scaling.attn_factor"))?;
        let usual = Yarn::usual_attention_factor(factor);
        let usual = match beta("rope.scaling.yarn_log_multiplier")? {
            Some(all) if all != 0.0 => usual / Yarn::magnitude(factor, all),
            _ => usual,
        };
        Ok(Yarn {
            factor,
            original_context: self.original_context()?,
            beta_fast: beta("rope.scaling.yarn_beta_fast")?.unwrap_or(Yarn::BETA_FAST),
            beta_slow: beta("rope.scaling.yarn_beta_slow")?.unwrap_or(Yarn::BETA_SLOW),
            // The format has no key for it; every reader of it rounds.
            truncate: true,
            // GGUF's factor multiplies the usual one.
            attention_factor: attention.unwrap_or(1.0) * usual,
        })
    }

    fn gguf_longrope(&self) -> Result<LongRope, ConfigError> {
        let original_context = self.original_context()?;
        let context = self.required(Key::gguf("context_length"))?;
        let attention: Option<f64> = self.get(Key::gguf("rope.scaling.attn_factor"))?;
        let usual = LongRope::usual_attention_factor(original_context, context);
        Ok(LongRope {
            original_context,
            attention_factor: attention.unwrap_or(usual),
            factors: None,
        })
    }

    /// The rotary embedding that `map`, the `field` of a `config.json`, describes.
    fn json_rope(
        &self,
        config: &Config,
        field: &'static str,
        map: &Map<String, Value>,
        head_dim: usize,
    ) -> Result<Rope, ConfigError> {
        let reader = RopeReader {
            path: config.path(),
            field,
            map,
        };
        let older = self.get(Key::huggingface(
            "rope_theta|rotary_emb_base|global_rope_theta",
        ))?;
        let theta = reader.optional("rope_theta")?.or(older);
        let part = match reader.optional("partial_rotary_factor")? {
            Some(part) => Some(part),
            None => self.get::<f64>(Key::huggingface(
                "partial_rotary_factor|rope_pct|rope_percent",
            ))?,
        };
        let scaling = reader.scaling(self)?;
        let dimensions = match (&scaling, part) {
            // There the part is of the pairs that turn.
            (RopeScaling::Proportional { .. }, _) | (_, None) => head_dim,
            (_, Some(part)) => (head_dim as f64 * part) as usize,
        };
        let theta = theta.unwrap_or(DEFAULT_THETA);
        Ok(Rope {
            style: RopeStyle::HalfSplit,
            dimensions,
            theta: reader.stretched(theta, dimensions)?,
            scaling,
            file_factors: false,
            axes: RopeAxes::One,
        })
    }
}

/// What a model without a rotary base of its own uses.
const DEFAULT_THETA: f64 = 10_000.0;

/// Where `config.json` has the parameters of rotation, which newer files call otherwise.
fn rope_map(config: &Config) -> (&'static str, &Map<String, Value>) {
    static EMPTY: std::sync::LazyLock<Map<String, Value>> = std::sync::LazyLock::new(Map::new);
    let found = ["rope_parameters", "rope_scaling"].into_iter();
    let mut found = found.filter_map(|field| Some((field, config.map().get(field)?.as_object()?)));
    found.next().unwrap_or(("rope_scaling", &EMPTY))
}

/// The first of `names`, which a `|` separates, that `map` has a value for.
fn json<T: Fact>(
    path: &Path,
    map: &Map<String, Value>,
    names: &'static str,
) -> Result<Option<T>, ConfigError> {
    for name in names.split('|') {
        let Some(value) = map.get(name).filter(|value| !value.is_null()) else {
            continue;
        };
        return match T::from_json(value) {
            Some(fact) => Ok(Some(fact)),
            None => Err(wrong(path, name, value.to_string(), T::EXPECTED)),
        };
    }
    Ok(None)
}

fn wrong(path: &Path, field: &'static str, found: String, expected: &'static str) -> ConfigError {
    HuggingFaceError::Config {
        path: path.to_owned(),
        field,
        found,
        expected,
    }
    .into()
}

/// Parameters of rotation in `config.json`.
struct RopeReader<'a> {
    path: &'a Path,
    field: &'static str,
    map: &'a Map<String, Value>,
}

impl RopeReader<'_> {
    fn optional(&self, name: &'static str) -> Result<Option<f64>, ConfigError> {
        json(self.path, self.map, name)
    }

    /// A positive number that must be there.
    fn number(&self, name: &'static str) -> Result<f64, ConfigError> {
        let expected = "a positive number";
        match self.optional(name)? {
            Some(number) if number.is_finite() && number > 0.0 => Ok(number),
            Some(number) => Err(wrong(self.path, name, number.to_string(), expected)),
            None => Err(wrong(self.path, name, "missing".to_owned(), expected)),
        }
    }

    fn scaling(&self, facts: &Facts<'_>) -> Result<RopeScaling, ConfigError> {
        let kind: Option<String> = json(self.path, self.map, "rope_type|type")?;
        match kind.as_deref() {
            None | Some("default" | "mrope") => Ok(RopeScaling::None),
            Some("linear") => Ok(RopeScaling::Linear {
                factor: self.number("factor")?,
            }),
            Some("llama3") => Ok(RopeScaling::Llama3 {
                factor: self.number("factor")?,
                low_freq_factor: self.number("low_freq_factor")?,
                high_freq_factor: self.number("high_freq_factor")?,
                original_context: self.number("original_max_position_embeddings")? as usize,
            }),
            Some("yarn") => self.yarn(facts).map(RopeScaling::Yarn),
            Some("longrope" | "su") => self.longrope(facts).map(RopeScaling::LongRope),
            Some("proportional") => Ok(RopeScaling::Proportional {
                fraction: self.optional("partial_rotary_factor")?.unwrap_or(1.0),
            }),
            // Its base is another, and that is all.
            Some("dynamic") if self.alpha()?.is_some() => Ok(RopeScaling::None),
            Some(other) => Err(wrong(
                self.path,
                self.field,
                format!("of type {other:?}"),
                "type default, linear, llama3, yarn, longrope or proportional",
            )),
        }
    }

    /// By how much frequencies are stretched where `dynamic` does not mean that it depends on the text (Hunyuan).
    fn alpha(&self) -> Result<Option<f64>, ConfigError> {
        let kind: Option<String> = json(self.path, self.map, "rope_type|type")?;
        match kind.as_deref() {
            // A zero says that there is none.
            Some("dynamic") => Ok(self.optional("alpha")?.filter(|alpha| *alpha != 0.0)),
            _ => Ok(None),
        }
    }

    /// The rotary base so stretched that the slowest pair turns `alpha` times as slowly and the fastest as ever.
    fn stretched(&self, theta: f64, dimensions: usize) -> Result<f64, ConfigError> {
        let Some(alpha) = self.alpha()? else {
            return Ok(theta);
        };
        let turned = dimensions as f64;
        // As GGUF files, which have what it comes to, have it.
        let stretched = theta * alpha.powf(turned / (turned - 2.0));
        Ok(f64::from(stretched as f32))
    }

    /// The context the model was trained on before frequencies were stretched.
    fn original_context(&self, facts: &Facts<'_>) -> Result<usize, ConfigError> {
        let name = "original_max_position_embeddings";
        match json(self.path, self.map, name)? {
            Some(tokens) => Ok(tokens),
            None => facts.required(Key::huggingface(
                "original_max_position_embeddings|max_position_embeddings",
            )),
        }
    }

    fn yarn(&self, facts: &Facts<'_>) -> Result<Yarn, ConfigError> {
        let factor = self.number("factor")?;
        let scales = (self.optional("mscale")?, self.optional("mscale_all_dim")?);
        let usual = match scales {
            (Some(scale), Some(all)) if scale != 0.0 && all != 0.0 => {
                Yarn::magnitude(factor, scale) / Yarn::magnitude(factor, all)
            }
            _ => Yarn::usual_attention_factor(factor),
        };
        Ok(Yarn {
            factor,
            original_context: self.original_context(facts)?,
            beta_fast: self.optional("beta_fast")?.unwrap_or(Yarn::BETA_FAST),
            beta_slow: self.optional("beta_slow")?.unwrap_or(Yarn::BETA_SLOW),
            truncate: json(self.path, self.map, "truncate")?.unwrap_or(true),
            attention_factor: self.optional("attention_factor")?.unwrap_or(usual),
        })
    }

    fn longrope(&self, facts: &Facts<'_>) -> Result<LongRope, ConfigError> {
        let original_context = self.original_context(facts)?;
        let context = facts.required(Key::huggingface("max_position_embeddings"))?;
        let usual = LongRope::usual_attention_factor(original_context, context);
        Ok(LongRope {
            original_context,
            attention_factor: self.optional("attention_factor")?.unwrap_or(usual),
            factors: Some(LongRopeFactors {
                short: self.table("short_factor")?,
                long: self.table("long_factor")?,
            }),
        })
    }

    fn table(&self, name: &'static str) -> Result<Vec<f32>, ConfigError> {
        let value = self.map.get(name);
        let numbers = value.and_then(Value::as_array).and_then(|numbers| {
            let numbers = numbers.iter().map(Value::as_f64);
            let numbers = numbers.map(|number| number.map(|number| number as f32));
            numbers.collect::<Option<Vec<_>>>()
        });
        numbers.ok_or_else(|| {
            let found = value.map_or("missing".to_owned(), Value::to_string);
            wrong(self.path, name, found, "a list of numbers")
        })
    }
}
