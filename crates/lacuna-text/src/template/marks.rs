//! Templates over marked text.
//!
//! Stand-ins (see [`StandIns`]) must not change what a template does. Most operations treat a text
//! as characters without a meaning, and stand-ins come out where they went in. The ones below look
//! for something: they are given what is meant, and where they return parts of a text, the same
//! parts of the marked text are taken instead.

use minijinja::value::{Tuple, ValueKind};
use minijinja::{Error, State, Value};
use serde_json::Map;

use super::TemplateError;
use crate::tokenizer::{Marker, Seen, StandIns};

/// The variable that tells a rendering its stand-ins. Templates cannot be given another.
pub(super) const VARIABLE: &str = "__lacuna_stand_ins";

/// Marks everything in `given`, which no template's own source may contain by chance.
pub(super) fn mark(
    marker: &Marker,
    source: &Seen,
    given: &mut Map<String, serde_json::Value>,
) -> Result<StandIns, TemplateError> {
    let mut seen = source.clone();
    for (name, value) in &*given {
        marker.look_at(name, &mut seen);
        look_at(value, marker, &mut seen);
    }
    let stand_ins = marker.stand_ins(&seen).ok_or(TemplateError::Unmarkable)?;
    if !stand_ins.is_empty() {
        mark_fields(given, marker, &stand_ins);
    }
    Ok(stand_ins)
}

fn look_at(value: &serde_json::Value, marker: &Marker, seen: &mut Seen) {
    match value {
        serde_json::Value::String(text) => marker.look_at(text, seen),
        serde_json::Value::Array(items) => {
            items.iter().for_each(|item| look_at(item, marker, seen));
        }
        serde_json::Value::Object(fields) => {
            for (name, value) in fields {
                marker.look_at(name, seen);
                look_at(value, marker, seen);
            }
        }
        _ => {}
    }
}

fn mark_value(value: &mut serde_json::Value, marker: &Marker, stand_ins: &StandIns) {
    match value {
        serde_json::Value::String(text) => {
            if let Some(marked) = marker.mark(text, stand_ins) {
                *text = marked;
            }
        }
        serde_json::Value::Array(items) => items
            .iter_mut()
            .for_each(|item| mark_value(item, marker, stand_ins)),
        serde_json::Value::Object(fields) => mark_fields(fields, marker, stand_ins),
        _ => {}
    }
}

fn mark_fields(fields: &mut Map<String, serde_json::Value>, marker: &Marker, stand_ins: &StandIns) {
    let marked_name = |name: &String| marker.mark(name, stand_ins);
    if fields.keys().any(|name| marked_name(name).is_some()) {
        let all = std::mem::take(fields).into_iter();
        *fields = all
            .map(|(name, value)| (marked_name(&name).unwrap_or(name), value))
            .collect();
    }
    for value in fields.values_mut() {
        mark_value(value, marker, stand_ins);
    }
}

/// The stand-ins of a rendering.
pub(super) fn stand_ins(state: &mut State) -> StandIns {
    if let Some(known) = state.get_extension::<StandIns>() {
        return known.clone();
    }
    let pairs = state.lookup(VARIABLE).unwrap_or_default();
    let stand_ins = StandIns::from_pairs(pairs.as_str().unwrap_or_default());
    state.get_or_insert_extension(stand_ins).clone()
}

/// What a value means, all the way down. The caller has charged for all of it.
pub(super) fn meant(value: &Value, stand_ins: &StandIns) -> Value {
    if let Some(text) = value.as_str() {
        return match stand_ins.are_in(text) {
            true => Value::from(stand_ins.plain(text).into_owned()),
            false => value.clone(),
        };
    }
    let Ok(items) = value.try_iter() else {
        return value.clone();
    };
    match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => items.map(|item| meant(&item, stand_ins)).collect(),
        ValueKind::Map => {
            let entry = |name: Value| {
                let inner = value.get_item(&name).unwrap_or_default();
                (meant(&name, stand_ins), meant(&inner, stand_ins))
            };
            Value::from_iter(items.map(entry))
        }
        _ => value.clone(),
    }
}

