//! Tokenizers from the vocabulary in a GGUF file.

use std::collections::HashMap;

use tokenizers::AddedToken;
use tokenizers::models::bpe::{BPE, Merges, Vocab};

use super::bigrams::Bigrams;
use super::error::{TokenizerError, VocabularyError, excerpt};
use super::normalizer::Normalizer;
use super::pieces::{CONTINUES, Pieces, Spelling, TokenKind};
use super::pipeline::{Algorithm, Pipeline, SpacePrefix};
use super::pre::{self, PreTokenizer, WholeWords};
use super::sentencepiece::SentencePiece;
use super::special::end_of_generation;
use super::stream::Leading;
use super::unigram::{self, Unigram};
use super::word_piece;
use super::words::Step;
use super::{MAX_TOKENS, Tokenizer, longest_token_bytes};

/// The `tokenizer.ggml.*` metadata of a GGUF file.
///
/// Strings are borrowed from the file. What the file does not say is `None`.
#[derive(Clone, Debug, Default)]
pub struct GgufVocabulary<'a> {
    /// `tokenizer.ggml.model`: `gpt2`, `llama`, `gemma4`, `bert` or `t5`.
    pub model: &'a str,
    /// `general.architecture`: some keep no white space beside special tokens, which there is no key for.
    pub architecture: Option<&'a str>,
    /// `tokenizer.ggml.pre`.
    pub pre: Option<&'a str>,
    /// `tokenizer.ggml.tokens`, by id.
    pub tokens: Vec<&'a str>,
    /// `tokenizer.ggml.token_type`, by id; without it every token is normal.
    pub token_types: Option<Vec<i32>>,
    /// `tokenizer.ggml.merges`, best first, each two tokens separated by a space.
    pub merges: Option<Vec<&'a str>>,
    /// `tokenizer.ggml.scores`, by id.
    pub scores: Option<Vec<f32>>,
    /// `tokenizer.ggml.bos_token_id`.
    pub bos: Option<u32>,
    /// `tokenizer.ggml.eos_token_id`.
    pub eos: Option<u32>,
    /// `tokenizer.ggml.cls_token_id`: what a WordPiece vocabulary has in front of a text.
    pub cls: Option<u32>,
    /// `tokenizer.ggml.seperator_token_id`, as GGUF spells it: what it has behind one.
    pub separator: Option<u32>,
    /// `tokenizer.ggml.eot_token_id`: end of turn.
    pub eot: Option<u32>,
    /// `tokenizer.ggml.eom_token_id`: end of message.
    pub eom: Option<u32>,
    /// `tokenizer.ggml.unknown_token_id`.
    pub unknown: Option<u32>,
    /// `tokenizer.ggml.add_bos_token`.
    pub add_bos: Option<bool>,
    /// `tokenizer.ggml.add_eos_token`.
    pub add_eos: Option<bool>,
    /// `tokenizer.ggml.add_sep_token`: whether the separator is between two texts, behind what ends the first.
    pub add_separator: Option<bool>,
    /// `tokenizer.ggml.add_space_prefix`.
    pub add_space_prefix: Option<bool>,
    /// `tokenizer.ggml.remove_extra_whitespaces`.
    pub remove_extra_whitespaces: Option<bool>,
    /// `tokenizer.ggml.precompiled_charsmap`: what characters become first.
    pub character_map: Option<Vec<u8>>,
    /// `tokenizer.chat_template`.
    pub chat_template: Option<&'a str>,
}

impl Tokenizer {
    /// Builds the tokenizer of a GGUF file.
    ///
    /// Tolerated: a missing `pre` (it means `default`), tokens that occur twice (the first id is the
    /// one that encoding gives), tokens that are not spelled in the byte-level alphabet (they are
    /// plain text), missing byte tokens (an error only for a text that needs one), unknown token
    /// types. Anything else that is inconsistent is an error.
    pub fn from_gguf(vocabulary: &GgufVocabulary) -> Result<Tokenizer, TokenizerError> {
        vocabulary.check()?;
        match vocabulary.model {
            "gpt2" if pre::is_raw(vocabulary.pre) => vocabulary.raw_bpe(false),
            "gpt2" => vocabulary.byte_level(),
            "llama" => vocabulary.sentencepiece(),
            "gemma4" => vocabulary.raw_bpe(true),
            "bert" => vocabulary.word_piece(),
            "t5" => vocabulary.unigram(),
            other => Err(TokenizerError::UnsupportedModel {
                model: excerpt(other),
            }),
        }
    }
}

