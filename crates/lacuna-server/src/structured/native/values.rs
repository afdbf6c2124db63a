//! Values as models write them that are not JSON: Python's, and those between marks in the place of quotes.

use serde_json::{Map, Number, Value};

/// Lists and objects within one another at most, as `serde_json` has it.
const MOST_DEPTH: usize = 128;

/// Reads values from the front of a text.
pub(super) struct Values<'a> {
    rest: &'a str,
    /// What stands at both ends of a text beside quotes.
    quote: Option<&'static str>,
    depth: usize,
}

impl<'a> Values<'a> {
    pub(super) fn new(text: &'a str, quote: Option<&'static str>) -> Self {
        Self {
            rest: text,
            quote,
            depth: 0,
        }
    }

    /// Whether nothing but white space is left.
    pub(super) fn is_over(&self) -> bool {
        self.rest.trim().is_empty()
    }

    /// A value, and nothing after it.
    pub(super) fn only(mut self) -> Option<Value> {
        let value = self.value()?;
        self.is_over().then_some(value)
    }

    /// `[f(a=1), g()]`, and nothing after it: names, and the JSON of arguments.
    pub(super) fn calls(mut self) -> Option<Vec<(String, String)>> {
        self.take("[")?;
        let mut calls = Vec::new();
        loop {
            let name = self.name()?.to_owned();
            self.take("(")?;
            let mut arguments = Map::new();
            while self.take(")").is_none() {
                let key = self.name()?.to_owned();
                self.take("=")?;
                arguments.insert(key, self.value()?);
                self.separated(")")?;
            }
            calls.push((name, Value::Object(arguments).to_string()));
            if self.take(",").is_none() {
                self.take("]")?;
                return self.is_over().then_some(calls);
            }
        }
    }

    /// Names and values up to `end`, of which the beginning has been read.
    pub(super) fn fields(&mut self, end: char) -> Option<Map<String, Value>> {
        let mut end_text = [0; 4];
        let end = &*end.encode_utf8(&mut end_text);
        let mut fields = Map::new();
        while self.take(end).is_none() {
            let key = match self.text() {
                Some(key) => key,
                None => self.name()?.to_owned(),
            };
            self.take(":")?;
            fields.insert(key, self.value()?);
            self.separated(end)?;
        }
        Some(fields)
    }

    fn value(&mut self) -> Option<Value> {
        self.depth += 1;
        let value = (self.depth <= MOST_DEPTH).then(|| self.any_value())?;
        self.depth -= 1;
        value
    }

    fn any_value(&mut self) -> Option<Value> {
        if let Some(text) = self.text() {
            return Some(text.into());
        }
        if self.take("{").is_some() {
            return self.fields('}').map(Value::Object);
        }
        if self.take("[").is_some() {
            let mut list = Vec::new();
            while self.take("]").is_none() {
                list.push(self.value()?);
                self.separated("]")?;
            }
            return Some(list.into());
        }
        let word = self.word(|character| {
            character.is_ascii_alphanumeric() || matches!(character, '+' | '-' | '.' | '_')
        })?;
        Some(match word {
            "true" | "True" => true.into(),
            "false" | "False" => false.into(),
            "null" | "None" => Value::Null,
            number => Value::Number(number.parse::<Number>().ok()?),
        })
    }

    /// A text between quotes or marks, if one comes next.
    fn text(&mut self) -> Option<String> {
        if let Some(quote) = self.quote
            && self.take(quote).is_some()
        {
            let (text, rest) = self.rest.split_once(quote)?;
            self.rest = rest;
            return Some(text.to_owned());
        }
        let rest = self.rest.trim_start();
        let quote = rest
            .chars()
            .next()
            .filter(|next| matches!(next, '"' | '\''))?;
        let mut escaped = false;
        let end = rest[1..].char_indices().find(|&(_, character)| {
            let ends = character == quote && !escaped;
            escaped = character == '\\' && !escaped;
            ends
        });
        let (end, _) = end?;
        self.rest = &rest[end + 2..];
        Some(unescaped(&rest[1..=end]))
    }

    fn name(&mut self) -> Option<&'a str> {
        self.word(|character| character.is_ascii_alphanumeric() || "_-.".contains(character))
    }

    fn word(&mut self, of: impl Fn(char) -> bool) -> Option<&'a str> {
        let rest = self.rest.trim_start();
        let end = rest.find(|character| !of(character)).unwrap_or(rest.len());
        let (word, rest) = rest.split_at(end);
        if word.is_empty() {
            return None;
        }
        self.rest = rest;
        Some(word)
    }

    fn take(&mut self, text: &str) -> Option<()> {
        self.rest = self.rest.trim_start().strip_prefix(text)?;
        Some(())
    }

    /// A comma, or `end` after this.
    fn separated(&mut self, end: &str) -> Option<()> {
        match self.take(",") {
            Some(()) => Some(()),
            None => self.rest.trim_start().starts_with(end).then_some(()),
        }
    }
}

/// What is between two quotes, as JSON and Python both have it; what neither has stays as it is.
fn unescaped(text: &str) -> String {
    // JSON has all of it, with the quotes that it needs to be escaped and the others not.
    let mut json = String::with_capacity(text.len() + 2);
    let mut escaped = false;
    json.push('"');
    for character in text.chars() {
        match character {
            '\'' if escaped => {
                json.pop();
                json.push('\'');
            }
            '"' if !escaped => json.push_str("\\\""),
            '\n' => json.push_str(if escaped { "n" } else { "\\n" }),
            '\t' if !escaped => json.push_str("\\t"),
            '\r' if !escaped => json.push_str("\\r"),
            other => json.push(other),
        }
        escaped = character == '\\' && !escaped;
    }
    json.push('"');
    serde_json::from_str(&json).unwrap_or_else(|_| text.to_owned())
}
