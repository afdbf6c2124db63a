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
//! With a key (see [`super::cipher`]) it begins with "lacunake", 32 random bytes follow the checksum, what follows
//! them and each MiB of payload is encrypted, and tags of the cipher are in the place of checksums.
//!
//! Numbers are little-endian. The header's checksum is of all its other bytes, and the file ends with the payload,
//! so a file that was cut, or of which any bit differs, is not taken for a whole one.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use super::chain::Chain;
use super::cipher::{CacheKey, FileCipher, SALT_BYTES};
use super::verified::is_in_memory;
use crate::checksum::{Checksum, xxh3_128};

const MAGIC: [u8; 8] = *b"lacunakv";
/// Of those that take a key.
const SEALED_MAGIC: [u8; 8] = *b"lacunake";
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
    /// Of each [`PIECE`] of the payload; tags of the cipher, if there is one.
    pub(crate) checksums: Vec<u128>,
    /// What it is encrypted with.
    pub(crate) cipher: Option<Arc<FileCipher>>,
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
    /// It is encrypted.
    #[error("it is encrypted, and takes the key that it was written with")]
    Locked,
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
    /// Takes the next piece of the payload, in the order of the file, and makes of it what is written.
    pub(crate) fn push_piece(&mut self, piece: &mut [u8]) {
        let checksum = match &self.cipher {
            None => xxh3_128(piece),
            Some(cipher) => cipher.seal(part_of(self.checksums.len()), &[], piece),
        };
        self.checksums.push(checksum);
    }

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

    /// Bytes that a header takes which has so many tokens, before so much payload, and is `sealed` if there is a key.
    pub(crate) fn length(tokens: usize, payload_bytes: u64, sealed: bool) -> u64 {
        let pieces = payload_bytes.div_ceil(PIECE as u64);
        let salt = if sealed { SALT_BYTES as u64 } else { 0 };
        let bytes = FIXED as u64 + salt + 4 * tokens as u64 + 16 * pieces;
        bytes.next_multiple_of(ALIGNMENT as u64)
    }

    /// Where its payload begins.
    pub(crate) fn payload_start(&self) -> u64 {
        let sealed = self.cipher.is_some();
        Self::length(self.tokens.len(), self.payload_bytes, sealed)
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let length = self.payload_start() as usize;
        let mut bytes = Vec::with_capacity(length);
        bytes.extend(match self.cipher {
            None => MAGIC,
            Some(_) => SEALED_MAGIC,
        });
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
        let Some(cipher) = &self.cipher else {
            bytes.resize(length, 0);
            let checksum = checksum_of_header(&bytes).to_le_bytes();
            bytes[CHECKSUM].copy_from_slice(&checksum);
            return bytes;
        };
        bytes.resize(length - SALT_BYTES, 0);
        let (start, rest) = bytes.split_at_mut(CHECKSUM.end);
        let bound = [&start[..CHECKSUM.start], &cipher.salt].concat();
        let tag = cipher.seal(HEADER_PART, &bound, rest);
        start[CHECKSUM].copy_from_slice(&tag.to_le_bytes());
        [&*start, &cipher.salt, rest].concat()
    }

    /// The header at the start of `file`, which has just the length that it says. Nothing behind it is read.
    /// Of one that is encrypted, `key` is what its folder is read with; without one, none that is encrypted is.
    pub(crate) fn read(file: &File, key: Option<&CacheKey>) -> Result<Self, ReadError> {
        read_ahead(file, false);
        let header = Self::read_alone(file, key);
        read_ahead(file, true);
        header
    }

    fn read_alone(file: &File, key: Option<&CacheKey>) -> Result<Self, ReadError> {
        let file_bytes = file.metadata()?.len();
        let mut start = [0; CHECKSUM.start];
        read_at(file, &mut start, 0)?;
        let key = match (start[..8] == MAGIC, start[..8] == SEALED_MAGIC) {
            (true, _) if key.is_none() => None,
            (_, true) => Some(key.ok_or(Damage::Locked)?),
            _ => return Err(Damage::Magic.into()),
        };
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
        let header = match key {
            None if bytes[CHECKSUM] == checksum_of_header(&bytes).to_le_bytes() => {
                Self::decode(&bytes, None)?
            }
            None => return Err(Damage::Header.into()),
            Some(key) => Self::unseal(bytes, key)?,
        };
        match length.checked_add(header.payload_bytes) {
            Some(end) if end == file_bytes => Ok(header),
            _ => Err(Damage::Length.into()),
        }
    }

    fn unseal(mut bytes: Vec<u8>, key: &CacheKey) -> Result<Self, Damage> {
        let salt: Vec<u8> = bytes
            .drain(CHECKSUM.end..CHECKSUM.end + SALT_BYTES)
            .collect();
        let cipher = key.of_file(std::array::from_fn(|index| salt[index]));
        let (start, rest) = bytes.split_at_mut(CHECKSUM.end);
        let bound = [&start[..CHECKSUM.start], &salt].concat();
        let tag = u128::from_le_bytes(std::array::from_fn(|index| start[CHECKSUM.start + index]));
        match cipher.open(HEADER_PART, &bound, rest, tag) {
            true => Self::decode(&bytes, Some(Arc::new(cipher))),
            false => Err(Damage::Header),
        }
    }

    /// Of bytes that are what was written, as without a key.
    fn decode(bytes: &[u8], cipher: Option<Arc<FileCipher>>) -> Result<Self, Damage> {
        let array = |at: usize| -> [u8; 32] { std::array::from_fn(|index| bytes[at + index]) };
        let kind = match number(bytes, 96) {
            0 => Kind::Rows,
            1 => Kind::ResumePoint,
            _ => return Err(Damage::Header),
        };
        let (groups, group_tokens) = (number(bytes, 104), number(bytes, 108));
        let payload_bytes = u64::from_le_bytes(std::array::from_fn(|index| bytes[112 + index]));
        let tokens = u64::from(groups) * u64::from(group_tokens);
        // Before lengths are worked out from it.
        if tokens >= LONGEST_HEADER {
            return Err(Damage::Header);
        }
        let salt = if cipher.is_some() { SALT_BYTES } else { 0 };
        let length = Self::length(tokens as usize, payload_bytes, cipher.is_some());
        if length != (bytes.len() + salt) as u64 {
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
            cipher,
        })
    }

    /// Compares the payload of `file` with its checksums; `each` is asked before each piece.
    pub(crate) fn verify_payload<E: From<ReadError>>(
        &self,
        file: &File,
        mut each: impl FnMut() -> Result<(), E>,
    ) -> Result<(), E> {
        if self.cipher.is_some() {
            return self.read_payload(file, |_, _| each());
        }
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
            let whole = match &self.cipher {
                None => xxh3_128(piece) == checksum,
                Some(cipher) => cipher.open(part_of(index), &[], piece, checksum),
            };
            if !whole {
                return Err(ReadError::from(Damage::Payload(start + at)).into());
            }
            take(at, piece)?;
        }
        Ok(())
    }
}

