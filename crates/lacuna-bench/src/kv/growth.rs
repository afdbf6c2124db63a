//! `lacuna bench growth`: what a sequence that gets longer costs each step.
//!
//! A step is one token: prepare, write its rows, accept. Attention is timed apart, because it is the
//! same for every policy. A policy that copies so much that it would take minutes is stopped, and the
//! report says where.

use std::io::{self, Write};
use std::time::{Duration, Instant};

use anyhow::Result;
use lacuna_kernels::Cpu;
use lacuna_kv::KvPolicy;
use lacuna_kv::{GrowthSchedule, KvCache, Layer, Sequence, Side};
use serde::Serialize;

use super::subject::Subject;
use super::{Room, bar, cache, processor, room, rows, store};
use crate::arguments::BenchGrowthArgs;
use crate::limits::Limiter;
use crate::machine::Machine;
use crate::plot::{Axis, Line, Plot};
use crate::samples::{Samples, Tail, median};
use lacuna_cli::output;

/// Tokens between two looks at the clock and at attention.
const STRETCH: usize = 4_096;

/// How often it is measured what memory delivers.
const LIMIT_ROUNDS: usize = 7;

#[derive(Serialize)]
struct Report {
    machine: Machine,
    model: String,
    layers: usize,
    kv_type: String,
    bytes_per_token: usize,
    /// The most this machine reads per second, in 1e9 bytes, with all threads.
    read_gb_per_s: f64,
    /// The least a decode step of the model can take on this machine: reading its weights once.
    decode_step_us: f64,
    policies: Vec<Growing>,
    /// The published table of a dynamically resized cache, row by row from the same schedule.
    resize_table: Vec<Resize>,
}

#[derive(Serialize)]
struct Growing {
    policy: String,
    tokens: usize,
    /// Prepare, write and accept.
    step: Option<Tail>,
    /// The same at the 99.9th percentile as a part of the decode step.
    p999_of_decode_step: Option<f64>,
    longest_of_decode_step: Option<f64>,
    copied_bytes: usize,
    zeroed_bytes: usize,
    resizes: usize,
    committed_bytes: usize,
    peak_bytes: usize,
    /// One query token against all rows of all layers.
    attention: Vec<Attention>,
    /// Why it did not reach all tokens.
    ended: Option<String>,
    /// Longest step of each stretch of tokens, for the plot.
    longest: Vec<Longest>,
}

#[derive(Serialize)]
struct Attention {
    tokens: usize,
    ms: f64,
}

#[derive(Serialize)]
struct Longest {
    tokens: usize,
    us: f64,
}

#[derive(Serialize)]
struct Resize {
    tokens: usize,
    cells: usize,
    mib: usize,
    resizes: usize,
}

pub(crate) fn run(args: &BenchGrowthArgs) -> Result<()> {
    let subject = Subject::find(&args.kv, args.kv.kv_type)?;
    let cpu = processor()?;
    let mut limiter = Limiter::new();
    let rates = (0..LIMIT_ROUNDS).map(|_| limiter.read(&cpu)).collect();
    let read_gb_per_s = median(rates).expect("there are rounds");
    let decode_step_us = subject.weight_bytes as f64 / read_gb_per_s / 1e3;
    let progress = bar(args.kv.policies.len())?;
    let mut policies = Vec::new();
    for &policy in &args.kv.policies {
        progress.set_message(policy.to_string());
        let bench = Bench {
            subject: &subject,
            cpu: &cpu,
            decode_step_us,
            tokens: args.tokens.get(),
            patience: Duration::from_secs(args.seconds.get()),
        };
        policies.push(bench.grow(policy)?);
        progress.inc(1);
    }
    progress.finish_and_clear();
    let report = Report {
        machine: Machine::this(),
        model: subject.name.clone(),
        layers: subject.layers(),
        kv_type: args.kv.kv_type.to_string(),
        bytes_per_token: subject.bytes_per_token(),
        read_gb_per_s,
        decode_step_us,
        policies,
        resize_table: resize_table(),
    };
    if let Some(path) = &args.kv.plot {
        plot(&report).save(path)?;
    }
    if args.kv.json {
        output::json(&report)
    } else {
        output::print(|out| print(out, &report))?;
        Ok(())
    }
}

struct Bench<'a> {
    subject: &'a Subject,
    cpu: &'a Cpu,
    decode_step_us: f64,
    tokens: usize,
    patience: Duration,
}

