//! Architectures as data: how each is named, which tensors it has, and how its file describes it.
//!
//! Adding a dense decoder is adding a row to [`ARCHITECTURES`].

use lacuna_kernels::RopeStyle;

use crate::config::{Config, Rope, RopeScaling};
use crate::error::ConfigError;
use crate::files::gguf::{FromValue, Metadata};
use crate::files::huggingface::Folder;

/// One family of models.
#[derive(Debug, PartialEq)]
pub struct Architecture {
    /// `general.architecture` in GGUF.
    pub name: &'static str,
    /// Entries of `architectures` in a Hugging Face `config.json`.
    pub classes: &'static [&'static str],
    /// Whether queries and keys are normed per head before rotation.
    pub head_norms: bool,
    /// Matrices that must come with a bias. Any other may.
    pub biases: &'static [&'static str],
    /// How GGUF files of this family lay out rotated pairs. Hugging Face files always split halves.
    pub gguf_rope: RopeStyle,
}

/// All families that can be run.
pub const ARCHITECTURES: [Architecture; 3] = [
    Architecture {
        name: "qwen3",
        classes: &["Qwen3ForCausalLM"],
        head_norms: true,
        biases: &[],
        gguf_rope: RopeStyle::HalfSplit,
    },
    Architecture {
        name: "qwen2",
        classes: &["Qwen2ForCausalLM"],
        head_norms: false,
        biases: &["attn_q", "attn_k", "attn_v"],
        gguf_rope: RopeStyle::HalfSplit,
    },
    Architecture {
        name: "llama",
        classes: &["LlamaForCausalLM", "MistralForCausalLM"],
        head_norms: false,
        biases: &[],
        gguf_rope: RopeStyle::Interleaved,
    },
];

/// Where the output matrix is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Output {
    /// The embedding table.
    Tied,
    /// A tensor of its own.
    Untied,
    /// A tensor of its own if the file has it, otherwise the embedding table (GGUF's convention).
    TiedUnlessPresent,
}

/// What a file says a model is.
#[derive(Debug, Clone)]
pub struct Description {
    /// The family.
    pub architecture: &'static Architecture,
    /// Its numbers, validated.
    pub config: Config,
    /// Where the output matrix is.
    pub output: Output,
}

impl Description {
    /// Reads GGUF metadata. `vocabulary` is the number of rows of the embedding table.
    ///
    /// # Errors
    /// [`ConfigError`] for an unknown architecture, a missing key, or numbers out of range.
    pub fn from_gguf(metadata: &Metadata, vocabulary: usize) -> Result<Self, ConfigError> {
        let name = metadata.require("general.architecture")?;
        let architecture = find(name, |architecture| architecture.name == name)?;
        let keys = Keys { metadata, prefix: architecture.name };
        let query_heads: usize = keys.required("attention.head_count")?;
        let hidden: usize = keys.required("embedding_length")?;
        let head_dim = match keys.optional("attention.key_length")? {
            Some(dim) => dim,
            None => hidden.checked_div(query_heads).unwrap_or(0),
        };
        keys.expect("attention.value_length", head_dim, "value heads as wide as key heads are")?;
        keys.expect("rope.dimension_count", head_dim, "rotation of whole heads is")?;
        let context_tokens = keys.required("context_length")?;
        let window = keys.optional("attention.sliding_window")?.filter(|&window: &usize| window > 0);
        let config = Config {
            architecture: architecture.name,
            layers: keys.required("block_count")?,
            hidden,
            query_heads,
            kv_heads: keys.optional("attention.head_count_kv")?.unwrap_or(query_heads),
            head_dim,
            feed_forward: keys.required("feed_forward_length")?,
            vocabulary,
            context_tokens: window.map_or(context_tokens, |window| window.min(context_tokens)),
            norm_epsilon: keys.required("attention.layer_norm_rms_epsilon")?,
            rope: Rope {
                style: architecture.gguf_rope,
                theta: keys.optional::<f32>("rope.freq_base")?.map_or(10_000.0, f64::from),
                scaling: keys.rope_scaling()?,
            },
        };
        config.validate()?;
        Ok(Self { architecture, config, output: Output::TiedUnlessPresent })
    }

