//! JSON schemas as clients send them, brought to what a grammar can follow.

use serde_json::{Map, Value};

use crate::http::error::ApiError;
use crate::http::ignored::Ignored;

/// Keywords that no grammar can follow token by token. Leaving them out only widens what conforms.
const IGNORED: [&str; 5] = [
    "contains",
    "maxContains",
    "minContains",
    "propertyNames",
    "uniqueItems",
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

/// Keywords whose value is a schema.
const SCHEMA: [&str; 5] = [
    "additionalItems",
    "additionalProperties",
    "contains",
    "items",
    "not",
];
/// Keywords whose value is a list of schemas.
const SCHEMAS: [&str; 5] = ["allOf", "anyOf", "items", "oneOf", "prefixItems"];
/// Keywords whose value has a schema under every name.
const NAMED_SCHEMAS: [&str; 4] = ["$defs", "definitions", "patternProperties", "properties"];

/// Nesting of a schema at most. Bodies are not parsed any deeper than this either.
const MOST_NESTING: usize = 128;

/// Takes out what cannot be followed, and notes it; `path` is where the schema stands in the request.
pub(crate) fn prune(schema: &mut Value, path: &str, ignored: &mut Ignored) -> Result<(), ApiError> {
    prune_level(schema, path, ignored, 0)
}

fn prune_level(
    schema: &mut Value,
    path: &str,
    ignored: &mut Ignored,
    depth: usize,
) -> Result<(), ApiError> {
    let Value::Object(keywords) = schema else {
        return Ok(());
    };
    if depth > MOST_NESTING {
        return Err(ApiError::field(
            path,
            format!("`{path}` is nested too deep"),
        ));
    }
    prune_keywords(keywords, path, ignored)?;
    for (keyword, value) in keywords {
        let path = format!("{path}.{keyword}");
        let keyword = keyword.as_str();
        match value {
            Value::Object(_) if SCHEMA.contains(&keyword) => {
                prune_level(value, &path, ignored, depth + 1)?;
            }
            Value::Array(schemas) if SCHEMAS.contains(&keyword) => {
                for (index, schema) in schemas.iter_mut().enumerate() {
                    prune_level(schema, &format!("{path}[{index}]"), ignored, depth + 1)?;
                }
            }
            Value::Object(schemas) if NAMED_SCHEMAS.contains(&keyword) => {
                for (name, schema) in schemas {
                    prune_level(schema, &format!("{path}.{name}"), ignored, depth + 1)?;
                }
            }
            _ => {}
        }
    }
    Ok(())
}

fn prune_keywords(
    keywords: &mut Map<String, Value>,
    path: &str,
    ignored: &mut Ignored,
) -> Result<(), ApiError> {
    let mut noted = Ok(());
    keywords.retain(|keyword, value| {
        let known_format = value
            .as_str()
            .is_none_or(|format| FORMATS.contains(&format));
        if keyword == "format" && known_format
            || !IGNORED.contains(&keyword.as_str()) && keyword != "format"
        {
            return true;
        }
        // `uniqueItems: false` says nothing.
        if noted.is_ok() && *value != Value::Bool(false) {
            noted = ignored.note(&format!("{path}.{keyword}"));
        }
        false
    });
    noted
}
