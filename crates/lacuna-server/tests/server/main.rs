//! The server over a real socket, with the demo model.

mod access;
mod endpoints;
mod limits;
mod refusals;
mod streams;
mod structured;
mod support;
