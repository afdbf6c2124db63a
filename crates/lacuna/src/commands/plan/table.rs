//! The plan as a table for people.

use std::io::{self, Write};

use anyhow::Result;

use lacuna::plan::{Streamed, WeightSource};

use super::images::Images;
use super::report::{Activations, Device, Draft, Fit, Kv, Placed, Report, Sum, Weights};
use lacuna_cli::output;

/// Prints the report on standard output.
pub(super) fn print(report: &Report<'_>) -> Result<()> {
    output::print(|out| write(out, report))
}

fn write(out: &mut dyn Write, report: &Report<'_>) -> io::Result<()> {
    writeln!(
        out,
        "{} ({}, {} layers): {} x {} tokens of context, {} in one pass, {} of logits",
        report.model,
        report.architecture,
        report.layers,
        report.sequences,
        report.context_tokens,
        report.batch_tokens,
        count(report.logit_rows, "row"),
    )?;
    activations(out, &report.activations)?;
    kv(out, &report.kv)?;
    if let Some(planned) = &report.images {
        images(out, planned)?;
    }
    weights(out, &report.weights, report.residency.residency.source)?;
    residency(out, &report.residency)?;
    if let Some(head) = &report.head {
        writeln!(
            out,
            "\nhead that guesses: {} of the weights, {} of activations; {} of KV pages for each token, as far as they are left",
            size(head.weight_bytes),
            size(head.activation_bytes),
            size(head.kv_bytes_per_token as u64),
        )?;
    }
    if let Some(model) = &report.draft {
        draft(out, model)?;
    }
    if let Some(computes) = &report.device {
        device(out, computes)?;
    }
    totals(out, &report.empty, &report.full)?;
    writeln!(
        out,
        "\nwhile a server holds replies to schemas or grammars: {} of tables, which KV pages and read weights make room for",
        size(report.constraint_bytes),
    )?;
    if let Some(fit) = &report.budget {
        budget(out, fit)?;
    }
    Ok(())
}

fn images(out: &mut dyn Write, planned: &Images) -> io::Result<()> {
    writeln!(
        out,
        "\nimages: {} takes one arena of {} while it encodes each picture; {} and {} of KV for all",
        planned.encoder,
        size(planned.arena_bytes as u64),
        count(planned.tokens, "token"),
        size(planned.kv_bytes as u64)
    )?;
    writeln!(
        out,
        "  {:<24}{:>14}{:>15}{:>10}{:>9}{:>8}{:>12}",
        "image", "pixels", "preprocessing", "pictures", "patches", "tokens", "KV"
    )?;
    for image in &planned.images {
        writeln!(
            out,
            "  {:<24}{:>14}{:>15}{:>10}{:>9}{:>8}{:>12}",
            image.image,
            format!("{} x {}", image.width, image.height),
            size(image.preprocessing_bytes),
            image.pictures,
            image.patches,
            image.tokens,
            size(image.kv_bytes as u64)
        )?;
    }
    Ok(())
}

fn activations(out: &mut dyn Write, arena: &Activations) -> io::Result<()> {
    writeln!(
        out,
        "\nactivations: one arena of {} ({} B); its buffers side by side would take {}",
        size(arena.bytes as u64),
        arena.bytes,
        size(arena.unshared_bytes as u64)
    )?;
    writeln!(
        out,
        "  {:<27}{:>16} {:<4}{:>12}{:>13}  lifetime",
        "buffer", "shape", "type", "bytes", "offset"
    )?;
    for buffer in &arena.buffers {
        let [rows, width] = buffer.shape;
        writeln!(
            out,
            "  {:<27}{:>16} {:<4}{:>12}{:>13}  {} to {}",
            buffer.buffer,
            format!("{rows} x {width}"),
            buffer.r#type,
            buffer.bytes,
            format!("{:#x}", buffer.offset),
            buffer.first_step,
            buffer.last_step
        )?;
    }
    Ok(())
}

