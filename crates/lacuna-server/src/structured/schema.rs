//! JSON schemas as clients send them, brought to what a grammar can follow.
//!
//! [`Definitions`] reads whole documents: it checks that every keyword has a value of its kind,
//! leaves out what cannot be followed token by token, and gathers the schemas that references point
//! to under names of their own, so that several documents can go into one grammar. [`impossible`]
//! then finds schemas that nothing conforms to, as far as that can be known beforehand, and [`closing`]
//! holds the objects of a tool's arguments to what is named.

mod closing;
mod expansion;
mod impossible;

use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};

use serde_json::{Map, Value, json};

use crate::http::error::ApiError;
use crate::http::ignored::Ignored;

pub(crate) use impossible::{Impossible, Satisfiable};

/// Keywords that no grammar can follow token by token. Leaving them out only widens what conforms.
const IGNORED: [&str; 5] = [
    "contains",
    "maxContains",
    "minContains",
    "propertyNames",
    "uniqueItems",
];

/// Keywords that cannot be followed and that say too much to be left out.
const REFUSED: [&str; 11] = [
    "$dynamicRef",
    "$recursiveRef",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "else",
    "if",
    "not",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
];

/// Keywords that are followed. All others describe, or are not of JSON Schema.
const FOLLOWED: [&str; 27] = [
    "$ref",
    "additionalItems",
    "additionalProperties",
    "allOf",
    "anyOf",
    "const",
    "enum",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "format",
    "items",
    "maxItems",
    "maxLength",
    "maxProperties",
    "maximum",
    "minItems",
    "minLength",
    "minProperties",
    "minimum",
    "multipleOf",
    "oneOf",
    "pattern",
    "patternProperties",
    "prefixItems",
    "properties",
    "required",
    "type",
];

/// Formats whose texts are known; any other says nothing to a grammar.
const FORMATS: [&str; 10] = [
    "date",
    "date-time",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "time",
    "uri",
    "uuid",
];

pub(super) const TYPES: [&str; 7] = [
    "array", "boolean", "integer", "null", "number", "object", "string",
];

/// Nesting of a schema at most. Bodies are not parsed any deeper than this either.
const MOST_NESTING: usize = 128;
/// Schemas in all documents of a request at most, each as often as references repeat it.
const MOST_SCHEMAS: usize = 20_000;
/// Bytes of the texts and lists in them at most, counted alike.
const MOST_BYTES: usize = 4 << 20;
/// Bytes of the places at which schemas stand, as they are written for errors. The names of properties make them long.
const MOST_PATH_BYTES: usize = 64 << 20;
/// Alternatives that are compared with each other, to see whether two can hold at once.
const MOST_COMPARED: usize = 64;
/// What looking through the schemas of a request may take: some tenths of a second. What is not looked at is taken for
/// possible, and to overlap.
const MOST_STEPS: usize = 1 << 20;

/// Whole numbers beyond this, in either direction, are not all numbers of 64 bits with a fraction, which a grammar's are.
const MOST_EXACT: f64 = 9_007_199_254_740_992.0;

/// Steps that are left.
#[derive(Debug)]
struct Steps(Cell<usize>);

impl Steps {
    /// Takes so many; `false` where they are not left, from then on.
    fn take(&self, count: usize) -> bool {
        let left = self.0.get().checked_sub(count);
        self.0.set(left.unwrap_or(0));
        left.is_some()
    }
}

/// The documents of one request, and what their references point to.
#[derive(Debug)]
pub(crate) struct Definitions<'a> {
    named: BTreeMap<String, Definition>,
    documents: usize,
    schemas: usize,
    bytes: usize,
    path_bytes: usize,
    steps: Steps,
    ignored: &'a mut Ignored,
}

/// What a reference points to.
#[derive(Debug)]
pub(crate) struct Definition {
    /// Where it stands in the request.
    path: String,
    schema: Value,
}

/// One document while it is read.
struct Document<'a> {
    root: &'a Value,
    path: &'a str,
    number: usize,
    /// Names of what is pointed to, by where it is.
    names: BTreeMap<String, String>,
    waiting: VecDeque<(String, String)>,
}

impl<'a> Definitions<'a> {
    pub(crate) fn new(ignored: &'a mut Ignored) -> Self {
        Self {
            named: BTreeMap::new(),
            documents: 0,
            schemas: 0,
            bytes: 0,
            path_bytes: 0,
            steps: Steps(Cell::new(MOST_STEPS)),
            ignored,
        }
    }

