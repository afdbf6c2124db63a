//! Tokenizers: text to token ids and back.
//!
//! A [`Tokenizer`] comes from a Hugging Face folder ([`Tokenizer::from_folder`]) or from the
//! vocabulary in a GGUF file ([`GgufVocabulary`]); what it does afterwards does not depend on which.
//! Four algorithms are run: byte-level BPE and WordPiece by the `tokenizers` crate, and SentencePiece's
//! scored merging and unigram model. What either cannot run is an error when it is built, never a guess.
//!
//! Encoding costs `O(n log n)` in the text, and memory for the longest word in it; decoding costs the
//! bytes it writes. A vocabulary of 150,000 tokens takes a fraction of a second to build and some
//! 30 MB.

mod added;
mod bigrams;
mod character_map;
mod error;
mod files;
mod gguf;
mod hugging_face;
mod marked;
mod normalizer;
mod parts;
mod pieces;
mod pipeline;
mod pre;
mod sentencepiece;
mod special;
mod stream;
mod unigram;
mod word_piece;
mod words;

use std::collections::BTreeSet;

use serde::Serialize;

pub use error::{TokenizerError, VocabularyError};
pub use gguf::GgufVocabulary;
pub use hugging_face::{HuggingFaceFiles, Vocabulary};
pub use marked::MarkedText;
pub(crate) use marked::{Marker, Seen, StandIns};
pub use pieces::TokenKind;
pub use stream::{Decode, MARK_CLOSE, MARK_OPEN, SpecialText, TextStart, TextStream};

use pieces::{Pieces, Spelling};
use pipeline::Pipeline;
use stream::Leading;

/// More tokens than any published vocabulary, and few enough for every table to stay small.
const MAX_TOKENS: usize = 1 << 22;

/// Whether the tokens that the model expects around a text are added.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AddSpecial {
    /// The text alone.
    #[default]
    No,
    /// With what the vocabulary says belongs around a text, often a beginning-of-sequence token.
    Yes,
}

/// Whether special tokens written in a text are found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ParseSpecial {
    /// They are text like any other, as text from others must be.
    #[default]
    No,
    /// They become their tokens, as in the output of a chat template.
    Yes,
}

/// What encoding does about special tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Special {
    /// Whether tokens are added around the text.
    pub add: AddSpecial,
    /// Whether tokens are found in the text.
    pub parse: ParseSpecial,
}

impl Special {
    /// Text and nothing else.
    pub const NONE: Special = Special {
        add: AddSpecial::No,
        parse: ParseSpecial::No,
    };
    /// A text for the model to continue.
    pub const PROMPT: Special = Special {
        add: AddSpecial::Yes,
        parse: ParseSpecial::No,
    };
    /// The output of a chat template, which writes its own special tokens.
    pub const RENDERED: Special = Special {
        add: AddSpecial::No,
        parse: ParseSpecial::Yes,
    };
}

/// What encoding a text may come to; without limits by default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncodeLimits {
    /// Tokens that the text may have, those added around it included.
    pub tokens: usize,
    /// Bytes that may be held besides the text and its ids. Nearly every text takes some 1 MiB; one
    /// without words, or under a normalizer that needs the whole text, 256 bytes for each of its own.
    pub workspace_bytes: usize,
}

impl Default for EncodeLimits {
    fn default() -> EncodeLimits {
        EncodeLimits {
            tokens: usize::MAX,
            workspace_bytes: usize::MAX,
        }
    }
}

impl EncodeLimits {
    fn check(&self, ids: &[u32]) -> Result<(), TokenizerError> {
        match ids.len() > self.tokens {
            true => Err(TokenizerError::TooManyTokens { limit: self.tokens }),
            false => Ok(()),
        }
    }
}

/// Bytes of text that a token stands for at most, where there is a bound.
fn longest_token_bytes(pipeline: &Pipeline, pieces: &Pieces, spelling: Spelling) -> Option<usize> {
    let longest = pieces.longest(spelling);
    pipeline.shrinks_to_one_in()?.checked_mul(longest)
}

/// What a vocabulary is, for people and for `inspect`.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Description {
    /// `BPE`, `WordPiece`, `Unigram` or `SentencePiece`.
    pub algorithm: &'static str,
    /// The pre-tokenizer's name in GGUF; `tokenizer.json` spells the rule out instead.
    pub pre_tokenizer: Option<String>,
    /// One more than the largest id.
    pub vocabulary: u32,
    /// Pairs that merge; zero where scores decide.
    pub merges: usize,
    /// Tokens that are markup.
    pub control_tokens: usize,
    /// Beginning of sequence, by text.
    pub bos: Option<String>,
    /// End of sequence, by text.
    pub eos: Option<String>,
    /// Tokens that end a generation, by text.
    pub end_of_generation: Vec<String>,
    /// Ids put in front of a text by [`AddSpecial::Yes`].
    pub added_before: Vec<u32>,
    /// Ids put behind it.
    pub added_after: Vec<u32>,
    /// Whether the model brings a chat template.
    pub chat_template: bool,
}

