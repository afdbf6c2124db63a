//! SentencePiece's byte-pair merging, from pieces and scores.
//!
//! The `tokenizers` crate merges by a list of ranked pairs. SentencePiece has no such list: any two
//! neighbours whose joined text is a piece may merge, the best score first and the leftmost among
//! equals. Ranked pairs cannot say "the leftmost among equals" when one piece has several splits,
//! and runs of spaces are exactly that case, so the algorithm is here. It costs `O(n log n)` in the
//! length of the text.

use std::borrow::Cow;
use std::cmp::{Ordering, Reverse};
use std::collections::hash_map::Entry;
use std::collections::{BinaryHeap, HashMap, TryReserveError};

use super::bigrams::Bigrams;
use super::error::{TokenizerError, VocabularyError, excerpt};
use super::pieces::{TokenKind, byte_token};

#[derive(Clone, Copy, Debug)]
struct Piece {
    id: u32,
    score: f32,
    unused: bool,
}

/// A vocabulary of pieces with scores.
#[derive(Debug)]
pub(super) struct SentencePiece {
    pieces: HashMap<Box<str>, Piece>,
    longest: usize,
    bytes: Box<[Option<u32>; 256]>,
    unknown: Option<u32>,
    user_defined: Vec<Box<str>>,
    /// Where a text may be cut; `None` where pieces are merged through but not put out, since how one
    /// of those comes apart depends on where it was last merged in the whole text.
    bigrams: Option<Bigrams>,
}

/// What a space is in a piece.
pub(super) const VISIBLE_SPACE: char = '\u{2581}';

impl SentencePiece {
    /// Builds the vocabulary; of equal pieces the first counts.
    pub(super) fn new<'a>(
        tokens: impl Iterator<Item = (&'a str, TokenKind, f32)>,
        unknown: Option<u32>,
    ) -> Result<SentencePiece, VocabularyError> {
        let mut pieces = HashMap::new();
        pieces.try_reserve(tokens.size_hint().0)?;
        let mut model = SentencePiece {
            pieces,
            longest: 0,
            bytes: Box::new([None; 256]),
            unknown,
            user_defined: Vec::new(),
            bigrams: Some(Bigrams::none()),
        };
        for (index, (text, kind, score)) in tokens.enumerate() {
            if score.is_nan() {
                return Err(VocabularyError::Score { id: index });
            }
            // The number of tokens was checked to fit.
            let id = u32::try_from(index).unwrap_or(u32::MAX);
            model.add(
                text,
                kind,
                Piece {
                    id,
                    score,
                    unused: kind == TokenKind::Unused,
                },
            );
        }
        model.user_defined.sort_unstable();
        model.user_defined.dedup();
        Ok(model)
    }

    fn add(&mut self, text: &str, kind: TokenKind, piece: Piece) {
        match kind {
            TokenKind::Control | TokenKind::Unknown => {}
            TokenKind::Byte => {
                if let Some(byte) = byte_token(text) {
                    self.bytes[byte as usize].get_or_insert(piece.id);
                }
            }
            TokenKind::Normal | TokenKind::UserDefined | TokenKind::Unused => {
                let text = escape(text);
                if text.is_empty() {
                    return;
                }
                self.longest = self.longest.max(text.len());
                if kind == TokenKind::UserDefined {
                    self.user_defined.push(text.as_ref().into());
                }
                let Entry::Vacant(place) = self.pieces.entry(text.into_owned().into()) else {
                    return;
                };
                let text = place.insert_entry(piece);
                match &mut self.bigrams {
                    Some(bigrams) if !piece.unused => bigrams.add(text.key()),
                    _ => self.bigrams = None,
                }
            }
        }
    }

    pub(super) fn id(&self, text: &str) -> Option<u32> {
        self.pieces.get(text).map(|piece| piece.id)
    }

    /// Whether a text may be cut between these two, each part being encoded for itself.
    pub(super) fn parts(&self, first: char, second: char) -> bool {
        let bigrams = self.bigrams.as_ref();
        bigrams.is_some_and(|bigrams| !bigrams.may_join(first, second))
    }

    /// Whether a run of characters without a piece is one token, however long.
    pub(super) fn joins_unknown(&self) -> bool {
        self.unknown.is_some() && self.bytes.iter().any(Option::is_none)
    }