    /// Reads a document that stands at `path` in the request. References of the schema that is
    /// returned lead to what [`finish`](Self::finish) adds.
    pub(crate) fn read(&mut self, root: &Value, path: &str) -> Result<Value, ApiError> {
        let mut document = Document {
            root,
            path,
            number: self.documents,
            names: BTreeMap::new(),
            waiting: VecDeque::new(),
        };
        self.documents += 1;
        let schema = self.schema(&mut document, root, path, 0)?;
        while let Some((pointer, name)) = document.waiting.pop_front() {
            let path = format!("{path}{}", pointer.replace('/', "."));
            let target = root.pointer(&pointer).unwrap_or(&Value::Null);
            let schema = self.schema(&mut document, target, &path, 0)?;
            self.named.insert(name, Definition { path, schema });
        }
        let own = format!("{}-", document.number);
        let read = self.named.iter().filter(|(name, _)| name.starts_with(&own));
        let read = read.map(|(_, definition)| &definition.schema);
        if expansion::is_too_large(read.chain([&schema]), &self.named) {
            return Err(too_large(path));
        }
        Ok(schema)
    }

    /// What is known about which schemas anything conforms to.
    pub(crate) fn satisfiable(&self) -> Satisfiable<'_> {
        Satisfiable::new(&self.named, &self.steps)
    }

    /// Keeps properties that nothing describes out of the objects in `root`, a document that was read,
    /// at every depth, unless a schema speaks of further ones.
    pub(crate) fn close(&mut self, root: &mut Value) {
        closing::close(root, &mut self.named);
    }

    /// The one schema of a grammar, with everything that references in it lead to.
    pub(crate) fn finish(self, mut root: Value) -> Value {
        if let Value::Object(fields) = &mut root
            && !self.named.is_empty()
        {
            let named = self.named.into_iter();
            let named: Map<String, Value> = named.map(|(name, it)| (name, it.schema)).collect();
            fields.insert("$defs".to_owned(), Value::Object(named));
        }
        root
    }

    fn schema(
        &mut self,
        document: &mut Document<'_>,
        schema: &Value,
        path: &str,
        depth: usize,
    ) -> Result<Value, ApiError> {
        self.schemas += 1;
        if depth > MOST_NESTING || self.schemas > MOST_SCHEMAS {
            return Err(too_large(document.path));
        }
        let fields = match schema {
            Value::Bool(_) => return Ok(schema.clone()),
            Value::Object(fields) => fields,
            _ => return Err(wrong(path, "a schema: an object, `true` or `false`")),
        };
        let mut read = Map::new();
        for (keyword, value) in fields {
            let path = format!("{path}.{keyword}");
            self.path_bytes += path.len();
            if self.path_bytes > MOST_PATH_BYTES {
                return Err(too_large(document.path));
            }
            match keyword.as_str() {
                refused if REFUSED.contains(&refused) => return Err(cannot_follow(&path)),
                // `uniqueItems: false` says nothing.
                silent if IGNORED.contains(&silent) && *value == Value::Bool(false) => {}
                ignored if IGNORED.contains(&ignored) => self.ignored.note(&path)?,
                "oneOf" => self.one_of(document, value, &path, depth, &mut read)?,
                "const" | "enum" if !is_exact(value) => {
                    self.ignored.note(&path)?;
                    if !fields.contains_key("type") {
                        insert(&mut read, "type", Some(types_of_listed(keyword, value)));
                    }
                }
                followed if FOLLOWED.contains(&followed) => {
                    self.bytes += keyword.len() + bytes(value);
                    if self.bytes > MOST_BYTES {
                        return Err(too_large(document.path));
                    }
                    let value = self.keyword(document, keyword, value, &path, depth)?;
                    insert(&mut read, keyword, value);
                }
                "$schema" => insert(&mut read, keyword, Some(value.clone())),
                _ => {}
            }
        }
        Ok(Value::Object(read))
    }

    /// The value of a keyword that is followed; `None` where it says nothing that can be.
    fn keyword(
        &mut self,
        document: &mut Document<'_>,
        keyword: &str,
        value: &Value,
        path: &str,
        depth: usize,
    ) -> Result<Option<Value>, ApiError> {
        let depth = depth + 1;
        Ok(Some(match keyword {
            "$ref" => document.reference(value, path)?,
            "additionalItems" | "additionalProperties" => {
                self.schema(document, value, path, depth)?
            }
            "items" if !value.is_array() => self.schema(document, value, path, depth)?,
            "allOf" | "anyOf" | "items" | "prefixItems" => {
                self.list(document, value, path, depth)?
            }
            "properties" | "patternProperties" => {
                let fields = value.as_object().ok_or_else(|| wrong(path, "an object"))?;
                let mut read = Map::new();
                for (name, schema) in fields {
                    let path = format!("{path}.{name}");
                    read.insert(name.clone(), self.schema(document, schema, &path, depth)?);
                }
                Value::Object(read)
            }
            "format" => {
                let format = value.as_str().ok_or_else(|| wrong(path, "a string"))?;
                if !FORMATS.contains(&format) {
                    self.ignored.note(path)?;
                    return Ok(None);
                }
                value.clone()
            }
            "minimum" | "exclusiveMinimum" | "maximum" | "exclusiveMaximum"
                if !is_exact(value)
                    || value.as_f64().is_some_and(|bound| bound.abs() > MOST_EXACT) =>
            {
                let is_lower = matches!(keyword, "minimum" | "exclusiveMinimum");
                if value.as_f64().is_some_and(f64::is_sign_negative) != is_lower {
                    return Err(cannot_follow(path));
                }
                // Those of whole numbers of 64 bits, and of all numbers: they exclude next to nothing.
                self.ignored.note(path)?;
                return Ok(None);
            }
            _ => plain_keyword(keyword, value, path)?,
        }))
    }

    fn list(
        &mut self,
        document: &mut Document<'_>,
        value: &Value,
        path: &str,
        depth: usize,
    ) -> Result<Value, ApiError> {
        let schemas = value
            .as_array()
            .ok_or_else(|| wrong(path, "a list of schemas"))?;
        let schemas = schemas.iter().enumerate();
        schemas
            .map(|(index, schema)| {
                self.schema(document, schema, &format!("{path}[{index}]"), depth)
            })
            .collect::<Result<Vec<_>, _>>()
            .map(Value::Array)
    }

    /// `oneOf` is followed as `anyOf`, which is the same where no two alternatives can hold at once.
    fn one_of(
        &mut self,
        document: &mut Document<'_>,
        value: &Value,
        path: &str,
        depth: usize,
        read: &mut Map<String, Value>,
    ) -> Result<(), ApiError> {
        let any_of = self.list(document, value, path, depth + 1)?;
        let schemas = value.as_array().map_or(&[][..], Vec::as_slice);
        let apart = schemas.len() <= MOST_COMPARED
            && (1..schemas.len()).all(|second| {
                let other = &schemas[second];
                schemas[..second]
                    .iter()
                    .all(|first| document.apart(first, other, 0, &self.steps))
            });
        if !apart {
            self.ignored.note(path)?;
        }
        insert(read, "allOf", Some(json!([{"anyOf": any_of}])));
        Ok(())
    }
}

