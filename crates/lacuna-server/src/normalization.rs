//! What clients write anew at the head of every prompt, made the same: lines of system texts left out, tools in order.
//!
//! A prompt is computed from the first token on that is another than the last time, so a date or a counter in a system
//! text costs everything behind it. Only whoever runs the server knows which lines say nothing to the model, so nothing is
//! changed unless it is asked for.

use std::borrow::Cow;

use lacuna_text::template::Message;
use regex::RegexSet;
use serde_json::Value;

/// What is changed of conversations before the chat template writes them. By default nothing.
#[derive(Debug, Clone, Default)]
pub struct Normalization {
    /// Lines of system texts that are left out.
    omitted_lines: RegexSet,
    /// Whether tools come in the order of their names, whatever order a request has them in.
    sorts_tools: bool,
}

/// A pattern is no regular expression, or one that would take too much memory.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{0}")]
pub struct PatternError(#[from] regex::Error);

impl Normalization {
    /// Leaves out every line of a system text in which one of `omitted_lines` matches, and with `sorts_tools` writes tools
    /// in the order of their names. Matching takes time in proportion to the text, whatever the pattern.
    ///
    /// # Errors
    /// [`PatternError`] when one of the patterns does not compile.
    pub fn new<S: AsRef<str>>(
        omitted_lines: &[S],
        sorts_tools: bool,
    ) -> Result<Self, PatternError> {
        Ok(Self {
            omitted_lines: RegexSet::new(omitted_lines)?,
            sorts_tools,
        })
    }

    /// `messages` without the lines that are left out. A system message of which nothing is left goes with them, as
    /// templates write something of their own around an empty one.
    pub(crate) fn messages<'a>(&self, messages: &'a [Message]) -> Cow<'a, [Message]> {
        let changes = |message: &Message| is_system(message) && self.omits_of(&message.content);
        if self.omitted_lines.is_empty() || !messages.iter().any(changes) {
            return Cow::Borrowed(messages);
        }
        let kept = messages.iter().filter_map(|message| {
            if !changes(message) {
                return Some(message.clone());
            }
            Some(Message {
                content: self.content(&message.content)?,
                ..message.clone()
            })
        });
        Cow::Owned(kept.collect())
    }

    /// `tools`, in the form of OpenAI, in the order they are to be written in.
    pub(crate) fn tools<'a>(&self, tools: &'a [Value]) -> Cow<'a, [Value]> {
        if !self.sorts_tools || tools.is_sorted_by_key(name) {
            return Cow::Borrowed(tools);
        }
        let mut tools = tools.to_vec();
        tools.sort_by(|a, b| name(a).cmp(name(b)));
        Cow::Owned(tools)
    }

    fn omits_of(&self, content: &Value) -> bool {
        texts(content).any(|text| lines(text).any(|line| self.omits(line)))
    }

    fn omits(&self, line: &str) -> bool {
        let line = line.strip_suffix('\n').unwrap_or(line);
        self.omitted_lines
            .is_match(line.strip_suffix('\r').unwrap_or(line))
    }

    /// What is left of a content; `None` if it is nothing.
    fn content(&self, content: &Value) -> Option<Value> {
        let left =
            |text: &str| -> String { lines(text).filter(|line| !self.omits(line)).collect() };
        let content = match content {
            Value::String(text) => left(text).into(),
            Value::Array(parts) => {
                let parts = parts.iter().map(|part| {
                    let mut part = part.clone();
                    if let Some(text) = part.get_mut("text") {
                        *text = left(text.as_str().unwrap_or_default()).into();
                    }
                    part
                });
                parts.collect()
            }
            other => other.clone(),
        };
        let is_empty = texts(&content).all(str::is_empty);
        (!is_empty).then_some(content)
    }
}

fn is_system(message: &Message) -> bool {
    matches!(message.role.as_str(), "system" | "developer")
}

/// The texts of a content: itself, or those of its parts.
fn texts(content: &Value) -> impl Iterator<Item = &str> {
    let parts = content.as_array().map_or(&[][..], Vec::as_slice);
    let parts = parts.iter().filter_map(|part| part.get("text")?.as_str());
    content.as_str().into_iter().chain(parts)
}

/// The lines of a text, each with what ends it.
fn lines(text: &str) -> impl Iterator<Item = &str> {
    text.split_inclusive('\n')
}

fn name(tool: &Value) -> &str {
    let function = tool.get("function").unwrap_or(tool);
    function["name"].as_str().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn omitting(patterns: &[&str]) -> Normalization {
        Normalization::new(patterns, true).expect("patterns")
    }

    #[test]
    fn lines_of_system_texts_are_left_out_and_no_others() {
        let normalization = omitting(&["^Current date:", "cch=[0-9a-f]+$"]);
        let given = [
            Message::new(
                "system",
                "Be brief.\r\nCurrent date: today\r\nCurrent dates matter.\nx cch=0a",
            ),
            Message::new("developer", "Current date: today"),
            Message {
                content: json!([
                    {"type": "text", "text": "Current date: now\n"},
                    {"type": "text", "text": "Be kind."},
                ]),
                ..Message::new("system", "")
            },
            Message::new("user", "Current date: said by a person"),
        ];
        let left = normalization.messages(&given);
        let contents: Vec<&Value> = left.iter().map(|message| &message.content).collect();
        assert_eq!(
            contents,
            [
                &json!("Be brief.\r\nCurrent dates matter.\n"),
                &json!([{"type": "text", "text": ""}, {"type": "text", "text": "Be kind."}]),
                &json!("Current date: said by a person"),
            ]
        );
    }

    #[test]
    fn what_needs_no_change_is_not_copied() {
        let given = [
            Message::new("system", "Be brief."),
            Message::new("system", ""),
        ];
        let tools = [
            json!({"function": {"name": "a"}}),
            json!({"function": {"name": "b"}}),
        ];
        for normalization in [omitting(&["^Date"]), Normalization::default()] {
            assert!(matches!(normalization.messages(&given), Cow::Borrowed(_)));
            assert!(matches!(normalization.tools(&tools), Cow::Borrowed(_)));
        }
    }

    #[test]
    fn tools_are_in_order_of_name_and_otherwise_as_they_were_sent() {
        let tools = [
            json!({"type": "function", "function": {"name": "write", "strict": true}}),
            json!({"type": "function", "function": {"name": "read", "description": "z"}}),
        ];
        let sorted = omitting(&[]).tools(&tools).into_owned();
        assert_eq!(sorted, [tools[1].clone(), tools[0].clone()]);
        let unsorted = Normalization::default();
        assert_eq!(*unsorted.tools(&tools), tools);
    }

    #[test]
    fn a_pattern_that_is_none_is_refused() {
        assert!(Normalization::new(&["("], false).is_err());
    }
}
