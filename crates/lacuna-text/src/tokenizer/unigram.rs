//! SentencePiece's unigram model: of all ways to write a word in pieces, the one whose scores add up to most.
//!
//! The `tokenizers` crate allocates for every piece it considers and keeps words for ever. Results are its
//! own, also which of two equal sums wins. A word costs its characters times those of the longest piece.

use std::collections::HashMap;

use serde_json::json;

use super::character_map::CharacterMap;
use super::error::{TokenizerError, VocabularyError, excerpt};
use super::normalizer::{self, Act, Effect, Normalizer};
use super::parts;
use super::pieces::{TokenKind, byte_token};
use super::words::Step;

/// What the worst piece's score is lowered by for a character that has none, as SentencePiece has it.
const UNKNOWN_PENALTY: f64 = 10.0;

/// Bytes of a piece at most; published ones have up to 48. A word costs its length times this.
const LONGEST_PIECE: usize = 256;

/// What encoding takes of each byte of a word: an end, and its share of the pieces.
pub(super) const BYTES_PER_BYTE: usize = 64;

/// A vocabulary of pieces with the logarithms of their probabilities.
#[derive(Debug)]
pub(super) struct Unigram {
    pieces: HashMap<Box<str>, (u32, f64)>,
    longest: usize,
    unknown: Option<u32>,
    unknown_score: f64,
    /// Tokens of bytes, where characters without a piece become them.
    bytes: Option<Box<[u32; 256]>>,
}

/// The best way to write a word up to some byte of it.
#[derive(Clone, Copy)]
struct End {
    score: f64,
    /// Where its last piece begins; none for a byte where no piece ends.
    start: Option<usize>,
    /// That piece; none for a character that has none.
    piece: Option<u32>,
}

impl Unigram {
    /// Builds the vocabulary; of equal pieces the last counts, as in `tokenizers`.
    pub(super) fn new<'a>(
        tokens: impl Iterator<Item = (&'a str, TokenKind, f64)>,
        unknown: Option<u32>,
        byte_fallback: bool,
    ) -> Result<Unigram, TokenizerError> {
        let mut pieces = HashMap::new();
        pieces.try_reserve(tokens.size_hint().0)?;
        let (mut longest, mut least) = (0, f64::INFINITY);
        let mut bytes = [None; 256];
        for (id, (text, kind, score)) in (0u32..).zip(tokens) {
            if score.is_nan() {
                return Err(VocabularyError::Score { id: id as usize }.into());
            }
            least = least.min(score);
            if let Some(byte) = byte_token(text) {
                bytes[usize::from(byte)] = Some(id);
            }
            if matches!(kind, TokenKind::Normal | TokenKind::UserDefined) && !text.is_empty() {
                if text.len() > LONGEST_PIECE {
                    return Err(TokenizerError::UnsupportedPart {
                        part: "model option",
                        kind: format!("piece of more than {LONGEST_PIECE} bytes"),
                    });
                }
                longest = longest.max(text.len());
                pieces.insert(text.into(), (id, score));
            }
        }
        let bytes = bytes.into_iter().collect::<Option<Vec<u32>>>();
        let bytes = bytes.and_then(|bytes| bytes.into_boxed_slice().try_into().ok());
        Ok(Unigram {
            pieces,
            longest,
            unknown,
            unknown_score: least - UNKNOWN_PENALTY,
            bytes: bytes.filter(|_| byte_fallback),
        })
    }

    pub(super) fn id(&self, text: &str) -> Option<u32> {
        self.pieces.get(text).map(|(id, _)| *id)
    }

    /// Appends the ids of a word, in which spaces are already visible.
    pub(super) fn encode(&self, word: &str, ids: &mut Vec<u32>) -> Result<(), TokenizerError> {
        let ends = self.ends(word)?;
        let mut pieces = Vec::new();
        let mut end = word.len();
        while end > 0 {
            let End { start, piece, .. } = ends[end];
            // Every character ends a piece or is unknown, so every end that is reached has a start.
            let start = start.unwrap_or(0);
            pieces.push((start..end, piece));
            end = start;
        }
        let mut after_unknown = false;
        for (range, piece) in pieces.into_iter().rev() {
            match (piece, &self.bytes, self.unknown) {
                (Some(id), ..) => ids.push(id),
                (None, Some(bytes), _) => {
                    let text = word[range].bytes();
                    ids.extend(text.map(|byte| bytes[usize::from(byte)]));
                }
                // Unknown characters beside one another are one token.
                (None, None, Some(unknown)) if !after_unknown => ids.push(unknown),
                (None, None, Some(_)) => {}
                (None, None, None) => {
                    return Err(TokenizerError::Unencodable {
                        text: excerpt(&word[range]),
                    });
                }
            }
            after_unknown = piece.is_none();
        }
        Ok(())
    }

