//! `lacuna logits`: rows of logits, for checking against other engines.

use std::io::{self, Write};

use anyhow::Result;
use lacuna::KvReport;
use serde::Serialize;

use crate::cli::LogitsArgs;
use crate::commands::engine;
use lacuna_cli::output;

#[derive(Serialize)]
struct Report {
    tokens: Vec<u32>,
    logits: Vec<Vec<f32>>,
}

pub(crate) fn run(args: &LogitsArgs) -> Result<()> {
    let config = args.device.set(args.engine.config().scoring())?;
    let mut engine = engine(&args.model, config)?;
    let last = args.tokens.len() - 1;
    let mut logits = Vec::new();
    let _: KvReport = engine.score(&args.tokens, |position, row| {
        if args.all || position == last {
            logits.push(row.to_vec());
        }
    })?;
    if args.model.json {
        return output::json(&Report {
            tokens: args.tokens.clone(),
            logits,
        });
    }
    let first = args.tokens.len() - logits.len();
    output::print(|out| {
        for (position, row) in (first..).zip(&logits) {
            print_row(out, position, row, engine.model().tokenizer())?;
        }
        Ok(())
    })
}

/// The ten likeliest continuations of one position.
fn print_row(
    out: &mut dyn Write,
    position: usize,
    row: &[f32],
    tokenizer: &lacuna::Tokenizer,
) -> io::Result<()> {
    writeln!(
        out,
        "after position {position}, {} logits; the highest:",
        row.len()
    )?;
    let mut order: Vec<usize> = (0..row.len()).collect();
    order.sort_by(|&a, &b| row[b].total_cmp(&row[a]));
    for token in order.into_iter().take(10) {
        let id = u32::try_from(token).expect("a vocabulary fits u32");
        let text = tokenizer.token_text(id).unwrap_or_default();
        writeln!(out, "{token:>8}  {:>10.4}  {text:?}", row[token])?;
    }
    Ok(())
}
