//! `config.json`, in the spellings that different versions of `transformers` write.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value};

use super::Error;

/// What a model without a rotary base of its own uses.
const DEFAULT_ROPE_THETA: f64 = 10_000.0;

/// A decoder's description: the fields that dense attention models share.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[non_exhaustive]
pub struct Config {
    /// The architecture, such as `qwen3`.
    pub model_type: String,
    /// The class names in `transformers`, such as `Qwen3ForCausalLM`.
    #[serde(default)]
    pub architectures: Vec<String>,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width inside the feed-forward block.
    pub intermediate_size: usize,
    /// Number of layers.
    pub num_hidden_layers: usize,
    /// Number of query heads.
    pub num_attention_heads: usize,
    /// Number of key and value heads; as many as query heads when left out.
    pub num_key_value_heads: Option<usize>,
    /// Elements per head; `hidden_size / num_attention_heads` when left out.
    pub head_dim: Option<usize>,
    /// Rows of the embedding, which may be more than the tokenizer has tokens.
    pub vocab_size: usize,
    /// The longest context the model was made for.
    pub max_position_embeddings: usize,
    /// Added to the mean square in normalization.
    pub rms_norm_eps: f64,
    /// The feed-forward activation.
    #[serde(default = "silu")]
    pub hidden_act: String,
    /// Whether the output matrix is the embedding.
    #[serde(default)]
    pub tie_word_embeddings: bool,
    /// Whether query, key, value and output projections have biases; each architecture has its own
    /// default when left out.
    pub attention_bias: Option<bool>,
    /// Whether the feed-forward projections have biases.
    #[serde(default)]
    pub mlp_bias: bool,
    /// How many tokens back attention sees, where it is limited at all.
    pub sliding_window: Option<usize>,
    /// Whether `sliding_window` applies, in architectures that ask.
    pub use_sliding_window: Option<bool>,
    /// The kind of attention of every layer, in newer files.
    pub layer_types: Option<Vec<String>>,
    /// Tokens that start a text.
    #[serde(default)]
    pub bos_token_id: TokenIds,
    /// Tokens that end a generation.
    #[serde(default)]
    pub eos_token_id: TokenIds,
    /// The older spelling of the rotary base.
    rope_theta: Option<f64>,
    /// The older spelling of rotary scaling.
    rope_scaling: Option<Map<String, Value>>,
    /// The newer spelling of both.
    rope_parameters: Option<Map<String, Value>>,
}

fn silu() -> String {
    "silu".to_owned()
}

/// Token ids that a file gives as nothing, one number, or a list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenIds(pub Vec<u32>);

impl<'de> Deserialize<'de> for TokenIds {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Spelling {
            Nothing(()),
            One(u32),
            Many(Vec<u32>),
        }
        Ok(Self(match Spelling::deserialize(deserializer)? {
            Spelling::Nothing(()) => Vec::new(),
            Spelling::One(id) => vec![id],
            Spelling::Many(ids) => ids,
        }))
    }
}

/// Rotary embedding: base and scaling.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rope {
    /// The base whose powers are the rotation frequencies.
    pub theta: f64,
    /// How frequencies are changed for contexts longer than trained on.
    pub scaling: RopeScaling,
}

/// How rotation frequencies are changed.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum RopeScaling {
    /// Not at all.
    None,
    /// All divided by a factor.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Low frequencies divided by a factor, high ones kept, those between blended (Llama 3.1).
    Llama3 {
        /// The divisor of low frequencies.
        factor: f64,
        /// Wavelengths over `original_context / low_freq_factor` are divided.
        low_freq_factor: f64,
        /// Wavelengths under `original_context / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// The context the model was first trained on.
        original_context: usize,
    },
}

impl Config {
    /// Number of key and value heads.
    pub fn kv_heads(&self) -> usize {
        self.num_key_value_heads.unwrap_or(self.num_attention_heads)
    }

    /// Elements per head.
    pub fn head_size(&self) -> usize {
        self.head_dim
            .unwrap_or(self.hidden_size / self.num_attention_heads.max(1))
    }

