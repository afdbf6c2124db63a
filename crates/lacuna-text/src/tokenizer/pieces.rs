//! What each token decodes to, as one flat table.
//!
//! Decoding is then a copy per token, whatever the vocabulary's own spelling is: the byte-level
//! alphabet (`Ġ` for a space), SentencePiece's `▁` and `<0x0A>`, or plain text for special tokens.

/// What a token is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum TokenKind {
    /// Text, found by the algorithm.
    Normal,
    /// Stands for text the vocabulary cannot express.
    Unknown,
    /// Markup: turns, beginning, end. Found in text only on request, shown only on request.
    Control,
    /// Text that is always one token.
    UserDefined,
    /// An id without a meaning, such as padding.
    Unused,
    /// One byte.
    Byte,
}

impl TokenKind {
    /// The kind behind GGUF's `tokenizer.ggml.token_type` number; an unknown number is unused.
    pub fn from_gguf(number: i32) -> TokenKind {
        match number {
            1 => TokenKind::Normal,
            2 => TokenKind::Unknown,
            3 => TokenKind::Control,
            4 => TokenKind::UserDefined,
            6 => TokenKind::Byte,
            _ => TokenKind::Unused,
        }
    }

    /// That number.
    pub(super) fn to_gguf(self) -> i32 {
        match self {
            TokenKind::Normal => 1,
            TokenKind::Unknown => 2,
            TokenKind::Control => 3,
            TokenKind::UserDefined => 4,
            TokenKind::Unused => 5,
            TokenKind::Byte => 6,
        }
    }

    /// Whether decoding hides the token unless asked to show it.
    pub fn is_special(self) -> bool {
        matches!(self, TokenKind::Control | TokenKind::Unknown)
    }
}

/// How a vocabulary spells bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spelling {
    /// Every byte is a character of GPT-2's alphabet.
    ByteLevel,
    /// `▁` is a space and `<0x0A>` a byte.
    SentencePiece,
    /// `##` goes on with a word; all else begins one, after a space.
    WordPiece,
}

/// The bytes and the kind of every token.
#[derive(Debug, Default)]
pub(super) struct Pieces {
    bytes: Vec<u8>,
    ends: Vec<u32>,
    kinds: Vec<TokenKind>,
}

impl Pieces {
    /// Adds the next token in the vocabulary's spelling.
    pub(super) fn push(&mut self, text: &str, kind: TokenKind, spelling: Spelling) {
        match (kind, spelling) {
            (TokenKind::Control | TokenKind::Unknown, _)
            | (TokenKind::UserDefined, Spelling::ByteLevel) => {
                self.bytes.extend_from_slice(text.as_bytes());
            }
            (TokenKind::Unused, Spelling::ByteLevel) => {}
            (_, Spelling::ByteLevel) => push_byte_level(text, &mut self.bytes),
            (_, Spelling::SentencePiece) => push_sentencepiece(text, &mut self.bytes),
            (_, Spelling::WordPiece) => push_word_piece(text, &mut self.bytes),
        }
        self.close(kind);
    }

    /// Adds ids that decode to nothing until there are `len` tokens.
    pub(super) fn pad_to(&mut self, len: usize) {
        while self.kinds.len() < len {
            self.close(TokenKind::Unused);
        }
    }

    fn close(&mut self, kind: TokenKind) {
        // Callers bound the vocabulary's text, so that offsets fit.
        self.ends
            .push(u32::try_from(self.bytes.len()).unwrap_or(u32::MAX));
        self.kinds.push(kind);
    }

    pub(super) fn len(&self) -> usize {
        self.kinds.len()
    }

    pub(super) fn kind(&self, id: u32) -> Option<TokenKind> {
        self.kinds.get(id as usize).copied()
    }

    pub(super) fn get(&self, id: u32) -> Option<(&[u8], TokenKind)> {
        let index = id as usize;
        let end = *self.ends.get(index)? as usize;
        let start = match index {
            0 => 0,
            _ => self.ends[index - 1] as usize,
        };
        Some((self.bytes.get(start..end)?, self.kinds[index]))
    }

    /// Bytes of text that one token stands for at most. A space may have been written as the three
    /// bytes of SentencePiece's.
    pub(super) fn longest(&self, spelling: Spelling) -> usize {
        let written = |bytes: &[u8]| match spelling {
            Spelling::ByteLevel | Spelling::WordPiece => bytes.len(),
            Spelling::SentencePiece => {
                bytes.len() + 2 * bytes.iter().filter(|byte| **byte == b' ').count()
            }
        };
        let tokens = (0u32..).map_while(|id| self.get(id));
        // A character without a token is one, too.
        tokens.map(|(bytes, _)| written(bytes)).fold(4, usize::max)
    }

    pub(super) fn count(&self, wanted: impl Fn(TokenKind) -> bool) -> usize {
        self.kinds.iter().filter(|kind| wanted(**kind)).count()
    }
}

