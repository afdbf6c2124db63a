//! The report as tables.

use super::Report;
use super::decode::Decode;
use super::growth::{Grown, Growth};
use super::operations::Costs;
use super::reading::Reading;
use crate::samples::Timing;
use lacuna_cli::output;

pub(super) fn print(report: &Report) {
    println!("{}", report.machine.line());
    operations(&report.operations);
    decode(&report.decode);
    growth(&report.growth);
    if let Some(reading) = &report.reading {
        read(reading);
    }
}

fn operations(rows: &[Costs]) {
    println!("\nmicroseconds per page, one page a call: median / 99th percentile");
    println!(
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
    );
    for row in rows {
        println!(
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
        );
    }
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

fn decode(decode: &Decode) {
    println!(
        "\ndecoding {} tokens on {} layers: {} buffers, {} rows, {} pages (counted on {} pages)",
        decode.tokens,
        decode.layers,
        decode.buffers,
        size(decode.row_bytes as u64),
        size(decode.page_bytes),
        size(decode.counted_page_bytes)
    );
    println!(
        "  per 1,000 tokens: {:.1} batches, {:.0} map operations, {:.0} pages",
        decode.batches_per_1000_tokens,
        decode.map_operations_per_1000_tokens,
        decode.pages_per_1000_tokens
    );
    print!("  mappings at the end: {} by the ledger", decode.mappings);
    if let (Some(kernel), Some(limit)) = (decode.kernel_mappings, decode.kernel_mapping_limit) {
        let part = kernel as f64 * 100.0 / limit as f64;
        print!(", {kernel} by the kernel ({part:.1} % of {limit})");
    }
    println!();
    println!(
        "  step at a page boundary {} us, any other {} us",
        cell(decode.step_at_boundary),
        cell(decode.step_between)
    );
}

fn growth(growth: &Growth) {
    println!(
        "\ngrowing {} buffers (K and V of one layer), {} rows, room reserved for {} tokens",
        growth.buffers,
        size(growth.row_bytes as u64),
        growth.context_tokens
    );
    println!(
        "{:>14}{:>36}{:>36}",
        "", "by mapping", "by copying into twice the room"
    );
    let heads = ["total ms", "longest us", "peak"];
    let [total, longest, peak] = heads;
    println!(
        "{:>8}      {total:>12}{longest:>12}{peak:>12}{total:>12}{longest:>12}{peak:>12}",
        "tokens"
    );
    for lengths in &growth.lengths {
        let mapping = lengths
            .mapping
            .map_or_else(|| format!("{:>36}", "-"), grown);
        println!(
            "{:>8}      {mapping}{}",
            lengths.tokens,
            grown(lengths.copying)
        );
    }
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

fn read(reading: &Reading) {
    let order = if reading.scattered {
        "scattered"
    } else {
        "ordered"
    };
    let bytes = size(reading.bytes as u64);
    println!(
        "\nreading {bytes}, one thread, median of {} alternating reads",
        reading.reads
    );
    print!("  {:.1} GB/s over {order} ", reading.pages_gb_per_s);
    print!("{} pages, ", size(reading.page_bytes));
    print!(
        "{:.1} GB/s over one allocation",
        reading.huge_array_gb_per_s
    );
    if let Some(huge) = reading.huge_page_bytes {
        print!(
            " ({:.0} % in huge pages)",
            huge as f64 * 100.0 / reading.bytes as f64
        );
    }
    println!(": {:.1} %", reading.ratio * 100.0);
}
