//! Replies taken apart: against openai-harmony, on their own, and with whatever comes.

#![expect(
    clippy::unwrap_used,
    reason = "a test whose reply is not read has failed"
)]

mod harmony;
mod support;
mod tagged;
