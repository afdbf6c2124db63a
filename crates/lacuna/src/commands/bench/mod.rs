//! `lacuna bench`: what this machine makes of the work, measured and not estimated.

pub(crate) mod kv;
mod machine;
pub(crate) mod pages;
mod samples;
pub(crate) mod speed;
