//! Tools a client offers, and how models write calls of them.

use lacuna_models::tokenizer::Tokenizer;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::http::error::ApiError;
use crate::http::ignored::Ignored;
use crate::structured::grammar::OPEN;
use crate::structured::schema;

/// Tools at most, as OpenAI has it.
const MOST_TOOLS: usize = 128;
/// Characters of a tool's name at most, as OpenAI has it.
const MOST_NAME: usize = 64;

/// How a model writes a call. Its chat template tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ToolSyntax {
    /// `<tool_call>` and `</tool_call>` around `{"name": ..., "arguments": ...}`.
    Tagged,
    /// The reply is `{"name": ..., "arguments": ...}`, or a list of these.
    Bare,
    /// The reply is `{"name": ..., "parameters": ...}`.
    BareParameters,
}

/// `tool_choice`, as it is sent.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected none, auto, required, or a function")]
pub(crate) enum ToolChoice {
    Word(ChoiceWord),
    Function(ChosenTool),
}

#[derive(Debug, Deserialize)]
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
}

#[derive(Debug)]
struct Function {
    name: String,
    parameters: Value,
}

impl ToolSyntax {
    /// What the model's chat template teaches it.
    pub(crate) fn of(tokenizer: &Tokenizer) -> Self {
        let template = tokenizer
            .named_chat_template("tool_use")
            .or(tokenizer.chat_template())
            .unwrap_or_default();
        if template.contains(OPEN) && !template.contains("<function=") {
            Self::Tagged
        } else if template.contains("\"parameters\": dictionary") {
            Self::BareParameters
        } else {
            Self::Bare
        }
    }

    fn arguments(self) -> &'static str {
        match self {
            Self::Tagged | Self::Bare => "arguments",
            Self::BareParameters => "parameters",
        }
    }
}

impl Tools {
    /// Checks the tools and applies the choice: one that names a tool leaves only that.
    pub(crate) fn new(
        tools: Vec<Value>,
        choice: Option<ToolChoice>,
        ignored: &mut Ignored,
    ) -> Result<Self, ApiError> {
        if tools.len() > MOST_TOOLS {
            return Err(ApiError::field(
                "tools",
                format!("{} tools, at most {MOST_TOOLS}", tools.len()),
            ));
        }
        let functions = tools.iter().enumerate();
        let functions = functions
            .map(|(index, tool)| {
                let mut function = Function::read(tool).ok_or_else(|| malformed(index))?;
                let path = format!("tools[{index}].function.parameters");
                schema::prune(&mut function.parameters, &path, ignored)?;
                Ok(function)
            })
            .collect::<Result<Vec<_>, ApiError>>()?;
        let mut all = Self {
            choice: if tools.is_empty() {
                Choice::None
            } else {
                Choice::Auto
            },
            offered: tools,
            functions,
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

    /// What the JSON of one call must be.
    pub(crate) fn schema(&self, syntax: ToolSyntax) -> Value {
        let arguments = syntax.arguments();
        let one = |function: &Function| {
            json!({
                "type": "object",
                "properties": {
                    "name": {"const": function.name},
                    arguments: function.parameters,
                },
                "required": ["name", arguments],
                "additionalProperties": false,
            })
        };
        let calls: Vec<Value> = self.functions.iter().map(one).collect();
        json!({"anyOf": calls})
    }
}

impl Function {
    fn read(tool: &Value) -> Option<Self> {
        let function = tool
            .get("function")
            .filter(|_| tool["type"] == "function")?;
        let name = function.get("name")?.as_str()?;
        let valid = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'-';
        if name.is_empty() || name.len() > MOST_NAME || !name.bytes().all(valid) {
            return None;
        }
        let parameters = match function.get("parameters") {
            None | Some(Value::Null) => json!({"type": "object", "properties": {}}),
            Some(parameters) if parameters.is_object() => parameters.clone(),
            Some(_) => return None,
        };
        Some(Self {
            name: name.to_owned(),
            parameters,
        })
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
