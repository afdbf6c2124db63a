//! Objects of a tool's arguments, held to the properties that their schemas name.
//!
//! JSON Schema lets an object have properties that nothing describes, and a model that may write
//! them does. The strict mode of xgrammar, which vLLM and SGLang use, is documented to leave them out
//! at every depth too.
//!
//! A schema is closed by `additionalProperties: false`, which sees the properties beside it and no
//! others. So one that shares its place with others, as the parts of an `allOf` do, stays as it is:
//! closed, each would refuse what the others name.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use super::Definition;
use super::impossible::reference;

/// Closes every object of `root`, and of the definitions it leads to, that names its properties and
/// says nothing of further ones.
pub(super) fn close(root: &mut Value, definitions: &mut BTreeMap<String, Definition>) {
    // First those that any reference puts beside another schema: they are used as they are there.
    let mut sharing = Walk::default();
    sharing.enter(root, Place::Alone);
    for definition in definitions.values_mut() {
        sharing.enter(&mut definition.schema, Place::Alone);
    }
    while let Some(name) = sharing.found.pop() {
        if let Some(definition) = definitions.get_mut(&name) {
            sharing.enter(&mut definition.schema, Place::Shared);
        }
    }
    let mut closing = Walk {
        closes: true,
        ..Walk::default()
    };
    closing.enter(root, Place::Alone);
    for (name, definition) in definitions {
        if !sharing.shared.contains(name) {
            closing.enter(&mut definition.schema, Place::Alone);
        }
    }
}

/// Whether a schema is all that describes what stands at its place.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Alone,
    Shared,
}

/// One way through schemas and what is inside them.
#[derive(Default)]
struct Walk {
    closes: bool,
    /// Names of definitions that do not stand alone everywhere.
    shared: BTreeSet<String>,
    /// Those of them that are still to be entered.
    found: Vec<String>,
}

impl Walk {
    fn enter(&mut self, schema: &mut Value, place: Place) {
        let Value::Object(fields) = schema else {
            return;
        };
        let place = match descriptions(fields) {
            0 | 1 => place,
            _ => Place::Shared,
        };
        if place == Place::Shared
            && let Some(name) = fields.get("$ref").and_then(reference)
            && self.shared.insert(name.to_owned())
        {
            self.found.push(name.to_owned());
        }
        if self.closes && place == Place::Alone && names_all(fields) {
            fields.insert("additionalProperties".to_owned(), false.into());
        }
        for (keyword, value) in fields {
            match (keyword.as_str(), value) {
                ("allOf" | "anyOf" | "items" | "prefixItems", Value::Array(schemas)) => {
                    schemas
                        .iter_mut()
                        .for_each(|schema| self.enter(schema, place));
                }
                ("properties" | "patternProperties", Value::Object(schemas)) => {
                    schemas
                        .values_mut()
                        .for_each(|schema| self.enter(schema, place));
                }
                ("additionalItems" | "additionalProperties" | "items", schema) => {
                    self.enter(schema, place);
                }
                _ => {}
            }
        }
    }
}

/// How many schemas describe what is inside a value together: this one, those of `allOf`, one of
/// `anyOf`, and what it refers to.
fn descriptions(fields: &Map<String, Value>) -> usize {
    const INSIDE: [&str; 6] = [
        "additionalItems",
        "additionalProperties",
        "items",
        "patternProperties",
        "prefixItems",
        "properties",
    ];
    let describes = |schema: &&Value| {
        schema
            .as_object()
            .is_some_and(|fields| descriptions(fields) > 0)
    };
    let list = |keyword| {
        fields
            .get(keyword)
            .and_then(Value::as_array)
            .map_or(&[][..], Vec::as_slice)
    };
    usize::from(INSIDE.iter().any(|keyword| fields.contains_key(*keyword)))
        + usize::from(fields.contains_key("$ref"))
        + list("allOf").iter().filter(describes).count()
        + usize::from(list("anyOf").iter().any(|schema| describes(&schema)))
}

