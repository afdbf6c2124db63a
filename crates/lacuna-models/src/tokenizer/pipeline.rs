//! Text to ids: special tokens cut out, then words, then merging.
//!
//! The steps are those of the `tokenizers` crate, called one by one instead of through its
//! `Tokenizer`: that one silently merges the rest of a text into one word when a split pattern gives
//! up, silently drops characters that have no token, truncates to a length in the file, and cannot
//! choose per call whether special tokens are found in the text.

use fancy_regex::Regex;
use tokenizers::models::bpe::BPE;
use tokenizers::tokenizer::normalizer::SplitDelimiterBehavior;
use tokenizers::tokenizer::pattern::Invert;
use tokenizers::{
    AddedToken, AddedVocabulary, Model, NormalizerWrapper, OffsetReferential, OffsetType,
    PreTokenizedString, PreTokenizer, PreTokenizerWrapper, Token,
};

use super::error::{TokenizerError, VocabularyError, excerpt};
use super::sentencepiece::{SentencePiece, escape};
use super::special::FixedIds;
use super::{ParseSpecial, TokenKind};

/// How many words each thread remembers the merging of. The crate never frees them.
const CACHED_WORDS: usize = 1024;

/// Text to ids, for one vocabulary.
#[derive(Debug)]
pub(super) struct Pipeline {
    /// Finds every added token.
    markup: AddedVocabulary,
    /// Finds those added tokens that are not special.
    plain: AddedVocabulary,
    algorithm: Algorithm,
}

/// What happens to the text between added tokens.
#[derive(Debug)]
pub(super) enum Algorithm {
    /// Ranked merges within words.
    Bpe {
        normalizer: Option<NormalizerWrapper>,
        steps: Vec<Step>,
        model: Box<BPE>,
    },
    /// Scored merges over the whole text.
    SentencePiece {
        model: SentencePiece,
        prefix: SpacePrefix,
    },
}

/// Whether a text, and what follows a special token, gets a space in front.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SpacePrefix {
    Add,
    Leave,
}

/// One cut of the text into words.
#[derive(Debug)]
pub(super) enum Step {
    /// By a pattern.
    Split {
        pattern: Box<Regex>,
        behavior: SplitDelimiterBehavior,
        inverted: bool,
    },
    /// By a rule of the `tokenizers` crate that has no pattern to give up on.
    Rule(Box<PreTokenizerWrapper>),
}

impl Step {
    /// The step that isolates each match of `pattern`.
    pub(super) fn isolate(pattern: &str) -> Result<Step, fancy_regex::Error> {
        Ok(Step::Split {
            pattern: Box::new(Regex::new(pattern)?),
            behavior: SplitDelimiterBehavior::Isolated,
            inverted: false,
        })
    }

    fn apply(&self, text: &mut PreTokenizedString) -> Result<(), TokenizerError> {
        let result = match self {
            Step::Rule(rule) => rule.pre_tokenize(text),
            Step::Split {
                pattern,
                behavior,
                inverted: false,
            } => text.split(|_, part| part.split(pattern.as_ref(), *behavior)),
            Step::Split {
                pattern,
                behavior,
                inverted: true,
            } => text.split(|_, part| part.split(Invert(pattern.as_ref()), *behavior)),
        };
        result.map_err(|error| TokenizerError::PreTokenizer {
            detail: error.to_string(),
        })
    }
}

impl Pipeline {
    /// Joins an algorithm with the added tokens, whose ids are `ids`.
    pub(super) fn new(
        mut algorithm: Algorithm,
        added: &[AddedToken],
        ids: &FixedIds,
    ) -> Result<Pipeline, TokenizerError> {
        let normalizer = match &mut algorithm {
            Algorithm::Bpe {
                model, normalizer, ..
            } => {
                model.resize_cache(CACHED_WORDS);
                normalizer.as_ref()
            }
            Algorithm::SentencePiece { .. } => None,
        };
        let mut markup = AddedVocabulary::new();
        markup
            .add_tokens(added.iter().cloned(), ids, normalizer)
            .map_err(|error| {
                TokenizerError::Vocabulary(VocabularyError::Special {
                    detail: error.to_string(),
                })
            })?;
        let mut plain = markup.clone();
        plain.set_encode_special_tokens(true);
        Ok(Pipeline {
            markup,
            plain,
            algorithm,
        })
    }

