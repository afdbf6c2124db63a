//! What Python does with texts and numbers, where the library has none of it or does otherwise.
//!
//! Templates are written against Jinja2, in which `%` formats a text and values have Python's methods and `str`.

use std::fmt::Write;

use minijinja::formatting::{FormatStyle, format};
use minijinja::value::{Kwargs, Tuple, ValueKind, from_args};
use minijinja::{Error, ErrorKind, Value};

/// A value as `str` writes it. Only where a number in it calls for an exponent does the library write another text.
pub(super) fn shown(value: &Value) -> String {
    if !has_exponent(value) {
        return value.to_string();
    }
    let mut text = String::new();
    write(value, &mut text);
    text
}

/// The same for the items of a list, which are joined one by one.
pub(super) fn with_shown_items(list: &Value) -> Value {
    match list.kind() {
        ValueKind::Seq | ValueKind::Iterable if has_exponent(list) => {
            let items = list.try_iter().into_iter().flatten();
            items.map(|item| Value::from(shown(&item))).collect()
        }
        _ => list.clone(),
    }
}

/// Whether Python would write a number in it with an exponent.
fn has_exponent(value: &Value) -> bool {
    match value.kind() {
        ValueKind::Number if !value.is_integer() => f64::try_from(value.clone())
            .is_ok_and(|number| number != 0.0 && !(1e-4..1e16).contains(&number.abs())),
        ValueKind::Seq | ValueKind::Iterable => value
            .try_iter()
            .is_ok_and(|mut items| items.any(|item| has_exponent(&item))),
        ValueKind::Map => value.try_iter().is_ok_and(|mut keys| {
            keys.any(|key| value.get_item(&key).is_ok_and(|item| has_exponent(&item)))
        }),
        _ => false,
    }
}

fn write(value: &Value, text: &mut String) {
    let items = |text: &mut String| {
        for (index, item) in value.try_iter().into_iter().flatten().enumerate() {
            text.push_str(if index > 0 { ", " } else { "" });
            write(&item, text);
            if value.kind() == ValueKind::Map {
                text.push_str(": ");
                write(&value.get_item(&item).unwrap_or_default(), text);
            }
        }
    };
    let tuple = is_tuple(value).then(|| value.len().unwrap_or(0));
    let ends = match (value.kind(), tuple) {
        (_, Some(1)) => ["(", ",)"],
        (_, Some(_)) => ["(", ")"],
        (ValueKind::Map, None) => ["{", "}"],
        (ValueKind::Seq | ValueKind::Iterable, None) => ["[", "]"],
        (ValueKind::Number, None) if has_exponent(value) => {
            let number = f64::try_from(value.clone()).unwrap_or(f64::NAN);
            return text.push_str(&super::json::float(number));
        }
        // Writing to a string does not fail.
        _ => return write!(text, "{value:?}").unwrap_or_default(),
    };
    text.push_str(ends[0]);
    items(text);
    text.push_str(ends[1]);
}

/// `pattern % operand`, where `pattern` is a text.
pub(super) fn formatted(pattern: &str, operand: &Value) -> Result<Value, Error> {
    let mut positional = operands(operand).into_iter();
    let mut next = || {
        positional
            .next()
            .ok_or_else(|| invalid("not enough values for the format"))
    };
    let (mut text, mut rest) = (String::new(), pattern);
    while let Some((before, directive)) = rest.split_once('%') {
        text.push_str(before);
        let (key, spec) = match directive.strip_prefix('(') {
            Some(named) => named
                .split_once(')')
                .map(|(key, spec)| (Some(key), spec))
                .ok_or_else(|| invalid("a name in a format has no end"))?,
            None => (None, directive),
        };
        let is_conversion = |it: char| !it.is_ascii_digit() && !"#-+ *.hlL".contains(it);
        let end = spec
            .find(is_conversion)
            .ok_or_else(|| invalid("a format has no end"))?;
        let mut flags = spec[..end].replace(['h', 'l', 'L'], "");
        let conversion = spec[end..].chars().next().unwrap_or('%');
        rest = &spec[end + conversion.len_utf8()..];
        if conversion == '%' {
            text.push('%');
            continue;
        }
        while flags.contains('*') {
            let number = next()?
                .as_i64()
                .ok_or_else(|| invalid("`*` in a format needs a number"))?;
            flags = flags.replacen('*', &number.to_string(), 1);
        }
        let value = match key {
            Some(key) => operand
                .get_attr(key)
                .ok()
                .filter(|value| !value.is_undefined()),
            None => Some(next()?),
        };
        let value = value.ok_or_else(|| invalid("a name in a format is not in its mapping"))?;
        let (conversion, value) = converted(conversion, value);
        match (conversion, value.as_str()) {
            ('s' | 'c', Some(value)) => push_padded(&mut text, &flags, value),
            _ => {
                let directive = format!("%{flags}{conversion}");
                text.push_str(&format(FormatStyle::Printf, &directive, &[value])?);
            }
        }
    }
    text.push_str(rest);
    let is_one = !matches!(operand.kind(), ValueKind::Map | ValueKind::Seq) || is_tuple(operand);
    if is_one && positional.next().is_some() {
        return Err(invalid("more values than the format has places for"));
    }
    Ok(Value::from(text))
}

