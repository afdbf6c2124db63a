//! Log-probabilities, in the two forms that OpenAI has.

use std::collections::TryReserveError;

use lacuna_engine::TokenLogprobs;
use lacuna_models::Model;
use serde::Serialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

/// JSON has no infinity; this is what OpenAI sends for a token that cannot come.
const IMPOSSIBLE: f32 = -9999.0;

/// A token with its log-probabilities, which the first one of a prompt has none of.
#[derive(Debug, Clone)]
pub(crate) struct Scored {
    pub(crate) token: u32,
    pub(crate) logprobs: Option<TokenLogprobs>,
}

/// How tokens are called.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TokenNames<'a> {
    model: &'a Model,
    /// By their ids, as `token_id:5`, of which no two are alike, and not by their text.
    ids: bool,
}

/// The log-probabilities of a choice's tokens as JSON text, written token by token.
#[derive(Debug)]
pub(crate) enum Scores {
    /// The form of chats: an object per token.
    Chat(List),
    /// The form of completions: lists side by side.
    Text {
        tokens: List,
        token_logprobs: List,
        top_logprobs: List,
        text_offset: List,
        next: TextPlace,
    },
}

/// Where in a text the next of its tokens stands. Tokens may end within a character.
#[derive(Debug, Clone, Default)]
pub(crate) struct TextPlace {
    /// The character at which it begins, or that it goes on with.
    character: usize,
    /// What there is of a character that is not complete.
    begun: Vec<u8>,
}

impl TextPlace {
    /// Goes on behind a token of these bytes. What cannot become a character is one U+FFFD, as it is in the text.
    fn pass(&mut self, bytes: &[u8]) {
        self.begun.extend_from_slice(bytes);
        let mut rest = self.begun.as_slice();
        while let Err(error) = std::str::from_utf8(rest) {
            let (whole, other) = rest.split_at(error.valid_up_to());
            self.character += characters(whole);
            let Some(length) = error.error_len() else {
                self.begun = other.to_vec();
                return;
            };
            self.character += 1;
            rest = &other[length..];
        }
        self.character += characters(rest);
        self.begun.clear();
    }
}

/// How many there are in valid UTF-8: all bytes but those that go on with one.
fn characters(text: &[u8]) -> usize {
    text.iter().filter(|&&byte| byte & 0xC0 != 0x80).count()
}

/// [`Scores`] that are complete.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(crate) enum ScoresText {
    Chat {
        content: Box<RawValue>,
        refusal: (),
    },
    Text {
        tokens: Box<RawValue>,
        token_logprobs: Box<RawValue>,
        top_logprobs: Box<RawValue>,
        text_offset: Box<RawValue>,
    },
}

/// The form that vLLM has for prompts: for each token, what it and the likeliest ones in its place
/// are, by their ids.
#[derive(Debug)]
pub(crate) struct PromptScores {
    /// The number of those that are listed.
    top: usize,
    list: List,
}

/// A JSON list that is written item by item.
#[derive(Debug, Default)]
pub(crate) struct List(String);

impl<'a> TokenNames<'a> {
    pub(crate) fn texts(model: &'a Model) -> Self {
        Self { model, ids: false }
    }

    pub(crate) fn ids(model: &'a Model) -> Self {
        Self { model, ids: true }
    }

    fn name(self, token: u32) -> String {
        match self.ids {
            true => format!("token_id:{token}"),
            false => self.text(token),
        }
    }

    fn bytes(self, token: u32) -> &'a [u8] {
        let tokenizer = self.model.tokenizer();
        tokenizer.token_bytes(token).unwrap_or_default()
    }

    /// A token's text, with U+FFFD where it is a part of a character.
    fn text(self, token: u32) -> String {
        String::from_utf8_lossy(self.bytes(token)).into_owned()
    }
}

impl Default for Scores {
    fn default() -> Self {
        Self::of_chat()
    }
}

impl Scores {
    pub(crate) fn of_chat() -> Self {
        Self::Chat(List::default())
    }

    /// Of a part of a text whose first token stands at `next`.
    pub(crate) fn of_text_from(next: TextPlace) -> Self {
        Self::Text {
            tokens: List::default(),
            token_logprobs: List::default(),
            top_logprobs: List::default(),
            text_offset: List::default(),
            next,
        }
    }

    /// # Errors
    /// When the system refuses memory.
    pub(crate) fn push(
        &mut self,
        names: TokenNames<'_>,
        scored: &Scored,
    ) -> Result<(), TryReserveError> {
        match self {
            Self::Chat(list) => match &scored.logprobs {
                Some(logprobs) => list.push(&chat_token(names, scored.token, logprobs)),
                None => Ok(()),
            },
            Self::Text {
                tokens,
                token_logprobs,
                top_logprobs,
                text_offset,
                next,
            } => {
                let logprobs = scored.logprobs.as_ref();
                text_offset.push(&Value::from(next.character))?;
                next.pass(names.bytes(scored.token));
                tokens.push(&Value::from(names.name(scored.token)))?;
                let chosen = logprobs.map(|logprobs| finite(logprobs.chosen));
                token_logprobs.push(&Value::from(chosen))?;
                let listed = logprobs.map(|logprobs| listed(names, scored.token, logprobs));
                top_logprobs.push(&Value::from(listed))
            }
        }
    }

