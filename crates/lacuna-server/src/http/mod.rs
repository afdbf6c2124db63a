//! What is the same for every endpoint: connections, access, bodies, errors, routes.

mod absent;
pub(crate) mod access;
pub(crate) mod account;
pub(crate) mod body;
pub(crate) mod connections;
pub(crate) mod doors;
pub(crate) mod error;
pub(crate) mod extent;
pub(crate) mod ignored;
pub(crate) mod log;
mod peer;
pub(crate) mod probes;
pub(crate) mod routes;
mod socket;
pub(crate) mod tls;
mod wording;
