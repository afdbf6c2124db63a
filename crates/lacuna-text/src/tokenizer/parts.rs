//! The components of `tokenizer.json` other than the model.
//!
//! Each is matched by its type before its library sees it, so that what is not supported is named,
//! and what the library panics on never reaches it.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::tokenizer::normalizer::SplitDelimiterBehavior;

use super::character_map::CharacterMap;
use super::error::{TokenizerError, excerpt};
use super::normalizer::{self, Act, Effect, Normalizer};
use super::pieces::{CONTINUES, Spelling};

use super::stream::Leading;
use super::words::{Pattern, Step};

const NORMALIZER: &str = "normalizer";
const PRE_TOKENIZER: &str = "pre_tokenizer";
const POST_PROCESSOR: &str = "post_processor";
const DECODER: &str = "decoder";

/// How ids become text.
#[derive(Clone, Copy, Debug)]
pub(super) struct Decoder {
    pub(super) spelling: Spelling,
    pub(super) leading: Leading,
}

/// The ids that go around a text.
#[derive(Debug, Default)]
pub(super) struct Surround {
    pub(super) before: Vec<u32>,
    /// Between two that are given as one.
    pub(super) between: Vec<u32>,
    pub(super) after: Vec<u32>,
}

impl Surround {
    /// This, or what `other` says if this adds nothing.
    pub(super) fn or_else(self, other: impl FnOnce() -> Surround) -> Surround {
        if self.before.is_empty() && self.after.is_empty() {
            other()
        } else {
            self
        }
    }
}

/// The normalizer; one without steps if the file has none.
pub(super) fn normalizer(value: Option<Value>) -> Result<Normalizer, TokenizerError> {
    let mut steps = Vec::new();
    if let Some(value) = value.filter(|value| !value.is_null()) {
        add_normalizer(&value, &mut steps)?;
    }
    Ok(Normalizer::new(steps))
}

fn add_normalizer(value: &Value, steps: &mut Vec<normalizer::Step>) -> Result<(), TokenizerError> {
    let name = kind(value);
    let effect = match name {
        "Sequence" => {
            return list(value, "normalizers")
                .iter()
                .try_for_each(|inner| add_normalizer(inner, steps));
        }
        // Some characters of four bytes are one of ASCII with a font; those whose only relation is
        // canonical have three bytes for one, and compose.
        "NFKC" | "NFKD" => Effect::Local {
            shrinks_to_one_in: 8,
        },
        "NFC" | "NFD" | "Lowercase" => Effect::Local {
            shrinks_to_one_in: 4,
        },
        "Prepend" => {
            let text = value.get("prepend").and_then(Value::as_str);
            Effect::Prepend(text.map_or(0, str::len))
        }
        "StripAccents" | "Strip" | "BertNormalizer" => Effect::Remove,
        "Replace" => replacement(value)?,
        "Precompiled" => {
            steps.push(normalizer::Step {
                name: name.to_owned(),
                act: Act::Map(character_map(value)?),
                effect: Effect::Remove,
            });
            return Ok(());
        }
        other => return Err(unsupported(NORMALIZER, other)),
    };
    steps.push(normalizer::Step {
        name: name.to_owned(),
        act: Act::Crate(build(NORMALIZER, value)?),
        effect,
    });
    Ok(())
}

/// SentencePiece's map, which the file has in base64; none at all replaces nothing.
fn character_map(value: &Value) -> Result<CharacterMap, TokenizerError> {
    let text = value.get("precompiled_charsmap").and_then(Value::as_str);
    let bytes = BASE64_STANDARD.decode(text.unwrap_or_default());
    let bytes = bytes.map_err(|error| part(NORMALIZER, error))?;
    CharacterMap::new(&bytes)
}

fn replacement(value: &Value) -> Result<Effect, TokenizerError> {
    let found = replaced(value).filter(|(pattern, _)| !pattern.is_empty());
    let (pattern, content) = found.ok_or_else(|| unsupported(NORMALIZER, "Replace"))?;
    let is_literal = value["pattern"].get("String").is_some();
    let found = match is_literal {
        true => fancy_regex::Regex::new(&fancy_regex::escape(pattern)),
        false => fancy_regex::Regex::new(pattern),
    };
    Ok(Effect::Replace {
        found: found.map_err(|error| part(NORMALIZER, error))?,
        content: content.to_owned(),
        literal: is_literal.then(|| pattern.to_owned()),
    })
}

/// The cuts into words, in order.
pub(super) fn steps(value: Option<&Value>) -> Result<Vec<Step>, TokenizerError> {
    let mut steps = Vec::new();
    if let Some(value) = value.filter(|value| !value.is_null()) {
        add_steps(value, &mut steps)?;
    }
    Ok(steps)
}

