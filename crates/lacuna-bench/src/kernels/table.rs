//! The report as a table.

use std::io::{self, Write};

use super::{Limit, Report, Row};
use crate::machine::floats;

pub(super) fn print(out: &mut dyn Write, report: &Report) -> io::Result<()> {
    writeln!(out, "{}", report.machine.line())?;
    writeln!(
        out,
        "{} threads, {}, floats in {}",
        report.threads,
        report.level,
        floats(report.matmul_precision, report.precision_in_tiles)
    )?;
    let limits = &report.limits;
    for (name, rate, unit) in [
        ("memory read", limits.read_gb_per_s, "GB/s"),
        (
            "8-bit products, summed in 32 bits",
            limits.int8_gmac_per_s,
            "GMAC/s",
        ),
        ("f32 multiply-adds", limits.f32_gmac_per_s, "GMAC/s"),
        ("bf16 products", limits.bf16_gmac_per_s, "GMAC/s"),
    ] {
        if let Some(rate) = rate {
            writeln!(out, "limit: {name} {rate:.1} {unit}")?;
        }
    }
    writeln!(
        out,
        "\n{:<16}{:>9}{:>13}{:>8}{:>12}{:>8}{:>9}  of limit",
        "kernel", "type", "shape", "tokens", "us", "GB/s", "GMAC/s"
    )?;
    for row in &report.kernels {
        writeln!(out, "{}", line(row))?;
    }
    Ok(())
}

fn line(row: &Row) -> String {
    let number = |value: Option<f64>| value.map_or("-".into(), |value| format!("{value:.1}"));
    let measured = &row.measured;
    format!(
        "{:<16}{:>9}{:>13}{:>8}{:>12.2}{:>8}{:>9}  {}",
        row.kernel.name(),
        row.storage.unwrap_or("-"),
        row.shape.as_deref().unwrap_or("-"),
        row.tokens.map_or("-".into(), |tokens| tokens.to_string()),
        measured.time_us,
        number(measured.gb_per_s),
        number(measured.gmac_per_s),
        measured
            .limit
            .zip(measured.of_limit)
            .map_or("-".into(), part),
    )
}

fn part((limit, share): (Limit, f64)) -> String {
    let name = match limit {
        Limit::Read => "memory",
        Limit::Int8 => "int8",
        Limit::F32 => "f32",
        Limit::Bf16 => "bf16",
    };
    format!("{:.0}% {name}", share * 100.0)
}