/// Adds a keyword. Two lists of `allOf` become one.
fn insert(read: &mut Map<String, Value>, keyword: &str, value: Option<Value>) {
    let Some(value) = value else { return };
    match (read.get_mut(keyword), value) {
        (Some(Value::Array(first)), Value::Array(second)) => first.extend(second),
        (_, value) => {
            read.insert(keyword.to_owned(), value);
        }
    }
}

/// A keyword whose value holds no schemas.
fn plain_keyword(keyword: &str, value: &Value, path: &str) -> Result<Value, ApiError> {
    let strings = |value: &Value| {
        let items = value.as_array();
        items.is_some_and(|items| items.iter().all(Value::is_string))
    };
    let known_type = |value: &Value| value.as_str().is_some_and(|name| TYPES.contains(&name));
    let (fits, expected) = match keyword {
        "enum" => (value.is_array(), "a list"),
        "required" => (strings(value), "a list of strings"),
        "pattern" => (value.is_string(), "a string"),
        "type" => {
            let list = value.as_array();
            let all = list.is_some_and(|list| !list.is_empty() && list.iter().all(known_type));
            (
                all || known_type(value),
                "one or more of array, boolean, integer, null, number, object, string",
            )
        }
        "minimum" | "maximum" => (value.is_number(), "a number"),
        "exclusiveMinimum" | "exclusiveMaximum" => {
            // Drafts before the sixth had a boolean here.
            (value.is_number() || value.is_boolean(), "a number")
        }
        "multipleOf" => {
            // More digits would overflow what counts in them.
            let fine = |step: f64| {
                let millionths = step * 1e6;
                (1e-6..=1e9).contains(&step) && (millionths - millionths.round()).abs() < 1e-3
            };
            (
                value.as_f64().is_some_and(fine),
                "a number from 0.000001 to 1000000000 with at most six decimals",
            )
        }
        "const" => (true, ""),
        _ => return whole_number(value, path),
    };
    if fits {
        return Ok(value.clone());
    }
    Err(wrong(path, expected))
}

