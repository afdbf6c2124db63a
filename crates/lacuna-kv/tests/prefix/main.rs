//! The prefix cache: its tree against a naive list, and its pages against computed rows.

mod model;
mod pages;
