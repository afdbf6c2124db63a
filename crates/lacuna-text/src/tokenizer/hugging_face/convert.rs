//! Vocabularies of Hugging Face folders in the form they have in GGUF files.
//!
//! GGUF names a rule of cutting texts into words where `tokenizer.json` spells it out, has scores where that
//! has ranked merges of SentencePiece's tokens, and leaves normalizers out. So what was converted is tried:
//! a text with what rules differ in must become the same tokens.

use std::path::Path;

use serde_json::Value;

use super::super::error::{TokenizerError, VocabularyError};
use super::super::parts::{self, Decoder};
use super::super::pieces::{Spelling, TokenKind};
use super::super::pre::{self, GPT2, WholeWords};
use super::super::stream::Leading;
use super::super::{Decode, GgufVocabulary, MAX_TOKENS, Special, Tokenizer};
use super::bpe::{Bpe, Merge};
use super::{Added, Contents, Model, Settings, TokenizerFile, json};

/// What [`GgufVocabulary`] borrows.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Vocabulary {
    /// `tokenizer.ggml.model`.
    pub model: &'static str,
    /// `tokenizer.ggml.pre`.
    pub pre: &'static str,
    /// `tokenizer.ggml.tokens`, by id.
    pub tokens: Vec<String>,
    /// `tokenizer.ggml.token_type`, by id.
    pub token_types: Vec<i32>,
    /// `tokenizer.ggml.merges`, of byte-level vocabularies.
    pub merges: Option<Vec<String>>,
    /// `tokenizer.ggml.scores`, of SentencePiece's.
    pub scores: Option<Vec<f32>>,
    /// `tokenizer.ggml.bos_token_id`.
    pub bos: Option<u32>,
    /// `tokenizer.ggml.eos_token_id`.
    pub eos: Option<u32>,
    /// `tokenizer.ggml.unknown_token_id`.
    pub unknown: Option<u32>,
    /// `tokenizer.ggml.padding_token_id`.
    pub padding: Option<u32>,
    /// `tokenizer.ggml.add_bos_token`.
    pub add_bos: bool,
    /// `tokenizer.ggml.add_eos_token`.
    pub add_eos: bool,
    /// `tokenizer.ggml.add_space_prefix`, of SentencePiece's.
    pub add_space_prefix: Option<bool>,
    /// `tokenizer.chat_template`.
    pub chat_template: Option<String>,
}

/// What rules of cutting differ in: contractions, digits, letters of several scripts, marks, runs of spaces
/// and lines. It is in normal form C, to which some normalizers bring texts.
const SAMPLE: &str = "Hello, World! I'm sure they'LL say it's 1234567 (or 3.14), don't you?\n\n\n  \t x = a_b[0] + \"c\"; \
    // ok\r\n    \u{4F60}\u{597D}\u{FF0C}\u{4E16}\u{754C} \u{3053}\u{3093}\u{306B}\u{3061}\u{306F} \u{AC00}\u{B098} \u{41F}\u{440}\u{438}\u{432}\u{435}\u{442} \u{1F642}\u{1F44D}\u{1F3FD} na\u{EF}ve caf\u{E9} HTTPServer \
    \u{915}\u{94D}\u{937}\u{93F} ~/.config/a-b   end. ";

impl Vocabulary {
    /// Converts that of a folder, for a model with so many rows of embeddings, whose file will have this
    /// `general.architecture`.
    ///
    /// # Errors
    /// [`TokenizerError`], also for vocabularies that GGUF has no form for.
    pub fn from_folder(
        folder: &Path,
        architecture: &str,
        rows: usize,
    ) -> Result<Vocabulary, TokenizerError> {
        let contents = Contents::read(folder)?;
        let files = contents.files();
        let own = Tokenizer::from_hugging_face(&files)?;
        let file: TokenizerFile<'_> = json("tokenizer.json", files.tokenizer)?;
        let settings = Settings::read(&files)?;
        let Model::Bpe(bpe) = Model::read(file.model.get())? else {
            return Err(inexpressible("algorithm"));
        };
        let converter = Converter {
            added: file.added_tokens(&settings),
            decoder: parts::decoder(file.decoder.as_ref())?,
            bpe,
            rows,
        };
        let made = converter.convert(file.pre_tokenizer.as_ref())?;
        let (before, after) = match (&*own.before, &*own.after) {
            ([] | [_], [] | [_]) => (own.before.first().copied(), own.after.first().copied()),
            _ => return Err(inexpressible("tokens around texts")),
        };
        let padding = settings.padding.and_then(|name| own.pipeline.id(&name));
        let padding = padding.or(settings.padding_id);
        let made = Vocabulary {
            bos: own.bos.or(before),
            eos: own.eos.or(after),
            add_bos: before.is_some(),
            add_eos: after.is_some(),
            padding: padding.filter(|id| (*id as usize) < made.tokens.len()),
            chat_template: own.chat_template().map(str::to_owned),
            ..made
        };
        let special = converter.added.iter().filter(|token| token.special);
        let special: Vec<&str> = special.map(|token| token.content.as_str()).collect();
        made.check(&own, architecture, &special)?;
        Ok(made)
    }

