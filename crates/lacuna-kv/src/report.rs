//! What a sequence costs, in bytes.

/// Bytes of one sequence, at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvReport {
    /// Bytes one token takes over all layers.
    pub bytes_per_token: usize,
    /// Address space held.
    pub reserved_bytes: usize,
    /// Memory behind this sequence, what it shares with others included.
    pub committed_bytes: usize,
    /// The part of it that other sequences use too.
    pub shared_bytes: usize,
    /// The part that nothing else uses: what dropping the sequence frees.
    pub unique_bytes: usize,
    /// Bytes of the states that layers keep; they are part of what is committed.
    pub state_bytes: usize,
    /// Committed bytes that hold no accepted row and no state.
    pub slack_bytes: usize,
    /// The most that was committed for this sequence at any time, while growing included.
    pub peak_committed_bytes: usize,
    /// Bytes copied because the policy moves rows to grow or cannot share them, or because a shared
    /// page was to be written.
    pub copied_bytes: usize,
    /// Bytes filled with zeros before they held a row.
    pub zeroed_bytes: usize,
    /// Times all rows were moved to larger buffers.
    pub resizes: usize,
    /// Batches of mappings sent to the device, over all sequences of the cache.
    pub map_calls: u64,
    /// What holding the whole context from the start would commit.
    pub dense_bytes: usize,
}
