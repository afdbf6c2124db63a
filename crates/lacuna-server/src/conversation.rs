//! From a conversation to the model's prompt.
//!
//! Chat templates differ in what they write. One that knows no tools leaves them out without a word,
//! and the results of calls with them. So every template is tried once, at the start, and what it
//! leaves out is written into the messages that it does write.

use std::borrow::Cow;

use lacuna_text::template::{Chat, ChatTemplate, Message, TemplateError};
use lacuna_text::tokenizer::{EncodeLimits, Tokenizer};
use serde_json::{Map, Value, json};

use crate::http::error::ApiError;
use crate::structured::tools::ToolSyntax;

/// The model's chat templates, and what they write.
#[derive(Debug)]
pub(crate) struct Conversations {
    usual: Template,
    /// For conversations with tools, where the model brings one of its own for these.
    with_tools: Option<Template>,
    taught: bool,
    syntax: ToolSyntax,
    bos: Option<String>,
    eos: Option<String>,
}

#[derive(Debug)]
struct Template {
    compiled: ChatTemplate,
    writes: Writes,
}

/// What a template writes of what it is given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Writes {
    system: bool,
    tools: bool,
    calls: bool,
    results: bool,
}

impl Conversations {
    /// # Errors
    /// [`TemplateError`] when a chat template of the model does not compile.
    pub(crate) fn new(tokenizer: &Tokenizer) -> Result<Self, TemplateError> {
        let text = |id: Option<u32>| id.and_then(|id| tokenizer.token_text(id));
        let (bos, eos) = (text(tokenizer.bos()), text(tokenizer.eos()));
        let template = |compiled: ChatTemplate| Template {
            writes: Writes::of(&compiled, bos.as_deref(), eos.as_deref()),
            compiled,
        };
        let usual = template(ChatTemplate::of(tokenizer)?);
        let with_tools = tokenizer.named_chat_template("tool_use");
        let with_tools = with_tools.map(ChatTemplate::compile).transpose()?;
        let with_tools = with_tools.map(template);
        let taught = with_tools.as_ref().unwrap_or(&usual).writes.tools;
        Ok(Self {
            taught,
            syntax: match taught {
                true => ToolSyntax::of(tokenizer),
                false => ToolSyntax::Tagged,
            },
            usual,
            with_tools,
            bos,
            eos,
        })
    }

    /// Whether the model's own template tells it of tools.
    pub(crate) fn teaches_tools(&self) -> bool {
        self.taught
    }

    /// How the model is taught to write calls.
    pub(crate) fn syntax(&self) -> ToolSyntax {
        self.syntax
    }

    /// Tokens of a conversation that asks for a reply.
    pub(crate) fn tokens(
        &self,
        tokenizer: &Tokenizer,
        messages: &[Message],
        tools: &[Value],
        variables: Map<String, Value>,
        limits: &EncodeLimits,
    ) -> Result<Vec<u32>, ApiError> {
        let template = match &self.with_tools {
            Some(template) if !tools.is_empty() => template,
            _ => &self.usual,
        };
        let messages = template.writes.completed(messages, tools);
        let given = template.writes.tools && !tools.is_empty();
        let chat = Chat {
            messages: &messages,
            bos_token: self.bos.as_deref(),
            eos_token: self.eos.as_deref(),
            tools: given.then_some(tools),
            variables,
            ..Chat::default()
        };
        let rendered = template.compiled.render_marked(&chat, tokenizer)?;
        let tokens = tokenizer.encode_marked(&rendered, limits);
        tokens.map_err(|error| ApiError::from(error).of("messages"))
    }
}

