//! Models on a Vulkan device: against the processor, and against themselves. They need a driver with sparse buffers
//! (`.ci/install-vulkan`), so they run only when asked for (`.ci/test-vulkan`).

mod equality;
mod families;
mod images;
mod made;
mod memories;
mod memory;
mod processor;
mod refusals;
mod split;
mod support;
