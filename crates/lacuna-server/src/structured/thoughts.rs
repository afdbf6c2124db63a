//! Thoughts that end after so many tokens.
//!
//! Once they are used up, no token but those that end a thought can be chosen, and what the model says next
//! is its own again. A model that opens one thought after another (gpt-oss) is kept from the next.

use std::sync::Arc;

use lacuna_engine::{Constraint, ConstraintError};
use lacuna_text::reply::{Format, Reader};
use lacuna_text::tokenizer::{MARK_CLOSE, MARK_OPEN};
use toktrie::{TokEnv, TokTrie};

use crate::structured::constraint::Use;

/// What names the channel of a thought in [`Format::Harmony`], and what comes before the name.
const CHANNEL: &str = "<|channel|>";
const THOUGHT: &[u8] = b"analysis";

/// Ends the thoughts of a reply after so many tokens, and holds it to another constraint besides, if there is one.
pub(super) struct Thoughts {
    tables: Use,
    reader: Reader,
    /// Tokens that may yet be thought.
    left: usize,
    ending: Arc<Ending>,
    /// How many tokens of the ending have come since it was begun.
    ended: Option<usize>,
    /// Whether the name of a channel comes next.
    at_channel: bool,
    other: Option<Box<dyn Constraint>>,
}

/// How a format ends thoughts, in tokens.
struct Ending {
    tokens: Vec<u32>,
    channel: Option<u32>,
    /// What may begin the name of the channel of a thought.
    names: Vec<u32>,
}

impl Ending {
    /// `None` where the vocabulary does not have it.
    fn of(format: Format, vocabulary: &TokEnv) -> Option<Self> {
        let trie = vocabulary.tok_trie();
        let names = |token: &u32| {
            let name = trie.token(*token);
            !name.is_empty() && THOUGHT.starts_with(name)
        };
        let harmony = format == Format::Harmony;
        Some(Self {
            tokens: match format {
                Format::Harmony => {
                    let mut tokens = marks(&["<|end|>", "<|start|>"], trie)?;
                    tokens.extend(vocabulary.tokenize_bytes(b"assistant"));
                    tokens
                }
                Format::Tagged(tags) => match marks(&[tags.close()], trie) {
                    Some(mark) => mark,
                    None => vocabulary.tokenize_bytes(tags.close().as_bytes()),
                },
            },
            channel: harmony
                .then(|| marks(&[CHANNEL], trie))
                .flatten()
                .map(|all| all[0]),
            names: match harmony {
                true => (0..trie.vocab_size() as u32).filter(names).collect(),
                false => Vec::new(),
            },
        })
    }
}

/// Control tokens by their names.
fn marks(names: &[&str], trie: &TokTrie) -> Option<Vec<u32>> {
    let token = |name: &&str| trie.get_special_token(name);
    names.iter().map(token).collect()
}

impl Thoughts {
    /// For a reply of which `reader` tells thoughts; `None` where nothing ends one.
    pub(super) fn new(
        tables: Use,
        reader: &Reader,
        most: usize,
        other: Option<Box<dyn Constraint>>,
    ) -> Result<Self, Option<Box<dyn Constraint>>> {
        let Some(ending) = Ending::of(reader.format(), tables.vocabulary()) else {
            return Err(other);
        };
        Ok(Self {
            tables,
            reader: reader.clone(),
            left: most,
            ending: Arc::new(ending),
            ended: None,
            at_channel: false,
            other,
        })
    }

    /// A token as the reader has it.
    fn text(&self, token: u32) -> String {
        let trie = self.tables.vocabulary().tok_trie();
        let text = trie.decode_ext(&[token], true);
        let text = String::from_utf8_lossy(&text);
        match trie.is_special_token(token) {
            true => format!("{MARK_OPEN}{text}{MARK_CLOSE}"),
            false => text.into_owned(),
        }
    }
}

impl Constraint for Thoughts {
    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(Self {
            tables: self.tables.clone(),
            reader: self.reader.clone(),
            ending: Arc::clone(&self.ending),
            other: self.other.as_ref().map(|other| other.fork()),
            ..*self
        })
    }

    fn mask(&mut self, logits: &mut [f32]) -> Result<(), ConstraintError> {
        if self.left == 0 && self.reader.is_reasoning() {
            self.ended.get_or_insert(0);
        }
        let next = self.ended.and_then(|ended| self.ending.tokens.get(ended));
        if let Some(next) = next.and_then(|next| usize::try_from(*next).ok())
            && next < logits.len()
        {
            logits.fill(f32::NEG_INFINITY);
            logits[next] = 0.0;
            return Ok(());
        }
        if let Some(other) = &mut self.other {
            other.mask(logits)?;
        }
        if self.left == 0 && self.at_channel {
            for name in &self.ending.names {
                if let Some(logit) = logits.get_mut(*name as usize) {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
        Ok(())
    }

    fn accept(&mut self, token: u32) -> Result<(), ConstraintError> {
        let thought = self.reader.is_reasoning();
        let text = self.text(token);
        self.reader.push(&text);
        if thought && self.reader.is_reasoning() {
            self.left = self.left.saturating_sub(1);
        }
        self.ended = self
            .ended
            .map(|ended| ended + 1)
            .filter(|ended| *ended < self.ending.tokens.len());
        self.at_channel = self.ending.channel == Some(token);
        self.other
            .as_mut()
            .map_or(Ok(()), |other| other.accept(token))
    }

    fn is_complete(&self) -> bool {
        self.other.as_ref().is_some_and(|other| other.is_complete())
    }
}