    /// Where the next token of the text stands.
    pub(crate) fn next(&self) -> TextPlace {
        match self {
            Self::Chat(_) => TextPlace::default(),
            Self::Text { next, .. } => next.clone(),
        }
    }

    /// Bytes written so far.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::Chat(list) => list.0.len(),
            Self::Text {
                tokens,
                token_logprobs,
                top_logprobs,
                text_offset,
                ..
            } => [tokens, token_logprobs, top_logprobs, text_offset]
                .map(|list| list.0.len())
                .iter()
                .sum(),
        }
    }

    /// What was written, unless that is nothing.
    pub(crate) fn close(self) -> Option<ScoresText> {
        (self.bytes() > 0).then(|| match self {
            Self::Chat(content) => ScoresText::Chat {
                content: content.close(),
                refusal: (),
            },
            Self::Text {
                tokens,
                token_logprobs,
                top_logprobs,
                text_offset,
                ..
            } => ScoresText::Text {
                tokens: tokens.close(),
                token_logprobs: token_logprobs.close(),
                top_logprobs: top_logprobs.close(),
                text_offset: text_offset.close(),
            },
        })
    }
}

impl PromptScores {
    pub(crate) fn new(top: usize) -> Self {
        Self {
            top,
            list: List::default(),
        }
    }

    /// # Errors
    /// When the system refuses memory.
    pub(crate) fn push(
        &mut self,
        names: TokenNames<'_>,
        scored: &Scored,
    ) -> Result<(), TryReserveError> {
        let entry = |token: u32, logprob: f32, rank: usize| {
            let entry = json!({
                "logprob": finite(logprob),
                "rank": rank,
                "decoded_token": names.text(token),
            });
            (token.to_string(), entry)
        };
        let Some(logprobs) = &scored.logprobs else {
            return self.list.push(&Value::Null);
        };
        let likeliest = logprobs.top.iter().take(self.top).zip(1..);
        let mut listed: Map<String, Value> = likeliest
            .map(|(&(token, logprob), rank)| entry(token, logprob, rank))
            .collect();
        listed.extend([entry(scored.token, logprobs.chosen, logprobs.rank)]);
        self.list.push(&Value::Object(listed))
    }

    pub(crate) fn close(self) -> Box<RawValue> {
        self.list.close()
    }
}

impl List {
    fn push(&mut self, item: &Value) -> Result<(), TryReserveError> {
        let item = item.to_string();
        // A mark before it, and the one after the last.
        self.0.try_reserve(item.len() + 2)?;
        self.0.push(if self.0.is_empty() { '[' } else { ',' });
        self.0 += &item;
        Ok(())
    }

    fn close(mut self) -> Box<RawValue> {
        self.0 += if self.0.is_empty() { "[]" } else { "]" };
        let list = RawValue::from_string(self.0);
        list.unwrap_or_else(|_| unreachable!("a list of values is JSON"))
    }
}

fn chat_token(names: TokenNames<'_>, token: u32, logprobs: &TokenLogprobs) -> Value {
    let mut entry = chat_entry(names, token, logprobs.chosen);
    let top = logprobs.top.iter();
    entry["top_logprobs"] = top
        .map(|&(token, logprob)| chat_entry(names, token, logprob))
        .collect();
    entry
}

/// The likeliest tokens in the place of `token`, and that, be it one of them or not.
fn listed(names: TokenNames<'_>, token: u32, logprobs: &TokenLogprobs) -> Map<String, Value> {
    let own = (token, logprobs.chosen);
    let listed = logprobs.top.iter().copied().chain([own]);
    listed
        .map(|(token, logprob)| (names.name(token), finite(logprob).into()))
        .collect()
}

fn chat_entry(names: TokenNames<'_>, token: u32, logprob: f32) -> Value {
    json!({
        "token": names.name(token),
        "logprob": finite(logprob),
        "bytes": names.bytes(token),
    })
}

fn finite(logprob: f32) -> f32 {
    logprob.max(IMPOSSIBLE)
}

#[cfg(test)]
mod tests {
    use super::TextPlace;

    #[test]
    fn offsets_are_of_the_text_where_tokens_end_within_characters() {
        let offsets = |tokens: &[&[u8]]| {
            let mut place = TextPlace::default();
            let offsets = tokens.iter().map(|bytes| {
                let before = place.character;
                place.pass(bytes);
                before
            });
            let offsets: Vec<usize> = offsets.collect();
            (offsets, place.character)
        };
        assert_eq!(offsets(&[b"ab", b"c"]), (vec![0, 2], 3));
        // U+1F600 by its bytes, between two letters.
        let face = [&b"a"[..], b"\xF0", b"\x9F", b"\x98", b"\x80", b"b"];
        assert_eq!(offsets(&face), (vec![0, 1, 1, 1, 1, 2], 3));
        // A token may end one character and begin another.
        let between = [&b"a\xC3"[..], b"\xA9\xC3", b"\xA8b"];
        assert_eq!(offsets(&between), (vec![0, 1, 2], 4));
        let broken = [&b"\xF0\x9F"[..], b"a", b"\xFF", b"b"];
        assert_eq!(offsets(&broken), (vec![0, 0, 2, 3], 4));
        let text = String::from_utf8_lossy(b"\xF0\x9Fa\xFFb").chars().count();
        assert_eq!(text, 4);
    }
}
