//! The substrate's tests: one crate, so that they share devices and helpers.

mod conformance;
mod faults;

mod growth;

mod support;
