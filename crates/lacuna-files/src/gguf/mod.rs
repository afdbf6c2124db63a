//! GGUF, versions 2 and 3, little-endian: parsed in place, written in one pass.
//!
//! ```text
//! magic, version, counts | metadata entries | tensor table | padding | data section
//!                          key, type, value   name, dims,            each tensor at a multiple
//!                                             type, offset           of general.alignment
//! ```
//!
//! [`File::parse`] walks the header once. It allocates a table entry per metadata key and per
//! tensor, never more than the file has bytes for, and checks every tensor's range, so that nothing
//! later needs to. Format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>.

mod cursor;
mod error;
mod metadata;
mod split;
mod tensors;
mod types;
mod write;

#[cfg(test)]
mod tests;

pub use error::Error;
pub use metadata::{Array, FromValue, Metadata, Strings, Value};
pub use types::{Integers, ValueType};
pub use write::{Body, IntoValue, WriteError, Writer};

use cursor::Cursor;

use super::mapping::Mapping;
use super::tensor::Tensors;

/// The first four bytes of every GGUF file.
pub const MAGIC: [u8; 4] = *b"GGUF";
/// Alignment of the data section and of every tensor in it, unless the file says otherwise.
pub const DEFAULT_ALIGNMENT: u32 = 32;
/// The metadata key of the file's own alignment.
const ALIGNMENT_KEY: &str = "general.alignment";

/// A parsed GGUF file: metadata and tensors, both left where they are in the mapping.
#[derive(Clone, Debug)]
pub struct File {
    version: u32,
    metadata: Metadata,
    tensors: Tensors,
}

impl File {
    /// Parses one file, alone.
    ///
    /// Files without tensors (vocabularies) are fine. A file that is part of a split model parses
    /// to the tensors it holds itself; [`open`](Self::open) collects the others.
    ///
    /// # Errors
    /// [`Error`], for anything wrong with the header or any tensor out of bounds.
    pub fn parse(data: Mapping) -> Result<Self, Error> {
        let mut cursor = Cursor::new(&data);
        let version = check_version(&mut cursor)?;
        let tensor_count = cursor.u64("tensor count")?;
        let entry_count = cursor.u64("metadata count")?;
        let metadata = Metadata::parse(&data, &mut cursor, entry_count)?;
        let alignment = alignment(&metadata)?;
        let tensors = tensors::parse(&data, &mut cursor, tensor_count, alignment)?;
        Ok(Self {
            version,
            metadata,
            tensors,
        })
    }

    /// Parses a file and, when it is the first of a split model, its siblings beside it.
    ///
    /// # Errors
    /// As [`parse`](Self::parse), and the split errors: opening a later file of a split model, a
    /// sibling that is missing or damaged, files that do not belong together.
    pub fn open(data: Mapping) -> Result<Self, Error> {
        split::open(data)
    }

    /// The format version, 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// The key-value metadata, of the first file when the model is split.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// The tensors of all files.
    pub fn tensors(&self) -> &Tensors {
        &self.tensors
    }
}

fn check_version(cursor: &mut Cursor<'_>) -> Result<u32, Error> {
    let magic = cursor.take(4, "magic")?;
    if magic != MAGIC {
        return Err(Error::NotGguf {
            magic: magic.to_vec(),
        });
    }
    match cursor.u32("version")? {
        version @ (2 | 3) => Ok(version),
        version if matches!(version.swap_bytes(), 1..=3) => Err(Error::BigEndian),
        version => Err(Error::UnsupportedVersion { version }),
    }
}

fn alignment(metadata: &Metadata) -> Result<u32, Error> {
    let alignment = metadata
        .get::<u32>(ALIGNMENT_KEY)?
        .unwrap_or(DEFAULT_ALIGNMENT);
    if alignment.is_power_of_two() {
        Ok(alignment)
    } else {
        Err(Error::BadAlignment { alignment })
    }
}
