//! The report as tables.

use std::io::{self, Write};

use super::Report;
use super::decode::Decode;
use super::growth::{Grown, Growth};
use super::operations::Costs;
use super::reading::Reading;
use crate::samples::Timing;
use lacuna_cli::output;

pub(super) fn print(out: &mut dyn Write, report: &Report) -> io::Result<()> {
    writeln!(out, "{}", report.machine.line())?;
    operations(out, &report.operations)?;
    decode(out, &report.decode)?;
    growth(out, &report.growth)?;
    if let Some(reading) = &report.reading {
        read(out, reading)?;
    }
    Ok(())
}

fn operations(out: &mut dyn Write, rows: &[Costs]) -> io::Result<()> {
    writeln!(
        out,
        "\nmicroseconds per page, one page a call: median / 99th percentile"
    )?;
    writeln!(
        out,
        "{:<8}{:>15}{:>15}{:>13}{:>13}{:>13}{:>15}{:>13}{:>13}",
        "page",
        "commit+map",
        "map recycled",
        "share",
        "share by 16",
        "unmap",
        "copy on write",
        "seal",
        "give back"
    )?;
    for row in rows {
        writeln!(
            out,
            "{:<8}{:>15}{:>15}{:>13}{:>13}{:>13}{:>15}{:>13}{:>13}",
            size(row.page_bytes),
            cell(row.commit_and_map),
            cell(row.map_recycled),
            cell(row.share),
            cell(row.share_run_of_16),
            cell(row.unmap),
            cell(row.copy_on_write),
            cell(row.seal),
            cell(row.give_back)
        )?;
    }
    Ok(())
}

/// A size of which only whole units are written out whole: `64 KiB`, `2.5 MiB`.
fn size(bytes: u64) -> String {
    output::bytes(bytes).replace(".0 ", " ")
}

fn cell(timing: Option<Timing>) -> String {
    timing.map_or_else(
        || "-".to_owned(),
        |timing| format!("{} / {}", micros(timing.median_us), micros(timing.p99_us)),
    )
}

/// Two figures at least, and no more than the clock can tell.
fn micros(value: f64) -> String {
    let digits = if value < 10.0 { 1 } else { 0 };
    format!("{value:.digits$}")
}

fn decode(out: &mut dyn Write, decode: &Decode) -> io::Result<()> {
    writeln!(
        out,
        "\ndecoding {} tokens on {} layers: {} buffers, {} rows, {} pages (counted on {} pages)",
        decode.tokens,
        decode.layers,
        decode.buffers,
        size(decode.row_bytes as u64),
        size(decode.page_bytes),
        size(decode.counted_page_bytes)
    )?;
    writeln!(
        out,
        "  per 1,000 tokens: {:.1} batches, {:.0} map operations, {:.0} pages",
        decode.batches_per_1000_tokens,
        decode.map_operations_per_1000_tokens,
        decode.pages_per_1000_tokens
    )?;
    write!(
        out,
        "  mappings at the end: {} by the ledger",
        decode.mappings
    )?;
    if let (Some(kernel), Some(limit)) = (decode.kernel_mappings, decode.kernel_mapping_limit) {
        let part = kernel as f64 * 100.0 / limit as f64;
        write!(out, ", {kernel} by the kernel ({part:.1} % of {limit})")?;
    }
    writeln!(out)?;
    writeln!(
        out,
        "  step at a page boundary {} us, any other {} us",
        cell(decode.step_at_boundary),
        cell(decode.step_between)
    )?;
    Ok(())
}

fn growth(out: &mut dyn Write, growth: &Growth) -> io::Result<()> {
    writeln!(
        out,
        "\ngrowing {} buffers (K and V of one layer), {} rows, room reserved for {} tokens",
        growth.buffers,
        size(growth.row_bytes as u64),
        growth.context_tokens
    )?;
    writeln!(
        out,
        "{:>14}{:>36}{:>36}",
        "", "by mapping", "by copying into twice the room"
    )?;
    let heads = ["total ms", "longest us", "peak"];
    let [total, longest, peak] = heads;
    writeln!(
        out,
        "{:>8}      {total:>12}{longest:>12}{peak:>12}{total:>12}{longest:>12}{peak:>12}",
        "tokens"
    )?;
    for lengths in &growth.lengths {
        let mapping = lengths
            .mapping
            .map_or_else(|| format!("{:>36}", "-"), grown);
        writeln!(
            out,
            "{:>8}      {mapping}{}",
            lengths.tokens,
            grown(lengths.copying)
        )?;
    }
    Ok(())
}

fn grown(grown: Grown) -> String {
    let Grown {
        total_ms,
        longest_step_us,
        peak_bytes,
    } = grown;
    format!(
        "{total_ms:>12.1}{longest_step_us:>12.0}{:>12}",
        size(peak_bytes)
    )
}

fn read(out: &mut dyn Write, reading: &Reading) -> io::Result<()> {
    let order = if reading.scattered {
        "scattered"
    } else {
        "ordered"
    };
    let bytes = size(reading.bytes as u64);
    writeln!(
        out,
        "\nreading {bytes}, one thread, median of {} alternating reads",
        reading.reads
    )?;
    write!(out, "  {:.1} GB/s over {order} ", reading.pages_gb_per_s)?;
    write!(out, "{} pages, ", size(reading.page_bytes))?;
    write!(
        out,
        "{:.1} GB/s over one allocation",
        reading.huge_array_gb_per_s
    )?;
    if let Some(huge) = reading.huge_page_bytes {
        write!(
            out,
            " ({:.0} % in huge pages)",
            huge as f64 * 100.0 / reading.bytes as f64
        )?;
    }
    writeln!(out, ": {:.1} %", reading.ratio * 100.0)?;
    Ok(())
}