/// Runs an operation on texts, a filter or a method, so that it does with a marked text what it does
/// with the text that is meant.
pub(super) fn text_operation(
    state: &mut State,
    name: &str,
    all: &[Value],
    mut run: impl FnMut(&mut State, &[Value]) -> Result<Value, Error>,
) -> Result<Value, Error> {
    let stand_ins = stand_ins(state);
    let text = all.first().and_then(Value::as_str);
    let Some(marked) = text.filter(|text| stand_ins.are_in(text)) else {
        return run(state, all);
    };
    let plain = || -> Vec<Value> { all.iter().map(|value| meant(value, &stand_ins)).collect() };
    match name {
        "count" | "endswith" | "find" | "index" | "isalnum" | "isalpha" | "isascii" | "isdigit"
        | "islower" | "isnumeric" | "isspace" | "isupper" | "rfind" | "rindex" | "startswith" => {
            run(state, &plain())
        }
        "lines" | "lstrip" | "partition" | "removeprefix" | "removesuffix" | "rpartition"
        | "rsplit" | "rstrip" | "split" | "splitlines" | "strip" | "trim" => {
            let plain = plain();
            let parts = run(state, &plain)?;
            let between = match name {
                "rsplit" | "split" => plain.get(1).and_then(Value::as_str).unwrap_or_default(),
                _ => "",
            };
            let whole = plain.first().and_then(Value::as_str).unwrap_or_default();
            let mut cursor = Cursor::new(marked, whole);
            if let ("removeprefix", Some(rest)) = (name, parts.as_str()) {
                // The rest may also be found earlier.
                cursor.take(whole.len() - rest.len());
            }
            Ok(same_parts(&mut cursor, &parts, between))
        }
        // Where a word begins depends on the punctuation before it.
        "capitalize" | "title" => {
            let changed = run(state, &plain())?;
            let text = changed.as_str().unwrap_or_default();
            with_marks(marked, text, &stand_ins).map_or_else(|| run(state, all), Ok)
        }
        "replace" => {
            let plain = plain();
            replace(marked, &plain, all).map_or_else(|| run(state, all), Ok)
        }
        _ => run(state, all),
    }
}

/// The parts of a marked text that are at the same places as `parts` of the text that is meant. They
/// follow one another there, with `between` or, if that is empty, with white space between them.
fn same_parts(cursor: &mut Cursor<'_>, parts: &Value, between: &str) -> Value {
    if let Some(part) = parts.as_str() {
        return Value::from(cursor.part(part, between));
    }
    match parts.try_iter() {
        Ok(items) => {
            let part = |part: Value| {
                cursor
                    .part(part.as_str().unwrap_or_default(), between)
                    .into()
            };
            let same: Vec<Value> = items.map(part).collect();
            match parts.downcast_object_ref::<Tuple>() {
                Some(_) => Value::from(Tuple::from(same)),
                None => Value::from(same),
            }
        }
        Err(_) => parts.clone(),
    }
}

/// A place in a marked text and in the text that is meant. Both have the same number of characters.
struct Cursor<'a> {
    marked: &'a str,
    plain: &'a str,
}

impl<'a> Cursor<'a> {
    fn new(marked: &'a str, plain: &'a str) -> Cursor<'a> {
        Cursor { marked, plain }
    }

    /// Takes as much of the marked text as `bytes` of the text that is meant.
    fn take(&mut self, bytes: usize) -> &'a str {
        let (taken, plain) = self.plain.split_at(bytes);
        let characters = taken.chars().count();
        let end = self.marked.char_indices().nth(characters);
        let (taken, marked) = self
            .marked
            .split_at(end.map_or(self.marked.len(), |(end, _)| end));
        *self = Cursor { marked, plain };
        taken
    }

    /// Takes the next `part`, and what comes between it and the one after it.
    fn part(&mut self, part: &str, between: &str) -> &'a str {
        let start = match between {
            "" => self.plain.find(part).unwrap_or(0),
            _ => 0,
        };
        self.take(start);
        let taken = self.take(part.len());
        if self.plain.starts_with(between) {
            self.take(between.len());
        }
        taken
    }
}

/// `text` with the stand-ins of `marked`, if the two differ in the case of letters alone.
fn with_marks(marked: &str, text: &str, stand_ins: &StandIns) -> Option<Value> {
    let same_length = marked.chars().count() == text.chars().count();
    let both = marked.chars().zip(text.chars());
    let character = |(shown, changed)| match stand_ins.meant(shown) == changed {
        true => shown,
        false => changed,
    };
    same_length.then(|| Value::from(both.map(character).collect::<String>()))
}

/// `text.replace(old, new, count)`; `None` where the arguments are not these.
fn replace(marked: &str, plain: &[Value], all: &[Value]) -> Option<Value> {
    let [whole, old, _, ..] = plain else {
        return None;
    };
    let (whole, old, new) = (whole.as_str()?, old.as_str()?, all.get(2)?.as_str()?);
    let count = match all.get(3) {
        None => usize::MAX,
        Some(count) => count
            .as_i64()
            .map(|count| usize::try_from(count).unwrap_or(usize::MAX))?,
    };
    let mut cursor = Cursor::new(marked, whole);
    let mut replaced = String::with_capacity(marked.len());
    for (start, found) in whole.match_indices(old).take(count) {
        let passed = whole.len() - cursor.plain.len();
        replaced.push_str(cursor.take(start - passed));
        cursor.take(found.len());
        replaced.push_str(new);
    }
    replaced.push_str(cursor.marked);
    Some(Value::from(replaced))
}
