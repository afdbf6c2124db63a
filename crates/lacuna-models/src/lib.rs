//! Model files, tokenizers and architectures.

pub mod files;
pub mod synth;
