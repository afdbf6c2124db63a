//! Sequences over real pages, under every policy.

mod model;
mod sharing;
mod steps;
mod support;