/// A vocabulary with its algorithm.
///
/// # Examples
///
/// ```
/// # use lacuna_text::tokenizer::{Decode, GgufVocabulary, Special, Tokenizer, TokenizerError};
/// let vocabulary = GgufVocabulary {
///     model: "gpt2",
///     pre: Some("gpt-2"),
///     tokens: vec!["h", "i", "Ġ", "hi", "Ġhi"],
///     merges: Some(vec!["h i", "Ġ hi"]),
///     ..GgufVocabulary::default()
/// };
/// let tokenizer = Tokenizer::from_gguf(&vocabulary)?;
/// let ids = tokenizer.encode("hi hi", Special::NONE)?;
/// assert_eq!(ids, [3, 4]);
/// assert_eq!(tokenizer.decode(&ids, Decode::TEXT)?, "hi hi");
/// # Ok::<(), TokenizerError>(())
/// ```
#[derive(Debug)]
pub struct Tokenizer {
    pipeline: Pipeline,
    longest_token_bytes: Option<usize>,
    pieces: Pieces,
    leading: Leading,
    bos: Option<u32>,
    eos: Option<u32>,
    ends: BTreeSet<u32>,
    before: Vec<u32>,
    between: Vec<u32>,
    after: Vec<u32>,
    pre_tokenizer: Option<String>,
    merges: usize,
    chat_templates: Vec<(String, String)>,
}

impl Tokenizer {
    /// The ids of `text`.
    ///
    /// The result is never cut to a length. Fails on text the vocabulary has no tokens for.
    pub fn encode(&self, text: &str, special: Special) -> Result<Vec<u32>, TokenizerError> {
        self.encode_within(text, special, &EncodeLimits::default())
    }

    /// The ids of `text`, the same as [`encode`](Self::encode) has, if they keep within `limits`.
    ///
    /// Fails with [`TokenizerError::TooLong`] before anything is done where the length alone says so,
    /// with [`TokenizerError::TooManyTokens`] as soon as there are, and with
    /// [`TokenizerError::Unbroken`] before more memory is taken than may be.
    pub fn encode_within(
        &self,
        text: &str,
        special: Special,
        limits: &EncodeLimits,
    ) -> Result<Vec<u32>, TokenizerError> {
        self.encode_with(text, &StandIns::default(), special, limits)
    }

    /// The ids of two texts as one sequence, as the vocabulary joins pairs, and at which of them the second
    /// begins. Otherwise as [`encode_within`](Self::encode_within).
    pub fn encode_pair(
        &self,
        first: &str,
        second: &str,
        limits: &EncodeLimits,
    ) -> Result<(Vec<u32>, usize), TokenizerError> {
        let mut ids = self.before.clone();
        ids.extend(self.encode_within(first, Special::NONE, limits)?);
        ids.extend_from_slice(&self.between);
        let start = ids.len();
        ids.extend(self.encode_within(second, Special::NONE, limits)?);
        ids.extend_from_slice(&self.after);
        limits.check(&ids)?;
        Ok((ids, start))
    }

    /// The ids of what a chat template wrote: special tokens are its own alone, and what looks like
    /// one in a message is text. Otherwise as [`encode_within`](Self::encode_within).
    pub fn encode_marked(
        &self,
        text: &MarkedText,
        limits: &EncodeLimits,
    ) -> Result<Vec<u32>, TokenizerError> {
        let (marked, stand_ins) = text.marked();
        self.encode_with(marked, stand_ins, text.special(), limits)
    }

    /// What marks texts from others for this vocabulary.
    pub(crate) fn marker(&self) -> &Marker {
        self.pipeline.marker()
    }

    fn encode_with(
        &self,
        text: &str,
        stand_ins: &StandIns,
        special: Special,
        limits: &EncodeLimits,
    ) -> Result<Vec<u32>, TokenizerError> {
        self.check_length(stand_ins.plain_bytes(text), limits.tokens)?;
        let around = match special.add {
            AddSpecial::Yes => (&self.before[..], &self.after[..]),
            AddSpecial::No => Default::default(),
        };
        let guess = (text.len() / 3).min(limits.tokens) + around.0.len() + around.1.len() + 1;
        let mut ids = Vec::new();
        ids.try_reserve_exact(guess)?;
        ids.extend_from_slice(around.0);
        self.pipeline
            .encode(text, stand_ins, special.parse, limits, &mut ids)?;
        ids.extend_from_slice(around.1);
        limits.check(&ids)?;
        Ok(ids)
    }

