//! `lacuna bench embed`: texts per second that become embeddings, and what memory they leave behind.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use lacuna_cli::resident::Resident;
use lacuna_cli::{open_files, output};
use lacuna_engine::{Embedder, EmbedderConfig, Excess};
use lacuna_models::Model;
use lacuna_text::tokenizer::EncodeLimits;
use serde::Serialize;

use crate::arguments::BenchEmbedArgs;
use crate::machine::Machine;
use crate::samples::median;

#[derive(Serialize)]
struct Report {
    machine: Machine,
    model: String,
    threads: Option<usize>,
    batch_tokens: usize,
    texts: usize,
    /// With those that the vocabulary puts around texts.
    tokens: usize,
    /// Medians over the rounds.
    texts_per_second: f64,
    tokens_per_second: f64,
    /// Multiplications with weights per second, in 1e9.
    gmac_per_s: f64,
    /// What the process keeps in memory after the first texts, where the system tells.
    early: Option<Kept>,
    /// And after all rounds.
    late: Option<Kept>,
}

/// What is kept after so many texts.
#[derive(Serialize)]
struct Kept {
    texts: usize,
    #[serde(flatten)]
    resident: Resident,
}

impl Kept {
    fn after(texts: usize) -> Option<Self> {
        Resident::now().map(|resident| Self { texts, resident })
    }
}

/// Texts whose tokens are made before they are computed, as `lacuna embed` does it.
const TEXTS_AT_ONCE: usize = 256;

/// Texts after which memory is looked at first.
const EARLY_TEXTS: usize = 100;

pub(crate) fn run(args: &BenchEmbedArgs) -> Result<()> {
    let text = std::fs::read_to_string(&args.input)
        .with_context(|| format!("cannot read `{}`", args.input.display()))?;
    let texts: Vec<&str> = text.lines().filter(|line| !line.is_empty()).collect();
    ensure!(!texts.is_empty(), "there is no text in the file");
    let model = Model::load(open_files(&args.model)?)?;
    let (per_token, _) = model.program().products();
    let config = EmbedderConfig {
        threads: args.cpu.threads,
        matmul_precision: args.cpu.matmul_precision,
        batch_tokens: args.batch.get(),
        ..EmbedderConfig::default()
    };
    let mut embedder = Embedder::new(model.into(), &config)?;
    let first = &texts[..texts.len().min(EARLY_TEXTS)];
    embed(&mut embedder, first)?;
    let early = Kept::after(first.len());
    let (mut tokens, mut seconds) = (0, Vec::new());
    for _ in 0..args.rounds.get() {
        let start = Instant::now();
        tokens = embed(&mut embedder, &texts)?;
        seconds.push(start.elapsed().as_secs_f64());
    }
    let seconds = median(seconds).context("one round at least")?;
    let tokens_per_second = tokens as f64 / seconds;
    let report = Report {
        machine: Machine::this(),
        model: args.model.model.clone(),
        threads: args.cpu.threads.map(usize::from),
        batch_tokens: args.batch.get(),
        texts: texts.len(),
        tokens,
        texts_per_second: texts.len() as f64 / seconds,
        tokens_per_second,
        gmac_per_s: tokens_per_second * per_token as f64 / 1e9,
        early,
        late: Kept::after(first.len() + texts.len() * args.rounds.get()),
    };
    match args.model.json {
        true => output::json(&report),
        false => print(&report),
    }
}

/// Embeds all of `texts`, and returns how many tokens they have.
fn embed(embedder: &mut Embedder, texts: &[&str]) -> Result<usize> {
    let encoder = embedder.encoder().clone();
    let limits = EncodeLimits::default();
    let mut count = 0;
    for texts in texts.chunks(TEXTS_AT_ONCE) {
        let tokens = texts
            .iter()
            .map(|text| encoder.text(text, Excess::Cut, &limits));
        let tokens = tokens.collect::<Result<Vec<_>, _>>()?;
        count += tokens.iter().map(Vec::len).sum::<usize>();
        let mut first = 0.0;
        embedder.embed(&tokens, |embedding| first += embedding[0])?;
        ensure!(first.is_finite(), "the embeddings are not finite");
    }
    Ok(count)
}

fn print(report: &Report) -> Result<()> {
    output::print(|out| {
        writeln!(out, "{}", report.machine.line())?;
        writeln!(
            out,
            "{}: {} texts of {:.1} tokens: {:.0} texts/s, {:.0} tokens/s, {:.1} GMAC/s",
            output::name(&report.model),
            report.texts,
            report.tokens as f64 / report.texts as f64,
            report.texts_per_second,
            report.tokens_per_second,
            report.gmac_per_s,
        )?;
        for kept in [&report.early, &report.late].into_iter().flatten() {
            writeln!(
                out,
                "after {:>6} texts: {} resident, {} of it not of files",
                kept.texts,
                output::bytes(kept.resident.pss_bytes),
                output::bytes(kept.resident.anonymous_bytes),
            )?;
        }
        Ok(())
    })
}
