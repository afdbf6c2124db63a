//! Replies in pieces.

use lacuna_text::reply::{Format, Piece};
use lacuna_text::tokenizer::{MARK_CLOSE, MARK_OPEN};
use proptest::prelude::*;

/// A control token in a text.
pub(crate) fn mark(name: &str) -> String {
    format!("{MARK_OPEN}{name}{MARK_CLOSE}")
}

/// What a reply is when it is given in these parts, with texts of one kind put together.
pub(crate) fn read<'a>(
    format: Format,
    prompt: &str,
    parts: impl IntoIterator<Item = &'a str>,
) -> Vec<Piece> {
    let mut reader = format.reader(prompt);
    let mut pieces: Vec<Piece> = parts
        .into_iter()
        .flat_map(|part| reader.push(part))
        .collect();
    pieces.extend(reader.finish(""));
    let mut all: Vec<Piece> = Vec::new();
    for piece in pieces {
        match (all.last_mut(), piece) {
            (Some(Piece::Reasoning(last)), Piece::Reasoning(more))
            | (Some(Piece::Content(last)), Piece::Content(more)) => last.push_str(&more),
            (_, piece) => all.push(piece),
        }
    }
    all
}

/// The characters of a text, each by itself.
pub(crate) fn characters(text: &str) -> impl Iterator<Item = &str> {
    let ends = text.char_indices().map(|(at, _)| at);
    ends.map(|at| {
        let rest = &text[at..];
        let length = rest.chars().next().map_or(0, char::len_utf8);
        &rest[..length]
    })
}

/// A text and places to cut it.
pub(crate) fn cut(text: &str, cuts: &[prop::sample::Index]) -> Vec<String> {
    let ends: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
    if ends.is_empty() {
        return Vec::new();
    }
    let mut places: Vec<usize> = cuts.iter().map(|cut| *cut.get(&ends)).collect();
    places.extend([0, text.len()]);
    places.sort_unstable();
    places
        .windows(2)
        .map(|pair| text[pair[0]..pair[1]].to_owned())
        .collect()
}
