//! The report as tables.

use std::io::{self, Write};

use lacuna_models::plan::{ExpertSlots, NeuronSlots};

use super::Report;
use crate::machine::floats;

pub(super) fn print(out: &mut dyn Write, report: &Report) -> io::Result<()> {
    writeln!(out, "{}", report.machine.line())?;
    writeln!(
        out,
        "{}: {:.2} GB of weights, {} threads, {}, floats in {}, --kv {}",
        report.model,
        report.weight_bytes as f64 / 1e9,
        report.threads,
        report.level,
        floats(report.matmul_precision, report.precision_in_tiles),
        report.kv_policy
    )?;
    if let Some(device) = &report.device {
        writeln!(out, "on {}", lacuna_cli::output::name(device))?;
    }
    if let Some(rate) = report.limits.device_copy_gb_per_s {
        writeln!(
            out,
            "limit: the device's memory, read and written by copies {rate:.1} GB/s"
        )?;
    }
    if let Some(rate) = report.limits.read_gb_per_s {
        writeln!(out, "limit: memory read {rate:.1} GB/s")?;
    }
    if let Some(rate) = report.limits.int8_gmac_per_s {
        writeln!(out, "limit: 8-bit products {rate:.0} GMAC/s")?;
    }
    if !report.prefill.is_empty() {
        writeln!(
            out,
            "\n{:>8}{:>9}{:>11}{:>9}{:>10}",
            "prompt", "cache", "tokens/s", "GMAC/s", "of limit"
        )?;
    }
    for row in &report.prefill {
        writeln!(
            out,
            "{:>8}{:>9}{:>11.1}{:>9.0}{:>10}",
            row.tokens,
            row.kv_type,
            row.tokens_per_second,
            row.gmac_per_s,
            // Nothing says what products a device reaches.
            row.of_limit
                .map_or("-".to_owned(), |part| format!("{:.0}%", part * 100.0))
        )?;
    }
    if !report.decode.is_empty() {
        writeln!(
            out,
            "\n{:>8}{:>11}{:>12}{:>11}{:>10}{:>8}{:>8}{:>10}",
            "depth", "sequences", "cache", "tokens/s", "step ms", "p99", "GB/s", "of limit"
        )?;
    }
    for row in &report.decode {
        let kv_type = match row.shared {
            true => format!("{}, one", row.kv_type),
            false => row.kv_type.clone(),
        };
        writeln!(
            out,
            "{:>8}{:>11}{:>12}{:>11.1}{:>10.2}{:>8.2}{:>8.1}{:>9.0}%",
            row.depth,
            row.sequences,
            kv_type,
            row.tokens_per_second,
            row.step_ms,
            row.step_p99_ms,
            row.gb_per_s,
            row.of_limit * 100.0
        )?;
    }
    if let Some(slots) = &report.experts {
        experts(out, report, slots)?;
    }
    if let Some(slots) = &report.neurons {
        neurons(out, report, slots)?;
    }
    Ok(())
}

/// What passes needed of neurons.
fn neurons(out: &mut dyn Write, report: &Report, slots: &NeuronSlots) -> io::Result<()> {
    writeln!(
        out,
        "\nneurons: {} of {} in memory, {:.2} GB",
        slots.slots,
        slots.neurons,
        slots.bytes as f64 / 1e9
    )?;
    let prompts = report.prefill.iter();
    let prompts = prompts.map(|row| (format!("prompt {}", row.tokens), &row.neurons));
    let steps = report.decode.iter();
    let steps = steps.map(|row| (format!("depth {}", row.depth), &row.neurons));
    for (what, asked) in prompts.chain(steps) {
        let Some(asked) = asked else {
            continue;
        };
        writeln!(
            out,
            "  {what}: {:.1} % needed, {:.1} % of them found, {:.1} MB read for a token",
            100.0 * asked.active_share.unwrap_or(0.0),
            100.0 * asked.hit_rate.unwrap_or(0.0),
            asked.read_bytes_per_token / 1e6,
        )?;
        if let Some(recall) = asked.recall {
            writeln!(
                out,
                "    {:.1} % of needed ones foretold; of what was read ahead of time {:.1} % needed",
                100.0 * recall,
                100.0 * asked.ahead_share.unwrap_or(0.0),
            )?;
        }
    }
    Ok(())
}

/// What passes found of their experts.
fn experts(out: &mut dyn Write, report: &Report, slots: &ExpertSlots) -> io::Result<()> {
    writeln!(
        out,
        "\nexperts: {} of {} in memory, {:.2} GB",
        slots.slots,
        slots.experts,
        slots.bytes as f64 / 1e9
    )?;
    let prompts = report.prefill.iter();
    let prompts = prompts.map(|row| (format!("prompt {}", row.tokens), &row.experts));
    let steps = report.decode.iter();
    let steps = steps.map(|row| (format!("depth {}", row.depth), &row.experts));
    for (what, asked) in prompts.chain(steps) {
        let Some(asked) = asked else {
            continue;
        };
        let rate = asked.hit_rate.unwrap_or(0.0);
        writeln!(
            out,
            "  {what}: {:.1} % found, {:.1} MB read for a token; {}",
            100.0 * rate,
            asked.read_bytes_per_token / 1e6,
            slots.finding(rate)
        )?;
    }
    Ok(())
}
