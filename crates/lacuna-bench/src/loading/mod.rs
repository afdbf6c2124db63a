//! `lacuna bench loading`: what the ways to have weights cost and hold, and what KV memory taken ahead changes.
//!
//! Three suites over any number of models: the time to load and to the first token by way and by what the page cache
//! holds of the files before; speed by way; and the same with KV memory for a number of tokens there from the start.
//! Every figure is from a process of its own, because what a process has mapped or read once it finds again, and
//! the kernel's account of its memory is for the whole of it.

mod cell;
mod table;

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use lacuna_cli::{open_files, output};
use lacuna_models::plan::{WeightMode, WeightSource};
use serde::Serialize;

use crate::arguments::{BenchLoadingArgs, LoadingCellArgs};
use crate::machine::Machine;
use crate::plot::{Axis, Line, Plot};
use crate::samples::median;
use cell::Cell;
pub(crate) use cell::run as run_cell;

#[derive(Serialize)]
struct Report {
    machine: Machine,
    prompt_tokens: usize,
    generated_tokens: usize,
    repeats: usize,
    /// By model, way and what was in the page cache.
    loading: Vec<Row>,
    /// By model and tokens that KV memory was taken for from the start, the files in the page cache.
    kv: Vec<Row>,
}

/// Medians over the repeats.
#[derive(Serialize)]
struct Row {
    model: String,
    /// Of all its files.
    file_bytes: u64,
    weights: WeightSource,
    cache: PageCache,
    /// Tokens that KV memory is taken for from the start; 0 takes pages as tokens come.
    kv_tokens: usize,
    #[serde(flatten)]
    cell: Cell,
}

/// What the page cache has of the files when a process starts.
#[derive(Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum PageCache {
    Cold,
    Warm,
}

impl PageCache {
    const fn name(self) -> &'static str {
        match self {
            Self::Cold => "cold",
            Self::Warm => "warm",
        }
    }
}

/// A model and its files.
struct Subject {
    model: String,
    files: Vec<PathBuf>,
    bytes: u64,
}

impl Subject {
    fn open(model: &str) -> Result<Self> {
        let args = lacuna_cli::ModelArgs {
            model: model.to_owned(),
            json: false,
            eyes: lacuna_cli::EyesArgs::default(),
        };
        let opened = open_files(&args)?;
        let mappings = opened.tensors().mappings().iter();
        let mut files: Vec<PathBuf> = mappings
            .filter_map(|it| it.path().map(Path::to_owned))
            .collect();
        files.sort();
        files.dedup();
        ensure!(
            !files.is_empty(),
            output::Usage(format!("`{model}` is not in a file: give the path of one"))
        );
        let length = |path: &PathBuf| Ok(path.metadata()?.len());
        let bytes = files.iter().map(length).sum::<io::Result<u64>>();
        Ok(Self {
            model: model.to_owned(),
            bytes: bytes.with_context(|| format!("cannot look at the files of `{model}`"))?,
            files,
        })
    }

    /// Makes the page cache hold all of the files, or nothing.
    fn prepare(&self, cache: PageCache) -> Result<()> {
        for path in &self.files {
            let done = match cache {
                PageCache::Cold => forget(path),
                PageCache::Warm => remember(path),
            };
            done.with_context(|| format!("cannot prepare `{}`", path.display()))?;
        }
        Ok(())
    }
}

/// What has not been written to the disk yet cannot be dropped.
#[cfg(target_os = "linux")]
fn forget(path: &Path) -> io::Result<()> {
    let file = File::open(path)?;
    file.sync_data()?;
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
    Ok(())
}