/// Appends a byte-level token; one with characters outside the alphabet is taken as plain text.
pub(super) fn push_byte_level(text: &str, bytes: &mut Vec<u8>) {
    let start = bytes.len();
    for character in text.chars() {
        match byte_of(character) {
            Some(byte) => bytes.push(byte),
            None => {
                bytes.truncate(start);
                bytes.extend_from_slice(text.as_bytes());
                return;
            }
        }
    }
}

fn push_sentencepiece(text: &str, bytes: &mut Vec<u8>) {
    if let Some(byte) = byte_token(text) {
        bytes.push(byte);
        return;
    }
    for (index, part) in text.split('\u{2581}').enumerate() {
        if index > 0 {
            bytes.push(b' ');
        }
        bytes.extend_from_slice(part.as_bytes());
    }
}

/// What tokens begin with that go on with a word.
pub(super) const CONTINUES: &str = "##";

fn push_word_piece(text: &str, bytes: &mut Vec<u8>) {
    match text.strip_prefix(CONTINUES) {
        Some(rest) => bytes.extend_from_slice(rest.as_bytes()),
        None => {
            bytes.push(b' ');
            bytes.extend_from_slice(text.as_bytes());
        }
    }
}

/// The byte a token such as `<0x0A>` stands for.
pub(super) fn byte_token(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    let two_digits = digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    two_digits.then(|| u8::from_str_radix(digits, 16).ok())?
}

/// GPT-2's alphabet: printable Latin-1 stands for itself, the other 68 bytes for U+0100 onwards.
fn byte_of(character: char) -> Option<u8> {
    match u32::from(character) {
        code @ (0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF) => u8::try_from(code).ok(),
        code @ 0x100..=0x120 => u8::try_from(code - 0x100).ok(),
        code @ 0x121..=0x142 => u8::try_from(code - 0x121 + 0x7F).ok(),
        0x143 => Some(0xAD),
        _ => None,
    }
}

/// The character of GPT-2's alphabet that stands for a byte.
pub(super) fn character_of(byte: u8) -> char {
    let code = match byte {
        0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF => u32::from(byte),
        0x00..=0x20 => 0x100 + u32::from(byte),
        0x7F..=0xA0 => 0x121 + u32::from(byte) - 0x7F,
        0xAD => 0x143,
    };
    // All of them are characters.
    char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_level_alphabet_covers_every_byte_once() {
        let mut seen = [false; 256];
        for code in 0..0x400u32 {
            if let Some(byte) = char::from_u32(code).and_then(byte_of) {
                assert!(!seen[byte as usize], "byte {byte} twice");
                seen[byte as usize] = true;
            }
        }
        assert!(seen.iter().all(|seen| *seen));
        for byte in 0..=u8::MAX {
            assert_eq!(byte_of(character_of(byte)), Some(byte));
        }
        assert_eq!(byte_of('Ġ'), Some(b' '));
        assert_eq!(byte_of('Ċ'), Some(b'\n'));
        assert_eq!(byte_of('ŀ'), Some(0x9E));
        assert_eq!(byte_of('ł'), Some(0xA0));
        assert_eq!(byte_of('Ń'), Some(0xAD));
    }

    #[test]
    fn byte_tokens_are_exactly_two_hexadecimal_digits() {
        assert_eq!(byte_token("<0x0A>"), Some(10));
        assert_eq!(byte_token("<0xff>"), Some(255));
        for other in [
            "<0x>", "<0x1>", "<0x123>", "<0x+1>", "<0xGG>", "0x0A", "<0x0A",
        ] {
            assert_eq!(byte_token(other), None, "{other}");
        }
    }

    #[test]
    fn pieces_keep_each_token_apart() {
        let mut pieces = Pieces::default();
        pieces.push("Ġhi", TokenKind::Normal, Spelling::ByteLevel);
        pieces.push("日本", TokenKind::Normal, Spelling::ByteLevel);
        pieces.push("<|é|>", TokenKind::Control, Spelling::ByteLevel);
        pieces.push("[PAD3]", TokenKind::Unused, Spelling::ByteLevel);
        pieces.push("▁a▁", TokenKind::Normal, Spelling::SentencePiece);
        pieces.push("<0xE2>", TokenKind::Byte, Spelling::SentencePiece);
        pieces.pad_to(7);
        let texts: Vec<&[u8]> = (0..7)
            .filter_map(|id| pieces.get(id))
            .map(|p| p.0)
            .collect();
        assert_eq!(
            texts,
            [
                b" hi".as_slice(),
                "日本".as_bytes(),
                "<|é|>".as_bytes(),
                b"",
                b" a ",
                b"\xE2",
                b""
            ]
        );
        assert!(pieces.get(7).is_none());
    }
}
