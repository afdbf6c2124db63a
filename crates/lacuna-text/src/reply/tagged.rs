//! Thoughts between tags, as Qwen, DeepSeek and others write them.
//!
//! A thought comes first or not at all: the same tags further on are what the model speaks about. White
//! space around the thought belongs to the markup, as chat templates have it.

use super::{Item, Pieces};

/// The tags around a thought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tags {
    open: &'static str,
    close: &'static str,
}

impl Tags {
    /// Those in use: of most families; of Gemma 4, where the first also names a channel; of Mistral.
    pub(super) const KNOWN: [Self; 3] = [
        Self::new("<think>", "</think>"),
        Self::new("<|channel>thought\n", "<channel|>"),
        Self::new("[THINK]", "[/THINK]"),
    ];

    const fn new(open: &'static str, close: &'static str) -> Self {
        Self { open, close }
    }

    /// What ends a thought.
    #[must_use]
    pub fn close(self) -> &'static str {
        self.close
    }

    pub(super) fn are_in(self, template: &str) -> bool {
        // Line feeds are written differently in the source of a template.
        template.contains(self.open.trim_end()) && template.contains(self.close)
    }
}

#[derive(Clone, Debug)]
pub(super) struct Tagged {
    tags: Tags,
    state: State,
}

#[derive(Clone, Debug)]
enum State {
    /// What may yet become the first tag.
    Start(String),
    /// In the thought, with what may yet become the end of it.
    Thought { held: String, begun: bool },
    /// After the thought, where only white space has come.
    Gap,
    /// What is said.
    Content,
}

impl Tagged {
    pub(super) fn new(tags: Tags, prompt: &str) -> Self {
        let opened = prompt.trim_end().ends_with(tags.open.trim_end());
        Self {
            tags,
            state: match opened {
                true => State::thought(),
                false => State::Start(String::new()),
            },
        }
    }

    pub(super) fn tags(&self) -> Tags {
        self.tags
    }

    pub(super) fn is_reasoning(&self) -> bool {
        matches!(self.state, State::Thought { .. })
    }

    pub(super) fn take(&mut self, item: &Item<'_>, pieces: &mut Pieces) {
        match *item {
            Item::Text(text) => self.text(text, pieces),
            // Tags are control tokens in some vocabularies and plain ones in others.
            Item::Mark(mark) if self.tags.open.starts_with(mark) || self.tags.close == mark => {
                self.text(mark, pieces);
            }
            Item::Mark(_) => {}
        }
    }

    pub(super) fn finish(&mut self, pieces: &mut Pieces) {
        match std::mem::replace(&mut self.state, State::Content) {
            State::Start(held) => pieces.content(&held),
            State::Thought { held, .. } => pieces.reasoning(held.trim_end()),
            State::Gap | State::Content => {}
        }
    }

    fn text(&mut self, text: &str, pieces: &mut Pieces) {
        match &mut self.state {
            State::Start(held) => {
                held.push_str(text);
                let begun = held.trim_start();
                if let Some(rest) = begun.strip_prefix(self.tags.open) {
                    let rest = rest.to_owned();
                    self.state = State::thought();
                    self.text(&rest, pieces);
                } else if !self.tags.open.starts_with(begun) {
                    pieces.content(held);
                    self.state = State::Content;
                }
            }
            State::Thought { held, begun } => {
                held.push_str(text);
                if let Some((thought, rest)) = held.split_once(self.tags.close) {
                    let rest = rest.to_owned();
                    let thought = if *begun {
                        thought
                    } else {
                        thought.trim_start()
                    };
                    pieces.reasoning(thought.trim_end());
                    self.state = State::Gap;
                    self.text(&rest, pieces);
                } else {
                    release(held, begun, self.tags.close, pieces);
                }
            }
            State::Gap => {
                let said = text.trim_start();
                if !said.is_empty() {
                    pieces.content(said);
                    self.state = State::Content;
                }
            }
            State::Content => pieces.content(text),
        }
    }
}

impl State {
    fn thought() -> Self {
        Self::Thought {
            held: String::new(),
            begun: false,
        }
    }
}

/// Lets go of what is certain to be thought: not white space at its beginning, nor what may belong to the
/// tag that ends it, or to the white space before that.
fn release(held: &mut String, begun: &mut bool, close: &str, pieces: &mut Pieces) {
    if !*begun {
        let spaces = held.len() - held.trim_start().len();
        held.drain(..spaces);
    }
    let tag = (1..close.len())
        .rev()
        .find(|&length| held.ends_with(&close[..length]))
        .unwrap_or(0);
    let certain = held[..held.len() - tag].trim_end().len();
    if certain > 0 {
        pieces.reasoning(&held[..certain]);
        held.drain(..certain);
        *begun = true;
    }
}
