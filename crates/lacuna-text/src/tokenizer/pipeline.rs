//! Text to ids: added tokens cut out, then words, then merging.
//!
//! The `tokenizers` crate merges; what comes before is done here, one word after another. Its own
//! `Tokenizer` holds a hundred bytes and more for every byte of a text at once, silently merges the
//! rest of a text into one word when a split pattern gives up, silently drops characters that have no
//! token, truncates to a length in the file, and cannot choose per call whether special tokens are
//! found in the text.
//!
//! So what encoding holds does not depend on the length of the text, but for its ids: a word is merged
//! at a time, and encoding ends when there are more ids than asked for. Two things are only correct as
//! a whole, and refused when the whole takes too much memory: a word in which no place
//! [may be cut](Bigrams), and text under rules of the crate.

use std::borrow::Cow;
use std::collections::HashMap;

use tokenizers::models::bpe::BPE;
use tokenizers::models::wordpiece::WordPiece;
use tokenizers::tokenizer::normalizer::{NormalizedString, Range};
use tokenizers::{AddedToken, Model, OffsetReferential, OffsetType, PreTokenizedString};

use super::added::{AddedTokens, Part};
use super::bigrams::Bigrams;
use super::error::{TokenizerError, excerpt};
use super::marked::{Marker, StandIns, restore};
use super::normalizer::{Normalizer, check_unbroken};
use super::pieces::push_byte_level;
use super::sentencepiece::{SentencePiece, VISIBLE_SPACE, escape};
use super::unigram::{self, Unigram};
use super::words::{self, Step};
use super::{EncodeLimits, ParseSpecial, TokenKind};

/// Words are merged as a whole up to this size, and longer ones where they cannot be cut. Larger than
/// words in any language, and little to hold.
const SEGMENT_BYTES: usize = 4096;
/// What merging takes of each byte of a word at most: symbols and candidates as `usize` and `u32`, and
/// tokens with their text and offsets, in lists that grow by doubling.
const MERGED_BYTES: usize = 256;
/// What rules of the `tokenizers` crate take of each byte of a text: words, each with its original, and
/// offsets of both.
const RULED_BYTES: usize = 256;

/// Text to ids, for one vocabulary.
#[derive(Debug)]
pub(super) struct Pipeline {
    added: AddedTokens,
    marker: Marker,
    algorithm: Algorithm,
}

