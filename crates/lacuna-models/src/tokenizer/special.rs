//! Special tokens: their ids, and which of them end a generation.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::{Model, Token};

/// Token texts with the ids they have in the file.
///
/// The `tokenizers` crate gives added tokens the ids that a model knows them by, and counts on for
/// the others. A file states every id, so this stands in for the model and states them.
#[derive(Debug, Default)]
pub(super) struct FixedIds(pub(super) HashMap<String, u32>);

impl Model for FixedIds {
    type Trainer = BpeTrainer;

    fn tokenize(&self, _: &str) -> tokenizers::Result<Vec<Token>> {
        Ok(Vec::new())
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        self.0.get(token).copied()
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        self.0
            .iter()
            .find(|entry| *entry.1 == id)
            .map(|entry| entry.0.clone())
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        self.0.clone()
    }

    fn get_vocab_size(&self) -> usize {
        self.0.len()
    }

    fn save(&self, _: &Path, _: Option<&str>) -> tokenizers::Result<Vec<PathBuf>> {
        Ok(Vec::new())
    }

    fn get_trainer(&self) -> <Self as Model>::Trainer {
        BPE::default().get_trainer()
    }
}

/// Texts of tokens that end a turn or a document in the published models.
const END_NAMES: &[&str] = &[
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|calls|>",
    "<|flush|>",
    "<end_of_turn>",
    "<end_of_utterance>",
    "<turn|>",
    "<|tool_response>",
    "<eos>",
    "</s>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "[e~[",
    "<\u{FF5C}end\u{2581}of\u{2581}sentence\u{FF5C}>",
];

/// The tokens that end a generation: the stated ones, and special tokens with a well-known name.
///
/// Two families use a well-known name for something else: where turns end with `<|return|>` and
/// `<|call|>` (or `<|calls|>` and `<|flush|>`), `<|end|>` only separates messages, and where they end
/// with `<|tool_response>`, `</s>` is ordinary text.
pub(super) fn end_of_generation(
    stated: impl IntoIterator<Item = u32>,
    special: impl Fn(&str) -> Option<u32>,
) -> BTreeSet<u32> {
    let has = |name: &str| special(name).is_some();
    let separates =
        (has("<|return|>") && has("<|call|>")) || (has("<|calls|>") && has("<|flush|>"));
    let ends = |name: &str| match name {
        "<|end|>" => !separates,
        "</s>" => !has("<|tool_response>"),
        _ => true,
    };
    let known = END_NAMES
        .iter()
        .filter(|name| ends(name))
        .filter_map(|name| special(name));
    known.chain(stated).collect()
}
