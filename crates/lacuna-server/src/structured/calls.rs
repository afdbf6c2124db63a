//! Calls of tools in generated text.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use crate::structured::grammar::{CLOSE, OPEN};
use crate::structured::tools::{ToolSyntax, Tools};

/// A call of a tool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Call {
    id: String,
    name: String,
    /// JSON text, as clients take it.
    arguments: String,
}

/// What a stretch of text turned out to be.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Piece {
    Text(String),
    Call(Call),
}

/// Splits text into calls and the rest, as it comes. Text that only looks like a call stays text.
#[derive(Debug, Clone)]
pub(crate) struct CallReader {
    syntax: ToolSyntax,
    /// The names of the tools, and of those of their arguments that are texts.
    tools: Arc<[(String, Vec<String>)]>,
    /// The reply's own id, which those of its calls are made from.
    reply: Arc<str>,
    held: String,
    state: State,
    calls: usize,
    /// Calls that are told of at most.
    most_calls: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Nothing but white space so far; only bare calls are told by how the text begins.
    Start,
    /// Text.
    Outside,
    /// After [`OPEN`], or in bare JSON.
    Inside,
}

/// A call as models write it. The arguments stay text, as clients take them: parsed, they could take
/// twenty times as much.
#[derive(Deserialize)]
struct CallText<'a> {
    #[serde(alias = "tool_name")]
    name: String,
    #[serde(borrow, alias = "parameters")]
    arguments: &'a RawValue,
}

impl Call {
    pub(crate) fn id(&self) -> &str {
        &self.id
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// JSON text.
    pub(crate) fn arguments(&self) -> &str {
        &self.arguments
    }

    /// As OpenAI has it.
    pub(crate) fn json(&self) -> Value {
        json!({
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        })
    }
}

impl CallReader {
    pub(crate) fn new(syntax: ToolSyntax, tools: &Tools, reply: &str) -> Self {
        Self {
            syntax,
            tools: tools.texts().collect(),
            reply: reply.into(),
            held: String::new(),
            state: match syntax {
                ToolSyntax::Tagged | ToolSyntax::Harmony | ToolSyntax::Native(_) => State::Outside,
                ToolSyntax::Bare | ToolSyntax::BareParameters => State::Start,
            },
            calls: 0,
            most_calls: match tools.are_called_once() {
                true => 1,
                false => usize::MAX,
            },
        }
    }

    /// The same for one of several choices, whose calls have names of their own.
    pub(crate) fn of_choice(mut self, choice: usize) -> Self {
        if choice > 0 {
            self.reply = format!("{}-{choice}", self.reply).into();
        }
        self
    }

    /// What is certain after `text`.
    pub(crate) fn push(&mut self, text: &str) -> Vec<Piece> {
        self.held += text;
        match self.syntax {
            ToolSyntax::Tagged | ToolSyntax::Native(_) => self.read_tagged(),
            ToolSyntax::Bare | ToolSyntax::BareParameters | ToolSyntax::Harmony => self.read_bare(),
        }
    }

    /// What is left, after `text`, once no more will come.
    pub(crate) fn finish(&mut self, text: &str) -> Vec<Piece> {
        let mut pieces = self.push(text);
        let rest = std::mem::take(&mut self.held);
        let calls = match self.state {
            State::Inside => self.parse(&rest),
            State::Start | State::Outside => None,
        };
        match (calls, self.syntax.ends(), self.state) {
            (Some(calls), ..) => pieces.extend(calls),
            (None, Some((open, _)), State::Inside) => {
                self.text(&mut pieces, open.to_owned() + &rest)
            }
            (None, ..) => self.text(&mut pieces, rest),
        }
        pieces
    }

    /// A call that has been told from the text already: as text, if it is of none of the tools, or its
    /// arguments are not whole.
    pub(crate) fn call(&mut self, name: String, arguments: String) -> Vec<Piece> {
        let known = self.knows(&name);
        let whole = serde_json::from_str::<&RawValue>(&arguments).is_ok();
        if !known || !whole || !arguments.trim_start().starts_with('{') {
            return vec![Piece::Text(arguments)];
        }
        if self.calls == self.most_calls {
            return Vec::new();
        }
        let id = call_id(&self.reply, self.calls);
        self.calls += 1;
        vec![Piece::Call(Call {
            id,
            name,
            arguments,
        })]
    }

    fn knows(&self, name: &str) -> bool {
        self.tools.iter().any(|(known, _)| known == name)
    }

