//! `lacuna bench kernels`: what each kernel reaches, and what part of the machine that is.
//!
//! A kernel is compared with the limit that it would meet first: memory or arithmetic. Kernel and
//! limit are measured in turn, and the part is the median of their ratios, because machines drift.

mod attention;
mod cases;
mod elementwise;
mod matmul;
mod measure;
mod table;

use anyhow::Result;
use clap::ValueEnum;
use indicatif::{ProgressBar, ProgressStyle};
use lacuna_engine::EngineConfig;
use lacuna_kernels::Cpu;
use serde::Serialize;

use crate::arguments::BenchKernelsArgs;
use crate::machine::Machine;
use crate::processor;
use cases::{Case, cases};
use lacuna_cli::output;
use measure::{Bench, Extent, Limit, Limits, Measured};

/// What can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum KernelKind {
    /// Products with weight matrices
    Matmul,
    /// Causal attention over cached rows
    Attention,
    /// The same over latent rows, whose values are part of keys
    LatentAttention,
    /// Attention of all tokens to all, in both directions: encoders of images
    EncoderAttention,
    /// Root mean square norms
    RmsNorm,
    /// Rotary embeddings
    Rope,
    /// `silu(gate) * up`
    SiluMul,
    /// Quantizing activations
    Quantize,
    /// Starting and ending an operation on all threads
    Barrier,
}

impl KernelKind {
    /// The name that `--kernel` takes and reports show.
    fn name(self) -> String {
        let value = self.to_possible_value();
        value.map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

#[derive(Serialize)]
struct Report {
    machine: Machine,
    threads: usize,
    level: &'static str,
    matmul_precision: &'static str,
    /// Of attention whose queries fill tiles.
    precision_in_tiles: &'static str,
    limits: Limits,
    kernels: Vec<Row>,
}

/// One kernel, one storage type, one shape.
#[derive(Serialize)]
struct Row {
    kernel: KernelKind,
    /// Of the weights or of the cached rows.
    #[serde(rename = "type")]
    storage: Option<&'static str>,
    shape: Option<String>,
    tokens: Option<usize>,
    #[serde(flatten)]
    measured: Measured,
}

pub(crate) fn run(args: &BenchKernelsArgs) -> Result<()> {
    let cases = cases(args)?;
    let config = EngineConfig {
        threads: args.cpu.threads,
        matmul_precision: args.cpu.matmul_precision,
        ..EngineConfig::default()
    };
    let cpu = processor(&config)?;
    let report = measure(&cpu, &cases, Extent::new(args.quick))?;
    if args.json {
        output::json(&report)
    } else {
        output::print(|out| table::print(out, &report))?;
        Ok(())
    }
}

fn measure(cpu: &Cpu, cases: &[Case], extent: Extent) -> Result<Report> {
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} {msg}")?;
    let progress = ProgressBar::new(cases.len() as u64).with_style(style);
    let mut bench = Bench::new(cpu, extent);
    let mut kernels = Vec::new();
    for case in cases {
        progress.set_message(case.to_string());
        let measured = match case {
            Case::Matmul(case) => matmul::measure(&mut bench, case)?,
            Case::Attention(case) => attention::measure(&mut bench, case),
            Case::Elementwise(case) => elementwise::measure(&mut bench, case),
            Case::Barrier => bench.barrier(),
        };
        kernels.push(case.row(measured));
        progress.inc(1);
    }
    progress.finish_and_clear();
    Ok(Report {
        machine: Machine::this(),
        threads: cpu.threads(),
        level: cpu.level().name(),
        matmul_precision: cpu.precision().name(),
        precision_in_tiles: cpu.precision_in_tiles().name(),
        limits: bench.limits(),
        kernels,
    })
}
