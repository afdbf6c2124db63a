//! The `lacuna` command.

mod bytes;
mod cli;
mod commands;
mod models;
mod output;
mod resident;

use std::process::ExitCode;

use clap::Parser;

use crate::cli::{BenchCommand, Cli, Command};

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Run(args) => commands::run::run(&args),
        Command::Serve(args) => commands::serve::run(&args),
        Command::Inspect(args) => commands::inspect::run(&args),
        Command::Plan(args) => commands::plan::run(&args),
        Command::Tokenize(args) => commands::tokenize::run(&args),
        Command::Logits(args) => commands::logits::run(&args),
        Command::Perplexity(args) => commands::perplexity::run(&args),
        Command::Synth(args) => commands::synth::run(&args),
        Command::Bench(BenchCommand::Pages(args)) => commands::bench::pages::run(&args),
        Command::Bench(BenchCommand::Serve(args)) => commands::bench::serve::run(&args),
        Command::Bench(BenchCommand::Soak(args)) => commands::bench::serve::soak::run(&args),
        Command::Bench(BenchCommand::Speed(args)) => commands::bench::speed::run(&args),
        Command::Bench(BenchCommand::Kernels(args)) => commands::bench::kernels::run(&args),
        Command::Bench(BenchCommand::Memory(args)) => commands::bench::kv::memory::run(&args),
        Command::Bench(BenchCommand::Growth(args)) => commands::bench::kv::growth::run(&args),
        Command::Bench(BenchCommand::Batch(args)) => commands::bench::kv::batch::run(&args),
        Command::Bench(BenchCommand::Prefix(args)) => commands::bench::kv::prefix::run(&args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => output::report(&error),
    }
}
