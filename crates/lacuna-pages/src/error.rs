//! Everything that can go wrong, as values. No error of this crate leaves anything changed, except
//! [`Error::Undo`], which says what it cost.

use crate::device::{BatchError, DeviceError};
use crate::units::{ByteLength, ByteRange, PageCount, PageRange, PageSize, VirtualPage};

/// Why an operation on a pool or a buffer was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Not a page size at all.
    #[error("a page of {bytes} bytes is not possible; use a power of two from 4 KiB to 1 GiB")]
    PageSize {
        /// What was asked for.
        bytes: u64,
    },
    /// A page size the device does not have.
    #[error("the {device} device has no pages of {page_size}; choose one of its `page_sizes`")]
    UnsupportedPageSize {
        /// The device's name.
        device: &'static str,
        /// What was asked for.
        page_size: PageSize,
    },
    /// A pool configuration that cannot work.
    #[error("pool configuration: {what}")]
    Config {
        /// What is wrong and what to do.
        what: &'static str,
    },
    /// The byte limit leaves no room; give pages back, evict, or raise the limit.
    #[error("{requested} needed but {free} free under the limit ({}); give pages back or raise the limit", display_limit(*limit))]
    OutOfPages {
        /// Pages the whole call needs.
        requested: PageCount,
        /// Pages it could have had.
        free: PageCount,
        /// The limit in force, if one is.
        limit: Option<ByteLength>,
    },
    /// The device's share of separate mappings is used up.
    #[error(
        "{needed} more mappings needed but {in_use} of {limit} are in use; raise `vm.max_map_count`, the device's share of it, or the page size"
    )]
    OutOfMappings {
        /// The most this call may add.
        needed: u64,
        /// Those in use.
        in_use: u64,
        /// The device's limit.
        limit: u64,
    },
    /// A length of zero, or past what an address can hold.
    #[error("cannot reserve {length}; a buffer holds at least one byte and fits the address space")]
    Length {
        /// What was asked for.
        length: ByteLength,
    },
    /// A byte range that is reversed or reaches past the end of its buffer.
    #[error("bytes {range} are not within a buffer of {reserved}")]
    ByteRange {
        /// What was asked for.
        range: ByteRange,
        /// The buffer's length.
        reserved: ByteLength,
    },
    /// A page range that is reversed or reaches past the end of its buffer.
    #[error("{range} are not within a buffer of {reserved}")]
    PageRange {
        /// What was asked for.
        range: PageRange,
        /// The buffer's length.
        reserved: PageCount,
    },
    /// Nothing is mapped there.
    #[error("{page} is a hole; map it first")]
    Hole {
        /// The first such page.
        page: VirtualPage,
    },
    /// The page's contents are in the caller's store.
    #[error("{page} is swapped out; swap it in first")]
    Swapped {
        /// The first such page.
        page: VirtualPage,
    },
    /// The page was never swapped out.
    #[error("{page} is not swapped out")]
    NotSwapped {
        /// The first such page.
        page: VirtualPage,
    },
    /// Something is mapped where a shared page was to go.
    #[error("{page} is already mapped; unmap it before sharing another page there")]
    Occupied {
        /// The first such page.
        page: VirtualPage,
    },
    /// The page is immutable.
    #[error("{page} is sealed; make it unique before writing to it")]
    Sealed {
        /// The first such page.
        page: VirtualPage,
    },
    /// Only sealed pages are shared and pinned.
    #[error("{page} is not sealed; seal it before sharing or pinning it")]
    NotSealed {
        /// The first such page.
        page: VirtualPage,
    },
    /// A buffer or a pin of another pool.
    #[error("the buffer or pin belongs to another pool; pages are shared within one pool only")]
    OtherPool,
    /// Pages of one kind of memory for a buffer of another.
    #[error(
        "the pages are of another kind of memory than the buffer; share them with buffers of their own kind"
    )]
    OtherLocation,
    /// The device lacks a capability.
    #[error("the {device} device cannot {what}")]
    Unsupported {
        /// The device's name.
        device: &'static str,
        /// What it lacks.
        what: &'static str,
    },
    /// The bookkeeping itself found no memory.
    #[error("no memory for a table of {pages}; reserve less or use larger pages")]
    TableMemory {
        /// Pages the table would cover.
        pages: PageCount,
    },
    /// The device failed; everything is as it was before.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The device failed, and failed again when the part already done was to be undone. The pages
    /// involved became holes and `lost` bytes are set aside until the pool is dropped, so that
    /// nothing is reused that might still be mapped.
    #[error("{cause}; undoing the finished part failed too ({undo}); {lost} set aside")]
    Undo {
        /// The first failure.
        cause: DeviceError,
        /// The failure of undoing.
        undo: DeviceError,
        /// Bytes that will not be used again.
        lost: ByteLength,
    },
}

impl From<BatchError> for Error {
    fn from(error: BatchError) -> Self {
        Self::Device(error.cause)
    }
}

fn display_limit(limit: Option<ByteLength>) -> String {
    limit.map_or_else(|| "none set".to_owned(), |limit| limit.to_string())
}

/// Why pages could not be swapped out or in: the pool's reason or the store's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SwapError<E> {
    /// The pool or the device refused.
    #[error(transparent)]
    Pages(#[from] Error),
    /// The caller's store failed; no page changed.
    #[error("the store failed at {page}")]
    Store {
        /// The page whose contents were being moved.
        page: VirtualPage,
        /// What the store said.
        source: E,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shortage_names_the_limit_if_there_is_one() {
        let shortage = |limit| Error::OutOfPages {
            requested: PageCount::new(3),
            free: PageCount::new(1),
            limit,
        };
        let limited = shortage(Some(ByteLength::kibibytes(64))).to_string();
        assert!(limited.contains("under the limit (64 KiB)"), "{limited}");
        let unlimited = shortage(None).to_string();
        assert!(unlimited.contains("(none set)"), "{unlimited}");
    }
}
