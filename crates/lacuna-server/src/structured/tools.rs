//! Tools a client offers, and how models write calls of them.

use lacuna_text::reply::Format;
use lacuna_text::tokenizer::{TokenKind, Tokenizer};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::http::error::ApiError;
use crate::http::ignored::Ignored;
use crate::structured::grammar::{CLOSE, OPEN, nothing_conforms};
use crate::structured::native::{Argument, CallFields, Calls, Native};
use crate::structured::schema::Definitions;

/// Tools at most, as OpenAI has it.
const MOST_TOOLS: usize = 128;
/// Characters of a tool's name at most, as Anthropic has it; OpenAI has half of it.
const MOST_NAME: usize = 128;

/// How a model writes a call. Its chat template tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ToolSyntax {
    /// `<tool_call>` and `</tool_call>` around `{"name": ..., "arguments": ...}`.
    Tagged,
    /// The reply is `{"name": ..., "arguments": ...}`, or a list of these.
    Bare,
    /// The reply is `{"name": ..., "parameters": ...}`.
    BareParameters,
    /// A message to the function, as gpt-oss writes it.
    Harmony,
    /// Marks of a family's own, and what it writes between them.
    Native(Native),
}

/// `tool_choice`, as it is sent.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected none, auto, required, or a function")]
pub(crate) enum ToolChoice {
    Word(ChoiceWord),
    Function(ChosenTool),
}

#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ChoiceWord {
    None,
    Auto,
    Required,
}

#[derive(Debug, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum ChosenTool {
    Function { function: ChosenFunction },
}

#[derive(Debug, Deserialize)]
pub(crate) struct ChosenFunction {
    name: String,
}

impl ToolChoice {
    /// The tool of that name, and no other.
    pub(crate) fn of_tool(name: String) -> Self {
        Self::Function(ChosenTool::Function {
            function: ChosenFunction { name },
        })
    }
}

/// Whether tools are called.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Choice {
    /// They are not.
    #[default]
    None,
    /// As the model likes.
    Auto,
    /// One at least, and nothing else.
    Required,
}

/// The tools that a request offers.
#[derive(Debug, Default)]
pub(crate) struct Tools {
    offered: Vec<Value>,
    functions: Vec<Function>,
    choice: Choice,
    one_call: bool,
}

#[derive(Debug)]
struct Function {
    /// Its place among the tools.
    index: usize,
    name: String,
    /// Absent where the tool takes no arguments.
    parameters: Option<Value>,
}

/// Whether a text is a control token of the vocabulary.
pub(crate) fn is_control(tokenizer: &Tokenizer, mark: &str) -> bool {
    let kind = tokenizer.id(mark).and_then(|id| tokenizer.kind(id));
    kind.is_some_and(TokenKind::is_special)
}

impl ToolSyntax {
    /// What the model's chat template teaches it.
    pub(crate) fn of(tokenizer: &Tokenizer) -> Self {
        let template = tokenizer
            .named_chat_template("tool_use")
            .or(tokenizer.chat_template())
            .unwrap_or_default();
        Self::of_template(template, |mark| is_control(tokenizer, mark))
    }

    /// What this chat template teaches, for a vocabulary that has such control tokens.
    pub(crate) fn of_template(template: &str, is_control: impl Fn(&str) -> bool) -> Self {
        if Format::of(template) == Some(Format::Harmony) {
            Self::Harmony
        } else if let Some(native) = Native::of(template, is_control) {
            Self::Native(native)
        } else if template.contains(OPEN) {
            Self::Tagged
        } else if template.contains("\"parameters\": dictionary") {
            Self::BareParameters
        } else {
            Self::Bare
        }
    }

    /// What the JSON of a call has.
    fn fields(self) -> CallFields {
        match self {
            Self::Tagged | Self::Bare | Self::Harmony => CallFields::USUAL,
            Self::BareParameters => CallFields {
                arguments: "parameters",
                ..CallFields::USUAL
            },
            Self::Native(native) => native.fields(),
        }
    }

    /// What calls begin and end with; nothing where no mark tells them.
    pub(crate) fn ends(self) -> Option<(&'static str, &'static str)> {
        match self {
            Self::Tagged => Some((OPEN, CLOSE)),
            Self::Native(native) => Some((native.open, native.close)),
            Self::Bare | Self::BareParameters | Self::Harmony => None,
        }
    }

