//! How large schemas become where a grammar is made of them.
//!
//! What stands beside a reference, and schemas that hold together, are made one schema: with all that they refer to, for
//! each place that says so, and for each choice of alternatives. Twice in each of forty schemas that is a million
//! million times the last. So what will be made is counted before.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::impossible::{items, reference};
use super::{Definition, MOST_NESTING};

/// Schemas that are made at most, for what a request sends: a second of work.
const MOST_MADE: usize = 200_000;

/// Whether a grammar of `schemas` is not to be made.
pub(super) fn is_too_large<'a>(
    mut schemas: impl Iterator<Item = &'a Value>,
    definitions: &'a BTreeMap<String, Definition>,
) -> bool {
    let mut count = Count {
        definitions,
        left: MOST_MADE,
    };
    !schemas.all(|schema| count.make(Vec::new(), vec![schema], Vec::new(), 0))
}

/// How many more schemas may be made.
struct Count<'a> {
    definitions: &'a BTreeMap<String, Definition>,
    left: usize,
}

impl<'a> Count<'a> {
    fn take_one(&mut self) -> bool {
        let left = self.left.checked_sub(1);
        self.left = left.unwrap_or(0);
        left.is_some()
    }

    /// Counts the schema that `parts`, `waiting` with all that hold with them, and one of each of `choices` become.
    /// Returns whether that is not too large.
    fn make(
        &mut self,
        mut parts: Vec<&'a Value>,
        mut waiting: Vec<&'a Value>,
        mut choices: Vec<&'a [Value]>,
        depth: usize,
    ) -> bool {
        // A reference by itself stays one.
        if let ([], [only], []) = (&parts[..], &waiting[..], &choices[..])
            && is_reference(only)
        {
            return self.take_one();
        }
        while let Some(schema) = waiting.pop() {
            // Deeper, and more at once, than anything that ends.
            if depth > MOST_NESTING || parts.len() > 4 * MOST_NESTING || !self.take_one() {
                return false;
            }
            let referred = schema.get("$ref").and_then(reference);
            let referred = referred.and_then(|name| self.definitions.get(name));
            waiting.extend(referred.map(|definition| &definition.schema));
            waiting.extend(items(schema, "allOf"));
            choices.extend(Some(items(schema, "anyOf")).filter(|options| !options.is_empty()));
            parts.push(schema);
        }
        let Some(options) = choices.pop() else {
            return self.make_inside(&parts, depth);
        };
        if choices.is_empty() && parts.iter().all(|part| only_joins(part)) {
            parts.clear();
        }
        options
            .iter()
            .all(|option| self.make(parts.clone(), vec![option], choices.clone(), depth + 1))
    }

    /// Counts the schemas of the properties and items of what `parts` become.
    fn make_inside(&mut self, parts: &[&'a Value], depth: usize) -> bool {
        let mut inside: Vec<Vec<&Value>> = Vec::new();
        let mut add = |pick: &dyn Fn(&'a Value) -> Option<&'a Value>| {
            let picked: Vec<&Value> = parts.iter().filter_map(|part| pick(part)).collect();
            inside.extend(Some(picked).filter(|picked| !picked.is_empty()));
        };
        for keyword in ["properties", "patternProperties"] {
            let named = parts
                .iter()
                .filter_map(|part| part.get(keyword)?.as_object());
            let names: BTreeSet<&str> = named
                .flat_map(|all| all.keys())
                .map(String::as_str)
                .collect();
            for name in names {
                add(&|part| {
                    let named = part.get(keyword).and_then(|all| all.get(name));
                    named.or_else(|| part.get("additionalProperties"))
                });
            }
        }
        for keyword in ["additionalProperties", "additionalItems"] {
            add(&|part| part.get(keyword));
        }
        add(&|part| part.get("items").filter(|items| !items.is_array()));
        for keyword in ["prefixItems", "items"] {
            let lengths = parts.iter().map(|part| items(part, keyword).len());
            for index in 0..lengths.max().unwrap_or(0) {
                add(&|part| items(part, keyword).get(index));
            }
        }
        inside
            .into_iter()
            .all(|together| self.make(Vec::new(), together, Vec::new(), depth + 1))
    }
}

/// Whether a schema is nothing but a reference.
fn is_reference(schema: &Value) -> bool {
    let only = schema.as_object().is_some_and(|fields| fields.len() == 1);
    only && schema.get("$ref").is_some()
}

/// Whether a schema says nothing but which others hold.
fn only_joins(schema: &Value) -> bool {
    let fields = schema.as_object();
    fields.is_some_and(|fields| fields.keys().all(|name| name == "allOf" || name == "anyOf"))
}
