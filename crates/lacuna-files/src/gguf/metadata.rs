//! Key-value metadata of a GGUF file: a sorted table of keys, values left in the file.
//!
//! An entry costs its key and a range; a vocabulary of 150,000 strings costs no more than a number
//! does. Values are decoded when asked for, with the type asked for:
//!
//! ```
//! use lacuna_files::{Mapping, gguf};
//!
//! let mut header = gguf::Writer::new();
//! header.set("general.architecture", "qwen3");
//! header.set("qwen3.block_count", 28u32);
//! let file = gguf::File::parse(Mapping::from(header.to_bytes()))?;
//! assert_eq!(file.metadata().require::<&str>("general.architecture")?, "qwen3");
//! assert_eq!(file.metadata().require::<usize>("qwen3.block_count")?, 28);
//! assert_eq!(file.metadata().get::<f32>("qwen3.rope.freq_base")?, None);
//! # Ok::<(), gguf::Error>(())
//! ```

use std::ops::Range;

use super::cursor::Cursor;
use super::error::Error;
use super::types::ValueType;
use crate::mapping::Mapping;

/// Arrays inside arrays inside arrays: more than any known file has.
const NESTING_LIMIT: usize = 4;
/// Fewest bytes of an entry: key length, one byte of key, value type, one byte of value.
const LEAST_ENTRY_BYTES: usize = 8 + 1 + 4 + 1;

/// The metadata of a GGUF file. Cheap to look things up in; cloning copies the keys.
#[derive(Clone, Debug)]
pub struct Metadata {
    data: Mapping,
    /// Sorted by key.
    entries: Vec<Entry>,
}

#[derive(Clone, Debug)]
struct Entry {
    key: Box<str>,
    value_type: ValueType,
    /// The value's bytes, without its type.
    range: Range<usize>,
}

impl Metadata {
    pub(super) fn parse(
        data: &Mapping,
        cursor: &mut Cursor<'_>,
        count: u64,
    ) -> Result<Self, Error> {
        let count = cursor.check_count(count, LEAST_ENTRY_BYTES, "metadata entries")?;
        let mut entries = Vec::new();
        entries.try_reserve_exact(count)?;
        for _ in 0..count {
            entries.push(parse_entry(cursor)?);
        }
        entries.sort_unstable_by(|a, b| a.key.cmp(&b.key));
        match entries.windows(2).find(|pair| pair[0].key == pair[1].key) {
            Some(pair) => Err(Error::DuplicateKey {
                key: pair[0].key.to_string(),
            }),
            None => Ok(Self {
                data: data.clone(),
                entries,
            }),
        }
    }

    /// Number of entries.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are no entries.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Every entry, in the order of keys.
    pub fn iter(&self) -> impl Iterator<Item = (&str, Value<'_>)> {
        self.entries
            .iter()
            .map(|entry| (&*entry.key, self.value(entry)))
    }

    /// Every entry as the file has it, in the order of the file: key, type of the value, and its bytes.
    pub(super) fn encoded(&self) -> impl Iterator<Item = (&str, ValueType, &[u8])> {
        let mut entries: Vec<&Entry> = self.entries.iter().collect();
        entries.sort_unstable_by_key(|entry| entry.range.start);
        entries.into_iter().map(|entry| {
            let bytes = &self.data[entry.range.clone()];
            (&*entry.key, entry.value_type, bytes)
        })
    }

    /// Whether the file has such a key.
    pub fn contains(&self, key: &str) -> bool {
        self.find(key).is_some()
    }

    fn find(&self, key: &str) -> Option<&Entry> {
        let at = self.entries.binary_search_by(|entry| (*entry.key).cmp(key));
        at.ok().map(|at| &self.entries[at])
    }

    /// The value of `key` as a `T`, or `None` when the file has no such key.
    ///
    /// Integers convert between widths when the value fits. See [`FromValue`] for the types.
    ///
    /// # Errors
    /// [`Error::WrongValue`] when there is a value and it is no `T`.
    pub fn get<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<Option<T>, Error> {
        let Some(entry) = self.find(key) else {
            return Ok(None);
        };
        let value = self.value(entry);
        T::from_value(value)
            .map(Some)
            .ok_or_else(|| Error::WrongValue {
                key: key.to_owned(),
                expected: T::EXPECTED,
                found: value.describe(),
            })
    }

    /// The value of `key` as a `T`.
    ///
    /// # Errors
    /// [`Error::MissingKey`], or as [`get`](Self::get).
    pub fn require<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<T, Error> {
        self.get(key)?.ok_or_else(|| Error::MissingKey {
            key: key.to_owned(),
        })
    }

    fn value(&self, entry: &Entry) -> Value<'_> {
        Value::decode(entry.value_type, &self.data[entry.range.clone()])
    }
}

