//! What can go wrong with a vocabulary or a text, with what to do about it.

use thiserror::Error;

/// A tokenizer could not be built, or could not encode or decode.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// The algorithm is one this crate does not run.
    #[error(
        "the tokenizer algorithm \"{model}\" is not supported; byte-level BPE (\"gpt2\"), SentencePiece's \
         BPE (\"llama\") and unigram model (\"t5\"), and WordPiece (\"bert\") are: convert the model from a \
         release that uses one of them"
    )]
    UnsupportedModel {
        /// The algorithm's name in the file.
        model: String,
    },

    /// The pre-tokenizer's name is not in the table.
    #[error(
        "unknown pre-tokenizer \"{name}\": guessing would split text wrongly and silently; known \
         are {}", known.join(", ")
    )]
    UnknownPreTokenizer {
        /// The name in the file.
        name: String,
        /// Every name of the table, in its order.
        known: Vec<&'static str>,
    },

    /// A component of `tokenizer.json` is of a kind this crate does not run.
    #[error("tokenizer.json: the {part} \"{kind}\" is not supported")]
    UnsupportedPart {
        /// `normalizer`, `pre_tokenizer`, `decoder`, `post_processor` or a model option.
        part: &'static str,
        /// Its type in the file.
        kind: String,
    },

    /// GGUF has no form for a part of the tokenizer.
    #[error("GGUF files cannot say what this tokenizer's {part} is, as far as is known here")]
    Inexpressible {
        /// Which.
        part: &'static str,
    },

    /// The vocabulary contradicts itself.
    #[error("the vocabulary is not usable: {0}")]
    Vocabulary(#[from] VocabularyError),

    /// A file is not the JSON it should be.
    #[error("{file} cannot be read as a tokenizer file: {source}")]
    Json {
        /// The file's name.
        file: &'static str,
        /// Where and why.
        source: serde_json::Error,
    },

    /// A file could not be read.
    #[error("cannot read {path}: {source}")]
    Io {
        /// The file.
        path: std::path::PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },

    /// A file cannot be opened, or is none that has contents of its own.
    #[error(transparent)]
    File(#[from] lacuna_files::MappingError),

    /// An entry of GGUF metadata is missing or of the wrong type.
    #[error(transparent)]
    Metadata(#[from] lacuna_files::gguf::Error),

    /// A file was lost while it was read.
    #[error(transparent)]
    Lost(#[from] lacuna_files::LostFile),

    /// A component was rejected by its library.
    #[error("tokenizer.json: the {part} cannot be used: {detail}")]
    Part {
        /// The component.
        part: &'static str,
        /// The library's reason.
        detail: String,
    },

    /// A split pattern gave up on this text.
    #[error(
        "the pre-tokenizer gave up on this text ({detail}); send it in smaller parts, or use a \
         model whose split pattern does not backtrack"
    )]
    PreTokenizer {
        /// The library's reason.
        detail: String,
    },

    /// The text is longer than so many tokens can be.
    #[error(
        "the text has {bytes} bytes, more than the {limit} that a context of {tokens} tokens can hold: shorten it"
    )]
    TooLong {
        /// Bytes of the text.
        bytes: usize,
        /// Bytes at most.
        limit: usize,
        /// Tokens at most.
        tokens: usize,
    },

    /// The text has more tokens than asked for at most.
    #[error("the text has more than {limit} tokens: shorten it")]
    TooManyTokens {
        /// Tokens at most.
        limit: usize,
    },

    /// A part of the text can only be tokenized as a whole, and is too long for the memory there is.
    #[error(
        "the text has {bytes} bytes in a row that can only be tokenized together, more than the {limit} \
         that there is memory for: divide it by spaces or line breaks"
    )]
    Unbroken {
        /// Bytes in a row.
        bytes: usize,
        /// Bytes at most.
        limit: usize,
    },

    /// A step of `tokenizer.json` makes much more of a text than it was.
    #[error(
        "tokenizer.json: {step} would make {bytes} bytes of a text, more than the {limit} that any \
         text needs; the file is broken or hostile"
    )]
    Growth {
        /// Which step.
        step: String,
        /// Bytes it would come to.
        bytes: usize,
        /// Bytes at most.
        limit: usize,
    },

    /// The text holds something the vocabulary has no token for.
    #[error(
        "the vocabulary has no token for part of {text:?} and no unknown token: remove those \
         characters or use a model whose vocabulary covers them"
    )]
    Unencodable {
        /// The start of the word in question.
        text: String,
    },

    /// A token id is not in the vocabulary.
    #[error("token id {id} is out of range: the vocabulary has {size} tokens")]
    IdOutOfRange {
        /// The id.
        id: u32,
        /// One more than the largest id.
        size: u32,
    },

    /// The system refuses memory for the vocabulary or a text.
    #[error("there is not enough memory for the vocabulary or the text: {0}")]
    OutOfMemory(#[from] std::collections::TryReserveError),
}

