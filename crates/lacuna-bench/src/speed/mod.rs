//! `lacuna bench speed`: tokens per second of a whole model, and what part of the machine that is.
//!
//! Contexts are filled with random rows instead of computed ones: what attention reads is as large
//! and as far apart, and a context of 16,384 tokens is there at once. On a device (`--device`) they are computed.

mod pass;
mod table;
mod work;

use std::sync::Arc;

use anyhow::{Result, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use lacuna_engine::EngineConfig;
use lacuna_models::plan::{ExpertSlots, NeuronSlots};
use lacuna_models::{DeviceLayers, ExpertCounts, Model, NeuronReads};
use serde::Serialize;

use crate::arguments::BenchSpeedArgs;
use crate::limits::Limits;
use crate::machine::Machine;
use lacuna_cli::{open_to_run_for, output};
use pass::Bench;
use work::Work;

#[derive(Serialize)]
struct Report {
    machine: Machine,
    model: String,
    /// What computes, where that is not the processor.
    device: Option<String>,
    threads: usize,
    level: &'static str,
    matmul_precision: &'static str,
    /// Of attention whose queries fill tiles.
    precision_in_tiles: &'static str,
    kv_policy: String,
    weight_bytes: u64,
    /// Bytes of weights that a pass reads from their files.
    streamed_bytes: u64,
    /// Slots for experts, where they are read into memory.
    experts: Option<ExpertSlots>,
    /// Slots for neurons, where they are read one by one.
    neurons: Option<NeuronSlots>,
    limits: Limits,
    prefill: Vec<Prefill>,
    decode: Vec<Decode>,
}

/// Prompts computed in one session, from an empty context.
#[derive(Serialize)]
struct Prefill {
    tokens: usize,
    kv_type: String,
    /// Median over the repeats.
    tokens_per_second: f64,
    /// Multiplications of weights and of cached rows per second, in 1e9.
    gmac_per_s: f64,
    /// The same as a part of what the processor reached in 8-bit integers before and after, if it is that which computes.
    of_limit: Option<f64>,
    /// What all repeats have asked of slots for experts.
    experts: Option<Asked>,
    /// And of neurons.
    neurons: Option<AskedNeurons>,
}

/// One token for each of some sequences of equal length.
#[derive(Serialize)]
struct Decode {
    depth: usize,
    sequences: usize,
    /// Whether those rows are the same memory for all of them.
    shared: bool,
    kv_type: String,
    /// Over all sequences, by the median step.
    tokens_per_second: f64,
    step_ms: f64,
    /// The step that 99 of 100 do not exceed: the longest, of fewer.
    step_p99_ms: f64,
    /// Weights and cached rows read per second, in 1e9 bytes.
    gb_per_s: f64,
    /// The same as a part of what memory delivered before and after; of a device's, as it copies.
    of_limit: f64,
    /// What the steps have asked of slots for experts.
    experts: Option<Asked>,
    /// And of neurons.
    neurons: Option<AskedNeurons>,
}

/// What passes have asked of slots for experts.
#[derive(Serialize)]
struct Asked {
    #[serde(flatten)]
    counts: ExpertCounts,
    hit_rate: Option<f64>,
    read_bytes_per_token: f64,
}

impl Asked {
    fn new(counts: Option<ExpertCounts>, tokens: usize) -> Option<Self> {
        counts.map(|counts| Self {
            counts,
            hit_rate: counts.hit_rate(),
            read_bytes_per_token: counts.read_bytes as f64 / tokens as f64,
        })
    }
}

/// What passes have asked of neurons that are read one by one.
#[derive(Serialize)]
struct AskedNeurons {
    #[serde(flatten)]
    reads: NeuronReads,
    active_share: Option<f64>,
    hit_rate: Option<f64>,
    /// How much of what was needed was foretold, and how much of what was read ahead was needed.
    recall: Option<f64>,
    ahead_share: Option<f64>,
    read_bytes_per_token: f64,
}

impl AskedNeurons {
    fn new(reads: Option<NeuronReads>, tokens: usize) -> Option<Self> {
        reads.map(|reads| Self {
            reads,
            active_share: reads.active_share(),
            hit_rate: reads.hit_rate(),
            recall: reads.recall(),
            ahead_share: reads.ahead_share(),
            read_bytes_per_token: reads.read_bytes as f64 / tokens as f64,
        })
    }
}

pub(crate) fn run(args: &BenchSpeedArgs) -> Result<()> {
    ensure!(
        args.generate > 0 || args.prompt.iter().any(|&tokens| tokens > 0),
        output::Usage(
            "there is nothing to measure: ask for prompt tokens with -p or generated ones with -n"
                .into()
        )
    );
    let config = args.device.set(pass::config(args))?;
    if let DeviceLayers::Last(_) = config.device_layers
        && config.device_layers != DeviceLayers::ALL
    {
        let told = "a device is measured with all layers: leave --gpu-layers out, or say all";
        return Err(output::Usage(told.into()).into());
    }
    let asked = "a context for --prompt, --depth and --generate of";
    let model = open_to_run_for(&args.model, &config, asked)?;
    let report = measure(args, &config, &model)?;
    if args.model.json {
        output::json(&report)
    } else {
        output::print(|out| table::print(out, &report))?;
        Ok(())
    }
}

fn measure(args: &BenchSpeedArgs, config: &EngineConfig, model: &Arc<Model>) -> Result<Report> {
    let work = Work::of(model);
    let prompts: Vec<usize> = args.prompt.iter().copied().filter(|&p| p > 0).collect();
    let batches = match args.generate {
        0 => Vec::new(),
        _ => batches(args),
    };
    let steps = args.kv_type.len() * (prompts.len() + batches.len());
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} {msg}")?;
    let progress = ProgressBar::new(steps as u64).with_style(style);
    let mut bench = Bench::new(args, config, model)?;
    let (mut prefill, mut decode) = (Vec::new(), Vec::new());
    for &elements in &args.kv_type {
        progress.set_message(format!("{elements} cache"));
        for &tokens in &prompts {
            let macs = work.prompt_macs(tokens);
            let timed = bench.prompt(elements, tokens, macs, args.repeats.get())?;
            prefill.push(Prefill {
                tokens,
                kv_type: elements.to_string(),
                tokens_per_second: tokens as f64 / timed.seconds(),
                gmac_per_s: macs as f64 / timed.seconds() / 1e9,
                of_limit: timed.of_limit,
                experts: Asked::new(timed.slots.experts, tokens * args.repeats.get()),
                neurons: AskedNeurons::new(timed.slots.neurons, tokens * args.repeats.get()),
            });
            progress.inc(1);
        }
        for &batch in &batches {
            let row_bytes = model.spec().kv_geometry(elements)?.bytes_per_token();
            let bytes = work.step_bytes(batch, row_bytes);
            let timed = bench.steps(elements, batch, bytes, args.generate)?;
            let (depth, sequences) = (batch.depth, batch.sequences);
            decode.push(Decode {
                depth,
                sequences,
                shared: batch.shared,
                kv_type: elements.to_string(),
                tokens_per_second: sequences as f64 / timed.seconds(),
                step_ms: timed.seconds() * 1e3,
                step_p99_ms: timed.timing.p99_us / 1e3,
                gb_per_s: bytes as f64 / timed.seconds() / 1e9,
                of_limit: timed.of_limit.unwrap_or_default(),
                experts: Asked::new(timed.slots.experts, sequences * args.generate),
                neurons: AskedNeurons::new(timed.slots.neurons, sequences * args.generate),
            });
            progress.inc(1);
        }
    }
    bench.end_record()?;
    progress.finish_and_clear();
    let held = model.weight_plan().loaded.as_ref();
    Ok(Report {
        machine: Machine::this(),
        model: args.model.model.clone(),
        device: config
            .device
            .as_ref()
            .map(|device| device.name().to_owned()),
        threads: bench.cpu().threads(),
        level: bench.cpu().level().name(),
        matmul_precision: bench.cpu().precision().name(),
        precision_in_tiles: bench.cpu().precision_in_tiles().name(),
        kv_policy: args.kv.to_string(),
        weight_bytes: work.weight_bytes,
        streamed_bytes: streamed_bytes(model),
        experts: held.and_then(|held| held.experts),
        neurons: held.and_then(|held| held.neurons),
        limits: bench.limits(),
        prefill,
        decode,
    })
}

fn streamed_bytes(model: &Model) -> u64 {
    let held = model.weight_plan().loaded.as_ref();
    held.map_or(0, |held| held.streamed_bytes)
}

/// Sequences of equal length that generate at once.
#[derive(Clone, Copy)]
struct Batch {
    depth: usize,
    sequences: usize,
    /// Whether all rows but new ones are the same memory for all of them.
    shared: bool,
}

/// Every depth with every batch size, depth by depth, and what is shared behind the same that is not.
fn batches(args: &BenchSpeedArgs) -> Vec<Batch> {
    let mut batches = Vec::new();
    for (&depth, &sequences) in args
        .depth
        .iter()
        .flat_map(|depth| args.batch.iter().map(move |sequences| (depth, sequences)))
    {
        for shared in [false, true] {
            if !shared || (args.shared && sequences > 1 && depth > 0) {
                batches.push(Batch {
                    depth,
                    sequences,
                    shared,
                });
            }
        }
    }
    batches
}
