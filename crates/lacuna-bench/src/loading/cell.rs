//! One measurement: a model is loaded, reads a prompt and writes some tokens, in this process and once.

use std::fs;
use std::time::Instant;

use anyhow::Result;
use lacuna_cli::resident::Resident;
use lacuna_cli::{open_to_run, output};
use lacuna_engine::{Engine, EngineConfig, Sampling, Session};
use lacuna_kv::KvPolicy;
use serde::{Deserialize, Serialize};

use super::middle;
use crate::arguments::LoadingCellArgs;

/// What a process found.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Cell {
    /// How weights are read, where they are not mapped.
    pub(super) reading: Option<String>,
    /// From the start until the model can be asked.
    pub(super) load_s: f64,
    /// From the start until the first token is there.
    pub(super) first_token_s: f64,
    /// Of the prompt alone.
    pub(super) prompt_tokens_per_s: f64,
    /// Of the tokens after the first.
    pub(super) tokens_per_s: f64,
    /// Bytes that came from a disk, by the kernel's account of the process.
    pub(super) disk_bytes: u64,
    /// What the process kept when the model was loaded, by the kernel's account, where there is one.
    pub(super) loaded: Option<Resident>,
    /// And in the end.
    pub(super) end: Option<Resident>,
    /// KV memory in the end.
    pub(super) kv_bytes: u64,
}

impl Cell {
    /// The middle of each figure; memory is that of the middle one by size.
    pub(super) fn median(mut cells: Vec<Self>) -> Option<Self> {
        let figures = [
            |it: &Self| it.load_s,
            |it: &Self| it.first_token_s,
            |it: &Self| it.prompt_tokens_per_s,
            |it: &Self| it.tokens_per_s,
        ];
        let figures = figures.map(|of| middle(&cells, of));
        cells.sort_by_key(|it| it.end.map(|end| end.pss_bytes));
        let disk_bytes = middle(&cells, |it| it.disk_bytes as f64) as u64;
        let of = (cells.len().checked_sub(1)?) / 2;
        let [load_s, first_token_s, prompt_tokens_per_s, tokens_per_s] = figures;
        Some(Self {
            load_s,
            first_token_s,
            prompt_tokens_per_s,
            tokens_per_s,
            disk_bytes,
            ..cells.swap_remove(of)
        })
    }
}

/// Measures, and prints what was found as JSON.
pub(crate) fn run(args: &LoadingCellArgs) -> Result<()> {
    let begun = Instant::now();
    let (prompt, generated) = (args.prompt.get(), args.generate.get());
    let config = EngineConfig {
        threads: args.threads,
        weights: args.mode(),
        kv_policy: match args.kv_tokens {
            0 => KvPolicy::default(),
            _ => KvPolicy::Dense(KvPolicy::default().layout()),
        },
        context_tokens: Some(args.kv_tokens.max(prompt + generated)),
        ..EngineConfig::default()
    };
    let model = open_to_run(&args.model, &config)?;
    let load_s = begun.elapsed().as_secs_f64();
    let loaded = Resident::now();
    let reading = model.reading().map(str::to_owned);
    let vocabulary = model.spec().vocabulary;
    let mut engine = Engine::new(model, &config)?;
    let mut session = engine.session(Sampling::greedy())?;
    // Tokens far apart in the vocabulary, so that rows of its table are, too.
    let ids = (0..prompt).map(|at| ((at * 7919 + 3) % vocabulary) as u32);
    session.extend(&ids.collect::<Vec<_>>());
    let asked = Instant::now();
    write(&mut engine, &mut session, 1)?;
    let (prompt_s, first_token_s) = (asked.elapsed().as_secs_f64(), begun.elapsed().as_secs_f64());
    let first = Instant::now();
    write(&mut engine, &mut session, generated - 1)?;
    let rest_s = first.elapsed().as_secs_f64();
    output::json(&Cell {
        reading,
        load_s,
        first_token_s,
        prompt_tokens_per_s: prompt as f64 / prompt_s,
        tokens_per_s: match generated {
            1 => 0.0,
            _ => (generated - 1) as f64 / rest_s,
        },
        disk_bytes: disk_bytes().unwrap_or(0),
        loaded,
        end: Resident::now(),
        kv_bytes: session.kv().committed_bytes as u64,
    })
}

/// Takes steps until there are so many tokens more.
fn write(engine: &mut Engine, session: &mut Session, tokens: usize) -> Result<()> {
    let mut written = 0;
    while written < tokens {
        written += usize::from(engine.step(session)?.is_some());
    }
    Ok(())
}

/// Bytes that this process has had from disks.
fn disk_bytes() -> Option<u64> {
    let account = fs::read_to_string("/proc/self/io").ok()?;
    let line = account
        .lines()
        .find_map(|line| line.strip_prefix("read_bytes:"))?;
    line.trim().parse().ok()
}