    /// The rotary embedding, whichever way it is spelled.
    ///
    /// # Errors
    /// [`Error::Config`] naming `path`, when the scaling is of an unsupported kind or lacks a
    /// number.
    pub fn rope(&self, path: &Path) -> Result<Rope, Error> {
        let empty = Map::new();
        let (field, map) = match (&self.rope_parameters, &self.rope_scaling) {
            (Some(map), _) => ("rope_parameters", map),
            (None, Some(map)) => ("rope_scaling", map),
            (None, None) => ("rope_scaling", &empty),
        };
        let reader = RopeReader { path, field, map };
        Ok(Rope {
            theta: reader.theta(self.rope_theta)?,
            scaling: reader.scaling()?,
        })
    }

    /// Refuses sizes that no model has, so that whoever computes with them need not.
    pub(super) fn check(&self, path: &Path) -> Result<(), Error> {
        let sizes = [
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.kv_heads()),
            ("head_dim", self.head_size()),
            ("vocab_size", self.vocab_size),
            ("max_position_embeddings", self.max_position_embeddings),
        ];
        if let Some((field, found)) = sizes.into_iter().find(|&(_, size)| !plausible(size)) {
            return Err(wrong(
                path,
                field,
                found.to_string(),
                "a number from 1 to 2147483647",
            ));
        }
        if !self.num_attention_heads.is_multiple_of(self.kv_heads()) {
            let found = self.kv_heads().to_string();
            return Err(wrong(
                path,
                "num_key_value_heads",
                found,
                "a divisor of num_attention_heads",
            ));
        }
        self.rope(path).map(drop)
    }
}

fn plausible(size: usize) -> bool {
    (1..=i32::MAX as usize).contains(&size)
}

fn wrong(path: &Path, field: &'static str, found: String, expected: &'static str) -> Error {
    Error::Config {
        path: path.to_owned(),
        field,
        found,
        expected,
    }
}

struct RopeReader<'a> {
    path: &'a Path,
    field: &'static str,
    map: &'a Map<String, Value>,
}

impl RopeReader<'_> {
    fn theta(&self, older: Option<f64>) -> Result<f64, Error> {
        if self.map.values().any(Value::is_object) {
            let expected = "one set of parameters for all layers";
            return Err(wrong(
                self.path,
                self.field,
                "different for each kind of layer".into(),
                expected,
            ));
        }
        let theta = match self.map.get("rope_theta") {
            Some(_) => self.number("rope_theta")?,
            None => older.unwrap_or(DEFAULT_ROPE_THETA),
        };
        if theta.is_finite() && theta > 0.0 {
            return Ok(theta);
        }
        Err(wrong(
            self.path,
            "rope_theta",
            theta.to_string(),
            "a positive number",
        ))
    }

    fn scaling(&self) -> Result<RopeScaling, Error> {
        let kind = self.map.get("rope_type").or_else(|| self.map.get("type"));
        match kind.map(Value::as_str) {
            None | Some(Some("default")) => Ok(RopeScaling::None),
            Some(Some("linear")) => Ok(RopeScaling::Linear {
                factor: self.number("factor")?,
            }),
            Some(Some("llama3")) => self.llama3(),
            Some(_) => {
                let found = format!("of type {}", kind.unwrap_or(&Value::Null));
                Err(wrong(
                    self.path,
                    self.field,
                    found,
                    "type default, linear or llama3",
                ))
            }
        }
    }

    fn llama3(&self) -> Result<RopeScaling, Error> {
        let original_context = self.number("original_max_position_embeddings")?;
        Ok(RopeScaling::Llama3 {
            factor: self.number("factor")?,
            low_freq_factor: self.number("low_freq_factor")?,
            high_freq_factor: self.number("high_freq_factor")?,
            original_context: original_context as usize,
        })
    }

    /// A positive number that must be there.
    fn number(&self, key: &'static str) -> Result<f64, Error> {
        let value = self.map.get(key);
        let number = value
            .and_then(Value::as_f64)
            .filter(|number| number.is_finite() && *number > 0.0);
        number.ok_or_else(|| {
            let found = value.map_or("missing".to_owned(), Value::to_string);
            wrong(self.path, key, found, "a positive number")
        })
    }
}
