//! From a conversation to the model's prompt.
//!
//! Chat templates differ in what they write. One that knows no tools leaves them out without a word,
//! and the results of calls with them. So every template is tried once, at the start, and what it
//! leaves out is written into the messages that it does write.

use std::borrow::Cow;
use std::sync::Arc;

use lacuna_models::Model;
use lacuna_text::reply::{Format, Reader};
use lacuna_text::template::{Chat, ChatTemplate, Message, TemplateError};
use lacuna_text::tokenizer::{EncodeLimits, Tokenizer};
use serde_json::{Map, Value, json};

use crate::http::error::ApiError;
use crate::images;
use crate::structured::tools::{self, ToolSyntax};

/// The model's chat templates, and what they write.
#[derive(Debug)]
pub(crate) struct Conversations {
    usual: Template,
    /// For conversations with tools, where the model brings one of its own for these.
    with_tools: Option<Template>,
    taught: bool,
    syntax: ToolSyntax,
    /// What marks calls and is a control token of the vocabulary.
    call_marks: Arc<[&'static str]>,
    /// How replies tell thoughts from what is said, if they do.
    format: Option<Format>,
    bos: Option<String>,
    eos: Option<String>,
}

#[derive(Debug)]
struct Template {
    compiled: ChatTemplate,
    writes: Writes,
}

/// A conversation that asks for a reply.
#[derive(Debug)]
pub(crate) struct Prompt {
    pub(crate) tokens: Vec<u32>,
    /// What takes the reply apart, if the model tells thoughts from what it says.
    pub(crate) reader: Option<Reader>,
}

/// What a template writes of what it is given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Writes {
    system: bool,
    /// Each of several system messages at the front, and not the first alone.
    every_system: bool,
    tools: bool,
    calls: bool,
    /// Each call of several in one message, and not the first alone.
    every_call: bool,
    results: bool,
    /// Thoughts under the name `thinking`.
    thinking: bool,
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
        let format = tokenizer.chat_template().and_then(Format::of);
        let taught = with_tools.as_ref().unwrap_or(&usual).writes.tools;
        let syntax = match taught {
            _ if format == Some(Format::Harmony) => ToolSyntax::Harmony,
            true => ToolSyntax::of(tokenizer),
            false => ToolSyntax::Tagged,
        };
        let marks = syntax.marks().into_iter();
        Ok(Self {
            taught,
            format,
            syntax,
            call_marks: marks
                .filter(|mark| tools::is_control(tokenizer, mark))
                .collect(),
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

    /// What marks calls in replies and is a control token, so that it is no text by itself.
    pub(crate) fn call_marks(&self) -> &Arc<[&'static str]> {
        &self.call_marks
    }

    /// How replies tell thoughts from what is said, if they do.
    pub(crate) fn format(&self) -> Option<Format> {
        self.format
    }

    /// A conversation that asks for a reply.
    pub(crate) fn prompt(
        &self,
        model: &Model,
        messages: &[Message],
        tools: &[Value],
        variables: Map<String, Value>,
        limits: &EncodeLimits,
    ) -> Result<Prompt, ApiError> {
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
        let tokenizer = model.tokenizer();
        let rendered = template.compiled.render_marked(&chat, tokenizer)?;
        let rendered = model.with_places(rendered);
        let tokens = tokenizer.encode_marked(&rendered, limits);
        Ok(Prompt {
            tokens: tokens.map_err(|error| ApiError::from(error).of("messages"))?,
            reader: self.format.map(|format| format.reader(&rendered.plain())),
        })
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
        let [first, question] = &system;
        let second = Message::new("system", "Said by lacuna_second.");
        let systems = [first.clone(), second, question.clone()];
        let tool = json!({"type": "function", "function": {
            "name": "lacuna_tool", "description": "A tool.",
            "parameters": {"type": "object", "properties": {}}}});
        let tools = [tool];
        let tools = Some(&tools[..]);
        let calls = called();
        let [question, mut call, result] = called();
        let thought = "Thought by lacuna_thought.".into();
        call.more.insert("thinking".to_owned(), thought);
        let thought = [question, call, result];
        let several = called_twice();
        Self {
            system: written(&system, None, "lacuna_system"),
            every_system: written(&systems, None, "lacuna_second"),
            tools: written(&[user()], tools, "lacuna_tool")
                || written(&system, tools, "lacuna_tool"),
            calls: written(&calls, tools, "lacuna_call"),
            every_call: written(&several, tools, "lacuna_other"),
            thinking: written(&thought, tools, "lacuna_thought"),
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
        if self.system && !self.every_system && leading_systems(&messages) > 1 {
            messages = Cow::Owned(one_system(&messages));
        }
        if self.thinking && messages.iter().any(has_thought) {
            messages.to_mut().iter_mut().for_each(rename_thought);
        }
        if self.calls && !self.every_call && messages.iter().any(has_several_calls) {
            messages = Cow::Owned(one_call_each(&messages));
        }
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
                    last.content = joined(&last.content, &message.content, "\n");
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
                message.content = joined(&message.content, &section.into(), "\n\n");
            }
            Some(message) => {
                message.content = joined(&section.into(), &message.content, "\n\n");
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

/// A conversation in which two tools were called at once.
fn called_twice() -> [Message; 4] {
    let [question, mut call, result] = called();
    let mut second = result.clone();
    let id = json!("lacuna002");
    second.more.insert("tool_call_id".to_owned(), id.clone());
    if let Some(Value::Array(calls)) = call.more.get_mut("tool_calls") {
        let function = json!({"name": "lacuna_other", "arguments": {}});
        calls.push(json!({"id": id, "type": "function", "function": function}));
    }
    [question, call, result, second]
}

fn leading_systems(messages: &[Message]) -> usize {
    let leading = messages.iter();
    leading
        .take_while(|message| message.role == "system")
        .count()
}

/// The same conversation with its leading system messages as one, a blank line between their texts.
fn one_system(messages: &[Message]) -> Vec<Message> {
    let (leading, rest) = messages.split_at(leading_systems(messages));
    let contents = leading.iter().map(|message| message.content.clone());
    let one = contents.reduce(|first, second| joined(&first, &second, "\n\n"));
    let mut message = Message::new("system", "");
    message.content = one.unwrap_or_else(|| "".into());
    std::iter::once(message)
        .chain(rest.iter().cloned())
        .collect()
}

const THOUGHT: &str = "reasoning_content";

fn has_thought(message: &Message) -> bool {
    message.more.contains_key(THOUGHT)
}

/// Gives a thought the name that gpt-oss's template has for it. That takes either a thought or a text
/// beside a call, and writes both as thought, so they become one.
fn rename_thought(message: &mut Message) {
    let Some(Value::String(mut thought)) = message.more.remove(THOUGHT) else {
        return;
    };
    if message.more.contains_key("tool_calls") {
        let text = text_of(message);
        if !text.is_empty() && !thought.is_empty() {
            thought += "\n\n";
        }
        thought += text;
        message.content = "".into();
    }
    message.more.insert("thinking".to_owned(), thought.into());
}

fn calls_of(message: &Message) -> &[Value] {
    let calls = message.more.get("tool_calls").and_then(Value::as_array);
    calls.map_or(&[], Vec::as_slice)
}

fn has_several_calls(message: &Message) -> bool {
    calls_of(message).len() > 1
}

/// The same conversation as if each call had been answered before the next was made.
fn one_call_each(messages: &[Message]) -> Vec<Message> {
    let mut all = Vec::with_capacity(messages.len());
    let mut rest = messages;
    while let [message, after @ ..] = rest {
        if !has_several_calls(message) {
            all.push(message.clone());
            rest = after;
            continue;
        }
        let results = after.iter().take_while(|result| result.role == "tool");
        let (results, after) = after.split_at(results.count());
        let mut results: Vec<&Message> = results.iter().collect();
        for (place, call) in calls_of(message).iter().enumerate() {
            let mut one = match place {
                0 => message.clone(),
                _ => Message::new("assistant", ""),
            };
            let only = Value::Array(vec![call.clone()]);
            one.more.insert("tool_calls".to_owned(), only);
            all.push(one);
            let answers = |result: &&Message| result.more.get("tool_call_id") == call.get("id");
            let answer = results.iter().position(answers);
            all.extend(answer.map(|at| results.remove(at).clone()));
        }
        // Those of no call that was made stay where they were.
        all.extend(results.into_iter().cloned());
        rest = after;
    }
    all
}

/// The contents of two messages as that of one, with `between` in between: a text of two, else a list of parts. Texts that
/// meet become one, since some templates trim each part.
fn joined(first: &Value, second: &Value, between: &str) -> Value {
    let parts = |content: &Value| match content {
        Value::Array(parts) => parts.clone(),
        Value::String(text) => vec![images::text(text.clone())],
        _ => Vec::new(),
    };
    let (mut all, mut rest) = (parts(first), parts(second));
    let text = |part: Option<&Value>| Some(part?.get("text")?.as_str()?.to_owned());
    match (text(all.last()), text(rest.first())) {
        (Some(one), Some(other)) => {
            all.pop();
            rest[0] = images::text(format!("{one}{between}{other}"));
        }
        _ => all.push(images::text(between.to_owned())),
    }
    all.append(&mut rest);
    match (first, second) {
        (Value::String(_), Value::String(_)) => images::content(all),
        _ => all.into(),
    }
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

    /// What the user says after a result is of the same turn; with an image in it, all of it was lost.
    #[test]
    fn an_image_after_a_result_stays_in_the_turn() {
        let source = "{% for m in messages %}{% if m.role != 'tool' %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}\
            {% else %}{% for p in m.content %}{{ (p.text or '<image>') | trim }}{% endfor %}{% endif %}{% endif %}{% endfor %}";
        let (template, writes) = writes(source);
        assert!(!writes.results);
        let mut messages = history();
        messages.truncate(3);
        let mut seen = Message::new("user", "");
        seen.content = json!([{"type": "text", "text": "See"}, {"type": "image"}]);
        messages.push(seen);
        let messages = writes.completed(&messages, &[]).into_owned();
        let chat = Chat {
            messages: &messages,
            ..Chat::default()
        };
        let text = template.render(&chat).expect("renders");
        let turn = "<user><tool_response>\nsunny\n</tool_response>\nSee<image>";
        assert!(text.ends_with(turn), "{text}");
    }

    #[test]
    fn a_template_that_knows_nothing_of_tools_gets_them_as_text() {
        let (template, writes) = writes(PLAIN);
        let expected = Writes {
            system: true,
            every_system: true,
            tools: false,
            calls: false,
            every_call: false,
            results: true,
            thinking: false,
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