    /// All that marks calls and parts of them in the text of a reply.
    pub(crate) fn marks(self) -> Vec<&'static str> {
        match self {
            Self::Tagged => vec![OPEN, CLOSE],
            Self::Native(native) => native.marks(),
            Self::Bare | Self::BareParameters | Self::Harmony => Vec::new(),
        }
    }

    /// How a reply begins that is a call of the tool `name`, where calls have no mark.
    pub(crate) fn opening(self, name: &str) -> String {
        let name = Value::from(name);
        let fields = self.fields();
        format!("{{\"{}\": {name}, \"{}\": ", fields.name, fields.arguments)
    }
}

impl Tools {
    /// Checks the tools and applies the choice: one that names a tool leaves only that.
    pub(crate) fn new(tools: Vec<Value>, choice: Option<ToolChoice>) -> Result<Self, ApiError> {
        if tools.len() > MOST_TOOLS {
            return Err(ApiError::field(
                "tools",
                format!("{} tools, at most {MOST_TOOLS}", tools.len()),
            ));
        }
        let functions = tools.iter().enumerate();
        let functions = functions
            .map(|(index, tool)| Function::read(index, tool).ok_or_else(|| malformed(index)))
            .collect::<Result<Vec<_>, _>>()?;
        let mut all = Self {
            choice: if tools.is_empty() {
                Choice::None
            } else {
                Choice::Auto
            },
            offered: tools,
            functions,
            one_call: false,
        };
        all.apply(choice)?;
        Ok(all)
    }

    fn apply(&mut self, choice: Option<ToolChoice>) -> Result<(), ApiError> {
        match choice {
            None | Some(ToolChoice::Word(ChoiceWord::Auto)) => {}
            Some(ToolChoice::Word(ChoiceWord::None)) => *self = Self::default(),
            Some(ToolChoice::Word(ChoiceWord::Required)) => self.choice = Choice::Required,
            Some(ToolChoice::Function(ChosenTool::Function { function })) => {
                self.functions.retain(|other| other.name == function.name);
                self.choice = Choice::Required;
            }
        }
        if self.choice == Choice::Required && self.functions.is_empty() {
            return Err(ApiError::field(
                "tool_choice",
                "`tool_choice` asks for a tool that `tools` does not offer",
            ));
        }
        Ok(())
    }

    /// The same, with no more than one call in a reply: because that was asked for, or because models
    /// that were not trained to call tools go on with one after another.
    pub(crate) fn called_once(self, one_call: bool) -> Self {
        Self { one_call, ..self }
    }

    pub(crate) fn are_called_once(&self) -> bool {
        self.one_call
    }

    /// The tools as they were sent, for the chat template.
    pub(crate) fn offered(&self) -> &[Value] {
        &self.offered
    }

    pub(crate) fn are_offered(&self) -> bool {
        !self.offered.is_empty()
    }

    pub(crate) fn choice(&self) -> Choice {
        self.choice
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = String> {
        self.functions.iter().map(|function| function.name.clone())
    }

    /// What the JSON of one call must be. References in a tool's parameters begin there, so each
    /// tool is a document of its own.
    pub(crate) fn schema(
        &self,
        syntax: ToolSyntax,
        ignored: &mut Ignored,
    ) -> Result<Value, ApiError> {
        let mut definitions = Definitions::new(ignored);
        let functions = self.functions.iter();
        let parameters = functions
            .map(|function| function.arguments(&mut definitions))
            .collect::<Result<Vec<_>, _>>()?;
        let fields = syntax.fields();
        let text = |pattern: &str| json!({"type": "string", "pattern": pattern});
        let one = |(function, parameters): (&Function, Value)| {
            let mut properties = Map::new();
            if let Some(number) = fields.number {
                properties.insert(number.to_owned(), text("^[0-9]{1,3}$"));
            }
            properties.insert(fields.name.to_owned(), json!({"const": function.name}));
            properties.insert(fields.arguments.to_owned(), parameters);
            let required: Vec<String> = properties.keys().cloned().collect();
            if let Some(id) = fields.id {
                properties.insert(id.to_owned(), text("^[a-zA-Z0-9]{9}$"));
            }
            json!({
                "type": "object",
                "properties": properties,
                "required": required,
                "additionalProperties": false,
            })
        };
        let calls: Vec<Value> = self.functions.iter().zip(parameters).map(one).collect();
        Ok(definitions.finish(json!({"anyOf": calls})))
    }
}

impl Tools {
    /// What calls must be as a family writes them, and how it does: where arguments say more than their names and what
    /// each is, as JSON between the same marks.
    pub(crate) fn native(
        &self,
        native: Native,
        ignored: &mut Ignored,
    ) -> Result<(Native, Calls), ApiError> {
        if !native.is_json() {
            let tools = self.arguments(ignored)?.into_iter();
            let tools = tools.map(|(name, schema)| Some((name, Argument::all_of(&schema)?)));
            if let Some(tools) = tools.collect() {
                return Ok((native, Calls::Tools(tools)));
            }
        }
        let schema = self.schema(ToolSyntax::Native(native), ignored)?;
        Ok((native.as_json(), Calls::Json(schema)))
    }

