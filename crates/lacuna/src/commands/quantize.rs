//! `lacuna quantize`: a model as a GGUF file whose weights have another type.

use std::num::NonZeroUsize;
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result};
use lacuna::quantize::Plan;
use serde::Serialize;

use super::{refuse_existing, tidy_when_ended};
use crate::cli::QuantizeArgs;
use lacuna_cli::output;
use lacuna_cli::{Bars, open_files};

#[derive(Serialize)]
struct Report {
    path: String,
    r#type: &'static str,
    /// Of the tensors that were read.
    source_bytes: u64,
    /// Of the file.
    bytes: u64,
    /// What it holds, largest first.
    tensors: Vec<Total>,
    /// Tensors that had been quantized before.
    requantized: usize,
    seconds: f64,
}

#[derive(Serialize)]
struct Total {
    r#type: String,
    tensors: usize,
    bytes: u64,
}

pub(crate) fn run(args: &QuantizeArgs) -> Result<()> {
    refuse_existing(&args.output, args.overwrite)?;
    let files = open_files(&args.model)?;
    let cannot = || format!("cannot quantize `{}`", args.model.model);
    let plan = Plan::new(&files, args.r#type).with_context(cannot)?;
    if plan.requantized() > 0 {
        lacuna_cli::tell!(
            "warning: {} tensors are quantized already, and what that lost stays lost; files of f16 or bf16 \
             make better ones",
            plan.requantized()
        );
    }
    let threads = args.threads.map_or_else(thread::available_parallelism, Ok);
    let threads = threads.unwrap_or(NonZeroUsize::MIN);
    tidy_when_ended()?;
    let start = Instant::now();
    plan.write_file(&args.output, threads, &mut Bars::default())
        .with_context(cannot)?;
    let totals = plan.by_type().into_iter().map(|total| Total {
        r#type: total.type_name,
        tensors: total.tensors,
        bytes: total.bytes,
    });
    let report = Report {
        path: args.output.display().to_string(),
        r#type: plan.recipe().name(),
        source_bytes: files.tensors().total_bytes(),
        bytes: plan.file_len(),
        tensors: totals.collect(),
        requantized: plan.requantized(),
        seconds: start.elapsed().as_secs_f64(),
    };
    match args.model.json {
        true => output::json(&report),
        false => print(&report),
    }
}

fn print(report: &Report) -> Result<()> {
    output::print(|out| {
        writeln!(
            out,
            "{}: {} of {} weights in {:.1} s, {:.0} MB/s",
            report.path,
            output::bytes(report.bytes),
            report.r#type,
            report.seconds,
            report.source_bytes as f64 / report.seconds / 1e6
        )?;
        for total in &report.tensors {
            let bytes = output::bytes(total.bytes);
            writeln!(
                out,
                "  {:8} {:5} tensors {bytes:>10}",
                total.r#type, total.tensors
            )?;
        }
        Ok(())
    })
}
