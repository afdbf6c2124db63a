//! `lacuna perplexity`: how well a model predicts a text.
//!
//! The text is tokenized once and cut into windows of `--ctx` tokens that do not overlap; each
//! starts with an empty context, and its first token is not scored. Where the vocabulary begins
//! texts with a token, that is the first token of every window: models trained so, Gemma above all,
//! predict badly without it.

use std::fs;

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use lacuna::{Engine, Special, Tokenizer};
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
    let config = args.device.set(args.engine.config().scoring())?;
    let mut engine = engine(&args.model, config)?;
    let tokenizer = engine.model().tokenizer();
    let tokens = tokenizer.encode(&text, Special::NONE)?;
    let windows = windows(&tokens, engine.context_tokens(), first_token(tokenizer)?)?;
    let report = measure(&mut engine, &windows)?;
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

/// What the vocabulary begins every text with, if anything.
pub(super) fn first_token(tokenizer: &Tokenizer) -> Result<Option<u32>> {
    let added = tokenizer.encode("", Special::PROMPT)?;
    Ok(tokenizer.bos().filter(|bos| added.first() == Some(bos)))
}

/// The text in windows of `context` tokens, each after `first`.
pub(super) fn windows(tokens: &[u32], context: usize, first: Option<u32>) -> Result<Vec<Vec<u32>>> {
    let of_text = context - first.iter().len();
    let windows: Vec<Vec<u32>> = tokens
        .chunks(of_text.max(1))
        .map(|chunk| first.into_iter().chain(chunk.iter().copied()).collect())
        .filter(|window: &Vec<u32>| (2..=context).contains(&window.len()))
        .collect();
    if windows.is_empty() {
        bail!(
            "nothing to score: the text has {} tokens, and a context of {context} scores none of them; at least 2 tokens of text and --ctx 2 are needed",
            tokens.len()
        );
    }
    Ok(windows)
}

fn measure(engine: &mut Engine, windows: &[Vec<u32>]) -> Result<Report> {
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} windows, {eta} left")?;
    let progress = ProgressBar::new(windows.len() as u64).with_style(style);
    let (mut nats, mut scored) = (0.0, 0);
    for window in windows {
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
        context: engine.context_tokens(),
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
    use super::{surprise, windows};

    #[test]
    fn every_window_begins_with_the_first_token_and_all_of_the_text_is_in_one() {
        let text = [5, 6, 7, 8, 9];
        let found = windows(&text, 3, Some(1)).expect("enough");
        assert_eq!(found, [vec![1, 5, 6], vec![1, 7, 8], vec![1, 9]]);
        let found = windows(&text, 3, None).expect("enough");
        assert_eq!(found, [vec![5, 6, 7], vec![8, 9]]);
    }

    #[test]
    fn a_context_without_room_for_a_scored_token_is_refused() {
        for first in [None, Some(1)] {
            assert!(windows(&[5, 6], 1, first).is_err());
            assert!(windows(&[], 8, first).is_err());
        }
        assert!(windows(&[5], 8, None).is_err());
        assert!(windows(&[5], 8, Some(1)).is_ok(), "scored after the first");
    }

    #[test]
    fn surprise_of_a_uniform_row_is_the_log_of_its_width() {
        assert!((surprise(&[3.0; 8], 5) - 8f64.ln()).abs() < 1e-12);
    }

    #[test]
    fn surprise_survives_large_logits() {
        assert!(surprise(&[1e30, 0.0], 0).abs() < 1e-12);
    }
}
