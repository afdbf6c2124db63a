//! How a folder says what becomes of a text's rows: the files that sentence-transformers writes beside a
//! model.
//!
//! `modules.json` lists what a text goes through: the model, pooling, and often products and a norm; or, in
//! rerankers, the model and what is made of its logits. Each module's settings are in a folder of its own;
//! `sentence_bert_config.json` may say that texts are shorter than the model's positions reach. A folder
//! without these files has the family's own pooling.

use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::encoder::embedding;
use crate::error::ConfigError;
use crate::spec::{
    Activation, Dense, Judgement, ModelSpec, OutputSpec, Pooled, PooledResult, Pooling,
};
use lacuna_files::huggingface::{Folder, MODULES_FILE, Module};

const SETTINGS: &str = "sentence_bert_config.json";

/// `config.json` of a pooling module.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct PoolingModes {
    #[serde(alias = "embedding_dimension")]
    word_embedding_dimension: Option<usize>,
    /// The one that counts, in newer files.
    pooling_mode: Option<String>,
    pooling_mode_mean_tokens: bool,
    pooling_mode_cls_token: bool,
    pooling_mode_lasttoken: bool,
    pooling_mode_max_tokens: bool,
    pooling_mode_mean_sqrt_len_tokens: bool,
    pooling_mode_weightedmean_tokens: bool,
    include_prompt: Option<bool>,
}

/// `config.json` of a product.
#[derive(Debug, Deserialize)]
struct DenseSettings {
    in_features: usize,
    out_features: usize,
    #[serde(default)]
    activation_function: Option<String>,
}

/// `config.json` of what makes scores of logits.
#[derive(Debug, Deserialize)]
struct LogitScore {
    true_token_id: usize,
    #[serde(default)]
    false_token_id: Option<usize>,
}

#[derive(Debug, Deserialize)]
struct Settings {
    #[serde(default)]
    max_seq_length: Option<usize>,
}

/// Follows what `folder` says, where it says something.
pub(super) fn apply(spec: &mut ModelSpec, folder: &Folder) -> Result<(), ConfigError> {
    let modules = folder.modules()?;
    if let Some(modules) = modules {
        apply_modules(spec, &modules, folder)?;
    }
    if spec.pooled().is_none() {
        return Ok(());
    }
    let settings: Option<Settings> = folder.json(SETTINGS)?;
    if let Some(tokens) = settings.and_then(|settings| settings.max_seq_length) {
        spec.context_tokens = spec.context_tokens.min(tokens);
    }
    Ok(())
}

fn apply_modules(
    spec: &mut ModelSpec,
    modules: &[Module],
    folder: &Folder,
) -> Result<(), ConfigError> {
    let unsupported = |feature: String| ConfigError::Unsupported {
        feature: format!("{MODULES_FILE} with {feature}"),
        supported: "Transformer, Pooling, up to two of Dense, and Normalize, in this order, are; and \
                    Transformer alone or with LogitScore, for rerankers",
    };
    let kinds: Vec<&str> = modules.iter().map(Module::kind).collect();
    let mut paths = modules.iter().map(|module| module.path.as_str());
    let is_plain = |path: &str| !path.is_empty() && !path.contains(['/', '\\']) && path != "..";
    if let Some(path) = paths.next().filter(|path| !path.is_empty()) {
        return Err(unsupported(format!("the path `{path}`")));
    }
    let of_kind = kinds.iter().skip(1).zip(paths);
    let mut with_settings = of_kind.filter(|(kind, _)| **kind != "Normalize");
    if let Some((_, path)) = with_settings.find(|(_, path)| !is_plain(path)) {
        return Err(unsupported(format!("the path `{path}`")));
    }
    // Decoders have a norm behind their last layer whether rows are pooled or not.
    let final_norm = spec.pooled().is_none_or(|pooled| pooled.final_norm);
    let scores = spec.judgement().is_some();
    let pooled = match kinds.as_slice() {
        ["Transformer"] if scores => return Ok(()),
        ["Transformer", "LogitScore"] if spec.pooled().is_none() => {
            judge(&settings(folder, &modules[1])?)?
        }
        ["Transformer", "Pooling", rest @ ..] if !scores => {
            let (dense, normalized) = match rest.split_last() {
                Some((&"Normalize", dense)) => (dense, true),
                _ => (rest, false),
            };
            if dense.len() > 2 || dense.iter().any(|kind| *kind != "Dense") {
                return Err(unsupported(kinds.join(", ")));
            }
            let modes: PoolingModes = settings(folder, &modules[1])?;
            Pooled {
                dense: products(spec.hidden, &modules[2..2 + dense.len()], folder)?,
                result: PooledResult::Embedding { normalized },
                ..embedding(modes.pooling(spec.hidden)?)
            }
        }
        kinds => return Err(unsupported(kinds.join(", "))),
    };
    spec.output = OutputSpec::Pooled(Pooled {
        final_norm,
        ..pooled
    });
    Ok(())
}

