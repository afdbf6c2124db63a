//! What a JSON text comes to in memory once it is parsed, told from its bytes before it is.
//!
//! Parsed JSON can take a hundred times its text: `[],` is three bytes and a value of 72 in a list
//! that has grown by doubling. So the marks that begin values are counted as a body arrives, and the
//! memory for them is taken from the account before the parser runs.

use serde_json::Value;

/// Counts what will be parsed. Fed in pieces, wherever they are cut.
#[derive(Debug, Clone, Default)]
pub(crate) struct Extent {
    values: usize,
    objects: usize,
    entries: usize,
    strings: usize,
    text_bytes: usize,
    longest_text_bytes: usize,
    state: State,
}

#[derive(Debug, Clone, Copy, Default)]
enum State {
    #[default]
    Outside,
    /// In a string of so many bytes so far, escapes counted as what they stand for at least.
    Text(usize),
    /// After a backslash.
    Escape(usize),
    /// Before so many of the digits of `\u0000`.
    Digits(usize, u8),
}

impl Extent {
    /// A value of a list. The list has grown by doubling: at the worst moment the old half is being
    /// copied into a new whole that is not half full.
    const VALUE_BYTES: usize = 3 * size_of::<Value>();
    /// An object's table and its first few entries, which are allocated together; an empty one has
    /// neither.
    const OBJECT_BYTES: usize = 4 * Self::SLOT_BYTES + 128;
    /// A key with its value, in a list that grows like any other.
    const ENTRY_BYTES: usize = 3 * Self::SLOT_BYTES;
    /// The hash, the key and the value.
    const SLOT_BYTES: usize = size_of::<u64>() + size_of::<String>() + size_of::<Value>();
    /// What four digits stand for at most: a character of three bytes in UTF-8, which clients that write ASCII
    /// alone have all Chinese text of. Two of them that make one character have four bytes together.
    const ESCAPED_BYTES: usize = 3;
    /// What an allocator adds to a short string.
    const STRING_BYTES: usize = 32;

    pub(crate) fn read(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.state = match self.state {
                State::Outside => self.outside(byte),
                State::Text(length) => match byte {
                    b'"' => {
                        self.text_bytes += length;
                        self.longest_text_bytes = self.longest_text_bytes.max(length);
                        State::Outside
                    }
                    b'\\' => State::Escape(length + 1),
                    _ => State::Text(length + 1),
                },
                State::Escape(length) if byte == b'u' => {
                    self.text_bytes += Self::ESCAPED_BYTES - 1;
                    State::Digits(length, 4)
                }
                State::Escape(length) | State::Digits(length, 0 | 1) => State::Text(length),
                State::Digits(length, left) => State::Digits(length, left - 1),
            };
        }
    }

    fn outside(&mut self, byte: u8) -> State {
        match byte {
            b'"' => {
                self.strings += 1;
                return State::Text(0);
            }
            b',' | b'[' => self.values += 1,
            b'{' => {
                self.values += 1;
                self.objects += 1;
            }
            b':' => self.entries += 1,
            _ => {}
        }
        State::Outside
    }

    /// Bytes of all strings together, at most.
    pub(crate) fn text_bytes(&self) -> usize {
        self.text_bytes
    }

    /// Bytes of the longest string, at least.
    pub(crate) fn longest_text_bytes(&self) -> usize {
        self.longest_text_bytes
    }

    /// Bytes of everything but the characters of strings, at most.
    pub(crate) fn structure_bytes(&self) -> usize {
        self.values * Self::VALUE_BYTES
            + self.objects.min(self.entries) * Self::OBJECT_BYTES
            + self.entries * Self::ENTRY_BYTES
            + self.strings * Self::STRING_BYTES
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// `text` as JSON, with all that is not ASCII in escapes, as Python's `json.dumps` writes it.
    fn escaped(text: &str) -> String {
        let json = serde_json::to_string(text).expect("a string");
        let mut ascii = String::new();
        for character in json.chars() {
            match character.is_ascii() {
                true => ascii.push(character),
                false => {
                    let units = character.encode_utf16(&mut [0; 2]).to_vec();
                    ascii.extend(units.iter().map(|unit| format!("\\u{unit:04x}")));
                }
            }
        }
        ascii
    }

    proptest! {
        /// The bytes of texts are bounded from above, for memory, and those of the longest from below, for what is
        /// refused, however they are written and wherever they are cut.
        #[test]
        fn texts_are_bounded_however_they_are_written(
            texts in proptest::collection::vec("\\PC{0,20}|[\\x00-\\x7f]{0,20}|[\u{4e2d}\u{1f600}\\\\\"é]{0,20}", 0..6),
            ascii: bool,
            piece in 1_usize..9,
        ) {
            let written = texts.iter().map(|text| match ascii {
                true => escaped(text),
                false => serde_json::to_string(text).expect("a string"),
            });
            let body = format!("[{}]", written.collect::<Vec<String>>().join(","));
            let parsed: Vec<String> = serde_json::from_str(&body).expect("JSON");
            prop_assert_eq!(&parsed, &texts);
            let mut extent = Extent::default();
            body.as_bytes().chunks(piece).for_each(|piece| extent.read(piece));
            let bytes: usize = texts.iter().map(String::len).sum();
            prop_assert!((bytes..=3 * bytes).contains(&extent.text_bytes()));
            let longest = texts.iter().map(String::len).max().unwrap_or(0);
            prop_assert!((longest.div_ceil(3)..=longest).contains(&extent.longest_text_bytes()));
        }
    }
}