    /// Of each byte of `word`, the best way to get there.
    fn ends(&self, word: &str) -> Result<Vec<End>, TokenizerError> {
        let nowhere = End {
            score: 0.0,
            start: None,
            piece: None,
        };
        let mut ends = Vec::new();
        ends.try_reserve_exact(word.len() + 1)?;
        ends.resize(word.len() + 1, nowhere);
        for (start, character) in word.char_indices() {
            let before = ends[start].score;
            let mut offer = |end: usize, score: f64, piece: Option<u32>| {
                let known = &mut ends[end];
                let score = score + before;
                if known.start.is_none() || score > known.score {
                    *known = End {
                        score,
                        start: Some(start),
                        piece,
                    };
                }
            };
            let rest = &word[start..];
            let mut has_piece = false;
            for (at, character) in rest.char_indices() {
                let length = at + character.len_utf8();
                if length > self.longest {
                    break;
                }
                if let Some((id, score)) = self.pieces.get(&rest[..length]) {
                    offer(start + length, *score, Some(*id));
                    has_piece |= at == 0;
                }
            }
            if !has_piece {
                offer(start + character.len_utf8(), self.unknown_score, None);
            }
        }
        Ok(ends)
    }
}

/// What happens to a text before, in files that do not spell it out: characters are mapped, and words are what
/// is between white space, each with a visible space in front.
pub(super) fn words(
    character_map: Option<&[u8]>,
) -> Result<(Normalizer, Vec<Step>), TokenizerError> {
    let map = character_map.map(CharacterMap::new).transpose()?;
    let step = |map| normalizer::Step {
        name: "character map".to_owned(),
        act: Act::Map(map),
        effect: Effect::Remove,
    };
    let normalizer = Normalizer::new(map.map(step).into_iter().collect());
    let steps = parts::steps(Some(&json!({
        "type": "Sequence",
        "pretokenizers": [
            {"type": "WhitespaceSplit"},
            {"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "always", "split": true},
        ],
    })))?;
    Ok((normalizer, steps))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(pieces: &[(&str, f64)], unknown: Option<u32>, byte_fallback: bool) -> Unigram {
        let tokens = pieces
            .iter()
            .map(|(text, score)| (*text, TokenKind::Normal, *score));
        Unigram::new(tokens, unknown, byte_fallback).expect("a vocabulary")
    }

    fn ids(model: &Unigram, word: &str) -> Vec<u32> {
        let mut ids = Vec::new();
        model.encode(word, &mut ids).expect("encodable");
        ids
    }

    #[test]
    fn the_sum_decides_and_not_the_longest_piece() {
        let model = model(
            &[
                ("a", -1.0),
                ("b", -1.0),
                ("c", -1.0),
                ("ab", -1.5),
                ("abc", -9.0),
                ("bc", -0.1),
            ],
            None,
            false,
        );
        assert_eq!(ids(&model, "abc"), [0, 5]);
        assert_eq!(ids(&model, "ab"), [3]);
        assert!(ids(&model, "").is_empty());
        let refused = model.encode("axb", &mut Vec::new());
        assert!(matches!(refused, Err(TokenizerError::Unencodable { .. })));
    }

    #[test]
    fn unknown_characters_are_one_token_or_their_bytes() {
        let known = model(&[("?", -2.0), ("a", -1.0)], Some(0), false);
        assert_eq!(ids(&known, "xäaßy"), [0, 1, 0]);
        let names: Vec<String> = (0..=255u8).map(|byte| format!("<0x{byte:02X}>")).collect();
        let mut pieces: Vec<(&str, f64)> = names.iter().map(|name| (name.as_str(), 0.0)).collect();
        pieces.push(("a", -1.0));
        let bytes = model(&pieces, None, true);
        assert_eq!(ids(&bytes, "aä"), [256, 0xC3, 0xA4]);
    }

    #[test]
    fn pieces_that_no_text_should_cost_are_refused() {
        let long = "x".repeat(LONGEST_PIECE + 1);
        for (text, score) in [(long.as_str(), 0.0), ("a", f64::NAN)] {
            let tokens = [(text, TokenKind::Normal, score)].into_iter();
            assert!(Unigram::new(tokens, None, false).is_err());
        }
    }
}