fn add_steps(value: &Value, steps: &mut Vec<Step>) -> Result<(), TokenizerError> {
    match kind(value) {
        "Sequence" => {
            for part in list(value, "pretokenizers") {
                add_steps(part, steps)?;
            }
        }
        "Split" => steps.push(split_step(value)?),
        "ByteLevel" => add_byte_level(build(PRE_TOKENIZER, value)?, steps)?,
        "Digits" => steps.push(digits_step(value)),
        "BertPreTokenizer" | "Punctuation" | "Whitespace" | "WhitespaceSplit" | "Metaspace"
        | "UnicodeScripts" | "CharDelimiterSplit" => {
            let rule: PreTokenizerWrapper = build(PRE_TOKENIZER, value)?;
            steps.push(Step::Rule(Box::new(rule)));
        }
        other => return Err(unsupported(PRE_TOKENIZER, other)),
    }
    Ok(())
}

/// Each digit alone, or runs of them.
fn digits_step(value: &Value) -> Step {
    let individual = value.get("individual_digits").and_then(Value::as_bool);
    Step::Split {
        pattern: Pattern::Numeric,
        behavior: match individual {
            Some(true) => SplitDelimiterBehavior::Isolated,
            _ => SplitDelimiterBehavior::Contiguous,
        },
        inverted: false,
    }
}

/// The byte-level step, with its own word pattern as a step that reports when it gives up.
fn add_byte_level(byte_level: ByteLevel, steps: &mut Vec<Step>) -> Result<(), TokenizerError> {
    if byte_level.add_prefix_space {
        // The prefix belongs in front of the cut, so the crate's step does both.
        let rule = PreTokenizerWrapper::ByteLevel(byte_level);
        steps.push(Step::Rule(Box::new(rule)));
        return Ok(());
    }
    if byte_level.use_regex {
        steps.push(Step::isolate(super::pre::GPT2).map_err(|error| part(PRE_TOKENIZER, error))?);
    }
    steps.push(Step::Alphabet);
    Ok(())
}

fn split_step(value: &Value) -> Result<Step, TokenizerError> {
    #[derive(Deserialize)]
    enum Text {
        String(String),
        Regex(String),
    }
    #[derive(Deserialize)]
    struct Split {
        pattern: Text,
        behavior: SplitDelimiterBehavior,
        #[serde(default)]
        invert: bool,
    }
    let split: Split = build(PRE_TOKENIZER, value)?;
    let pattern = match split.pattern {
        Text::Regex(pattern) => pattern,
        Text::String(text) => fancy_regex::escape(&text).into_owned(),
    };
    let pattern = Pattern::of(&pattern).map_err(|error| part(PRE_TOKENIZER, error))?;
    Ok(Step::Split {
        pattern,
        behavior: split.behavior,
        inverted: split.invert,
    })
}

/// How the file's decoder spells and strips.
///
/// Known are the byte-level decoder, `Metaspace`, SentencePiece's sequence of `Replace`,
/// `ByteFallback`, `Fuse` and `Strip`, and `WordPiece` without what it does about punctuation.
pub(super) fn decoder(value: Option<&Value>) -> Result<Decoder, TokenizerError> {
    let mut decoder = None;
    let mut fused = false;
    let value = value.ok_or_else(|| unsupported(DECODER, "null"))?;
    let single = std::slice::from_ref(value);
    let all = if kind(value) == "Sequence" {
        list(value, "decoders")
    } else {
        single
    };
    for one in all {
        match kind(one) {
            "ByteLevel" => decoder = Some((Spelling::ByteLevel, Leading::Keep)),
            "Metaspace" => decoder = Some((Spelling::SentencePiece, metaspace_leading(one))),
            "Replace" if replaced(one) == Some(("\u{2581}", " ")) => {
                decoder = Some((Spelling::SentencePiece, Leading::Keep));
            }
            "WordPiece" if one.get("prefix").and_then(Value::as_str) == Some(CONTINUES) => {
                decoder = Some((Spelling::WordPiece, Leading::StripOne));
            }
            "ByteFallback" => {}
            "Fuse" => fused = true,
            "Strip" if fused && strips_one_space(one) => {
                decoder = decoder.map(|(spelling, _)| (spelling, Leading::StripOne));
            }
            other => return Err(unsupported(DECODER, other)),
        }
    }
    let (spelling, leading) = decoder.ok_or_else(|| unsupported(DECODER, kind(value)))?;
    Ok(Decoder { spelling, leading })
}

fn metaspace_leading(value: &Value) -> Leading {
    let never = value.get("prepend_scheme").and_then(Value::as_str) == Some("never");
    let no_prefix = value.get("add_prefix_space").and_then(Value::as_bool) == Some(false);
    if never || no_prefix {
        Leading::Keep
    } else {
        Leading::StripFirstToken
    }
}

