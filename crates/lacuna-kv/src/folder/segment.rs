//! The bytes of a segment: a file with the pages of consecutive groups, or those of one resume point.
//!
//! ```text
//! 0                      8         12              16         32
//! | "lacunakv"           | version | header length | checksum |
//! | fingerprint (32) | chain before (32) | kind | first group | groups | group tokens | payload bytes |
//! | tokens, 4 bytes each | a checksum (16) for each MiB of payload | zeros up to 4 KiB |
//! | pages of buffer 0 | pages of buffer 1 | ... | pages of states |
//! ```
//!
//! Numbers are little-endian. The header's checksum is of all its other bytes, and the file ends with the payload,
//! so a file that was cut, or of which any bit differs, is not taken for a whole one.

use std::fs::File;
use std::io;
use std::ops::Range;

use super::chain::Chain;
use super::verified::is_in_memory;
use crate::checksum::{Checksum, xxh3_128};

const MAGIC: [u8; 8] = *b"lacunakv";
/// Raised when the layout of files changes; those of another version are left alone.
pub(crate) const VERSION: u32 = 1;
/// Payloads begin at this boundary, so that files can be mapped.
const ALIGNMENT: usize = 4096;
/// What is checked, copied and written at once: enough that calls do not count, little enough to hold.
pub(crate) const PIECE: usize = 1 << 20;
/// What is read at once of a payload that is only compared: it stays in the cache of one core on its way from the page
/// cache to the checksum, where a whole piece is read half as fast again.
const RUN: usize = 128 << 10;
/// No header is longer: a million tokens have 4 MiB.
const LONGEST_HEADER: u64 = 64 << 20;
/// Of the fields before tokens.
const FIXED: usize = 120;
const CHECKSUM: Range<usize> = 16..32;

/// What a segment holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Pages of groups, of the layers that keep all rows.
    Rows,
    /// Pages of windows and states with which a sequence goes on from the end of a group.
    ResumePoint,
}

/// What a segment says about itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) fingerprint: [u8; 32],
    pub(crate) kind: Kind,
    /// What the tokens before its first group hash to.
    pub(crate) before: Chain,
    /// Groups before it.
    pub(crate) first_group: u32,
    /// Tokens of one group.
    pub(crate) group_tokens: u32,
    /// Those of its groups; none of a resume point.
    pub(crate) tokens: Vec<u32>,
    pub(crate) payload_bytes: u64,
    /// Of each [`PIECE`] of the payload.
    pub(crate) checksums: Vec<u128>,
}

/// Why a file is no segment that can be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub(crate) enum Damage {
    /// It is shorter or longer than it says.
    #[error("it does not have the length it says")]
    Length,
    /// It does not begin as segments do.
    #[error("it does not begin as a segment does")]
    Magic,
    /// Its layout is another version's.
    #[error("it was written by version {0} of the format, and this is version {VERSION}")]
    Version(u32),
    /// Its header does not have its checksum, or contradicts itself.
    #[error("its header is damaged")]
    Header,
    /// A piece of its payload does not have its checksum.
    #[error("bytes from {0} on are damaged")]
    Payload(u64),
}

