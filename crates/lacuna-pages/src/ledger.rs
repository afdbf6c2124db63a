//! The ledger: byte accounts of a pool and of each buffer.

use crate::units::ByteLength;

/// A pool's accounts at one moment. A plain copy, cheap enough to take at every step.
///
/// A pool knows pages, not what is in them: how much of them holds no row is its user's account.
///
/// `committed = unique + shared + pinned_only + idle + retiring + lost`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Ledger {
    /// Address space held by buffers.
    pub reserved: ByteLength,
    /// Physical memory obtained from the device.
    pub committed: ByteLength,
    /// The part of it that is memory of the host beside a device's own ([`SplitDevice`](crate::SplitDevice)).
    pub host_beside: ByteLength,
    /// Address space with memory behind it; a page mapped twice counts twice.
    pub mapped: ByteLength,
    /// Physical memory mapped more than once; each page counts once.
    pub shared: ByteLength,
    /// Physical memory mapped exactly once.
    pub unique: ByteLength,
    /// Physical memory that pins keep, mapped or not.
    pub pinned: ByteLength,
    /// The part of `pinned` that no buffer maps.
    pub pinned_only: ByteLength,
    /// The part of `committed` that is pages of files: memory that processes share, and that the system reads again
    /// when it has taken it away.
    pub file: ByteLength,
    /// Committed memory nobody owns, kept for reuse.
    pub idle: ByteLength,
    /// Committed memory whose last readers may not be done yet.
    pub retiring: ByteLength,
    /// Committed memory set aside because undoing a failed operation failed too.
    pub lost: ByteLength,
    /// The byte limit, if one is set.
    pub limit: Option<ByteLength>,
    /// How far committed memory is above a limit that was lowered; given back as pages come free.
    pub owed: ByteLength,
    /// Buffers there are.
    pub buffers: u64,
    /// Heaps there are.
    pub heaps: u64,
    /// Separate mappings, holes between them included: on the host, kernel VMAs at most.
    pub regions: u64,
    /// The most regions the device may hold.
    pub region_limit: Option<u64>,
    /// What has been done since the pool was made.
    pub counts: Counts,
}

/// What a pool has done since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counts {
    /// Batches the device has performed for buffers.
    pub batches: u64,
    /// Map operations in them; adjacent pages are one operation.
    pub map_calls: u64,
    /// Pages mapped, fresh or shared.
    pub pages_mapped: u64,
    /// Pages unmapped.
    pub pages_unmapped: u64,
    /// Pages of memory obtained from the system.
    pub pages_committed: u64,
    /// Pages of memory given back to the system.
    pub pages_decommitted: u64,
    /// Pages copied because a sealed page was to be written.
    pub copies_on_write: u64,
    /// Pages swapped out to a store.
    pub pages_swapped_out: u64,
    /// Pages swapped in from a store.
    pub pages_swapped_in: u64,
}

/// One buffer's accounts at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct BufferLedger {
    /// Its address space.
    pub reserved: ByteLength,
    /// The part with memory behind it.
    pub mapped: ByteLength,
    /// The part whose pages other slots map too.
    pub shared: ByteLength,
    /// The part whose pages nothing else maps: what dropping the buffer frees, pins aside.
    pub unique: ByteLength,
    /// Separate mappings, holes between them included.
    pub regions: u64,
}
