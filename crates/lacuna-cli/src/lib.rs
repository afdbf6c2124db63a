//! What the commands share: arguments, opening a model with progress shown, output, exit codes.
#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)] // `output` prints

mod arguments;
mod bytes;
mod folders;
pub mod markdown;
mod open;
pub mod output;
pub mod resident;

pub use arguments::{
    CpuArgs, DeviceArgs, DeviceName, DraftArgs, EngineArgs, EyesArgs, LayersWithoutDevice,
    ModelArgs, ServiceArgs, SpeculationArgs, UnknownDevice, cache_key,
};
pub use bytes::{ByteCount, NotBytes};
pub use folders::user_folder;
pub use open::{
    Bars, open, open_draft, open_files, open_to_run, open_to_run_files, open_to_run_for,
    record_experts, served_name, warn_of_context, with_draft,
};
