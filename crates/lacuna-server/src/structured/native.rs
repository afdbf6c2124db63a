//! Calls as families of models write them beside `<tool_call>`: their marks, what is between them, and that as a grammar.
//!
//! ```text
//! [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]                          Mistral, until 2025
//! [TOOL_CALLS]f[ARGS]{"a": 1}                                                  Mistral, since
//! <|tool_call|>[{"name": "f", "arguments": {"a": 1}}]                          Granite 3
//! <|tool_call_start|>[f(a=1, b="x")]<|tool_call_end|>                          LFM2
//! <|tool_call>call:f{a:1,b:<|"|>x<|"|>}<tool_call|>                            Gemma 4
//! <start_function_call>call:f{a:1,b:<escape>x<escape>}<end_function_call>      FunctionGemma
//! <tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>   Qwen3 Coder, Qwen3.5, Nemotron 3
//! <tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>   GLM 4.5 to 4.7
//! <TOOLCALL>[{"name": "f", "arguments": {"a": 1}}]</TOOLCALL>                  Nemotron Nano 2
//! <tool_calls>[{"name": "f", "arguments": {"a": 1}}]</tool_calls>              Apriel
//! <|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}}]<|END_ACTION|>   Command R7B
//! ```

mod values;

use llguidance::api::TopLevelGrammar;
use serde_json::{Map, Value, json};
use toktrie::TokTrie;

use self::values::Values;
use crate::structured::grammar::{CLOSE, OPEN, compact};

/// How a family marks calls, and what it writes between the marks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Native {
    /// What a call, or a list of them, begins with.
    pub(crate) open: &'static str,
    /// What it ends with; nothing where the reply ends with it.
    pub(crate) close: &'static str,
    form: Form,
}

/// What is written between marks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    /// A list of JSON objects with a name and arguments.
    List,
    /// The same under other names, each with a number as text.
    Actions,
    /// A name, [`ARGUMENTS`], and the arguments as JSON; every call has a mark of its own.
    Named,
    /// A list of calls as Python has them, with named arguments.
    Pythonic,
    /// `call:name{argument:value,...}`, where texts stand between two of these marks.
    Braced { quote: &'static str },
    /// An element for the function, and one for each argument.
    Elements,
    /// A name, and two elements for each argument: [`KEY`] and [`VALUE`].
    Pairs,
}

/// Stands between a name and its arguments in [`Form::Named`].
const ARGUMENTS: &str = "[ARGS]";
/// Stands before an identifier that some write after the name in [`Form::Named`].
const CALL_ID: &str = "[CALL_ID]";
/// What ends an argument in [`Form::Elements`].
const END_OF_PARAMETER: &str = "\n</parameter>\n";
/// Around the name of an argument in [`Form::Pairs`].
const KEY: [&str; 2] = ["<arg_key>", "</arg_key>"];
/// Around its value.
const VALUE: [&str; 2] = ["<arg_value>", "</arg_value>"];
/// Between two parts in [`Form::Pairs`]: GLM 4.5 has a line for each, GLM 4.7 all in one.
const LINE_FEEDS: &str = "(\"\\n\" \"\\n\"?)?";

/// The fields that the JSON of a call has, in order.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CallFields {
    /// Of the call's number, as text.
    pub(crate) number: Option<&'static str>,
    /// Of the tool's name.
    pub(crate) name: &'static str,
    pub(crate) arguments: &'static str,
    /// Of an identifier, which may be left out.
    pub(crate) id: Option<&'static str>,
}

impl CallFields {
    pub(crate) const USUAL: Self = Self {
        number: None,
        name: "name",
        arguments: "arguments",
        id: None,
    };
}

/// What a call of each tool must be.
#[derive(Debug)]
pub(crate) enum Calls {
    /// By the JSON of a call.
    Json(Value),
    /// By the name of each tool, and the arguments it takes, in order.
    Tools(Vec<(String, Vec<Argument>)>),
}