/// A length or a count: `3`, and also `3.0`.
fn whole_number(value: &Value, path: &str) -> Result<Value, ApiError> {
    let float = value.as_f64().filter(|float| float.fract() == 0.0);
    let number = value.as_u64().or_else(|| {
        let float = float.filter(|float| (0.0..=1e9).contains(float))?;
        Some(float as u64)
    });
    // Beyond this nothing is ever as long, and the grammar counts in 32 bits.
    let number = number.map(|number| number.min(u64::from(u32::MAX) / 2));
    number
        .map(Value::from)
        .ok_or_else(|| wrong(path, "a whole number of 0 or more"))
}

fn wrong(path: &str, expected: &str) -> ApiError {
    ApiError::field(path, format!("`{path}` must be {expected}"))
}

fn too_large(path: &str) -> ApiError {
    ApiError::field(
        path,
        format!(
            "`{path}` is too large: schemas may have {MOST_SCHEMAS} parts, be nested {MOST_NESTING} \
             deep and have {MOST_BYTES} bytes, all of it as often as references repeat it"
        ),
    )
}

/// What a value of a keyword takes, apart from schemas in it.
fn bytes(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(|item| 16 + bytes(item)).sum(),
        Value::Object(fields) => fields.keys().map(|name| 16 + name.len()).sum(),
        _ => 0,
    }
}

fn cannot_follow(path: &str) -> ApiError {
    ApiError::field(
        path,
        format!("`{path}` cannot be followed while a reply is written; leave it out"),
    )
}

impl Document<'_> {
    /// The reference to put in the place of one.
    fn reference(&mut self, value: &Value, path: &str) -> Result<Value, ApiError> {
        let text = value.as_str().ok_or_else(|| wrong(path, "a string"))?;
        let Some(pointer) = text.strip_prefix('#') else {
            return Err(ApiError::field(
                path,
                format!(
                    "`{path}` refers to another document; put what it refers to under `$defs` and \
                     write `#/$defs/NAME`"
                ),
            ));
        };
        let pointer = percent_decoded(pointer);
        let pointer = pointer.trim_end_matches('/').to_owned();
        if self.target(&pointer).is_none() {
            return Err(ApiError::field(
                path,
                format!(
                    "`{path}` refers to nothing in this schema; references begin at its root, as \
                     `#/$defs/NAME` does"
                ),
            ));
        }
        if let Some(name) = self.names.get(&pointer) {
            return Ok(format!("#/$defs/{name}").into());
        }
        let name = format!("{}-{}", self.number, self.names.len());
        self.names.insert(pointer.clone(), name.clone());
        self.waiting.push_back((pointer, name.clone()));
        Ok(format!("#/$defs/{name}").into())
    }

    fn target(&self, pointer: &str) -> Option<&Value> {
        let target = self.root.pointer(pointer)?;
        (target.is_object() || target.is_boolean()).then_some(target)
    }

    /// The schema itself, or what it does nothing but refer to.
    fn followed<'a>(&'a self, mut schema: &'a Value) -> &'a Value {
        for _ in 0..MOST_NESTING {
            let reference = schema.get("$ref").and_then(Value::as_str);
            let pointer = reference.and_then(|reference| reference.strip_prefix('#'));
            let target = pointer.and_then(|pointer| self.target(&percent_decoded(pointer)));
            let Some(target) = target else { break };
            schema = target;
        }
        schema
    }

    /// Whether it is certain that nothing conforms to both schemas.
    fn apart(&self, first: &Value, second: &Value, depth: usize, steps: &Steps) -> bool {
        let (first, second) = (self.followed(first), self.followed(second));
        if let (Some(first), Some(second)) = (values(first), values(second)) {
            let mut first = first.iter();
            return first.all(|value| steps.take(1 + second.len()) && !second.contains(value));
        }
        if let (Some(first), Some(second)) = (types(first), types(second))
            && !first
                .iter()
                .any(|one| second.iter().any(|other| overlap(one, other)))
        {
            return true;
        }
        let required = |schema: &Value, name: &str| {
            let names = schema.get("required").and_then(Value::as_array);
            names.is_some_and(|names| names.iter().any(|other| other == name))
        };
        let length = |schema: &Value| {
            let names = schema.get("required").and_then(Value::as_array);
            names.map_or(0, Vec::len)
        };
        let names = first.get("properties").and_then(Value::as_object);
        depth < 2
            && types(first).is_some_and(|types| types == ["object"])
            && types(second).is_some_and(|types| types == ["object"])
            && names.is_some_and(|names| {
                names.iter().any(|(name, one)| {
                    steps.take(1 + length(first) + length(second))
                        && required(first, name)
                        && required(second, name)
                        && second["properties"]
                            .get(name)
                            .is_some_and(|other| self.apart(one, other, depth + 1, steps))
                })
            })
    }
}

