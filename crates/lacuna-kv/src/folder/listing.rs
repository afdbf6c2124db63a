//! What folders hold, for people: listed, checked and cleared without a model.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::chain::Fingerprint;
use super::cipher::CacheKey;
use super::files;
use super::index::Named;
use super::segment::{Damage, Header, Kind, ReadError};

/// The segments of one fingerprint.
#[derive(Debug, Clone)]
pub struct Listed {
    /// Their folder.
    pub path: PathBuf,
    /// What they were computed by: a name and a value each.
    pub settings: Vec<(String, String)>,
    /// Segments of rows.
    pub rows: usize,
    /// Segments of resume points.
    pub resume_points: usize,
    /// Tokens whose rows they have.
    pub tokens: u64,
    /// Bytes of all files, those that were set aside included.
    pub bytes: u64,
    /// Files that are no segments of this version, or were set aside.
    pub unusable: usize,
    /// Segments that are encrypted with another key than was given: nothing more is known of them.
    pub locked: usize,
    /// When one of them was last of use.
    pub used: Option<SystemTime>,
}

/// What became of checking a file.
#[derive(Debug)]
pub struct Found {
    /// The file.
    pub path: PathBuf,
    /// Why it cannot be used, if so.
    pub problem: Option<String>,
}

/// What a cache folder holds, by fingerprint. Reads the header of each segment that is not encrypted, or with `key`.
///
/// # Errors
/// When the folder cannot be read.
pub fn list(root: &Path, key: Option<&CacheKey>) -> io::Result<Vec<Listed>> {
    let folders = files::subfolders(root)?.into_iter();
    folders.map(|folder| list_one(folder, key)).collect()
}

fn list_one(path: PathBuf, key: Option<&CacheKey>) -> io::Result<Listed> {
    let settings = fs::read_to_string(path.join(files::SETTINGS)).unwrap_or_default();
    let lock = Lock::of(&settings, key);
    let settings = settings.lines().filter_map(|line| line.split_once(" = "));
    let settings = settings.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let mut listed = Listed {
        settings: settings.collect(),
        rows: 0,
        resume_points: 0,
        tokens: 0,
        bytes: 0,
        unusable: 0,
        locked: 0,
        used: None,
        path: path.clone(),
    };
    for file in files::stored(&path)? {
        listed.bytes += file.bytes;
        let header = match (file.named, lock) {
            (Named::Segment(_), Lock::Shut) => {
                listed.locked += 1;
                listed.used = listed.used.max(Some(file.used));
                continue;
            }
            (Named::Segment(_), Lock::Open(key)) => header(&file.path, key).ok(),
            (Named::Part | Named::Bad, _) => None,
        };
        let Some(header) = header else {
            listed.unusable += 1;
            continue;
        };
        listed.used = listed.used.max(Some(file.used));
        listed.tokens += header.tokens.len() as u64;
        match header.kind {
            Kind::Rows => listed.rows += 1,
            Kind::ResumePoint => listed.resume_points += 1,
        }
    }
    Ok(listed)
}

/// Whether the segments of one fingerprint can be read.
#[derive(Clone, Copy)]
enum Lock<'a> {
    /// With a key, or without one.
    Open(Option<&'a CacheKey>),
    /// Only with another key.
    Shut,
}

impl<'a> Lock<'a> {
    fn of(settings: &str, key: Option<&'a CacheKey>) -> Self {
        match (Fingerprint::key_of(settings), key) {
            (None, _) => Self::Open(None),
            (Some(id), Some(key)) if key.id() == id => Self::Open(Some(key)),
            (Some(_), _) => Self::Shut,
        }
    }
}

fn header(path: &Path, key: Option<&CacheKey>) -> Result<Header, ReadError> {
    Header::read(&File::open(path)?, key)
}

