//! A model's vocabulary as `llguidance` reads it.

use std::sync::Arc;

use lacuna_models::Model;
use lacuna_text::tokenizer::{TokenKind, Tokenizer};
use toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};

/// Bytes of every token, special ones marked as such. `None` when no token ends a text, so that a
/// reply could never be known to be over.
pub(super) fn of(model: &Model) -> Option<TokEnv> {
    let tokenizer = model.tokenizer();
    let ends: Vec<u32> = tokenizer.end_of_generation().collect();
    let words: Vec<Vec<u8>> = (0..tokenizer.vocab_size())
        .map(|id| word(tokenizer, id))
        .collect();
    let info = TokRxInfo::new(tokenizer.vocab_size(), *ends.first()?);
    let trie = TokTrie::from(&info, &words).with_eos_tokens(&ends);
    Some(Arc::new(ApproximateTokEnv::new(trie)))
}

fn word(tokenizer: &Tokenizer, id: u32) -> Vec<u8> {
    let bytes = tokenizer.token_bytes(id).unwrap_or_default();
    let marker = TokTrie::SPECIAL_TOKEN_MARKER;
    match tokenizer.kind(id) {
        Some(kind) if kind.is_special() => [&[marker], bytes].concat(),
        None | Some(TokenKind::Unused) => Vec::new(),
        // No UTF-8 text has this byte, so the token is never part of one.
        Some(_) if bytes.first() == Some(&marker) => Vec::new(),
        Some(_) => bytes.to_vec(),
    }
}
