//! Tokenizers: what they do, what others say they should do, and what loading costs.

#![expect(
    clippy::unwrap_used,
    reason = "a test whose tokenizer is not built has failed"
)]

mod behaviour;
mod limits;
mod load;
mod metadata;
mod reference;
mod vocabulary;