/// Reads every segment in a cache folder that is not encrypted, or with `key`, and compares each checksum; `each` hears of
/// them one by one. Returns how many were not read because they are encrypted with another key.
///
/// # Errors
/// When the folder cannot be read.
pub fn verify(
    root: &Path,
    key: Option<&CacheKey>,
    mut each: impl FnMut(Found),
) -> io::Result<usize> {
    let mut locked = 0;
    for folder in files::subfolders(root)? {
        let settings = fs::read_to_string(folder.join(files::SETTINGS)).unwrap_or_default();
        let stored = files::stored(&folder)?.into_iter();
        let segments = stored.filter(|file| matches!(file.named, Named::Segment(_)));
        let Lock::Open(key) = Lock::of(&settings, key) else {
            locked += segments.count();
            continue;
        };
        for file in segments {
            let problem = verify_one(&file.path, key).err();
            each(Found {
                path: file.path,
                problem: problem.map(|problem| problem.to_string()),
            });
        }
    }
    Ok(locked)
}

fn verify_one(path: &Path, key: Option<&CacheKey>) -> Result<(), ReadError> {
    let file = File::open(path)?;
    let header = Header::read(&file, key)?;
    let last = header.chains().last().copied().unwrap_or(header.before);
    let name = super::index::file_name(
        header.kind,
        header.first_group as usize,
        header.groups(),
        &last.short(),
    );
    if path.file_name().is_none_or(|other| *other != *name) {
        return Err(Damage::Header.into());
    }
    header.verify_payload(&file, || Ok::<(), ReadError>(()))
}

/// Removes everything in a cache folder that is a cache's, and returns how many bytes that was. A server that uses it
/// goes on without.
///
/// # Errors
/// When something cannot be removed.
pub fn clear(root: &Path) -> io::Result<u64> {
    let _lock = files::lock(root)?;
    let mut removed = 0;
    for folder in files::subfolders(root)? {
        for file in files::stored(&folder)? {
            fs::remove_file(&file.path)?;
            removed += file.bytes;
        }
        let notes = super::verified::files_of_notes(&folder);
        for path in notes.chain(super::sessions::files_of_sessions(&folder)) {
            fs::remove_file(path)?;
        }
        let settings = folder.join(files::SETTINGS);
        if settings.exists() && fs::read_dir(&folder)?.count() == 1 {
            fs::remove_file(&settings)?;
            fs::remove_dir(&folder)?;
        }
    }
    Ok(removed)
}

#[cfg(test)]
mod tests {
    use super::super::{CacheFolder, FolderConfig, trial};
    use super::*;

    #[test]
    fn what_cannot_be_used_is_counted_and_what_another_key_opens_is_not_called_damaged() {
        let root = tempfile::tempdir().expect("a folder");
        let (key, other) = (CacheKey::new([1; 32]), CacheKey::new([2; 32]));
        let config = FolderConfig {
            key: Some(key.clone()),
            ..trial::config(root.path(), 1 << 20)
        };
        let cache = trial::cache();
        let folder = CacheFolder::open(config, &cache, trial::fingerprint()).expect("a folder");
        let tokens = trial::tokens(&folder, 1, 3);
        trial::write(&folder, &tokens, 0);
        trial::write(&folder, &trial::tokens(&folder, 2, 1), 0);
        let path = folder.shared.folder.clone();
        for (number, suffix) in [(1, "bad"), (2, "part"), (3, "rows")] {
            let name = format!("{number:08x}-0001-{}.{suffix}", "a".repeat(32));
            fs::write(path.join(name), "no segment").expect("room");
        }
        let listed = |key| {
            let listed = list(root.path(), key).expect("a folder").remove(0);
            (listed.rows, listed.tokens, listed.locked, listed.unusable)
        };
        let of_all = (tokens.len() / 3 * 4) as u64;
        assert_eq!(listed(Some(&key)), (2, of_all, 0, 3));
        assert_eq!(listed(Some(&other)), (0, 0, 3, 2));
        assert_eq!(listed(None), (0, 0, 3, 2));
    }
}