    /// Reads a Hugging Face folder's `config.json`.
    ///
    /// # Errors
    /// [`ConfigError`] for an unknown architecture, unsupported features, or numbers out of range.
    pub fn from_huggingface(folder: &Folder) -> Result<Self, ConfigError> {
        let file = folder.config();
        let class = file.architectures.first().unwrap_or(&file.model_type);
        let architecture = find(class, |architecture| architecture.classes.contains(&class.as_str()))?;
        if file.hidden_act != "silu" {
            return Err(ConfigError::Unsupported {
                feature: format!("hidden_act `{}`", file.hidden_act),
                supported: "silu is",
            });
        }
        let rope = file.rope(folder.path())?;
        let context = file.max_position_embeddings;
        let window = file.sliding_window.filter(|_| file.use_sliding_window != Some(false));
        let config = Config {
            architecture: architecture.name,
            layers: file.num_hidden_layers,
            hidden: file.hidden_size,
            query_heads: file.num_attention_heads,
            kv_heads: file.kv_heads(),
            head_dim: file.head_size(),
            feed_forward: file.intermediate_size,
            vocabulary: file.vocab_size,
            context_tokens: window.map_or(context, |window| window.min(context)),
            norm_epsilon: file.rms_norm_eps as f32,
            rope: Rope { style: RopeStyle::HalfSplit, theta: rope.theta, scaling: rope.scaling },
        };
        config.validate()?;
        let output = if file.tie_word_embeddings { Output::Tied } else { Output::Untied };
        Ok(Self { architecture, config, output })
    }
}

fn find(name: &str, matches: impl Fn(&Architecture) -> bool) -> Result<&'static Architecture, ConfigError> {
    const TABLE: &[Architecture] = &ARCHITECTURES;
    TABLE.iter().find(|architecture| matches(architecture)).ok_or_else(|| ConfigError::Unsupported {
        feature: format!("architecture `{name}`"),
        supported: "qwen3, qwen2 and llama (with mistral) are",
    })
}

/// GGUF metadata of one family: every key starts with the architecture's name.
struct Keys<'a> {
    metadata: &'a Metadata,
    prefix: &'static str,
}

impl<'a> Keys<'a> {
    fn optional<T: FromValue<'a>>(&self, key: &str) -> Result<Option<T>, ConfigError> {
        Ok(self.metadata.get(&format!("{}.{key}", self.prefix))?)
    }

    fn required<T: FromValue<'a>>(&self, key: &str) -> Result<T, ConfigError> {
        Ok(self.metadata.require(&format!("{}.{key}", self.prefix))?)
    }

    /// Refuses a file whose `key` says something else than `value`.
    fn expect(&self, key: &str, value: usize, supported: &'static str) -> Result<(), ConfigError> {
        match self.optional::<usize>(key)? {
            Some(found) if found != value => {
                Err(ConfigError::Unsupported { feature: format!("{key} {found}"), supported })
            }
            _ => Ok(()),
        }
    }

    fn rope_scaling(&self) -> Result<RopeScaling, ConfigError> {
        let factor = self.optional::<f32>("rope.scaling.factor")?.map(f64::from);
        match (self.optional::<&str>("rope.scaling.type")?, factor) {
            (None | Some("none"), _) | (Some("linear"), None) => Ok(RopeScaling::None),
            (Some("linear"), Some(factor)) => Ok(RopeScaling::Linear { factor }),
            (Some(kind), _) => Err(unsupported_scaling(kind)),
        }
    }
}

fn unsupported_scaling(kind: &str) -> ConfigError {
    ConfigError::Unsupported {
        feature: format!("rope scaling `{kind}`"),
        supported: "none, linear and llama3 are",
    }
}
