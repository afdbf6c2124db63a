//! One repository's folder in the cache: what is there, and how files come to be there.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::RemoteFile;
use super::error::Error;
use super::held::files_of;
use super::select::{Choice, choose, choose_again};
use crate::huggingface;
use crate::output::Identity;
use crate::source::{HubId, is_relative};

/// How deep a repository's folders may nest before files in them are overlooked.
pub(super) const FOLDER_DEPTH: usize = 4;

/// The folder in a repository's that no other client looks into.
const OWN_FOLDER: &str = ".lacuna";
/// What ends the name of contents that are still arriving. Other clients append to
/// `<hash>.incomplete`, whoever has begun it, so that is not ours to continue.
const PARTIAL_ENDING: &str = ".lacuna.incomplete";
/// What ends the names of theirs.
const FOREIGN_ENDING: &str = ".incomplete";
/// How long nobody has written to what nobody writes to any more; downloads wait a minute for the next bytes.
const LEFT_AFTER: Duration = Duration::from_secs(3600);

/// The folder of one repository.
#[derive(Debug)]
pub(super) struct Repository {
    root: PathBuf,
}

/// A model in the cache.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) path: PathBuf,
    pub(super) choice: Choice,
    /// Of its snapshot.
    pub(super) commit: String,
    /// Whether all that the hub has of it is there, as long as it was: another client may have left
    /// out what it had no use for, such as how an encoder pools.
    pub(super) complete: bool,
}

/// What was fetched here of a commit: bytes by name.
pub(super) type Mark = BTreeMap<String, u64>;

impl Repository {
    pub(super) fn new(cache: &Path, repository: &str) -> Self {
        Self {
            root: cache.join(format!("models--{}", repository.replace('/', "--"))),
        }
    }

    /// Where all of it is.
    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// The files of one commit.
    pub(super) fn snapshot(&self, commit: &str) -> PathBuf {
        self.root.join("snapshots").join(commit)
    }

    /// The model, if all its weights are there.
    pub(super) fn find(&self, id: &HubId) -> Result<Option<Found>, Error> {
        let Some(snapshot) = self.resolve(id.revision()) else {
            return Ok(None);
        };
        let mut names = Vec::new();
        collect_names(&snapshot, "", FOLDER_DEPTH, &mut names);
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let Ok(choice) = choose(&names, id) else {
            return Ok(None);
        };
        if matches!(choice, Choice::Folder { indexed: true, .. }) && !has_indexed(&snapshot) {
            return Ok(None);
        }
        let (path, commit) = (choice.entry(&snapshot), commit_of(&snapshot));
        let complete = self.is_as_fetched(&choice, &snapshot);
        Ok(Some(Found {
            path,
            choice,
            commit,
            complete,
        }))
    }

    /// Whether a model was fetched here, and still is as it was then.
    fn is_as_fetched(&self, choice: &Choice, snapshot: &Path) -> bool {
        let mark = self.mark(&commit_of(snapshot));
        let names: Vec<&str> = mark.keys().map(String::as_str).collect();
        let as_it_was = |name: &String| {
            let bytes = mark.get(name);
            bytes.is_some() && bytes.copied() == length(&snapshot.join(name))
        };
        choose_again(choice, &names)
            .is_some_and(|fetched| files_of(&fetched, snapshot).iter().all(as_it_was))
    }

    /// What was fetched here of a commit; nothing where nobody noted it.
    pub(super) fn mark(&self, commit: &str) -> Mark {
        let text = fs::read_to_string(self.root.join(OWN_FOLDER).join(commit));
        let entry = |line: &str| {
            let (bytes, name) = line.split_once(' ')?;
            Some((name.to_owned(), bytes.parse().ok()?))
        };
        text.unwrap_or_default().lines().filter_map(entry).collect()
    }

    /// Notes what was fetched here of a commit: a line for each file, its bytes and its name, in which
    /// [`is_relative`] allows no line to end.
    pub(super) fn set_mark(&self, commit: &str, mark: &Mark) -> Result<(), Error> {
        let lines = mark.iter().map(|(name, bytes)| format!("{bytes} {name}\n"));
        let text: String = lines.collect();
        let path = self.root.join(OWN_FOLDER).join(commit);
        self.put(&path, |made| fs::write(made, text))
    }

    /// The snapshot of a branch, a tag or a commit.
    pub(super) fn resolve(&self, revision: &str) -> Option<PathBuf> {
        let reference = fs::read_to_string(self.root.join("refs").join(revision));
        let commit = reference.ok().map(|commit| commit.trim().to_owned());
        let commit = commit
            .filter(|commit| is_relative(commit))
            .unwrap_or_else(|| revision.to_owned());
        Some(self.snapshot(&commit)).filter(|snapshot| snapshot.is_dir())
    }

