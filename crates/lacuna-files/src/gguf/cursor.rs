//! A checked, forward-only reader over a GGUF header.
//!
//! Nothing here allocates, and every number read from the file is compared with the bytes that are
//! left before anyone acts on it.

use super::error::Error;

/// The longest metadata key or tensor name accepted: the format's limit for keys.
pub(super) const NAME_LIMIT: usize = 65_535;

pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    position: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, position: 0 }
    }

    pub(super) fn position(&self) -> usize {
        self.position
    }

    fn remaining(&self) -> usize {
        self.bytes.len() - self.position
    }

    /// The next `count` bytes.
    pub(super) fn take(&mut self, count: u64, what: &'static str) -> Result<&'a [u8], Error> {
        let remaining = self.remaining();
        let fits = usize::try_from(count)
            .ok()
            .filter(|&count| count <= remaining);
        let Some(count) = fits else {
            return Err(Error::Truncated {
                what,
                offset: self.position,
                needed: count,
                remaining,
            });
        };
        let taken = &self.bytes[self.position..self.position + count];
        self.position += count;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], Error> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N as u64, what)?);
        Ok(array)
    }

    pub(super) fn u32(&mut self, what: &'static str) -> Result<u32, Error> {
        self.array(what).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, what: &'static str) -> Result<u64, Error> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A count of things that take at least `least_bytes` each, refused when they cannot all fit.
    pub(super) fn count(&mut self, least_bytes: usize, what: &'static str) -> Result<usize, Error> {
        let count = self.u64(what)?;
        self.check_count(count, least_bytes, what)
    }

    pub(super) fn check_count(
        &self,
        count: u64,
        least_bytes: usize,
        what: &'static str,
    ) -> Result<usize, Error> {
        let limit = self.remaining() / least_bytes;
        let fits = usize::try_from(count).ok().filter(|&count| count <= limit);
        fits.ok_or(Error::ImpossibleCount {
            what,
            count,
            limit: limit as u64,
        })
    }

    /// The bytes of a length-prefixed string.
    pub(super) fn string(&mut self, what: &'static str) -> Result<&'a [u8], Error> {
        let length = self.u64(what)?;
        self.take(length, what)
    }

    /// A length-prefixed key or tensor name.
    pub(super) fn name(&mut self, what: &'static str) -> Result<&'a str, Error> {
        let offset = self.position;
        let bytes = self.string(what)?;
        let plausible = !bytes.is_empty() && bytes.len() <= NAME_LIMIT;
        let text = std::str::from_utf8(bytes).ok().filter(|_| plausible);
        text.ok_or(Error::BadName {
            what,
            offset,
            limit: NAME_LIMIT,
        })
    }
}
