//! Messages of a conversation, as clients send them and as chat templates take them.

use lacuna_text::template::Message;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::chat::{self, TextOrParts};
use crate::http::error::ApiError;
use crate::images::{self, Image};

#[derive(Debug, Deserialize)]
pub(crate) struct ChatMessage {
    role: Role,
    #[serde(default)]
    content: Option<TextOrParts<Part>>,
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    tool_calls: Option<Vec<ToolCall>>,
    #[serde(default)]
    tool_call_id: Option<String>,
    #[serde(default)]
    reasoning_content: Option<String>,
    /// A later name for it.
    #[serde(default)]
    reasoning: Option<String>,
    #[serde(default)]
    refusal: Option<String>,
    /// What clients keep of a message for themselves, or for caches that are told what to keep.
    #[serde(default, rename = "id")]
    _id: Option<Value>,
    #[serde(default, rename = "cache_control")]
    _cache_control: Option<Value>,
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
struct Part {
    #[serde(rename = "type")]
    kind: PartKind,
    #[serde(default)]
    text: Option<String>,
    #[serde(default)]
    refusal: Option<String>,
    #[serde(default)]
    image_url: Option<ImageUrl>,
    #[serde(default, rename = "cache_control")]
    _cache_control: Option<Value>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum PartKind {
    Text,
    Refusal,
    ImageUrl,
}

#[derive(Debug, Deserialize)]
struct ImageUrl {
    url: String,
    /// Encoders here take images in one size.
    #[serde(default, rename = "detail")]
    _detail: Option<String>,
}

#[derive(Debug, Deserialize)]
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
struct Function {
    name: String,
    arguments: String,
}

/// The messages as the template takes them, and their images.
pub(crate) fn for_template(
    messages: Vec<ChatMessage>,
) -> Result<(Vec<Message>, Vec<Image>), ApiError> {
    if messages.is_empty() {
        return Err(ApiError::field(
            "messages",
            "`messages` is empty; send at least one message",
        ));
    }
    let messages = messages.into_iter().enumerate();
    let mut images = Vec::new();
    let messages = messages.map(|(index, message)| message.for_template(index, &mut images));
    let messages = messages.collect::<Result<_, _>>()?;
    Ok((messages, images))
}

impl ChatMessage {
    fn for_template(self, index: usize, images: &mut Vec<Image>) -> Result<Message, ApiError> {
        let content = self.content;
        let content = content
            .map(|content| read_content(content, index, images))
            .transpose()?;
        let content = content.or(self.refusal.map(Value::String));
        let reasoning = self.reasoning_content.or(self.reasoning);
        let calls = self.tool_calls.unwrap_or_default();
        if content.is_none() && calls.is_empty() && reasoning.is_none() {
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
            ("reasoning_content", reasoning),
        ];
        for (field, text) in texts {
            if let Some(text) = text {
                more.insert(field.to_owned(), Value::String(text));
            }
        }
        Ok(Message {
            role: self.role.name().to_owned(),
            content: content.unwrap_or_else(|| Value::String(String::new())),
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

/// The content of message `index`: one text, or parts where images are among them, which join `shown`.
fn read_content(
    content: TextOrParts<Part>,
    index: usize,
    shown: &mut Vec<Image>,
) -> Result<Value, ApiError> {
    let parts = match content {
        TextOrParts::Text(text) => return Ok(text.into()),
        TextOrParts::Parts(parts) => parts.into_iter().enumerate(),
    };
    let parts = parts.map(|(place, part)| {
        let (name, text) = match part.kind {
            PartKind::Text => ("text", part.text),
            PartKind::Refusal => ("refusal", part.refusal),
            PartKind::ImageUrl => ("image_url", part.image_url.map(|image| image.url)),
        };
        let field = || format!("messages[{index}].content[{place}].{name}");
        let text =
            text.ok_or_else(|| ApiError::field(field(), format!("`{}` is missing", field())))?;
        if let PartKind::ImageUrl = part.kind {
            shown.push(images::of_address(&text, &format!("{}.url", field()))?);
            return Ok(images::place());
        }
        Ok(images::text(text))
    });
    Ok(images::content(parts.collect::<Result<_, ApiError>>()?))
}

impl ToolCall {
    fn for_template(self) -> Value {
        let Function { name, arguments } = self.function;
        chat::call(self.id, &name, chat::arguments(arguments))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(value: Value) -> Result<Vec<Message>, String> {
        let messages = serde_json::from_value(value).map_err(|error| error.to_string())?;
        let read = for_template(messages).map_err(|error| format!("{error:?}"))?;
        assert!(read.1.is_empty(), "no images");
        Ok(read.0)
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
    fn what_clients_keep_in_messages_is_taken() {
        let messages = read(json!([
            {"role": "user", "id": "msg-1", "name": "ann", "content": [
                {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
            {"role": "assistant", "content": null, "reasoning": "because", "tool_calls": null},
            {"role": "assistant", "content": "b", "reasoning_content": "so", "reasoning": "no"},
            {"role": "user", "content": [], "cache_control": null},
        ]))
        .expect("valid");
        assert_eq!(messages[0].more["name"], "ann");
        assert_eq!(messages[0].content, "a");
        assert_eq!(messages[1].more["reasoning_content"], "because");
        assert_eq!(messages[2].more["reasoning_content"], "so");
        assert_eq!(messages[3], Message::new("user", ""));
    }

    #[test]
    fn what_no_template_can_take_is_refused() {
        for bad in [
            json!([]),
            json!([{"role": "user"}]),
            json!([{"role": "wizard", "content": "x"}]),
            json!([{"role": "user", "content": 5}]),
            json!([{"role": "user", "content": [{"type": "text"}]}]),
            json!([{"role": "user", "content": [{"text": "x"}]}]),
            json!([{"role": "user", "content": null, "tool_calls": []}]),
            json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        ] {
            assert!(read(bad.clone()).is_err(), "{bad}");
        }
    }
}
