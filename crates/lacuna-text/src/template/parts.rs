//! Texts of messages where a template takes lists of parts alone.
//!
//! Templates of some models that see go through the parts of each message, and find none in a plain text (SmolVLM): they write
//! nothing of it.

use serde_json::{Value, json};

use super::{Message, TemplateError};

/// Words that no template has of its own.
const PROBE: &str = "lacuna-text-probe";

/// Whether some content is a plain text.
pub(super) fn lack(messages: &[Message]) -> bool {
    messages.iter().any(|message| message.content.is_string())
}

/// Whether a template writes the text of a part and leaves out a plain one, as its output for a question shows.
pub(super) fn are_taken_alone(
    render: impl Fn(&[Message]) -> Result<String, TemplateError>,
) -> bool {
    let plain = Message::new("user", PROBE);
    let mut in_parts = plain.clone();
    wrap(&mut in_parts);
    let written = |message| render(&[message]).unwrap_or_default();
    let of_parts = written(in_parts);
    // One that writes content as it stands writes what parts are called, too.
    let whole = ["'text'", "\"text\""]
        .iter()
        .any(|name| of_parts.contains(name));
    of_parts.contains(PROBE) && !whole && !written(plain).contains(PROBE)
}

/// Makes a plain text the only part of its message.
pub(super) fn wrap(message: &mut Message) {
    if let Value::String(text) = &mut message.content {
        message.content = json!([{"type": "text", "text": std::mem::take(text)}]);
    }
}