    /// Notes which commit a branch or tag is at.
    pub(super) fn set_reference(&self, revision: &str, commit: &str) -> Result<(), Error> {
        if revision == commit {
            return Ok(());
        }
        let path = self.root.join("refs").join(revision);
        // A cache that cannot be written to may have all that is asked of it.
        if fs::read_to_string(&path).is_ok_and(|there| there.trim() == commit) {
            return Ok(());
        }
        self.put(&path, |made| fs::write(made, commit))
    }

    /// Makes something elsewhere in the repository and renames it to `path`: whoever looks there
    /// meanwhile, or makes the same, sees the one before or all of the new one.
    fn put(&self, path: &Path, make: impl FnOnce(&Path) -> io::Result<()>) -> Result<(), Error> {
        static MADE: AtomicU64 = AtomicU64::new(0);
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let name = format!("new-{}-{number}", std::process::id());
        let made = self.root.join(OWN_FOLDER).join(name);
        create_parent(&made)?;
        create_parent(path)?;
        // A process of the same number may have been killed here.
        fs::remove_file(&made).ok();
        let put = make(&made).and_then(|()| fs::rename(&made, path));
        // It is gone already where all went well.
        fs::remove_file(&made).ok();
        put.map_err(|source| Error::Cache {
            path: path.to_owned(),
            source,
        })
    }

    fn blob(&self, file: &RemoteFile) -> PathBuf {
        self.root.join("blobs").join(&file.blob)
    }

    /// Whether the contents of a file are there, all of them.
    pub(super) fn has_blob(&self, file: &RemoteFile) -> bool {
        let metadata = fs::metadata(self.blob(file));
        metadata.is_ok_and(|metadata| file.size.is_none_or(|size| metadata.len() == size))
    }

    /// Whether a file is there under its name, all of it: where there are no links it may be there
    /// without a blob.
    pub(super) fn has_file(&self, commit: &str, file: &RemoteFile) -> bool {
        let bytes = length(&self.snapshot(commit).join(&file.path));
        bytes.is_some_and(|bytes| file.size.is_none_or(|size| bytes == size))
    }

    /// Opens the file that the contents are collected in, and locks it against other processes. One that
    /// had it may just have finished: whether the blob is there has to be asked again.
    pub(super) fn partial(&self, file: &RemoteFile) -> Result<Partial, Error> {
        let target = self.blob(file);
        let mut path = target.clone().into_os_string();
        path.push(PARTIAL_ENDING);
        let path = PathBuf::from(path);
        create_parent(&path)?;
        loop {
            if let Some(file) = lock(open_partial(&path)?, &path)? {
                return Ok(Partial { file, path, target });
            }
        }
    }

    /// Removes what somebody has begun to collect in `<hash>.incomplete`, as earlier builds and other clients do, once
    /// the contents are there: nobody will continue it. What is still written to stays.
    pub(super) fn remove_leftover(&self, file: &RemoteFile) {
        let mut path = self.blob(file).into_os_string();
        path.push(FOREIGN_ENDING);
        let idle = fs::metadata(&path).and_then(|metadata| metadata.modified());
        let idle = idle.ok().and_then(|modified| modified.elapsed().ok());
        let unlocked = || File::open(&path).is_ok_and(|opened| opened.try_lock().is_ok());
        if idle.is_some_and(|idle| idle >= LEFT_AFTER) && unlocked() {
            // It takes room, and that is all.
            fs::remove_file(&path).ok();
        }
    }

    /// Makes a file's contents appear under its name.
    pub(super) fn link(&self, commit: &str, file: &RemoteFile) -> Result<(), Error> {
        let path = self.snapshot(commit).join(&file.path);
        let bytes = length(&path);
        if bytes.is_some() && bytes == length(&self.blob(file)) {
            return Ok(());
        }
        self.put(&path, |made| {
            link(&self.blob(file), Path::new(&file.path), &file.blob, made)
        })
    }
}

pub(super) fn open_partial(path: &Path) -> Result<File, Error> {
    let opened = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(path);
    opened.map_err(|source| Error::Cache {
        path: path.to_owned(),
        source,
    })
}

/// Locks a partial file. `None` where `path` no longer leads to it: the process that had the lock has
/// finished, so this file is a blob by now, which must not be written to.
pub(super) fn lock(file: File, path: &Path) -> Result<Option<File>, Error> {
    let failed = |source| Error::Cache {
        path: path.to_owned(),
        source,
    };
    match file.try_lock() {
        Ok(()) => {
            let identity = Identity::of(&file).map_err(failed)?;
            Ok(identity.is_at(path).then_some(file))
        }
        Err(TryLockError::WouldBlock) => Err(Error::Busy {
            path: path.to_owned(),
        }),
        Err(TryLockError::Error(source)) => Err(failed(source)),
    }
}

