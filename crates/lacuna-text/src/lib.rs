//! Text and the tokens of a model: tokenizers ([`tokenizer`]), chat templates ([`template`]) and the
//! formats that replies come in ([`reply`]).
//!
//! Whatever a model's files or a client's messages say is bounded in time and memory, and is an error
//! where it cannot be followed exactly.
#![forbid(unsafe_code)]

pub mod reply;
pub mod template;
pub mod tokenizer;
