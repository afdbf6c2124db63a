//! `lacuna bench memory`: committed bytes against tokens, by the ledger and by the kernel.

use std::io::{self, Write};

use anyhow::Result;
use lacuna_kv::{KvCache, KvError, KvReport, Sequence};
use serde::Serialize;

use super::subject::Subject;
use super::{Room, bar, cache, room};
use crate::arguments::BenchMemoryArgs;
use crate::machine::Machine;
use crate::plot::{Axis, Line, Plot};
use lacuna_cli::output;
use lacuna_cli::resident::Resident;

#[derive(Serialize)]
struct Report {
    machine: Machine,
    model: String,
    layers: usize,
    kv_type: String,
    /// As if every layer kept all rows.
    bytes_per_token: usize,
    context_tokens: usize,
    sequences: usize,
    policies: Vec<Curve>,
}

#[derive(Serialize)]
struct Curve {
    policy: String,
    page_bytes: usize,
    points: Vec<Point>,
    /// Why the curve ends early.
    ended: Option<String>,
}

#[derive(Serialize)]
struct Point {
    /// Of each sequence.
    tokens: usize,
    /// What the rows that later tokens may read take: the least that can be.
    row_bytes: usize,
    /// By the cache's own account.
    committed_bytes: usize,
    /// The most that was committed on the way here.
    peak_bytes: usize,
    /// What the kernel keeps for the process beyond what it kept before the sequences were made.
    kernel_bytes: Option<u64>,
    /// The part of it that is KV pages of `sparse`; the rest is what the books of them take.
    shared_memory_bytes: Option<u64>,
}

/// Tokens that join a sequence with windows at once, as in the passes that compute a prompt: rows
/// that a window passes are there until the pass is over.
const PASS_TOKENS: usize = 512;

pub(crate) fn run(args: &BenchMemoryArgs) -> Result<()> {
    let subject = Subject::find(&args.kv, args.kv.kv_type)?;
    let tokens = args.ctx.get();
    let sequences = args.sequences.get();
    let progress = bar(args.kv.policies.len())?;
    let mut policies = Vec::new();
    for &policy in &args.kv.policies {
        progress.set_message(policy.to_string());
        policies.push(curve(
            &subject,
            &cache(&subject, policy)?,
            tokens,
            sequences,
        )?);
        progress.inc(1);
    }
    progress.finish_and_clear();
    let report = Report {
        machine: Machine::this(),
        model: subject.name.clone(),
        layers: subject.layers(),
        kv_type: args.kv.kv_type.to_string(),
        bytes_per_token: subject.bytes_per_token(),
        context_tokens: tokens,
        sequences,
        policies,
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

/// The empty sequence and eight lengths up to `most`, each twice the one before it, with two thirds of
/// each between them: those do not end with a page.
fn lengths(most: usize) -> Vec<usize> {
    let steps = (0..8).rev().flat_map(|power| {
        let length = most >> power;
        [length * 2 / 3, length]
    });
    let mut lengths: Vec<usize> = std::iter::once(0).chain(steps).collect();
    lengths.dedup();
    lengths
}

fn curve(subject: &Subject, cache: &KvCache, context: usize, sequences: usize) -> Result<Curve> {
    let before = Resident::now();
    let mut curve = Curve {
        policy: cache.policy().to_string(),
        page_bytes: cache.page_bytes(),
        points: Vec::new(),
        ended: None,
    };
    let made = (0..sequences).map(|_| cache.sequence(context)).collect();
    let mut made: Vec<Sequence> = match room(made)? {
        Room::Had(sequences) => sequences,
        Room::Lacking(error) => {
            curve.ended = Some(error.to_string());
            return Ok(curve);
        }
    };
    for tokens in lengths(context) {
        let grown = made.iter_mut().try_for_each(|one| grow(one, tokens));
        if let Room::Lacking(error) = room(grown)? {
            curve.ended = Some(error.to_string());
            break;
        }
        let reports: Vec<KvReport> = made.iter().map(Sequence::report).collect();
        let sum = |bytes: fn(&KvReport) -> usize| reports.iter().map(bytes).sum();
        curve.points.push(Point {
            tokens,
            row_bytes: sequences * subject.geometry.useful_bytes(tokens),
            committed_bytes: sum(|report| report.committed_bytes),
            peak_bytes: sum(|report| report.peak_committed_bytes),
            kernel_bytes: since(before, |now| now.anonymous_bytes + now.shared_memory_bytes),
            shared_memory_bytes: since(before, |now| now.shared_memory_bytes),
        });
    }
    Ok(curve)
}

/// What the kernel keeps now beyond what it kept `before`.
fn since(before: Option<Resident>, bytes: fn(&Resident) -> u64) -> Option<u64> {
    let now = Resident::now()?;
    Some(bytes(&now).saturating_sub(bytes(&before?)))
}

/// Adds tokens to `sequence` until there are `tokens`. Windows have passed what they pass.
fn grow(sequence: &mut Sequence, tokens: usize) -> Result<(), KvError> {
    let at_once = match sequence.geometry().has_windows() {
        true => PASS_TOKENS,
        false => usize::MAX,
    };
    while sequence.len() < tokens {
        let missing = at_once.min(tokens - sequence.len());
        sequence.prepare(missing)?;
        sequence.accept(missing);
    }
    sequence.release_passed()
}

fn print(out: &mut dyn Write, report: &Report) -> io::Result<()> {
    writeln!(out, "{}", report.machine.line())?;
    writeln!(
        out,
        "{}: KV of {} layers in {}, {} bytes per token, context {}, sequences {}\n",
        report.model,
        report.layers,
        report.kv_type,
        report.bytes_per_token,
        report.context_tokens,
        report.sequences
    )?;
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    writeln!(
        out,
        "{:<26}{:>9}{:>11}{:>14}{:>12}{:>12}",
        "MiB", "tokens", "rows", "committed", "by kernel", "peak"
    )?;
    for curve in &report.policies {
        for point in &curve.points {
            let kernel = point
                .kernel_bytes
                .map_or("-".to_owned(), |bytes| format!("{:.1}", mib(bytes)));
            writeln!(
                out,
                "{:<26}{:>9}{:>11.1}{:>14.1}{kernel:>12}{:>12.1}",
                curve.policy,
                point.tokens,
                mib(point.row_bytes as u64),
                mib(point.committed_bytes as u64),
                mib(point.peak_bytes as u64),
            )?;
        }
        if let Some(why) = &curve.ended {
            writeln!(out, "{:<26}ended: {why}", curve.policy)?;
        }
    }
    Ok(())
}

fn plot(report: &Report) -> Plot {
    let gib = |bytes: usize| bytes as f64 / f64::from(1 << 30);
    let line = |curve: &Curve| Line {
        name: curve.policy.clone(),
        points: curve
            .points
            .iter()
            .map(|point| (point.tokens as f64, gib(point.committed_bytes)))
            .collect(),
    };
    Plot {
        title: format!("KV memory of {}, {} cache", report.model, report.kv_type),
        x: Axis::linear("tokens in the context"),
        y: Axis::linear("GiB committed"),
        lines: report.policies.iter().map(line).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::lengths;

    #[test]
    fn lengths_double_up_to_the_context() {
        assert_eq!(lengths(1_024)[..6], [0, 5, 8, 10, 16, 21]);
        assert_eq!(lengths(1_024).last(), Some(&1_024));
        assert_eq!(lengths(3), [0, 1, 2, 3]);
    }
}
