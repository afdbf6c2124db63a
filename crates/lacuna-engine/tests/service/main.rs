//! The service as its clients see it, on the demo model.

mod equality;
mod support;
