//! Memory in words of four bytes, as kernels see it.

use crate::device::{Address, DeviceError};
use crate::units::ByteLength;

/// The bytes of a word; kernels work in words.
pub(crate) const WORD: u64 = 4;

/// Threads in a workgroup; also in the kernels' sources.
pub(crate) const GROUP: u32 = 128;

/// The most workgroups that share one part of a checksum.
pub(crate) const CHECKSUM_GROUPS: u64 = 1024;

/// The most that one submission stages.
pub(crate) const STAGING_BYTES: usize = 4 << 20;

/// Rows of equal length, some distance apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// Where the first row begins; a multiple of four bytes.
    pub address: Address,
    /// The length of a row; a multiple of four bytes, at most 4 MiB.
    pub row: ByteLength,
    /// From the start of one row to that of the next; a multiple of four bytes, at least `row`.
    pub stride: ByteLength,
}

impl Rows {
    /// Whether `data` can be written there by `device`: whole words and whole rows, and an end that is a number.
    pub(crate) fn check(self, device: &'static str, data: &[u8]) -> Result<(), DeviceError> {
        let invalid = |what| Err(DeviceError::Invalid { device, what });
        let (row, stride) = (self.row.get(), self.stride.get());
        if !(self.address.offset | row | stride).is_multiple_of(WORD) {
            return invalid("rows of part of a word");
        }
        if row == 0 || row > STAGING_BYTES as u64 || stride < row {
            return invalid("rows of no bytes, of more than 4 MiB, or further than their stride");
        }
        if data.is_empty() || !(data.len() as u64).is_multiple_of(row) {
            return invalid("rows of which the last is not whole");
        }
        let count = data.len() as u64 / row;
        match (count - 1)
            .checked_mul(stride)
            .and_then(|span| span.checked_add(row))
        {
            Some(_) => Ok(()),
            None => invalid("an operation outside its reservation"),
        }
    }

    /// From the start of the first of `count` rows to the end of the last.
    pub(crate) fn span(self, count: u64) -> ByteLength {
        ByteLength::new((count - 1) * self.stride.get() + self.row.get())
    }
}

/// What the queues of graphics devices compute by their `checksum`, on the host: the sum modulo 2^32 of each
/// little-endian word of four bytes, the `i`-th multiplied by `2 i + 1`. Bytes after the last whole word do
/// not count.
///
/// ```
/// let bytes = [1u32, 10, 100].map(u32::to_le_bytes).concat();
/// # #[cfg(feature = "vulkan")]
/// assert_eq!(lacuna_pages::vulkan::checksum(&bytes), 1 + 10 * 3 + 100 * 5);
/// ```
pub fn checksum(bytes: &[u8]) -> u32 {
    words_of(bytes).zip(0u32..).fold(0, |sum, (word, index)| {
        sum.wrapping_add(word.wrapping_mul(index.wrapping_mul(2).wrapping_add(1)))
    })
}

pub(crate) fn words_of(bytes: &[u8]) -> impl Iterator<Item = u32> {
    let words = bytes.chunks_exact(WORD as usize);
    words.map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]))
}

pub(crate) fn later(address: Address, bytes: u64) -> Address {
    Address {
        offset: address.offset + bytes,
        ..address
    }
}

/// That more is asked for than there is of something.
pub(crate) fn limit(
    what: &'static str,
    requested: ByteLength,
    limit: u64,
    in_use: u64,
) -> DeviceError {
    DeviceError::Limit {
        what,
        requested,
        limit: ByteLength::new(limit),
        in_use: ByteLength::new(in_use),
    }
}