impl Writes {
    /// Tries a template with words that it cannot have by itself.
    fn of(template: &ChatTemplate, bos: Option<&str>, eos: Option<&str>) -> Self {
        let written = |messages: &[Message], tools: Option<&[Value]>, words: &str| {
            let chat = Chat {
                messages,
                bos_token: bos,
                eos_token: eos,
                tools,
                ..Chat::default()
            };
            template
                .render(&chat)
                .is_ok_and(|text| text.contains(words))
        };
        let user = || Message::new("user", "Question?");
        let system = [Message::new("system", "Said by lacuna_system."), user()];
        let tool = json!({"type": "function", "function": {
            "name": "lacuna_tool", "description": "A tool.",
            "parameters": {"type": "object", "properties": {}}}});
        let tools = [tool];
        let tools = Some(&tools[..]);
        let calls = called();
        Self {
            system: written(&system, None, "lacuna_system"),
            tools: written(&[user()], tools, "lacuna_tool")
                || written(&system, tools, "lacuna_tool"),
            calls: written(&calls, tools, "lacuna_call"),
            results: written(&calls, tools, "lacuna_result"),
        }
    }

    /// The messages with all that the template would leave out.
    fn completed<'a>(self, messages: &'a [Message], tools: &[Value]) -> Cow<'a, [Message]> {
        let left_out = |message: &Message| {
            (!self.calls && message.more.contains_key("tool_calls"))
                || (!self.results && message.role == "tool")
        };
        let mut messages = Cow::Borrowed(messages);
        if messages.iter().any(left_out) {
            messages = Cow::Owned(self.spelled_out(&messages));
        }
        if !self.tools && !tools.is_empty() {
            self.introduce(messages.to_mut(), tools);
        }
        messages
    }

    /// Calls and their results as texts of the assistant and the user.
    fn spelled_out(self, messages: &[Message]) -> Vec<Message> {
        let mut all: Vec<Message> = Vec::with_capacity(messages.len());
        // Whether the last message is a result: what the user says next belongs to the same turn, as
        // templates want turns to alternate.
        let mut result_last = false;
        for message in messages {
            let mut message = message.clone();
            let result = message.role == "tool" && !self.results;
            if result {
                let text = text_of(&message);
                message =
                    Message::new("user", format!("<tool_response>\n{text}\n</tool_response>"));
            }
            let calls = match self.calls {
                true => None,
                false => message.more.remove("tool_calls"),
            };
            if let Some(Value::Array(calls)) = calls {
                let text = [text_of(&message).to_owned()].into_iter();
                let text = text.filter(|text| !text.is_empty());
                let parts: Vec<String> = text.chain(calls.iter().map(spelled_call)).collect();
                message.content = parts.join("\n").into();
            }
            match all.last_mut() {
                Some(last)
                    if message.role == "user" && last.role == "user" && (result || result_last) =>
                {
                    last.content = format!("{}\n{}", text_of(last), text_of(&message)).into();
                }
                _ => all.push(message),
            }
            result_last = result;
        }
        all
    }

    /// Says which tools there are, and how to call them, to a model whose template does not.
    fn introduce(self, messages: &mut Vec<Message>, tools: &[Value]) {
        let list: Vec<String> = tools.iter().map(Value::to_string).collect();
        let section = format!(
            "You can call the following tools. Each line describes one as JSON:\n{}\n\n\
             To call a tool, write its name and its arguments as JSON between two marks, one call \
             after another:\n<tool_call>\n{{\"name\": \"NAME\", \"arguments\": {{...}}}}\n</tool_call>",
            list.join("\n")
        );
        let role = if self.system { "system" } else { "user" };
        let place = messages.iter_mut().find(|message| message.role == role);
        match place {
            // A system message comes first or not at all; a question comes after the tools.
            Some(message) if self.system => {
                message.content = format!("{}\n\n{section}", text_of(message)).into();
            }
            Some(message) => {
                message.content = format!("{section}\n\n{}", text_of(message)).into();
            }
            None => messages.insert(0, Message::new(role, section)),
        }
    }
}

