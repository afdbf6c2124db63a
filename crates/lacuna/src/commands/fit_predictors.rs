//! `lacuna fit-predictors`: predictors of neurons, fitted to what a model makes of a text.

use std::fs;
use std::time::Instant;

use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressStyle};
use lacuna::{Engine, EngineConfig, Special};
use lacuna_models::{FitSettings, PredictorFit, PredictorFitter};
use serde::Serialize;

use crate::cli::FitPredictorsArgs;
use crate::commands::perplexity::{first_token, windows};
use lacuna_cli::{open_files, open_to_run, output};

/// Tokens of a window of the text, each of which begins with an empty context: long enough to be like the rest of a
/// longer one, and short enough that attention costs little.
const WINDOW: usize = 512;

#[derive(Serialize)]
struct Report {
    #[serde(flatten)]
    fit: PredictorFit,
    rank: usize,
    seconds: f64,
}

pub(crate) fn run(args: &FitPredictorsArgs) -> Result<()> {
    let text = fs::read_to_string(&args.text)
        .with_context(|| format!("cannot read `{}` as UTF-8 text", args.text.display()))?;
    let files = open_files(&args.model)?;
    let cannot = || format!("cannot fit predictors of `{}`", args.model.model);
    let described = lacuna::describe(&files).with_context(cannot)?;
    let config = EngineConfig {
        threads: args.cpu.threads,
        // What runs with `--neurons` computes in f32.
        matmul_precision: args.cpu.matmul_precision.or_f32(),
        context_tokens: Some(WINDOW.min(described.spec.context_tokens)),
        ..EngineConfig::default()
    };
    let tokenizer = lacuna_models::tokenizer(&files, &described.spec)?;
    let mut tokens = tokenizer.encode(&text, Special::NONE)?;
    tokens.truncate(args.tokens.get());
    let settings = FitSettings {
        rank: args.rank.get(),
        recall: args.recall,
    };
    let start = Instant::now();
    // Before the model is loaded: what is refused is refused at once.
    let fitter = PredictorFitter::new(&files, &args.neurons, settings, tokens.len());
    let fitter = fitter.with_context(cannot)?;
    // What is recorded is no part of the engine's plan, so that is not held against the process.
    let mut engine = Engine::new(open_to_run(&args.model, &config)?, &config)?;
    let windows = windows(&tokens, engine.context_tokens(), first_token(&tokenizer)?)?;
    let style = ProgressStyle::with_template("{msg} {bar:30} {pos}/{len} {eta}")?;
    let bar = ProgressBar::new(0).with_style(style);
    let mut shown = String::new();
    let fit = engine.fit_predictors(&windows, fitter, &mut |what, done, of| {
        if shown != what {
            shown = what.to_owned();
            bar.reset();
            bar.set_message(output::name(what));
        }
        bar.set_length(of as u64);
        bar.set_position(done as u64);
    });
    bar.finish_and_clear();
    let report = Report {
        fit: fit.with_context(cannot)?,
        rank: settings.rank,
        seconds: start.elapsed().as_secs_f64(),
    };
    match args.model.json {
        true => output::json(&report),
        false => print(&report),
    }
}

fn print(report: &Report) -> Result<()> {
    let Report { fit, seconds, .. } = report;
    output::print(|out| {
        writeln!(
            out,
            "{}: {} of predictors of {} blocks, fitted to {} tokens in {seconds:.0} s",
            fit.path.display(),
            output::bytes(fit.bytes),
            fit.blocks.len(),
            fit.tokens,
        )?;
        writeln!(out, "on text that they were not fitted to:")?;
        for of in fit.blocks.iter().chain([&fit.all]) {
            writeln!(
                out,
                "  {}: {:.1} % of {} neurons needed, {:.1} % of these foretold, {:.1} % of all named",
                output::name(&of.name),
                100.0 * of.active_share,
                of.neurons,
                100.0 * of.recall,
                100.0 * of.named_share,
            )?;
        }
        Ok(())
    })
}
