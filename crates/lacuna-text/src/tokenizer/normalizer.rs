//! Normalizing text within bounds.
//!
//! The steps are those of the `tokenizers` crate. It keeps sixteen bytes of offsets for each byte of a
//! text, so a text is normalized in chunks where every step lets it; and what a step may add is
//! checked before it runs, since a file of a few kilobytes can ask for thirty doublings.

use std::borrow::Cow;

use fancy_regex::Regex;
use tokenizers::tokenizer::normalizer::NormalizedString;
use tokenizers::{Normalizer as _, NormalizerWrapper};

use super::character_map::CharacterMap;
use super::error::TokenizerError;
use super::sentencepiece::VISIBLE_SPACE;

/// How many times its bytes a text may grow. Unicode's own normalizations make at most eleven of one.
const GROWTH: usize = 16;
/// What a short text may grow by besides.
const GROWTH_BYTES: usize = 256;
/// Bytes that are normalized at once where a text can be cut.
const CHUNK_BYTES: usize = 4096;
/// What the crate takes of each byte while it normalizes: two texts and their offsets, and the list of
/// changes from one to the other.
const BYTES_PER_BYTE: usize = 128;

/// The steps of a normalizer; none at all leave a text as it is.
#[derive(Debug, Default)]
pub(super) struct Normalizer(Vec<Step>);

#[derive(Debug)]
pub(super) struct Step {
    /// Its type in the file.
    pub(super) name: String,
    pub(super) act: Act,
    pub(super) effect: Effect,
}

/// What runs a step.
#[derive(Debug)]
pub(super) enum Act {
    /// The `tokenizers` crate.
    Crate(NormalizerWrapper),
    /// A map that the file brings.
    Map(CharacterMap),
}

/// What a step does, as far as bounds depend on it.
#[derive(Debug)]
pub(super) enum Effect {
    /// Unicode's normalizations and lower case: what comes before a letter of ASCII does not change
    /// what becomes of it. A text can shrink to this share of its bytes.
    Local { shrinks_to_one_in: usize },
    /// Puts so many bytes in front.
    Prepend(usize),
    /// Puts `content` for what is found.
    Replace {
        found: Regex,
        content: String,
        literal: Option<String>,
    },
    /// Removes characters, depending on what is around them.
    Remove,
}

impl Normalizer {
    pub(super) fn new(steps: Vec<Step>) -> Normalizer {
        Normalizer(steps)
    }

    /// Spaces become [`VISIBLE_SPACE`], nothing else changes: Gemma's normalizer.
    pub(super) fn visible_spaces() -> Result<Normalizer, TokenizerError> {
        super::parts::normalizer(Some(serde_json::json!({
            "type": "Replace",
            "pattern": {"String": " "},
            "content": VISIBLE_SPACE,
        })))
    }

    /// The normalized text, taking at most `workspace_bytes` besides it.
    pub(super) fn normalize<'a>(
        &self,
        text: &'a str,
        workspace_bytes: usize,
    ) -> Result<Cow<'a, str>, TokenizerError> {
        if self.0.is_empty() || text.is_empty() {
            return Ok(Cow::Borrowed(text));
        }
        let mut output = String::new();
        let mut rest = text;
        while !rest.is_empty() {
            let len = match self.can_be_cut() {
                true => chunk_len(rest),
                false => rest.len(),
            };
            let (chunk, tail) = rest.split_at(len);
            check_unbroken(chunk.len(), BYTES_PER_BYTE, workspace_bytes)?;
            let mut chunk = NormalizedString::from(chunk);
            self.apply(&mut chunk, rest.len() == text.len())?;
            output.push_str(chunk.get());
            rest = tail;
        }
        Ok(Cow::Owned(output))
    }

    /// Runs the steps on a text, or on a chunk of one; only the `first` is put something in front of.
    pub(super) fn apply(
        &self,
        text: &mut NormalizedString,
        first: bool,
    ) -> Result<(), TokenizerError> {
        let most = text
            .get()
            .len()
            .saturating_mul(GROWTH)
            .saturating_add(GROWTH_BYTES);
        for (index, step) in self.0.iter().enumerate() {
            if !first && matches!(step.effect, Effect::Prepend(_)) {
                continue;
            }
            let bytes = step.bytes(text.get());
            let growth = |bytes| TokenizerError::Growth {
                step: format!("normalizer {} ({})", index + 1, step.name),
                bytes,
                limit: most,
            };
            if bytes > most {
                return Err(growth(bytes));
            }
            match &step.act {
                Act::Map(map) => map.apply(text, most).map_err(growth)?,
                Act::Crate(wrapper) => {
                    let done = wrapper.normalize(text);
                    done.map_err(|error| TokenizerError::Part {
                        part: "normalizer",
                        detail: error.to_string(),
                    })?;
                }
            }
        }
        Ok(())
    }

    /// How many bytes of a text may become one; `None` if there is no telling.
    pub(super) fn shrinks_to_one_in(&self) -> Option<usize> {
        let mut steps = self.0.iter().map(|step| step.effect.shrinks_to_one_in());
        steps.try_fold(1usize, |all, step| Some(all.saturating_mul(step?)))
    }

    /// Whether a text comes to the same in parts that begin with white space. BERT's step takes
    /// characters one by one, but for accents, and none of these is on white space.
    pub(super) fn can_be_cut_at_spaces(&self) -> bool {
        self.0.iter().all(|step| {
            step.name == "BertNormalizer" || matches!(step.effect, Effect::Local { .. })
        })
    }

    /// Whether what comes before a character that [is a start](is_start) never matters to it.
    fn can_be_cut(&self) -> bool {
        let mut steps = self.0.iter().enumerate();
        steps.all(|(index, step)| match &step.effect {
            Effect::Local { .. } => true,
            Effect::Prepend(_) => index == 0,
            Effect::Replace {
                content,
                literal: Some(literal),
                ..
            } => literal.chars().count() == 1 && content.starts_with(is_start),
            Effect::Replace { .. } | Effect::Remove => false,
        })
    }
}

