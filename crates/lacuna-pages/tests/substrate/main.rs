//! The substrate's tests: one crate, so that they share devices and helpers.
#![expect(
    clippy::unwrap_used,
    reason = "a failed unwrap is a failed test, in helpers too"
)]

#[cfg(any(target_os = "linux", all(feature = "macos", target_os = "macos")))]
mod children;
mod conformance;
mod faults;
#[cfg(target_os = "linux")]
mod files;
#[cfg(all(feature = "macos", target_os = "macos"))]
mod footprint;
#[cfg(target_os = "linux")]
mod geometry;
mod giving_back;
mod growth;
#[cfg(target_os = "linux")]
mod guard;
#[cfg(target_os = "linux")]
mod kernel;
#[cfg(target_os = "linux")]
mod limits;
#[cfg(all(feature = "metal", target_os = "macos"))]
mod metal;
mod misuse;
mod model;
mod queue;
mod split;
mod storm;
mod support;
mod threads;
#[cfg(feature = "vulkan")]
mod vulkan;