/// Links relatively, so that the cache can be moved: up to the repository's folder, down to the
/// blob, from where `name` is in a snapshot.
#[cfg(unix)]
fn link(_contents: &Path, name: &Path, blob: &str, link: &Path) -> io::Result<()> {
    let mut target: PathBuf = (0..name.components().count() + 1)
        .map(|_| Component::ParentDir)
        .collect();
    target.push("blobs");
    target.push(blob);
    std::os::unix::fs::symlink(target, link)
}

#[cfg(not(unix))]
fn link(contents: &Path, _name: &Path, _blob: &str, link: &Path) -> io::Result<()> {
    fs::hard_link(contents, link).or_else(|_| fs::copy(contents, link).map(drop))
}

fn create_parent(path: &Path) -> Result<(), Error> {
    let Some(parent) = path.parent() else {
        return Ok(());
    };
    fs::create_dir_all(parent).map_err(|source| Error::Cache {
        path: parent.to_owned(),
        source,
    })
}

/// The commit that a snapshot is of.
pub(super) fn commit_of(snapshot: &Path) -> String {
    let name = snapshot.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

/// Bytes of the file at a path, or that a link there leads to.
pub(super) fn length(path: &Path) -> Option<u64> {
    let metadata = fs::metadata(path).ok();
    metadata
        .filter(|metadata| metadata.is_file())
        .map(|metadata| metadata.len())
}

fn has_indexed(snapshot: &Path) -> bool {
    let index = huggingface::index_in(snapshot).ok().flatten();
    index.is_some_and(|index| {
        index
            .files()
            .iter()
            .all(|name| snapshot.join(name).is_file())
    })
}

/// Names of files below a folder, with `/` between folders; links that lead nowhere left out.
pub(super) fn collect_names(folder: &Path, prefix: &str, depth: usize, names: &mut Vec<String>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let Ok(name) = entry.file_name().into_string() else {
            continue;
        };
        let (path, name) = (entry.path(), format!("{prefix}{name}"));
        if path.is_file() {
            names.push(name);
        } else if depth > 0 && path.is_dir() {
            collect_names(&path, &format!("{name}/"), depth - 1, names);
        }
    }
}

/// Contents that are still arriving: `<hash>.lacuna.incomplete`, locked.
#[derive(Debug)]
pub(super) struct Partial {
    file: File,
    path: PathBuf,
    target: PathBuf,
}

impl Partial {
    /// Feeds what is there already to `read` and returns how much that is; writing continues after
    /// it.
    pub(super) fn resume(&mut self, mut read: impl FnMut(&[u8])) -> Result<u64, Error> {
        self.seek(0)?;
        let mut buffer = vec![0; 1 << 16];
        let mut total = 0;
        loop {
            let count = self
                .file
                .read(&mut buffer)
                .map_err(|source| self.failed(source))?;
            if count == 0 {
                return Ok(total);
            }
            read(&buffer[..count]);
            total += count as u64;
        }
    }

    /// Bytes there already.
    pub(super) fn len(&self) -> Result<u64, Error> {
        self.file
            .metadata()
            .map(|metadata| metadata.len())
            .map_err(|source| self.failed(source))
    }

    /// Forgets what is there.
    pub(super) fn restart(&mut self) -> Result<(), Error> {
        self.file.set_len(0).map_err(|source| self.failed(source))?;
        self.seek(0)
    }

    pub(super) fn append(&mut self, bytes: &[u8]) -> Result<(), Error> {
        self.file
            .write_all(bytes)
            .map_err(|source| self.failed(source))
    }

    /// Gives the contents of `file` their final name, after they have reached the disk. It was the
    /// `received` bytes that were checked: a file with more or fewer has been written to by another.
    pub(super) fn complete(mut self, file: &RemoteFile, received: u64) -> Result<(), Error> {
        self.file.sync_all().map_err(|source| self.failed(source))?;
        let bytes = self.len()?;
        if bytes != received {
            self.restart()?;
            return Err(Error::Corrupt {
                file: file.path.clone(),
                reason: format!(
                    "{received} bytes arrived and the file has {bytes}: another program writes to it"
                ),
            });
        }
        fs::rename(&self.path, &self.target).map_err(|source| self.failed(source))
    }

    /// Lets go of a file that nothing is to be collected in.
    pub(super) fn discard(self) -> Result<(), Error> {
        fs::remove_file(&self.path).map_err(|source| self.failed(source))
    }

    fn seek(&mut self, position: u64) -> Result<(), Error> {
        let sought = self.file.seek(SeekFrom::Start(position));
        sought.map(drop).map_err(|source| self.failed(source))
    }

    fn failed(&self, source: io::Error) -> Error {
        Error::Cache {
            path: self.path.clone(),
            source,
        }
    }
}
