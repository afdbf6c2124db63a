//! WordPiece, the algorithm of BERT: of each word the longest token that it begins with, and of the rest
//! the longest that goes on with a word, and so on; a word for which that fails is unknown as a whole.

use serde_json::json;
use tokenizers::models::bpe::Vocab;
use tokenizers::models::wordpiece::WordPiece;

use super::error::TokenizerError;
use super::normalizer::Normalizer;
use super::parts;
use super::words::Step;

/// The token for words without others, where the file names none.
pub(super) const UNKNOWN: &str = "[UNK]";

/// Characters of a word beyond which it is unknown, as BERT has it, where the file does not say.
pub(super) const MOST_CHARACTERS: usize = 100;

/// What a file may ask for. A word costs the cube of its characters: each end is tried from each start, and
/// looking it up reads it.
const LARGEST_WORD: usize = 256;

/// The model of a vocabulary whose tokens that go on with a word begin with `##`.
pub(super) fn build(
    vocab: Vocab,
    unknown: &str,
    most_characters: usize,
) -> Result<WordPiece, TokenizerError> {
    if most_characters > LARGEST_WORD {
        return Err(TokenizerError::UnsupportedPart {
            part: "model option",
            kind: format!("max_input_chars_per_word above {LARGEST_WORD}"),
        });
    }
    let builder = WordPiece::builder()
        .vocab(vocab)
        .unk_token(unknown.to_owned())
        .max_input_chars_per_word(most_characters);
    builder.build().map_err(|error| TokenizerError::Part {
        part: "model",
        detail: error.to_string(),
    })
}

/// What BERT does to a text before: lower case without accents, and words cut at white space, around
/// punctuation and around each Chinese character. GGUF files do not say it; llama.cpp does it for all.
pub(super) fn uncased() -> Result<(Normalizer, Vec<Step>), TokenizerError> {
    let normalizer = parts::normalizer(Some(json!({
        "type": "BertNormalizer",
        "clean_text": true,
        "handle_chinese_chars": true,
        "strip_accents": true,
        "lowercase": true,
    })))?;
    let steps = parts::steps(Some(&json!({"type": "BertPreTokenizer"})))?;
    Ok((normalizer, steps))
}
