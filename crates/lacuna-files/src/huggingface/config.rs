//! `config.json`: what it says of a model of language, as it says it.

use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::Error;

/// A model's description. Families of models know which of its fields mean what.
#[derive(Clone, Debug)]
pub struct Config {
    path: PathBuf,
    /// The class in `transformers`, or what kind of model it is where none is named.
    class: String,
    /// The fields about text, for models that take other things in too.
    map: Map<String, Value>,
}

/// Where wrappers around a model of language keep its description.
const TEXT_FIELDS: [&str; 4] = [
    "text_config",
    "llm_config",
    "language_config",
    // Of heads that guess tokens for a model.
    "transformer_layer_config",
];

impl Config {
    /// The description in the bytes of a `config.json` that is in no folder.
    ///
    /// # Errors
    /// [`Error::Json`] and [`Error::Config`], which call it `config.json`.
    pub fn parse(bytes: &[u8]) -> Result<Self, Error> {
        Self::read(Path::new(super::CONFIG_FILE), bytes)
    }

    /// The same in the bytes of the file at `path`.
    ///
    /// # Errors
    /// [`Error::Json`], and [`Error::Config`] when it does not say what kind of model it is of.
    pub(super) fn read(path: &Path, bytes: &[u8]) -> Result<Self, Error> {
        let whole = python_json(bytes).map_err(|source| Error::Json {
            path: path.to_owned(),
            source,
        })?;
        Self::new(path, whole)
    }

    fn new(path: &Path, mut map: Map<String, Value>) -> Result<Self, Error> {
        let classes = map.get("architectures").and_then(Value::as_array);
        let class = classes.and_then(|classes| classes.first());
        let class = class.or_else(|| map.get("model_type"));
        let Some(class) = class.and_then(Value::as_str) else {
            return Err(Error::Config {
                path: path.to_owned(),
                field: "model_type",
                found: "missing".to_owned(),
                expected: "a name",
            });
        };
        let class = class.to_owned();
        let mut fields = TEXT_FIELDS.into_iter();
        let text = fields.find(|field| map.get(*field).is_some_and(Value::is_object));
        if let Some(Value::Object(text)) = text.and_then(|field| map.remove(field)) {
            // What is said around it holds for it too, unless it says otherwise.
            map.extend(text);
        }
        Ok(Self {
            path: path.to_owned(),
            class,
            map,
        })
    }

    /// Where it was read from.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The class in `transformers`, such as `Qwen3ForCausalLM`.
    #[must_use]
    pub fn class(&self) -> &str {
        &self.class
    }

    /// The same with `defaults` for fields that it does not have.
    #[must_use]
    pub fn with_defaults(&self, defaults: &[(&str, Value)]) -> Self {
        let mut config = self.clone();
        for (name, value) in defaults {
            config.map.entry(*name).or_insert_with(|| value.clone());
        }
        config
    }

    /// Its fields.
    #[must_use]
    pub fn map(&self) -> &Map<String, Value> {
        &self.map
    }
}

/// Reads JSON that Python may have written: where it has `Infinity`, the largest number is, and `null` where
/// it has `NaN`.
///
/// # Errors
/// What the parser says of the text as it is.
pub fn python_json<T: DeserializeOwned>(text: &[u8]) -> Result<T, serde_json::Error> {
    let parsed = serde_json::from_slice(text);
    parsed.or_else(|error| serde_json::from_slice(&plain(text)).map_err(|_| error))
}

/// What JSON cannot write and Python does all the same, and what takes its place; none takes more memory when
/// it is parsed than other text of the same length may.
const NO_JSON: [(&str, &str); 2] = [("Infinity", "1.7976931348623157e308"), ("NaN", "null")];

/// The same text as JSON.
fn plain(text: &[u8]) -> Vec<u8> {
    let (mut plain, mut rest) = (Vec::with_capacity(text.len()), text);
    let (mut in_string, mut escaped) = (false, false);
    while let Some((&byte, after)) = rest.split_first() {
        let mut words = NO_JSON.iter();
        let word = words.find(|(word, _)| !in_string && rest.starts_with(word.as_bytes()));
        if let Some((word, instead)) = word {
            plain.extend(instead.bytes());
            rest = &rest[word.len()..];
            continue;
        }
        in_string ^= byte == b'"' && !escaped;
        escaped = in_string && byte == b'\\' && !escaped;
        plain.push(byte);
        rest = after;
    }
    plain
}
