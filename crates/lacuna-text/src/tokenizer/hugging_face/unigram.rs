//! The `model` object of `tokenizer.json` where it is a unigram model.

use std::collections::HashSet;

use serde::Deserialize;
use tokenizers::models::bpe::Vocab;

use super::super::error::{TokenizerError, VocabularyError};
use super::super::pieces::{TokenKind, byte_token};
use super::super::unigram::Unigram;

/// Pieces with their scores, by id.
#[derive(Deserialize)]
struct File {
    vocab: Vec<(String, f64)>,
    #[serde(default)]
    unk_id: Option<u32>,
    #[serde(default)]
    byte_fallback: bool,
}

/// The same, and ids by piece.
pub(super) struct Pieces {
    file: File,
    pub(super) vocab: Vocab,
}

impl Pieces {
    pub(super) fn read(text: &str) -> Result<Pieces, TokenizerError> {
        let file: File = super::json("tokenizer.json", text)?;
        let tokens = file.vocab.len();
        if let Some(id) = file.unk_id.filter(|id| *id as usize >= tokens) {
            let role = "unk_id";
            return Err(VocabularyError::SpecialOutOfRange { role, id, tokens }.into());
        }
        let ids = (0u32..).zip(&file.vocab);
        let vocab = ids.map(|(id, (text, _))| (text.clone(), id)).collect();
        Ok(Pieces { file, vocab })
    }

    /// What a token of the vocabulary is for, as far as the model knows.
    pub(super) fn kind(&self, text: &str) -> TokenKind {
        let id = self.vocab.get(text).copied();
        match id {
            Some(_) if id == self.file.unk_id => TokenKind::Unknown,
            _ if self.file.byte_fallback && byte_token(text).is_some() => TokenKind::Byte,
            _ => TokenKind::Normal,
        }
    }

    /// The model, which finds none of the tokens in `special` in a text.
    pub(super) fn build(&self, special: &HashSet<&str>) -> Result<Unigram, TokenizerError> {
        let tokens = self.file.vocab.iter().map(|(text, score)| {
            let kind = match special.contains(text.as_str()) {
                true => TokenKind::Control,
                false => self.kind(text),
            };
            (text.as_str(), kind, *score)
        });
        Unigram::new(tokens, self.file.unk_id, self.file.byte_fallback)
    }
}
