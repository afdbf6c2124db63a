//! `lacuna bench memory | growth | batch | prefix`: what each way of holding a KV cache costs.
//!
//! Only the cache is there, in a real model's shape: rows are random and no weight is read. Policies
//! are measured one after another, each with a pool of its own that is gone before the next begins.

pub(crate) mod batch;
pub(crate) mod growth;
pub(crate) mod memory;
pub(crate) mod prefix;
mod subject;

use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressStyle};
use lacuna_kernels::{Cpu, CpuConfig};
use lacuna_kv::KvPolicy;
use lacuna_kv::{KvCache, KvError, Sequence};

use lacuna_cli::resident::Resident;
use subject::Subject;

/// A bar on standard error, for `steps` steps.
fn bar(steps: usize) -> Result<ProgressBar> {
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} {msg}")?;
    Ok(ProgressBar::new(steps as u64).with_style(style))
}

fn processor() -> Result<Cpu> {
    Ok(Cpu::new(CpuConfig::default())?)
}

/// What the kernel keeps in memory for this process, file pages left out.
fn kernel_bytes() -> Option<u64> {
    Resident::now().map(|now| now.anonymous_bytes + now.shared_memory_bytes)
}

/// Whether an operation had room.
enum Room<T> {
    Had(T),
    Lacking(KvError),
}

/// Tells running out of memory, which is a result, from errors.
fn room<T>(result: Result<T, KvError>) -> Result<Room<T>> {
    match result {
        Ok(value) => Ok(Room::Had(value)),
        Err(
            error @ (KvError::Pages(lacuna_pages::Error::OutOfPages { .. })
            | KvError::NotNow { .. }),
        ) => Ok(Room::Lacking(error)),
        Err(error) => Err(error.into()),
    }
}

/// Rows of one side of one layer for `tokens` tokens; what they hold does not matter.
fn rows(subject: &Subject, tokens: usize) -> Vec<f32> {
    (0..tokens * subject.geometry.widest_row())
        .map(|index| (index % 97) as f32 / 97.0 - 0.5)
        .collect()
}

/// Writes the prepared rows of every layer.
fn store(cpu: &Cpu, subject: &Subject, sequence: &mut Sequence, rows: &[f32]) {
    for (layer, spec) in subject.geometry.own_rows() {
        let prepared = sequence.prepared();
        sequence.write(layer, |side, run| {
            cpu.store_run(run, &rows[..prepared * spec.row_elements(side)]);
        });
    }
}

fn cache(subject: &Subject, policy: KvPolicy) -> Result<KvCache> {
    KvCache::new(subject.geometry.clone(), policy).with_context(|| format!("--kv {policy}"))
}
