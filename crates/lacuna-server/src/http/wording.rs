//! What the JSON library says of a value, in the words of who sent it.

/// Its message about a value that is not what it should be.
pub(crate) fn reworded(message: &str) -> String {
    let wrong = message
        .strip_prefix("invalid type: ")
        .or(message.strip_prefix("invalid value: "))
        .or(message.strip_prefix("invalid length "));
    if let Some((found, expected)) = wrong.and_then(|rest| rest.split_once(", expected ")) {
        let range = range(found, expected);
        let expected = range.as_deref().unwrap_or_else(|| expectation(expected));
        return format!("expected {expected}, found {}", finding(found));
    }
    if let Some(field) = missing(message) {
        return format!("`{field}` is missing");
    }
    let known = |rest: &str, is: &str| {
        let (name, known) = rest.split_once(", expected ")?;
        let known = known.strip_prefix("one of ").unwrap_or(known);
        Some(format!("{name} is not {is} {known}"))
    };
    let variant = message.strip_prefix("unknown variant ");
    let field = message.strip_prefix("unknown field ");
    variant
        .and_then(|rest| known(rest, "one of"))
        .or_else(|| field.and_then(|rest| known(rest, "a field that is known; there are")))
        .unwrap_or_else(|| message.to_owned())
}

/// The field that is missing, if that is what it says.
pub(crate) fn missing(message: &str) -> Option<&str> {
    let name = message.strip_prefix("missing field ")?;
    name.strip_prefix('`')?.strip_suffix('`')
}

/// What the library expects of a whole number that is one, and is out of range.
fn range(found: &str, expected: &str) -> Option<String> {
    let found = found.strip_prefix("integer `")?.strip_suffix('`')?;
    let found: i128 = found.parse().ok()?;
    let (least, most): (i128, i128) = match expected {
        "i8" => (i8::MIN.into(), i8::MAX.into()),
        "i16" => (i16::MIN.into(), i16::MAX.into()),
        "i32" => (i32::MIN.into(), i32::MAX.into()),
        "i64" | "isize" => (i64::MIN.into(), i64::MAX.into()),
        "u8" => (0, u8::MAX.into()),
        "u16" => (0, u16::MAX.into()),
        "u32" => (0, u32::MAX.into()),
        _ => return None,
    };
    let is_beyond = found > most || (least < 0 && found < least);
    is_beyond.then(|| format!("a whole number from {least} to {most}"))
}

/// What the library expects: types of the program's own, mostly.
fn expectation(expected: &str) -> &str {
    match expected {
        "f32" | "f64" => "a number",
        "i8" | "i16" | "i32" | "i64" | "isize" => "a whole number",
        "u8" | "u16" | "u32" | "u64" | "usize" => "a whole number of 0 or more",
        "a boolean" => "`true` or `false`",
        "a borrowed string" => "a string",
        "a map" => "an object",
        "a sequence" => "a list",
        "string or map" | "variant identifier" => "a string",
        _ if expected.starts_with("a nonzero ") => "a whole number of 1 or more",
        _ if expected.starts_with("struct ") || expected.contains("tagged enum ") => "an object",
        _ if expected.starts_with("enum ") => "a string",
        _ if expected.starts_with("a sequence of ") => "a list",
        _ => expected,
    }
}

/// What the library found instead.
fn finding(found: &str) -> String {
    let number = found
        .strip_prefix("integer `")
        .or(found.strip_prefix("floating point `"))
        .or(found.strip_prefix("number `"))
        .and_then(|rest| rest.strip_suffix('`'));
    match found {
        "map" => "an object".to_owned(),
        "sequence" => "a list".to_owned(),
        "null" => "`null`".to_owned(),
        "unit value" => "nothing".to_owned(),
        _ => {
            let plain = found
                .strip_prefix("string ")
                .or(found.strip_prefix("boolean "));
            number.or(plain).unwrap_or(found).to_owned()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::reworded;

    #[test]
    fn no_name_of_the_programs_types_reaches_a_client() {
        for (message, expected) in [
            (
                "invalid type: string \"hot\", expected f32",
                "expected a number, found \"hot\"",
            ),
            (
                "invalid value: integer `0`, expected a nonzero usize",
                "expected a whole number of 1 or more, found 0",
            ),
            (
                "invalid value: integer `9223372036854775808`, expected i64",
                "expected a whole number from -9223372036854775808 to 9223372036854775807, found 9223372036854775808",
            ),
            (
                "invalid value: integer `4294967296`, expected u32",
                "expected a whole number from 0 to 4294967295, found 4294967296",
            ),
            (
                "invalid value: integer `-1`, expected u32",
                "expected a whole number of 0 or more, found -1",
            ),
            (
                "invalid type: map, expected a sequence",
                "expected a list, found an object",
            ),
            (
                "invalid type: floating point `1e30`, expected struct StreamOptions",
                "expected an object, found 1e30",
            ),
            ("missing field `messages`", "`messages` is missing"),
            (
                "unknown variant `x`, expected one of `system`, `user`",
                "`x` is not one of `system`, `user`",
            ),
            (
                "unknown field `x`, expected `name`",
                "`x` is not a field that is known; there are `name`",
            ),
            (
                "expected a string or a list of strings",
                "expected a string or a list of strings",
            ),
        ] {
            assert_eq!(reworded(message), expected);
        }
    }
}