/// What the algorithms do not share.
struct Parts {
    algorithm: Algorithm,
    spelling: Spelling,
    leading: Leading,
    adds_bos: bool,
    adds_eos: bool,
    /// Ids that special tokens have when the file names none.
    fallback: Specials,
    merges: usize,
}

#[derive(Clone, Copy, Default)]
struct Specials {
    bos: Option<u32>,
    eos: Option<u32>,
}

impl GgufVocabulary<'_> {
    fn check(&self) -> Result<(), VocabularyError> {
        let tokens = self.tokens.len();
        if tokens == 0 {
            return Err(VocabularyError::Empty);
        }
        let text: usize = self.tokens.iter().map(|token| token.len()).sum();
        if tokens > MAX_TOKENS || u32::try_from(text).is_err() {
            return Err(VocabularyError::TooLarge {
                count: tokens,
                limit: MAX_TOKENS,
            });
        }
        let lengths = [
            ("token_types", self.token_types.as_ref().map(Vec::len)),
            ("scores", self.scores.as_ref().map(Vec::len)),
        ];
        for (what, found) in lengths {
            if let Some(found) = found.filter(|found| *found != tokens) {
                return Err(VocabularyError::Length {
                    what,
                    found,
                    tokens,
                });
            }
        }
        self.check_ids()
    }

    fn check_ids(&self) -> Result<(), VocabularyError> {
        let tokens = self.tokens.len();
        let ids = [
            ("bos_token_id", self.bos),
            ("eos_token_id", self.eos),
            ("cls_token_id", self.cls),
            ("seperator_token_id", self.separator),
            ("eot_token_id", self.eot),
            ("eom_token_id", self.eom),
            ("unknown_token_id", self.unknown),
        ];
        for (role, id) in ids {
            if let Some(id) = id.filter(|id| *id as usize >= tokens) {
                return Err(VocabularyError::SpecialOutOfRange { role, id, tokens });
            }
        }
        Ok(())
    }

    fn kind(&self, id: usize) -> TokenKind {
        let number = self.token_types.as_ref().and_then(|types| types.get(id));
        number.map_or(TokenKind::Normal, |number| TokenKind::from_gguf(*number))
    }

    /// Ids with their texts and kinds. The number of tokens was checked.
    fn entries(&self) -> impl Iterator<Item = (u32, &str, TokenKind)> {
        (0u32..)
            .zip(&self.tokens)
            .map(|(id, text)| (id, *text, self.kind(id as usize)))
    }

    fn byte_level(&self) -> Result<Tokenizer, TokenizerError> {
        let rule = pre::find(self.pre)?;
        let merges = self.merges.as_ref().ok_or(VocabularyError::NoMerges)?;
        let (vocab, pairs) = self.vocab_and_merges(merges)?;
        let merged = rule.whole_words == WholeWords::Merge;
        let bigrams = merged.then(|| Bigrams::of(vocab.keys().map(String::as_str)));
        let model = BPE::builder()
            .vocab_and_merges(vocab, pairs)
            .ignore_merges(!merged)
            .build()
            .map_err(|error| part("model", error))?;
        self.finish(Parts {
            algorithm: Algorithm::Bpe {
                normalizer: Normalizer::default(),
                steps: steps(rule)?,
                model: Box::new(model),
                bigrams,
            },
            spelling: Spelling::ByteLevel,
            leading: Leading::Keep,
            adds_bos: rule.adds_bos,
            adds_eos: false,
            fallback: Specials::default(),
            merges: merges.len(),
        })
    }

    /// The vocabulary of the merging, and its pairs.
    ///
    /// Control tokens stay out of it unless a merge needs them: text that merely looks like one must
    /// not become one. Each merge is checked here because the `tokenizers` crate panics on a merge
    /// whose result is longer than every token.
    fn vocab_and_merges(&self, merges: &[&str]) -> Result<(Vocab, Merges), VocabularyError> {
        let mut ids: HashMap<&str, (u32, bool)> = HashMap::new();
        ids.try_reserve(self.tokens.len())?;
        for (id, text, kind) in self.entries() {
            let mergeable = !kind.is_special() && kind != TokenKind::Unused && !text.is_empty();
            ids.entry(text).or_insert((id, mergeable));
        }
        let mut pairs = Merges::new();
        pairs.try_reserve_exact(merges.len())?;
        let mut joined = String::new();
        for (index, merge) in merges.iter().enumerate() {
            let (left, right) = split_merge(merge).ok_or_else(|| VocabularyError::MergeForm {
                index,
                merge: excerpt(merge),
            })?;
            joined.clear();
            joined.push_str(left);
            joined.push_str(right);
            for token in [left, right, &joined] {
                let entry = ids
                    .get_mut(token)
                    .ok_or_else(|| VocabularyError::MergeToken {
                        index,
                        token: excerpt(token),
                    })?;
                entry.1 = true;
            }
            pairs.push((left.to_owned(), right.to_owned()));
        }
        let mergeable = ids.into_iter().filter(|(_, (_, mergeable))| *mergeable);
        Ok((
            mergeable
                .map(|(text, (id, _))| (text.to_owned(), id))
                .collect(),
            pairs,
        ))
    }

    /// Ranked merges of plain characters, as Gemma 4 has them: spaces are visible first, lines and
    /// the breaks between them are merged apart, and a character without a token is its bytes.
    fn raw_bpe(&self, adds_bos: bool) -> Result<Tokenizer, TokenizerError> {
        let merges = self.merges.as_ref().ok_or(VocabularyError::NoMerges)?;
        let (vocab, pairs) = self.vocab_and_merges(merges)?;
        let bigrams = Bigrams::of(vocab.keys().map(String::as_str));
        let lines = Step::isolate(pre::LINES).map_err(|error| part("pre_tokenizer", error))?;
        let model = BPE::builder()
            .vocab_and_merges(vocab, pairs)
            .byte_fallback(true)
            .build()
            .map_err(|error| part("model", error))?;
        self.finish(Parts {
            algorithm: Algorithm::Bpe {
                normalizer: Normalizer::visible_spaces()?,
                steps: vec![lines],
                model: Box::new(model),
                bigrams: Some(bigrams),
            },
            spelling: Spelling::SentencePiece,
            leading: Leading::Keep,
            adds_bos,
            adds_eos: false,
            fallback: Specials::default(),
            merges: merges.len(),
        })
    }

    fn sentencepiece(&self) -> Result<Tokenizer, TokenizerError> {
        let scores = self.scores.as_ref().ok_or(VocabularyError::Length {
            what: "scores",
            found: 0,
            tokens: self.tokens.len(),
        })?;
        let unknown = self
            .unknown
            .or_else(|| self.defaults_to(0, TokenKind::Unknown));
        let entries = self.entries().zip(scores);
        let pieces = entries.map(|((_, text, kind), score)| (text, kind, *score));
        let model = SentencePiece::new(pieces, unknown)?;
        let prefix = self.add_space_prefix.unwrap_or(true);
        self.finish(Parts {
            algorithm: Algorithm::SentencePiece {
                model,
                prefix: if prefix {
                    SpacePrefix::Add
                } else {
                    SpacePrefix::Leave
                },
            },
            spelling: Spelling::SentencePiece,
            leading: if prefix {
                Leading::StripOne
            } else {
                Leading::Keep
            },
            adds_bos: true,
            adds_eos: false,
            fallback: Specials {
                bos: self.defaults_to(1, TokenKind::Control),
                eos: self.defaults_to(2, TokenKind::Control),
            },
            merges: 0,
        })
    }

    /// Words and their parts, as BERT has them.
    fn word_piece(&self) -> Result<Tokenizer, TokenizerError> {
        let mut vocab = Vocab::new();
        vocab.try_reserve(self.tokens.len())?;
        let mut unknown = None;
        for (id, text, kind) in self.entries() {
            if self.unknown == Some(id) || (self.unknown.is_none() && text == word_piece::UNKNOWN) {
                unknown = Some(text);
            } else if kind.is_special() || kind == TokenKind::Unused {
                continue;
            }
            vocab.entry(hash_spelled(text, kind)).or_insert(id);
        }
        let unknown = unknown.unwrap_or(word_piece::UNKNOWN);
        let model = word_piece::build(vocab, unknown, word_piece::MOST_CHARACTERS)?;
        let (normalizer, steps) = word_piece::uncased()?;
        let named = |name: &str| self.entries().find(|(_, text, _)| *text == name);
        self.finish(Parts {
            algorithm: Algorithm::WordPiece {
                normalizer,
                steps,
                model: Box::new(model),
            },
            spelling: Spelling::WordPiece,
            leading: Leading::StripOne,
            adds_bos: true,
            adds_eos: true,
            fallback: Specials {
                bos: self.cls.or_else(|| named("[CLS]").map(|(id, ..)| id)),
                eos: self.separator.or_else(|| named("[SEP]").map(|(id, ..)| id)),
            },
            merges: 0,
        })
    }

    /// SentencePiece's unigram model, as XLM-RoBERTa and T5 have it.
    fn unigram(&self) -> Result<Tokenizer, TokenizerError> {
        let scores = self.scores.as_ref().ok_or(VocabularyError::Length {
            what: "scores",
            found: 0,
            tokens: self.tokens.len(),
        })?;
        for (key, stated) in [
            ("add_space_prefix", self.add_space_prefix),
            ("remove_extra_whitespaces", self.remove_extra_whitespaces),
        ] {
            if stated == Some(false) {
                return Err(TokenizerError::UnsupportedPart {
                    part: "model option",
                    kind: format!("{key} false"),
                });
            }
        }
        let entries = self.entries().zip(scores);
        let pieces = entries.map(|((_, text, kind), score)| (text, kind, f64::from(*score)));
        let unknown = self
            .unknown
            .or_else(|| self.defaults_to(2, TokenKind::Unknown));
        let (normalizer, steps) = unigram::words(self.character_map.as_deref())?;
        self.finish(Parts {
            algorithm: Algorithm::Unigram {
                normalizer,
                steps,
                model: Box::new(Unigram::new(pieces, unknown, false)?),
            },
            spelling: Spelling::SentencePiece,
            leading: Leading::StripFirstToken,
            adds_bos: false,
            adds_eos: true,
            fallback: Specials {
                bos: None,
                eos: self.defaults_to(1, TokenKind::Control),
            },
            merges: 0,
        })
    }

    /// An id by convention, if its token is of the kind it should be.
    fn defaults_to(&self, id: u32, kind: TokenKind) -> Option<u32> {
        let index = id as usize;
        let fits = self.token_types.is_none() || self.kind(index) == kind;
        (index < self.tokens.len() && fits).then_some(id)
    }

    fn finish(&self, parts: Parts) -> Result<Tokenizer, TokenizerError> {
        let bos = self.bos.or(parts.fallback.bos);
        let eos = self.eos.or(parts.fallback.eos);
        let before = added(
            self.add_bos,
            parts.adds_bos,
            bos,
            "add_bos_token",
            "bos_token_id",
        )?;
        let after = added(
            self.add_eos,
            parts.adds_eos,
            eos,
            "add_eos_token",
            "eos_token_id",
        )?;
        // The first text's end, and what some vocabularies have there besides.
        let separator = self.separator.filter(|_| self.add_separator == Some(true));
        let between = after.into_iter().chain(separator).collect();
        let mut pieces = Pieces::default();
        for (_, text, kind) in self.entries() {
            match parts.spelling {
                Spelling::WordPiece => pieces.push(&hash_spelled(text, kind), kind, parts.spelling),
                _ => pieces.push(text, kind, parts.spelling),
            }
        }
        let (tokens, ids) = self.added_tokens(&parts.algorithm);
        let stated = [eos, self.eot, self.eom].into_iter().flatten();
        let ends = end_of_generation(stated, |name| ids.get(name).copied());
        let pipeline = Pipeline::new(parts.algorithm, &tokens, ids)?;
        Ok(Tokenizer {
            longest_token_bytes: longest_token_bytes(&pipeline, &pieces, parts.spelling),
            pipeline,
            pieces,
            leading: parts.leading,
            bos,
            eos,
            ends,
            before: before.into_iter().collect(),
            between,
            after: after.into_iter().collect(),
            pre_tokenizer: match parts.spelling {
                Spelling::ByteLevel => Some(self.pre.unwrap_or("default").to_owned()),
                Spelling::SentencePiece | Spelling::WordPiece => None,
            },
            merges: parts.merges,
            chat_templates: self
                .chat_template
                .map(|source| ("default".to_owned(), source.to_owned()))
                .into_iter()
                .collect(),
        })
    }

    /// The tokens to cut out of a text before merging.
    ///
    /// SentencePiece cuts user-defined pieces itself, after its space prefix.
    fn added_tokens(&self, algorithm: &Algorithm) -> (Vec<AddedToken>, HashMap<String, u32>) {
        let merges_words = !matches!(algorithm, Algorithm::SentencePiece { .. });
        let mut tokens = Vec::new();
        let mut ids = HashMap::new();
        for (id, text, kind) in self.entries() {
            let special = kind.is_special();
            let cut = special || (kind == TokenKind::UserDefined && merges_words);
            if cut && !text.is_empty() && !ids.contains_key(text) {
                ids.insert(text.to_owned(), id);
                let token = AddedToken::from(text, special)
                    .normalized(false)
                    .lstrip(self.takes_space_before(text));
                tokens.push(token.rstrip(self.takes_white_space(text, merges_words)));
            }
        }
        (tokens, ids)
    }

    /// Whether a token takes the white space in front of it: what stands for a word that is left out does, by the
    /// `tokenizer.json` of these models.
    fn takes_space_before(&self, token: &str) -> bool {
        match token {
            "<mask>" => {
                self.architecture == Some("nomic-bert-moe")
                    || matches!(self.pre, Some("jina-v2-de" | "jina-v2-es" | "jina-v2-code"))
            }
            "[MASK]" => self.architecture == Some("modern-bert"),
            _ => false,
        }
    }

    /// Whether a special token takes the white space behind it: those of Phi 3 and 3.5 do, by their `tokenizer.json`, all
    /// but three. Their templates write a line's end behind each, which the models have not seen.
    fn takes_white_space(&self, token: &str, merges_words: bool) -> bool {
        self.architecture == Some("phi3")
            && !merges_words
            && !["<unk>", "<s>", "<|endoftext|>"].contains(&token)
    }
}

