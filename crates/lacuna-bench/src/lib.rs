//! `lacuna bench`: what this machine makes of the work, measured and not estimated.
#![forbid(unsafe_code)]
#![deny(clippy::print_stdout, clippy::print_stderr)] // `lacuna_cli::output` prints

mod agent;
mod arguments;
mod embed;
mod experts;
mod images;
mod kernels;
mod kv;
mod limits;
mod loading;
mod machine;
mod pages;
mod plot;
mod samples;
mod serve;
mod speculate;
mod speed;

use anyhow::Result;
use lacuna_engine::EngineConfig;
use lacuna_kernels::Cpu;

pub use arguments::BenchArgs;
use arguments::BenchCommand;

/// Measures what the arguments ask for, and prints it.
///
/// # Errors
/// What stands in the way of the measurement, or, for `soak`, a promise that did not hold.
pub fn run(args: &BenchArgs) -> Result<()> {
    match &args.command {
        BenchCommand::Pages(args) => pages::run(args),
        BenchCommand::Serve(args) => serve::run(args),
        BenchCommand::Agent(args) => agent::run(args),
        BenchCommand::Soak(args) => serve::soak::run(args),
        BenchCommand::Speed(args) => speed::run(args),
        BenchCommand::Speculate(args) => speculate::run(args),
        BenchCommand::Embed(args) => embed::run(args),
        BenchCommand::Images(args) => images::run(args),
        BenchCommand::Experts(args) => experts::run(args),
        BenchCommand::Kernels(args) => kernels::run(args),
        BenchCommand::Loading(args) => loading::run(args),
        BenchCommand::LoadingCell(args) => loading::run_cell(args),
        BenchCommand::Memory(args) => kv::memory::run(args),
        BenchCommand::Growth(args) => kv::growth::run(args),
        BenchCommand::Batch(args) => kv::batch::run(args),
        BenchCommand::Prefix(args) => kv::prefix::run(args),
    }
}

/// The processor, with as many threads as an engine would use.
fn processor(config: &EngineConfig) -> Result<Cpu> {
    Ok(Cpu::new(config.cpu()?)?)
}