/// Writes a text as `%s` with these flags, whose width counts characters. The library's counts bytes.
fn push_padded(text: &mut String, flags: &str, value: &str) {
    let (width, precision) = flags.split_once('.').unwrap_or((flags, ""));
    let most = match flags.contains('.') {
        true => precision.parse().unwrap_or(0),
        false => usize::MAX,
    };
    let shown = value.chars().take(most);
    let width: usize = width
        .trim_start_matches(['#', '0', '-', ' ', '+'])
        .parse()
        .unwrap_or(0);
    let missing = width.saturating_sub(shown.clone().count());
    let spaces = |count| std::iter::repeat_n(' ', count);
    let is_left = flags.contains('-');
    text.extend(spaces(if is_left { 0 } else { missing }));
    text.extend(shown);
    text.extend(spaces(if is_left { missing } else { 0 }));
}

/// What `%` takes one after another: the items of a tuple, or the operand itself.
pub(super) fn operands(operand: &Value) -> Vec<Value> {
    match operand.try_iter() {
        Ok(items) if is_tuple(operand) => items.collect(),
        _ => vec![operand.clone()],
    }
}

fn is_tuple(value: &Value) -> bool {
    value.downcast_object_ref::<Tuple>().is_some()
}

/// A conversion that the library has, and the value that it makes the same text of.
fn converted(conversion: char, value: Value) -> (char, Value) {
    match conversion {
        'r' => ('s', Value::from(represented(&value))),
        's' => ('s', Value::from(shown(&value))),
        // The fraction is cut off.
        'd' | 'i' | 'u' => match f64::try_from(value.clone()) {
            Ok(number) if value.kind() == ValueKind::Number && !value.is_integer() => {
                ('d', Value::from(number as i128))
            }
            _ => ('d', value),
        },
        'c' => {
            let code = value.as_usize().and_then(|code| u32::try_from(code).ok());
            let character = code.and_then(char::from_u32);
            (
                'c',
                character.map_or(value, |character| Value::from(character.to_string())),
            )
        }
        _ => (conversion, value),
    }
}

fn represented(value: &Value) -> String {
    let mut text = String::new();
    write(value, &mut text);
    text
}

/// Positional arguments of methods that Python lets name them.
pub(super) fn positional(method: &str, arguments: &[Value]) -> Result<Vec<Value>, Error> {
    let names: &[&str] = match method {
        "split" | "rsplit" => &["sep", "maxsplit"],
        "splitlines" => &["keepends"],
        "expandtabs" => &["tabsize"],
        _ => return Ok(arguments.to_vec()),
    };
    let named = arguments
        .last()
        .and_then(|last| Kwargs::try_from(last.clone()).ok());
    let Some(named) = named else {
        return Ok(arguments.to_vec());
    };
    let mut all = arguments[..arguments.len() - 1].to_vec();
    for name in &names[all.len().min(names.len())..] {
        all.push(named.get::<Option<Value>>(name)?.unwrap_or_default());
    }
    named.assert_all_used()?;
    while all.last().is_some_and(Value::is_undefined) {
        all.pop();
    }
    // What is left out between two that are not is Python's `None`.
    Ok(all
        .into_iter()
        .map(|value| {
            if value.is_undefined() {
                Value::from(())
            } else {
                value
            }
        })
        .collect())
}