    fn read_tagged(&mut self) -> Vec<Piece> {
        let mut pieces = Vec::new();
        let (open, close) = self.syntax.ends().unwrap_or((OPEN, CLOSE));
        loop {
            let inside = self.state == State::Inside;
            let marker = if inside { close } else { open };
            // Without a mark of its own, a call ends with the reply.
            let at = self.held.find(marker);
            let Some(at) = at.filter(|_| !marker.is_empty()) else {
                break;
            };
            let rest = self.held.split_off(at + marker.len());
            let mut found = std::mem::replace(&mut self.held, rest);
            found.truncate(at);
            if self.state == State::Inside {
                match self.parse(&found) {
                    Some(calls) => pieces.extend(calls),
                    None => self.text(&mut pieces, format!("{open}{found}{close}")),
                }
                self.state = State::Outside;
            } else {
                self.text(&mut pieces, found);
                self.state = State::Inside;
            }
        }
        if self.state == State::Outside {
            let keep = possible_start(&self.held, open);
            let rest = self.held.split_off(self.held.len() - keep);
            let text = std::mem::replace(&mut self.held, rest);
            self.text(&mut pieces, text);
        }
        pieces
    }

    fn read_bare(&mut self) -> Vec<Piece> {
        let mut pieces = Vec::new();
        if self.state == State::Start {
            self.state = match self.held.trim_start().chars().next() {
                None => State::Start,
                Some('{' | '[') => State::Inside,
                Some(_) => State::Outside,
            };
        }
        if self.state == State::Outside {
            let text = std::mem::take(&mut self.held);
            self.text(&mut pieces, text);
        }
        pieces
    }

    /// Adds text, except for the white space that stands between calls.
    fn text(&self, pieces: &mut Vec<Piece>, text: String) {
        let between = self.calls > 0 && text.trim().is_empty();
        if !text.is_empty() && !between {
            pieces.push(Piece::Text(text));
        }
    }

    /// The calls that `text` consists of, if it does.
    fn parse(&mut self, text: &str) -> Option<Vec<Piece>> {
        let is_text = |tool: &str, argument: &str| {
            let mut tools = self.tools.iter();
            let tool = tools.find(|(name, _)| name == tool);
            tool.is_some_and(|(_, texts)| texts.iter().any(|name| name == argument))
        };
        let calls = match (written_as_json(text), self.syntax) {
            (Some(calls), _) => calls,
            (None, ToolSyntax::Native(native)) => native.read(text, is_text)?,
            (None, _) => return None,
        };
        if calls.is_empty() {
            return None;
        }
        let calls: Option<Vec<_>> = calls.into_iter().map(|call| self.checked(call)).collect();
        let left = self.most_calls - self.calls;
        let calls = calls?.into_iter().take(left).map(|(name, arguments)| {
            let id = call_id(&self.reply, self.calls);
            self.calls += 1;
            Piece::Call(Call {
                id,
                name,
                arguments,
            })
        });
        Some(calls.collect())
    }

