//! `lacuna bench batch`: how many sequences of mixed lengths fit a fixed KV budget.

use std::io::{self, Write};

use anyhow::Result;
use lacuna_kv::KvPolicy;
use lacuna_kv::{KvCache, Sequence};
use lacuna_pages::ByteLength;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use serde::Serialize;

use super::subject::Subject;
use super::{Room, bar, cache, kernel_bytes, room};
use crate::arguments::BenchBatchArgs;
use crate::machine::Machine;
use crate::plot::{Axis, Line, Plot};
use lacuna_cli::output;

/// The shortest sequence.
const SHORTEST: usize = 512;

#[derive(Serialize)]
struct Report {
    machine: Machine,
    model: String,
    layers: usize,
    kv_type: String,
    budget_bytes: u64,
    context_tokens: usize,
    seed: u64,
    policies: Vec<Fit>,
}

#[derive(Serialize)]
struct Fit {
    policy: String,
    sequences: usize,
    /// Tokens of those sequences.
    tokens: usize,
    row_bytes: usize,
    committed_bytes: usize,
    kernel_bytes: Option<u64>,
    /// Row bytes over committed bytes.
    utilisation: f64,
    /// Row bytes over the budget.
    budget_used: f64,
    /// Committed after each sequence.
    steps: Vec<usize>,
}

pub(crate) fn run(args: &BenchBatchArgs) -> Result<()> {
    let subject = Subject::find(&args.kv, args.kv.kv_type)?;
    let progress = bar(args.kv.policies.len())?;
    let mut policies = Vec::new();
    for &policy in &args.kv.policies {
        progress.set_message(policy.to_string());
        policies.push(fit(args, &subject, policy)?);
        progress.inc(1);
    }
    progress.finish_and_clear();
    let report = Report {
        machine: Machine::this(),
        model: subject.name.clone(),
        layers: subject.layers(),
        kv_type: args.kv.kv_type.to_string(),
        budget_bytes: args.budget.0,
        context_tokens: args.ctx.get(),
        seed: args.seed,
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

/// Lengths as conversations have them: most are short, a few fill the context. The logarithm of a
/// length is the mean of two uniform draws between those of the shortest and the longest.
struct Lengths {
    random: ChaCha8Rng,
    longest: usize,
}

impl Iterator for Lengths {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        let mut uniform = || f64::from(self.random.next_u32()) / f64::from(u32::MAX);
        let place = (uniform() + uniform()) / 2.0;
        let shortest = SHORTEST.min(self.longest) as f64;
        let length = shortest * (self.longest as f64 / shortest).powf(place);
        Some((length as usize).clamp(1, self.longest))
    }
}

fn fit(args: &BenchBatchArgs, subject: &Subject, policy: KvPolicy) -> Result<Fit> {
    let before = kernel_bytes();
    let cache = cache(subject, policy)?;
    cache.set_limit(ByteLength::new(args.budget.0))?;
    let lengths = Lengths {
        random: ChaCha8Rng::seed_from_u64(args.seed),
        longest: args.ctx.get(),
    };
    let (mut held, mut steps, mut committed_bytes) = (Vec::new(), Vec::new(), 0);
    for length in lengths {
        match admit(&cache, args.ctx.get(), length)? {
            Room::Had(sequence) => {
                committed_bytes += sequence.report().committed_bytes;
                steps.push(committed_bytes);
                held.push(sequence);
            }
            Room::Lacking(_) => break,
        }
    }
    let tokens = held.iter().map(Sequence::len).sum();
    let row_bytes = tokens * subject.bytes_per_token();
    Ok(Fit {
        policy: policy.to_string(),
        sequences: held.len(),
        tokens,
        row_bytes,
        committed_bytes,
        kernel_bytes: kernel_bytes()
            .zip(before)
            .map(|(now, before)| now.saturating_sub(before)),
        utilisation: row_bytes as f64 / committed_bytes.max(1) as f64,
        budget_used: row_bytes as f64 / args.budget.0 as f64,
        steps,
    })
}

/// A sequence that reaches its length, or nothing.
fn admit(cache: &KvCache, context: usize, length: usize) -> Result<Room<Sequence>> {
    let mut sequence = match room(cache.sequence(context))? {
        Room::Had(sequence) => sequence,
        lacking => return Ok(lacking),
    };
    Ok(match room(sequence.prepare(length))? {
        Room::Had(()) => {
            sequence.accept(length);
            Room::Had(sequence)
        }
        Room::Lacking(error) => Room::Lacking(error),
    })
}

fn print(out: &mut dyn Write, report: &Report) -> io::Result<()> {
    writeln!(out, "{}", report.machine.line())?;
    writeln!(
        out,
        "{}: KV of {} layers in {}, budget {}, sequences of {SHORTEST} to {} tokens\n",
        report.model,
        report.layers,
        report.kv_type,
        output::bytes(report.budget_bytes),
        report.context_tokens
    )?;
    writeln!(
        out,
        "{:<26}{:>10}{:>10}{:>15}{:>12}{:>13}",
        "", "sequences", "tokens", "committed MiB", "used", "of budget"
    )?;
    for row in &report.policies {
        writeln!(
            out,
            "{:<26}{:>10}{:>10}{:>15.0}{:>11.1}%{:>12.1}%",
            row.policy,
            row.sequences,
            row.tokens,
            row.committed_bytes as f64 / f64::from(1 << 20),
            row.utilisation * 100.0,
            row.budget_used * 100.0
        )?;
    }
    Ok(())
}

fn plot(report: &Report) -> Plot {
    let gib = |bytes: usize| bytes as f64 / f64::from(1 << 30);
    let line = |row: &Fit| Line {
        name: format!("{}: {}", row.policy, row.sequences),
        points: row
            .steps
            .iter()
            .enumerate()
            .map(|(index, &bytes)| ((index + 1) as f64, gib(bytes)))
            .collect(),
    };
    Plot {
        title: format!(
            "Sequences within {} of KV memory, {}",
            output::bytes(report.budget_bytes),
            report.model
        ),
        x: Axis::linear("sequences"),
        y: Axis::linear("GiB committed"),
        lines: report.policies.iter().map(line).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_mixed_and_repeat_with_their_seed() {
        let draw = |seed| Lengths {
            random: ChaCha8Rng::seed_from_u64(seed),
            longest: 8_192,
        };
        let lengths: Vec<usize> = draw(1).take(1_000).collect();
        assert!(
            lengths
                .iter()
                .all(|length| (SHORTEST..=8_192).contains(length))
        );
        let mean = lengths.iter().sum::<usize>() / lengths.len();
        assert!((2_000..3_000).contains(&mean), "{mean}");
        assert!(draw(1).take(1_000).eq(lengths));
        assert!(draw(2).take(10).ne(draw(1).take(10)));
    }
}
