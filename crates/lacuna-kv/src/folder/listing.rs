//! What folders hold, for people: listed, checked and cleared without a model.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

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

/// What a cache folder holds, by fingerprint. Reads the header of each segment.
///
/// # Errors
/// When the folder cannot be read.
pub fn list(root: &Path) -> io::Result<Vec<Listed>> {
    let folders = files::subfolders(root)?.into_iter();
    folders.map(list_one).collect()
}

fn list_one(path: PathBuf) -> io::Result<Listed> {
    let settings = fs::read_to_string(path.join(files::SETTINGS)).unwrap_or_default();
    let settings = settings.lines().filter_map(|line| line.split_once(" = "));
    let settings = settings.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let mut listed = Listed {
        settings: settings.collect(),
        rows: 0,
        resume_points: 0,
        tokens: 0,
        bytes: 0,
        unusable: 0,
        used: None,
        path: path.clone(),
    };
    for file in files::stored(&path)? {
        listed.bytes += file.bytes;
        let header = match file.named {
            Named::Segment(_) => header(&file.path).ok(),
            Named::Part | Named::Bad => None,
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

fn header(path: &Path) -> Result<Header, ReadError> {
    Header::read(&File::open(path)?)
}

/// Reads every segment in a cache folder and compares each checksum; `each` hears of them one by one.
///
/// # Errors
/// When the folder cannot be read.
pub fn verify(root: &Path, mut each: impl FnMut(Found)) -> io::Result<()> {
    for file in files::all_stored(root)? {
        if matches!(file.named, Named::Segment(_)) {
            let problem = verify_one(&file.path).err();
            each(Found {
                path: file.path,
                problem: problem.map(|problem| problem.to_string()),
            });
        }
    }
    Ok(())
}

fn verify_one(path: &Path) -> Result<(), ReadError> {
    let file = File::open(path)?;
    let header = Header::read(&file)?;
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
