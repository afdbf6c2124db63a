//! What graphics devices have in common: the device's page table as it was queued, batches split into
//! what a queue takes at once, and the words that kernels work on. Pure; the sources of the kernels are
//! in `kernels`, and what each device runs of them is with the device.

pub(crate) mod bindings;
pub(crate) mod phases;
pub(crate) mod words;
