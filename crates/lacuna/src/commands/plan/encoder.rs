//! The plan of a model that makes a vector of each text: nothing is kept, so there is one sum.

use anyhow::{Result, bail, ensure};
use lacuna::plan::{ArenaPlan, Parts, VocabularySize, WeightPlan};
use lacuna::{EmbedderConfig, EngineConfig, ModelSpec};
use lacuna_cli::output::{self, Usage};
use lacuna_models::program::Program;
use serde::Serialize;

use crate::cli::PlanArgs;

#[derive(Serialize)]
struct Report<'a> {
    model: &'a str,
    architecture: &'static str,
    layers: usize,
    /// Elements of an embedding; none of a model that scores pairs of texts.
    dimensions: Option<usize>,
    /// Tokens of a text at most.
    context_tokens: usize,
    batch_tokens: usize,
    threads: usize,
    /// Pages of the files, which the system may drop and read again.
    mapped_weight_bytes: u64,
    /// What the process commits, by what it is for.
    committed: Parts,
    committed_bytes: u64,
    /// Beside that, while a text of as many tokens as one may have is computed: none if a pass has room
    /// for it.
    long_text_bytes: u64,
    budget_bytes: Option<u64>,
}

pub(super) fn run(
    args: &PlanArgs,
    spec: &ModelSpec,
    weights: &WeightPlan,
    vocabulary: VocabularySize,
) -> Result<()> {
    ensure!(
        args.map.is_none(),
        Usage(
            "--map is for models that keep something of a text; this one has activations alone"
                .into()
        )
    );
    let engine = EngineConfig {
        threads: args.cpu.threads,
        matmul_precision: args.cpu.matmul_precision,
        ..EngineConfig::default()
    };
    let config = EmbedderConfig {
        batch_tokens: args.batch.get(),
        context_tokens: args.ctx.map(usize::from),
        ..EmbedderConfig::default()
    };
    let limits = config.limits(spec);
    let program = Program::new(spec);
    let arena = ArenaPlan::new(&program, limits)?;
    let long_text_bytes = match limits.context_tokens > limits.tokens {
        true => ArenaPlan::new(&program, limits.of_one_text(limits.context_tokens))?.bytes() as u64,
        false => 0,
    };
    let cpu = engine.cpu()?;
    let committed = Parts::of_encoder(spec, weights, vocabulary, (&arena, &cpu), 0);
    let report = Report {
        model: &args.model.model,
        architecture: spec.family,
        layers: spec.layers.len(),
        dimensions: spec.embedding_width(),
        context_tokens: limits.context_tokens,
        batch_tokens: limits.tokens,
        threads: cpu.threads.get(),
        mapped_weight_bytes: weights.mapped_bytes(),
        committed_bytes: committed.bytes(),
        long_text_bytes,
        committed,
        budget_bytes: args.budget.map(|budget| budget.0),
    };
    match args.model.json {
        true => output::json(&report)?,
        false => print(&report)?,
    }
    match report.budget_bytes {
        Some(budget) if budget < report.committed_bytes => bail!(
            "the plan does not fit the budget; use a smaller --ctx or --batch, or fewer --threads"
        ),
        _ => Ok(()),
    }
}

fn print(report: &Report<'_>) -> Result<()> {
    let Parts {
        program_bytes,
        vocabulary_bytes,
        thread_bytes,
        copied_weight_bytes,
        converted_weight_bytes,
        activation_bytes,
        ..
    } = report.committed;
    let made = match report.dimensions {
        Some(dimensions) => format!("embeddings of {dimensions} elements"),
        None => "scores of pairs of texts".to_owned(),
    };
    output::print(|out| {
        writeln!(
            out,
            "{} ({}, {} layers): {made}, of texts of up to {} tokens, {} in one pass",
            output::name(report.model),
            report.architecture,
            report.layers,
            report.context_tokens,
            report.batch_tokens,
        )?;
        for (part, bytes) in [
            ("program", program_bytes),
            ("vocabulary", vocabulary_bytes),
            ("threads", thread_bytes),
            ("copied weights", copied_weight_bytes),
            ("converted weights", converted_weight_bytes),
            ("activations", activation_bytes),
            ("committed", report.committed_bytes),
            ("for the longest text", report.long_text_bytes),
            ("mapped weights, beside", report.mapped_weight_bytes),
        ] {
            writeln!(out, "  {part:<24}{:>12}", output::bytes(bytes))?;
        }
        match report.budget_bytes {
            Some(budget) => writeln!(out, "  {:<24}{:>12}", "budget", output::bytes(budget)),
            None => Ok(()),
        }
    })
}
