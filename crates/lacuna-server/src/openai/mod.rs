//! The interface of OpenAI: what requests may say and what replies look like.
//!
//! Fields are of three kinds. Those that mean something are read and checked. Those that only tell
//! OpenAI's own service something are accepted and do nothing ([`parameters::IGNORED`]). Everything
//! else is refused by name, so that nobody believes in a setting that is not there.

pub(crate) mod chat;
pub(crate) mod completion;
pub(crate) mod events;
pub(crate) mod logprobs;
pub(crate) mod messages;
pub(crate) mod models;
pub(crate) mod parameters;
pub(crate) mod reply;
pub(crate) mod tokens;