fn parse_entry(cursor: &mut Cursor<'_>) -> Result<Entry, Error> {
    let key = cursor.name("metadata key")?;
    let value_type = value_type(cursor, key)?;
    let start = cursor.position();
    skip_value(cursor, key, value_type, 0)?;
    Ok(Entry {
        key: key.into(),
        value_type,
        range: start..cursor.position(),
    })
}

fn value_type(cursor: &mut Cursor<'_>, key: &str) -> Result<ValueType, Error> {
    let id = cursor.u32("metadata value type")?;
    ValueType::from_id(id).ok_or_else(|| Error::UnknownValueType {
        key: key.to_owned(),
        id,
    })
}

fn skip_value(
    cursor: &mut Cursor<'_>,
    key: &str,
    value_type: ValueType,
    depth: usize,
) -> Result<(), Error> {
    match value_type.fixed_bytes() {
        Some(bytes) => cursor.take(bytes as u64, "metadata value").map(drop),
        None if value_type == ValueType::String => cursor.string("metadata text").map(drop),
        None => skip_array(cursor, key, depth + 1),
    }
}

fn skip_array(cursor: &mut Cursor<'_>, key: &str, depth: usize) -> Result<(), Error> {
    if depth > NESTING_LIMIT {
        return Err(Error::NestedTooDeep {
            key: key.to_owned(),
            limit: NESTING_LIMIT,
        });
    }
    let element = value_type(cursor, key)?;
    let count = cursor.count(element.least_bytes(), "array elements")?;
    match element.fixed_bytes() {
        Some(bytes) => cursor
            .take((count * bytes) as u64, "metadata array")
            .map(drop),
        None => (0..count).try_for_each(|_| skip_value(cursor, key, element, depth)),
    }
}

/// A metadata value, borrowed from the file.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Value<'a> {
    /// Any unsigned integer.
    Unsigned(u64),
    /// Any signed integer.
    Signed(i64),
    /// Any floating-point number.
    Float(f64),
    /// A truth value; any byte but 0 is true.
    Bool(bool),
    /// Text, which need not be valid UTF-8.
    Text(&'a [u8]),
    /// A sequence of values of one type.
    Array(Array<'a>),
}

impl<'a> Value<'a> {
    /// Decodes bytes whose extent was checked when the file was opened. Missing bytes, which only a
    /// file that changed since can have, read as zero.
    fn decode(value_type: ValueType, bytes: &'a [u8]) -> Self {
        let low = || u64::from_le_bytes(padded(bytes));
        match value_type {
            ValueType::U8 | ValueType::U16 | ValueType::U32 | ValueType::U64 => {
                Self::Unsigned(low())
            }
            ValueType::I8 => Self::Signed(i64::from(i8::from_le_bytes(padded(bytes)))),
            ValueType::I16 => Self::Signed(i64::from(i16::from_le_bytes(padded(bytes)))),
            ValueType::I32 => Self::Signed(i64::from(i32::from_le_bytes(padded(bytes)))),
            ValueType::I64 => Self::Signed(i64::from_le_bytes(padded(bytes))),
            ValueType::F32 => Self::Float(f64::from(f32::from_le_bytes(padded(bytes)))),
            ValueType::F64 => Self::Float(f64::from_le_bytes(padded(bytes))),
            ValueType::Bool => Self::Bool(low() != 0),
            ValueType::String => Self::Text(bytes.get(8..).unwrap_or_default()),
            ValueType::Array => Self::Array(Array::decode(bytes)),
        }
    }

    /// What the value is, in words short enough for an error message.
    pub fn describe(&self) -> String {
        match self {
            Self::Unsigned(value) => format!("the number {value}"),
            Self::Signed(value) => format!("the number {value}"),
            Self::Float(value) => format!("the number {value:?}"),
            Self::Bool(value) => format!("{value}"),
            Self::Text(bytes) => describe_text(bytes),
            Self::Array(array) => {
                format!(
                    "an array of {} x {}",
                    array.len(),
                    array.element_type().name()
                )
            }
        }
    }
}

fn describe_text(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) if text.chars().count() <= 40 => format!("the text {text:?}"),
        Ok(text) => format!(
            "the text {:?}...",
            text.chars().take(40).collect::<String>()
        ),
        Err(_) => "text that is not UTF-8".to_owned(),
    }
}

fn padded<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut array = [0; N];
    let count = bytes.len().min(N);
    array[..count].copy_from_slice(&bytes[..count]);
    array
}

/// A metadata array, borrowed from the file.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Array<'a> {
    element: ValueType,
    count: usize,
    bytes: &'a [u8],
}

