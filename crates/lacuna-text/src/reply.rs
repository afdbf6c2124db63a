//! Reply formats: which part of what a model writes is thought, which is said, and which calls a tool.
//!
//! A [`Reader`] takes the text of a reply as it comes and tells the parts apart as soon as they are
//! certain. What it finds does not depend on the pieces in which the text comes. It refuses nothing: of
//! a reply that does not keep to its format, what is not markup is content.
//!
//! Where control tokens are markup, the text is to be decoded with
//! [`SpecialText::Mark`](crate::tokenizer::SpecialText::Mark): a model that quotes its own markup, letter
//! by letter, has not used it.

mod effort;
mod harmony;
mod tagged;

pub use effort::{Effort, UnknownEffort};
use harmony::Harmony;
use tagged::Tagged;
pub use tagged::Tags;

use std::sync::Arc;

use crate::tokenizer::{MARK_CLOSE, MARK_OPEN};

/// How a model tells its thoughts and calls from what it says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Messages with headers on channels, as gpt-oss writes them.
    Harmony,
    /// A thought between two tags, before everything else.
    Tagged(Tags),
}

/// A part of a reply. Parts of one kind that follow one another are one text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// What the model thinks before it answers.
    Reasoning(String),
    /// What it says.
    Content(String),
    /// A call of a function, whole. The arguments are as the model wrote them: JSON if all went well.
    Call {
        /// Of the function.
        name: String,
        /// Its arguments.
        arguments: String,
    },
}

