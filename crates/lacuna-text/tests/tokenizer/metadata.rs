//! Reads the vocabulary out of the reference GGUF files, with as little code as that takes and none
//! of the crate's own.

use std::collections::HashMap;
use std::path::PathBuf;

use lacuna_text::tokenizer::GgufVocabulary;

/// A file under `reference`.
pub(crate) fn reference(path: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../reference")).join(path)
}

/// The text of a file under `reference`.
pub(crate) fn reference_text(path: &str) -> String {
    let path = reference(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// A metadata value, of the types that vocabularies use.
#[derive(Debug)]
pub(crate) enum Value {
    Number(u64),
    Score(f32),
    Text(String),
    List(Vec<Value>),
}

/// The metadata of a GGUF file.
pub(crate) struct Metadata(HashMap<String, Value>);

impl Metadata {
    pub(crate) fn read(path: &str) -> Metadata {
        let bytes = std::fs::read(reference(path)).unwrap();
        let mut reader = Reader(&bytes);
        assert_eq!(reader.take(4), b"GGUF");
        let _version = reader.number(4);
        let _tensors = reader.number(8);
        let entries = reader.number(8);
        Metadata((0..entries).map(|_| reader.entry()).collect())
    }

    fn value(&self, key: &str) -> Option<&Value> {
        self.0.get(&format!("tokenizer.ggml.{key}"))
    }

    fn text(&self, key: &str) -> Option<&str> {
        match self.value(key)? {
            Value::Text(text) => Some(text),
            other => panic!("{key}: {other:?}"),
        }
    }

    fn number(&self, key: &str) -> Option<u64> {
        match self.value(key)? {
            Value::Number(number) => Some(*number),
            other => panic!("{key}: {other:?}"),
        }
    }

    fn list(&self, key: &str) -> Option<&[Value]> {
        match self.value(key)? {
            Value::List(list) => Some(list),
            other => panic!("{key}: {other:?}"),
        }
    }

    fn texts(&self, key: &str) -> Option<Vec<&str>> {
        fn text(value: &Value) -> &str {
            match value {
                Value::Text(text) => text,
                other => panic!("not a text: {other:?}"),
            }
        }
        Some(self.list(key)?.iter().map(text).collect())
    }

    /// The vocabulary, as the crate takes it.
    pub(crate) fn vocabulary(&self) -> GgufVocabulary<'_> {
        let id = |key: &str| self.number(key).map(|id| id as u32);
        let flag = |key: &str| self.number(key).map(|flag| flag != 0);
        let kind = |value: &Value| match value {
            Value::Number(number) => *number as i32,
            other => panic!("token_type: {other:?}"),
        };
        let score = |value: &Value| match value {
            Value::Score(score) => *score,
            other => panic!("scores: {other:?}"),
        };
        let byte = |value: &Value| match value {
            Value::Number(number) => *number as u8,
            other => panic!("precompiled_charsmap: {other:?}"),
        };
        GgufVocabulary {
            model: self.text("model").unwrap(),
            pre: self.text("pre"),
            tokens: self.texts("tokens").unwrap(),
            token_types: self
                .list("token_type")
                .map(|list| list.iter().map(kind).collect()),
            merges: self.texts("merges"),
            scores: self
                .list("scores")
                .map(|list| list.iter().map(score).collect()),
            bos: id("bos_token_id"),
            eos: id("eos_token_id"),
            cls: id("cls_token_id"),
            separator: id("seperator_token_id"),
            eot: id("eot_token_id"),
            eom: id("eom_token_id"),
            unknown: id("unknown_token_id"),
            add_bos: flag("add_bos_token"),
            add_eos: flag("add_eos_token"),
            add_separator: flag("add_sep_token"),
            add_space_prefix: flag("add_space_prefix"),
            remove_extra_whitespaces: flag("remove_extra_whitespaces"),
            character_map: self
                .list("precompiled_charsmap")
                .map(|list| list.iter().map(byte).collect()),
            ..GgufVocabulary::default()
        }
    }
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(len);
        self.0 = rest;
        taken
    }

    fn number(&mut self, len: usize) -> u64 {
        let mut bytes = [0; 8];
        bytes[..len].copy_from_slice(self.take(len));
        u64::from_le_bytes(bytes)
    }

    fn text(&mut self) -> String {
        let len = self.number(8) as usize;
        String::from_utf8(self.take(len).to_vec()).unwrap()
    }

    fn entry(&mut self) -> (String, Value) {
        let key = self.text();
        let kind = self.number(4);
        (key, self.value(kind))
    }

    fn value(&mut self, kind: u64) -> Value {
        match kind {
            0 | 1 | 7 => Value::Number(self.number(1)),
            2 | 3 => Value::Number(self.number(2)),
            4 | 5 => Value::Number(self.number(4)),
            6 => Value::Score(f32::from_bits(self.number(4) as u32)),
            8 => Value::Text(self.text()),
            9 => {
                let kind = self.number(4);
                let len = self.number(8);
                Value::List((0..len).map(|_| self.value(kind)).collect())
            }
            _ => Value::Number(self.number(8)),
        }
    }
}
