//! Models split over several GGUF files: `name-00001-of-00003.gguf` and its siblings.
//!
//! The first file has the metadata; every file has its own tensors, `split.no` (from 0),
//! `split.count`, and `split.tensors.count` (over all files). Siblings are found by name only, so
//! they must lie in the same folder.

use std::path::{Path, PathBuf};

use super::error::Error;
use super::{File, Metadata};
use crate::mapping::Mapping;
use crate::tensor::Tensors;

/// What all keys begin with that say so.
pub(super) const PREFIX: &str = "split.";
const NUMBER_KEY: &str = "split.no";
const COUNT_KEY: &str = "split.count";
const TENSORS_KEY: &str = "split.tensors.count";

/// Which part of a split model a file is.
struct Part {
    /// From 0.
    number: u64,
    count: u64,
    /// Over all parts.
    tensors: Option<u64>,
}

pub(super) fn open(data: Mapping) -> Result<File, Error> {
    let path = data.path().map(Path::to_owned);
    let first = File::parse(data)?;
    let Some(part) = part(&first.metadata)? else {
        return Ok(first);
    };
    if part.number != 0 {
        return Err(Error::NotFirstShard {
            number: part.number.saturating_add(1),
            count: part.count,
        });
    }
    let stem = path.as_deref().and_then(|path| stem(path, part.count));
    let stem = stem.ok_or(Error::ShardName { count: part.count })?;
    collect(first, &part, &stem)
}

fn part(metadata: &Metadata) -> Result<Option<Part>, Error> {
    match metadata.get::<u64>(COUNT_KEY)? {
        None | Some(0 | 1) => Ok(None),
        Some(count) => Ok(Some(Part {
            number: metadata.get(NUMBER_KEY)?.unwrap_or(0),
            count,
            tensors: metadata.get(TENSORS_KEY)?,
        })),
    }
}

/// The path of the first of `count` files without its `-00001-of-0000N.gguf`.
fn stem(path: &Path, count: u64) -> Option<PathBuf> {
    let name = path.file_name()?.to_str()?;
    let stem = name.strip_suffix(&suffix(0, count))?;
    Some(path.with_file_name(stem))
}

fn suffix(number: u64, count: u64) -> String {
    format!("-{:05}-of-{count:05}.gguf", number + 1)
}

fn sibling(stem: &Path, number: u64, count: u64) -> PathBuf {
    let mut path = stem.as_os_str().to_owned();
    path.push(suffix(number, count));
    path.into()
}

/// Opens the siblings one after the other, so that a made-up count ends at the first missing file.
fn collect(first: File, part: &Part, stem: &Path) -> Result<File, Error> {
    let mut parts = vec![first.tensors];
    for number in 1..part.count {
        let path = sibling(stem, number, part.count);
        let data = Mapping::open(&path).map_err(|source| Error::MissingShard {
            number: number + 1,
            count: part.count,
            source,
        })?;
        let file = File::parse(data.clone())
            .and_then(|file| check_part(&file, number, part.count).map(|()| file))
            .map_err(|source| Error::Shard {
                path,
                source: Box::new(source),
            });
        data.check()?;
        parts.push(file?.tensors);
    }
    let tensors = Tensors::merge(parts).map_err(|name| Error::DuplicateTensor { name })?;
    if let Some(expected) = part.tensors {
        check("the number of tensors", expected, tensors.len() as u64)?;
    }
    Ok(File { tensors, ..first })
}

fn check_part(file: &File, number: u64, count: u64) -> Result<(), Error> {
    check(COUNT_KEY, count, file.metadata.get(COUNT_KEY)?.unwrap_or(1))?;
    check(
        NUMBER_KEY,
        number,
        file.metadata.get(NUMBER_KEY)?.unwrap_or(0),
    )
}

fn check(what: &'static str, expected: u64, found: u64) -> Result<(), Error> {
    if found == expected {
        Ok(())
    } else {
        Err(Error::ShardMismatch {
            what,
            expected,
            found,
        })
    }
}