impl Calls {
    /// Bytes of what they must be, as text.
    pub(crate) fn bytes(&self) -> usize {
        match self {
            Self::Json(schema) => schema.to_string().len(),
            Self::Tools(tools) => {
                let arguments = tools.iter().flat_map(|(_, arguments)| arguments);
                let names: usize = tools.iter().map(|(name, _)| name.len()).sum();
                names + arguments.map(Argument::bytes).sum::<usize>()
            }
        }
    }
}

/// An argument of a tool.
#[derive(Debug)]
pub(crate) struct Argument {
    name: String,
    schema: Value,
    required: bool,
}

impl Native {
    const MISTRAL_LIST: Self = Self::new("[TOOL_CALLS]", "", Form::List);
    const MISTRAL_NAMED: Self = Self::new("[TOOL_CALLS]", "", Form::Named);
    const GRANITE: Self = Self::new("<|tool_call|>", "", Form::List);
    const LFM2: Self = Self::new("<|tool_call_start|>", "<|tool_call_end|>", Form::Pythonic);
    const GEMMA: Self = Self::new(
        "<|tool_call>",
        "<tool_call|>",
        Form::Braced { quote: "<|\"|>" },
    );
    const FUNCTION_GEMMA: Self = Self::new(
        "<start_function_call>",
        "<end_function_call>",
        Form::Braced { quote: "<escape>" },
    );
    const QWEN_CODER: Self = Self::new(OPEN, CLOSE, Form::Elements);
    const GLM: Self = Self::new(OPEN, CLOSE, Form::Pairs);
    const NEMOTRON_NANO: Self = Self::new("<TOOLCALL>", "</TOOLCALL>", Form::List);
    const APRIEL: Self = Self::new("<tool_calls>", "</tool_calls>", Form::List);
    const COMMAND: Self = Self::new("<|START_ACTION|>", "<|END_ACTION|>", Form::Actions);

    const fn new(open: &'static str, close: &'static str, form: Form) -> Self {
        Self { open, close, form }
    }

    /// What a chat template teaches, where it is one of these. Marks that no template has, but the vocabulary does, are
    /// told by what the template writes of tools, or by `is_control`.
    pub(crate) fn of(template: &str, is_control: impl Fn(&str) -> bool) -> Option<Self> {
        let has = |text: &str| template.contains(text);
        let known = [
            (has("[TOOL_CALLS]") && has(ARGUMENTS), Self::MISTRAL_NAMED),
            (has("[TOOL_CALLS]"), Self::MISTRAL_LIST),
            (has("<start_function_call>"), Self::FUNCTION_GEMMA),
            (has("<|tool_call>"), Self::GEMMA),
            (has("<|tool_call|>"), Self::GRANITE),
            (
                has("<|tool_call_start|>") || has("<|tool_list_start|>"),
                Self::LFM2,
            ),
            (has(OPEN) && has("<function="), Self::QWEN_CODER),
            (has(OPEN) && has(KEY[0]), Self::GLM),
            (has("<TOOLCALL>["), Self::NEMOTRON_NANO),
            (has("<tool_calls>["), Self::APRIEL),
            (has("<|START_ACTION|>"), Self::COMMAND),
            (is_control(Self::LFM2.open) && !has(OPEN), Self::LFM2),
        ];
        let mut known = known.into_iter();
        known.find(|(is, _)| *is).map(|(_, native)| native)
    }