    /// Bytes that a text of so many tokens may have; `None` where nothing can be said, because white
    /// space or whole runs of characters may become nothing or one token.
    pub fn most_text_bytes(&self, tokens: usize) -> Option<usize> {
        self.longest_token_bytes
            .map(|longest| longest.saturating_mul(tokens))
    }

    /// Refuses a text whose length alone says that it has more than `tokens` tokens.
    pub fn check_length(&self, bytes: usize, tokens: usize) -> Result<(), TokenizerError> {
        match self.most_text_bytes(tokens) {
            Some(limit) if bytes > limit => Err(TokenizerError::TooLong {
                bytes,
                limit,
                tokens,
            }),
            _ => Ok(()),
        }
    }

    /// The text of `ids`, the same that a [`TextStream`] gives in parts.
    ///
    /// Fails on an id of [`vocab_size`](Self::vocab_size) or more.
    pub fn decode(&self, ids: &[u32], options: Decode) -> Result<String, TokenizerError> {
        let mut stream = TextStream::new(options);
        let mut text = String::new();
        text.try_reserve(ids.len() * 4)?;
        for &id in ids {
            text.push_str(stream.push(self, id)?);
        }
        text.push_str(stream.finish());
        Ok(text)
    }

    /// One more than the largest id; ids below it without a token decode to nothing.
    pub fn vocab_size(&self) -> u32 {
        // Built from at most `MAX_TOKENS` tokens.
        u32::try_from(self.pieces.len()).unwrap_or(u32::MAX)
    }

    /// Lets ids up to a model's number of output rows decode, to nothing.
    ///
    /// Embeddings are often padded to a round number of rows, and a model can choose such a row. A
    /// smaller number changes nothing: the tokens beyond it only appear if the text asks for them,
    /// and the model then refuses their ids.
    pub fn pad_to(&mut self, rows: u32) {
        self.pieces.pad_to((rows as usize).min(MAX_TOKENS));
    }

    /// The id of the token that the vocabulary spells `text`.
    pub fn id(&self, text: &str) -> Option<u32> {
        self.pipeline.id(text)
    }

    /// A token as the vocabulary spells it, or `None` for an id without one.
    pub fn token_text(&self, id: u32) -> Option<String> {
        let (bytes, kind) = self.pieces.get(id)?;
        self.pipeline.text(id, bytes, kind)
    }

    /// The bytes that a token stands for in a text, or `None` if `id` is out of range. They need not
    /// be whole characters; those of a control token are its name.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.pieces.get(id).map(|(bytes, _)| bytes)
    }

    /// What a token is for, or `None` if `id` is out of range.
    pub fn kind(&self, id: u32) -> Option<TokenKind> {
        self.pieces.kind(id)
    }

    /// The beginning-of-sequence token.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The end-of-sequence token.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// Whether `id` ends a generation.
    pub fn is_end_of_generation(&self, id: u32) -> bool {
        self.ends.contains(&id)
    }

    /// The ids that end a generation, ascending.
    pub fn end_of_generation(&self) -> impl Iterator<Item = u32> + '_ {
        self.ends.iter().copied()
    }

    /// The source of the model's chat template, if it brings one.
    ///
    /// Where it brings several, this is the one named `default`, or else the first.
    pub fn chat_template(&self) -> Option<&str> {
        let named = self
            .chat_templates
            .iter()
            .find(|template| template.0 == "default");
        named
            .or(self.chat_templates.first())
            .map(|template| template.1.as_str())
    }

    /// The source of the chat template with that name, such as `tool_use`.
    pub fn named_chat_template(&self, name: &str) -> Option<&str> {
        let named = self
            .chat_templates
            .iter()
            .find(|template| template.0 == name);
        named.map(|template| template.1.as_str())
    }

    /// What the vocabulary is.
    pub fn describe(&self) -> Description {
        let text = |id: u32| self.token_text(id).unwrap_or_else(|| id.to_string());
        Description {
            algorithm: self.pipeline.algorithm(),
            pre_tokenizer: self.pre_tokenizer.clone(),
            vocabulary: self.vocab_size(),
            merges: self.merges,
            control_tokens: self.pieces.count(|kind| kind == TokenKind::Control),
            bos: self.bos.map(text),
            eos: self.eos.map(text),
            end_of_generation: self.ends.iter().copied().map(text).collect(),
            added_before: self.before.clone(),
            added_after: self.after.clone(),
            chat_template: !self.chat_templates.is_empty(),
        }
    }
}

/// The names that a GGUF vocabulary's `pre` may have.
pub fn known_pre_tokenizers() -> Vec<&'static str> {
    pre::names().collect()
}
