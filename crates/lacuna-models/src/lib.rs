//! Model files, tokenizers and architectures.

pub mod template;
pub mod tokenizer;