    /// All marks that may be control tokens of a vocabulary.
    pub(crate) fn marks(self) -> Vec<&'static str> {
        let more = match self.form {
            Form::Named => vec![ARGUMENTS, CALL_ID],
            Form::Braced { quote } => vec![quote],
            Form::Pairs => [KEY, VALUE].concat(),
            Form::List | Form::Actions | Form::Pythonic | Form::Elements => Vec::new(),
        };
        let marks = [self.open, self.close].into_iter().chain(more);
        marks.filter(|mark| !mark.is_empty()).collect()
    }

    /// Whether calls are told by the JSON of each, and not by their arguments.
    pub(crate) fn is_json(self) -> bool {
        matches!(self.form, Form::List | Form::Actions)
    }

    /// What the JSON of a call has.
    pub(crate) fn fields(self) -> CallFields {
        match self.form {
            Form::Actions => CallFields {
                number: Some("tool_call_id"),
                name: "tool_name",
                arguments: "parameters",
                id: None,
            },
            _ => CallFields {
                id: (self == Self::MISTRAL_LIST).then_some("id"),
                ..CallFields::USUAL
            },
        }
    }

    /// The same marks around JSON.
    pub(crate) fn as_json(self) -> Self {
        let form = if self.is_json() {
            self.form
        } else {
            Form::List
        };
        Self { form, ..self }
    }

    /// The grammar of calls: after the first mark, or with it.
    pub(crate) fn grammar(
        self,
        calls: &Calls,
        one_call: bool,
        after_mark: bool,
        trie: &TokTrie,
    ) -> TopLevelGrammar {
        let mark = |text: &str| mark(trie, text);
        let open = mark(self.open);
        let close = match self.close {
            "" => String::new(),
            close => mark(close),
        };
        let first = if after_mark { "" } else { open.as_str() };
        let many = |again: String| match one_call {
            true => String::new(),
            false => format!("({again})*"),
        };
        let start = match self.form {
            Form::List => format!(
                "start: {first} \" \"? \"[\" call {} \"]\" {close}\n",
                many("\", \" call".to_owned())
            ),
            Form::Actions => format!(
                "start: {first} SPACE \"[\" SPACE call {} SPACE \"]\" {close}\nSPACE: /[ \\n]*/\n",
                many("\",\" SPACE call".to_owned())
            ),
            Form::Pythonic => format!(
                "start: {first} \"[\" call {} \"]\" {close}\n",
                many("\", \" call".to_owned())
            ),
            Form::Named | Form::Braced { .. } => {
                format!(
                    "start: {first} call {close} {}\n",
                    many(format!("{open} call {close}"))
                )
            }
            Form::Pairs => format!(
                "start: {first} call {close} {}\n",
                many(format!("\"\\n\"? {open} call {close}"))
            ),
            Form::Elements => format!(
                "start: {first} \"\\n\" call \"\\n\" {close} {}\n",
                many(format!("\"\\n\"? {open} \"\\n\" call \"\\n\" {close}"))
            ),
        };
        let mut grammar = Grammar {
            native: self,
            trie,
            text: start,
        };
        match calls {
            Calls::Json(schema) => grammar.line("call", &json_of(schema)),
            Calls::Tools(tools) => grammar.tools(tools),
        }
        TopLevelGrammar::from_lark(grammar.text)
    }

    /// The names and the JSON of the arguments of the calls between two marks, or after the only one; `None` if they are
    /// not written as the family does. `is_text` tells which arguments of which tool are texts.
    pub(crate) fn read(
        self,
        text: &str,
        is_text: impl Fn(&str, &str) -> bool,
    ) -> Option<Vec<(String, String)>> {
        let text = text.trim();
        match self.form {
            Form::List | Form::Actions => None,
            Form::Named => text.split(self.open).map(named).collect(),
            Form::Pythonic => Values::new(text, None).calls(),
            Form::Braced { quote } => {
                let (name, arguments) = text.strip_prefix("call:")?.split_once('{')?;
                let mut values = Values::new(arguments, Some(quote));
                let arguments = values.fields('}')?;
                values.is_over().then_some(())?;
                Some(vec![(
                    name.to_owned(),
                    Value::Object(arguments).to_string(),
                )])
            }
            Form::Elements => elements(text, is_text).map(|call| vec![call]),
            Form::Pairs => pairs(text, is_text).map(|call| vec![call]),
        }
    }
}

