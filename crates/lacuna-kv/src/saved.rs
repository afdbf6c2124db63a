//! One sequence in a file: its tokens, whatever its owner says about it, and all pages that going on with it takes.
//!
//! ```text
//! 0             8         12     16         32            64     68       72       76           80       88
//! | "lacunass"  | version | zero | checksum | fingerprint | note | tokens | cached | settings   | pages  |
//! |             |         |      | (16)     | (32)        | bytes| (count)| tokens | bytes      | bytes  |
//! | note | tokens, 4 bytes each | settings | a checksum (16) for each MiB of pages | pages |
//! ```
//!
//! Numbers are little-endian, and the header's checksum is of all of its bytes after it. Which pages follow is worked
//! out from the geometry and the number of tokens, and never read: those of all rows that are kept, of windows those
//! that the next token sees, and those of states. Buffer after buffer, in whole pages, which are zero where no token
//! has a row: what other sequences left in them is nobody else's.
//!
//! A file has its name only when it is whole, and nothing of it is in a sequence before its checksum was compared.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;

use crate::checksum::xxh3_128;

use crate::cache::KvCache;
use crate::error::KvError;
use crate::folder::{Fingerprint, files};
use crate::sequence::{PageRun, Sequence};

const MAGIC: [u8; 8] = *b"lacunass";
/// Raised when the layout changes; files of another version are not read.
const VERSION: u32 = 1;
const FIXED: usize = 88;
/// Where the part begins that the header's checksum is of.
const CHECKED: usize = 32;
/// What has a checksum of its own, and is copied at once unless a page is more.
const PIECE: usize = 1 << 20;
/// No header is longer: what a file says about its lengths must not decide how much memory is taken.
const LONGEST_HEADER: u64 = 256 << 20;

