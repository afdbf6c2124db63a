//! `lacuna pull`, `list` and `rm`: the models in the hub's cache.

use std::io::{self, IsTerminal, Write};

use anyhow::{Context, Result, bail};
use lacuna::ModelFiles;
use lacuna::files::hub::{HeldModel, Hub, Settings};
use lacuna::plan::{
    Demand, DraftMemory, Logits, Plan, VocabularySize, WeightMode, WeightPlan, WeightSource,
};
use lacuna::{EngineConfig, KvElements, KvPolicy};
use lacuna_cli::{Bars, output};
use lacuna_kv::KvCache;
use serde::Serialize;

use crate::cli::{ListArgs, PullArgs, RmArgs};

#[derive(Serialize)]
struct Pulled {
    id: String,
    path: String,
}

pub(crate) fn pull(args: &PullArgs) -> Result<()> {
    let hub = Hub::new(Settings::from_env()?);
    let path = hub
        .fetch(&args.id, &mut Bars::default())
        .with_context(|| format!("cannot fetch `{}`", args.id))?;
    let path = path.display().to_string();
    match args.json {
        true => output::json(&Pulled {
            id: args.id.to_string(),
            path,
        }),
        false => output::print(|out| writeln!(out, "{path}")),
    }
}

#[derive(Serialize)]
struct Listing {
    available_bytes: Option<u64>,
    models: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    id: String,
    path: String,
    bytes: u64,
    /// None where the files are no model that runs.
    needs: Option<Needs>,
    /// Why not.
    refused: Option<String>,
}

/// What running a model takes.
#[derive(Serialize, Clone, Copy)]
struct Needs {
    context_tokens: usize,
    committed_bytes: u64,
    mapped_weight_bytes: u64,
    fit: Option<Fit>,
}

/// How that compares with the memory that is available.
#[derive(Serialize, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
enum Fit {
    /// All of it has room, weights included.
    Whole,
    /// What is committed has; weights are read again.
    WeightsReread,
    /// Not even that.
    No,
}

impl Fit {
    fn words(self) -> &'static str {
        match self {
            Self::Whole => "fits",
            Self::WeightsReread => "fits, weights read again and again",
            Self::No => "does not fit",
        }
    }
}

pub(crate) fn list(args: &ListArgs) -> Result<()> {
    let hub = Hub::new(Settings::from_env()?);
    let available = lacuna_pages::available_memory().map(|bytes| bytes.get());
    let row = |model: HeldModel| {
        let needs = needs(&model, args.ctx.get(), available);
        Row {
            id: model.id,
            path: model.path.display().to_string(),
            bytes: model.bytes,
            refused: needs.as_ref().err().map(output::with_causes),
            needs: needs.ok(),
        }
    };
    let listing = Listing {
        available_bytes: available,
        models: hub.held().into_iter().map(row).collect(),
    };
    match args.json {
        true => output::json(&listing),
        false => output::print(|out| print(&listing, out)),
    }
}

/// From the directory of tensors alone: no weight is read.
fn needs(model: &HeldModel, most_tokens: usize, available: Option<u64>) -> Result<Needs> {
    let files = ModelFiles::open(&model.path)?;
    let description = lacuna::describe(&files)?;
    let weights = WeightPlan::of(files.tensors(), &description);
    let spec = description.spec;
    let mapped_weight_bytes = weights.mapped_bytes();
    let context_tokens = most_tokens.min(spec.context_tokens);
    if spec.pooled().is_some() {
        bail!("makes embeddings; see `lacuna embed`");
    }
    let geometry = spec.kv_geometry(KvElements::default())?;
    let cache = KvCache::new(geometry, KvPolicy::default())?;
    let config = EngineConfig::default();
    let demand = Demand {
        context_tokens,
        batch_tokens: config.batch_tokens,
        logits: Logits::Last,
        sequences: 1,
        draft_tokens: 0,
        draft: DraftMemory::default(),
        cpu: config.cpu()?,
        weights: WeightMode::Fixed(WeightSource::Mmap),
        budget_bytes: None,
        request_bytes: None,
        image_bytes: 0,
    };
    let vocabulary = VocabularySize::of(&files, &spec);
    let plan = Plan::new(&spec, weights, vocabulary, &cache, &demand)?;
    let committed_bytes = plan.full().bytes();
    let fit = |available| match committed_bytes {
        committed if committed.saturating_add(mapped_weight_bytes) <= available => Fit::Whole,
        committed if committed <= available => Fit::WeightsReread,
        _ => Fit::No,
    };
    Ok(Needs {
        context_tokens,
        committed_bytes,
        mapped_weight_bytes,
        fit: available.map(fit),
    })
}

fn print(listing: &Listing, out: &mut dyn Write) -> io::Result<()> {
    if listing.models.is_empty() {
        return writeln!(out, "no models yet; `lacuna pull owner/name` downloads one");
    }
    let longest = listing.models.iter().map(|row| row.id.chars().count());
    let width = longest.max().unwrap_or(0);
    for row in &listing.models {
        let Row { id, bytes, .. } = row;
        let told = match (&row.needs, &row.refused) {
            (Some(needs), _) => format!(
                "{} and weights at {} tokens: {}",
                output::bytes(needs.committed_bytes),
                needs.context_tokens,
                needs.fit.map_or("", Fit::words)
            ),
            (None, why) => why.clone().unwrap_or_default(),
        };
        writeln!(out, "{id:width$}  {:>10}  {told}", output::bytes(*bytes))?;
    }
    match listing.available_bytes {
        Some(available) => writeln!(out, "{} of memory are available", output::bytes(available)),
        None => Ok(()),
    }
}

#[derive(Serialize)]
struct Removed {
    id: String,
    freed_bytes: u64,
}

pub(crate) fn rm(args: &RmArgs) -> Result<()> {
    let hub = Hub::new(Settings::from_env()?);
    if !args.yes && !args.json && !agreed(&format!("Remove {}?", args.id))? {
        bail!("nothing was removed");
    }
    let freed_bytes = hub.remove(&args.id)?;
    let id = args.id.to_string();
    match args.json {
        true => output::json(&Removed { id, freed_bytes }),
        false => {
            output::print(|out| writeln!(out, "removed {id}: {} freed", output::bytes(freed_bytes)))
        }
    }
}

/// Asks on the terminal. Where there is none to ask on, the answer has to be given as `--yes`.
fn agreed(question: &str) -> Result<bool> {
    if !io::stdin().is_terminal() {
        bail!("nobody is there to ask; say --yes");
    }
    lacuna_cli::tell!("{question} [y/N]");
    let mut answer = String::new();
    io::stdin().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}