#[cfg(not(target_os = "linux"))]
fn forget(_: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

fn remember(path: &Path) -> io::Result<()> {
    io::copy(&mut File::open(path)?, &mut io::sink()).map(drop)
}

pub(crate) fn run(args: &BenchLoadingArgs) -> Result<()> {
    let subjects = args.models.iter().map(|model| Subject::open(model));
    let subjects = subjects.collect::<Result<Vec<_>>>()?;
    let bench = Bench {
        args,
        progress: bar(args, subjects.len())?,
    };
    let (mut loading, mut kv) = (Vec::new(), Vec::new());
    for subject in &subjects {
        for &weights in &args.weights {
            for cache in [PageCache::Cold, PageCache::Warm] {
                loading.push(bench.row(subject, weights, cache, 0)?);
            }
        }
        for &tokens in &args.kv_tokens {
            kv.push(bench.row(subject, args.weights[0], PageCache::Warm, tokens)?);
        }
    }
    bench.progress.finish_and_clear();
    let report = Report {
        machine: Machine::this(),
        prompt_tokens: args.prompt.get(),
        generated_tokens: args.generate.get(),
        repeats: args.repeats.get(),
        loading,
        kv,
    };
    if let Some(path) = &args.plot {
        plot(&report).save(path)?;
    }
    match args.json {
        true => output::json(&report),
        false => output::print(|out| table::print(out, &report)),
    }
}

fn bar(args: &BenchLoadingArgs, subjects: usize) -> Result<ProgressBar> {
    let rows = subjects * (2 * args.weights.len() + args.kv_tokens.len());
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} {msg}")?;
    Ok(ProgressBar::new((rows * args.repeats.get()) as u64).with_style(style))
}

struct Bench<'a> {
    args: &'a BenchLoadingArgs,
    progress: ProgressBar,
}

impl Bench<'_> {
    fn row(
        &self,
        subject: &Subject,
        weights: WeightSource,
        cache: PageCache,
        kv_tokens: usize,
    ) -> Result<Row> {
        let mut cells = Vec::new();
        for _ in 0..self.args.repeats.get() {
            self.progress.set_message(format!(
                "{} {} {}",
                subject.model,
                weights.name(),
                cache.name()
            ));
            subject.prepare(cache)?;
            cells.push(self.cell(subject, weights, kv_tokens)?);
            self.progress.inc(1);
        }
        Ok(Row {
            model: subject.model.clone(),
            file_bytes: subject.bytes,
            weights,
            cache,
            kv_tokens,
            cell: Cell::median(cells).context("one repeat at least")?,
        })
    }

    /// Measures in a process of its own.
    fn cell(&self, subject: &Subject, weights: WeightSource, kv_tokens: usize) -> Result<Cell> {
        let program = std::env::current_exe().context("cannot find this program")?;
        let mut command = Command::new(program);
        command.args(["bench", "loading-cell", &subject.model]);
        command.args(["--weights", weights.name()]);
        command.args(["--prompt", &self.args.prompt.to_string()]);
        command.args(["--generate", &self.args.generate.to_string()]);
        command.args(["--kv-tokens", &kv_tokens.to_string()]);
        if let Some(threads) = self.args.threads {
            command.args(["--threads", &threads.to_string()]);
        }
        let output = command.stdin(Stdio::null()).output();
        let output = output.context("cannot start a process of this program")?;
        ensure!(
            output.status.success(),
            "`{}` with weights by {}: {}",
            subject.model,
            weights.name(),
            String::from_utf8_lossy(&output.stderr).trim()
        );
        serde_json::from_slice(&output.stdout).context("a process said what is no measurement")
    }
}

impl LoadingCellArgs {
    /// How weights are had.
    fn mode(&self) -> WeightMode {
        WeightMode::Fixed(self.weights)
    }
}

/// The time to the first token against the size of the files.
fn plot(report: &Report) -> Plot {
    let mut lines: Vec<Line> = Vec::new();
    for row in &report.loading {
        let name = format!("{}, {}", row.weights.name(), row.cache.name());
        let point = (row.file_bytes as f64 / 1e9, row.cell.first_token_s);
        match lines.iter_mut().find(|line| line.name == name) {
            Some(line) => line.points.push(point),
            None => lines.push(Line {
                name,
                points: vec![point],
            }),
        }
    }
    for line in &mut lines {
        line.points.sort_by(|a, b| a.0.total_cmp(&b.0));
    }
    Plot {
        title: format!(
            "From the start to the first token, a prompt of {} tokens",
            report.prompt_tokens
        ),
        x: Axis::linear("GB of weights"),
        y: Axis::linear("seconds"),
        lines,
    }
}

/// The middle of a figure of cells.
fn middle(cells: &[Cell], of: impl Fn(&Cell) -> f64) -> f64 {
    median(cells.iter().map(of).collect()).unwrap_or(0.0)
}