/// A method of a text that the library lacks or has otherwise; `None` for the others.
pub(super) fn text_method(
    text: &str,
    name: &str,
    arguments: &[Value],
) -> Option<Result<Value, Error>> {
    let plain = |method: fn(&str) -> Value| from_args(arguments).map(|()| method(text));
    Some(match name {
        "split" if arguments.first().and_then(Value::as_str) == Some("") => Err(empty_separator()),
        "rsplit" => split_from_end(text, arguments),
        "partition" | "rpartition" => partition(text, name, arguments),
        "removeprefix" => from_args(arguments)
            .map(|(prefix,): (&str,)| Value::from(text.strip_prefix(prefix).unwrap_or(text))),
        "removesuffix" => from_args(arguments)
            .map(|(suffix,): (&str,)| Value::from(text.strip_suffix(suffix).unwrap_or(text))),
        "find" | "rfind" | "index" | "rindex" | "count" => searched(text, name, arguments),
        "startswith" | "endswith" if arguments.len() > 1 => affixed(text, name, arguments),
        "center" | "ljust" | "rjust" | "zfill" => padded(text, name, arguments),
        "splitlines" => split_lines(text, arguments),
        "swapcase" => plain(|text| Value::from(swapped(text))),
        "title" => plain(|text| Value::from(titled(text))),
        _ => return None,
    })
}

/// A method of a list that the library lacks.
pub(super) fn list_method(
    list: &Value,
    name: &str,
    arguments: &[Value],
) -> Option<Result<Value, Error>> {
    (name == "index").then(|| {
        let (item,): (&Value,) = from_args(arguments)?;
        let place = list.try_iter()?.position(|other| other == *item);
        place
            .map(Value::from)
            .ok_or_else(|| invalid("the list has no such item"))
    })
}

/// The filter `default`, whose arguments have names.
pub(super) fn default(
    value: Value,
    other: Option<Value>,
    boolean: Option<bool>,
    named: Kwargs,
) -> Result<Value, Error> {
    let other = match other {
        Some(other) => Some(other),
        None => named.get("default_value")?,
    };
    let boolean = match boolean {
        Some(boolean) => Some(boolean),
        None => named.get("boolean")?,
    };
    named.assert_all_used()?;
    match value.is_undefined() || (boolean == Some(true) && !value.is_true()) {
        true => Ok(other.unwrap_or_else(|| Value::from(""))),
        false => Ok(value),
    }
}

/// Another number, or 0, in the place of a text that is none.
pub(super) fn or_default(
    name: &str,
    value: &Value,
    arguments: &[Value],
    made: Result<Value, Error>,
) -> Result<Value, Error> {
    let is_none = value.as_str().is_some() && arguments.is_empty();
    match (made, name) {
        (Err(_), "int") if is_none => Ok(Value::from(0)),
        (Err(_), _) if is_none => Ok(Value::from(0.0)),
        (made, _) => made,
    }
}

fn split_from_end(text: &str, arguments: &[Value]) -> Result<Value, Error> {
    let (separator, most): (Option<&str>, Option<i64>) = from_args(arguments)?;
    let most = most.and_then(|most| usize::try_from(most).ok());
    let most = most.map_or(usize::MAX, |most| most.saturating_add(1));
    let mut parts: Vec<&str> = match separator {
        Some("") => return Err(empty_separator()),
        Some(separator) => text.rsplitn(most, separator).collect(),
        None => {
            let (mut parts, mut rest) = (Vec::new(), text.trim_end());
            while !rest.is_empty() && parts.len() + 1 < most {
                let start = rest.rfind(char::is_whitespace);
                let start = start.map_or(0, |at| {
                    at + rest[at..].chars().next().map_or(1, char::len_utf8)
                });
                parts.push(&rest[start..]);
                rest = rest[..start].trim_end();
            }
            parts.extend(Some(rest).filter(|rest| !rest.is_empty()));
            parts
        }
    };
    parts.reverse();
    Ok(parts.into_iter().map(Value::from).collect())
}

fn partition(text: &str, name: &str, arguments: &[Value]) -> Result<Value, Error> {
    let (separator,): (&str,) = from_args(arguments)?;
    if separator.is_empty() {
        return Err(empty_separator());
    }
    let (found, missing) = match name {
        "partition" => (text.split_once(separator), (text, "", "")),
        _ => (text.rsplit_once(separator), ("", "", text)),
    };
    Ok(Value::from(found.map_or(missing, |(before, after)| {
        (before, separator, after)
    })))
}

/// Whether the part between two places begins or ends with a text.
fn affixed(text: &str, name: &str, arguments: &[Value]) -> Result<Value, Error> {
    let (sought, start, end): (&str, Option<i64>, Option<i64>) = from_args(arguments)?;
    let (_, within) = part(text, start, end);
    let found = |within: &str| match name {
        "startswith" => within.starts_with(sought),
        _ => within.ends_with(sought),
    };
    Ok(Value::from(within.is_some_and(found)))
}