    /// Appends the ids of `text`, in which spaces are already [visible](VISIBLE_SPACE).
    /// `unknown_before` says whether the text before it ended with a character without a piece.
    pub(super) fn encode(
        &self,
        text: &str,
        unknown_before: &mut bool,
        ids: &mut Vec<u32>,
    ) -> Result<(), TokenizerError> {
        let mut chain = Chain {
            model: self,
            text,
            symbols: self.symbols(text)?,
            queue: BinaryHeap::new(),
            splits: HashMap::new(),
        };
        chain.merge();
        let parts = chain.symbols.iter().filter(|symbol| symbol.len > 0);
        let mut output = Output {
            model: self,
            splits: &chain.splits,
            ids,
            unknown_before,
        };
        parts
            .map(|symbol| symbol.text(text))
            .try_for_each(|part| output.push(part))
    }

    /// Cuts the text into characters and user-defined pieces, the longest of those first.
    fn symbols(&self, text: &str) -> Result<Vec<Symbol>, TryReserveError> {
        let mut symbols: Vec<Symbol> = Vec::new();
        symbols.try_reserve_exact(text.len())?;
        let mut start = 0;
        while let Some(first) = text[start..].chars().next() {
            let frozen = self.user_defined_prefix(&text[start..]);
            let len = frozen.unwrap_or(first.len_utf8());
            let index = symbols.len();
            symbols.push(Symbol {
                start,
                len,
                previous: index.checked_sub(1),
                next: Some(index + 1),
                frozen: frozen.is_some(),
            });
            start += len;
        }
        if let Some(last) = symbols.last_mut() {
            last.next = None;
        }
        Ok(symbols)
    }

    /// The length of the longest user-defined piece that `text` starts with.
    ///
    /// The pieces are sorted, so those that share a prefix are neighbours: each further byte narrows
    /// the range by bisection.
    fn user_defined_prefix(&self, text: &str) -> Option<usize> {
        let mut range = self.user_defined.as_slice();
        let mut found = None;
        for (depth, byte) in text.bytes().enumerate() {
            let key = |piece: &str| piece.as_bytes().get(depth).copied();
            let from = range.partition_point(|piece| key(piece) < Some(byte));
            let to = range.partition_point(|piece| key(piece) <= Some(byte));
            range = &range[from..to];
            match range.first() {
                None => break,
                Some(piece) if piece.len() == depth + 1 => found = Some(depth + 1),
                Some(_) => {}
            }
        }
        found
    }
}

/// Replaces spaces by SentencePiece's visible space.
pub(super) fn escape(text: &str) -> Cow<'_, str> {
    // Of a large vocabulary hardly a token has one.
    match text.as_bytes().contains(&b' ') {
        true => text
            .replace(' ', VISIBLE_SPACE.encode_utf8(&mut [0; 3]))
            .into(),
        false => text.into(),
    }
}

#[derive(Clone, Copy, Debug)]
struct Symbol {
    start: usize,
    /// Zero once merged into its left neighbour.
    len: usize,
    previous: Option<usize>,
    next: Option<usize>,
    /// A user-defined piece never merges.
    frozen: bool,
}

impl Symbol {
    fn text<'a>(&self, text: &'a str) -> &'a str {
        &text[self.start..self.start + self.len]
    }
}

#[derive(Debug)]
struct Pair {
    score: f32,
    left: usize,
    right: usize,
    len: usize,
}

impl Ord for Pair {
    fn cmp(&self, other: &Pair) -> Ordering {
        // Zeros of either sign are equal scores, which `total_cmp` alone would tell apart.
        let by_score = (self.score + 0.0).total_cmp(&(other.score + 0.0));
        by_score.then_with(|| Reverse(self.left).cmp(&Reverse(other.left)))
    }
}

impl PartialOrd for Pair {
    fn partial_cmp(&self, other: &Pair) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Pair {
    fn eq(&self, other: &Pair) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Pair {}

/// A text in the course of merging: symbols as a linked list, candidate pairs by score.
struct Chain<'a> {
    model: &'a SentencePiece,
    text: &'a str,
    symbols: Vec<Symbol>,
    queue: BinaryHeap<Pair>,
    /// Where to cut a piece that may be merged through but not put out: the length of its left part.
    splits: HashMap<&'a str, usize>,
}

impl Chain<'_> {
    fn merge(&mut self) {
        for right in 1..self.symbols.len() {
            self.offer(right - 1, right);
        }
        while let Some(pair) = self.queue.pop() {
            self.apply(&pair);
        }
    }

    fn offer(&mut self, left: usize, right: usize) {
        let (first, second) = (self.symbols[left], self.symbols[right]);
        let len = first.len + second.len;
        if first.frozen || second.frozen || len > self.model.longest {
            return;
        }
        let joined = &self.text[first.start..first.start + len];
        if let Some(piece) = self.model.pieces.get(joined) {
            self.queue.push(Pair {
                score: piece.score,
                left,
                right,
                len,
            });
            if piece.unused {
                self.splits.insert(joined, first.len);
            }
        }
    }

