//! Chat templates: against Jinja2, on their own, and with hostile intent.

#![expect(
    clippy::unwrap_used,
    reason = "a test whose template is not read has failed"
)]

mod behaviour;
mod hostile;
mod marked;
mod reference;