/// The place in characters where a part begins, and the part, unless it would end before it.
fn part(text: &str, start: Option<i64>, end: Option<i64>) -> (usize, Option<&str>) {
    let length = text.chars().count();
    // A place before the beginning counts from the end.
    let place = |place: i64| match usize::try_from(place) {
        Ok(place) => place,
        Err(_) => {
            length.saturating_sub(usize::try_from(place.unsigned_abs()).unwrap_or(usize::MAX))
        }
    };
    let start = start.map_or(0, place);
    let end = end.map_or(length, place).min(length);
    let byte = |place: usize| {
        let found = text.char_indices().nth(place);
        found.map_or(text.len(), |(at, _)| at)
    };
    let within = (start <= end).then(|| &text[byte(start)..byte(end)]);
    (start, within)
}

/// Where a text is found within another, or how often, in characters.
fn searched(text: &str, name: &str, arguments: &[Value]) -> Result<Value, Error> {
    let (sought, start, end): (&str, Option<i64>, Option<i64>) = from_args(arguments)?;
    let (start, within) = part(text, start, end);
    if name == "count" {
        return Ok(Value::from(
            within.map_or(0, |within| within.matches(sought).count()),
        ));
    }
    let found = within.and_then(|within| {
        let at = match name {
            "find" | "index" => within.find(sought),
            _ => within.rfind(sought),
        };
        at.map(|at| start + within[..at].chars().count())
    });
    match (found, name) {
        (Some(place), _) => Ok(Value::from(place)),
        (None, "find" | "rfind") => Ok(Value::from(-1)),
        (None, _) => Err(invalid("the text has no such part")),
    }
}

/// `center`, `ljust`, `rjust` and `zfill`. Whoever calls them has charged for the width.
fn padded(text: &str, name: &str, arguments: &[Value]) -> Result<Value, Error> {
    let (width, fill): (usize, Option<char>) = match name {
        "zfill" => from_args(arguments).map(|(width,)| (width, Some('0')))?,
        _ => from_args(arguments)?,
    };
    let missing = width.saturating_sub(text.chars().count());
    let fill = |count: usize| std::iter::repeat_n(fill.unwrap_or(' '), count);
    let (sign, digits) = match name {
        "zfill" if text.starts_with(['+', '-']) => text.split_at(1),
        _ => ("", text),
    };
    let before = match name {
        "ljust" => 0,
        "center" => missing / 2 + (missing & width & 1),
        _ => missing,
    };
    let mut all = String::from(sign);
    all.extend(fill(before));
    all.push_str(digits);
    all.extend(fill(missing - before));
    Ok(Value::from(all))
}

/// Lines by all that Python takes for their ends.
fn split_lines(text: &str, arguments: &[Value]) -> Result<Value, Error> {
    let (keep_ends,): (Option<bool>,) = from_args(arguments)?;
    let (mut lines, mut rest) = (Vec::new(), text);
    let is_end = |it: char| matches!(it, '\n'..='\r' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}');
    while let Some(at) = rest.find(is_end) {
        let end = match rest[at..].starts_with("\r\n") {
            true => at + 2,
            false => at + rest[at..].chars().next().map_or(1, char::len_utf8),
        };
        lines.push(Value::from(
            &rest[..if keep_ends == Some(true) { end } else { at }],
        ));
        rest = &rest[end..];
    }
    lines.extend((!rest.is_empty()).then(|| Value::from(rest)));
    Ok(Value::from(lines))
}

fn swapped(text: &str) -> String {
    let mut swapped = String::with_capacity(text.len());
    for character in text.chars() {
        match character.is_uppercase() {
            true => swapped.extend(character.to_lowercase()),
            false => swapped.extend(character.to_uppercase()),
        }
    }
    swapped
}

/// Every letter that follows none is large, the others are small.
fn titled(text: &str) -> String {
    let (mut titled, mut follows) = (String::with_capacity(text.len()), false);
    for character in text.chars() {
        match follows {
            true => titled.extend(character.to_lowercase()),
            false => titled.extend(character.to_uppercase()),
        }
        follows = character.is_lowercase() || character.is_uppercase();
    }
    titled
}

fn empty_separator() -> Error {
    invalid("a text cannot be split at an empty one")
}

fn invalid(message: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}
