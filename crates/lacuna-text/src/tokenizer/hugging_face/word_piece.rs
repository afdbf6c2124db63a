//! The `model` object of `tokenizer.json` where it is WordPiece.

use serde::Deserialize;
use tokenizers::models::bpe::Vocab;
use tokenizers::models::wordpiece::WordPiece;

use super::super::error::TokenizerError;
use super::super::pieces::CONTINUES;
use super::super::word_piece;

/// A vocabulary of whole words and of parts that go on with one.
#[derive(Deserialize)]
pub(super) struct WordPieces {
    pub(super) vocab: Vocab,
    #[serde(default = "unknown")]
    unk_token: String,
    #[serde(default = "prefix")]
    continuing_subword_prefix: String,
    #[serde(default = "most_characters")]
    max_input_chars_per_word: usize,
}

fn unknown() -> String {
    word_piece::UNKNOWN.to_owned()
}

fn prefix() -> String {
    CONTINUES.to_owned()
}

fn most_characters() -> usize {
    word_piece::MOST_CHARACTERS
}

impl WordPieces {
    pub(super) fn read(text: &str) -> Result<WordPieces, TokenizerError> {
        let pieces: WordPieces = super::json("tokenizer.json", text)?;
        if pieces.continuing_subword_prefix != CONTINUES {
            return Err(TokenizerError::UnsupportedPart {
                part: "model option",
                kind: "continuing_subword_prefix".to_owned(),
            });
        }
        Ok(pieces)
    }

    pub(super) fn build(self) -> Result<WordPiece, TokenizerError> {
        word_piece::build(self.vocab, &self.unk_token, self.max_input_chars_per_word)
    }
}
