//! Text of which only some may name special tokens.
//!
//! A chat template writes its special tokens as text, and whoever writes the messages can write the
//! same text. So where a special token begins or ends, characters of the messages are exchanged for
//! stand-ins before the template sees them, one for one, and whatever it does with a message, the
//! stand-ins go along. In its output a special token with a stand-in in it is not found. Then every
//! stand-in becomes again what it stands for, so that all other text is encoded as it always was.
//!
//! Stand-ins are chosen among characters that the messages do not have.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::Arc;

use aho_corasick::{AhoCorasick, MatchKind};
use tokenizers::AddedToken;
use tokenizers::tokenizer::normalizer::NormalizedString;

use super::Special;
use super::error::VocabularyError;

/// What stand-ins are chosen from, in this order: signs of phonetic and of sign notation (Unicode's
/// blocks Spacing Modifier Letters and Sutton SignWriting), which hardly any text has. Like the
/// punctuation they stand for they are no letters, digits or white space, have no case, and no
/// normalization changes them; unlike characters for private use they are printed as they are by
/// everything that escapes what cannot be printed. The first take two bytes instead of one, so that
/// marking at most doubles a text.
const CANDIDATES: [std::ops::RangeInclusive<char>; 2] =
    ['\u{2EF}'..='\u{2FF}', '\u{1D800}'..='\u{1D9FF}'];

fn is_candidate(character: char) -> bool {
    CANDIDATES.iter().any(|range| range.contains(&character))
}

/// Characters that stand for others.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct StandIns(Arc<[StandIn]>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct StandIn {
    shown: char,
    meant: char,
}

impl StandIns {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// What a character stands for: itself, for most.
    pub(crate) fn meant(&self, shown: char) -> char {
        if !is_candidate(shown) {
            return shown;
        }
        let pair = self.0.iter().find(|pair| pair.shown == shown);
        pair.map_or(shown, |pair| pair.meant)
    }

    fn shown(&self, meant: char) -> Option<char> {
        let pair = self.0.iter().find(|pair| pair.meant == meant);
        pair.map(|pair| pair.shown)
    }

    /// Whether a text has stand-ins.
    pub(crate) fn are_in(&self, text: &str) -> bool {
        !self.is_empty() && text.chars().any(|shown| self.meant(shown) != shown)
    }

    /// The text that is meant.
    pub(crate) fn plain<'a>(&self, text: &'a str) -> Cow<'a, str> {
        if self.are_in(text) {
            text.chars().map(|shown| self.meant(shown)).collect()
        } else {
            Cow::Borrowed(text)
        }
    }

    /// Bytes of the text that is meant.
    pub(super) fn plain_bytes(&self, text: &str) -> usize {
        if self.is_empty() {
            return text.len();
        }
        text.chars().map(|shown| self.meant(shown).len_utf8()).sum()
    }

    /// Each stand-in followed by what it stands for; [`StandIns::from_pairs`] reads it.
    pub(crate) fn pairs(&self) -> String {
        let pairs = self.0.iter();
        pairs.flat_map(|pair| [pair.shown, pair.meant]).collect()
    }

    pub(crate) fn from_pairs(pairs: &str) -> StandIns {
        let mut characters = pairs.chars();
        let next = || Some((characters.next()?, characters.next()?));
        let pairs = std::iter::from_fn(next);
        StandIns(
            pairs
                .map(|(shown, meant)| StandIn { shown, meant })
                .collect(),
        )
    }
}

/// Puts the characters back that stand-ins stand for.
pub(super) fn restore(text: &mut NormalizedString, stand_ins: &StandIns) {
    if stand_ins.are_in(text.get()) {
        text.map(|shown| stand_ins.meant(shown));
    }
}

/// What a chat template wrote, with its own words told from those that it was given.
///
/// [`Tokenizer::encode_marked`](super::Tokenizer::encode_marked) finds special tokens in the former
/// alone.
#[derive(Clone, Debug)]
pub struct MarkedText {
    text: String,
    stand_ins: StandIns,
    special: Special,
}

impl MarkedText {
    pub(crate) fn new(text: String, stand_ins: StandIns, special: Special) -> MarkedText {
        MarkedText {
            text,
            stand_ins,
            special,
        }
    }

