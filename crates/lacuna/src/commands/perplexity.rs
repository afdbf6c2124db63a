//! `lacuna perplexity`: how well a model predicts a text.
//!
//! The text is tokenized once and cut into windows of `--ctx` tokens that do not overlap; each
//! starts with an empty context, and its first token is not scored.

use std::fs;

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use lacuna::{Engine, Special};
use serde::Serialize;

use crate::cli::PerplexityArgs;
use crate::commands::engine;
use lacuna_cli::output;

#[derive(Serialize)]
struct Report {
    perplexity: f64,
    /// Tokens scored.
    tokens: usize,
    windows: usize,
    context: usize,
}

pub(crate) fn run(args: &PerplexityArgs) -> Result<()> {
    let text = fs::read_to_string(&args.file)
        .with_context(|| format!("cannot read `{}` as UTF-8 text", args.file.display()))?;
    let mut engine = engine(&args.model, args.engine.config().scoring())?;
    let tokens = engine.model().tokenizer().encode(&text, Special::NONE)?;
    let report = measure(&mut engine, &tokens)?;
    if args.model.json {
        return output::json(&report);
    }
    output::print(|out| {
        writeln!(
            out,
            "perplexity {:.4} over {} tokens in {} windows of {}",
            report.perplexity, report.tokens, report.windows, report.context
        )
    })
}

fn measure(engine: &mut Engine, tokens: &[u32]) -> Result<Report> {
    let context = engine.context_tokens();
    let windows: Vec<&[u32]> = tokens
        .chunks(context)
        .filter(|window| window.len() > 1)
        .collect();
    if windows.is_empty() {
        bail!(
            "nothing to score: the text has {} tokens, and a context of {context} scores none of them; at least 2 tokens of text and --ctx 2 are needed",
            tokens.len()
        );
    }
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} windows, {eta} left")?;
    let progress = ProgressBar::new(windows.len() as u64).with_style(style);
    let (mut nats, mut scored) = (0.0, 0);
    for window in &windows {
        engine.score(window, |position, row| {
            if let Some(&next) = window.get(position + 1) {
                nats += surprise(row, next);
                scored += 1;
            }
        })?;
        progress.inc(1);
    }
    progress.finish_and_clear();
    let perplexity = (nats / scored as f64).exp();
    // Rows are finite here, but may be so far apart that their difference is beyond any number.
    if !perplexity.is_finite() {
        bail!(
            "the perplexity is {perplexity}: the model's weights are damaged, or not for this text"
        );
    }
    Ok(Report {
        perplexity,
        tokens: scored,
        windows: windows.len(),
        context,
    })
}

/// Negative log-probability of `token`, in nats.
fn surprise(logits: &[f32], token: u32) -> f64 {
    let highest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let total: f64 = logits
        .iter()
        .map(|logit| f64::from(logit - highest).exp())
        .sum();
    total.ln() - f64::from(logits[token as usize] - highest)
}

#[cfg(test)]
mod tests {
    use super::surprise;

    #[test]
    fn surprise_of_a_uniform_row_is_the_log_of_its_width() {
        assert!((surprise(&[3.0; 8], 5) - 8f64.ln()).abs() < 1e-12);
    }

    #[test]
    fn surprise_survives_large_logits() {
        assert!(surprise(&[1e30, 0.0], 0).abs() < 1e-12);
    }
}