    fn checked(&self, (name, arguments): (String, String)) -> Option<(String, String)> {
        let whole = serde_json::from_str::<&RawValue>(&arguments).is_ok();
        let known = self.knows(&name);
        (known && whole && arguments.starts_with('{')).then_some((name, arguments))
    }
}

/// Names and arguments, where `text` is a call as JSON, or a list of these.
fn written_as_json(text: &str) -> Option<Vec<(String, String)>> {
    let calls: Vec<CallText<'_>> = match text.trim_start().starts_with('[') {
        true => serde_json::from_str(text).ok()?,
        false => vec![serde_json::from_str(text).ok()?],
    };
    let calls = calls.into_iter();
    Some(
        calls
            .map(|call| (call.name, call.arguments.get().to_owned()))
            .collect(),
    )
}

/// An id for call `number` of a reply: nine letters and digits, as Mistral's templates demand of the ids
/// in a conversation. Two calls of a conversation of a hundred have the same with a probability of 10^-10.
fn call_id(reply: &str, number: usize) -> String {
    const DIGITS: &[u8; 36] = b"0123456789abcdefghijklmnopqrstuvwxyz";
    let mut hasher = DefaultHasher::new();
    (reply, number).hash(&mut hasher);
    let mut rest = hasher.finish();
    let digit = |_| {
        let digit = DIGITS[(rest % 36) as usize];
        rest /= 36;
        char::from(digit)
    };
    (0..9).map(digit).collect()
}

/// Length of the longest end of `text` that begins `marker`.
fn possible_start(text: &str, marker: &str) -> usize {
    (1..marker.len())
        .rev()
        .find(|&length| text.ends_with(&marker[..length]))
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tools() -> Tools {
        let tool = json!({"type": "function", "function": {"name": "f"}});
        Tools::new(vec![tool], None).expect("valid")
    }

    /// The text and the calls of a reply, given in pieces of one character.
    fn read(syntax: ToolSyntax, reply: &str) -> (String, Vec<(String, String)>) {
        read_of(&tools(), syntax, reply)
    }

    fn read_of(tools: &Tools, syntax: ToolSyntax, reply: &str) -> (String, Vec<(String, String)>) {
        let mut reader = CallReader::new(syntax, tools, "r");
        let mut pieces: Vec<Piece> = reply
            .chars()
            .flat_map(|character| reader.push(&character.to_string()))
            .collect();
        pieces.extend(reader.finish(""));
        let (mut text, mut calls) = (String::new(), Vec::new());
        for piece in pieces {
            match piece {
                Piece::Text(more) => text += &more,
                Piece::Call(call) => calls.push((call.id, call.arguments)),
            }
        }
        (text, calls)
    }

    #[test]
    fn tagged_calls_are_taken_out_of_the_text() {
        let call = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1}}\n</tool_call>";
        let (text, calls) = read(ToolSyntax::Tagged, &format!("Let me see.{call}\n{call}\n"));
        assert_eq!(text, "Let me see.");
        let arguments: Vec<&str> = calls.iter().map(|call| call.1.as_str()).collect();
        assert_eq!(arguments, ["{\"x\": 1}"; 2], "as the model wrote them");
        assert_ne!(calls[0].0, calls[1].0, "each has an id of its own");
    }

    #[test]
    fn ids_of_calls_are_as_the_strictest_templates_want_them() {
        // Mistral's raise an error for any other, when the call comes back with the conversation.
        let ids: Vec<String> = (0..2000)
            .map(|number| call_id("chatcmpl-1", number))
            .collect();
        for id in &ids {
            assert_eq!(id.len(), 9, "{id}");
            assert!(id.bytes().all(|byte| byte.is_ascii_alphanumeric()), "{id}");
        }
        let different: std::collections::HashSet<_> = ids.iter().collect();
        assert_eq!(different.len(), ids.len());
        assert_ne!(call_id("chatcmpl-1", 0), call_id("chatcmpl-2", 0));
    }

    #[test]
    fn of_tools_that_are_called_once_one_call_is_told() {
        let once = tools().called_once(true);
        let one = "{\"name\": \"f\", \"arguments\": {}}";
        let bare = format!("[{one}, {one}]");
        assert_eq!(read_of(&once, ToolSyntax::Bare, &bare).1.len(), 1);
        let tagged = format!("<tool_call>{one}</tool_call>\n<tool_call>{one}</tool_call>");
        let (text, calls) = read_of(&once, ToolSyntax::Tagged, &tagged);
        assert_eq!((text.as_str(), calls.len()), ("", 1));
    }

    #[test]
    fn text_that_only_looks_like_a_call_stays_whole() {
        for text in [
            "a < b <tool_cal",
            "<tool_call>nothing",
            "<tool_call>{}</tool_call> x",
            "<tool_call>{\"name\": \"g\", \"arguments\": {}}</tool_call>",
        ] {
            assert_eq!(read(ToolSyntax::Tagged, text), (text.to_owned(), vec![]));
        }
        for text in [
            "plain",
            " {\"name\": \"g\", \"arguments\": {}}",
            "[]",
            "[1",
            "",
        ] {
            assert_eq!(read(ToolSyntax::Bare, text), (text.to_owned(), vec![]));
        }
    }

    #[test]
    fn a_bare_reply_is_one_call_or_several() {
        let one = "{\"name\": \"f\", \"parameters\": {}}";
        assert_eq!(read(ToolSyntax::BareParameters, one).1.len(), 1);
        let two = format!("\n[{one}, {one}]");
        let (text, calls) = read(ToolSyntax::Bare, &two);
        assert_eq!((text.as_str(), calls.len()), ("", 2));
    }

    #[test]
    fn a_call_cut_short_before_its_closing_marker_counts_if_it_is_whole() {
        let reply = "<tool_call>{\"name\": \"f\", \"arguments\": {}}";
        assert_eq!(read(ToolSyntax::Tagged, reply).1.len(), 1);
    }
}