/// Why a segment cannot be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReadError {
    #[error(transparent)]
    Damaged(#[from] Damage),
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl Header {
    /// Groups it has.
    pub(crate) fn groups(&self) -> usize {
        self.tokens.len() / self.group_tokens.max(1) as usize
    }

    /// What everything up to the end of each of its groups hashes to; of a resume point, what everything before
    /// it does.
    pub(crate) fn chains(&self) -> Vec<Chain> {
        let mut chain = self.before;
        match self.kind {
            Kind::ResumePoint => vec![chain],
            Kind::Rows => {
                let groups = self.tokens.chunks(self.group_tokens.max(1) as usize);
                let next = groups.map(|tokens| {
                    chain = chain.after(tokens);
                    chain
                });
                next.collect()
            }
        }
    }

    /// Bytes that a header takes which has so many tokens, before so much payload.
    pub(crate) fn length(tokens: usize, payload_bytes: u64) -> u64 {
        let pieces = payload_bytes.div_ceil(PIECE as u64);
        let bytes = FIXED as u64 + 4 * tokens as u64 + 16 * pieces;
        bytes.next_multiple_of(ALIGNMENT as u64)
    }

    /// Where its payload begins.
    pub(crate) fn payload_start(&self) -> u64 {
        Self::length(self.tokens.len(), self.payload_bytes)
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let length = Self::length(self.tokens.len(), self.payload_bytes) as usize;
        let mut bytes = Vec::with_capacity(length);
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend((length as u32).to_le_bytes());
        bytes.extend([0; CHECKSUM.end - CHECKSUM.start]);
        bytes.extend(self.fingerprint);
        bytes.extend(self.before.0);
        let kind: u32 = match self.kind {
            Kind::Rows => 0,
            Kind::ResumePoint => 1,
        };
        for number in [
            kind,
            self.first_group,
            self.groups() as u32,
            self.group_tokens,
        ] {
            bytes.extend(number.to_le_bytes());
        }
        bytes.extend(self.payload_bytes.to_le_bytes());
        bytes.extend(self.tokens.iter().flat_map(|token| token.to_le_bytes()));
        bytes.extend(self.checksums.iter().flat_map(|sum| sum.to_le_bytes()));
        bytes.resize(length, 0);
        let checksum = checksum_of_header(&bytes).to_le_bytes();
        bytes[CHECKSUM].copy_from_slice(&checksum);
        bytes
    }

    /// The header at the start of `file`, which has just the length that it says. Nothing behind it is read.
    pub(crate) fn read(file: &File) -> Result<Self, ReadError> {
        read_ahead(file, false);
        let header = Self::read_alone(file);
        read_ahead(file, true);
        header
    }

    fn read_alone(file: &File) -> Result<Self, ReadError> {
        let file_bytes = file.metadata()?.len();
        let mut start = [0; CHECKSUM.start];
        read_at(file, &mut start, 0)?;
        if start[..8] != MAGIC {
            return Err(Damage::Magic.into());
        }
        let version = number(&start, 8);
        if version != VERSION {
            return Err(Damage::Version(version).into());
        }
        let length = u64::from(number(&start, 12));
        let whole = length.is_multiple_of(ALIGNMENT as u64) && length >= ALIGNMENT as u64;
        if !whole || length > file_bytes.min(LONGEST_HEADER) {
            return Err(Damage::Header.into());
        }
        let mut bytes = vec![0; length as usize];
        read_at(file, &mut bytes, 0)?;
        let header = Self::decode(&bytes)?;
        match length.checked_add(header.payload_bytes) {
            Some(end) if end == file_bytes => Ok(header),
            _ => Err(Damage::Length.into()),
        }
    }

    fn decode(bytes: &[u8]) -> Result<Self, Damage> {
        if bytes[CHECKSUM] != checksum_of_header(bytes).to_le_bytes() {
            return Err(Damage::Header);
        }
        let array = |at: usize| -> [u8; 32] { std::array::from_fn(|index| bytes[at + index]) };
        let kind = match number(bytes, 96) {
            0 => Kind::Rows,
            1 => Kind::ResumePoint,
            _ => return Err(Damage::Header),
        };
        let (groups, group_tokens) = (number(bytes, 104), number(bytes, 108));
        let payload_bytes = u64::from(number(bytes, 112)) | u64::from(number(bytes, 116)) << 32;
        let tokens = u64::from(groups) * u64::from(group_tokens);
        // Before lengths are worked out from it.
        let possible = tokens < LONGEST_HEADER && payload_bytes < 1 << 48;
        if !possible || Self::length(tokens as usize, payload_bytes) != bytes.len() as u64 {
            return Err(Damage::Header);
        }
        let sums = FIXED + 4 * tokens as usize;
        let pieces = payload_bytes.div_ceil(PIECE as u64) as usize;
        let tokens = bytes[FIXED..sums].as_chunks::<4>().0.iter();
        let checksums = bytes[sums..sums + 16 * pieces].as_chunks::<16>().0.iter();
        Ok(Self {
            fingerprint: array(32),
            kind,
            before: Chain(array(64)),
            first_group: number(bytes, 100),
            group_tokens,
            tokens: tokens.map(|bytes| u32::from_le_bytes(*bytes)).collect(),
            payload_bytes,
            checksums: checksums.map(|bytes| u128::from_le_bytes(*bytes)).collect(),
        })
    }

    /// Compares the payload of `file` with its checksums; `each` is asked before each piece.
    pub(crate) fn verify_payload<E: From<ReadError>>(
        &self,
        file: &File,
        mut each: impl FnMut() -> Result<(), E>,
    ) -> Result<(), E> {
        let start = self.payload_start();
        let mut memory = vec![0; self.payload_bytes.min(PIECE as u64) as usize];
        for (index, &expected) in self.checksums.iter().enumerate() {
            each()?;
            let at = index as u64 * PIECE as u64;
            let mut left = (self.payload_bytes - at).min(PIECE as u64) as usize;
            // A disk is the faster the more it is asked for at once.
            let longest = match is_in_memory(file, start + at, 1) {
                true => RUN,
                false => PIECE,
            };
            let (mut checksum, mut next) = (Checksum::default(), start + at);
            while left > 0 {
                let run = &mut memory[..left.min(longest)];
                read_at(file, run, next)?;
                checksum.update(run);
                left -= run.len();
                next += run.len() as u64;
            }
            if checksum.finish() != expected {
                return Err(ReadError::from(Damage::Payload(start + at)).into());
            }
        }
        Ok(())
    }

    /// Hands the payload of `file` to `take`, a piece at a time and each checked before, with where it begins.
    pub(crate) fn read_payload<E: From<ReadError>>(
        &self,
        file: &File,
        mut take: impl FnMut(u64, &[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let start = self.payload_start();
        let mut piece = vec![0; (self.payload_bytes.min(PIECE as u64)) as usize];
        for (index, &checksum) in self.checksums.iter().enumerate() {
            let at = index as u64 * PIECE as u64;
            let bytes = (self.payload_bytes - at).min(PIECE as u64) as usize;
            let piece = &mut piece[..bytes];
            read_at(file, piece, start + at)?;
            if xxh3_128(piece) != checksum {
                return Err(ReadError::from(Damage::Payload(start + at)).into());
            }
            take(at, piece)?;
        }
        Ok(())
    }
}

/// The checksum of a piece of payload.
pub(crate) fn checksum(piece: &[u8]) -> u128 {
    xxh3_128(piece)
}

fn checksum_of_header(bytes: &[u8]) -> u128 {
    let mut checksum = Checksum::default();
    checksum.update(&bytes[..CHECKSUM.start]);
    checksum.update(&bytes[CHECKSUM.end..]);
    checksum.finish()
}

fn number(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Fills `bytes` from `offset` on. A file that ends before is damaged.
fn read_at(file: &File, bytes: &mut [u8], offset: u64) -> Result<(), ReadError> {
    match read_exact_at(file, bytes, offset) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Err(Damage::Length.into()),
        read => Ok(read?),
    }
}

/// Whether the system reads more of `file` than it is asked for. What it reads without need is in memory for whoever
/// asks whether it has been since it was compared.
#[cfg(target_os = "linux")]
fn read_ahead(file: &File, more: bool) {
    use rustix::fs::{Advice, fadvise};
    let advice = if more { Advice::Normal } else { Advice::Random };
    fadvise(file, 0, None, advice).ok();
}

#[cfg(not(target_os = "linux"))]
fn read_ahead(_: &File, _: bool) {}

/// Without moving the position in the file: those of files without names are everybody's who reads them.
#[cfg(unix)]
fn read_exact_at(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, bytes, offset)
}

#[cfg(not(unix))]
fn read_exact_at(mut file: &File, bytes: &mut [u8], offset: u64) -> io::Result<()> {
    use std::io::{Read, Seek, SeekFrom};
    file.seek(SeekFrom::Start(offset))?;
    file.read_exact(bytes)
}

#[cfg(test)]
mod tests {
    use std::io::{Seek, SeekFrom, Write};

    use super::*;

    /// A segment that is different for each number: of rows, with tokens, or of a resume point.
    fn segment(number: u32) -> (Header, Vec<u8>) {
        let groups = number % 4;
        let byte = |index: u32| (index * 31 + number * 17) as u8;
        let payload: Vec<u8> = (0..40 + number % 90).map(byte).collect();
        let header = Header {
            fingerprint: [number as u8; 32],
            kind: match groups {
                0 => Kind::ResumePoint,
                _ => Kind::Rows,
            },
            before: Chain([byte(1); 32]),
            first_group: number,
            group_tokens: 16,
            tokens: (0..groups * 16).map(|index| index * number).collect(),
            payload_bytes: payload.len() as u64,
            checksums: vec![checksum(&payload)],
        };
        let bytes = [header.encode(), payload].concat();
        (header, bytes)
    }

    fn read(file: &File) -> Result<Header, ReadError> {
        let header = Header::read(file)?;
        let mut payload = Vec::new();
        let read = header.read_payload(file, |_, piece| {
            payload.extend_from_slice(piece);
            Ok::<(), ReadError>(())
        });
        let verified = header.verify_payload(file, || Ok::<(), ReadError>(()));
        assert_eq!(read.is_ok(), verified.is_ok());
        read.map(|()| header)
    }

    #[test]
    fn whichever_byte_of_a_hundred_segments_differs_none_is_taken_for_whole() {
        let mut file = tempfile::tempfile().expect("a file");
        let put = |file: &mut File, at: usize, bytes: &[u8]| {
            file.seek(SeekFrom::Start(at as u64)).expect("a place");
            file.write_all(bytes).expect("room");
        };
        for number in 0..100 {
            let (header, bytes) = segment(number);
            file.set_len(bytes.len() as u64).expect("room");
            put(&mut file, 0, &bytes);
            assert_eq!(read(&file).expect("whole"), header);
            for (at, &byte) in bytes.iter().enumerate() {
                put(&mut file, at, &[byte ^ 1 << (at % 8)]);
                let found = read(&file);
                assert!(
                    matches!(found, Err(ReadError::Damaged(_))),
                    "byte {at} of segment {number}: {found:?}"
                );
                put(&mut file, at, &[byte]);
            }
        }
    }
}
