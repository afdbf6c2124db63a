//! What a reply must be, and that as a grammar.

use llguidance::api::TopLevelGrammar;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::http::error::ApiError;
use crate::http::ignored::Ignored;
use crate::structured::schema::{Definitions, Impossible};
use crate::structured::tools::{Choice, ToolSyntax, Tools};

/// `response_format`.
#[derive(Debug, Deserialize)]
pub(crate) struct Format {
    #[serde(rename = "type")]
    kind: FormatKind,
    #[serde(default)]
    json_schema: Option<NamedSchema>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum FormatKind {
    /// Anything.
    Text,
    /// Any JSON object.
    JsonObject,
    /// JSON of a schema.
    JsonSchema,
}

#[derive(Debug, Deserialize)]
struct NamedSchema {
    #[serde(default, rename = "name")]
    _name: Option<String>,
    #[serde(default, rename = "description")]
    _description: Option<String>,
    schema: Value,
    /// Schemas are always followed strictly.
    #[serde(default, rename = "strict")]
    _strict: Option<bool>,
}

/// What a reply must be.
#[derive(Debug)]
pub(crate) enum Rule {
    /// JSON of a schema, and nothing else.
    Json(Value),
    /// Calls of tools, and nothing else.
    Calls {
        /// What JSON of one call must be.
        schema: Value,
        syntax: ToolSyntax,
        one_call: bool,
    },
    /// Anything, but what follows the marker of a call must be one.
    CallsAfterMarker {
        /// What JSON of one call must be.
        schema: Value,
        one_call: bool,
    },
    /// In [`ToolSyntax::Harmony`]: thoughts, and then an answer that is JSON of a schema.
    HarmonyJson(Value),
    /// In [`ToolSyntax::Harmony`]: thoughts, and then a call of one of these tools, or anything, of which
    /// what goes to a tool must be its arguments.
    HarmonyCall {
        /// The name of each tool, and what JSON of its arguments must be.
        tools: Vec<(String, Value)>,
        required: bool,
    },
}

/// Where a reply's schema stands in a request.
pub(super) const SCHEMA: &str = "response_format.json_schema.schema";

/// Marks a call's beginning in [`ToolSyntax::Tagged`].
pub(crate) const OPEN: &str = "<tool_call>";
/// Marks its end.
pub(crate) const CLOSE: &str = "</tool_call>";

impl Format {
    /// JSON of a schema.
    pub(crate) fn of_schema(schema: Value) -> Self {
        Self {
            kind: FormatKind::JsonSchema,
            json_schema: Some(NamedSchema {
                _name: None,
                _description: None,
                schema,
                _strict: None,
            }),
        }
    }

    /// The schema a reply must conform to, if it must to any.
    fn schema(self) -> Result<Option<Value>, ApiError> {
        match (self.kind, self.json_schema) {
            (FormatKind::Text, _) => Ok(None),
            (FormatKind::JsonObject, _) => Ok(Some(json!({"type": "object"}))),
            (FormatKind::JsonSchema, Some(named)) => Ok(Some(named.schema)),
            (FormatKind::JsonSchema, None) => Err(ApiError::field(
                "response_format.json_schema",
                "`response_format.json_schema` is missing",
            )),
        }
    }
}

impl Rule {
    /// What follows from the request's settings; `None` when the reply may be anything.
    pub(crate) fn new(
        format: Option<Format>,
        tools: &Tools,
        syntax: ToolSyntax,
        ignored: &mut Ignored,
    ) -> Result<Option<Self>, ApiError> {
        let json = match format.map(Format::schema).transpose()?.flatten() {
            None => None,
            Some(schema) => Some(read(&schema, ignored)?),
        };
        Ok(match (tools.choice(), json, syntax) {
            (Choice::Required, _, ToolSyntax::Harmony) => Some(Self::HarmonyCall {
                tools: tools.arguments(ignored)?,
                required: true,
            }),
            (_, Some(schema), ToolSyntax::Harmony) => Some(Self::HarmonyJson(schema)),
            (Choice::Auto, None, ToolSyntax::Harmony) => Some(Self::HarmonyCall {
                tools: tools.arguments(ignored)?,
                required: false,
            }),
            (Choice::Required, ..) => Some(Self::Calls {
                schema: tools.schema(syntax, ignored)?,
                syntax,
                one_call: tools.are_called_once(),
            }),
            (_, Some(schema), _) => Some(Self::Json(schema)),
            (Choice::Auto, None, ToolSyntax::Tagged) if tools.are_offered() => {
                Some(Self::CallsAfterMarker {
                    schema: tools.schema(syntax, ignored)?,
                    one_call: tools.are_called_once(),
                })
            }
            _ => None,
        })
    }