impl<'a> Array<'a> {
    fn decode(bytes: &'a [u8]) -> Self {
        let mut cursor = Cursor::new(bytes);
        let id = cursor.u32("array element type").unwrap_or_default();
        let element = ValueType::from_id(id).unwrap_or(ValueType::U8);
        let count = cursor
            .count(element.least_bytes(), "array elements")
            .unwrap_or_default();
        Self {
            element,
            count,
            bytes: bytes.get(cursor.position()..).unwrap_or_default(),
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The type of every element.
    pub fn element_type(&self) -> ValueType {
        self.element
    }

    /// The elements as text, or `None` when they are something else.
    pub fn strings(&self) -> Option<Strings<'a>> {
        let strings = Strings {
            bytes: self.bytes,
            remaining: self.count,
        };
        (self.element == ValueType::String).then_some(strings)
    }

    /// The elements as values, or `None` when they are text or arrays.
    pub fn scalars(&self) -> Option<impl ExactSizeIterator<Item = Value<'a>> + use<'a>> {
        let element = self.element;
        let each = element.fixed_bytes()?;
        let chunks = self.bytes.chunks_exact(each).take(self.count);
        Some(chunks.map(move |bytes| Value::decode(element, bytes)))
    }
}

/// The strings of an array, in order, as bytes that need not be valid UTF-8.
///
/// Costs nothing to create; a step reads one length.
#[derive(Clone, Debug)]
pub struct Strings<'a> {
    bytes: &'a [u8],
    remaining: usize,
}

impl<'a> Iterator for Strings<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        self.remaining = self.remaining.checked_sub(1)?;
        let mut cursor = Cursor::new(self.bytes);
        // Lengths were checked when the file was opened; they fail only if it changed since.
        let text = cursor.string("array text").ok()?;
        self.bytes = &self.bytes[cursor.position()..];
        Some(text)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.remaining, Some(self.remaining))
    }
}

impl ExactSizeIterator for Strings<'_> {}

/// A type that metadata can be read as: integers, floats, `bool`, `&str`, [`Strings`], and vectors
/// of scalars or `&str`.
pub trait FromValue<'a>: Sized {
    /// What is needed, for the error message.
    const EXPECTED: &'static str;

    /// Converts without loss, or not at all.
    fn from_value(value: Value<'a>) -> Option<Self>;
}

impl<'a> FromValue<'a> for Value<'a> {
    const EXPECTED: &'static str = "a value";

    fn from_value(value: Value<'a>) -> Option<Self> {
        Some(value)
    }
}

macro_rules! from_integer {
    ($($target:ty: $expected:literal, $expected_array:literal;)*) => {$(
        impl FromValue<'_> for $target {
            const EXPECTED: &'static str = $expected;

            fn from_value(value: Value<'_>) -> Option<Self> {
                match value {
                    Value::Unsigned(value) => value.try_into().ok(),
                    Value::Signed(value) => value.try_into().ok(),
                    _ => None,
                }
            }
        }

        impl<'a> FromValue<'a> for Vec<$target> {
            const EXPECTED: &'static str = $expected_array;

            fn from_value(value: Value<'a>) -> Option<Self> {
                scalars(value)
            }
        }
    )*};
}

from_integer! {
    u8: "a number of 8 bits", "an array of bytes";
    u32: "a number of 32 bits", "an array of 32-bit numbers";
    i32: "a signed number of 32 bits", "an array of signed 32-bit numbers";
    u64: "a number of 64 bits", "an array of 64-bit numbers";
    usize: "a count", "an array of counts";
}

impl FromValue<'_> for f32 {
    const EXPECTED: &'static str = "a floating-point number";

    fn from_value(value: Value<'_>) -> Option<Self> {
        match value {
            Value::Float(value) => Some(value as f32),
            _ => None,
        }
    }
}

impl FromValue<'_> for Vec<f32> {
    const EXPECTED: &'static str = "an array of floating-point numbers";

    fn from_value(value: Value<'_>) -> Option<Self> {
        scalars(value)
    }
}

impl FromValue<'_> for bool {
    const EXPECTED: &'static str = "true or false";

    fn from_value(value: Value<'_>) -> Option<Self> {
        match value {
            Value::Bool(value) => Some(value),
            _ => None,
        }
    }
}

impl<'a> FromValue<'a> for &'a str {
    const EXPECTED: &'static str = "text";

    fn from_value(value: Value<'a>) -> Option<Self> {
        match value {
            Value::Text(bytes) => std::str::from_utf8(bytes).ok(),
            _ => None,
        }
    }
}

impl<'a> FromValue<'a> for Strings<'a> {
    const EXPECTED: &'static str = "an array of text";

    fn from_value(value: Value<'a>) -> Option<Self> {
        match value {
            Value::Array(array) => array.strings(),
            _ => None,
        }
    }
}

impl<'a> FromValue<'a> for Vec<&'a str> {
    const EXPECTED: &'static str = "an array of UTF-8 text";

    fn from_value(value: Value<'a>) -> Option<Self> {
        Strings::from_value(value)?
            .map(|text| std::str::from_utf8(text).ok())
            .collect()
    }
}

fn scalars<'a, T: FromValue<'a>>(value: Value<'a>) -> Option<Vec<T>> {
    match value {
        Value::Array(array) => array.scalars()?.map(T::from_value).collect(),
        _ => None,
    }
}