/// One call in [`Form::Named`].
fn named(text: &str) -> Option<(String, String)> {
    let (name, arguments) = text.split_once(ARGUMENTS)?;
    let name = name.split(CALL_ID).next()?;
    Some((name.trim().to_owned(), arguments.trim().to_owned()))
}

/// One call in [`Form::Elements`].
fn elements(text: &str, is_text: impl Fn(&str, &str) -> bool) -> Option<(String, String)> {
    let rest = text.strip_prefix("<function=")?;
    let (name, rest) = rest.split_once('>')?;
    let mut rest = rest.strip_suffix("</function>")?.trim_start();
    let mut arguments = Map::new();
    while let Some(parameter) = rest.strip_prefix("<parameter=") {
        let (key, after) = parameter.split_once('>')?;
        let (value, after) = after.split_once("</parameter>")?;
        // One line feed at each side belongs to the markup.
        let value = value.strip_prefix('\n').unwrap_or(value);
        let value = value.strip_suffix('\n').unwrap_or(value);
        arguments.insert(key.to_owned(), value_of(value, is_text(name, key)));
        rest = after.trim_start();
    }
    let whole = rest.is_empty();
    whole.then(|| (name.to_owned(), Value::Object(arguments).to_string()))
}

/// One call in [`Form::Pairs`].
fn pairs(text: &str, is_text: impl Fn(&str, &str) -> bool) -> Option<(String, String)> {
    let (name, mut rest) = text.split_at(text.find(['\n', '<']).unwrap_or(text.len()));
    let name = name.trim_end();
    let mut arguments = Map::new();
    rest = rest.trim_start();
    while let Some(pair) = rest.strip_prefix(KEY[0]) {
        let (key, after) = pair.split_once(KEY[1])?;
        let (value, after) = (after.trim_start().strip_prefix(VALUE[0])?).split_once(VALUE[1])?;
        arguments.insert(key.to_owned(), value_of(value, is_text(name, key)));
        rest = after.trim_start();
    }
    let whole = rest.is_empty() && !name.is_empty();
    whole.then(|| (name.to_owned(), Value::Object(arguments).to_string()))
}

/// A value between two elements: JSON, or as Python prints it, which is what templates write of earlier calls and models
/// learn from that. What is neither is text.
fn value_of(value: &str, is_text: bool) -> Value {
    if is_text {
        return value.into();
    }
    let read = serde_json::from_str(value).ok();
    let read = read.or_else(|| Values::new(value, None).only());
    read.unwrap_or_else(|| value.into())
}

impl Argument {
    /// The arguments that `schema`, of an object, names; `None` where it says more of them than names and what each is.
    pub(crate) fn all_of(schema: &Value) -> Option<Vec<Self>> {
        const FURTHER: [&str; 8] = [
            "$ref",
            "allOf",
            "anyOf",
            "const",
            "enum",
            "oneOf",
            "patternProperties",
            "minProperties",
        ];
        if FURTHER.iter().any(|keyword| schema.get(keyword).is_some()) {
            return None;
        }
        let required = schema.get("required").and_then(Value::as_array);
        let is_required =
            |name: &str| required.is_some_and(|names| names.iter().any(|other| other == name));
        let properties = schema.get("properties")?.as_object()?;
        let known = |name: &str| properties.contains_key(name);
        if !required.is_none_or(|names| names.iter().all(|name| name.as_str().is_some_and(known))) {
            return None;
        }
        let argument = |(name, own): (&String, &Value)| {
            let mut own = own.clone();
            if let (Some(fields), Some(definitions)) = (own.as_object_mut(), schema.get("$defs"))
                && own_refers(fields)
            {
                fields.insert("$defs".to_owned(), definitions.clone());
            }
            let plain =
                |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.');
            let writable = !name.is_empty() && name.bytes().all(plain);
            writable.then(|| Self {
                required: is_required(name),
                name: name.clone(),
                schema: own,
            })
        };
        properties.iter().map(argument).collect()
    }

