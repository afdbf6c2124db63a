//! `lacuna bench prefix`: sessions that begin alike, and what each of them takes to be ready.

use std::io::{self, Write};
use std::time::Instant;

use anyhow::Result;
use lacuna_kernels::Cpu;
use lacuna_kv::KvPolicy;
use lacuna_kv::Sequence;
use serde::Serialize;

use super::subject::Subject;
use super::{Room, bar, cache, kernel_bytes, processor, room, rows, store};
use crate::arguments::BenchPrefixArgs;
use crate::machine::Machine;
use crate::plot::{Axis, Line, Plot};
use crate::samples::Samples;
use lacuna_cli::output;

/// Rows written at once into the prefix.
const WRITTEN_ROWS: usize = 256;

#[derive(Serialize)]
struct Report {
    machine: Machine,
    model: String,
    layers: usize,
    kv_type: String,
    prefix_tokens: usize,
    prefix_bytes: usize,
    policies: Vec<Sharing>,
}

#[derive(Serialize)]
struct Sharing {
    policy: String,
    /// Sessions that were ready, with one token of their own each.
    sessions: usize,
    /// From the request to the first row of its own, the prefix being there.
    ready_median_us: Option<f64>,
    /// Of all sessions and the first.
    committed_bytes: u64,
    kernel_bytes: Option<u64>,
    copied_bytes: usize,
    /// Committed after each session, the first included.
    steps: Vec<u64>,
    /// Why there are fewer sessions than asked for.
    ended: Option<String>,
}

pub(crate) fn run(args: &BenchPrefixArgs) -> Result<()> {
    let subject = Subject::find(&args.kv, args.kv.kv_type)?;
    let cpu = processor()?;
    let progress = bar(args.kv.policies.len())?;
    let mut policies = Vec::new();
    for &policy in &args.kv.policies {
        progress.set_message(policy.to_string());
        policies.push(share(args, &subject, &cpu, policy)?);
        progress.inc(1);
    }
    progress.finish_and_clear();
    let report = Report {
        machine: Machine::this(),
        model: subject.name.clone(),
        layers: subject.layers(),
        kv_type: args.kv.kv_type.to_string(),
        prefix_tokens: args.prefix.get(),
        prefix_bytes: args.prefix.get() * subject.bytes_per_token(),
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

fn share(
    args: &BenchPrefixArgs,
    subject: &Subject,
    cpu: &Cpu,
    policy: KvPolicy,
) -> Result<Sharing> {
    let before = kernel_bytes();
    let cache = cache(subject, policy)?;
    let context = args.prefix.get() + WRITTEN_ROWS;
    let mut sharing = Sharing {
        policy: policy.to_string(),
        sessions: 0,
        ready_median_us: None,
        committed_bytes: 0,
        kernel_bytes: None,
        copied_bytes: 0,
        steps: Vec::new(),
        ended: None,
    };
    let mut donor = match room(cache.sequence(context))? {
        Room::Had(donor) => donor,
        Room::Lacking(error) => {
            sharing.ended = Some(error.to_string());
            return Ok(sharing);
        }
    };
    let rows = rows(subject, WRITTEN_ROWS);
    while donor.len() < args.prefix.get() {
        let count = WRITTEN_ROWS.min(args.prefix.get() - donor.len());
        if let Room::Lacking(error) = room(donor.prepare(count))? {
            sharing.ended = Some(error.to_string());
            return Ok(sharing);
        }
        store(cpu, subject, &mut donor, &rows);
        donor.accept(count);
    }
    sharing.steps.push(cache.ledger().committed.get());
    let (mut samples, mut held) = (Samples::default(), Vec::new());
    for _ in 0..args.sessions.get() {
        let start = Instant::now();
        match ready(&mut donor, args.prefix.get(), subject, cpu, &rows)? {
            Room::Had(session) => held.push(session),
            Room::Lacking(error) => {
                sharing.ended = Some(error.to_string());
                break;
            }
        }
        samples.push(start.elapsed());
        sharing.steps.push(cache.ledger().committed.get());
    }
    sharing.sessions = held.len();
    sharing.ready_median_us = samples.timing().map(|timing| timing.median_us);
    sharing.committed_bytes = cache.ledger().committed.get();
    sharing.kernel_bytes = kernel_bytes()
        .zip(before)
        .map(|(now, before)| now.saturating_sub(before));
    sharing.copied_bytes = held.iter().map(|held| held.report().copied_bytes).sum();
    Ok(sharing)
}

/// A session with the prefix and one token of its own.
fn ready(
    donor: &mut Sequence,
    prefix: usize,
    subject: &Subject,
    cpu: &Cpu,
    rows: &[f32],
) -> Result<Room<Sequence>> {
    let mut session = match room(donor.share_prefix(prefix))? {
        Room::Had(session) => session,
        lacking => return Ok(lacking),
    };
    if let Room::Lacking(error) = room(session.prepare(1))? {
        return Ok(Room::Lacking(error));
    }
    store(cpu, subject, &mut session, rows);
    session.accept(1);
    Ok(Room::Had(session))
}

fn print(out: &mut dyn Write, report: &Report) -> io::Result<()> {
    writeln!(out, "{}", report.machine.line())?;
    writeln!(
        out,
        "{}: KV of {} layers in {}, a prefix of {} tokens ({})\n",
        report.model,
        report.layers,
        report.kv_type,
        report.prefix_tokens,
        output::bytes(report.prefix_bytes as u64)
    )?;
    writeln!(
        out,
        "{:<26}{:>9}{:>12}{:>15}{:>15}{:>12}",
        "", "sessions", "ready ms", "committed MiB", "by kernel MiB", "copied MiB"
    )?;
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    for row in &report.policies {
        let ready = row.ready_median_us.unwrap_or(0.0) / 1e3;
        writeln!(
            out,
            "{:<26}{:>9}{ready:>12.2}{:>15.0}{:>15.0}{:>12.0}",
            row.policy,
            row.sessions,
            mib(row.committed_bytes),
            mib(row.kernel_bytes.unwrap_or(0)),
            mib(row.copied_bytes as u64)
        )?;
        if let Some(why) = &row.ended {
            writeln!(out, "{:<26}ended: {why}", "")?;
        }
    }
    Ok(())
}

fn plot(report: &Report) -> Plot {
    let line = |row: &Sharing| Line {
        name: row.policy.clone(),
        points: row
            .steps
            .iter()
            .enumerate()
            .map(|(sessions, &bytes)| (sessions as f64, bytes as f64 / f64::from(1 << 30)))
            .collect(),
    };
    Plot {
        title: format!(
            "KV memory of sessions that share {} tokens, {}",
            report.prefix_tokens, report.model
        ),
        x: Axis::linear("sessions beside the first"),
        y: Axis::linear("GiB committed"),
        lines: report.policies.iter().map(line).collect(),
    }
}
