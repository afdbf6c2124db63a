//! What a reply must be, and that as a grammar.

use llguidance::api::TopLevelGrammar;
use serde_json::{Value, json};
use toktrie::TokTrie;

use crate::http::error::ApiError;
use crate::http::ignored::Ignored;
use crate::structured::format::{Format, Kind};
use crate::structured::native::{Calls, Native};
use crate::structured::schema::{Definitions, Impossible};
use crate::structured::tools::{Choice, ToolSyntax, Tools};

/// What a reply must be.
#[derive(Debug)]
pub(crate) enum Rule {
    /// A body, and nothing else.
    Body(Body),
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
    /// The same between the marks of a family: anything, but what follows the first mark must be calls; or calls and
    /// nothing else.
    Native {
        native: Native,
        calls: Calls,
        one_call: bool,
        required: bool,
    },
    /// Anything, but what begins like a call of a tool must be one.
    CallAtOnce {
        /// What JSON of one call must be.
        schema: Value,
        /// What calls begin with.
        openings: Vec<String>,
    },
    /// In [`ToolSyntax::Harmony`]: thoughts, and then an answer that is a body.
    HarmonyBody(Body),
    /// In [`ToolSyntax::Harmony`]: thoughts, and then a call of one of these tools, or anything, of which
    /// what goes to a tool must be its arguments.
    HarmonyCall {
        /// The name of each tool, and what JSON of its arguments must be.
        tools: Vec<(String, Value)>,
        required: bool,
    },
}

/// What an answer must be.
#[derive(Debug)]
pub(crate) struct Body(Format);

/// Marks a call's beginning in [`ToolSyntax::Tagged`].
pub(crate) const OPEN: &str = "<tool_call>";
/// Marks its end.
pub(crate) const CLOSE: &str = "</tool_call>";

impl Body {
    fn new(format: Format, ignored: &mut Ignored) -> Result<Self, ApiError> {
        Ok(Self(match format.kind {
            Kind::Json(schema) => Format {
                kind: Kind::Json(read(&schema, format.field, ignored)?),
                ..format
            },
            _ => format,
        }))
    }

