//! `config.json`: what it says of a model of language, as it says it.

use std::path::{Path, PathBuf};

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
const TEXT_FIELDS: [&str; 3] = ["text_config", "llm_config", "language_config"];

impl Config {
    /// The description in the bytes of a `config.json` that is in no folder.
    ///
    /// # Errors
    /// [`Error::Json`] and [`Error::Config`], which call it `config.json`.
    pub fn parse(bytes: &[u8]) -> Result<Self, Error> {
        let path = Path::new(super::CONFIG_FILE);
        let whole = serde_json::from_slice(bytes).map_err(|source| Error::Json {
            path: path.to_owned(),
            source,
        })?;
        Self::new(path, whole)
    }

    /// The description in `whole`, which was read from `path`.
    ///
    /// # Errors
    /// [`Error::Config`] when it does not say what kind of model it is of.
    pub(super) fn new(path: &Path, whole: Map<String, Value>) -> Result<Self, Error> {
        let classes = whole.get("architectures").and_then(Value::as_array);
        let class = classes.and_then(|classes| classes.first());
        let class = class.or_else(|| whole.get("model_type"));
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
        let text = fields.find_map(|field| whole.get(field)?.as_object());
        let map = match text {
            None => whole,
            Some(text) => {
                // What is said around it holds for it too, unless it says otherwise.
                let mut map = whole.clone();
                map.extend(text.clone());
                map
            }
        };
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

    /// Its fields.
    #[must_use]
    pub fn map(&self) -> &Map<String, Value> {
        &self.map
    }
}