/// What happens to the text between added tokens.
#[derive(Debug)]
pub(super) enum Algorithm {
    /// Ranked merges within words.
    Bpe {
        normalizer: Normalizer,
        steps: Vec<Step>,
        model: Box<BPE>,
        /// Where words may be cut; `None` if they merge only as a whole.
        bigrams: Option<Bigrams>,
    },
    /// Of each word the longest tokens, from its start on.
    WordPiece {
        normalizer: Normalizer,
        steps: Vec<Step>,
        model: Box<WordPiece>,
    },
    /// Of each word the pieces whose scores add up to most.
    Unigram {
        normalizer: Normalizer,
        steps: Vec<Step>,
        model: Box<Unigram>,
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

impl Pipeline {
    /// Joins an algorithm with the added tokens, whose ids are `ids`.
    pub(super) fn new(
        mut algorithm: Algorithm,
        added: &[AddedToken],
        ids: HashMap<String, u32>,
    ) -> Result<Pipeline, TokenizerError> {
        let none = Normalizer::default();
        let normalizer = match &mut algorithm {
            Algorithm::Bpe {
                model, normalizer, ..
            } => {
                // The crate would keep words for each thread that ever encoded, up to 8 MB each.
                model.resize_cache(0);
                normalizer
            }
            Algorithm::WordPiece { normalizer, .. } | Algorithm::Unigram { normalizer, .. } => {
                normalizer
            }
            Algorithm::SentencePiece { .. } => &none,
        };
        let marker = Marker::new(added)?;
        let added = AddedTokens::new(added, ids, normalizer)?;
        Ok(Pipeline {
            added,
            marker,
            algorithm,
        })
    }

    pub(super) fn marker(&self) -> &Marker {
        &self.marker
    }

    pub(super) fn id(&self, text: &str) -> Option<u32> {
        self.added.id(text).or_else(|| match &self.algorithm {
            Algorithm::Bpe { model, .. } => model.token_to_id(text),
            Algorithm::WordPiece { model, .. } => model.token_to_id(text),
            Algorithm::Unigram { model, .. } => model.id(text),
            Algorithm::SentencePiece { model, .. } => model.id(text),
        })
    }

    /// How many bytes of a text may count as one, where it shrinks before it is merged; `None` if any
    /// number may.
    pub(super) fn shrinks_to_one_in(&self) -> Option<usize> {
        match &self.algorithm {
            _ if self.added.take_white_space() => None,
            Algorithm::Bpe {
                normalizer,
                steps,
                model,
                ..
            } => {
                let joins = model.fuse_unk && model.unk_token.is_some();
                let removes = joins || steps.iter().any(Step::removes);
                normalizer.shrinks_to_one_in().filter(|_| !removes)
            }
            Algorithm::SentencePiece { model, .. } if !model.joins_unknown() => Some(1),
            // A word without tokens becomes one, however long it is.
            Algorithm::WordPiece { .. }
            | Algorithm::Unigram { .. }
            | Algorithm::SentencePiece { .. } => None,
        }
    }

    pub(super) fn algorithm(&self) -> &'static str {
        match self.algorithm {
            Algorithm::Bpe { .. } => "BPE",
            Algorithm::WordPiece { .. } => "WordPiece",
            Algorithm::Unigram { .. } => "Unigram",
            Algorithm::SentencePiece { .. } => "SentencePiece",
        }
    }

    /// The token as the vocabulary spells it, given what it decodes to.
    pub(super) fn text(&self, id: u32, bytes: &[u8], kind: TokenKind) -> Option<String> {
        if let Some(text) = self.added.text(id) {
            return Some(text.to_owned());
        }
        match (&self.algorithm, kind) {
            (Algorithm::Bpe { model, .. }, _) => model.id_to_token(id),
            (Algorithm::WordPiece { model, .. }, _) => model.id_to_token(id),
            (Algorithm::Unigram { .. } | Algorithm::SentencePiece { .. }, TokenKind::Byte) => {
                bytes.first().map(|byte| format!("<0x{byte:02X}>"))
            }
            (Algorithm::Unigram { .. } | Algorithm::SentencePiece { .. }, _) => {
                std::str::from_utf8(bytes)
                    .ok()
                    .map(|text| escape(text).into_owned())
            }
        }
    }

    /// Appends the ids of `text`, in which characters may stand for others, as long as there are no
    /// more than `limits` allow.
    pub(super) fn encode(
        &self,
        text: &str,
        stand_ins: &StandIns,
        parse: ParseSpecial,
        limits: &EncodeLimits,
        ids: &mut Vec<u32>,
    ) -> Result<(), TokenizerError> {
        let specials = parse == ParseSpecial::Yes;
        let encoder = Encoder {
            pipeline: self,
            specials,
            stand_ins,
            limits,
        };
        self.added.raw().cut(text, specials, |part| {
            match part {
                Part::Token(id) => ids.push(id),
                Part::Text(part) => encoder.encode(text, part, ids)?,
            }
            limits.check(ids)
        })
    }
}

/// One text on its way.
struct Encoder<'a> {
    pipeline: &'a Pipeline,
    specials: bool,
    /// They keep their place until no added token is looked for any more.
    stand_ins: &'a StandIns,
    limits: &'a EncodeLimits,
}