    /// Bytes of what it must be, as text.
    pub(crate) fn bytes(&self) -> usize {
        self.name.len() + self.schema.to_string().len()
    }

    /// Whether it is any text.
    fn is_text(&self) -> bool {
        const BOUNDS: [&str; 7] = [
            "enum",
            "const",
            "pattern",
            "format",
            "minLength",
            "maxLength",
            "anyOf",
        ];
        let bounded = BOUNDS.iter().any(|bound| self.schema.get(bound).is_some());
        self.schema["type"] == "string" && !bounded
    }

    /// The texts it must be one of, if it must.
    fn choices(&self) -> Option<Vec<&str>> {
        let choices = match (self.schema.get("enum"), self.schema.get("const")) {
            (Some(Value::Array(choices)), _) => choices.iter().collect(),
            (None, Some(only)) => vec![only],
            _ => return None,
        };
        let choices: Option<Vec<&str>> = choices.into_iter().map(Value::as_str).collect();
        choices.filter(|choices| !choices.is_empty())
    }
}

fn own_refers(fields: &Map<String, Value>) -> bool {
    Value::Object(fields.clone())
        .to_string()
        .contains("\"$ref\"")
}

/// A grammar as it is written.
struct Grammar<'a> {
    native: Native,
    trie: &'a TokTrie,
    text: String,
}