    /// The field of the request that says it.
    pub(super) fn field(&self) -> &'static str {
        self.0.field
    }

    /// Whether it is said by a grammar that the request has, whose faults are then told as they are.
    pub(super) fn is_grammar(&self) -> bool {
        matches!(self.0.kind, Kind::Lark(_))
    }

    pub(super) fn is_json(&self) -> bool {
        matches!(self.0.kind, Kind::Json(_))
    }

    fn bytes(&self) -> usize {
        match &self.0.kind {
            Kind::Json(schema) => schema.to_string().len(),
            Kind::Regex(text) | Kind::Lark(text) => text.len(),
        }
    }

    fn grammar(&self) -> TopLevelGrammar {
        match &self.0.kind {
            Kind::Json(schema) => TopLevelGrammar::from_json_schema(compact(schema.clone())),
            Kind::Regex(regex) => TopLevelGrammar::from_regex(regex),
            Kind::Lark(lark) => TopLevelGrammar::from_lark(lark.clone()),
        }
    }

    /// The same as a part of another grammar.
    fn part(&self) -> String {
        match &self.0.kind {
            Kind::Json(schema) => format!("%json {}", compact(schema.clone())),
            Kind::Regex(regex) => in_lark(regex),
            Kind::Lark(lark) => format!("%lark {{\n{lark}\n}}"),
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
        let body = format
            .map(|format| Body::new(format, ignored))
            .transpose()?;
        Ok(match (tools.choice(), body, syntax) {
            (Choice::Required, _, ToolSyntax::Harmony) => Some(Self::HarmonyCall {
                tools: tools.arguments(ignored)?,
                required: true,
            }),
            (_, Some(body), ToolSyntax::Harmony) => Some(Self::HarmonyBody(body)),
            (Choice::Auto, None, ToolSyntax::Harmony) => Some(Self::HarmonyCall {
                tools: tools.arguments(ignored)?,
                required: false,
            }),
            (Choice::Required, _, ToolSyntax::Native(native)) => {
                Some(Self::native(native, tools, true, ignored)?)
            }
            (Choice::Required, ..) => Some(Self::Calls {
                schema: tools.schema(syntax, ignored)?,
                syntax,
                one_call: tools.are_called_once(),
            }),
            (_, Some(body), _) => Some(Self::Body(body)),
            (Choice::Auto, None, ToolSyntax::Tagged) if tools.are_offered() => {
                Some(Self::CallsAfterMarker {
                    schema: tools.schema(syntax, ignored)?,
                    one_call: tools.are_called_once(),
                })
            }
            (Choice::Auto, None, ToolSyntax::Native(native)) if tools.are_offered() => {
                Some(Self::native(native, tools, false, ignored)?)
            }
            (Choice::Auto, None, ToolSyntax::Bare | ToolSyntax::BareParameters)
                if tools.are_offered() =>
            {
                Some(Self::CallAtOnce {
                    schema: tools.schema(syntax, ignored)?,
                    openings: tools.names().map(|name| syntax.opening(&name)).collect(),
                })
            }
            _ => None,
        })
    }

    fn native(
        native: Native,
        tools: &Tools,
        required: bool,
        ignored: &mut Ignored,
    ) -> Result<Self, ApiError> {
        let (native, calls) = tools.native(native, ignored)?;
        Ok(Self::Native {
            native,
            calls,
            one_call: tools.are_called_once(),
            required,
        })
    }

    /// What begins the part of a reply that is held to a grammar, if a mark does.
    pub(super) fn mark(&self) -> Option<&'static str> {
        match self {
            Self::CallsAfterMarker { .. } => Some(OPEN),
            Self::Native {
                native,
                required: false,
                ..
            } => Some(native.open),
            _ => None,
        }
    }

    /// Bytes of the schema, or of what else is followed, as text.
    pub(super) fn schema_bytes(&self) -> usize {
        match self {
            Self::Body(body) | Self::HarmonyBody(body) => body.bytes(),
            Self::Calls { schema, .. }
            | Self::CallsAfterMarker { schema, .. }
            | Self::CallAtOnce { schema, .. } => schema.to_string().len(),
            Self::Native { calls, .. } => calls.bytes(),
            Self::HarmonyCall { tools, .. } => {
                let bytes =
                    |(name, schema): &(String, Value)| name.len() + schema.to_string().len();
                tools.iter().map(bytes).sum()
            }
        }
    }

    /// The grammar of the reply, or of what follows the marker in it, or [`RECIPIENT`].
    /// `trie` knows which marks are tokens of the vocabulary.
    pub(super) fn grammar(&self, trie: &TokTrie) -> TopLevelGrammar {
        match self {
            Self::Body(body) => body.grammar(),
            Self::Native {
                native,
                calls,
                one_call,
                required,
            } => native.grammar(calls, *one_call, !required, trie),
            Self::CallAtOnce { schema, .. } => {
                TopLevelGrammar::from_json_schema(compact(schema.clone()))
            }
            Self::Calls {
                schema,
                syntax: ToolSyntax::Bare | ToolSyntax::BareParameters | ToolSyntax::Harmony,
                ..
            } => TopLevelGrammar::from_json_schema(compact(schema.clone())),
            Self::Calls {
                schema, one_call, ..
            } => tagged(schema, &format!("{OPEN}\n"), *one_call),
            Self::CallsAfterMarker { schema, one_call } => tagged(schema, "\n", *one_call),
            Self::HarmonyBody(body) => harmony_body(body),
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

/// Thoughts, and a body on the channel for answers.
fn harmony_body(body: &Body) -> TopLevelGrammar {
    let kind = if body.is_json() { "json?" } else { "" };
    TopLevelGrammar::from_lark(format!(
        "start: thoughts <|channel|> \"final\" {kind} <|message|> body\n{THOUGHTS}body: {}\n",
        body.part()
    ))
}

/// A regular expression as Lark has it, between two `/` and in one line.
fn in_lark(regex: &str) -> String {
    let mut out = String::from("/");
    let mut escaped = false;
    for character in regex.chars() {
        match character {
            '/' if !escaped => out.push_str("\\/"),
            '\n' => out.push_str(if escaped { "n" } else { "\\n" }),
            other => out.push(other),
        }
        escaped = character == '\\' && !escaped;
    }
    out.push('/');
    out
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
    // Most write each call on lines of its own, some all in one line.
    let again = format!("{}? {}", text("\n"), text(&format!("{OPEN}\n")));
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
pub(super) fn compact(mut schema: Value) -> Value {
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

fn read(schema: &Value, path: &str, ignored: &mut Ignored) -> Result<Value, ApiError> {
    if !schema.is_object() {
        return Err(ApiError::field(
            path,
            format!("`{path}` must be a JSON object"),
        ));
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
