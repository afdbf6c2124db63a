//! The service as its clients see it, on the demo model.

mod bounds;
mod equality;
mod experts;
mod folder;
mod latent;
mod limits;
mod memory;
mod namespaces;
mod requests;
mod saved;
mod scoring;
mod sessions;
mod states;
mod support;
mod swap;
mod weights;
mod windows;