/// Whether a schema names properties, speaks of no further ones and needs none.
fn names_all(fields: &Map<String, Value>) -> bool {
    const FURTHER: [&str; 4] = ["additionalProperties", "const", "enum", "patternProperties"];
    let Some(Value::Object(properties)) = fields.get("properties") else {
        return false;
    };
    let required = fields.get("required").and_then(Value::as_array);
    let needed = required.map_or(&[][..], Vec::as_slice).iter();
    let least = fields.get("minProperties").and_then(Value::as_u64);
    !FURTHER.iter().any(|keyword| fields.contains_key(*keyword))
        && needed
            .filter_map(Value::as_str)
            .all(|name| properties.contains_key(name))
        && least.unwrap_or(0) <= properties.len() as u64
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::Definitions;
    use super::*;
    use crate::http::ignored::Ignored;

    fn closed(schema: &Value) -> Value {
        let mut ignored = Ignored::default();
        let mut definitions = Definitions::new(&mut ignored);
        let mut root = definitions.read(schema, "parameters").expect("a schema");
        definitions.close(&mut root);
        definitions.finish(root)
    }

    /// An object with one property of its own, and whether nothing else may be in it.
    fn named(name: &str, closed: bool) -> Value {
        let mut object = json!({"type": "object", "properties": {name: {"type": "string"}}});
        if closed {
            object["additionalProperties"] = json!(false);
        }
        object
    }

    #[test]
    fn objects_that_name_their_properties_have_no_others_wherever_they_are() {
        let inside = |closed| {
            let mut object = json!({
                "properties": {
                    "object": named("a", closed),
                    "list": {"items": named("b", closed)},
                    "tuple": {"prefixItems": [named("c", closed)], "items": named("d", closed)},
                    "map": {"additionalProperties": named("e", closed)},
                    "maybe": {"anyOf": [named("f", closed), {"type": "null"}]},
                    "one": {"allOf": [named("g", closed), {"description": "says nothing"}]},
                },
            });
            if closed {
                object["additionalProperties"] = json!(false);
                object["properties"]["one"]["allOf"][1] = json!({});
            }
            object
        };
        assert_eq!(closed(&inside(false)), inside(true));
    }

    #[test]
    fn objects_that_speak_of_further_properties_or_need_them_stay_open() {
        for open in [
            json!({"type": "object"}),
            json!({"properties": {}, "additionalProperties": true}),
            json!({"properties": {}, "additionalProperties": {"type": "string"}}),
            json!({"properties": {}, "patternProperties": {"^x-": {"type": "string"}}}),
            json!({"properties": {}, "const": {"a": 1}}),
            json!({"properties": {}, "enum": [{"a": 1}]}),
            json!({"properties": {"a": {}}, "required": ["a", "b"]}),
            json!({"properties": {"a": {}}, "minProperties": 2}),
        ] {
            assert_eq!(closed(&open), open);
            let inside = json!({"items": open});
            assert_eq!(closed(&inside), inside);
        }
        let just_enough = json!({"properties": {"a": {}}, "required": ["a"], "minProperties": 1});
        assert_eq!(closed(&just_enough)["additionalProperties"], json!(false));
    }

    #[test]
    fn objects_that_are_described_together_stay_open_with_all_that_is_in_them() {
        let deep = |name: &str| json!({"properties": {"in": named(name, false)}});
        for open in [
            json!({"allOf": [deep("a"), deep("b")]}),
            json!({"properties": {"in": named("a", false)}, "allOf": [deep("b")]}),
            json!({"properties": {"in": named("a", false)}, "anyOf": [deep("b"), deep("c")]}),
        ] {
            assert_eq!(closed(&open), open);
        }
        // What only says which properties are needed describes nothing.
        let either = json!({"properties": {"a": {}, "b": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]});
        assert_eq!(closed(&either)["additionalProperties"], json!(false));
    }

    #[test]
    fn a_definition_is_closed_where_it_stands_alone_at_every_reference() {
        let schema = |other: Value| {
            json!({
                "$defs": {"Inner": named("x", false), "Outer": {"properties": {"in": {"$ref": "#/$defs/Inner"}}}},
                "properties": {"one": {"$ref": "#/$defs/Outer"}, "other": other},
            })
        };
        let definitions = |other: Value| {
            let root = closed(&schema(other));
            let all = root["$defs"].as_object().expect("definitions").clone();
            all.into_values()
                .map(|one| one["additionalProperties"] == false)
                .collect::<Vec<_>>()
        };
        let alone = json!({"anyOf": [{"$ref": "#/$defs/Outer"}, {"type": "null"}]});
        assert_eq!(definitions(alone), [true; 2]);
        // The other description may name further properties of the inner object too.
        let shared = json!({"$ref": "#/$defs/Outer", "properties": {"in": named("y", false)}});
        assert_eq!(definitions(shared), [false; 2]);
    }

    #[test]
    fn a_definition_that_leads_to_itself_is_closed() {
        let node = json!({"properties": {"next": {"$ref": "#"}}});
        let root = closed(&node);
        assert_eq!(root["additionalProperties"], false);
        assert_eq!(root["$defs"]["0-0"]["additionalProperties"], false);
    }
}
