//! System messages where a template has no place for them.
//!
//! Some families were trained without a system role (Gemma up to 3, early Mistral): their templates
//! refuse such a message, or leave it out. Its text then goes before the first message of the user, a
//! blank line between them, as templates that do this themselves have it.

use super::{Message, TemplateError, text_of};

const SYSTEM: &str = "system";
const USER: &str = "user";
/// Words that no template has of its own.
const SYSTEM_PROBE: &str = "lacuna-system-probe";
const USER_PROBE: &str = "lacuna-user-probe";

/// Whether a conversation begins with what a template may have no place for.
pub(super) fn leads(messages: &[Message]) -> bool {
    messages
        .first()
        .is_some_and(|message| message.role == SYSTEM)
}

/// Whether a template has a place for a system message, as its output for a short conversation shows.
/// One that refuses even a lone question, or writes none of its texts, says nothing about that.
pub(super) fn has_place(render: impl Fn(&[Message]) -> Result<String, TemplateError>) -> bool {
    let user = Message::new(USER, USER_PROBE);
    match render(&[Message::new(SYSTEM, SYSTEM_PROBE), user.clone()]) {
        Ok(text) => text.contains(SYSTEM_PROBE) || !text.contains(USER_PROBE),
        Err(TemplateError::Raised { .. }) => render(&[user]).is_err(),
        Err(_) => true,
    }
}

/// The conversation with its leading system messages in the first message of the user.
pub(super) fn folded(messages: &[Message]) -> Vec<Message> {
    let leading = messages.iter().take_while(|message| message.role == SYSTEM);
    let (system, rest) = messages.split_at(leading.count());
    let texts: Vec<_> = system
        .iter()
        .map(|message| text_of(&message.content).trim().to_owned())
        .filter(|text| !text.is_empty())
        .collect();
    let text = texts.join("\n\n");
    let mut folded = rest.to_vec();
    match folded.first_mut().filter(|first| first.role == USER) {
        _ if text.is_empty() => {}
        Some(first) => put_before(&text, &mut first.content),
        None => folded.insert(0, Message::new(USER, text)),
    }
    folded
}

fn put_before(text: &str, content: &mut serde_json::Value) {
    use serde_json::Value;
    match content {
        Value::String(said) => *said = format!("{text}\n\n{said}"),
        Value::Array(parts) => {
            let part = serde_json::json!({"type": "text", "text": format!("{text}\n\n")});
            parts.insert(0, part);
        }
        other => *other = Value::String(text.to_owned()),
    }
}