fn strips_one_space(value: &Value) -> bool {
    let number = |key: &str| value.get(key).and_then(Value::as_u64);
    value.get("content").and_then(Value::as_str) == Some(" ")
        && number("start") == Some(1)
        && number("stop") == Some(0)
}

/// The ids that the post-processor puts around a single text.
pub(super) fn surround(value: Option<&Value>) -> Result<Surround, TokenizerError> {
    let Some(value) = value.filter(|value| !value.is_null()) else {
        return Ok(Surround::default());
    };
    match kind(value) {
        "ByteLevel" => Ok(Surround::default()),
        "TemplateProcessing" => template(value),
        "BertProcessing" | "RobertaProcessing" => {
            let id = |key: &str| Some(vec![value.get(key)?.get(1)?.as_u64()?.try_into().ok()?]);
            let ids = id("cls").zip(id("sep"));
            let (before, after) =
                ids.ok_or_else(|| part(POST_PROCESSOR, "cls and sep lack ids"))?;
            // RoBERTa ends the first text and begins the second with it.
            let times = if kind(value) == "BertProcessing" {
                1
            } else {
                2
            };
            Ok(Surround {
                between: after.repeat(times),
                before,
                after,
            })
        }
        "Sequence" => {
            let mut all = Surround::default();
            for inner in list(value, "processors") {
                let mut outer = surround(Some(inner))?;
                outer.before.append(&mut all.before);
                all.after.append(&mut outer.after);
                all.before = outer.before;
                if !outer.between.is_empty() {
                    all.between = outer.between;
                }
            }
            Ok(all)
        }
        other => Err(unsupported(POST_PROCESSOR, other)),
    }
}

/// A template such as `<s> $A </s>`, as ids before and after the text.
fn template(value: &Value) -> Result<Surround, TokenizerError> {
    let mut surround = Surround::default();
    let mut texts = 0;
    for item in list(value, "single") {
        if item.get("Sequence").is_some() {
            texts += 1;
            continue;
        }
        let ids = template_ids(value, item)
            .ok_or_else(|| part(POST_PROCESSOR, "its template names a token without ids"))?;
        let side = if texts == 0 {
            &mut surround.before
        } else {
            &mut surround.after
        };
        side.extend(ids);
    }
    surround.between = between(value)?;
    match texts {
        1 => Ok(surround),
        _ => Err(part(
            POST_PROCESSOR,
            "its template does not have the text exactly once",
        )),
    }
}

/// What a template for two texts has between them; nothing where there is none. What it has around them is
/// what one text has.
fn between(value: &Value) -> Result<Vec<u32>, TokenizerError> {
    let items = list(value, "pair").iter();
    let after_first = items
        .skip_while(|item| item.get("Sequence").is_none())
        .skip(1);
    let items = after_first.take_while(|item| item.get("Sequence").is_none());
    let mut between = Vec::new();
    for item in items {
        let ids = template_ids(value, item)
            .ok_or_else(|| part(POST_PROCESSOR, "its template names a token without ids"))?;
        between.extend(ids);
    }
    Ok(between)
}

fn template_ids(template: &Value, item: &Value) -> Option<Vec<u32>> {
    let name = item.get("SpecialToken")?.get("id")?.as_str()?;
    let ids = template
        .get("special_tokens")?
        .get(name)?
        .get("ids")?
        .as_array()?;
    ids.iter().map(|id| id.as_u64()?.try_into().ok()).collect()
}

/// The fixed text that a `Replace` looks for, and what it puts there.
fn replaced(value: &Value) -> Option<(&str, &str)> {
    let pattern = value.get("pattern")?;
    let text = pattern
        .get("String")
        .or_else(|| pattern.get("Regex"))?
        .as_str()?;
    Some((text, value.get("content")?.as_str()?))
}

fn kind(value: &Value) -> &str {
    value
        .get("type")
        .and_then(Value::as_str)
        .unwrap_or("without a type")
}

fn list<'a>(value: &'a Value, key: &str) -> &'a [Value] {
    value
        .get(key)
        .and_then(Value::as_array)
        .map_or(&[], Vec::as_slice)
}

fn build<T: DeserializeOwned>(name: &'static str, value: &Value) -> Result<T, TokenizerError> {
    T::deserialize(value).map_err(|error| part(name, error))
}

fn part(part: &'static str, detail: impl ToString) -> TokenizerError {
    TokenizerError::Part {
        part,
        detail: detail.to_string(),
    }
}

fn unsupported(part: &'static str, kind: &str) -> TokenizerError {
    TokenizerError::UnsupportedPart {
        part,
        kind: excerpt(kind),
    }
}