impl Encoder<'_> {
    /// Appends the ids of a part of `whole` that has no token which is found in text as it is.
    fn encode(&self, whole: &str, part: &str, ids: &mut Vec<u32>) -> Result<(), TokenizerError> {
        match &self.pipeline.algorithm {
            Algorithm::Bpe {
                normalizer, steps, ..
            }
            | Algorithm::WordPiece {
                normalizer, steps, ..
            }
            | Algorithm::Unigram {
                normalizer, steps, ..
            } => {
                if steps.iter().any(|step| matches!(step, Step::Rule(_))) {
                    let mut starts = std::ptr::eq(whole.as_ptr(), part.as_ptr());
                    let mut rest = part;
                    while !rest.is_empty() {
                        let len = match self.can_be_cut_at_spaces(normalizer, steps) {
                            true => segment_len(rest),
                            false => rest.len(),
                        };
                        let (part, tail) = rest.split_at(len);
                        self.encode_ruled(part, starts, normalizer, steps, ids)?;
                        (starts, rest) = (false, tail);
                    }
                    return Ok(());
                }
                let text = normalizer.normalize(part, self.limits.workspace_bytes)?;
                self.cut(
                    &text,
                    |part, ids| {
                        let part = self.stand_ins.plain(part);
                        words::cut(&part, steps, &mut |word| self.encode_word(word, ids))
                    },
                    ids,
                )
            }
            Algorithm::SentencePiece { model, prefix } => self.cut(
                part,
                |part, ids| {
                    let space = (*prefix == SpacePrefix::Add).then_some(VISIBLE_SPACE);
                    self.encode_pieces(space, &self.stand_ins.plain(part), model, ids)
                },
                ids,
            ),
        }
    }

    /// Cuts the tokens out that are found in normalized text, and hands the rest on.
    fn cut(
        &self,
        text: &str,
        mut encode: impl FnMut(&str, &mut Vec<u32>) -> Result<(), TokenizerError>,
        ids: &mut Vec<u32>,
    ) -> Result<(), TokenizerError> {
        let added = self.pipeline.added.normalized();
        added.cut(text, self.specials, |part| {
            match part {
                Part::Token(id) => ids.push(id),
                Part::Text(part) => encode(part, ids)?,
            }
            self.limits.check(ids)
        })
    }

    /// Whether parts of a text that begin with white space come to what the whole comes to.
    fn can_be_cut_at_spaces(&self, normalizer: &Normalizer, steps: &[Step]) -> bool {
        let mut rules = steps.iter().filter(|step| matches!(step, Step::Rule(_)));
        // What is found in normalized text may have white space in it.
        let found = self.pipeline.added.normalized();
        found.is_empty()
            && normalizer.can_be_cut_at_spaces()
            && steps.first().is_some_and(Step::cuts_at_spaces)
            && rules.all(Step::cuts_at_spaces)
    }

    /// The same for a text that rules of the crate cut: they know where in the text they are, so it
    /// stays one with its offsets, unless it can be cut at spaces.
    fn encode_ruled(
        &self,
        part: &str,
        starts: bool,
        normalizer: &Normalizer,
        steps: &[Step],
        ids: &mut Vec<u32>,
    ) -> Result<(), TokenizerError> {
        check_unbroken(part.len(), RULED_BYTES, self.limits.workspace_bytes)?;
        let mut text = match starts {
            true => NormalizedString::from(part),
            false => {
                let before = NormalizedString::from(format!(" {part}"));
                before.slice(Range::Original(1..)).unwrap_or_default()
            }
        };
        normalizer.apply(&mut text, true)?;
        let normalized = text.get().to_owned();
        self.cut(
            &normalized,
            |part, ids| {
                let at = part.as_ptr().addr() - normalized.as_ptr().addr();
                let part = text.slice(Range::Normalized(at..at + part.len()));
                let mut part = part.unwrap_or_default();
                restore(&mut part, self.stand_ins);
                let mut part = PreTokenizedString::from(part);
                let most = words::most_bytes(normalized.len());
                for step in steps {
                    apply(step, &mut part, most)?;
                }
                let words = part.get_splits(OffsetReferential::Normalized, OffsetType::None);
                words
                    .into_iter()
                    .try_for_each(|(word, ..)| self.encode_word(word, ids))
            },
            ids,
        )
    }

    /// Appends the ids of a word, in parts where it is long and can be cut.
    fn encode_word(&self, word: &str, ids: &mut Vec<u32>) -> Result<(), TokenizerError> {
        let (model, bigrams) = match &self.pipeline.algorithm {
            Algorithm::Bpe { model, bigrams, .. } => (model, bigrams),
            Algorithm::WordPiece { model, .. } => return self.longest_tokens(word, model, ids),
            Algorithm::Unigram { model, .. } => {
                let (bytes, workspace) = (unigram::BYTES_PER_BYTE, self.limits.workspace_bytes);
                check_unbroken(word.len(), bytes, workspace)?;
                model.encode(word, ids)?;
                return self.limits.check(ids);
            }
            Algorithm::SentencePiece { .. } => return Ok(()),
        };
        let Some(bigrams) = bigrams.as_ref().filter(|_| word.len() > SEGMENT_BYTES) else {
            return self.merge(word, model, ids);
        };
        let (mut start, mut last) = (0, None);
        for (at, character) in word.char_indices() {
            let cut = last.is_some_and(|last| !bigrams.may_join(last, character));
            if cut && at - start >= SEGMENT_BYTES / 2 {
                self.merge(&word[start..at], model, ids)?;
                start = at;
            }
            last = Some(character);
        }
        self.merge(&word[start..], model, ids)
    }

    fn longest_tokens(
        &self,
        word: &str,
        model: &WordPiece,
        ids: &mut Vec<u32>,
    ) -> Result<(), TokenizerError> {
        // It fails where a word has no tokens and there is no token for such words.
        let tokens = model.tokenize(word);
        let tokens = tokens.map_err(|_| TokenizerError::Unencodable {
            text: excerpt(word),
        })?;
        ids.extend(tokens.iter().map(|token| token.id));
        self.limits.check(ids)
    }

    fn merge(&self, word: &str, model: &BPE, ids: &mut Vec<u32>) -> Result<(), TokenizerError> {
        check_unbroken(word.len(), MERGED_BYTES, self.limits.workspace_bytes)?;
        let unencodable = || TokenizerError::Unencodable {
            text: excerpt(&self.as_written(word)),
        };
        let tokens = model.tokenize(word).map_err(|_| unencodable())?;
        // The crate leaves out characters it has no token for; the lengths then fall short.
        let covered = tokens.last().map_or(0, |token| token.offsets.1);
        if covered != word.len() {
            return Err(unencodable());
        }
        ids.extend(tokens.iter().map(|token| token.id));
        self.limits.check(ids)
    }

    /// A word as it stood in the text: merges see bytes as characters of GPT-2's alphabet, which
    /// whoever is to remove them would look for in vain.
    fn as_written<'word>(&self, word: &'word str) -> Cow<'word, str> {
        let Algorithm::Bpe { steps, .. } = &self.pipeline.algorithm else {
            return Cow::Borrowed(word);
        };
        if !steps.iter().any(|step| matches!(step, Step::Alphabet)) {
            return Cow::Borrowed(word);
        }
        let mut bytes = Vec::new();
        push_byte_level(word, &mut bytes);
        Cow::Owned(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Appends the ids of a text under SentencePiece, which merges across spaces where its pieces do.
    fn encode_pieces(
        &self,
        space: Option<char>,
        text: &str,
        model: &SentencePiece,
        ids: &mut Vec<u32>,
    ) -> Result<(), TokenizerError> {
        let escaped = text.chars().map(|character| match character {
            ' ' => VISIBLE_SPACE,
            other => other,
        });
        let mut unknown_before = false;
        let mut segment = String::new();
        for character in space.into_iter().chain(escaped) {
            let last = segment.chars().next_back();
            let cut = last.is_some_and(|last| model.parts(last, character));
            if cut && segment.len() >= SEGMENT_BYTES / 2 {
                model.encode(&segment, &mut unknown_before, ids)?;
                self.limits.check(ids)?;
                segment.clear();
            }
            segment.push(character);
            check_unbroken(segment.len(), MERGED_BYTES, self.limits.workspace_bytes)?;
        }
        model.encode(&segment, &mut unknown_before, ids)?;
        self.limits.check(ids)
    }
}

/// The length of the first part of a text that can be cut at spaces.
fn segment_len(text: &str) -> usize {
    let mut bytes = text.bytes().enumerate().skip(SEGMENT_BYTES);
    let space = bytes.find(|(_, byte)| byte.is_ascii_whitespace());
    space.map_or(text.len(), |(at, _)| at)
}

/// Cuts a text that is held with its offsets.
fn apply(step: &Step, text: &mut PreTokenizedString, most: usize) -> Result<(), TokenizerError> {
    step.apply(text)?;
    let words = text.get_splits(OffsetReferential::Normalized, OffsetType::None);
    let bytes = words.iter().map(|(word, ..)| word.len()).sum();
    match bytes > most {
        true => Err(TokenizerError::Growth {
            step: step.name().to_owned(),
            bytes,
            limit: most,
        }),
        false => Ok(()),
    }
}