/// How a vocabulary contradicts itself.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum VocabularyError {
    /// No tokens at all.
    #[error("it is empty")]
    Empty,

    /// More tokens than ids.
    #[error("it has {count} tokens, more than the {limit} this crate accepts")]
    TooLarge {
        /// Tokens in the file.
        count: usize,
        /// The limit.
        limit: usize,
    },

    /// A parallel array has another length than the tokens.
    #[error("{what} has {found} entries for {tokens} tokens")]
    Length {
        /// `scores` or `token_types`.
        what: &'static str,
        /// Entries in the array.
        found: usize,
        /// Tokens in the vocabulary.
        tokens: usize,
    },

    /// A merge is not two tokens.
    #[error("merge {index} ({merge:?}) is not two tokens separated by a space")]
    MergeForm {
        /// Position in the list.
        index: usize,
        /// Its start.
        merge: String,
    },

    /// A merge names a token the vocabulary lacks.
    #[error("merge {index} needs the token {token:?}, which the vocabulary lacks")]
    MergeToken {
        /// Position in the list.
        index: usize,
        /// The missing token's start.
        token: String,
    },

    /// A byte-level vocabulary comes without merges.
    #[error("a byte-level BPE vocabulary needs its list of merges, and there is none")]
    NoMerges,

    /// A score is not a number.
    #[error("the score of token {id} is not a number")]
    Score {
        /// The token.
        id: usize,
    },

    /// A special token's id is not in the vocabulary.
    #[error("{role} is {id}, but the vocabulary has {tokens} tokens")]
    SpecialOutOfRange {
        /// Which one: `bos_token_id` and so on.
        role: &'static str,
        /// The id.
        id: u32,
        /// Tokens in the vocabulary.
        tokens: usize,
    },

    /// The file asks for a token it does not name.
    #[error("{flag} is set, but {role} is not")]
    SpecialMissing {
        /// The flag.
        flag: &'static str,
        /// The missing id.
        role: &'static str,
    },

    /// An id is far beyond the number of tokens.
    #[error("token {token:?} has id {id}, far beyond the {tokens} tokens of the vocabulary")]
    IdGap {
        /// The token's start.
        token: String,
        /// Its id.
        id: u32,
        /// Tokens in the vocabulary.
        tokens: usize,
    },

    /// The library that matches special tokens rejected them.
    #[error("its special tokens cannot be matched: {detail}")]
    Special {
        /// The library's reason.
        detail: String,
    },

    /// The system refuses memory for it.
    #[error("there is not enough memory for it: {0}")]
    OutOfMemory(#[from] std::collections::TryReserveError),
}

/// The start of a string from a file, short enough for a message.
pub(super) fn excerpt(text: &str) -> String {
    const LIMIT: usize = 48;
    match text.char_indices().nth(LIMIT) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}