/// Why a file is not read, or not written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SavedError {
    /// It is not what was written.
    #[error("it is damaged: {0}")]
    Damaged(&'static str),
    /// Another version wrote it.
    #[error("it has version {0} of the format, and this is version {VERSION}")]
    Version(u32),
    /// Its pages were computed with other settings.
    #[error("it was computed with other settings: {}", .0.join(", "))]
    Settings(Vec<String>),
    /// Memory is not held in a way that can be kept.
    #[error("KV memory held as `{policy}` cannot be kept in a file; use the policy `sparse`")]
    Policy {
        /// How memory is held.
        policy: String,
    },
    /// There is no memory for it.
    #[error(transparent)]
    Kv(#[from] KvError),
    /// The system refuses.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// A file as far as it is read before anything is done with its pages.
#[derive(Debug)]
pub struct Saved {
    file: File,
    /// What its owner said about it.
    pub note: String,
    /// All tokens, those that are not in the cache included.
    pub tokens: Vec<u32>,
    /// How many of them, from the first on, its pages hold.
    pub cached: usize,
    /// Bytes of its pages.
    pub page_bytes: u64,
    settings: String,
    digest: [u8; 32],
    checksums: Vec<u128>,
    start: u64,
}

/// `fingerprint` with what shapes pages besides.
fn of_pages(fingerprint: &Fingerprint, cache: &KvCache) -> Fingerprint {
    fingerprint.clone().and([
        ("KV rows", format!("{:?}", cache.geometry())),
        ("KV layout", cache.policy().to_string()),
        ("page bytes", cache.page_bytes().to_string()),
    ])
}

/// Writes `sequence`, which holds the first of `tokens`, to the file at `path`, in the place of what was there.
/// `fingerprint` is of everything that shapes a byte of it.
///
/// # Errors
/// [`SavedError`]; what was there stays then.
pub fn save(
    path: &Path,
    cache: &KvCache,
    sequence: &mut Sequence,
    (note, tokens): (&str, &[u32]),
    fingerprint: &Fingerprint,
) -> Result<(), SavedError> {
    let policy = || SavedError::Policy {
        policy: cache.policy().to_string(),
    };
    let runs = sequence.image()?.ok_or_else(policy)?;
    let fingerprint = of_pages(fingerprint, cache);
    let page = cache.page_bytes();
    let pieces = pieces(&runs, page);
    let bytes: u64 = runs
        .iter()
        .map(|run| run.pages.count().get() * page as u64)
        .sum();
    let settings = fingerprint.to_text();
    let mut header = vec![0; FIXED];
    header[..8].copy_from_slice(&MAGIC);
    header[8..12].copy_from_slice(&VERSION.to_le_bytes());
    header[32..64].copy_from_slice(&fingerprint.digest());
    let lengths = [note.len(), tokens.len(), sequence.len(), settings.len()];
    for (at, length) in (64..).step_by(4).zip(lengths) {
        let length = u32::try_from(length).map_err(|_| SavedError::Damaged("it is too long"))?;
        header[at..at + 4].copy_from_slice(&length.to_le_bytes());
    }
    header[80..88].copy_from_slice(&bytes.to_le_bytes());
    header.extend(note.as_bytes());
    header.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
    header.extend(settings.as_bytes());
    let sums = header.len();
    header.resize(sums + 16 * bytes.div_ceil(PIECE as u64) as usize, 0);

    let part = files::part_of(path);
    let mut file = files::create_private(&part)?;
    let mut write = || -> Result<(), SavedError> {
        file.seek(SeekFrom::Start(header.len() as u64))?;
        let mut memory = vec![0; PIECE.max(page)];
        let mut at = sums;
        for runs in &pieces {
            let mut end = 0;
            for &run in runs {
                let start = end;
                end += run.pages.count().get() as usize * page;
                sequence.copy_rows(run, &mut memory[start..end])?;
            }
            if sequence.has_lost_files() {
                return Err(KvError::RowsLost.into());
            }
            for part in memory[..end].chunks(PIECE) {
                header[at..at + 16].copy_from_slice(&xxh3_128(part).to_le_bytes());
                at += 16;
            }
            file.write_all(&memory[..end])?;
        }
        let checksum = xxh3_128(&header[CHECKED..]).to_le_bytes();
        header[16..32].copy_from_slice(&checksum);
        file.seek(SeekFrom::Start(0))?;
        file.write_all(&header)?;
        Ok(files::commit(&file, &part, path)?)
    };
    let written = write();
    if written.is_err() {
        std::fs::remove_file(&part).ok();
    }
    written
}

impl Saved {
    /// Reads what the file at `path` says about itself.
    ///
    /// # Errors
    /// [`SavedError`].
    pub fn open(path: &Path) -> Result<Self, SavedError> {
        let mut file = File::open(path)?;
        let file_bytes = file.metadata()?.len();
        let mut header = vec![0; FIXED];
        read(&mut file, &mut header)?;
        if header[..8] != MAGIC {
            return Err(SavedError::Damaged("it does not begin as a session does"));
        }
        let version = number(&header, 8);
        if version != VERSION || number(&header, 12) != 0 {
            return Err(SavedError::Version(version));
        }
        let [note, tokens, cached, settings] = [64, 68, 72, 76].map(|at| number(&header, at));
        let page_bytes = u64::from(number(&header, 80)) | u64::from(number(&header, 84)) << 32;
        let pieces = page_bytes.div_ceil(PIECE as u64);
        // No overflow: none of the five is above 2^32 but the last, which is below 2^44.
        let start = FIXED as u64
            + u64::from(note)
            + 4 * u64::from(tokens)
            + u64::from(settings)
            + 16 * pieces;
        let whole = start.checked_add(page_bytes) == Some(file_bytes);
        if !whole || start > LONGEST_HEADER || cached > tokens {
            return Err(SavedError::Damaged("it does not have the length it says"));
        }
        header.resize(start as usize, 0);
        read(&mut file, &mut header[FIXED..])?;
        if header[16..32] != xxh3_128(&header[CHECKED..]).to_le_bytes() {
            return Err(SavedError::Damaged(
                "its first part is not what was written",
            ));
        }
        let mut rest = &header[FIXED..];
        let mut take = |length: usize| {
            let (taken, left) = rest.split_at(length);
            rest = left;
            taken
        };
        let text = |bytes: &[u8]| {
            let text = String::from_utf8(bytes.to_vec());
            text.map_err(|_| SavedError::Damaged("its text is not UTF-8"))
        };
        let note = text(take(note as usize))?;
        let tokens = take(4 * tokens as usize).as_chunks::<4>().0.iter();
        let tokens = tokens.map(|bytes| u32::from_le_bytes(*bytes)).collect();
        let settings = text(take(settings as usize))?;
        let checksums = take(16 * pieces as usize).as_chunks::<16>().0.iter();
        Ok(Self {
            note,
            tokens,
            cached: cached as usize,
            page_bytes,
            settings,
            digest: std::array::from_fn(|index| header[32 + index]),
            checksums: checksums.map(|bytes| u128::from_le_bytes(*bytes)).collect(),
            start,
            file,
        })
    }

    /// Whether every byte of its pages is what was written.
    ///
    /// # Errors
    /// [`SavedError`].
    pub fn verify(&mut self) -> Result<(), SavedError> {
        let mut left = self.page_bytes;
        self.file.seek(SeekFrom::Start(self.start))?;
        let mut memory = vec![0; PIECE];
        for &checksum in &self.checksums {
            let piece = &mut memory[..left.min(PIECE as u64) as usize];
            read(&mut self.file, piece)?;
            if xxh3_128(piece) != checksum {
                return Err(SavedError::Damaged("its pages are not what was written"));
            }
            left -= piece.len() as u64;
        }
        Ok(())
    }

    /// A sequence of up to `capacity` tokens that holds what was written.
    ///
    /// # Errors
    /// [`SavedError`].
    pub fn restore(
        &mut self,
        cache: &KvCache,
        capacity: usize,
        fingerprint: &Fingerprint,
    ) -> Result<Sequence, SavedError> {
        let fingerprint = of_pages(fingerprint, cache);
        if fingerprint.digest() != self.digest {
            return Err(SavedError::Settings(fingerprint.differing(&self.settings)));
        }
        let mut sequence = cache.sequence(capacity)?;
        if self.cached == 0 {
            return Ok(sequence);
        }
        if self.cached > capacity {
            return Err(KvError::ContextFull {
                capacity,
                held: 0,
                requested: self.cached,
            }
            .into());
        }
        let runs = sequence.begin_image(self.cached)?;
        let runs = runs.ok_or_else(|| SavedError::Policy {
            policy: cache.policy().to_string(),
        })?;
        let page = cache.page_bytes();
        let pieces = pieces(&runs, page);
        let bytes: u64 = runs
            .iter()
            .map(|run| run.pages.count().get() * page as u64)
            .sum();
        if bytes != self.page_bytes {
            return Err(SavedError::Damaged(
                "it has other pages than its tokens take",
            ));
        }
        self.file.seek(SeekFrom::Start(self.start))?;
        let mut memory = vec![0; PIECE.max(page)];
        let mut checksums = self.checksums.iter();
        for runs in &pieces {
            let pages: u64 = runs.iter().map(|run| run.pages.count().get()).sum();
            let piece = &mut memory[..pages as usize * page];
            read(&mut self.file, piece)?;
            let mut parts = piece.chunks(PIECE);
            if parts.any(|part| checksums.next() != Some(&xxh3_128(part))) {
                return Err(SavedError::Damaged("its pages are not what was written"));
            }
            let mut rest = &piece[..];
            for &run in runs {
                let (bytes, left) = rest.split_at(run.pages.count().get() as usize * page);
                sequence.fill_pages(run, bytes)?;
                rest = left;
            }
        }
        sequence.end_image(self.cached);
        Ok(sequence)
    }
}

/// Runs of pages, a mebibyte or a page at a time: whole mebibytes but for the last.
fn pieces(runs: &[PageRun], page: usize) -> Vec<Vec<PageRun>> {
    crate::sequence::cut(runs, (PIECE / page).max(1) as u64)
}

fn number(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Fills `bytes` with what comes next. A file that ends before is damaged.
fn read(file: &mut File, bytes: &mut [u8]) -> Result<(), SavedError> {
    match file.read_exact(bytes) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            Err(SavedError::Damaged("it ends too early"))
        }
        read => Ok(read?),
    }
}
