//! Added tokens in a text, found one after another.
//!
//! This follows the `tokenizers` crate's added vocabulary token for token. That one copies the whole
//! text, with sixteen bytes of offsets for each of its own, before it says where the first token is.

use std::collections::{BTreeMap, HashMap};
use std::sync::LazyLock;

use aho_corasick::{AhoCorasick, MatchKind};
use fancy_regex::Regex;
use tokenizers::AddedToken;

use super::error::{TokenizerError, VocabularyError, excerpt};
use super::normalizer::Normalizer;

/// The tokens that are cut out of a text before it is split into words.
#[derive(Debug)]
pub(super) struct AddedTokens {
    ids: HashMap<String, u32>,
    tokens: BTreeMap<u32, AddedToken>,
    /// Those found in a text as it is.
    raw: Finder,
    /// Those found in it once it is normalized.
    normalized: Finder,
}

/// A stretch of text: other text, or an added token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part<'a> {
    Text(&'a str),
    Token(u32),
}

/// Finds some of the added tokens.
#[derive(Debug)]
pub(super) struct Finder {
    /// `None` where there is nothing to find.
    automaton: Option<AhoCorasick>,
    tokens: Vec<(u32, AddedToken)>,
}

impl AddedTokens {
    /// Tokens with the ids that the file states for their texts. Of those with one id, the last counts.
    pub(super) fn new(
        added: &[AddedToken],
        ids: HashMap<String, u32>,
        normalizer: &Normalizer,
    ) -> Result<AddedTokens, TokenizerError> {
        let mut tokens = BTreeMap::new();
        for token in added.iter().filter(|token| !token.content.is_empty()) {
            if let Some(&id) = ids.get(&token.content) {
                tokens.insert(id, token.clone());
            }
        }
        let (mut raw, mut normalized) = (Vec::new(), Vec::new());
        for (&id, token) in &tokens {
            if token.normalized {
                let text = normalizer
                    .normalize(&token.content, usize::MAX)?
                    .into_owned();
                normalized.push((text, id, token.clone()));
            } else {
                raw.push((token.content.clone(), id, token.clone()));
            }
        }
        Ok(AddedTokens {
            raw: Finder::new(raw)?,
            normalized: Finder::new(normalized)?,
            ids,
            tokens,
        })
    }

    pub(super) fn id(&self, text: &str) -> Option<u32> {
        self.ids.get(text).copied()
    }

    pub(super) fn text(&self, id: u32) -> Option<&str> {
        self.tokens.get(&id).map(|token| token.content.as_str())
    }

    pub(super) fn raw(&self) -> &Finder {
        &self.raw
    }

    pub(super) fn normalized(&self) -> &Finder {
        &self.normalized
    }

    /// Whether a token may stand for more text than its own: the white space beside it.
    pub(super) fn take_white_space(&self) -> bool {
        self.tokens
            .values()
            .any(|token| token.lstrip || token.rstrip)
    }
}

impl Finder {
    fn new(tokens: Vec<(String, u32, AddedToken)>) -> Result<Finder, VocabularyError> {
        let special = |detail: String| VocabularyError::Special { detail };
        let mut seen = HashMap::new();
        for (text, id, _) in &tokens {
            if text.is_empty() {
                return Err(special(format!(
                    "token {id} is empty once it is normalized"
                )));
            }
            if let Some(other) = seen.insert(text.as_str(), id) {
                let text = excerpt(text);
                return Err(special(format!(
                    "tokens {other} and {id} are both {text:?}"
                )));
            }
        }
        let automaton = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(tokens.iter().map(|(text, ..)| text))
            .map_err(|error| special(error.to_string()))?;
        Ok(Finder {
            automaton: (!tokens.is_empty()).then_some(automaton),
            tokens: tokens
                .into_iter()
                .map(|(_, id, token)| (id, token))
                .collect(),
        })
    }

    /// Whether there is nothing to find.
    pub(super) fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Calls `each` with the parts of `text` in order; no part of text is empty. Special tokens are
    /// text unless `specials` says otherwise.
    pub(super) fn cut<'a, E>(
        &self,
        text: &'a str,
        specials: bool,
        mut each: impl FnMut(Part<'a>) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut rest = 0;
        for found in self.automaton.iter().flat_map(|it| it.find_iter(text)) {
            let (id, token) = &self.tokens[found.pattern()];
            let (mut start, mut end) = (found.start(), found.end());
            let part_of_word = || ends_in_word(&text[..start]) || starts_in_word(&text[end..]);
            if (token.special && !specials) || (token.single_word && part_of_word()) {
                continue;
            }
            if token.lstrip {
                // White space that the token before took is not taken again.
                start = text[..start].trim_end().len().max(rest);
            }
            if token.rstrip {
                end = text.len() - text[end..].trim_start().len();
            }
            if rest < start {
                each(Part::Text(&text[rest..start]))?;
            }
            each(Part::Token(*id))?;
            rest = end;
        }
        match rest < text.len() {
            true => each(Part::Text(&text[rest..])),
            false => Ok(()),
        }
    }
}

fn ends_in_word(text: &str) -> bool {
    text.chars().next_back().is_some_and(is_word)
}

fn starts_in_word(text: &str) -> bool {
    text.chars().next().is_some_and(is_word)
}

/// Whether regular expressions count the character to words.
fn is_word(character: char) -> bool {
    static WORD: LazyLock<Option<Regex>> = LazyLock::new(|| Regex::new(r"^\w$").ok());
    let word = WORD
        .as_ref()
        .map(|it| it.is_match(character.encode_utf8(&mut [0; 4])));
    matches!(word, Some(Ok(true)))
}