    pub(super) fn id(&self, text: &str) -> Option<u32> {
        let added = self.markup.get_vocab().get(text).copied();
        added.or_else(|| match &self.algorithm {
            Algorithm::Bpe { model, .. } => model.token_to_id(text),
            Algorithm::SentencePiece { model, .. } => model.id(text),
        })
    }

    pub(super) fn algorithm(&self) -> &'static str {
        match self.algorithm {
            Algorithm::Bpe { .. } => "BPE",
            Algorithm::SentencePiece { .. } => "SentencePiece",
        }
    }

    /// The token as the vocabulary spells it, given what it decodes to.
    pub(super) fn text(&self, id: u32, bytes: &[u8], kind: TokenKind) -> Option<String> {
        if let Some(added) = self.markup.get_added_tokens_decoder().get(&id) {
            return Some(added.content.clone());
        }
        match (&self.algorithm, kind) {
            (Algorithm::Bpe { model, .. }, _) => model.id_to_token(id),
            (Algorithm::SentencePiece { .. }, TokenKind::Byte) => {
                bytes.first().map(|byte| format!("<0x{byte:02X}>"))
            }
            (Algorithm::SentencePiece { .. }, _) => std::str::from_utf8(bytes).ok().map(escape),
        }
    }

    /// Appends the ids of `text`.
    pub(super) fn encode(
        &self,
        text: &str,
        parse: ParseSpecial,
        ids: &mut Vec<u32>,
    ) -> Result<(), TokenizerError> {
        if text.is_empty() {
            return Ok(());
        }
        let added = match parse {
            ParseSpecial::Yes => &self.markup,
            ParseSpecial::No => &self.plain,
        };
        match &self.algorithm {
            Algorithm::Bpe {
                normalizer,
                steps,
                model,
            } => {
                let text = added.extract_and_normalize(normalizer.as_ref(), text);
                encode_words(text, steps, model, ids)
            }
            Algorithm::SentencePiece { model, prefix } => {
                let text = added.extract_and_normalize::<NormalizerWrapper>(None, text);
                encode_pieces(&text, model, *prefix, ids)
            }
        }
    }
}

fn encode_words(
    mut text: PreTokenizedString,
    steps: &[Step],
    model: &BPE,
    ids: &mut Vec<u32>,
) -> Result<(), TokenizerError> {
    for step in steps {
        step.apply(&mut text)?;
    }
    for (word, _, found) in splits(&text) {
        match found {
            Some(tokens) => ids.extend(tokens.iter().map(|token| token.id)),
            None => encode_word(word, model, ids)?,
        }
    }
    Ok(())
}

fn encode_word(word: &str, model: &BPE, ids: &mut Vec<u32>) -> Result<(), TokenizerError> {
    let unencodable = || TokenizerError::Unencodable {
        text: excerpt(word),
    };
    let tokens = model.tokenize(word).map_err(|_| unencodable())?;
    // The crate leaves out characters it has no token for; the lengths then fall short.
    let covered = tokens.last().map_or(0, |token| token.offsets.1);
    if covered != word.len() {
        return Err(unencodable());
    }
    ids.extend(tokens.iter().map(|token| token.id));
    Ok(())
}

fn encode_pieces(
    text: &PreTokenizedString,
    model: &SentencePiece,
    prefix: SpacePrefix,
    ids: &mut Vec<u32>,
) -> Result<(), TokenizerError> {
    for (part, _, found) in splits(text) {
        match found {
            Some(tokens) => ids.extend(tokens.iter().map(|token| token.id)),
            None if part.is_empty() => {}
            None if prefix == SpacePrefix::Add => {
                model.encode(&escape(&format!(" {part}")), ids)?
            }
            None => model.encode(&escape(part), ids)?,
        }
    }
    Ok(())
}

type Part<'a> = (&'a str, (usize, usize), &'a Option<Vec<Token>>);

fn splits(text: &PreTokenizedString) -> Vec<Part<'_>> {
    text.get_splits(OffsetReferential::Normalized, OffsetType::None)
}
