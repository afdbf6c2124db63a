//! Schemas that nothing conforms to.
//!
//! A grammar of one would either not compile or, where a value must contain another of its own kind
//! without end, never let a reply finish. What is found here is certain; what is not found may still
//! be impossible, by its patterns for example, or because it is too large to look through.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ptr;

use serde_json::Value;

use super::{Definition, MOST_NESTING, Steps, TYPES, types, values};

/// Which of the definitions something conforms to.
#[derive(Debug)]
pub(crate) struct Satisfiable<'a> {
    definitions: &'a BTreeMap<String, Definition>,
    /// Names of those that something finite conforms to.
    possible: BTreeSet<&'a str>,
    /// Schemas that were looked at, or are being, and in which nothing impossible was found: each is looked at
    /// once, however often and by itself it is referred to. Places in memory, of schemas that outlive this.
    looked_at: RefCell<BTreeSet<*const Value>>,
    /// What all of a request's schemas may take to look through.
    steps: &'a Steps,
}

/// Why nothing conforms, and where.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Impossible {
    /// The part of the request that says so.
    pub(crate) path: String,
    /// A sentence that continues "nothing conforms to it:".
    pub(crate) why: String,
}

impl Impossible {
    fn new(path: &str, why: impl Into<String>) -> Self {
        Self {
            path: path.to_owned(),
            why: why.into(),
        }
    }
}

/// The schemas that all hold at one place.
type Together<'a> = Vec<&'a Value>;

impl<'a> Satisfiable<'a> {
    pub(super) fn new(definitions: &'a BTreeMap<String, Definition>, steps: &'a Steps) -> Self {
        let mut known = Self {
            definitions,
            possible: BTreeSet::new(),
            looked_at: RefCell::default(),
            steps,
        };
        // Nothing is taken for possible that does not end: a definition is possible once it can be
        // met with those that are known to be.
        loop {
            let before = known.possible.len();
            // From the last: what a definition refers to has mostly been read after it.
            for (name, definition) in definitions.iter().rev() {
                if !known.possible.contains(name.as_str())
                    && known
                        .impossible_at(&definition.schema, &definition.path, 0)
                        .is_none()
                {
                    known.possible.insert(name);
                }
            }
            if known.possible.len() == before {
                return known;
            }
        }
    }

    /// Why nothing conforms to a schema that stands at `path`, if that is certain.
    pub(crate) fn impossible(&self, schema: &Value, path: &str) -> Option<Impossible> {
        self.impossible_at(schema, path, 0)
    }

    /// Whether something that conforms can be of the type with that name.
    pub(crate) fn can_be(&self, schema: &Value, name: &str) -> bool {
        let mut together = Together::new();
        self.gather(schema, "", &mut together, 0).is_none()
            && together.iter().all(|schema| allows(schema, name))
    }

    /// [`Satisfiable::impossible`] of a schema that is so deep in others, references counted.
    fn impossible_at(&self, schema: &Value, path: &str, depth: usize) -> Option<Impossible> {
        if *schema == Value::Bool(false) {
            return Some(Impossible::new(path, "it is `false`"));
        }
        let place = ptr::from_ref(schema);
        let known = depth > MOST_NESTING || !self.steps.take(1 + path.len() / 64);
        if known || !self.looked_at.borrow_mut().insert(place) {
            return None;
        }
        let impossible = self.impossible_together(schema, path, depth);
        if impossible.is_some() {
            self.looked_at.borrow_mut().remove(&place);
        }
        impossible
    }

    fn impossible_together(&self, schema: &Value, path: &str, depth: usize) -> Option<Impossible> {
        let mut together = Together::new();
        if let Some(impossible) = self.gather(schema, path, &mut together, depth) {
            return Some(impossible);
        }
        if let Some(listing) = together.iter().find(|schema| values(schema).is_some()) {
            return self.none_listed(listing, &together).then(|| {
                let why = "none of the values that it lists conforms to the rest of it";
                Impossible::new(path, why)
            });
        }
        let mut why = None;
        for name in TYPES {
            if together.iter().all(|schema| allows(schema, name)) {
                why = Some(self.impossible_as(name, &together, path, depth)?);
            }
        }
        Some(why.unwrap_or_else(|| Impossible::new(path, "its types exclude each other")))
    }

