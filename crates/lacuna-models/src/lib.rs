//! Model files, tokenizers and architectures.

pub mod tokenizer;
