//! The `lacuna` command.
#![deny(clippy::print_stdout, clippy::print_stderr)] // `lacuna_cli::output` prints

mod cli;
mod commands;
#[cfg(unix)]
mod refusals;

use std::process::ExitCode;

use clap::Parser;
use lacuna_cli::output;

use crate::cli::{Cli, Command};

fn main() -> ExitCode {
    lacuna_pages::return_large_blocks();
    #[cfg(unix)]
    refusals::prepare();
    let command = match Cli::try_parse() {
        Ok(cli) => cli.command,
        Err(error) => return output::usage(&error),
    };
    let done = match command {
        Command::Run(args) => commands::run::run(&args),
        Command::Embed(args) => commands::embed::run(&args),
        Command::Rerank(args) => commands::rerank::run(&args),
        Command::Serve(args) => commands::serve::run(&args),
        Command::Pull(args) => commands::models::pull(&args),
        Command::List(args) => commands::models::list(&args),
        Command::Rm(args) => commands::models::rm(&args),
        Command::Cache(args) => commands::cache::run(&args),
        Command::Sessions(args) => commands::sessions::run(&args),
        Command::Inspect(args) => commands::inspect::run(&args),
        Command::Plan(args) => commands::plan::run(&args),
        Command::Tokenize(args) => commands::tokenize::run(&args),
        Command::Logits(args) => commands::logits::run(&args),
        Command::Perplexity(args) => commands::perplexity::run(&args),
        Command::Quantize(args) => commands::quantize::run(&args),
        Command::FitPredictors(args) => commands::fit_predictors::run(&args),
        Command::Synth(args) => commands::synth::run(&args),
        Command::Bench(args) => lacuna_bench::run(&args),
        Command::Completions(args) => commands::shell::completions(&args),
        Command::Man(args) => commands::shell::man(&args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => output::report(&error),
    }
}