/// The part of a file that its header is, to the cipher.
const HEADER_PART: u64 = 0;

/// And that of each piece of its payload.
fn part_of(piece: usize) -> u64 {
    piece as u64 + 1
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
    fn segment(number: u32, key: Option<&CacheKey>) -> (Header, Vec<u8>) {
        let groups = number % 4;
        let byte = |index: u32| (index * 31 + number * 17) as u8;
        let mut payload: Vec<u8> = (0..40 + number % 90).map(byte).collect();
        let mut header = Header {
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
            checksums: Vec::new(),
            cipher: key.map(|key| Arc::new(key.of_new_file().expect("random bytes"))),
        };
        header.push_piece(&mut payload);
        let bytes = [header.encode(), payload].concat();
        (header, bytes)
    }

    fn read(file: &File, key: Option<&CacheKey>) -> Result<Header, ReadError> {
        let header = Header::read(file, key)?;
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
        let key = CacheKey::new([7; 32]);
        for key in [None, Some(&key)] {
            flip_each_byte(key);
        }
    }

    #[test]
    fn without_its_key_nothing_of_a_segment_is_read_and_none_that_is_open_passes_for_it() {
        let (key, other) = (CacheKey::new([7; 32]), CacheKey::new([8; 32]));
        let (header, sealed) = segment(5, Some(&key));
        let (_, again) = segment(5, Some(&key));
        let (_, open) = segment(5, None);
        let file = |bytes: &[u8]| {
            let mut file = tempfile::tempfile().expect("a file");
            file.write_all(bytes).expect("room");
            file
        };
        let damage = |bytes: &[u8], key| match read(&file(bytes), key) {
            Err(ReadError::Damaged(damage)) => damage,
            read => panic!("{read:?}"),
        };
        assert_eq!(read(&file(&sealed), Some(&key)).expect("whole"), header);
        assert_eq!(damage(&sealed, None), Damage::Locked);
        assert_eq!(damage(&sealed, Some(&other)), Damage::Header);
        assert_eq!(damage(&open, Some(&key)), Damage::Magic);
        for length in (0..sealed.len()).step_by(61) {
            damage(&sealed[..length], Some(&key));
        }
        // Of the same pages no two files are alike, and the tokens are in neither.
        let start = header.payload_start() as usize;
        assert!(sealed[start..] != again[start..] && sealed[16..start] != again[16..start]);
        let tokens: Vec<u8> = header
            .tokens
            .iter()
            .flat_map(|it| it.to_le_bytes())
            .collect();
        let has = |bytes: &[u8]| bytes.windows(tokens.len()).any(|window| window == tokens);
        assert!(has(&open) && !has(&sealed));
    }

    fn flip_each_byte(key: Option<&CacheKey>) {
        let mut file = tempfile::tempfile().expect("a file");
        let put = |file: &mut File, at: usize, bytes: &[u8]| {
            file.seek(SeekFrom::Start(at as u64)).expect("a place");
            file.write_all(bytes).expect("room");
        };
        for number in 0..100 {
            let (header, bytes) = segment(number, key);
            file.set_len(bytes.len() as u64).expect("room");
            put(&mut file, 0, &bytes);
            assert_eq!(read(&file, key).expect("whole"), header);
            for (at, &byte) in bytes.iter().enumerate() {
                put(&mut file, at, &[byte ^ 1 << (at % 8)]);
                let found = read(&file, key);
                assert!(
                    matches!(found, Err(ReadError::Damaged(_))),
                    "byte {at} of segment {number}: {found:?}"
                );
                put(&mut file, at, &[byte]);
            }
        }
    }

    #[test]
    fn payloads_begin_at_the_first_boundary_behind_all_that_is_said_of_them() {
        let length = |tokens, payload, sealed| Header::length(tokens, payload, sealed) / 4096;
        assert_eq!(length(0, 0, false), 1);
        // 120 bytes, and 4 for each token; 32 more with a key.
        assert_eq!((length(994, 0, false), length(995, 0, false)), (1, 2));
        assert_eq!((length(986, 0, true), length(987, 0, true)), (1, 2));
        // And 16 for each mebibyte that is begun.
        let mebibyte = 1 << 20;
        let (most, more) = (248 * mebibyte, 248 * mebibyte + 1);
        assert_eq!((length(0, most, false), length(0, more, false)), (1, 2));
        assert_eq!(
            (length(990, mebibyte, false), length(991, mebibyte, false)),
            (1, 2)
        );
    }

    fn put(bytes: &[u8]) -> File {
        let mut file = tempfile::tempfile().expect("a file");
        file.write_all(bytes).expect("room");
        file
    }

    fn damage(bytes: &[u8]) -> Damage {
        match Header::read(&put(bytes), None) {
            Err(ReadError::Damaged(damage)) => damage,
            read => panic!("{read:?}"),
        }
    }

    /// `whole` with other bytes in some places, and a checksum that is right of the header.
    fn claiming(whole: &[u8], header_bytes: usize, claims: &[(usize, u32)]) -> Vec<u8> {
        let mut bytes = whole.to_vec();
        for &(at, number) in claims {
            bytes[at..at + 4].copy_from_slice(&number.to_le_bytes());
        }
        let checksum = checksum_of_header(&bytes[..header_bytes]).to_le_bytes();
        bytes[CHECKSUM].copy_from_slice(&checksum);
        bytes
    }

    #[test]
    fn a_header_that_claims_what_it_cannot_have_is_damaged_whatever_its_checksum() {
        let (header, whole) = segment(5, None);
        let length = header.payload_start() as usize;
        let claims = |claims: &[(usize, u32)]| damage(&claiming(&whole, length, claims));
        let same = Header::read(&put(&claiming(&whole, length, &[])), None);
        assert_eq!(same.expect("as it was"), header);
        // More tokens than there are numbers for their bytes.
        assert_eq!(claims(&[(104, u32::MAX), (108, u32::MAX)]), Damage::Header);
        assert_eq!(claims(&[(104, 1 << 16), (108, 1 << 16)]), Damage::Header);
        // More tokens than the header has room for.
        assert_eq!(claims(&[(104, 1000)]), Damage::Header);
        assert_eq!(claims(&[(112, u32::MAX), (116, u32::MAX)]), Damage::Header);
        assert_eq!(claims(&[(112, 0), (116, 1)]), Damage::Header);
        assert_eq!(claims(&[(96, 2)]), Damage::Header, "no kind");
        // One byte more than the file has, in a header that is as long as before.
        assert_eq!(
            claims(&[(112, header.payload_bytes as u32 + 1)]),
            Damage::Length
        );
        // A header that is longer than what it says takes.
        let mut longer = whole.clone();
        longer.splice(length..length, [0; 4096]);
        let longer = claiming(&longer, length + 4096, &[(12, length as u32 + 4096)]);
        assert_eq!(damage(&longer), Damage::Header);
    }

    #[test]
    fn a_header_is_no_longer_than_its_file_and_ends_at_a_boundary() {
        let (header, whole) = segment(5, None);
        let length = header.payload_start() as u32;
        for claimed in [0, 16, length - 1, length + 1, length + 4096, u32::MAX] {
            let mut bytes = whole.clone();
            bytes[12..16].copy_from_slice(&claimed.to_le_bytes());
            assert_eq!(damage(&bytes), Damage::Header, "{claimed} bytes");
        }
        assert_eq!(damage(&whole[..15]), Damage::Length, "not even that");
    }

    /// A segment of a mebibyte and ten bytes.
    fn two_pieces(key: Option<&CacheKey>) -> (Header, Vec<u8>) {
        let mut payload = vec![3; PIECE + 10];
        let (mut header, _) = segment(5, key);
        header.payload_bytes = payload.len() as u64;
        header.checksums.clear();
        for piece in payload.chunks_mut(PIECE) {
            header.push_piece(piece);
        }
        let bytes = [header.encode(), payload].concat();
        (header, bytes)
    }

    #[test]
    fn it_is_said_where_the_piece_begins_that_is_damaged() {
        let key = CacheKey::new([7; 32]);
        for key in [None, Some(&key)] {
            let (header, mut bytes) = two_pieces(key);
            let start = header.payload_start();
            let found = |bytes: &[u8]| {
                let file = put(bytes);
                let header = Header::read(&file, key).expect("its header is whole");
                let mut taken = Vec::new();
                let read = header.read_payload(&file, |at, _| {
                    taken.push(at);
                    Ok::<(), ReadError>(())
                });
                let verified = header.verify_payload(&file, || Ok::<(), ReadError>(()));
                let damage = |read| match read {
                    Ok(()) => None,
                    Err(ReadError::Damaged(damage)) => Some(damage),
                    Err(ReadError::Io(error)) => panic!("{error}"),
                };
                let (read, verified) = (damage(read), damage(verified));
                assert_eq!(read, verified);
                (read, taken)
            };
            assert_eq!(found(&bytes), (None, vec![0, PIECE as u64]));
            *bytes.last_mut().expect("bytes") ^= 1;
            let second = start + PIECE as u64;
            assert_eq!(found(&bytes), (Some(Damage::Payload(second)), vec![0]));
            bytes[start as usize] ^= 1;
            assert_eq!(found(&bytes), (Some(Damage::Payload(start)), vec![]));
        }
    }

    /// Nothing is sealed twice under one number.
    #[test]
    fn the_header_is_part_0_of_a_file_and_its_pieces_are_those_behind_it() {
        let key = CacheKey::new([7; 32]);
        let (header, bytes) = two_pieces(Some(&key));
        let cipher = header.cipher.as_ref().expect("a key");
        let payload = &bytes[header.payload_start() as usize..];
        for (index, piece) in payload.chunks(PIECE).enumerate() {
            let opens = |number| {
                let mut piece = piece.to_vec();
                cipher.open(number, &[], &mut piece, header.checksums[index])
            };
            let opened: Vec<u64> = (0..4).filter(|&number| opens(number)).collect();
            assert_eq!(opened, [index as u64 + 1]);
        }
    }

    /// What the system refuses is no damage: the file may be whole.
    #[test]
    fn a_file_that_cannot_be_read_is_not_set_aside() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("segment");
        let mut file = File::create(&path).expect("a file");
        file.write_all(&segment(5, None).1).expect("room");
        assert!(Header::read(&File::open(&path).expect("a file"), None).is_ok());
        let read = Header::read(&file, None);
        assert!(
            matches!(read, Err(ReadError::Io(_))),
            "it is for writing: {read:?}"
        );
    }
}
