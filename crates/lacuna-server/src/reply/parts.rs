//! What the text of a chat's reply turns out to be: thoughts, what is said, and calls of tools.

use std::sync::Arc;

use lacuna_text::reply;

use crate::structured::calls::{Call, CallReader, Piece};

/// Takes the text of a reply apart as it comes.
#[derive(Debug, Clone)]
pub(crate) struct PartReader {
    /// Tells thoughts from what is said, if the model does.
    format: Option<reply::Reader>,
    /// Takes control tokens out of the text, where nothing tells thoughts and the text has any.
    unmarked: Option<reply::Unmarked>,
    /// Finds calls, if tools are offered.
    calls: Option<CallReader>,
    /// Whether thoughts are told.
    tells_thoughts: bool,
}

/// What a stretch of text adds.
#[derive(Debug, Default)]
pub(crate) struct Parts {
    pub(crate) reasoning: String,
    pub(crate) text: String,
    pub(crate) calls: Vec<Call>,
}

impl PartReader {
    pub(crate) fn new(
        format: Option<reply::Reader>,
        calls: Option<CallReader>,
        tells_thoughts: bool,
    ) -> Self {
        Self {
            format,
            unmarked: None,
            calls,
            tells_thoughts,
        }
    }

    /// The same for text with control tokens, of which `kept` are told as text: they mark calls.
    pub(crate) fn keeping(mut self, kept: &Arc<[&'static str]>) -> Self {
        match self.format.take() {
            Some(format) => self.format = Some(format.keeping(Arc::clone(kept))),
            None => self.unmarked = Some(reply::Unmarked::keeping(Arc::clone(kept))),
        }
        self
    }

    /// The same for one of several choices.
    pub(crate) fn of_choice(mut self, choice: usize) -> Self {
        self.calls = self.calls.map(|calls| calls.of_choice(choice));
        self
    }

    /// What all of a text is if nothing looks for anything in it.
    pub(crate) fn none() -> Self {
        Self::new(None, None, true)
    }

    /// Whether the model tells its thoughts from what it says.
    pub(crate) fn knows_thoughts(&self) -> bool {
        self.format.is_some()
    }

    /// Whether what comes next is thought.
    pub(crate) fn is_reasoning(&self) -> bool {
        self.format
            .as_ref()
            .is_some_and(reply::Reader::is_reasoning)
    }

    /// What is certain after `text`.
    pub(crate) fn push(&mut self, text: &str) -> Parts {
        let mut parts = Parts::default();
        match &mut self.format {
            Some(format) => {
                let pieces = format.push(text);
                self.add(pieces, &mut parts);
            }
            None => self.say(text, &mut parts),
        }
        parts
    }

    /// What is left, after `text`, once no more will come.
    pub(crate) fn finish(&mut self, text: &str) -> Parts {
        let mut parts = Parts::default();
        match &mut self.format {
            Some(format) => {
                let pieces = format.finish(text);
                self.add(pieces, &mut parts);
            }
            None => self.say(text, &mut parts),
        }
        if let Some(calls) = &mut self.calls {
            parts.take(calls.finish(""));
        }
        parts
    }

    fn add(&mut self, pieces: Vec<reply::Piece>, parts: &mut Parts) {
        for piece in pieces {
            match piece {
                reply::Piece::Reasoning(text) if self.tells_thoughts => parts.reasoning += &text,
                reply::Piece::Reasoning(_) => {}
                reply::Piece::Content(text) => self.say(&text, parts),
                reply::Piece::Call { name, arguments } => match &mut self.calls {
                    Some(calls) => parts.take(calls.call(name, arguments)),
                    // Nobody offered it.
                    None => parts.text += &arguments,
                },
            }
        }
    }

    fn say(&mut self, text: &str, parts: &mut Parts) {
        let unmarked = self.unmarked.as_mut();
        let unmarked = unmarked.map(|unmarked| unmarked.push(text));
        let text = unmarked.as_deref().unwrap_or(text);
        match &mut self.calls {
            Some(calls) => parts.take(calls.push(text)),
            None => parts.text += text,
        }
    }
}

impl Parts {
    fn take(&mut self, pieces: Vec<Piece>) {
        for piece in pieces {
            match piece {
                Piece::Text(text) => self.text += &text,
                Piece::Call(call) => self.calls.push(call),
            }
        }
    }
}