/// Finds the parts of a reply as it comes.
///
/// # Examples
///
/// ```
/// # use lacuna_text::reply::{Format, Piece};
/// let template = "{{ '<think>' in messages[0].content or '</think>' }}";
/// let format = Format::of(template).expect("it has both tags");
/// let mut reader = format.reader("<|im_start|>assistant\n");
/// let mut pieces = reader.push("<think>\nTwo and two.\n</th");
/// pieces.extend(reader.finish("ink>\n\nFour."));
/// let expected = [Piece::Reasoning("Two and two.".into()), Piece::Content("Four.".into())];
/// assert_eq!(pieces, expected);
/// ```
#[derive(Clone, Debug)]
pub struct Reader {
    /// The name of a control token, as far as it has come.
    mark: Option<String>,
    /// Control tokens that stay in the text.
    kept: Arc<[&'static str]>,
    state: State,
}

/// Takes control tokens out of the text of a reply that has no format, all but some.
#[derive(Clone, Debug)]
pub struct Unmarked {
    kept: Arc<[&'static str]>,
    /// The name of a control token, as far as it has come.
    mark: Option<String>,
}

#[derive(Clone, Debug)]
enum State {
    Harmony(Harmony),
    Tagged(Tagged),
}

/// What a text is made of.
enum Item<'a> {
    Text(&'a str),
    /// A control token.
    Mark(&'a str),
}

impl Format {
    /// The format that a chat template speaks of, or `None`: then all of a reply is content.
    #[must_use]
    pub fn of(template: &str) -> Option<Self> {
        let has = |text: &str| template.contains(text);
        if ["<|start|>", "<|channel|>", "<|message|>"]
            .into_iter()
            .all(has)
        {
            return Some(Self::Harmony);
        }
        let mut tags = Tags::KNOWN.into_iter();
        tags.find(|tags| tags.are_in(template)).map(Self::Tagged)
    }

    /// What reads a reply to `prompt`, the text of which may end with the beginning of a thought.
    #[must_use]
    pub fn reader(self, prompt: &str) -> Reader {
        Reader {
            mark: None,
            kept: Arc::default(),
            state: match self {
                Self::Harmony => State::Harmony(Harmony::new()),
                Self::Tagged(tags) => State::Tagged(Tagged::new(tags, prompt)),
            },
        }
    }
}

impl Unmarked {
    /// Leaves `kept` in the text.
    #[must_use]
    pub fn keeping(kept: Arc<[&'static str]>) -> Self {
        Self { kept, mark: None }
    }

    /// `text`, which goes on where the last one ended, without control tokens.
    pub fn push(&mut self, text: &str) -> String {
        let mut said = String::with_capacity(text.len());
        for character in text.chars() {
            match (&mut self.mark, character) {
                (mark, MARK_OPEN) => *mark = Some(String::new()),
                (Some(name), MARK_CLOSE) => {
                    if self.kept.contains(&name.as_str()) {
                        said.push_str(name);
                    }
                    self.mark = None;
                }
                (Some(name), character) => name.push(character),
                (None, character) => said.push(character),
            }
        }
        said
    }
}

impl Reader {
    /// The same, but that the control tokens `kept` are part of the text that they stand in.
    #[must_use]
    pub fn keeping(self, kept: Arc<[&'static str]>) -> Self {
        Self { kept, ..self }
    }

    /// What is certain after `text`.
    pub fn push(&mut self, text: &str) -> Vec<Piece> {
        let mut pieces = Pieces::default();
        let mut rest = text;
        while !rest.is_empty() {
            rest = match self.mark.take() {
                Some(name) => self.close_mark(name, rest, &mut pieces),
                None => self.open_mark(rest, &mut pieces),
            };
        }
        pieces.0
    }

    /// What is left, after `text`, once no more will come.
    pub fn finish(&mut self, text: &str) -> Vec<Piece> {
        let mut pieces = Pieces(self.push(text));
        self.mark = None;
        match &mut self.state {
            State::Harmony(harmony) => harmony.finish(&mut pieces),
            State::Tagged(tagged) => tagged.finish(&mut pieces),
        }
        pieces.0
    }

    /// The format it reads.
    #[must_use]
    pub fn format(&self) -> Format {
        match &self.state {
            State::Harmony(_) => Format::Harmony,
            State::Tagged(tagged) => Format::Tagged(tagged.tags()),
        }
    }

    /// Whether what comes next is thought, unless it ends the thought.
    #[must_use]
    pub fn is_reasoning(&self) -> bool {
        match &self.state {
            State::Harmony(harmony) => harmony.is_reasoning(),
            State::Tagged(tagged) => tagged.is_reasoning(),
        }
    }

    /// Takes text up to the next control token.
    fn open_mark<'a>(&mut self, text: &'a str, pieces: &mut Pieces) -> &'a str {
        let (before, rest) = match text.split_once(MARK_OPEN) {
            Some((before, rest)) => {
                self.mark = Some(String::new());
                (before, rest)
            }
            None => (text, ""),
        };
        if !before.is_empty() {
            self.take(&Item::Text(before), pieces);
        }
        rest
    }

    /// Takes the rest of a control token that begins with `name`.
    fn close_mark<'a>(&mut self, mut name: String, text: &'a str, pieces: &mut Pieces) -> &'a str {
        let Some((end, rest)) = text.split_once(MARK_CLOSE) else {
            name.push_str(text);
            self.mark = Some(name);
            return "";
        };
        name.push_str(end);
        let item = match self.kept.contains(&name.as_str()) {
            true => Item::Text(&name),
            false => Item::Mark(&name),
        };
        self.take(&item, pieces);
        rest
    }

    fn take(&mut self, item: &Item<'_>, pieces: &mut Pieces) {
        match &mut self.state {
            State::Harmony(harmony) => harmony.take(item, pieces),
            State::Tagged(tagged) => tagged.take(item, pieces),
        }
    }
}

/// Parts found so far, with texts of one kind put together.
#[derive(Default)]
struct Pieces(Vec<Piece>);

impl Pieces {
    fn reasoning(&mut self, text: &str) {
        match self.0.last_mut() {
            _ if text.is_empty() => {}
            Some(Piece::Reasoning(last)) => last.push_str(text),
            _ => self.0.push(Piece::Reasoning(text.to_owned())),
        }
    }

    fn content(&mut self, text: &str) {
        match self.0.last_mut() {
            _ if text.is_empty() => {}
            Some(Piece::Content(last)) => last.push_str(text),
            _ => self.0.push(Piece::Content(text.to_owned())),
        }
    }

    fn call(&mut self, name: String, arguments: String) {
        self.0.push(Piece::Call { name, arguments });
    }
}
