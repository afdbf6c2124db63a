//! What the JSON library says of a value, in the words of who sent it.

/// Its message about a value that is not what it should be.
pub(crate) fn reworded(message: &str) -> String {
    let wrong = message
        .strip_prefix("invalid type: ")
        .or(message.strip_prefix("invalid value: "))
        .or(message.strip_prefix("invalid length "));
    if let Some((found, expected)) = wrong.and_then(|rest| rest.split_once(", expected ")) {
        return format!(
            "expected {}, found {}",
            expectation(expected),
            finding(found)
        );
    }
    if let Some(field) = message.strip_prefix("missing field ") {
        return format!("{field} is missing");
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