fn kv(out: &mut dyn Write, kv: &Kv) -> io::Result<()> {
    writeln!(
        out,
        "\nKV cache: {}, K {}, V {}; {} B per token; {} of {} B pages; {} reserved",
        kv.policy,
        kv.key_type,
        kv.value_type,
        kv.bytes_per_token,
        count(kv.buffers, "buffer"),
        kv.page_bytes,
        size(kv.reserved_bytes)
    )?;
    if kv.state_bytes > 0 {
        writeln!(
            out,
            "  states: {} B ({}) for each sequence, whatever its length",
            kv.state_bytes,
            size(kv.state_bytes as u64)
        )?;
        writeln!(
            out,
            "  {} more while tokens of it are guessed (`--speculate`), where they are there",
            size(kv.guessing_state_bytes as u64)
        )?;
    }
    if let Some(points) = &kv.resume_points {
        writeln!(
            out,
            "  a resume point in the prefix cache takes {} and pays from {} on",
            size(points.bytes),
            count(points.every_tokens, "token")
        )?;
    }
    writeln!(
        out,
        "  {:>12}{:>20}{:>20}",
        "tokens", "rows, B", "committed, B"
    )?;
    for row in &kv.committed {
        writeln!(
            out,
            "  {:>12}{:>18}{:>18}{:>18}  {}",
            row.tokens,
            row.row_bytes,
            row.committed_bytes,
            row.peak_bytes,
            size(row.committed_bytes)
        )?;
    }
    Ok(())
}

