//! `lacuna cache`: what servers have left in a KV cache folder.

use std::path::Path;
use std::time::SystemTime;

use anyhow::{Context, Result, bail};
use lacuna_cli::output;
use lacuna_kv::folder;
use serde::Serialize;

use crate::cli::{CacheAction, CacheArgs, CacheFolderArgs, CacheReadArgs};

pub(crate) fn run(args: &CacheArgs) -> Result<()> {
    match &args.action {
        CacheAction::List(args) => list(args),
        CacheAction::Verify(args) => verify(args),
        CacheAction::Clear(args) => clear(args),
    }
}

#[derive(Serialize)]
struct Listing {
    bytes: u64,
    folders: Vec<Row>,
}

/// The segments that were computed by the same settings.
#[derive(Serialize)]
struct Row {
    path: String,
    settings: Vec<(String, String)>,
    segments: usize,
    resume_points: usize,
    tokens: u64,
    bytes: u64,
    unusable: usize,
    /// Segments that are encrypted with another key.
    locked: usize,
    /// Seconds since it was last of use.
    idle_seconds: Option<u64>,
}

fn cannot_read(folder: &Path) -> String {
    format!("cannot read the folder `{}`", folder.display())
}

fn list(args: &CacheReadArgs) -> Result<()> {
    let (args, key) = (&args.folder, args.kv_cache_key.as_ref());
    let listed = folder::list(&args.folder, key).with_context(|| cannot_read(&args.folder))?;
    let now = SystemTime::now();
    let row = |listed: folder::Listed| Row {
        path: listed.path.display().to_string(),
        segments: listed.rows,
        resume_points: listed.resume_points,
        tokens: listed.tokens,
        bytes: listed.bytes,
        unusable: listed.unusable,
        locked: listed.locked,
        idle_seconds: listed
            .used
            // What is pinned is in use.
            .map(|used| now.duration_since(used).unwrap_or_default().as_secs()),
        settings: listed.settings,
    };
    let folders: Vec<Row> = listed.into_iter().map(row).collect();
    let listing = Listing {
        bytes: folders.iter().map(|row| row.bytes).sum(),
        folders,
    };
    if args.json {
        return output::json(&listing);
    }
    output::print(|out| {
        for row in &listing.folders {
            writeln!(
                out,
                "{}: {} tokens in {} segments, {} resume points, {}, {} files of no use",
                row.path,
                row.tokens,
                row.segments,
                row.resume_points,
                output::bytes(row.bytes),
                row.unusable,
            )?;
            if row.locked > 0 {
                writeln!(
                    out,
                    "  {} segments are encrypted; --kv-cache-key tells what they hold",
                    row.locked
                )?;
            }
            for (name, value) in &row.settings {
                writeln!(out, "  {name}: {}", shortened(value))?;
            }
        }
        writeln!(out, "{} in all", output::bytes(listing.bytes))
    })
}

/// So much of `value` as tells it from others at a glance.
fn shortened(value: &str) -> String {
    const CHARACTERS: usize = 60;
    match value.char_indices().nth(CHARACTERS) {
        Some((end, _)) => format!("{}...", &value[..end]),
        None => value.to_owned(),
    }
}

#[derive(Serialize)]
struct Verified {
    whole: usize,
    damaged: Vec<Damaged>,
    /// Segments that are encrypted with another key, and were not read.
    locked: usize,
}

#[derive(Serialize)]
struct Damaged {
    path: String,
    problem: String,
}

fn verify(args: &CacheReadArgs) -> Result<()> {
    let (args, key) = (&args.folder, args.kv_cache_key.as_ref());
    let mut verified = Verified {
        whole: 0,
        damaged: Vec::new(),
        locked: 0,
    };
    let each = |found: folder::Found| match found.problem {
        None => verified.whole += 1,
        Some(problem) => verified.damaged.push(Damaged {
            path: found.path.display().to_string(),
            problem,
        }),
    };
    let locked = folder::verify(&args.folder, key, each);
    verified.locked = locked.with_context(|| cannot_read(&args.folder))?;
    match args.json {
        true => output::json(&verified)?,
        false => output::print(|out| {
            for damaged in &verified.damaged {
                writeln!(out, "{}: {}", damaged.path, damaged.problem)?;
            }
            if verified.locked > 0 {
                let locked = verified.locked;
                writeln!(
                    out,
                    "{locked} segments are encrypted and were not read; give --kv-cache-key"
                )?;
            }
            writeln!(out, "{} segments are whole", verified.whole)
        })?,
    }
    match verified.damaged.len() {
        0 => Ok(()),
        damaged => bail!("{damaged} segments are damaged; servers compute them again"),
    }
}

#[derive(Serialize)]
struct Cleared {
    removed_bytes: u64,
}

fn clear(args: &CacheFolderArgs) -> Result<()> {
    let cannot_clear = || format!("cannot clear the folder `{}`", args.folder.display());
    let removed_bytes = folder::clear(&args.folder).with_context(cannot_clear)?;
    match args.json {
        true => output::json(&Cleared { removed_bytes }),
        false => output::print(|out| writeln!(out, "{} removed", output::bytes(removed_bytes))),
    }
}
