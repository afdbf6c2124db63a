//! Harmony, the format of gpt-oss.
//!
//! ```text
//! reply    header <|message|> body ( <|end|> <|start|> header <|message|> body )* <|return|> or <|call|>
//! header   [assistant] [to=functions.NAME] <|channel|>CHANNEL [to=functions.NAME] [[<|constrain|>]json]
//! ```
//!
//! The prompt has the first `<|start|>assistant`. Bodies on the channel `analysis` are thought, those to
//! a function are its arguments, all others are said: `final`, and `commentary` on what the model is
//! about to do. (`docs/format.md` of openai/harmony, and what its parser accepts.)

use super::{Item, Pieces};
use crate::tokenizer::{MARK_CLOSE, MARK_OPEN};

const START: &str = "<|start|>";
const CHANNEL: &str = "<|channel|>";
const MESSAGE: &str = "<|message|>";
/// What ends a message. The last two end the reply too, unless that was asked not to happen.
const ENDS: [&str; 3] = ["<|end|>", "<|return|>", "<|call|>"];

/// The namespace of functions that a request offers.
const FUNCTIONS: &str = "functions.";

/// Bytes of a header at most. The longest name of a function has 64.
const MOST_HEADER: usize = 256;

/// What comes between two messages of one kind.
const PARAGRAPH: &str = "\n\n";

#[derive(Clone, Debug)]
pub(super) struct Harmony {
    state: State,
    /// Whether something has been thought, and said, before this message.
    thought: bool,
    said: bool,
}

#[derive(Clone, Debug)]
enum State {
    /// In a header, with its marks as they are in the text.
    Header {
        text: String,
        after_start: bool,
    },
    Body {
        kind: Kind,
        begun: bool,
    },
    /// After a message, with white space that belongs to none.
    Between(String),
}

/// What a body is.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    Reasoning,
    Content,
    Call { name: String, arguments: String },
}

impl Harmony {
    pub(super) fn new() -> Self {
        Self {
            state: State::header(false),
            thought: false,
            said: false,
        }
    }

    pub(super) fn is_reasoning(&self) -> bool {
        matches!(
            self.state,
            State::Body {
                kind: Kind::Reasoning,
                ..
            }
        )
    }

    pub(super) fn take(&mut self, item: &Item<'_>, pieces: &mut Pieces) {
        match *item {
            Item::Text(text) => self.text(text, pieces),
            Item::Mark(MESSAGE) => self.message(),
            Item::Mark(START) => self.end(State::header(true), pieces),
            Item::Mark(mark) if ENDS.contains(&mark) => {
                self.end(State::Between(String::new()), pieces);
            }
            Item::Mark(mark) => self.mark(mark, pieces),
        }
    }

    pub(super) fn finish(&mut self, pieces: &mut Pieces) {
        self.end(State::Between(String::new()), pieces);
    }

    fn text(&mut self, text: &str, pieces: &mut Pieces) {
        match &mut self.state {
            State::Header { text: header, .. } => {
                header.push_str(text);
                // No header goes on like this, so nothing is gained by waiting for its end.
                if header.len() > MOST_HEADER || header.contains('\n') {
                    self.give_up_header(pieces);
                }
            }
            State::Body { .. } => self.body(text, pieces),
            State::Between(space) => {
                space.push_str(text);
                if !space.trim_start().is_empty() {
                    let text = std::mem::take(space);
                    self.state = State::body(Kind::Content);
                    self.body(&text, pieces);
                }
            }
        }
    }

    /// Takes text of a body.
    fn body(&mut self, text: &str, pieces: &mut Pieces) {
        let State::Body { kind, begun } = &mut self.state else {
            return;
        };
        let first = !std::mem::replace(begun, true);
        match kind {
            Kind::Reasoning => {
                if std::mem::replace(&mut self.thought, true) && first {
                    pieces.reasoning(PARAGRAPH);
                }
                pieces.reasoning(text);
            }
            Kind::Content => {
                if std::mem::replace(&mut self.said, true) && first {
                    pieces.content(PARAGRAPH);
                }
                pieces.content(text);
            }
            Kind::Call { arguments, .. } => arguments.push_str(text),
        }
    }

    /// A header has come to its end.
    fn message(&mut self) {
        match &self.state {
            State::Header { text, .. } => self.state = State::body(Header::read(text).kind()),
            State::Between(_) => self.state = State::body(Kind::Content),
            // One that stands where it means nothing.
            State::Body { .. } => {}
        }
    }

    /// A mark that ends nothing by itself.
    fn mark(&mut self, mark: &str, pieces: &mut Pieces) {
        if mark == CHANNEL && !matches!(self.state, State::Header { .. }) {
            // The message before it was not ended, or this one not begun.
            self.end(State::header(true), pieces);
        }
        if let State::Header { text, .. } = &mut self.state {
            text.push(MARK_OPEN);
            text.push_str(mark);
            text.push(MARK_CLOSE);
            if text.len() > MOST_HEADER {
                self.give_up_header(pieces);
            }
        }
    }

