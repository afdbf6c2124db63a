//! `lacuna bench speed`: tokens per second of a whole model, and what part of the machine that is.
//!
//! Contexts are filled with random rows instead of computed ones: what attention reads is as large
//! and as far apart, and a context of 16,384 tokens is there at once.

mod pass;
mod table;
mod work;

use anyhow::{Result, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use lacuna::{ElementType, Model};
use serde::Serialize;

use crate::cli::BenchSpeedArgs;
use crate::commands::bench::machine::Machine;
use crate::models::open_files;
use crate::output;
use pass::Bench;
use work::Work;

#[derive(Serialize)]
struct Report {
    machine: Machine,
    model: String,
    threads: usize,
    level: &'static str,
    kv_policy: String,
    weight_bytes: u64,
    prefill: Vec<Prefill>,
    decode: Vec<Decode>,
}

/// Prompts computed in one session, from an empty context.
#[derive(Serialize)]
struct Prefill {
    tokens: usize,
    kv_type: &'static str,
    /// Median over the repeats.
    tokens_per_second: f64,
    /// Multiplications of weights and of cached rows per second, in 1e9.
    gmac_per_s: f64,
}

/// One token for each of some sequences of equal length.
#[derive(Serialize)]
struct Decode {
    depth: usize,
    sequences: usize,
    kv_type: &'static str,
    /// Over all sequences, by the median step.
    tokens_per_second: f64,
    step_ms: f64,
    /// Weights and cached rows read per second, in 1e9 bytes.
    gb_per_s: f64,
}

pub(crate) fn run(args: &BenchSpeedArgs) -> Result<()> {
    ensure!(
        args.prompt.len() + args.depth.len() > 0,
        output::Usage("there is nothing to measure: name a prompt or a depth".into())
    );
    let model = Model::load(open_files(&args.model)?)?;
    let report = measure(args, &model)?;
    if args.model.json {
        output::json(&report)
    } else {
        table::print(&report);
        Ok(())
    }
}

fn measure(args: &BenchSpeedArgs, model: &Model) -> Result<Report> {
    let work = Work::of(model);
    let batches = args.depth.len() * args.batch.len();
    let steps = args.kv_type.len() * (args.prompt.len() + batches);
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} {msg}")?;
    let progress = ProgressBar::new(steps as u64).with_style(style);
    let mut bench = Bench::new(args, model)?;
    let (mut prefill, mut decode) = (Vec::new(), Vec::new());
    for &element in &args.kv_type {
        progress.set_message(format!("{} cache", element.name()));
        for &tokens in &args.prompt {
            let time = bench.prompt(element, tokens, args.repeats.get())?;
            prefill.push(Prefill::new(&work, element, tokens, time));
            progress.inc(1);
        }
        for (depth, sequences) in pairs(&args.depth, &args.batch) {
            let (time, row_bytes) = bench.steps(element, depth, sequences, args.generate.get())?;
            let bytes = work.step_bytes(sequences, depth, row_bytes);
            decode.push(Decode {
                depth,
                sequences,
                kv_type: element.name(),
                tokens_per_second: sequences as f64 / time,
                step_ms: time * 1e3,
                gb_per_s: bytes as f64 / time / 1e9,
            });
            progress.inc(1);
        }
    }
    progress.finish_and_clear();
    Ok(Report {
        machine: Machine::this(),
        model: args.model.model.clone(),
        threads: bench.cpu().threads(),
        level: bench.cpu().level().name(),
        kv_policy: args.kv.to_string(),
        weight_bytes: work.weight_bytes,
        prefill,
        decode,
    })
}

impl Prefill {
    fn new(work: &Work, element: ElementType, tokens: usize, time: f64) -> Self {
        Self {
            tokens,
            kv_type: element.name(),
            tokens_per_second: tokens as f64 / time,
            gmac_per_s: work.prompt_macs(tokens) as f64 / time / 1e9,
        }
    }
}

/// Every depth with every batch size, depth by depth.
fn pairs<'a>(
    depths: &'a [usize],
    batches: &'a [usize],
) -> impl Iterator<Item = (usize, usize)> + 'a {
    depths
        .iter()
        .flat_map(|&depth| batches.iter().map(move |&batch| (depth, batch)))
}
