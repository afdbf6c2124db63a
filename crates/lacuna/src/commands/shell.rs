//! `lacuna completions` and `lacuna man`: the command line, for shells and for `man`.

use std::fs;

use anyhow::{Context, Result};
use clap::{Command, CommandFactory};
use lacuna_cli::output;

use crate::cli::{Cli, CompletionsArgs, ManArgs};

pub(crate) fn completions(args: &CompletionsArgs) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "lacuna", &mut script);
    output::text(&String::from_utf8_lossy(&script))
}

pub(crate) fn man(args: &ManArgs) -> Result<()> {
    let mut command = without_help(Cli::command());
    // Subcommands take over what they have in common, as with `--help`.
    command.build();
    if let Some(folder) = &args.output {
        fs::create_dir_all(folder)
            .and_then(|()| clap_mangen::generate_to(command, folder))
            .with_context(|| format!("cannot write manual pages into `{}`", folder.display()))?;
        return Ok(());
    }
    let mut page = Vec::new();
    clap_mangen::Man::new(command).render(&mut page)?;
    output::text(&String::from_utf8_lossy(&page))
}

/// The same without commands that print the help of others, of which each had a page that says nothing.
fn without_help(command: Command) -> Command {
    command
        .disable_help_subcommand(true)
        .mut_subcommands(without_help)
}