impl Bench<'_> {
    fn grow(&self, policy: KvPolicy) -> Result<Growing> {
        let cache = cache(self.subject, policy)?;
        match room(cache.sequence(self.tokens))? {
            Room::Had(sequence) => self.steps(&cache, sequence),
            Room::Lacking(error) => Ok(Growing {
                policy: policy.to_string(),
                tokens: 0,
                step: None,
                p999_of_decode_step: None,
                longest_of_decode_step: None,
                copied_bytes: 0,
                zeroed_bytes: 0,
                resizes: 0,
                committed_bytes: 0,
                peak_bytes: 0,
                attention: Vec::new(),
                ended: Some(error.to_string()),
                longest: Vec::new(),
            }),
        }
    }

    fn steps(&self, cache: &KvCache, mut sequence: Sequence) -> Result<Growing> {
        let row = rows(self.subject, 1);
        let (mut samples, mut attention, mut longest) = (Samples::default(), vec![], vec![]);
        let (started, mut ended) = (Instant::now(), None);
        while sequence.len() < self.tokens && ended.is_none() {
            let mut most = Duration::ZERO;
            let stretch = STRETCH.min(self.tokens - sequence.len());
            for _ in 0..stretch {
                let start = Instant::now();
                if let Room::Lacking(error) = room(sequence.prepare(1))? {
                    ended = Some(error.to_string());
                    break;
                }
                store(self.cpu, self.subject, &mut sequence, &row);
                sequence.accept(1);
                let time = start.elapsed();
                samples.push(time);
                most = most.max(time);
                if started.elapsed() > self.patience {
                    ended = Some(format!("stopped after {} s", self.patience.as_secs()));
                    break;
                }
            }
            let tokens = sequence.len();
            longest.push(Longest {
                tokens,
                us: most.as_secs_f64() * 1e6,
            });
            attention.push(Attention {
                tokens,
                ms: self.attend(&sequence).as_secs_f64() * 1e3,
            });
        }
        let report = sequence.report();
        let step = samples.tail();
        let part = |us: f64| us / self.decode_step_us;
        Ok(Growing {
            policy: cache.policy().to_string(),
            tokens: sequence.len(),
            p999_of_decode_step: step.map(|step| part(step.p999_us)),
            longest_of_decode_step: step.map(|step| part(step.max_us)),
            step,
            copied_bytes: report.copied_bytes,
            zeroed_bytes: report.zeroed_bytes,
            resizes: report.resizes,
            committed_bytes: report.committed_bytes,
            peak_bytes: report.peak_committed_bytes,
            attention,
            ended,
            longest,
        })
    }

    /// The time of one token's attention in all layers.
    fn attend(&self, sequence: &Sequence) -> Duration {
        let shape = &self.subject.attention;
        let query = vec![0.1; shape.query_heads * shape.head_dim];
        let mut out = vec![0.0; shape.query_heads * shape.value_dim];
        let mut scratch = vec![0.0; Cpu::attention_scratch_len(1, sequence.len(), shape)];
        let start = Instant::now();
        for layer in 0..self.subject.layers() {
            let [key, value] = Side::BOTH.map(|side| sequence.view(Layer(layer), side));
            let first = sequence.len() - 1;
            self.cpu
                .attention(&mut out, &query, &key, &value, first, shape, &mut scratch);
        }
        start.elapsed()
    }
}

/// 64 KiB per cell and a context of 131,072 tokens, as published.
fn resize_table() -> Vec<Resize> {
    const CELL_BYTES: usize = 64 << 10;
    let schedule = GrowthSchedule::DoubleLinear {
        switch_cells: GrowthSchedule::TABLE_SWITCH_CELLS,
    };
    let row = |tokens| {
        let growth = schedule.after(tokens, 131_072, CELL_BYTES);
        Resize {
            tokens,
            cells: growth.cells,
            mib: (growth.cells * CELL_BYTES) >> 20,
            resizes: growth.resizes,
        }
    };
    [89, 809, 6_409, 25_609, 40_009, 64_009, 80_009]
        .map(row)
        .into()
}

fn print(out: &mut dyn Write, report: &Report) -> io::Result<()> {
    writeln!(out, "{}", report.machine.line())?;
    writeln!(
        out,
        "{}: KV of {} layers in {}, {} bytes per token; a decode step takes {:.0} ms or more ({:.1} GB/s)\n",
        report.model,
        report.layers,
        report.kv_type,
        report.bytes_per_token,
        report.decode_step_us / 1e3,
        report.read_gb_per_s
    )?;
    writeln!(
        out,
        "{:<24}{:>8}{:>9}{:>9}{:>9}{:>10}{:>8}{:>11}{:>11}{:>9}{:>11}",
        "us a step",
        "tokens",
        "median",
        "p99",
        "p99.9",
        "longest",
        "of step",
        "copied MiB",
        "zeroed",
        "resizes",
        "peak MiB"
    )?;
    let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
    for row in &report.policies {
        if let (Some(step), Some(part)) = (row.step, row.p999_of_decode_step) {
            writeln!(
                out,
                "{:<24}{:>8}{:>9.1}{:>9.1}{:>9.1}{:>10.0}{:>7.2}%{:>11.0}{:>11.0}{:>9}{:>11.0}",
                row.policy,
                row.tokens,
                step.median_us,
                step.p99_us,
                step.p999_us,
                step.max_us,
                part * 100.0,
                mib(row.copied_bytes),
                mib(row.zeroed_bytes),
                row.resizes,
                mib(row.peak_bytes)
            )?;
        }
        if let Some(why) = &row.ended {
            writeln!(out, "{:<24}{why}", "")?;
        }
    }
    writeln!(out, "\nattention of one token, ms")?;
    for row in &report.policies {
        if let Some(last) = row.attention.last() {
            writeln!(out, "{:<24}{:>8}{:>9.1}", row.policy, last.tokens, last.ms)?;
        }
    }
    writeln!(
        out,
        "\na dynamically resized cache, 64 KiB a cell, by its published schedule"
    )?;
    writeln!(
        out,
        "{:>8}{:>9}{:>8}{:>9}",
        "tokens", "cells", "MiB", "resizes"
    )?;
    for row in &report.resize_table {
        writeln!(
            out,
            "{:>8}{:>9}{:>8}{:>9}",
            row.tokens, row.cells, row.mib, row.resizes
        )?;
    }
    Ok(())
}

fn plot(report: &Report) -> Plot {
    let line = |row: &Growing| Line {
        name: row.policy.clone(),
        points: row
            .longest
            .iter()
            .map(|longest| (longest.tokens as f64, longest.us / 1e3))
            .collect(),
    };
    Plot {
        title: format!(
            "Longest growing step of each {STRETCH} tokens, {}",
            report.model
        ),
        x: Axis::linear("tokens in the context"),
        y: Axis::logarithmic("milliseconds"),
        lines: report.policies.iter().map(line).collect(),
    }
}
