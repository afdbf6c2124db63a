//! The `tojson` filter, which writes what Python's `json.dumps` writes.

use std::fmt::Write;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};

use super::marks;
use crate::tokenizer::StandIns;

/// Deeper values are refused; nothing a template is given is nested as deep.
const MAX_NESTING: usize = 128;

/// `value|tojson(ensure_ascii=false, indent=none, separators=none, sort_keys=false)`.
pub(super) fn tojson(
    state: &mut State,
    value: &Value,
    indent: Option<Value>,
    options: Kwargs,
) -> Result<Value, Error> {
    let ensure_ascii: Option<bool> = options.get("ensure_ascii")?;
    let sort_keys: Option<bool> = options.get("sort_keys")?;
    let indent = match indent.or(options.get("indent")?) {
        Some(indent) if !indent.is_none() => Some(indent_text(&indent)?),
        _ => None,
    };
    let (between, colon) = separators(options.get("separators")?, indent.is_some())?;
    options.assert_all_used()?;
    let mut writer = Writer {
        text: String::new(),
        ensure_ascii: ensure_ascii.unwrap_or(false),
        sort_keys: sort_keys.unwrap_or(false),
        indent,
        between,
        colon,
        depth: 0,
        stand_ins: marks::stand_ins(state),
    };
    writer.value(value)?;
    Ok(Value::from_safe_string(writer.text))
}

fn indent_text(indent: &Value) -> Result<String, Error> {
    const MAX: usize = 64;
    match (indent.as_usize(), indent.as_str()) {
        (Some(width), _) => Ok(" ".repeat(width.min(MAX))),
        (_, Some(text)) => Ok(text.chars().take(MAX).collect()),
        _ => Err(Error::new(
            ErrorKind::InvalidOperation,
            "tojson: indent is a number or a text",
        )),
    }
}

/// What separates items and what follows a key: Python drops the space at the end of an indented line.
fn separators(given: Option<Value>, indented: bool) -> Result<(String, String), Error> {
    match given.filter(|given| !given.is_none()) {
        None => Ok((
            if indented { "," } else { ", " }.to_owned(),
            ": ".to_owned(),
        )),
        Some(pair) => {
            let mut parts = pair.try_iter()?.map(|part| part.to_string());
            match (parts.next(), parts.next(), parts.next()) {
                (Some(between), Some(colon), None) => Ok((between, colon)),
                _ => Err(Error::new(
                    ErrorKind::InvalidOperation,
                    "tojson: separators are two texts",
                )),
            }
        }
    }
}

struct Writer {
    text: String,
    ensure_ascii: bool,
    sort_keys: bool,
    indent: Option<String>,
    between: String,
    colon: String,
    depth: usize,
    stand_ins: StandIns,
}

impl Writer {
    fn value(&mut self, value: &Value) -> Result<(), Error> {
        if self.depth > MAX_NESTING {
            return Err(Error::new(
                ErrorKind::BadSerialization,
                "tojson: nested too deep",
            ));
        }
        match value.kind() {
            ValueKind::None => self.text.push_str("null"),
            ValueKind::Bool => self
                .text
                .push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.number(value),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => self.list(value)?,
            ValueKind::Map => self.map(value)?,
            other => {
                let message = format!("tojson: a value of kind {other} is not JSON");
                return Err(Error::new(ErrorKind::BadSerialization, message));
            }
        }
        Ok(())
    }

    fn number(&mut self, value: &Value) {
        if value.is_integer() {
            self.text.push_str(&value.to_string());
        } else {
            self.text
                .push_str(&float(f64::try_from(value.clone()).unwrap_or(f64::NAN)));
        }
    }

    fn list(&mut self, list: &Value) -> Result<(), Error> {
        self.text.push('[');
        self.depth += 1;
        let mut empty = true;
        for item in list.try_iter()? {
            self.begin_item(empty);
            empty = false;
            self.value(&item)?;
        }
        self.end(']', empty);
        Ok(())
    }

    fn map(&mut self, map: &Value) -> Result<(), Error> {
        self.text.push('{');
        self.depth += 1;
        let mut keys: Vec<Value> = map.try_iter()?.collect();
        if self.sort_keys {
            keys.sort();
        }
        let empty = keys.is_empty();
        for (index, key) in keys.iter().enumerate() {
            self.begin_item(index == 0);
            match key.as_str() {
                Some(text) => self.string(text),
                None => self.key(key)?,
            }
            self.text.push_str(&self.colon);
            self.value(&map.get_item(key)?)?;
        }
        self.end('}', empty);
        Ok(())
    }

    /// A key that is no text is written as the text of its JSON.
    fn key(&mut self, key: &Value) -> Result<(), Error> {
        self.text.push('"');
        self.value(key)?;
        self.text.push('"');
        Ok(())
    }

    fn begin_item(&mut self, first: bool) {
        if !first {
            self.text.push_str(&self.between);
        }
        self.new_line();
    }

    fn end(&mut self, bracket: char, empty: bool) {
        self.depth -= 1;
        if !empty {
            self.new_line();
        }
        self.text.push(bracket);
    }

    fn new_line(&mut self) {
        if let Some(indent) = &self.indent {
            self.text.push('\n');
            for _ in 0..self.depth {
                self.text.push_str(indent);
            }
        }
    }

    fn string(&mut self, text: &str) {
        self.text.push('"');
        for character in text.chars() {
            // A stand-in is written as it is, after what belongs in front of what is meant.
            match self.stand_ins.meant(character) {
                '"' | '\\' => self.text.extend(['\\', character]),
                '\n' => self.text.push_str("\\n"),
                '\r' => self.text.push_str("\\r"),
                '\t' => self.text.push_str("\\t"),
                '\u{8}' => self.text.push_str("\\b"),
                '\u{c}' => self.text.push_str("\\f"),
                control if control < ' ' => self.escape(control),
                other if self.ensure_ascii && !(' '..='~').contains(&other) => self.escape(other),
                _ => self.text.push(character),
            }
        }
        self.text.push('"');
    }

    fn escape(&mut self, character: char) {
        for unit in character.encode_utf16(&mut [0; 2]) {
            // Writing to a string does not fail.
            let _ = write!(self.text, "\\u{unit:04x}");
        }
    }
}

/// A number as Python's `repr` writes it: the shortest digits, an exponent below 1e-4 and from 1e16.
pub(super) fn float(number: f64) -> String {
    if number.is_nan() {
        return "NaN".to_owned();
    }
    if number.is_infinite() {
        return if number > 0.0 {
            "Infinity"
        } else {
            "-Infinity"
        }
        .to_owned();
    }
    let scientific = format!("{number:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        format!("{number:?}")
    } else {
        let sign = if exponent < 0 { '-' } else { '+' };
        format!("{digits}e{sign}{:02}", exponent.abs())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_written_as_python_writes_them() {
        let cases = [
            (1.0, "1.0"),
            (-0.0, "-0.0"),
            (0.1, "0.1"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (1.5e-7, "1.5e-07"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.25e100, "1.25e+100"),
            (f64::INFINITY, "Infinity"),
        ];
        for (number, text) in cases {
            assert_eq!(float(number), text);
        }
    }
}
