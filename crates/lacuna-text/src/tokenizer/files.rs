//! The vocabulary of a model's files.

use lacuna_files::gguf::{self, FromValue};
use lacuna_files::{Metadata, ModelFiles};

use super::{GgufVocabulary, Tokenizer, TokenizerError};

impl Tokenizer {
    /// The tokenizer of a model, or of a file that holds a vocabulary and nothing else.
    ///
    /// # Errors
    /// [`TokenizerError`], naming what is missing or not supported.
    pub fn from_files(files: &ModelFiles) -> Result<Self, TokenizerError> {
        let loaded = match files.metadata() {
            Metadata::Gguf(metadata) => vocabulary(metadata)
                .map_err(TokenizerError::from)
                .and_then(|vocabulary| Self::from_gguf(&vocabulary)),
            Metadata::HuggingFace(folder) => Self::from_folder(folder.path()),
        };
        files.check()?;
        loaded
    }
}

fn vocabulary(metadata: &gguf::Metadata) -> Result<GgufVocabulary<'_>, gguf::Error> {
    let model = metadata.require("tokenizer.ggml.model")?;
    Ok(GgufVocabulary {
        model,
        architecture: metadata.get("general.architecture")?,
        pre: entry(metadata, "pre")?,
        tokens: metadata.require("tokenizer.ggml.tokens")?,
        token_types: entry(metadata, "token_type")?,
        merges: entry(metadata, "merges")?,
        scores: entry(metadata, "scores")?,
        bos: entry(metadata, "bos_token_id")?,
        eos: entry(metadata, "eos_token_id")?,
        cls: entry(metadata, "cls_token_id")?,
        separator: entry(metadata, "seperator_token_id")?,
        eot: entry(metadata, "eot_token_id")?,
        eom: entry(metadata, "eom_token_id")?,
        unknown: entry(metadata, "unknown_token_id")?,
        add_bos: entry(metadata, "add_bos_token")?,
        add_eos: entry(metadata, "add_eos_token")?,
        add_separator: entry(metadata, "add_sep_token")?,
        add_space_prefix: entry(metadata, "add_space_prefix")?,
        remove_extra_whitespaces: entry(metadata, "remove_extra_whitespaces")?,
        character_map: entry(metadata, "precompiled_charsmap")?,
        chat_template: metadata.get("tokenizer.chat_template")?,
    })
}

fn entry<'a, T: FromValue<'a>>(
    metadata: &'a gguf::Metadata,
    key: &str,
) -> Result<Option<T>, gguf::Error> {
    metadata.get(&format!("tokenizer.ggml.{key}"))
}
