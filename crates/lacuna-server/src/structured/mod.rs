//! Replies that conform: JSON of a schema, sentences of a grammar, and calls of tools, by masking tokens as they
//! are drawn.
//!
//! [`Format`] is what requests say of it. [`Rule`] says what a reply must be, [`grammar`] writes that down for `llguidance`, and
//! [`Grammars`] makes the engine's [`lacuna_engine::Constraint`] of it. Compiling and masking are
//! bounded; a schema beyond the bounds is refused.

pub(crate) mod calls;
mod constraint;
mod format;
mod gbnf;
mod grammar;
mod native;
mod schema;
mod thoughts;
pub(crate) mod tools;
mod vocabulary;

pub(crate) use constraint::Grammars;
pub(crate) use format::Format;
pub(crate) use grammar::Rule;