    /// Whether an argument of a tool is a text, whatever it looks like.
    pub(crate) fn texts(&self) -> impl Iterator<Item = (String, Vec<String>)> {
        self.functions.iter().map(|function| {
            let properties = function.parameters.as_ref();
            let properties = properties.and_then(|it| it.get("properties")?.as_object());
            let texts = properties.into_iter().flatten();
            let texts = texts.filter(|(_, schema)| schema["type"] == "string");
            (
                function.name.clone(),
                texts.map(|(name, _)| name.clone()).collect(),
            )
        })
    }

    /// The name of each tool and what the JSON of its arguments must be.
    pub(crate) fn arguments(
        &self,
        ignored: &mut Ignored,
    ) -> Result<Vec<(String, Value)>, ApiError> {
        let one = |function: &Function| {
            let mut definitions = Definitions::new(ignored);
            let arguments = function.arguments(&mut definitions)?;
            Ok((function.name.clone(), definitions.finish(arguments)))
        };
        self.functions.iter().map(one).collect()
    }
}

impl Function {
    fn read(index: usize, tool: &Value) -> Option<Self> {
        let function = tool
            .get("function")
            .filter(|_| tool["type"] == "function")?;
        let name = function.get("name")?.as_str()?;
        let valid = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
        if name.is_empty() || name.len() > MOST_NAME || !name.bytes().all(valid) {
            return None;
        }
        let parameters = match function.get("parameters") {
            None | Some(Value::Null) => None,
            Some(parameters) if parameters.is_object() => Some(parameters.clone()),
            Some(_) => return None,
        };
        Some(Self {
            index,
            name: name.to_owned(),
            parameters,
        })
    }

    /// What the arguments of a call must be.
    fn arguments(&self, definitions: &mut Definitions<'_>) -> Result<Value, ApiError> {
        let Some(parameters) = &self.parameters else {
            return Ok(json!({"type": "object", "properties": {}, "additionalProperties": false}));
        };
        let path = format!("tools[{}].function.parameters", self.index);
        let mut schema = definitions.read(parameters, &path)?;
        let known = definitions.satisfiable();
        if let Some(impossible) = known.impossible(&schema, &path) {
            return Err(nothing_conforms(impossible));
        }
        if !known.can_be(&schema, "object") {
            let message = format!("`{path}` must describe an object, one property per argument");
            return Err(ApiError::field(path, message));
        }
        name_arguments(&mut schema);
        definitions.close(&mut schema);
        Ok(schema)
    }
}

/// Makes parameters that say nothing but the names of arguments an object, and ones that do not even
/// say that an object of none.
fn name_arguments(parameters: &mut Value) {
    const FURTHER: [&str; 7] = [
        "$ref",
        "additionalProperties",
        "allOf",
        "anyOf",
        "const",
        "enum",
        "patternProperties",
    ];
    let Value::Object(fields) = parameters else {
        return;
    };
    if !FURTHER.iter().any(|keyword| fields.contains_key(*keyword)) {
        fields.insert("type".to_owned(), "object".into());
        fields.entry("properties").or_insert_with(|| json!({}));
    }
}

fn malformed(index: usize) -> ApiError {
    let param = format!("tools[{index}]");
    let message = format!(
        "`{param}` must be {{\"type\": \"function\", \"function\": {{\"name\", \"parameters\"}}}} with a \
         name of at most {MOST_NAME} letters, digits, `_` and `-`"
    );
    ApiError::field(param, message)
}