    fn apply(&mut self, pair: &Pair) {
        let (left, right) = (self.symbols[pair.left], self.symbols[pair.right]);
        let outdated = left.len == 0 || right.len == 0 || left.len + right.len != pair.len;
        if outdated {
            return;
        }
        self.symbols[pair.left].len = pair.len;
        self.symbols[pair.left].next = right.next;
        self.symbols[pair.right].len = 0;
        if let Some(next) = right.next {
            self.symbols[next].previous = Some(pair.left);
            self.offer(pair.left, next);
        }
        if let Some(previous) = left.previous {
            self.offer(previous, pair.left);
        }
    }
}

/// Turns merged text into ids.
struct Output<'a> {
    model: &'a SentencePiece,
    splits: &'a HashMap<&'a str, usize>,
    ids: &'a mut Vec<u32>,
    unknown_before: &'a mut bool,
}

impl Output<'_> {
    fn push(&mut self, part: &str) -> Result<(), TokenizerError> {
        let mut parts = vec![part];
        while let Some(part) = parts.pop() {
            match (self.model.pieces.get(part), self.splits.get(part)) {
                (Some(piece), Some(cut)) if piece.unused => {
                    let (left, right) = part.split_at(*cut);
                    parts.extend([right, left]);
                }
                (Some(piece), _) => {
                    self.ids.push(piece.id);
                    *self.unknown_before = false;
                }
                (None, _) => self.push_character(part)?,
            }
        }
        Ok(())
    }

    /// A character that is no piece: its bytes, or one unknown token for a run of them.
    fn push_character(&mut self, part: &str) -> Result<(), TokenizerError> {
        let bytes: Option<Vec<u32>> = part
            .bytes()
            .map(|byte| self.model.bytes[byte as usize])
            .collect();
        match (bytes, self.model.unknown) {
            (Some(bytes), _) => {
                self.ids.extend(bytes);
                *self.unknown_before = false;
            }
            (None, Some(unknown)) => {
                if !*self.unknown_before {
                    self.ids.push(unknown);
                }
                *self.unknown_before = true;
            }
            (None, None) => {
                return Err(TokenizerError::Unencodable {
                    text: excerpt(part),
                });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PIECES: [(&str, f32); 12] = [
        ("\u{2581}", -9.0),
        ("a", -9.0),
        ("b", -9.0),
        ("c", -9.0),
        ("\u{2581}a", -2.0),
        ("\u{2581}\u{2581}", -4.0),
        ("\u{2581}\u{2581}\u{2581}", -3.0),
        ("ab", -3.0),
        ("bab", -1.0),
        ("\u{2581}ab", -2.5),
        ("c\u{2581}", -5.0),
        ("日本", -1.0),
    ];

    fn ids(model: &SentencePiece, parts: &[&str]) -> Vec<u32> {
        let (mut ids, mut unknown_before) = (Vec::new(), false);
        for part in parts {
            model
                .encode(part, &mut unknown_before, &mut ids)
                .expect("an unknown token");
        }
        ids
    }

    proptest! {
        #[test]
        fn a_text_cut_at_every_place_where_it_may_be_is_encoded_as_the_whole(
            text in "[abcd\u{2581}日本é]{0,60}",
            user_defined in any::<bool>(),
        ) {
            let mut pieces = PIECES.map(|(text, score)| (text, TokenKind::Normal, score));
            if user_defined {
                pieces[10].1 = TokenKind::UserDefined;
            }
            let model = SentencePiece::new(pieces.into_iter(), Some(99)).expect("scores");
            let mut parts = Vec::new();
            let (mut start, mut last) = (0, None);
            for (at, character) in text.char_indices() {
                if last.is_some_and(|last| model.parts(last, character)) {
                    parts.push(&text[start..at]);
                    start = at;
                }
                last = Some(character);
            }
            parts.push(&text[start..]);
            prop_assert_eq!(ids(&model, &parts), ids(&model, &[&text]));
        }
    }

    #[test]
    fn a_vocabulary_with_pieces_that_are_not_put_out_is_never_cut() {
        let pieces = [("a", TokenKind::Normal, 0.0), ("b", TokenKind::Unused, 0.0)];
        let model = SentencePiece::new(pieces.into_iter(), None).expect("scores");
        assert!(!model.parts('a', 'b') && !model.parts('x', 'y'));
    }
}
