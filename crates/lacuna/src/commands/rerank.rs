//! `lacuna rerank`: texts by how well they answer a query.

use std::io::BufRead;

use anyhow::{Context, Result, ensure};
use lacuna::{Pair, Reranker};
use lacuna_cli::{open_files, output};
use serde::Serialize;

use super::embed::{LIMITS, read_line};
use crate::cli::RerankArgs;

/// One text's line with `--json`.
#[derive(Serialize)]
struct Line<'a> {
    /// Which of the texts it is, from 0 on.
    index: usize,
    text: &'a str,
    relevance_score: f32,
}

/// Texts whose tokens are held at once.
const TEXTS_AT_ONCE: usize = 256;

pub(crate) fn run(args: &RerankArgs) -> Result<()> {
    let files = open_files(&args.model)?;
    let cannot_load = || format!("cannot load `{}`", args.model.model);
    let described = lacuna::describe(&files).with_context(cannot_load)?;
    Reranker::check(&described.spec)?;
    ensure!(!args.query.trim().is_empty(), "the query is empty");
    let model = lacuna::Model::load(files).with_context(cannot_load)?;
    let mut reranker = Reranker::new(model.into(), &args.passes.config())?;
    let texts = match args.texts.is_empty() {
        true => lines(&mut std::io::stdin().lock())?,
        false => args.texts.clone(),
    };
    ensure!(!texts.is_empty(), "there is no text; give one, a line each");
    let mut scores = Vec::with_capacity(texts.len());
    for (turn, texts) in texts.chunks(TEXTS_AT_ONCE).enumerate() {
        let pairs = pairs(&reranker, args, texts, turn * TEXTS_AT_ONCE)?;
        reranker.score(&pairs, |score| scores.push(score))?;
    }
    let mut order: Vec<usize> = (0..texts.len()).collect();
    order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
    let most = args.top.map_or(usize::MAX, usize::from);
    for index in order.into_iter().take(most) {
        print(args, index, &texts[index], scores[index])?;
    }
    Ok(())
}

fn lines(input: &mut impl BufRead) -> Result<Vec<String>> {
    let mut lines = Vec::new();
    while let Some(line) = read_line(input, lines.len())? {
        lines.push(line);
    }
    Ok(lines)
}

/// The tokens of each of `texts`, which come after `before` others, with the query.
fn pairs(
    reranker: &Reranker,
    args: &RerankArgs,
    texts: &[String],
    before: usize,
) -> Result<Vec<Pair>> {
    let encoder = reranker.encoder();
    let mut pairs = Vec::with_capacity(texts.len());
    for (number, text) in (before + 1..).zip(texts) {
        ensure!(
            !text.trim().is_empty(),
            "text {number} is empty; leave it out"
        );
        let pair = encoder.pair(&args.query, text, args.passes.excess(), &LIMITS);
        let most = encoder.max_tokens();
        pairs.push(pair.with_context(|| {
            format!("text {number} cannot be scored (the model takes {most} tokens with the query's; --truncate cuts longer texts)")
        })?);
    }
    Ok(pairs)
}

fn print(args: &RerankArgs, index: usize, text: &str, relevance_score: f32) -> Result<()> {
    if args.model.json {
        return output::json(&Line {
            index,
            text,
            relevance_score,
        });
    }
    output::text(&format!("{relevance_score:.4}  {text}\n"))
}