    /// As a GGUF file has it.
    #[must_use]
    pub fn as_gguf(&self) -> GgufVocabulary<'_> {
        GgufVocabulary {
            model: self.model,
            pre: Some(self.pre),
            tokens: self.tokens.iter().map(String::as_str).collect(),
            token_types: Some(self.token_types.clone()),
            merges: self
                .merges
                .as_ref()
                .map(|merges| merges.iter().map(String::as_str).collect()),
            scores: self.scores.clone(),
            bos: self.bos,
            eos: self.eos,
            unknown: self.unknown,
            add_bos: Some(self.add_bos),
            add_eos: Some(self.add_eos),
            add_space_prefix: self.add_space_prefix,
            chat_template: self.chat_template.as_deref(),
            ..GgufVocabulary::default()
        }
    }

    /// Whether texts become the same tokens, also those that special tokens are written in. White space beside these is not
    /// tried: some take it with them (Phi 4), which files have no key for and templates make no use of.
    fn check(
        &self,
        own: &Tokenizer,
        architecture: &str,
        special: &[&str],
    ) -> Result<(), TokenizerError> {
        let made = Tokenizer::from_gguf(&GgufVocabulary {
            architecture: Some(architecture),
            ..self.as_gguf()
        })?;
        for name in special {
            let alone = |tokenizer: &Tokenizer| tokenizer.encode(name, Special::RENDERED).ok();
            let within = ["a", name, "b"].concat();
            let within = self.rendered(&made, &within) == self.rendered(own, &within);
            if alone(&made) != alone(own) || !within {
                return Err(inexpressible("way to take special tokens from a text"));
            }
        }
        // A small vocabulary may lack a character of some part: then of both.
        let encode = |tokenizer: &Tokenizer, text| tokenizer.encode(text, Special::PROMPT).ok();
        let parts = SAMPLE.split_inclusive(' ');
        let same = |text| encode(&made, text) == encode(own, text);
        match [SAMPLE, ""].into_iter().chain(parts).all(same) {
            true => Ok(()),
            false => Err(inexpressible("rule of cutting texts into words")),
        }
    }
}

impl Vocabulary {
    /// What a text with special tokens becomes. Of SentencePiece's vocabularies it is what their tokens say without spaces:
    /// whether one is in front of what follows a special token, GGUF files cannot say, and readers of them agree on one way.
    fn rendered(&self, tokenizer: &Tokenizer, text: &str) -> Option<(Vec<u32>, String)> {
        let ids = tokenizer.encode(text, Special::RENDERED).ok()?;
        if self.merges.is_some() {
            return Some((ids, String::new()));
        }
        let said = tokenizer.decode(&ids, Decode::MARKUP).ok()?;
        Some((Vec::new(), said.replace(' ', "")))
    }
}

fn inexpressible(part: &'static str) -> TokenizerError {
    TokenizerError::Inexpressible { part }
}

struct Converter {
    added: Vec<Added>,
    decoder: Decoder,
    bpe: Bpe,
    rows: usize,
}

