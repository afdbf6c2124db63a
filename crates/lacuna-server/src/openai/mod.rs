//! The interface of OpenAI: what requests may say and what replies look like.
//!
//! Fields are of three kinds. Those that mean something are read and checked. Those that mean
//! something elsewhere have no effect, and are refused by name where that would change the reply
//! ([`fields`]). All others are ignored, and the response says which
//! ([`crate::http::ignored::Ignored`]), so that nobody believes in a setting that is not there.

pub(crate) mod chat;
mod chunks;
pub(crate) mod completion;
pub(crate) mod fields;
pub(crate) mod logprobs;
pub(crate) mod messages;
pub(crate) mod models;
pub(crate) mod parameters;
mod prompts;
pub(crate) mod reply;
pub(crate) mod responses;
pub(crate) mod tokens;
