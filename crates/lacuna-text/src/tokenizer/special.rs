//! Special tokens: which of them end a generation.

use std::collections::BTreeSet;

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
