//! Which models a cache holds, and how one leaves it.

use std::collections::BTreeSet;
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use super::cache::{FOLDER_DEPTH, Repository, collect_names};
use super::error::Error;
use super::select::{Choice, choose, every_choice};
use crate::huggingface;
use crate::source::HubId;

/// What begins the name of a model's folder in a cache.
const MODELS: &str = "models--";
/// What ends the name of contents that are still arriving.
const INCOMPLETE: &str = "incomplete";

/// A model that a cache holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeldModel {
    /// What it is named by: `owner/name`, with `@revision` where that is not `main`, and with `:file`
    /// where the repository has GGUF files.
    pub id: String,
    /// What to open.
    pub path: PathBuf,
    /// Bytes of its files.
    pub bytes: u64,
}

/// The models in a cache, by name. Folders that cannot be read are left out.
pub(super) fn held(cache: &Path) -> Vec<HeldModel> {
    let mut models = Vec::new();
    for entry in fs::read_dir(cache).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let name = name.to_str().and_then(|name| name.strip_prefix(MODELS));
        let Some((owner, name)) = name.and_then(|name| name.split_once("--")) else {
            continue;
        };
        let repository = format!("{owner}/{name}");
        for (revision, snapshot) in snapshots(&entry.path()) {
            let named = match revision.as_str() {
                "main" => repository.clone(),
                other => format!("{repository}@{other}"),
            };
            models.extend(models_of(&named, &snapshot));
        }
    }
    models.sort_by(|a, b| a.id.cmp(&b.id));
    models
}

/// The snapshots of a repository's folder, each by the branch or tag that is at it, or else its commit.
fn snapshots(root: &Path) -> Vec<(String, PathBuf)> {
    let mut references = Vec::new();
    collect_names(&root.join("refs"), "", FOLDER_DEPTH, &mut references);
    let at = |commit: &str| {
        let mut names = references.iter().filter(|name| {
            let reference = fs::read_to_string(root.join("refs").join(name));
            reference.is_ok_and(|reference| reference.trim() == commit)
        });
        // The branch that a name without a revision means.
        let main = names.clone().find(|name| *name == "main");
        main.or_else(|| names.next()).cloned()
    };
    let folders = fs::read_dir(root.join("snapshots"));
    let folders = folders.into_iter().flatten().flatten();
    let mut found: Vec<(String, PathBuf)> = folders
        .filter_map(|entry| {
            let commit = entry.file_name().into_string().ok()?;
            Some((at(&commit).unwrap_or(commit), entry.path()))
        })
        .collect();
    found.sort();
    found
}

fn models_of(named: &str, snapshot: &Path) -> Vec<HeldModel> {
    let mut names = Vec::new();
    collect_names(snapshot, "", FOLDER_DEPTH, &mut names);
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let choices = every_choice(&names);
    let held = choices.into_iter().map(|choice| HeldModel {
        id: match &choice {
            Choice::Gguf { files } => format!("{named}:{}", files[0]),
            Choice::Folder { .. } => named.to_owned(),
        },
        path: choice.entry(snapshot),
        bytes: files_of(&choice, snapshot)
            .iter()
            .filter_map(|name| fs::metadata(snapshot.join(name)).ok())
            .map(|metadata| metadata.len())
            .sum(),
    });
    held.collect()
}

/// The files of a choice, those that its index names among them.
fn files_of(choice: &Choice, snapshot: &Path) -> Vec<String> {
    let mut files = choice.files().to_vec();
    if let Choice::Folder { indexed: true, .. } = choice {
        let index = huggingface::index_in(snapshot).ok().flatten();
        let named = index.iter().flat_map(huggingface::Index::files);
        files.extend(named.map(|name| (*name).to_owned()));
    }
    files
}

/// Takes a model out of a cache; returns the bytes that this frees. Without a file it is all that the
/// cache has of the repository.
pub(super) fn remove(cache: &Path, id: &HubId) -> Result<u64, Error> {
    let repository = Repository::new(cache, id.repository());
    let root = repository.root();
    let Some(snapshot) = repository.resolve(id.revision()) else {
        return Err(not_held(cache, id));
    };
    refuse_downloads(&root.join("blobs"))?;
    let failed = |path: &Path, source: io::Error| Error::Cache {
        path: path.to_owned(),
        source,
    };
    if id.file().is_none() {
        let freed = blob_bytes(root);
        fs::remove_dir_all(root).map_err(|source| failed(root, source))?;
        return Ok(freed);
    }
    let mut names = Vec::new();
    collect_names(&snapshot, "", FOLDER_DEPTH, &mut names);
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let Ok(choice) = choose(&names, id) else {
        return Err(not_held(cache, id));
    };
    for name in choice.files() {
        let path = snapshot.join(name);
        fs::remove_file(&path).map_err(|source| failed(&path, source))?;
    }
    let freed = remove_unnamed(root, failed)?;
    if snapshots(root).iter().all(|(_, snapshot)| {
        let mut names = Vec::new();
        collect_names(snapshot, "", FOLDER_DEPTH, &mut names);
        names.is_empty()
    }) {
        fs::remove_dir_all(root).map_err(|source| failed(root, source))?;
    }
    Ok(freed)
}

fn not_held(cache: &Path, id: &HubId) -> Error {
    Error::NotHeld {
        id: id.to_string(),
        cache: cache.to_owned(),
    }
}

/// A model that another process is downloading stays.
fn refuse_downloads(blobs: &Path) -> Result<(), Error> {
    for entry in fs::read_dir(blobs).into_iter().flatten().flatten() {
        let path = entry.path();
        let partial = path.extension().is_some_and(|ending| ending == INCOMPLETE);
        let Ok(file) = File::open(&path) else {
            continue;
        };
        if partial && matches!(file.try_lock(), Err(TryLockError::WouldBlock)) {
            return Err(Error::Busy { path });
        }
    }
    Ok(())
}

/// Bytes of all contents of a repository.
fn blob_bytes(root: &Path) -> u64 {
    let blobs = fs::read_dir(root.join("blobs"));
    let blobs = blobs.into_iter().flatten().flatten();
    blobs
        .filter_map(|entry| entry.metadata().ok())
        .map(|metadata| metadata.len())
        .sum()
}

/// Removes contents that no snapshot has a link to any more, those that never arrived whole left out;
/// returns their bytes. Where names are no links but files of their own, those keep what they hold.
fn remove_unnamed(root: &Path, failed: impl Fn(&Path, io::Error) -> Error) -> Result<u64, Error> {
    let mut named = BTreeSet::new();
    for (_, snapshot) in snapshots(root) {
        let mut names = Vec::new();
        collect_names(&snapshot, "", FOLDER_DEPTH, &mut names);
        let links = names.iter().map(|name| snapshot.join(name));
        named.extend(links.filter_map(|link| fs::canonicalize(link).ok()));
    }
    let mut freed = 0;
    for entry in fs::read_dir(root.join("blobs"))
        .into_iter()
        .flatten()
        .flatten()
    {
        let path = entry.path();
        let partial = path.extension().is_some_and(|ending| ending == INCOMPLETE);
        let whole = fs::canonicalize(&path).map_err(|source| failed(&path, source))?;
        if !partial && !named.contains(&whole) {
            freed += entry.metadata().map_or(0, |metadata| metadata.len());
            fs::remove_file(&path).map_err(|source| failed(&path, source))?;
        }
    }
    Ok(freed)
}