/// The only values that conform, if the schema lists them.
fn values(schema: &Value) -> Option<Vec<&Value>> {
    match (schema.get("const"), schema.get("enum")) {
        (Some(value), _) => Some(vec![value]),
        (None, Some(Value::Array(values))) => Some(values.iter().collect()),
        _ => None,
    }
}

/// Whether a grammar writes each whole number in a value, or in lists and objects in it, as it is.
fn is_exact(value: &Value) -> bool {
    match value {
        Value::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(whole), _) => i128::from(whole) == whole as f64 as i128,
            (_, Some(whole)) => i128::from(whole) == whole as f64 as i128,
            _ => true,
        },
        Value::Array(items) => items.iter().all(is_exact),
        Value::Object(fields) => fields.values().all(is_exact),
        _ => true,
    }
}

/// The types of the values that `const` or `enum` lists.
fn types_of_listed(keyword: &str, value: &Value) -> Value {
    let listed = match value {
        Value::Array(values) if keyword == "enum" => values.as_slice(),
        value => std::slice::from_ref(value),
    };
    let is_listed = |name: &&str| listed.iter().any(|value| impossible::is_a(value, name));
    // A whole number is a number as well, and the narrower type is meant.
    let is_wider = |name: &&str| *name == "number" && !listed.iter().any(Value::is_f64);
    let names = TYPES
        .iter()
        .filter(|name| is_listed(name) && !is_wider(name));
    names.copied().collect()
}

fn types(schema: &Value) -> Option<Vec<&str>> {
    match schema.get("type")? {
        Value::String(name) => Some(vec![name.as_str()]),
        Value::Array(names) => names.iter().map(Value::as_str).collect(),
        _ => None,
    }
}

fn overlap(one: &str, other: &str) -> bool {
    one == other || matches!((one, other), ("integer", "number") | ("number", "integer"))
}

/// Pointers in references are parts of addresses, in which `%20` is a space.
fn percent_decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, more)) = rest.split_first() {
        let digits = more
            .get(..2)
            .and_then(|digits| std::str::from_utf8(digits).ok());
        let code = digits.and_then(|digits| u8::from_str_radix(digits, 16).ok());
        match (byte, code) {
            (b'%', Some(code)) => {
                bytes.push(code);
                rest = &more[2..];
            }
            _ => {
                bytes.push(byte);
                rest = more;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether it is certain that nothing conforms, and what is not followed.
    fn look(schema: &Value) -> (bool, String) {
        let mut ignored = Ignored::new(false);
        let mut definitions = Definitions::new(&mut ignored);
        let read = definitions.read(schema, "schema").expect("followed");
        let impossible = definitions.satisfiable().impossible(&read, "schema");
        (impossible.is_some(), ignored.paths().to_owned())
    }

    /// Lists were compared value by value with themselves and with each other, however long they were.
    #[test]
    fn lists_are_compared_as_far_as_that_takes_no_time() {
        let list =
            |from: u32, count: u32| json!({"enum": (from..from + count).collect::<Vec<_>>()});
        for (count, is_certain) in [(500, true), (50_000, false)] {
            let both = json!({"allOf": [list(0, count), list(100_000, count)]});
            assert_eq!(look(&both), (is_certain, String::new()));
            let one = json!({"oneOf": [list(0, count), list(100_000, count)]});
            let unknown = if is_certain { "" } else { "schema.oneOf" };
            assert_eq!(look(&one), (false, unknown.to_owned()));
        }
        // With itself a list is not compared at all.
        let mut texts = list(0, 50_000);
        texts["type"] = json!("string");
        assert!(look(&texts).0);
    }
}
