//! PNG files without their text and color profiles. Nobody looks at those here, and decoders keep the text and unpack
//! the profile, which may be a thousand times as long as it is in the file. Copies nothing.

use std::io::{self, BufRead, ErrorKind, Read, Seek, SeekFrom};

/// Bytes that every PNG begins with.
const SIGNATURE_BYTES: usize = 8;
/// Bytes of a chunk beside its contents: their length, its kind, and a checksum.
const CHUNK_BYTES: usize = 12;
/// Kinds of chunks that are left out.
const LEFT_OUT: [&[u8; 4]; 4] = [b"iCCP", b"tEXt", b"zTXt", b"iTXt"];

/// Reads what is left, from beginning to end.
pub(crate) struct Needed<'a> {
    /// The rest of the chunk that is being read, or of all chunks where none of them is left out.
    chunk: &'a [u8],
    /// What comes behind it.
    rest: &'a [u8],
}

impl<'a> Needed<'a> {
    pub(crate) fn new(file: &'a [u8]) -> Self {
        let (chunk, rest) = file.split_at(file.len().min(SIGNATURE_BYTES));
        Self { chunk, rest }
    }

    /// Goes on to the next chunk.
    fn advance(&mut self) {
        let length = self.rest.first_chunk().copied().map(u32::from_be_bytes);
        let kind = self.rest.get(4..).and_then(<[u8]>::first_chunk::<4>);
        let end = match (length, kind) {
            // Pixels come last, in one chunk or in thousands.
            (Some(length), Some(kind)) if kind != b"IDAT" => {
                (length as usize).saturating_add(CHUNK_BYTES)
            }
            _ => usize::MAX,
        };
        let (chunk, rest) = self.rest.split_at(end.min(self.rest.len()));
        let is_out = kind.is_some_and(|kind| LEFT_OUT.contains(&kind));
        self.chunk = if is_out { &[] } else { chunk };
        self.rest = rest;
    }
}

impl BufRead for Needed<'_> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        while self.chunk.is_empty() && !self.rest.is_empty() {
            self.advance();
        }
        Ok(self.chunk)
    }

    fn consume(&mut self, amount: usize) {
        self.chunk = self.chunk.get(amount..).unwrap_or_default();
    }
}

impl Read for Needed<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let read = self.fill_buf()?.read(out)?;
        self.consume(read);
        Ok(read)
    }
}

/// Asked for by the decoder's type, and never called by it.
impl Seek for Needed<'_> {
    fn seek(&mut self, _: SeekFrom) -> io::Result<u64> {
        Err(ErrorKind::Unsupported.into())
    }
}
