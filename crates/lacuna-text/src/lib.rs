//! Text and the tokens of a model: tokenizers ([`tokenizer`]) and chat templates ([`template`]).
//!
//! Whatever a model's files or a client's messages say is bounded in time and memory, and is an error
//! where it cannot be followed exactly.
#![forbid(unsafe_code)]

pub mod template;
pub mod tokenizer;
