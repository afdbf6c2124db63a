//! Models that see: rows of images, prompts, and logits after text and images, against the reference implementation, from
//! both kinds of files; and what is refused.

mod passes;
mod prompts;
mod reference;
mod refusals;
#[path = "../runner/mod.rs"]
mod runner;
mod support;
