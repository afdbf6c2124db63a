//! How a request says what its reply must be: OpenAI's `response_format`, and the fields of other servers for
//! schemas, regular expressions, lists of texts and grammars.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::http::body;
use crate::http::error::ApiError;
use crate::http::ignored::Ignored;
use crate::structured::gbnf::{self, Converted};

/// Bytes of a regular expression, a list of texts or a grammar at most: some take time with the square of it.
const MOST_BYTES: usize = 16 << 10;
/// Definitions of a grammar in Lark at most, and brackets within brackets: both are followed by functions that
/// call themselves, on threads of two megabytes. Brackets in texts count, too.
const MOST_DEFINITIONS: usize = 256;
const DEEPEST: usize = 64;

/// What a reply must be, as a request has it.
#[derive(Debug)]
pub(crate) struct Format {
    /// The field that says it.
    pub(super) field: &'static str,
    pub(super) kind: Kind,
}

#[derive(Debug)]
pub(super) enum Kind {
    /// JSON of a schema.
    Json(Value),
    /// What all of a regular expression matches.
    Regex(String),
    /// A sentence of a grammar, in Lark.
    Lark(String),
}

/// All fields that say it: the OpenAI interface's, vLLM's old and new ones, SGLang's and llama.cpp's.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Fields {
    response_format: Option<ResponseFormat>,
    structured_outputs: Option<StructuredOutputs>,
    guided_json: Option<Schema>,
    guided_regex: Option<String>,
    guided_choice: Option<Vec<String>>,
    guided_grammar: Option<String>,
    json_schema: Option<Schema>,
    regex: Option<String>,
    ebnf: Option<String>,
    grammar: Option<String>,
}

/// Their names.
const FIELDS: [&str; 10] = [
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "json_schema",
    "regex",
    "ebnf",
    "grammar",
];

/// vLLM's since 0.12.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct StructuredOutputs {
    json: Option<Schema>,
    regex: Option<String>,
    choice: Option<Vec<String>>,
    grammar: Option<String>,
    json_object: Option<bool>,
}