    /// The text, of which nothing tells any more where it is from.
    pub fn plain(&self) -> Cow<'_, str> {
        self.stand_ins.plain(&self.text)
    }

    /// The same with each `mark` that the template itself wrote in other words, also its own. What it was given keeps
    /// its own, as long as `mark` is a special token's text.
    #[must_use]
    pub fn with_marks_as(self, mark: &str, words: &str) -> MarkedText {
        MarkedText {
            text: self.text.replace(mark, words),
            ..self
        }
    }

    /// How it is encoded, apart from what was marked.
    pub fn special(&self) -> Special {
        self.special
    }

    pub(super) fn marked(&self) -> (&str, &StandIns) {
        (&self.text, &self.stand_ins)
    }
}

/// Marks what others wrote, for one vocabulary.
#[derive(Debug)]
pub(crate) struct Marker {
    /// The first and the last character of every special token.
    ends: Vec<char>,
    /// Tokens that have one of these, whether special or not; `None` if there are none.
    tokens: Option<AhoCorasick>,
    /// Which of them are special.
    special: Vec<bool>,
}

/// What a conversation holds that marking it depends on.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    ends: bool,
    candidates: BTreeSet<char>,
}

impl Seen {
    /// Notes stand-ins that must not be chosen.
    pub(crate) fn candidates_in(&mut self, text: &str) {
        self.candidates
            .extend(text.chars().filter(|character| is_candidate(*character)));
    }
}

impl Marker {
    pub(super) fn new(added: &[AddedToken]) -> Result<Marker, VocabularyError> {
        let mut ends = Vec::new();
        for token in added.iter().filter(|token| token.special) {
            // White space must stay what it is: templates trim it.
            let text = token.content.trim();
            ends.extend(text.chars().next());
            ends.extend(text.chars().next_back());
        }
        ends.sort_unstable();
        ends.dedup();
        let tokens: Vec<&AddedToken> = added
            .iter()
            .filter(|token| token.content.contains(ends.as_slice()))
            .collect();
        let find = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(tokens.iter().map(|token| &token.content))
            .map_err(|error| VocabularyError::Special {
                detail: error.to_string(),
            })?;
        Ok(Marker {
            special: tokens.iter().map(|token| token.special).collect(),
            tokens: (!tokens.is_empty()).then_some(find),
            ends,
        })
    }

    /// Takes a text into account.
    pub(crate) fn look_at(&self, text: &str, seen: &mut Seen) {
        seen.ends |= text.contains(self.ends.as_slice());
        seen.candidates_in(text);
    }

    /// What to mark texts with of which `seen` tells: nothing if none could name a special token.
    /// `None` if they leave too few characters to choose from.
    pub(crate) fn stand_ins(&self, seen: &Seen) -> Option<StandIns> {
        if !seen.ends {
            return Some(StandIns::default());
        }
        let mut free = CANDIDATES
            .into_iter()
            .flatten()
            .filter(|shown| !seen.candidates.contains(shown));
        let pair = |&meant| {
            let shown = free.next()?;
            Some(StandIn { shown, meant })
        };
        self.ends
            .iter()
            .map(pair)
            .collect::<Option<_>>()
            .map(StandIns)
    }

    /// The text with stand-ins, or `None` if it needs none.
    ///
    /// User-defined tokens that are not special stay as they are: they are found in anyone's text.
    pub(crate) fn mark(&self, text: &str, stand_ins: &StandIns) -> Option<String> {
        if stand_ins.is_empty() || !text.contains(self.ends.as_slice()) {
            return None;
        }
        let mut marked = String::with_capacity(text.len() + text.len() / 8);
        let mut rest = 0;
        for token in self.tokens.iter().flat_map(|tokens| tokens.find_iter(text)) {
            if !self.special[token.pattern()] {
                push_marked(&mut marked, &text[rest..token.start()], stand_ins);
                marked.push_str(&text[token.range()]);
                rest = token.end();
            }
        }
        push_marked(&mut marked, &text[rest..], stand_ins);
        Some(marked)
    }
}

fn push_marked(marked: &mut String, text: &str, stand_ins: &StandIns) {
    let shown = text
        .chars()
        .map(|meant| stand_ins.shown(meant).unwrap_or(meant));
    marked.extend(shown);
}
