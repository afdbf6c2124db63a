//! The report as text.

use std::io::{self, Write};

use super::{Report, Row};

pub(super) fn print(out: &mut dyn Write, report: &Report) -> io::Result<()> {
    writeln!(out, "{}", report.machine.line())?;
    writeln!(
        out,
        "a prompt of {} tokens and {} generated, each in a fresh process; medians of {}",
        report.prompt_tokens, report.generated_tokens, report.repeats
    )?;
    let mut model = "";
    for row in &report.loading {
        if row.model != model {
            model = &row.model;
            let name = lacuna_cli::output::name(model);
            writeln!(out, "\n{name}, {:.2} GB", gigabytes(row.file_bytes))?;
            writeln!(
                out,
                "{:<8}{:<6}{:>8}{:>13}{:>9}{:>12}{:>11}{:>11}{:>10}{:>11}",
                "weights",
                "cache",
                "load s",
                "1st token s",
                "disk GB",
                "prompt t/s",
                "decode t/s",
                "anon MB",
                "file MB",
                "shared MB"
            )?;
        }
        line(out, row)?;
    }
    model = "";
    for row in &report.kv {
        if row.model != model {
            model = &row.model;
            let name = lacuna_cli::output::name(model);
            writeln!(
                out,
                "\n{name}: KV memory from the start, weights by {}, warm",
                row.weights.name()
            )?;
            writeln!(
                out,
                "{:>7}{:>9}{:>13}{:>12}{:>12}",
                "tokens", "load s", "1st token s", "decode t/s", "KV MB"
            )?;
        }
        writeln!(
            out,
            "{:>7}{:>9.3}{:>13.3}{:>12.2}{:>12.1}",
            row.kv_tokens,
            row.cell.load_s,
            row.cell.first_token_s,
            row.cell.tokens_per_s,
            row.cell.kv_bytes as f64 / 1e6
        )?;
    }
    Ok(())
}

fn line(out: &mut dyn Write, row: &Row) -> io::Result<()> {
    let cell = &row.cell;
    write!(
        out,
        "{:<8}{:<6}{:>8.3}{:>13.3}{:>9.2}{:>12.1}{:>11.2}",
        row.weights.name(),
        row.cache.name(),
        cell.load_s,
        cell.first_token_s,
        gigabytes(cell.disk_bytes),
        cell.prompt_tokens_per_s,
        cell.tokens_per_s
    )?;
    match cell.end {
        None => writeln!(out),
        Some(end) => {
            let megabytes = |bytes: u64| bytes as f64 / 1e6;
            writeln!(
                out,
                "{:>11.1}{:>10.1}{:>11.1}",
                megabytes(end.anonymous_bytes),
                megabytes(end.file_bytes),
                megabytes(end.shared_memory_bytes)
            )
        }
    }
}

fn gigabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e9
}
