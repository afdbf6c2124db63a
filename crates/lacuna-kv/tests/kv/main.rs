//! Sequences over real pages, under every policy.

mod equality;
mod faults;
mod footprints;
mod layers;
mod model;
mod saved;
mod sharing;
mod states;
mod steps;
mod support;
mod swap;
mod windows;
