//! How a folder says that texts are pooled: the files that sentence-transformers writes beside a model.
//!
//! `modules.json` lists what a text goes through: the model, pooling, and often a norm. Each module's
//! settings are in a folder of its own; `sentence_bert_config.json` may say that texts are shorter than
//! the model's positions reach. A folder without these files has the family's own pooling.

use serde::Deserialize;

use crate::error::ConfigError;
use crate::spec::{ModelSpec, OutputSpec, Pooled, Pooling};
use lacuna_files::huggingface::Folder;

const MODULES: &str = "modules.json";
const SETTINGS: &str = "sentence_bert_config.json";

/// An entry of `modules.json`.
#[derive(Debug, Deserialize)]
struct Module {
    /// The folder of its settings; empty for that of the model.
    #[serde(default)]
    path: String,
    /// Its class in Python.
    #[serde(rename = "type")]
    class: String,
}

/// `config.json` of a pooling module.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct PoolingModes {
    word_embedding_dimension: Option<usize>,
    pooling_mode_mean_tokens: bool,
    pooling_mode_cls_token: bool,
    pooling_mode_lasttoken: bool,
    pooling_mode_max_tokens: bool,
    pooling_mode_mean_sqrt_len_tokens: bool,
    pooling_mode_weightedmean_tokens: bool,
}

#[derive(Debug, Deserialize)]
struct Settings {
    #[serde(default)]
    max_seq_length: Option<usize>,
}

/// Follows what `folder` says, where `spec` is of a model that pools.
pub(super) fn apply(spec: &mut ModelSpec, folder: &Folder) -> Result<(), ConfigError> {
    if spec.pooled().is_none() {
        return Ok(());
    }
    if let Some(modules) = folder.json::<Vec<Module>>(MODULES)? {
        let pooled = pooled(&modules, spec.hidden, folder)?;
        spec.output = OutputSpec::Pooled(pooled);
    }
    let settings: Option<Settings> = folder.json(SETTINGS)?;
    if let Some(tokens) = settings.and_then(|settings| settings.max_seq_length) {
        spec.context_tokens = spec.context_tokens.min(tokens);
    }
    Ok(())
}

fn pooled(modules: &[Module], hidden: usize, folder: &Folder) -> Result<Pooled, ConfigError> {
    let unsupported = |feature: String| ConfigError::Unsupported {
        feature,
        supported: "Transformer, Pooling and Normalize, in this order, are",
    };
    let kinds: Vec<&str> = modules.iter().map(Module::kind).collect();
    let normalized = match kinds.as_slice() {
        ["Transformer", "Pooling"] => false,
        ["Transformer", "Pooling", "Normalize"] => true,
        kinds => return Err(unsupported(format!("{MODULES} with {}", kinds.join(", ")))),
    };
    let path = &modules[1].path;
    let is_plain = !path.is_empty() && !path.contains(['/', '\\']) && path != "..";
    if !modules[0].path.is_empty() || !is_plain {
        return Err(unsupported(format!("{MODULES} with the path `{path}`")));
    }
    let modes: Option<PoolingModes> = folder.json(&format!("{path}/config.json"))?;
    let modes = modes.ok_or(ConfigError::Needs {
        field: MODULES,
        needs: "the settings of its pooling module",
    })?;
    Ok(Pooled {
        pooling: modes.pooling(hidden)?,
        normalized,
    })
}

impl Module {
    /// The last part of its class's name, whatever version wrote it.
    fn kind(&self) -> &str {
        self.class.rsplit('.').next().unwrap_or(&self.class)
    }
}

impl PoolingModes {
    fn pooling(&self, hidden: usize) -> Result<Pooling, ConfigError> {
        if let Some(width) = self
            .word_embedding_dimension
            .filter(|width| *width != hidden)
        {
            return Err(ConfigError::Unsupported {
                feature: format!("pooling of rows of {width} elements"),
                supported: "rows as wide as the model's are",
            });
        }
        let modes = [
            (self.pooling_mode_mean_tokens, Some(Pooling::Mean)),
            (self.pooling_mode_cls_token, Some(Pooling::First)),
            (self.pooling_mode_lasttoken, Some(Pooling::Last)),
            (self.pooling_mode_max_tokens, None),
            (self.pooling_mode_mean_sqrt_len_tokens, None),
            (self.pooling_mode_weightedmean_tokens, None),
        ];
        let mut asked = modes.iter().filter(|(asked, _)| *asked);
        match (asked.next(), asked.next()) {
            (Some((_, Some(pooling))), None) => Ok(*pooling),
            _ => Err(ConfigError::Unsupported {
                feature: "this pooling".to_owned(),
                supported: "one of mean, cls and lasttoken alone is",
            }),
        }
    }
}