/// A conversation in which a tool was called.
fn called() -> [Message; 3] {
    let mut call = Message::new("assistant", "");
    let mut result = Message::new("tool", "It says lacuna_result.");
    // Some templates take only ids of nine letters and digits.
    let calls = json!([{"id": "lacuna001", "type": "function",
        "function": {"name": "lacuna_call", "arguments": {}}}]);
    call.more.insert("tool_calls".to_owned(), calls);
    result
        .more
        .insert("tool_call_id".to_owned(), "lacuna001".into());
    result.more.insert("name".to_owned(), "lacuna_call".into());
    [Message::new("user", "Question?"), call, result]
}

fn text_of(message: &Message) -> &str {
    message.content.as_str().unwrap_or_default()
}

/// A call as [`Writes::introduce`] says that calls are written.
fn spelled_call(call: &Value) -> String {
    let function = &call["function"];
    let call = json!({"name": function["name"], "arguments": function["arguments"]});
    format!("<tool_call>\n{call}\n</tool_call>")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn writes(source: &str) -> (ChatTemplate, Writes) {
        let template = ChatTemplate::compile(source).expect("valid");
        let writes = Writes::of(&template, Some("<s>"), None);
        (template, writes)
    }

    fn tools() -> Vec<Value> {
        vec![json!({"type": "function", "function": {"name": "weather"}})]
    }

    fn history() -> Vec<Message> {
        let call = json!([{"id": "1", "type": "function",
            "function": {"name": "weather", "arguments": {"city": "Rome"}}}]);
        let mut called = Message::new("assistant", "");
        called.more.insert("tool_calls".to_owned(), call);
        vec![
            Message::new("user", "Weather?"),
            called,
            Message::new("tool", "sunny"),
            Message::new("tool", "warm"),
            Message::new("user", "And tomorrow?"),
        ]
    }

    const PLAIN: &str = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}";

    #[test]
    fn a_template_that_knows_nothing_of_tools_gets_them_as_text() {
        let (template, writes) = writes(PLAIN);
        let expected = Writes {
            system: true,
            tools: false,
            calls: false,
            results: true,
        };
        assert_eq!(writes, expected);
        let messages = writes.completed(&history(), &tools()).into_owned();
        let chat = Chat {
            messages: &messages,
            ..Chat::default()
        };
        let text = template.render(&chat).expect("renders");
        assert!(text.starts_with("<system>You can call"), "{text}");
        assert!(
            text.contains(r#"{"type":"function","function":{"name":"weather"}}"#),
            "{text}"
        );
        let call = r#"<assistant><tool_call>
{"name":"weather","arguments":{"city":"Rome"}}
</tool_call><tool>sunny"#;
        assert!(text.contains(call), "{text}");
    }

    #[test]
    fn a_template_of_alternating_turns_gets_results_as_the_users() {
        let source = "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}\
                      {{ raise_exception('Turns must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}";
        let (template, writes) = writes(source);
        // A system message is folded into the first turn where the template has no place for one.
        assert!(writes.system && !writes.tools && !writes.calls && !writes.results);
        let messages = writes.completed(&history(), &tools()).into_owned();
        let chat = Chat {
            messages: &messages,
            ..Chat::default()
        };
        let text = template.render(&chat).expect("its turns alternate");
        assert!(text.starts_with("<user>You can call"), "{text}");
        let results = "<user><tool_response>\nsunny\n</tool_response>\n<tool_response>\nwarm\n\
                       </tool_response>\nAnd tomorrow?";
        assert!(text.ends_with(results), "{text}");
    }

    #[test]
    fn a_template_that_knows_all_of_it_is_left_to_it() {
        let source = "{{ tools | tojson if tools }}{% for m in messages %}<{{ m.role }}>{{ m.content }}\
                      {% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}{% endfor %}";
        let (_, writes) = writes(source);
        assert!(writes.system && writes.tools && writes.calls && writes.results);
        let (messages, tools) = (history(), tools());
        let completed = writes.completed(&messages, &tools);
        assert!(matches!(completed, Cow::Borrowed(_)));
    }
}