    /// Whether it is certain that no value that `listing` lists conforms to all of the schemas.
    fn none_listed(&self, listing: &Value, together: &Together<'_>) -> bool {
        let others = || together.iter().filter(|schema| !ptr::eq(**schema, listing));
        let compared: usize = others()
            .map(|schema| values(schema).map_or(1, |v| v.len()))
            .sum();
        let conforms = |value: &Value| {
            may_be(value, listing) && others().all(|schema| may_conform(value, schema))
        };
        values(listing)
            .unwrap_or_default()
            .into_iter()
            .all(|value| self.steps.take(1 + compared) && !conforms(value))
    }

    /// Adds a schema and those that hold with it; or tells why they cannot.
    fn gather<'s>(
        &'s self,
        schema: &'s Value,
        path: &str,
        together: &mut Together<'s>,
        depth: usize,
    ) -> Option<Impossible> {
        const MOST: usize = 64;
        if depth > MOST_NESTING || together.len() > MOST || !self.steps.take(1) {
            return None;
        }
        together.push(schema);
        if let Some(name) = schema.get("$ref").and_then(reference) {
            let definition = self.definitions.get(name)?;
            if !self.possible.contains(name) {
                let why = "it needs a value of its own kind inside, without end, or refers to a \
                           schema that nothing conforms to";
                return Some(Impossible::new(path, why));
            }
            let impossible = self.gather(&definition.schema, &definition.path, together, depth + 1);
            if impossible.is_some() {
                return impossible;
            }
        }
        for (index, part) in items(schema, "allOf").iter().enumerate() {
            if *part == Value::Bool(false) {
                return Some(Impossible::new(
                    &format!("{path}.allOf[{index}]"),
                    "it is `false`",
                ));
            }
            let impossible = self.gather(part, path, together, depth + 1);
            if impossible.is_some() {
                return impossible;
            }
        }
        let any_of = schema.get("anyOf")?.as_array()?;
        let mut why = Some(Impossible::new(&format!("{path}.anyOf"), "it is empty"));
        for (index, part) in any_of.iter().enumerate() {
            why = self.impossible_at(part, &format!("{path}.anyOf[{index}]"), depth + 1);
            if why.is_none() {
                break;
            }
        }
        why
    }

    /// Why no value of a type conforms to all of the schemas.
    fn impossible_as(
        &self,
        name: &str,
        together: &Together<'_>,
        path: &str,
        depth: usize,
    ) -> Option<Impossible> {
        match name {
            "number" | "integer" => numbers(together, name == "integer", path),
            "string" => limits(together, "minLength", "maxLength", path),
            "array" => limits(together, "minItems", "maxItems", path)
                .or_else(|| self.needed_items(together, path, depth)),
            "object" => limits(together, "minProperties", "maxProperties", path)
                .or_else(|| self.needed_properties(together, path, depth)),
            _ => None,
        }
    }

    fn needed_items(
        &self,
        together: &Together<'_>,
        path: &str,
        depth: usize,
    ) -> Option<Impossible> {
        let needed = bound(together, "minItems").fold(0.0, f64::max);
        together.iter().find_map(|schema| {
            // The old form of `prefixItems` is a list under `items`.
            let lists = [items(schema, "prefixItems"), items(schema, "items")];
            let prefix = lists.iter().map(|list| list.len()).sum::<usize>();
            let mut first = lists
                .into_iter()
                .flatten()
                .enumerate()
                .take_while(|(index, _)| (*index as f64) < needed);
            let in_prefix = first.find_map(|(index, item)| {
                self.impossible_at(item, &format!("{path}.prefixItems[{index}]"), depth + 1)
            });
            let rest = schema.get("items").filter(|items| !items.is_array());
            in_prefix.or_else(|| {
                let rest = rest.filter(|_| needed > prefix as f64)?;
                self.impossible_at(rest, &format!("{path}.items"), depth + 1)
            })
        })
    }

    fn needed_properties(
        &self,
        together: &Together<'_>,
        path: &str,
        depth: usize,
    ) -> Option<Impossible> {
        let names: BTreeSet<&str> = together
            .iter()
            .flat_map(|schema| items(schema, "required"))
            .filter_map(Value::as_str)
            .collect();
        let most = bound(together, "maxProperties").fold(f64::INFINITY, f64::min);
        if names.len() as f64 > most {
            return Some(Impossible::new(
                path,
                "it requires more than `maxProperties`",
            ));
        }
        let missing = |name: &str| {
            if !self.steps.take(together.len()) {
                return None;
            }
            together.iter().find_map(|schema| {
                let named = schema.get("properties").and_then(|all| all.get(name));
                let patterns = schema.get("patternProperties").is_some();
                let other = schema.get("additionalProperties").filter(|_| !patterns);
                let (schema, path) = match named {
                    Some(named) => (named, format!("{path}.properties.{name}")),
                    None => (other?, format!("{path}.additionalProperties")),
                };
                let impossible = self.impossible_at(schema, &path, depth + 1)?;
                let why = format!("`{name}` is required, and {}", impossible.why);
                Some(Impossible::new(&impossible.path, why))
            })
        };
        names.into_iter().find_map(missing)
    }
}

