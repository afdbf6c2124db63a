//! Which models a cache holds, and how one leaves it.

use std::collections::BTreeSet;
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use super::cache::{FOLDER_DEPTH, Repository, collect_names, commit_of};
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
        // What no name opens is no model of the list.
        if repository.parse::<HubId>().is_err() {
            continue;
        }
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
pub(super) fn files_of(choice: &Choice, snapshot: &Path) -> Vec<String> {
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
    let files = choice.files().iter().map(|name| snapshot.join(name));
    let files: BTreeSet<PathBuf> = files.collect();
    // All that can fail to be read is read before anything is removed.
    let mut kept = links_below(&root.join("snapshots"))?;
    kept.retain(|link| !files.contains(link));
    let unnamed = unnamed_blobs(root, &kept)?;
    for path in &files {
        fs::remove_file(path).map_err(|source| failed(path, source))?;
    }
    let mut freed = 0;
    for (path, bytes) in &unnamed {
        fs::remove_file(path).map_err(|source| failed(path, source))?;
        freed += bytes;
        // What was begun of the same contents, whoever began it, is of no more use than they are.
        let mut begun = path.clone().into_os_string();
        begun.push(".incomplete");
        fs::remove_file(begun).ok();
    }
    if kept.is_empty() {
        fs::remove_dir_all(root).map_err(|source| failed(root, source))?;
        return Ok(freed);
    }
    let commit = commit_of(&snapshot);
    let mut mark = repository.mark(&commit);
    let marked = mark.len();
    mark.retain(|name, _| !choice.files().contains(name));
    if mark.len() < marked {
        repository.set_mark(&commit, &mark)?;
    }
    Ok(freed)
}

fn failed(path: &Path, source: io::Error) -> Error {
    Error::Cache {
        path: path.to_owned(),
        source,
    }
}

fn not_held(cache: &Path, id: &HubId) -> Error {
    Error::NotHeld {
        id: id.to_string(),
        cache: cache.to_owned(),
    }
}

/// A model that another process is downloading stays.
fn refuse_downloads(blobs: &Path) -> Result<(), Error> {
    for entry in entries(blobs)? {
        let path = entry.path();
        if !is_partial(&path) {
            continue;
        }
        let Ok(file) = File::open(&path) else {
            continue;
        };
        if matches!(file.try_lock(), Err(TryLockError::WouldBlock)) {
            return Err(Error::Busy { path });
        }
    }
    Ok(())
}

fn is_partial(blob: &Path) -> bool {
    blob.extension().is_some_and(|ending| ending == INCOMPLETE)
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

/// Contents that none of `links` leads to, with their bytes; those that never arrived whole left out.
/// Where names are no links but files of their own, those keep what they hold.
fn unnamed_blobs(root: &Path, links: &[PathBuf]) -> Result<Vec<(PathBuf, u64)>, Error> {
    let mut named = BTreeSet::new();
    for link in links {
        match fs::canonicalize(link) {
            Ok(blob) => drop(named.insert(blob)),
            // It leads nowhere, and so to no blob.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(source) => return Err(failed(link, source)),
        }
    }
    let mut unnamed = Vec::new();
    for entry in entries(&root.join("blobs"))? {
        let path = entry.path();
        let metadata = entry.metadata().map_err(|source| failed(&path, source))?;
        let whole = fs::canonicalize(&path).map_err(|source| failed(&path, source))?;
        if !metadata.is_dir() && !is_partial(&path) && !named.contains(&whole) {
            unnamed.push((path, metadata.len()));
        }
    }
    Ok(unnamed)
}

/// Everything below a folder that is no folder itself, at whatever depth, whether or not its name is
/// text; links to folders are not followed. Where the listing of models overlooks a name, that is a
/// model less in a list; here it would be a blob that is deleted under its name.
fn links_below(folder: &Path) -> Result<Vec<PathBuf>, Error> {
    let mut links = Vec::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in entries(&folder)? {
            let path = entry.path();
            let kind = entry.file_type().map_err(|source| failed(&path, source))?;
            match kind.is_dir() {
                true => folders.push(path),
                false => links.push(path),
            }
        }
    }
    Ok(links)
}

/// What is in a folder; nothing where there is none.
fn entries(folder: &Path) -> Result<Vec<fs::DirEntry>, Error> {
    let read = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        read => read,
    };
    read.and_then(Iterator::collect)
        .map_err(|source| failed(folder, source))
}