impl Converter {
    fn convert(&self, pre_tokenizer: Option<&Value>) -> Result<Vocabulary, TokenizerError> {
        let (tokens, token_types) = self.tokens()?;
        let unknown = self.bpe.unk_token.as_ref();
        let unknown = unknown.and_then(|name| self.bpe.vocab.get(name).copied());
        let mut made = Vocabulary {
            model: "gpt2",
            pre: "default",
            tokens,
            token_types,
            merges: None,
            scores: None,
            bos: None,
            eos: None,
            unknown,
            padding: None,
            add_bos: false,
            add_eos: false,
            add_space_prefix: None,
            chat_template: None,
        };
        match self.decoder.spelling {
            Spelling::ByteLevel => {
                let rule = patterns(pre_tokenizer).and_then(|patterns| {
                    let whole_words = match self.bpe.ignore_merges {
                        true => WholeWords::Token,
                        false => WholeWords::Merge,
                    };
                    pre::of_patterns(&patterns, whole_words)
                });
                made.pre = rule.ok_or_else(|| inexpressible("rule of cutting texts into words"))?;
                let merges = self.bpe.merges.iter();
                made.merges = Some(merges.map(|Merge(a, b)| format!("{a} {b}")).collect());
            }
            Spelling::SentencePiece if self.bpe.byte_fallback => {
                made.model = "llama";
                made.scores = Some(self.scores(&made.tokens));
                // A space is in front of a text where one is taken from decoded texts.
                made.add_space_prefix = Some(self.decoder.leading == Leading::StripOne);
            }
            Spelling::SentencePiece | Spelling::WordPiece => {
                return Err(inexpressible("algorithm"));
            }
        }
        Ok(made)
    }

    /// Texts and GGUF's numbers of kinds. Rows of embeddings without a token have one that is not used.
    fn tokens(&self) -> Result<(Vec<String>, Vec<i32>), TokenizerError> {
        let own = self
            .bpe
            .vocab
            .iter()
            .map(|(text, id)| (*id, text.as_str(), self.kind(text)));
        let added = self.added.iter();
        let added = added.map(|token| (token.id, token.content.as_str(), self.added_kind(token)));
        let all: Vec<_> = own.chain(added).collect();
        let last = all
            .iter()
            .map(|(id, ..)| *id as usize + 1)
            .max()
            .unwrap_or(0);
        let len = last.max(self.rows);
        if len > MAX_TOKENS {
            return Err(VocabularyError::TooLarge {
                count: len,
                limit: MAX_TOKENS,
            }
            .into());
        }
        let mut tokens: Vec<String> = (0..len).map(|id| format!("[PAD{id}]")).collect();
        let mut types = vec![TokenKind::Unused.to_gguf(); len];
        for (id, text, kind) in all {
            tokens[id as usize] = text.to_owned();
            types[id as usize] = kind.to_gguf();
        }
        Ok((tokens, types))
    }

    fn kind(&self, text: &str) -> TokenKind {
        match (self.bpe.unk_token.as_deref(), super::byte_token(text)) {
            (Some(unknown), _) if unknown == text => TokenKind::Unknown,
            (_, Some(_)) if self.bpe.byte_fallback => TokenKind::Byte,
            _ => TokenKind::Normal,
        }
    }

    fn added_kind(&self, token: &Added) -> TokenKind {
        match self.kind(&token.content) {
            TokenKind::Unknown => TokenKind::Unknown,
            _ => token.kind(),
        }
    }

    /// The earlier a token is merged, the higher is its score; what nothing is merged to comes last.
    fn scores(&self, tokens: &[String]) -> Vec<f32> {
        let lowest = -(self.bpe.merges.len() as f32) - 1.0;
        let mut ranks = std::collections::HashMap::new();
        for (rank, Merge(left, right)) in self.bpe.merges.iter().enumerate() {
            ranks.entry(format!("{left}{right}")).or_insert(rank);
        }
        let score = |token: &String| ranks.get(token).map_or(lowest, |rank| -(*rank as f32));
        tokens.iter().map(score).collect()
    }
}

/// The patterns that words are cut by, if a list of them is all there is to it.
fn patterns(value: Option<&Value>) -> Option<Vec<&str>> {
    let value = value?;
    let flag =
        |name: &str, default: bool| value.get(name).and_then(Value::as_bool).unwrap_or(default);
    match value.get("type")?.as_str()? {
        "Sequence" => {
            let parts = value.get("pretokenizers")?.as_array()?;
            let parts = parts.iter().map(|part| patterns(Some(part)));
            let parts: Option<Vec<_>> = parts.collect();
            Some(parts?.concat())
        }
        "Split" if value.get("behavior")?.as_str()? == "Isolated" && !flag("invert", false) => {
            Some(vec![value.get("pattern")?.get("Regex")?.as_str()?])
        }
        "Digits" if flag("individual_digits", false) => Some(vec![r"\p{N}"]),
        "ByteLevel" if !flag("add_prefix_space", true) => Some(match flag("use_regex", true) {
            true => vec![GPT2],
            false => Vec::new(),
        }),
        _ => None,
    }
}