impl Step {
    /// Bytes that `text` may have after this step.
    fn bytes(&self, text: &str) -> usize {
        match &self.effect {
            Effect::Local { .. } | Effect::Remove => text.len(),
            Effect::Prepend(bytes) => text.len() + bytes,
            Effect::Replace { found, content, .. } => {
                // The crate, too, stops where a pattern gives up.
                let found = found.find_iter(text).map_while(Result::ok).count();
                text.len()
                    .saturating_add(found.saturating_mul(content.len()))
            }
        }
    }
}

impl Effect {
    fn shrinks_to_one_in(&self) -> Option<usize> {
        match self {
            Effect::Local { shrinks_to_one_in } => Some(*shrinks_to_one_in),
            Effect::Prepend(_) => Some(1),
            Effect::Replace {
                content,
                literal: Some(literal),
                ..
            } if !content.is_empty() => Some(literal.len().div_ceil(content.len())),
            Effect::Replace { .. } | Effect::Remove => None,
        }
    }
}

/// Refuses to work on so many bytes at once when that takes more than there is.
pub(super) fn check_unbroken(
    bytes: usize,
    bytes_per_byte: usize,
    workspace_bytes: usize,
) -> Result<(), TokenizerError> {
    let limit = workspace_bytes / bytes_per_byte;
    match bytes > limit {
        true => Err(TokenizerError::Unbroken { bytes, limit }),
        false => Ok(()),
    }
}

/// The length of the first chunk: up to a start after [`CHUNK_BYTES`], or all.
fn chunk_len(text: &str) -> usize {
    let mut characters = text.char_indices();
    let start = characters.find(|(at, character)| *at >= CHUNK_BYTES && is_start(*character));
    start.map_or(text.len(), |(at, _)| at)
}

/// Whether a character stays as it is whatever precedes it: no normalization joins it to that, and
/// whatever it becomes begins with such a character again. ASCII, SentencePiece's space, and the
/// letters of scripts that are written without combining marks: Han, Hangul syllables, kana.
fn is_start(character: char) -> bool {
    character.is_ascii()
        || matches!(character,
            '\u{2581}' | '\u{4E00}'..='\u{9FFF}' | '\u{AC00}'..='\u{D7A3}'
            | '\u{3041}'..='\u{3096}' | '\u{30A1}'..='\u{30FA}')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::super::parts;
    use super::*;

    fn normalizer(steps: Value) -> Normalizer {
        let value = json!({"type": "Sequence", "normalizers": steps});
        parts::normalizer(Some(value)).expect("known steps")
    }

    fn whole(normalizer: &Normalizer, text: &str) -> String {
        let mut text = NormalizedString::from(text);
        normalizer.apply(&mut text, true).expect("no growth");
        text.get().to_owned()
    }

    fn text() -> impl Strategy<Value = String> {
        let part = prop_oneof![
            Just("e\u{301}\u{327}".to_owned()),
            Just("\u{1100}\u{1161}\u{11A8}".to_owned()),
            Just("\u{212B}\u{FB01}\u{FDFA}".to_owned()),
            Just(" ".to_owned()),
            Just("か\u{3099}日本".to_owned()),
            ".{0,8}",
            "[a-zA-Z ]{0,2000}",
        ];
        prop::collection::vec(part, 0..40).prop_map(|parts| parts.concat())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn chunks_come_to_what_the_whole_comes_to(text in text()) {
            let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"});
            for steps in [
                json!([{"type": "NFC"}]),
                json!([{"type": "NFD"}, {"type": "Lowercase"}]),
                json!([{"type": "NFKC"}, replace.clone()]),
                json!([{"type": "Prepend", "prepend": "\u{2581}"}, replace, {"type": "NFKD"}]),
            ] {
                let normalizer = normalizer(steps.clone());
                prop_assert!(normalizer.can_be_cut(), "{}", steps);
                let found = normalizer.normalize(&text, usize::MAX).expect("no growth");
                prop_assert_eq!(found, whole(&normalizer, &text), "{}", steps);
            }
        }
    }

    #[test]
    fn a_text_shrinks_no_more_than_is_said() {
        for (name, most) in [
            ("NFC", 4),
            ("NFD", 4),
            ("NFKC", 8),
            ("NFKD", 8),
            ("Lowercase", 4),
        ] {
            let normalizer = normalizer(json!([{"type": name}]));
            assert_eq!(normalizer.shrinks_to_one_in(), Some(most));
            for character in ('\0'..=char::MAX).filter(|c| !c.is_ascii()) {
                let text = character.to_string();
                let after = whole(&normalizer, &text).len();
                assert!(text.len() <= after * most, "{name} of {character:?}");
            }
        }
    }

    #[test]
    fn what_removes_text_or_looks_around_is_never_cut() {
        for step in [
            json!({"type": "Strip", "strip_left": true, "strip_right": true}),
            json!({"type": "StripAccents"}),
            json!({"type": "Replace", "pattern": {"String": "ab"}, "content": "c"}),
            json!({"type": "Replace", "pattern": {"Regex": "a"}, "content": "c"}),
            json!({"type": "Replace", "pattern": {"String": "a"}, "content": ""}),
        ] {
            let normalizer = normalizer(json!([{"type": "NFC"}, step]));
            assert!(!normalizer.can_be_cut(), "{step}");
        }
    }
}