    /// Bytes of the schema as text.
    pub(super) fn schema_bytes(&self) -> usize {
        match self {
            Self::Json(schema)
            | Self::HarmonyJson(schema)
            | Self::Calls { schema, .. }
            | Self::CallsAfterMarker { schema, .. } => schema.to_string().len(),
            Self::HarmonyCall { tools, .. } => {
                let bytes =
                    |(name, schema): &(String, Value)| name.len() + schema.to_string().len();
                tools.iter().map(bytes).sum()
            }
        }
    }

    /// The grammar of the reply, or of what follows the marker in it, or [`RECIPIENT`].
    pub(super) fn grammar(&self) -> TopLevelGrammar {
        match self {
            Self::Json(schema)
            | Self::Calls {
                schema,
                syntax: ToolSyntax::Bare | ToolSyntax::BareParameters | ToolSyntax::Harmony,
                ..
            } => TopLevelGrammar::from_json_schema(compact(schema.clone())),
            Self::Calls {
                schema, one_call, ..
            } => tagged(schema, &format!("{OPEN}\n"), *one_call),
            Self::CallsAfterMarker { schema, one_call } => tagged(schema, "\n", *one_call),
            Self::HarmonyJson(schema) => harmony_json(schema),
            Self::HarmonyCall { tools, required } => harmony_call(tools, *required),
        }
    }
}

/// How a header of [`ToolSyntax::Harmony`] begins to say which tool a message goes to.
pub(crate) const RECIPIENT: &str = "to=functions.";

/// Any number of thoughts in [`ToolSyntax::Harmony`]. What they say is left to the model.
const THOUGHTS: &str = r#"thoughts: thought*
thought: <|channel|> "analysis" <|message|> TEXT? <|end|> <|start|> "assistant"
TEXT: /(.|\n)+/
json: " "? <|constrain|> "json"
"#;

/// Thoughts, and JSON of a schema on the channel for answers.
fn harmony_json(schema: &Value) -> TopLevelGrammar {
    TopLevelGrammar::from_lark(format!(
        "start: thoughts <|channel|> \"final\" json? <|message|> body\n{THOUGHTS}body: %json {}\n",
        compact(schema.clone())
    ))
}

/// Thoughts and a call of a tool, or what follows [`RECIPIENT`] in a header.
fn harmony_call(tools: &[(String, Value)], required: bool) -> TopLevelGrammar {
    let text = |text: &str| Value::from(text).to_string();
    let calls = (0..tools.len()).map(|place| format!("call_{place}"));
    let start = match required {
        true => format!(
            "start: thoughts <|channel|> {} call\n{THOUGHTS}rest: json <|message|>\n",
            text(&format!("commentary {RECIPIENT}"))
        ),
        // A channel may come after the recipient, and a type without its mark.
        false => "start: call\nrest: channel? (\" json\" | json | \" \")? <|message|>\n\
                  channel: <|channel|> \"commentary\"\njson: \" \"? <|constrain|> \"json\"\n"
            .to_owned(),
    };
    let mut grammar = format!("{start}call: {}\n", calls.collect::<Vec<_>>().join(" | "));
    for (place, (name, schema)) in tools.iter().enumerate() {
        grammar += &format!(
            "call_{place}: {} rest body_{place}\nbody_{place}: %json {}\n",
            text(name),
            compact(schema.clone())
        );
    }
    TopLevelGrammar::from_lark(grammar)
}

/// Calls between markers, one after another; `start` is what the first begins with.
fn tagged(schema: &Value, start: &str, one_call: bool) -> TopLevelGrammar {
    let text = |text: &str| Value::from(text).to_string();
    let again = text(&format!("\n{OPEN}\n"));
    let more = format!("({again} body {})*", text(&format!("\n{CLOSE}")));
    TopLevelGrammar::from_lark(format!(
        "start: {first} body {close} {more}\nbody: %json {schema}\n",
        first = text(start),
        close = text(&format!("\n{CLOSE}")),
        more = if one_call { String::new() } else { more },
        schema = compact(schema.clone()),
    ))
}

/// One space after `:` and `,` and no other: what models write anyway, and a weak model cannot
/// lose itself in white space.
fn compact(mut schema: Value) -> Value {
    if let Value::Object(fields) = &mut schema {
        let options = json!({
            "whitespace_flexible": false,
            "item_separator": ", ",
            "key_separator": ": ",
        });
        fields.insert("x-guidance".to_owned(), options);
    }
    schema
}

fn read(schema: &Value, ignored: &mut Ignored) -> Result<Value, ApiError> {
    let path = SCHEMA;
    if !schema.is_object() {
        return Err(ApiError::field(path, "`schema` must be a JSON object"));
    }
    let mut definitions = Definitions::new(ignored);
    let root = definitions.read(schema, path)?;
    if let Some(impossible) = definitions.satisfiable().impossible(&root, path) {
        return Err(nothing_conforms(impossible));
    }
    Ok(definitions.finish(root))
}

/// No reply could be given.
pub(super) fn nothing_conforms(impossible: Impossible) -> ApiError {
    let Impossible { path, why } = impossible;
    let message = format!("nothing conforms to `{path}`: {why}");
    ApiError::field(path, message)
}
