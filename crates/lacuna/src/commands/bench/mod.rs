//! `lacuna bench`: what this machine makes of the work, measured and not estimated.

pub(crate) mod kernels;
pub(crate) mod kv;
mod limits;
mod machine;
pub(crate) mod pages;
mod samples;
pub(crate) mod serve;
pub(crate) mod speed;