    /// Ends what there is and goes on with `next`.
    fn end(&mut self, next: State, pieces: &mut Pieces) {
        if let State::Header { text, after_start } = &self.state
            && !Header::read(text).is_markup(*after_start)
        {
            self.give_up_header(pieces);
        }
        if let State::Body {
            kind: Kind::Call { name, arguments },
            ..
        } = std::mem::replace(&mut self.state, next)
        {
            pieces.call(name, arguments);
        }
    }

    /// Makes a body of what should have been a header.
    fn give_up_header(&mut self, pieces: &mut Pieces) {
        let State::Header { text, .. } = &self.state else {
            return;
        };
        let (kind, text) = Header::read(text).as_body();
        self.state = State::body(kind);
        if !text.is_empty() {
            self.body(&text, pieces);
        }
    }
}

impl State {
    fn header(after_start: bool) -> Self {
        Self::Header {
            text: String::new(),
            after_start,
        }
    }

    fn body(kind: Kind) -> Self {
        Self::Body { kind, begun: false }
    }
}

/// A header, taken apart.
struct Header<'a> {
    /// Before the first mark: who speaks, and sometimes to whom.
    author: &'a str,
    /// Each mark, and the text after it.
    parts: Vec<(&'a str, &'a str)>,
}

impl<'a> Header<'a> {
    fn read(text: &'a str) -> Self {
        let mut parts = text.split(MARK_OPEN);
        Self {
            author: parts.next().unwrap_or_default(),
            parts: parts
                .filter_map(|part| part.split_once(MARK_CLOSE))
                .collect(),
        }
    }

    /// The text of the channel's part: its name, and sometimes to whom the message goes.
    fn channel(&self) -> Option<&'a str> {
        let part = self.parts.iter().find(|(mark, _)| *mark == CHANNEL);
        part.map(|(_, text)| *text)
    }

    fn kind(&self) -> Kind {
        let texts = [self.author, self.channel().unwrap_or_default()];
        let mut words = texts.into_iter().flat_map(str::split_whitespace);
        let recipient = words.find_map(|word| word.strip_prefix("to="));
        if let Some(name) = recipient.and_then(|to| to.strip_prefix(FUNCTIONS)) {
            return Kind::Call {
                name: name.to_owned(),
                arguments: String::new(),
            };
        }
        let channel = self.channel().unwrap_or_default();
        match channel.split_whitespace().next() {
            Some("analysis") => Kind::Reasoning,
            _ => Kind::Content,
        }
    }

    /// Whether all of it is the beginning of a header, so that nothing that the model has to say is lost
    /// with it.
    fn is_markup(&self, after_start: bool) -> bool {
        let addressed = |word: &str| word.starts_with("to=");
        let mut author = self.author.split_whitespace();
        let author_is = match after_start {
            true => author.all(|word| addressed(word) || "assistant".starts_with(word)),
            false => author.all(addressed),
        };
        let channel_is = |text: &str| {
            let mut words = text.split_whitespace();
            let name = words.next().unwrap_or_default();
            let known = ["analysis", "commentary", "final"];
            known.iter().any(|channel| channel.starts_with(name))
                && words.all(|word| addressed(word) || word == "json")
        };
        let part_is = |&(mark, text): &(&str, &str)| match mark {
            CHANNEL => channel_is(text),
            _ => text.split_whitespace().count() <= 1,
        };
        author_is && self.parts.iter().all(part_is)
    }

    /// What it is if it is no header: a body whose beginning was left out. A channel that it names
    /// still says what kind.
    fn as_body(&self) -> (Kind, String) {
        let known = |text: &'a str| {
            let kinds = [
                ("analysis", Kind::Reasoning),
                ("commentary", Kind::Content),
                ("final", Kind::Content),
            ];
            kinds.into_iter().find_map(|(name, kind)| {
                let rest = text.strip_prefix(name)?;
                let ends = !rest.starts_with(|next: char| next.is_alphanumeric());
                ends.then(|| (kind, rest.trim_start()))
            })
        };
        let mut kind = Kind::Content;
        let author = match self.parts.is_empty() {
            true => self.author,
            // Who speaks is no part of what is said.
            false => self.author.strip_prefix("assistant").unwrap_or(self.author),
        };
        let mut text = author.to_owned();
        for &(mark, part) in &self.parts {
            match known(part).filter(|_| mark == CHANNEL) {
                Some((of_channel, rest)) => {
                    kind = of_channel;
                    text.push_str(rest);
                }
                None => text.push_str(part),
            }
        }
        (kind, text)
    }
}