impl Grammar<'_> {
    fn line(&mut self, name: &str, body: &str) {
        self.text += &format!("{name}: {body}\n");
    }

    fn tools(&mut self, tools: &[(String, Vec<Argument>)]) {
        let calls: Vec<String> = (0..tools.len())
            .map(|tool| format!("call_{tool}"))
            .collect();
        self.line("call", &calls.join(" | "));
        for (tool, (name, arguments)) in tools.iter().enumerate() {
            let body = self.call(tool, name, arguments);
            self.line(&format!("call_{tool}"), &body);
        }
        if let Form::Braced { quote } = self.native.form {
            self.braced_values(quote);
        }
    }

    fn call(&mut self, tool: usize, name: &str, arguments: &[Argument]) -> String {
        match self.native.form {
            Form::List | Form::Actions => unreachable!("a list is told by JSON"),
            Form::Named => {
                let id = format!("({} /[a-zA-Z0-9]{{9}}/)?", mark(self.trie, CALL_ID));
                let body = format!("{} {id} {}", quoted(name), mark(self.trie, ARGUMENTS));
                format!("{body} {}", self.object(tool, arguments))
            }
            Form::Pythonic => {
                let list = self.listed(tool, arguments, "=", ", ");
                format!("{} {list} \")\"", quoted(&format!("{name}(")))
            }
            Form::Braced { .. } => {
                let list = self.listed(tool, arguments, ":", ",");
                format!("{} {list} \"}}\"", quoted(&format!("call:{name}{{")))
            }
            Form::Elements => {
                let each = arguments.iter().enumerate().map(|(place, argument)| {
                    let open = quoted(&format!("<parameter={}>\n", argument.name));
                    let value = format!("value_{tool}_{place}");
                    self.element(&value, argument, END_OF_PARAMETER);
                    let optional = if argument.required { "" } else { "?" };
                    format!("({open} {value}){optional}")
                });
                let each: Vec<String> = each.collect();
                let open = quoted(&format!("<function={name}>\n"));
                format!("{open} {} \"</function>\"", each.join(" "))
            }
            Form::Pairs => {
                let trie = self.trie;
                let [open, close, begin] = [KEY[0], KEY[1], VALUE[0]].map(|text| mark(trie, text));
                let each = arguments.iter().enumerate().map(|(place, argument)| {
                    let value = format!("value_{tool}_{place}");
                    self.element(&value, argument, VALUE[1]);
                    let key = quoted(&argument.name);
                    let optional = if argument.required { "" } else { "?" };
                    format!(
                        "({open} {key} {close} {LINE_FEEDS} {begin} {value} {LINE_FEEDS}){optional}"
                    )
                });
                let each: Vec<String> = each.collect();
                format!("{} {LINE_FEEDS} {}", quoted(name), each.join(" "))
            }
        }
    }

    /// The JSON of all arguments.
    fn object(&mut self, tool: usize, arguments: &[Argument]) -> String {
        let names = arguments
            .iter()
            .map(|one| (one.name.clone(), one.schema.clone()));
        let required = arguments.iter().filter(|one| one.required);
        let required: Vec<&str> = required.map(|one| one.name.as_str()).collect();
        let mut definitions = Map::new();
        let properties: Map<String, Value> = names
            .map(|(name, mut schema)| {
                let own = schema.as_object_mut().and_then(|own| own.remove("$defs"));
                if let Some(Value::Object(own)) = own {
                    definitions.extend(own);
                }
                (name, schema)
            })
            .collect();
        let mut schema = json!({
            "type": "object",
            "properties": properties,
            "required": required,
            "additionalProperties": false,
        });
        if !definitions.is_empty() {
            schema["$defs"] = definitions.into();
        }
        let name = format!("object_{tool}");
        self.line(&name, &json_of(&schema));
        name
    }

    /// Arguments with their names, in order, those that are not required left out or not.
    fn listed(
        &mut self,
        tool: usize,
        arguments: &[Argument],
        assign: &str,
        separator: &str,
    ) -> String {
        let count = arguments.len();
        for (place, argument) in arguments.iter().enumerate() {
            let value = self.value(&format!("value_{tool}_{place}"), argument);
            let named = quoted(&format!("{}{assign}", argument.name));
            self.line(
                &format!("argument_{tool}_{place}"),
                &format!("{named} {value}"),
            );
            // What may follow this one, and what the list may begin with from here on.
            let next = place + 1;
            let rest = |place: usize| match place < count {
                true => format!("rest_{tool}_{place}"),
                false => String::new(),
            };
            let own = format!("{} argument_{tool}_{place}", quoted(separator));
            let own = if argument.required {
                own
            } else {
                format!("({own})?")
            };
            self.line(
                &format!("rest_{tool}_{place}"),
                &format!("{own} {}", rest(next)),
            );
            let begin = format!("argument_{tool}_{place} {}", rest(next));
            let begin = match (argument.required, next < count) {
                (false, true) => format!("{begin} | first_{tool}_{next}"),
                _ => begin,
            };
            self.line(&format!("first_{tool}_{place}"), &begin);
        }
        match arguments.iter().any(|argument| argument.required) {
            true => format!("first_{tool}_0"),
            false if count > 0 => format!("first_{tool}_0?"),
            false => String::new(),
        }
    }

    /// The rule `name` of a value between names and separators; returns what refers to it.
    fn value(&mut self, name: &str, argument: &Argument) -> String {
        let schema = &argument.schema;
        let body = match self.native.form {
            Form::Braced { quote } => {
                let quote = mark(self.trie, quote);
                let kind = schema["type"].as_str();
                match (argument.choices(), kind) {
                    (Some(choices), _) => {
                        let choices: Vec<String> = choices.into_iter().map(quoted).collect();
                        format!("{quote} ({}) {quote}", choices.join(" | "))
                    }
                    (None, Some("string")) => return "braced_text".to_owned(),
                    (None, Some("integer" | "number" | "boolean")) => json_of(schema),
                    (None, Some("array")) => return "braced_list".to_owned(),
                    (None, Some("object")) => return "braced_object".to_owned(),
                    _ => return "braced_value".to_owned(),
                }
            }
            _ if argument.choices().is_some() => {
                let choices = argument.choices().unwrap_or_default();
                // In either of Python's quotes; what has quotes of its own only as JSON has it.
                let plain = |choice: &&str| !choice.contains(['\'', '\\', '\n']);
                let single = choices.iter().copied().filter(plain);
                let single = single.map(|choice| quoted(&format!("'{choice}'")));
                let double = choices.iter().map(|choice| quoted(&quoted(choice)));
                double.chain(single).collect::<Vec<_>>().join(" | ")
            }
            _ if argument.is_text() => {
                self.line(&format!("{name}_json"), &json_of(schema));
                format!("{name}_json | /'([^'\\\\\\n]|\\\\.)*'/")
            }
            _ if schema["type"] == "boolean" => {
                "\"True\" | \"False\" | \"true\" | \"false\"".to_owned()
            }
            // Texts in either of Python's quotes.
            _ if schema["type"] == "array" && schema["items"] == json!({"type": "string"}) => {
                let text = "/'([^'\\\\\\n]|\\\\.)*'/";
                let list = format!("\"[\" {text} (\", \" {text})* \"]\"");
                format!("{} | {list}", json_of(schema))
            }
            _ => json_of(schema),
        };
        self.line(name, &body);
        name.to_owned()
    }

    /// The rule `name` of a value in an element, with the end of that.
    fn element(&mut self, name: &str, argument: &Argument, end: &str) {
        let is_control = self.trie.get_special_token(end).is_some();
        let end = mark(self.trie, end);
        let kind = argument.schema["type"].as_str();
        if let Some(choices) = argument.choices() {
            let choices: Vec<String> = choices.into_iter().map(quoted).collect();
            self.line(name, &format!("({}) {end}", choices.join(" | ")));
        } else if kind == Some("string") && is_control {
            // A control token is no text, so nothing but it ends the text.
            self.line(name, &format!("/(?s:.+)/? {end}"));
        } else if kind == Some("string") {
            self.line(&format!("{name}[suffix={end}]"), "/(?s:.*)/");
        } else if kind == Some("boolean") {
            // As Python prints it, too: so templates write it of earlier calls.
            let body = "(\"true\" | \"false\" | \"True\" | \"False\")";
            self.line(name, &format!("{body} {end}"));
        } else {
            self.line(&format!("{name}_json"), &json_of(&argument.schema));
            self.line(name, &format!("{name}_json {end}"));
        }
    }

    /// Values that no schema bounds, in [`Form::Braced`].
    fn braced_values(&mut self, quote: &str) {
        let control = self.trie.get_special_token(quote).is_some();
        let quote_mark = mark(self.trie, quote);
        match control {
            // A control token is no text, so nothing but it ends the text.
            true => {
                self.text += &format!(
                    "braced_text: {quote_mark} BRACED_TEXT? {quote_mark}\nBRACED_TEXT: /(?s:.+)/\n"
                )
            }
            false => {
                self.text += &format!(
                    "braced_text: {quote_mark} braced_rest\nbraced_rest[suffix={quote_mark}]: /(?s:.*)/\n"
                );
            }
        }
        self.text += "braced_value: braced_text | BRACED_PLAIN | braced_list | braced_object\n\
            BRACED_PLAIN: /-?[0-9]+(\\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null/\n\
            braced_list: \"[\" (braced_value (\",\" braced_value)*)? \"]\"\n\
            braced_object: \"{\" (braced_pair (\",\" braced_pair)*)? \"}\"\n\
            braced_pair: BRACED_KEY \":\" braced_value\n\
            BRACED_KEY: /[A-Za-z0-9_.\\-]+/\n";
    }
}

/// A mark as a grammar has it: the control token that it is in the vocabulary, or its text.
fn mark(trie: &TokTrie, text: &str) -> String {
    match trie.get_special_token(text) {
        Some(token) => format!("<[{token}]>"),
        None => quoted(text),
    }
}

fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

fn json_of(schema: &Value) -> String {
    format!("%json {}", compact(schema.clone()))
}

#[cfg(test)]
mod tests;
