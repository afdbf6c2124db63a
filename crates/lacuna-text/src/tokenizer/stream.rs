//! Text from token ids, one at a time.
//!
//! A stream holds back at most the three bytes of an unfinished character, so that what it returns
//! is always complete text; a token costs its own length. Whatever the cuts, the parts joined are
//! the whole decode, because the whole decode is made by the same stream.

use super::{Tokenizer, TokenizerError};

/// What a control token's name comes after with [`SpecialText::Mark`]: a noncharacter, which Unicode
/// keeps for use within a program.
pub const MARK_OPEN: char = '\u{FDD0}';
/// What it comes before.
pub const MARK_CLOSE: char = '\u{FDD1}';

/// Whether control tokens appear in the text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SpecialText {
    /// They are left out.
    #[default]
    Skip,
    /// They appear as they are written in the vocabulary.
    Show,
    /// They appear between [`MARK_OPEN`] and [`MARK_CLOSE`], so that nothing else can be taken for one:
    /// where other tokens have one of these two characters, it comes out as U+FFFD.
    Mark,
}

/// What the ids are the start of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TextStart {
    /// A text: the space that SentencePiece puts before the first word is removed again.
    #[default]
    Beginning,
    /// The continuation of a text, such as a completed prompt: every space is the model's.
    Continuation,
}

/// How ids become text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Decode {
    /// Whether control tokens appear.
    pub special: SpecialText,
    /// What the first id begins.
    pub start: TextStart,
}

impl Decode {
    /// A text of its own, without its control tokens.
    pub const TEXT: Decode = Decode {
        special: SpecialText::Skip,
        start: TextStart::Beginning,
    };
    /// A text of its own, with its control tokens.
    pub const MARKUP: Decode = Decode {
        special: SpecialText::Show,
        start: TextStart::Beginning,
    };
    /// What follows a prompt, without control tokens.
    pub const CONTINUATION: Decode = Decode {
        special: SpecialText::Skip,
        start: TextStart::Continuation,
    };
}

/// What a vocabulary's decoder does with a leading space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Leading {
    /// Nothing.
    Keep,
    /// The text loses one space at its start.
    StripOne,
    /// The first token loses all its spaces, as the `Metaspace` decoder of `tokenizer.json` has it.
    StripFirstToken,
}

/// An incremental decoder.
///
/// # Examples
///
/// ```
/// # use lacuna_text::tokenizer::{Decode, TextStream, Tokenizer, TokenizerError};
/// # fn print(tokenizer: &Tokenizer, ids: &[u32]) -> Result<(), TokenizerError> {
/// let mut stream = TextStream::new(Decode::TEXT);
/// for &id in ids {
///     print!("{}", stream.push(tokenizer, id)?);
/// }
/// println!("{}", stream.finish());
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct TextStream {
    options: Decode,
    fresh: bool,
    pending: Vec<u8>,
    text: String,
}

impl TextStream {
    /// A stream that has seen nothing.
    pub fn new(options: Decode) -> TextStream {
        let fresh = options.start == TextStart::Beginning;
        TextStream {
            options,
            fresh,
            pending: Vec::new(),
            text: String::new(),
        }
    }

    /// The text that `id` completes, which is empty while a character is unfinished.
    ///
    /// Bytes that cannot become a character come out as U+FFFD, one for each maximal invalid
    /// sequence, as `String::from_utf8_lossy` has it. All ids of a stream must be given to the same
    /// tokenizer. Fails if `id` is out of range; the stream is then as before.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> Result<&str, TokenizerError> {
        let (piece, kind) = tokenizer
            .pieces
            .get(id)
            .ok_or(TokenizerError::IdOutOfRange {
                id,
                size: tokenizer.vocab_size(),
            })?;
        self.text.clear();
        match self.options.special {
            SpecialText::Skip if kind.is_special() => {}
            SpecialText::Mark if kind.is_special() => self.mark(piece),
            _ => {
                self.append(piece, tokenizer.leading);
                self.complete();
            }
        }
        Ok(&self.text)
    }

    /// What is held back, as U+FFFD, and a stream that has seen nothing.
    pub fn finish(&mut self) -> &str {
        self.text.clear();
        if !self.pending.is_empty() {
            self.pending.clear();
            self.text.push(char::REPLACEMENT_CHARACTER);
        }
        self.fresh = self.options.start == TextStart::Beginning;
        &self.text
    }

    fn append(&mut self, piece: &[u8], leading: Leading) {
        match leading {
            Leading::StripOne if self.fresh => {
                self.fresh = piece.is_empty();
                let piece = piece.strip_prefix(b" ").unwrap_or(piece);
                self.pending.extend_from_slice(piece);
            }
            Leading::StripFirstToken if self.fresh => {
                self.fresh = false;
                self.pending
                    .extend(piece.iter().filter(|byte| **byte != b' '));
            }
            _ => self.pending.extend_from_slice(piece),
        }
    }

    /// Writes a control token, which ends a character that is unfinished.
    fn mark(&mut self, name: &[u8]) {
        if !self.pending.is_empty() {
            self.pending.clear();
            self.text.push(char::REPLACEMENT_CHARACTER);
        }
        self.text.push(MARK_OPEN);
        self.text.push_str(&String::from_utf8_lossy(name));
        self.text.push(MARK_CLOSE);
    }

    /// Moves every complete character from the bytes to the text, which has no marks then.
    fn complete(&mut self) {
        self.decode();
        let marks = [MARK_OPEN, MARK_CLOSE];
        if self.options.special == SpecialText::Mark && self.text.contains(marks) {
            self.text = self.text.replace(marks, "\u{FFFD}");
        }
    }

    fn decode(&mut self) {
        let mut rest = self.pending.as_slice();
        loop {
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    self.text.push_str(valid);
                    self.pending.clear();
                    return;
                }
                Err(error) => {
                    let (valid, after) = rest.split_at(error.valid_up_to());
                    self.text
                        .push_str(std::str::from_utf8(valid).unwrap_or_default());
                    let Some(invalid) = error.error_len() else {
                        let done = self.pending.len() - after.len();
                        self.pending.drain(..done);
                        return;
                    };
                    self.text.push(char::REPLACEMENT_CHARACTER);
                    rest = &after[invalid..];
                }
            }
        }
    }
}
