//! The `model` object of `tokenizer.json` where it is BPE.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error, SeqAccess, Visitor};
use tokenizers::models::bpe::{BPE, Merges, Vocab};

use super::super::bigrams::Bigrams;
use super::super::error::{TokenizerError, VocabularyError, excerpt};
use super::super::pieces::byte_token;

/// A byte-pair model: tokens, and pairs of them to merge.
#[derive(Deserialize)]
pub(super) struct Bpe {
    pub(super) vocab: Vocab,
    pub(super) merges: Vec<Merge>,
    #[serde(default)]
    pub(super) byte_fallback: bool,
    #[serde(default)]
    dropout: Option<f32>,
    #[serde(default)]
    pub(super) unk_token: Option<String>,
    #[serde(default)]
    continuing_subword_prefix: Option<String>,
    #[serde(default)]
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    fuse_unk: bool,
    #[serde(default)]
    pub(super) ignore_merges: bool,
}

impl Bpe {
    pub(super) fn read(text: &str) -> Result<Bpe, TokenizerError> {
        let bpe: Bpe = super::json("tokenizer.json", text)?;
        bpe.check()?;
        Ok(bpe)
    }

    fn check(&self) -> Result<(), TokenizerError> {
        let set = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
        let unsupported = if self.dropout.is_some_and(|dropout| dropout != 0.0) {
            "dropout"
        } else if set(&self.continuing_subword_prefix) {
            "continuing_subword_prefix"
        } else if set(&self.end_of_word_suffix) {
            "end_of_word_suffix"
        } else {
            return Ok(self.check_merges()?);
        };
        Err(TokenizerError::UnsupportedPart {
            part: "model option",
            kind: unsupported.to_owned(),
        })
    }

    /// The crate would panic on a merge whose result is longer than every token.
    fn check_merges(&self) -> Result<(), VocabularyError> {
        let mut joined = String::new();
        for (index, Merge(left, right)) in self.merges.iter().enumerate() {
            joined.clear();
            joined.push_str(left);
            joined.push_str(right);
            let missing = [left, right, &joined]
                .into_iter()
                .find(|it| !self.vocab.contains_key(*it));
            if let Some(token) = missing {
                return Err(VocabularyError::MergeToken {
                    index,
                    token: excerpt(token),
                });
            }
        }
        Ok(())
    }

    /// Where words may be cut. Not where a word that is a token is not merged, or where what has no
    /// token becomes other tokens together.
    pub(super) fn bigrams(&self) -> Option<Bigrams> {
        let apart = (!self.fuse_unk && !self.byte_fallback) || self.bytes_stand_alone();
        let merges_alone = !self.ignore_merges && apart;
        merges_alone.then(|| Bigrams::of(self.vocab.keys().map(String::as_str)))
    }

    /// Whether every character without a token becomes its bytes, which merge with nothing. It is
    /// never unknown then, so that no run of such characters is fused.
    fn bytes_stand_alone(&self) -> bool {
        let has = |byte: u8| self.vocab.contains_key(&format!("<0x{byte:02X}>"));
        let is_byte = |token: &str| byte_token(token).is_some();
        let merges = || self.merges.iter();
        self.byte_fallback
            && (0..=u8::MAX).all(has)
            && !merges().any(|Merge(left, right)| is_byte(left) || is_byte(right))
    }

    pub(super) fn build(self) -> Result<BPE, TokenizerError> {
        let merges: Merges = self
            .merges
            .into_iter()
            .map(|merge| (merge.0, merge.1))
            .collect();
        let mut builder = BPE::builder()
            .vocab_and_merges(self.vocab, merges)
            .fuse_unk(self.fuse_unk)
            .byte_fallback(self.byte_fallback)
            .ignore_merges(self.ignore_merges);
        if let Some(unknown) = self.unk_token {
            builder = builder.unk_token(unknown);
        }
        builder.build().map_err(|error| TokenizerError::Part {
            part: "model",
            detail: error.to_string(),
        })
    }
}

/// A merge, written as a pair or, in older files, as two tokens with a space between.
pub(super) struct Merge(pub(super) String, pub(super) String);

impl<'de> Deserialize<'de> for Merge {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Merge, D::Error> {
        deserializer.deserialize_any(MergeVisitor)
    }
}

struct MergeVisitor;

impl<'de> Visitor<'de> for MergeVisitor {
    type Value = Merge;

    fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.write_str("a pair of tokens, or two tokens separated by a space")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Merge, E> {
        match text.split_once(' ') {
            Some((left, right)) if !right.contains(' ') => {
                Ok(Merge(left.to_owned(), right.to_owned()))
            }
            _ => Err(E::custom(format_args!(
                "merge {:?} is not two tokens",
                excerpt(text)
            ))),
        }
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut pair: A) -> Result<Merge, A::Error> {
        let missing = || A::Error::custom("a merge needs two tokens");
        let left = pair.next_element()?.ok_or_else(missing)?;
        let right = pair.next_element()?.ok_or_else(missing)?;
        match pair.next_element::<serde::de::IgnoredAny>()? {
            None => Ok(Merge(left, right)),
            Some(_) => Err(A::Error::custom("a merge has only two tokens")),
        }
    }
}
