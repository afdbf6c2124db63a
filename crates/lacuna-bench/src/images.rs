//! `lacuna bench images`: images per second that become rows for a decoder.

use std::time::Instant;

use anyhow::{Context, Result};
use lacuna_cli::{open_files, output};
use lacuna_files::ModelFiles;
use lacuna_kernels::{Cpu, CpuConfig, MatmulPrecision};
use lacuna_models::{ImageEncoder, ImageProducts, Scratch};
use serde::Serialize;

use crate::arguments::BenchImagesArgs;
use crate::machine::Machine;
use crate::samples::median;

#[derive(Serialize)]
struct Report {
    machine: Machine,
    model: String,
    threads: usize,
    matmul_precision: &'static str,
    /// Pixels of width and height, as given.
    size: [usize; 2],
    /// The same as the encoder takes it.
    fitted: [usize; 2],
    patches: usize,
    /// In the places of tokens.
    rows: usize,
    arena_bytes: usize,
    /// Medians over the rounds, of the encoder's pass; of files and pixels before it nothing is in it.
    ms: f64,
    rows_per_second: f64,
    /// Products per second, in 1e9: with quantized weights, with float weights and of attention together.
    gmac_per_s: f64,
    /// What the machine's arithmetic alone would take, as it was measured between the rounds, over that time.
    of_limit: f64,
}

/// Products per second of all threads together.
struct Rates {
    int8: f64,
    /// In f32, or from numbers rounded to bf16 where that is asked for.
    float: f64,
}

impl Rates {
    fn now(cpu: &Cpu) -> Self {
        let bf16 = match cpu.precision() {
            MatmulPrecision::Bf16 => cpu.measure_bf16_products(),
            MatmulPrecision::F32 => None,
        };
        Self {
            int8: cpu.measure_int8_dot(),
            float: bf16.unwrap_or_else(|| cpu.measure_f32_fma()),
        }
    }

    /// Seconds that `products` take at these.
    fn seconds(&self, products: &ImageProducts) -> f64 {
        products.quantized as f64 / self.int8
            + (products.float + products.attention) as f64 / self.float
    }
}

pub(crate) fn run(args: &BenchImagesArgs) -> Result<()> {
    let files = match &args.model.eyes.mmproj {
        Some(path) => ModelFiles::open(path)?,
        None => open_files(&args.model)?,
    };
    let encoder = ImageEncoder::load(files)?;
    let mut encoder = encoder.context("there is no encoder of images in the files")?;
    let bounds = args.model.eyes.tokens();
    if !bounds.are_none() {
        encoder = encoder.with_image_tokens(bounds)?;
    }
    let usual = CpuConfig::default();
    let cpu = Cpu::new(CpuConfig {
        threads: args.cpu.threads.unwrap_or(usual.threads),
        precision: args.cpu.matmul_precision,
        ..usual
    })?;
    let shape = encoder.shape();
    let fitted = shape.fit(args.size)?;
    let grid = shape.grid(fitted);
    let arena = encoder.arena(shape.limits(grid))?;
    let arena_bytes = arena.bytes();
    let mut scratch = Scratch::new(encoder.program(), arena)?;
    let pixels: Vec<u8> = (0..fitted[0] * fitted[1] * 3)
        .map(|at| (at * 31 % 251) as u8)
        .collect();
    // Weights come from their file.
    encoder.encode(&cpu, (&pixels, grid), &mut scratch)?;
    let products = encoder.products(grid);
    let (mut seconds, mut shares) = (Vec::new(), Vec::new());
    for _ in 0..args.rounds.get() {
        let limit = Rates::now(&cpu).seconds(&products);
        let start = Instant::now();
        encoder.encode(&cpu, (&pixels, grid), &mut scratch)?;
        let taken = start.elapsed().as_secs_f64();
        seconds.push(taken);
        shares.push(limit / taken);
    }
    let seconds = median(seconds).context("one round at least")?;
    let rows = shape.tokens(grid).count();
    let all = products.quantized + products.float + products.attention;
    let report = Report {
        machine: Machine::this(),
        model: args.model.model.clone(),
        threads: cpu.threads(),
        matmul_precision: cpu.precision().name(),
        size: args.size,
        fitted,
        patches: grid.count(),
        rows,
        arena_bytes,
        ms: seconds * 1e3,
        rows_per_second: rows as f64 / seconds,
        gmac_per_s: all as f64 / seconds / 1e9,
        of_limit: median(shares).context("one round at least")?,
    };
    match args.model.json {
        true => output::json(&report),
        false => print(&report),
    }
}

fn print(report: &Report) -> Result<()> {
    output::print(|out| {
        writeln!(out, "{}", report.machine.line())?;
        writeln!(
            out,
            "{}: {} patches become {} rows in {:.0} ms: {:.0} rows/s, {:.0} GMAC/s, {:.0} % of what the machine multiplies",
            output::name(&report.model),
            report.patches,
            report.rows,
            report.ms,
            report.rows_per_second,
            report.gmac_per_s,
            report.of_limit * 100.0,
        )?;
        writeln!(
            out,
            "the pass takes {} of memory while it lasts",
            output::bytes(report.arena_bytes as u64)
        )
    })
}
