//! `lacuna synth`: a file with a real model's shapes and random weights, for benchmarks that anyone
//! can repeat without a download.

use std::time::Instant;

use anyhow::Result;
use lacuna::synth::{Model, Shape};
use serde::Serialize;

use super::{refuse_existing, tidy_when_ended};
use crate::cli::SynthArgs;
use lacuna_cli::Bars;
use lacuna_cli::output::{self, Usage};

#[derive(Serialize)]
struct Report<'a> {
    shape: &'a str,
    dtype: &'a str,
    path: String,
    bytes: u64,
    seconds: f64,
}

pub(crate) fn run(args: &SynthArgs) -> Result<()> {
    let shape = Shape::find_any(&args.shape).map_err(|error| Usage(error.to_string()))?;
    refuse_existing(&args.output, args.overwrite)?;
    let mut model = Model::new(shape, args.dtype).seed(args.seed);
    if let Some(layers) = args.layers {
        model = model.layers(layers.get())?;
    }
    tidy_when_ended()?;
    let start = Instant::now();
    model.write_file(&args.output, &mut Bars::default())?;
    let report = Report {
        shape: &args.shape,
        dtype: args.dtype.name(),
        path: args.output.display().to_string(),
        bytes: model.file_len()?,
        seconds: start.elapsed().as_secs_f64(),
    };
    if args.json {
        return output::json(&report);
    }
    output::print(|out| {
        writeln!(
            out,
            "{}: {} of {} weights in {:.1} s",
            report.path,
            output::bytes(report.bytes),
            report.dtype,
            report.seconds
        )
    })
}
