//! Messages of a conversation, as clients send them and as chat templates take them.

use lacuna_models::template::Message;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::http::error::ApiError;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ChatMessage {
    role: Role,
    #[serde(default)]
    content: Option<Content>,
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    tool_calls: Option<Vec<ToolCall>>,
    #[serde(default)]
    tool_call_id: Option<String>,
    #[serde(default)]
    reasoning_content: Option<String>,
    #[serde(default)]
    refusal: Option<String>,
    /// Parts of replies that are never filled here; clients send replies back as they are.
    #[serde(default, rename = "annotations")]
    _annotations: Option<Vec<Value>>,
    #[serde(default, rename = "audio")]
    _audio: Option<Nothing>,
    #[serde(default, rename = "function_call")]
    _function_call: Option<Nothing>,
}

/// No value is one, so that only null is accepted for it.
#[derive(Debug, Deserialize)]
enum Nothing {}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Role {
    /// `developer` is a later name for it, which templates do not know.
    #[serde(alias = "developer")]
    System,
    User,
    Assistant,
    Tool,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a string or a list of `text` parts")]
enum Content {
    Text(String),
    Parts(Vec<Part>),
}

#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
enum Part {
    Text { text: String },
    Refusal { refusal: String },
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ToolCall {
    #[serde(default)]
    id: Option<String>,
    #[serde(default, rename = "type")]
    _kind: Option<FunctionKind>,
    #[serde(default, rename = "index")]
    _index: Option<u32>,
    function: Function,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum FunctionKind {
    Function,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Function {
    name: String,
    arguments: String,
}

/// The messages as the template takes them.
pub(crate) fn for_template(messages: Vec<ChatMessage>) -> Result<Vec<Message>, ApiError> {
    if messages.is_empty() {
        return Err(ApiError::field(
            "messages",
            "`messages` is empty; send at least one message",
        ));
    }
    let messages = messages.into_iter().enumerate();
    messages
        .map(|(index, message)| message.for_template(index))
        .collect()
}

impl ChatMessage {
    fn for_template(self, index: usize) -> Result<Message, ApiError> {
        let content = self.content.map(Content::text).or(self.refusal);
        let calls = self.tool_calls.unwrap_or_default();
        if content.is_none() && calls.is_empty() {
            return Err(ApiError::field(
                format!("messages[{index}].content"),
                "a message needs `content`",
            ));
        }
        let mut more = Map::new();
        if !calls.is_empty() {
            let calls = calls.into_iter().map(ToolCall::for_template).collect();
            more.insert("tool_calls".to_owned(), Value::Array(calls));
        }
        let texts = [
            ("name", self.name),
            ("tool_call_id", self.tool_call_id),
            ("reasoning_content", self.reasoning_content),
        ];
        for (field, text) in texts {
            if let Some(text) = text {
                more.insert(field.to_owned(), Value::String(text));
            }
        }
        Ok(Message {
            role: self.role.name().to_owned(),
            content: Value::String(content.unwrap_or_default()),
            more,
        })
    }
}

impl Role {
    fn name(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }
}

impl Content {
    /// One text: most templates know no parts.
    fn text(self) -> String {
        match self {
            Self::Text(text) => text,
            Self::Parts(parts) => {
                let texts = parts.into_iter().map(|part| match part {
                    Part::Text { text } | Part::Refusal { refusal: text } => text,
                });
                texts.collect::<Vec<_>>().join("\n")
            }
        }
    }
}

impl ToolCall {
    /// Templates write arguments as JSON themselves, so they get the value and not its text.
    fn for_template(self) -> Value {
        let Function { name, arguments } = self.function;
        let arguments = serde_json::from_str(&arguments)
            .ok()
            .filter(Value::is_object)
            .unwrap_or(Value::String(arguments));
        json!({
            "id": self.id,
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(value: Value) -> Result<Vec<Message>, String> {
        let messages = serde_json::from_value(value).map_err(|error| error.to_string())?;
        for_template(messages).map_err(|error| format!("{error:?}"))
    }

    #[test]
    fn parts_become_one_text_and_arguments_a_value() {
        let messages = read(json!([
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": null, "refusal": null, "audio": null, "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"x\":1}"}}]},
            {"role": "tool", "tool_call_id": "1", "content": "2"},
        ]))
        .expect("valid");
        assert_eq!(messages[0], Message::new("system", "a\nb"));
        assert_eq!(
            messages[1].more["tool_calls"][0]["function"]["arguments"]["x"],
            1
        );
        assert_eq!(messages[2].more["tool_call_id"], "1");
    }

    #[test]
    fn what_no_template_can_take_is_refused() {
        for bad in [
            json!([]),
            json!([{"role": "user"}]),
            json!([{"role": "wizard", "content": "x"}]),
            json!([{"role": "user", "content": 5}]),
            json!([{"role": "user", "content": "x", "colour": "red"}]),
            json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        ] {
            assert!(read(bad.clone()).is_err(), "{bad}");
        }
    }
}