/// `response_format`.
#[derive(Debug, Deserialize)]
struct ResponseFormat {
    #[serde(rename = "type")]
    kind: ResponseFormatKind,
    #[serde(default)]
    json_schema: Option<NamedSchema>,
    /// Of `json_object`, as llama.cpp and others have it.
    #[serde(default)]
    schema: Option<Value>,
    /// Of `grammar`.
    #[serde(default)]
    grammar: Option<String>,
    /// Of `regex`.
    #[serde(default)]
    pattern: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum ResponseFormatKind {
    /// Anything.
    Text,
    /// Any JSON object.
    JsonObject,
    /// JSON of a schema.
    JsonSchema,
    /// A sentence of a grammar.
    Grammar,
    /// What a regular expression matches.
    Regex,
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

/// A schema, or one as text.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a JSON schema, or one as a string")]
enum Schema {
    Text(String),
    Object(Map<String, Value>),
    /// Routers send it for none.
    Asked(bool),
}

/// Where `response_format` has its schema.
const SCHEMA: &str = "response_format.json_schema.schema";

impl Format {
    /// JSON of a schema, in an interface where it is called what OpenAI's calls it.
    pub(crate) fn of_schema(schema: Value) -> Self {
        Self::json(SCHEMA, schema)
    }

    fn json(field: &'static str, schema: Value) -> Self {
        Self {
            field,
            kind: Kind::Json(schema),
        }
    }

    /// Takes the fields that say it out of a request; `None` when the reply may be anything.
    ///
    /// # Errors
    /// [`ApiError`] for a value that says nothing, and for two fields that ask for something.
    pub(crate) fn take(
        object: &mut Map<String, Value>,
        ignored: &mut Ignored,
    ) -> Result<Option<Self>, ApiError> {
        let fields = FIELDS
            .iter()
            .filter_map(|&field| object.remove_entry(field));
        let fields: Fields = body::read(fields.collect(), ignored)?;
        let mut said = fields.all()?.into_iter().flatten();
        let format = said.next();
        match (&format, said.next()) {
            (Some(format), Some(other)) => Err(ApiError::field(
                other.field,
                format!(
                    "`{}` and `{}` both say what the reply must be; leave one out",
                    format.field, other.field
                ),
            )),
            _ => Ok(format),
        }
    }
}

impl Fields {
    fn all(self) -> Result<Vec<Option<Format>>, ApiError> {
        let format = self.response_format.map(ResponseFormat::read).transpose()?;
        let outputs = self.structured_outputs.unwrap_or_default();
        let object = (outputs.json_object == Some(true))
            .then(|| Format::json("structured_outputs.json_object", json!({"type": "object"})));
        Ok(vec![
            format.flatten(),
            schema("structured_outputs.json", outputs.json)?,
            regex("structured_outputs.regex", outputs.regex)?,
            choice("structured_outputs.choice", outputs.choice)?,
            grammar("structured_outputs.grammar", outputs.grammar)?,
            object,
            schema("guided_json", self.guided_json)?,
            regex("guided_regex", self.guided_regex)?,
            choice("guided_choice", self.guided_choice)?,
            grammar("guided_grammar", self.guided_grammar)?,
            schema("json_schema", self.json_schema)?,
            regex("regex", self.regex)?,
            grammar("ebnf", self.ebnf)?,
            grammar("grammar", self.grammar)?,
        ])
    }
}

impl ResponseFormat {
    fn read(self) -> Result<Option<Format>, ApiError> {
        let missing = |field: &'static str| ApiError::field(field, format!("`{field}` is missing"));
        Ok(Some(match self.kind {
            ResponseFormatKind::Text => return Ok(None),
            ResponseFormatKind::JsonObject => match self.schema {
                Some(schema) => Format::json("response_format.schema", schema),
                None => Format::of_schema(json!({"type": "object"})),
            },
            ResponseFormatKind::JsonSchema => match self.json_schema {
                Some(named) => Format::of_schema(named.schema),
                None => return Err(missing("response_format.json_schema")),
            },
            ResponseFormatKind::Grammar => grammar("response_format.grammar", self.grammar)?
                .ok_or_else(|| missing("response_format.grammar"))?,
            ResponseFormatKind::Regex => regex("response_format.pattern", self.pattern)?
                .ok_or_else(|| missing("response_format.pattern"))?,
        }))
    }
}

fn schema(field: &'static str, schema: Option<Schema>) -> Result<Option<Format>, ApiError> {
    let schema = match schema {
        None | Some(Schema::Asked(false)) => return Ok(None),
        Some(Schema::Text(text)) if text.trim().is_empty() => return Ok(None),
        Some(Schema::Text(text)) => serde_json::from_str(&text)
            .map_err(|_| ApiError::field(field, format!("`{field}` is not JSON")))?,
        // What routers send for none would hold a reply to nothing anyway.
        Some(Schema::Object(fields)) if fields.is_empty() => return Ok(None),
        Some(Schema::Object(fields)) => Value::Object(fields),
        Some(Schema::Asked(true)) => {
            return Err(ApiError::field(
                field,
                format!("`{field}` must be a JSON schema"),
            ));
        }
    };
    Ok(Some(Format::json(field, schema)))
}

/// What is said of a field of a text, unless it is empty, as routers send it for none.
fn text(field: &'static str, text: Option<String>) -> Result<Option<String>, ApiError> {
    match text {
        Some(text) if text.len() > MOST_BYTES => Err(ApiError::field(
            field,
            format!(
                "`{field}` has {} bytes, expected {MOST_BYTES} at most",
                text.len()
            ),
        )),
        text => Ok(text.filter(|text| !text.is_empty())),
    }
}

fn regex(field: &'static str, pattern: Option<String>) -> Result<Option<Format>, ApiError> {
    let pattern = text(field, pattern)?;
    Ok(pattern.map(|pattern| Format {
        field,
        kind: Kind::Regex(without_anchors(&pattern).to_owned()),
    }))
}

/// A regular expression without marks of the beginning and the end, between which it is taken anyway.
fn without_anchors(pattern: &str) -> &str {
    let inner = pattern.strip_prefix('^').unwrap_or(pattern);
    let Some(rest) = inner.strip_suffix('$') else {
        return inner;
    };
    let escapes = rest.len() - rest.trim_end_matches('\\').len();
    if escapes % 2 == 1 { inner } else { rest }
}

fn choice(field: &'static str, texts: Option<Vec<String>>) -> Result<Option<Format>, ApiError> {
    let Some(texts) = texts else {
        return Ok(None);
    };
    if texts.iter().all(String::is_empty) {
        return Err(ApiError::field(
            field,
            format!("`{field}` must have a text that is not empty"),
        ));
    }
    let literals: Vec<String> = texts.iter().map(|text| gbnf::literal(text)).collect();
    let alternatives = text(field, Some(literals.join("|")))?;
    Ok(alternatives.map(|all| Format {
        field,
        kind: Kind::Regex(all),
    }))
}

fn grammar(field: &'static str, grammar: Option<String>) -> Result<Option<Format>, ApiError> {
    let Some(grammar) = text(field, grammar)? else {
        return Ok(None);
    };
    let kind = if gbnf::is_gbnf(&grammar) {
        match gbnf::convert(&grammar) {
            Ok(Converted::Regex(regex)) => Kind::Regex(regex),
            Ok(Converted::Lark(lark)) => Kind::Lark(lark),
            Err(error) => {
                return Err(ApiError::field(field, format!("`{field}`, {error}")));
            }
        }
    } else {
        let definitions = grammar.matches(':').count();
        if definitions > MOST_DEFINITIONS {
            return Err(ApiError::field(
                field,
                format!(
                    "`{field}` has {definitions} definitions, expected {MOST_DEFINITIONS} at most"
                ),
            ));
        }
        if nesting(&grammar) > DEEPEST {
            return Err(ApiError::field(
                field,
                format!(
                    "`{field}` has brackets that are more than {DEEPEST} deep; give parts of it names"
                ),
            ));
        }
        Kind::Lark(grammar)
    };
    Ok(Some(Format { field, kind }))
}

/// How many brackets are open at most, whatever they mean.
fn nesting(text: &str) -> usize {
    let (mut open, mut most) = (0_usize, 0);
    for byte in text.bytes() {
        match byte {
            b'(' | b'[' | b'{' => open += 1,
            b')' | b']' | b'}' => open = open.saturating_sub(1),
            _ => {}
        }
        most = most.max(open);
    }
    most
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use llguidance::ParserFactory;
    use llguidance::api::TopLevelGrammar;
    use toktrie::{ApproximateTokEnv, TokRxInfo, TokTrie};

    use super::*;

    /// Compiles what the fields ask for on a thread as small as those that prepare requests, or refuses it.
    fn compiles(fields: Value) -> bool {
        let work = move || {
            let Value::Object(mut object) = fields else {
                panic!("an object");
            };
            let Ok(Some(format)) = Format::take(&mut object, &mut Ignored::new(false)) else {
                return false;
            };
            let grammar = match format.kind {
                Kind::Regex(regex) => TopLevelGrammar::from_regex(&regex),
                Kind::Lark(lark) => TopLevelGrammar::from_lark(lark),
                Kind::Json(schema) => TopLevelGrammar::from_json_schema(schema),
            };
            let words: Vec<Vec<u8>> = (0..=255_u8).map(|byte| vec![byte]).collect();
            let trie = TokTrie::from(&TokRxInfo::new(256, 0), &words);
            let vocabulary: toktrie::TokEnv = Arc::new(ApproximateTokEnv::new(trie));
            let mut factory = ParserFactory::new_simple(&vocabulary).expect("a vocabulary");
            factory.quiet();
            factory.create_parser(grammar).is_ok()
        };
        let thread = std::thread::spawn(work);
        thread.join().expect("nothing panics")
    }

    /// What calls itself in the library is bounded before it gets there: an overflow would end the process.
    #[test]
    fn whatever_is_deep_is_compiled_or_refused() {
        let chain = |prefix: &str, links: usize| {
            let links: String = (0..links)
                .map(|link| format!("{prefix}{link}: \"a\" {prefix}{}\n", link + 1))
                .collect();
            format!("start: {prefix}0\n{links}")
        };
        let most = MOST_DEFINITIONS - 2;
        for prefix in ["r", "T"] {
            let fits = chain(prefix, most) + &format!("{prefix}{most}: \"b\"");
            assert!(compiles(json!({"guided_grammar": fits})), "{prefix}");
            let many = chain(prefix, 900) + &format!("{prefix}900: \"b\"");
            assert!(!compiles(json!({"guided_grammar": many})), "{prefix}");
        }
        let deep = |open: &str, inner: &str, close: &str| {
            let times = MOST_BYTES / (open.len() + close.len()) - 16;
            open.repeat(times) + inner + &close.repeat(times)
        };
        for grammar in [
            format!("start: {}", deep("(", "\"a\"", ")")),
            format!("start: {}", deep("[", "\"a\"", "]")),
            format!("start: {}", deep("%lark {start: ", "\"a\"", "}")),
            format!("start: r::0\nr::_: \"a\" %if {}", deep("not(", "true", ")")),
            format!(
                "start: r::0\nr::_: \"a\" %if {}",
                deep("and(", "true", ",true)")
            ),
            format!("start: r::{}\nr::_: \"a\"", deep("incr(", "_", ")")),
            format!("start: /{}/", deep("(", "a", ")")),
            format!("start: %regex {}", deep("{\"a\":", "1", "}")),
            format!("start: %json {}", deep("{\"not\":", "{}", "}")),
            format!("start: {}\"a\"", "~".repeat(MOST_BYTES / 2)),
        ] {
            compiles(json!({"guided_grammar": grammar}));
        }
        for regex in [
            deep("(", "a", ")"),
            deep("(a|", "a", ")"),
            deep("", "a", "?"),
            deep("", "a", "{2}"),
            deep("[", "a", "]"),
            "a?".repeat(MOST_BYTES / 2),
            "a|".repeat(MOST_BYTES / 2 - 1),
        ] {
            compiles(json!({"guided_regex": regex}));
        }
        compiles(json!({"guided_choice": vec!["ab"; MOST_BYTES / 4]}));
    }
}