fn weights(out: &mut dyn Write, weights: &Weights, source: WeightSource) -> io::Result<()> {
    let had = match source {
        WeightSource::Mmap => "mapped from the file",
        WeightSource::Pread | WeightSource::Direct => "read from the file",
    };
    writeln!(
        out,
        "\nweights: {}, {had}; norms and biases are copied, {}",
        size(weights.bytes),
        size(weights.copied_bytes)
    )?;
    if weights.converted_bytes > 0 {
        writeln!(
            out,
            "  and {} of memory, converted from what the file has",
            size(weights.converted_bytes)
        )?;
    }
    if weights.derived_bytes > 0 {
        writeln!(
            out,
            "  matrices that make keys are turned round when loaded, {} of memory",
            size(weights.derived_bytes)
        )?;
    }
    writeln!(
        out,
        "  a token reads {} and is multiplied with {:.1} M of {:.1} M parameters",
        size(weights.active_bytes),
        weights.active_parameters as f64 / 1e6,
        weights.parameters as f64 / 1e6
    )?;
    for row in &weights.types {
        writeln!(
            out,
            "  {:<8}{:>12}{:>20} B  {}{}",
            output::name(&row.r#type),
            count(row.tensors, "tensor"),
            row.bytes,
            size(row.bytes),
            output::converted(row.converted_from)
        )?;
    }
    Ok(())
}

/// What is in memory and what is not, where weights are read.
fn residency(out: &mut dyn Write, placed: &Placed) -> io::Result<()> {
    let held = &placed.residency;
    if held.is_mapped() {
        return Ok(());
    }
    writeln!(
        out,
        "\nweights in memory: {} stay, {} for those that are read for each pass, {} for rows of tables",
        size(held.pinned_bytes),
        size(held.ring_bytes),
        size(held.row_bytes)
    )?;
    let total = held.streamed_bytes;
    if total > 0 {
        writeln!(
            out,
            "  each pass reads {} ({total} B), {} matrices: {}",
            size(total),
            held.streamed.len(),
            names(&held.streamed)
        )?;
    }
    if !held.tables.is_empty() {
        writeln!(out, "  each token reads a row of: {}", names(&held.tables))?;
    }
    if let (Some(slots), Some(forecast)) = (&held.experts, &placed.expert_forecast) {
        writeln!(
            out,
            "  experts: {} of {} in each of {} layers, {}; of a token's {} {:.1} % are found there by {}, and {} are read",
            slots.slots,
            slots.experts,
            slots.layers,
            size(slots.bytes),
            slots.used * slots.layers,
            100.0 * forecast.hit_rate,
            forecast.from,
            size(forecast.read_bytes_per_token)
        )?;
        if let Some(finding) = forecast.finding {
            writeln!(out, "  {finding}")?;
        }
    }
    if let Some(slots) = &held.neurons {
        writeln!(
            out,
            "  neurons: {} of {} in each of {} blocks, {}, and {} beside them; those of all blocks are {}",
            slots.slots,
            slots.neurons,
            slots.layers,
            size(slots.bytes),
            size(slots.fixed_bytes),
            size(slots.neuron_bytes)
        )?;
    }
    if let Some(rate) = placed.tokens_per_second {
        writeln!(out, "  at those rates {rate:.2} tokens a second at most")?;
    }
    let Some(full) = placed.by_tokens.last() else {
        return Ok(());
    };
    if full.streamed_bytes > total {
        writeln!(
            out,
            "  with full contexts {} stay, and each pass reads {} ({} B)",
            size(full.pinned_bytes),
            size(full.streamed_bytes),
            full.streamed_bytes
        )?;
    }
    if let Some(rate) = full.tokens_per_second {
        writeln!(
            out,
            "  and {rate:.2} tokens a second at most when contexts are full"
        )?;
    }
    Ok(())
}

fn draft(out: &mut dyn Write, draft: &Draft) -> io::Result<()> {
    writeln!(
        out,
        "\ndraft model {}: {} loaded, {} of activations, {} mapped; {} of KV pages when contexts are full, as far as they are left",
        output::name(&draft.model),
        size(draft.memory.loaded_bytes),
        size(draft.memory.activation_bytes),
        size(draft.memory.mapped_bytes),
        size(draft.kv_bytes),
    )
}

fn device(out: &mut dyn Write, device: &Device) -> io::Result<()> {
    writeln!(
        out,
        "\non {}: {} of {} and the output; {} of weights, {} of activations, {} copied through, {} of KV pages when contexts are full",
        output::name(&device.name),
        device.layers,
        count(device.layers + device.host_layers, "layer"),
        size(device.weight_bytes),
        size(device.activation_bytes),
        size(device.staging_bytes),
        size(device.kv_bytes),
    )?;
    if let Some(most) = device.most_kv_bytes {
        writeln!(
            out,
            "  its memory is full with {} of KV pages in all",
            size(most)
        )?;
    }
    Ok(())
}

/// The first of them; `--json` has all.
fn names(of: &[Streamed]) -> String {
    const SHOWN: usize = 6;
    let names: Vec<&str> = of.iter().take(SHOWN).map(|it| &*it.name).collect();
    let more = if of.len() > SHOWN { " ..." } else { "" };
    names.join(" ") + more
}

fn totals(out: &mut dyn Write, empty: &Sum, full: &Sum) -> io::Result<()> {
    writeln!(
        out,
        "\n{:<20}{:>12}{:>16}",
        "total", "empty", "context full"
    )?;
    for (name, part) in PARTS {
        let (empty, full) = (size(part(empty)), size(part(full)));
        writeln!(out, "  {name:<18}{empty:>12}{full:>16}")?;
    }
    Ok(())
}

/// A number of a total.
type Part = fn(&Sum) -> u64;

/// What makes up a total, and the total.
const PARTS: [(&str, Part); 15] = [
    ("program", |sum| sum.parts.program_bytes),
    ("vocabulary", |sum| sum.parts.vocabulary_bytes),
    ("threads", |sum| sum.parts.thread_bytes),
    ("sampling", |sum| sum.parts.sampling_bytes),
    ("copied weights", |sum| sum.parts.copied_weight_bytes),
    ("converted weights", |sum| sum.parts.converted_weight_bytes),
    ("read weights", |sum| sum.parts.read_weight_bytes),
    ("draft model", |sum| sum.parts.draft_bytes),
    ("activations", |sum| sum.parts.activation_bytes),
    ("device", |sum| sum.parts.device_bytes),
    ("requests", |sum| sum.parts.request_bytes),
    ("KV cache", |sum| sum.parts.kv_bytes),
    ("committed", |sum| sum.bytes),
    ("peak", |sum| sum.peak_bytes),
    ("mapped weights", |sum| sum.mapped_weight_bytes),
];

fn budget(out: &mut dyn Write, fit: &Fit) -> io::Result<()> {
    let budget = size(fit.bytes);
    if let Some(divided) = &fit.parts {
        writeln!(out, "\nof {budget}: {}", divided.parts)?;
    }
    if fit.fits {
        writeln!(out, "\nfits {budget}: {} to spare", size(fit.spare_bytes))?;
    } else {
        let excess = size(fit.excess_bytes);
        writeln!(out, "\ndoes not fit {budget}: {excess} too much")?;
    }
    Ok(())
}

fn size(bytes: u64) -> String {
    output::bytes(bytes)
}

fn count(number: usize, what: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{number} {what}{plural}")
}