/// What the folder of `module` says of it.
fn settings<T: DeserializeOwned>(folder: &Folder, module: &Module) -> Result<T, ConfigError> {
    let found = folder.json(&format!("{}/config.json", module.path))?;
    found.ok_or(ConfigError::Needs {
        field: MODULES_FILE,
        needs: "the settings of its modules",
    })
}

/// Products one after another, of rows of `width` elements.
fn products(
    mut width: usize,
    modules: &[Module],
    folder: &Folder,
) -> Result<[Option<Dense>; 2], ConfigError> {
    let mut dense = [None; 2];
    for (module, dense) in modules.iter().zip(&mut dense) {
        let settings: DenseSettings = settings(folder, module)?;
        if settings.in_features != width {
            return Err(ConfigError::Unsupported {
                feature: format!("{} of {} elements", module.path, settings.in_features),
                supported: "as many as what comes before it has are",
            });
        }
        width = settings.out_features;
        *dense = Some(Dense {
            activation: settings.activation()?,
            ..Dense::plain(width)
        });
    }
    Ok(dense)
}

impl DenseSettings {
    fn activation(&self) -> Result<Option<Activation>, ConfigError> {
        let class = self.activation_function.as_deref();
        // Files that say nothing have the class's own.
        let class = class.unwrap_or("Tanh");
        match class.rsplit('.').next().unwrap_or(class) {
            "Identity" => Ok(None),
            "Tanh" => Ok(Some(Activation::Tanh)),
            "ReLU" => Ok(Some(Activation::Relu)),
            "GELU" => Ok(Some(Activation::GeluErf)),
            "SiLU" => Ok(Some(Activation::Silu)),
            "Sigmoid" => Ok(Some(Activation::Sigmoid)),
            other => Err(ConfigError::Unsupported {
                feature: format!("a dense module with {other}"),
                supported: "Identity, Tanh, ReLU, GELU, SiLU and Sigmoid are",
            }),
        }
    }
}

/// The last token's logits of two answers.
fn judge(settings: &LogitScore) -> Result<Pooled, ConfigError> {
    let no = settings.false_token_id.ok_or(ConfigError::Needs {
        field: "LogitScore",
        needs: "a token for no beside that for yes",
    })?;
    Ok(Pooled {
        dense: [Some(Dense::plain(2)), None],
        answers: Some([settings.true_token_id, no]),
        result: PooledResult::Score(Judgement::Question),
        ..embedding(Pooling::Last)
    })
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
        if self.include_prompt == Some(false) {
            return Err(ConfigError::Unsupported {
                feature: "pooling without the tokens of prompts".to_owned(),
                supported: "pooling of all tokens is",
            });
        }
        let named = |name: &str| self.pooling_mode.as_deref() == Some(name);
        let modes = [
            (
                self.pooling_mode_mean_tokens || named("mean"),
                Some(Pooling::Mean),
            ),
            (
                self.pooling_mode_cls_token || named("cls"),
                Some(Pooling::First),
            ),
            (
                self.pooling_mode_lasttoken || named("lasttoken"),
                Some(Pooling::Last),
            ),
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
