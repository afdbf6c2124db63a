//! Small vocabularies made on the spot.

use lacuna_text::tokenizer::GgufVocabulary;

/// A vocabulary in the making.
pub(crate) struct Words {
    model: &'static str,
    tokens: Vec<String>,
    pub(crate) kinds: Vec<i32>,
    scores: Vec<f32>,
    merges: Vec<String>,
}

impl Words {
    /// Adds a token of a kind, by GGUF's numbers.
    pub(crate) fn add(&mut self, text: &str, kind: i32) -> u32 {
        self.add_scored(text, kind, 0.0)
    }

    pub(crate) fn add_scored(&mut self, text: &str, kind: i32, score: f32) -> u32 {
        self.tokens.push(text.to_owned());
        self.kinds.push(kind);
        self.scores.push(score);
        self.tokens.len() as u32 - 1
    }

    /// The first id of a token.
    pub(crate) fn id(&self, text: &str) -> u32 {
        let found = self.tokens.iter().position(|token| token == text);
        found.unwrap_or_else(|| panic!("no token {text:?}")) as u32
    }

    pub(crate) fn gguf(&self) -> GgufVocabulary<'_> {
        GgufVocabulary {
            model: self.model,
            pre: (self.model == "gpt2").then_some("gpt-2"),
            tokens: self.tokens.iter().map(String::as_str).collect(),
            token_types: Some(self.kinds.clone()),
            scores: Some(self.scores.clone()),
            merges: Some(self.merges.iter().map(String::as_str).collect()),
            ..GgufVocabulary::default()
        }
    }
}

/// GPT-2's character for a byte.
pub(crate) fn character(byte: u8) -> char {
    let printable = |byte: u8| matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    let code = match byte {
        byte if printable(byte) => u32::from(byte),
        byte => 0x100 + (0..byte).filter(|other| !printable(*other)).count() as u32,
    };
    char::from_u32(code).unwrap_or_default()
}

/// All bytes, `<|im_end|>`, and further tokens, each merged from its front and its last character
/// where both are tokens.
pub(crate) fn byte_level(more: &[&str]) -> Words {
    let mut words = Words {
        model: "gpt2",
        tokens: vec![],
        kinds: vec![],
        scores: vec![],
        merges: vec![],
    };
    for byte in 0..=255 {
        words.add(&character(byte).to_string(), 1);
    }
    words.add("<|im_end|>", 3);
    for text in more {
        words.add(text, 1);
        let last = text.char_indices().last().map_or(0, |(index, _)| index);
        let (front, back) = text.split_at(last);
        let known = |part: &str| words.tokens.iter().any(|token| token == part);
        if known(front) && known(back) {
            words.merges.push(format!("{front} {back}"));
        }
    }
    words
}

/// SentencePiece's three special tokens, all bytes, and pieces with scores.
pub(crate) fn sentencepiece(pieces: &[(&str, f32)]) -> Words {
    let mut words = Words {
        model: "llama",
        tokens: vec![],
        kinds: vec![],
        scores: vec![],
        merges: vec![],
    };
    words.add("<unk>", 2);
    words.add("<s>", 3);
    words.add("</s>", 3);
    for byte in 0..=255u8 {
        words.add(&format!("<0x{byte:02X}>"), 6);
    }
    for (text, score) in pieces {
        words.add_scored(text, 1, *score);
    }
    words
}