/// A token of WordPiece as `tokenizer.json` spells it: GGUF files mark what begins a word, by `▁`, and not
/// what goes on with one.
fn hash_spelled(text: &str, kind: TokenKind) -> String {
    let is_name = text.starts_with('[') && text.ends_with(']') && text.len() > 2;
    match text.strip_prefix('\u{2581}') {
        Some(word) => word.to_owned(),
        None if kind.is_special() || is_name => text.to_owned(),
        None => format!("{CONTINUES}{text}"),
    }
}

/// The token that belongs at one end of a text.
fn added(
    stated: Option<bool>,
    default: bool,
    id: Option<u32>,
    flag: &'static str,
    role: &'static str,
) -> Result<Option<u32>, VocabularyError> {
    match (stated, id) {
        (Some(true), None) => Err(VocabularyError::SpecialMissing { flag, role }),
        (stated, id) => Ok(id.filter(|_| stated.unwrap_or(default))),
    }
}

/// The two tokens of a merge; the separating space is not its first character.
fn split_merge(merge: &str) -> Option<(&str, &str)> {
    let first = merge.chars().next()?.len_utf8();
    let space = first + merge[first..].find(' ')?;
    let right = &merge[space + 1..];
    (!right.is_empty()).then_some((&merge[..space], right))
}

/// The rule's cuts, then the byte-level alphabet.
fn steps(rule: &PreTokenizer) -> Result<Vec<Step>, TokenizerError> {
    let mut steps = Vec::with_capacity(rule.patterns.len() + 1);
    for pattern in rule.patterns {
        steps.push(Step::isolate(pattern).map_err(|error| part("pre_tokenizer", error))?);
    }
    steps.push(Step::Alphabet);
    Ok(steps)
}

fn part(part: &'static str, error: impl std::fmt::Display) -> TokenizerError {
    TokenizerError::Part {
        part,
        detail: error.to_string(),
    }
}