/// The name in a reference that [`super::Definitions`] has written.
pub(super) fn reference(value: &Value) -> Option<&str> {
    value.as_str()?.strip_prefix("#/$defs/")
}

pub(super) fn items<'a>(schema: &'a Value, keyword: &str) -> &'a [Value] {
    let items = schema.get(keyword).and_then(Value::as_array);
    items.map_or(&[], Vec::as_slice)
}

fn allows(schema: &Value, name: &str) -> bool {
    let listed = values(schema).is_none_or(|values| values.iter().any(|value| is_a(value, name)));
    // A number may be whole, but what must be whole is not just any number.
    let is = |other: &&str| *other == name || (*other == "number" && name == "integer");
    listed && types(schema).is_none_or(|types| types.iter().any(is))
}

pub(super) fn is_a(value: &Value, name: &str) -> bool {
    match value {
        Value::Null => name == "null",
        Value::Bool(_) => name == "boolean",
        Value::Number(number) => {
            name == "number"
                || name == "integer" && number.as_f64().is_some_and(|n| n.fract() == 0.0)
        }
        Value::String(_) => name == "string",
        Value::Array(_) => name == "array",
        Value::Object(_) => name == "object",
    }
}

/// The values of a keyword in all of the schemas.
fn bound(together: &Together<'_>, keyword: &str) -> impl Iterator<Item = f64> {
    together
        .iter()
        .filter_map(move |schema| schema.get(keyword)?.as_f64())
}

fn limits(together: &Together<'_>, least: &str, most: &str, path: &str) -> Option<Impossible> {
    let low = bound(together, least).fold(0.0, f64::max);
    let high = bound(together, most).fold(f64::INFINITY, f64::min);
    (low > high).then(|| Impossible::new(path, format!("`{least}` is above `{most}`")))
}

fn numbers(together: &Together<'_>, whole: bool, path: &str) -> Option<Impossible> {
    let low = bound(together, "minimum").fold(f64::NEG_INFINITY, f64::max);
    let high = bound(together, "maximum").fold(f64::INFINITY, f64::min);
    let above = bound(together, "exclusiveMinimum").fold(f64::NEG_INFINITY, f64::max);
    let below = bound(together, "exclusiveMaximum").fold(f64::INFINITY, f64::min);
    let none = low > high || above >= high || low >= below || above >= below;
    if none {
        return Some(Impossible::new(path, "its minimum is above its maximum"));
    }
    let step = bound(together, "multipleOf").fold(if whole { 1.0 } else { 0.0 }, f64::max);
    let (low, high) = (low.max(above), high.min(below));
    // The first multiple at or above the lower bound, and beyond it if that is excluded.
    let first = (low / step).ceil() * step;
    let first = if first <= above { first + step } else { first };
    let beyond = first > high || first >= below;
    let known = step > 0.0 && low.is_finite() && high.is_finite();
    (known && beyond).then(|| {
        let what = if whole { "whole number" } else { "multiple" };
        Impossible::new(path, format!("no {what} is within its bounds"))
    })
}

/// Whether a value may conform, by type, lists and bounds.
fn may_conform(value: &Value, schema: &Value) -> bool {
    may_be(value, schema) && values(schema).is_none_or(|values| values.contains(&value))
}

/// Whether a value may conform, by type and bounds.
fn may_be(value: &Value, schema: &Value) -> bool {
    let known_type = types(schema).is_none_or(|types| types.iter().any(|name| is_a(value, name)));
    let number = |keyword: &str| schema.get(keyword).and_then(Value::as_f64);
    let between = |size: f64, least: &str, most: &str| {
        number(least).is_none_or(|least| size >= least)
            && number(most).is_none_or(|most| size <= most)
    };
    let sized = match value {
        Value::Number(value) => value.as_f64().is_none_or(|value| {
            between(value, "minimum", "maximum")
                && number("exclusiveMinimum").is_none_or(|least| value > least)
                && number("exclusiveMaximum").is_none_or(|most| value < most)
        }),
        Value::String(text) => between(text.chars().count() as f64, "minLength", "maxLength"),
        Value::Array(items) => between(items.len() as f64, "minItems", "maxItems"),
        Value::Object(fields) => between(fields.len() as f64, "minProperties", "maxProperties"),
        _ => true,
    };
    known_type && sized
}
