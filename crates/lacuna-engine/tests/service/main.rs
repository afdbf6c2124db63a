//! The service as its clients see it, on the demo model.

mod bounds;
mod equality;
mod memory;
mod namespaces;
mod requests;
mod support;
