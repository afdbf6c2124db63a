//! What can go wrong in a KV cache.

/// A KV operation that was not done. Nothing has changed when one is returned.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KvError {
    /// A context no address space can hold.
    #[error(
        "a context of {tokens} tokens at {bytes_per_token} bytes each does not fit the address space of {limit} bytes; ask for fewer tokens"
    )]
    ContextTooLarge {
        /// Tokens asked for.
        tokens: usize,
        /// Bytes one token takes over all layers.
        bytes_per_token: usize,
        /// Bytes there are addresses for.
        limit: usize,
    },
    /// The sequence has reached the context it was made for.
    #[error(
        "the context of {capacity} tokens is full: {held} held and {requested} more asked for; make the context longer or the prompt shorter"
    )]
    ContextFull {
        /// Tokens the sequence was made for.
        capacity: usize,
        /// Tokens it holds.
        held: usize,
        /// Further tokens asked for.
        requested: usize,
    },
    /// A model without layers, heads or elements has no cache.
    #[error(
        "a KV cache of {layers} layers, {kv_heads} heads and {head_dim} elements a head; all must be above zero"
    )]
    EmptyGeometry {
        /// Decoder blocks.
        layers: usize,
        /// Key/value heads per layer.
        kv_heads: usize,
        /// Elements per head.
        head_dim: usize,
    },
    /// An element type that heads of this size are no whole number of blocks of.
    #[error(transparent)]
    HeadDim(#[from] lacuna_kernels::HeadDimError),
    /// Rows that have not been accepted cannot be shared or released.
    #[error("the sequence holds {held} tokens and {requested} were asked for")]
    NotHeld {
        /// Tokens asked for.
        requested: usize,
        /// Tokens accepted.
        held: usize,
    },
    /// Rows before this position were given back and cannot be had again.
    #[error(
        "rows before position {first} were released and {requested} tokens are to remain; keep more, or truncate to 0 and compute them again"
    )]
    Released {
        /// The first position that is still held.
        first: usize,
        /// Tokens that were to remain.
        requested: usize,
    },
    /// A block pool is short of blocks for now. Nothing is wrong with what was asked.
    #[error(
        "{needed} more blocks of {block_tokens} tokens needed and {available} available; wait for a sequence to end, drop one, or raise the byte limit"
    )]
    NotNow {
        /// Blocks that would have been needed.
        needed: usize,
        /// Blocks that could have been had.
        available: usize,
        /// Tokens of a block.
        block_tokens: usize,
    },
    /// The device failed in the middle of a change and could not undo it, so rows are gone.
    #[error("rows of the sequence were lost with a failure of the device; compute it again")]
    RowsLost,
    /// The device offers no page size at all.
    #[error("the device offers no page size; use the dense policy")]
    NoPageSize,
    /// The substrate could not reserve or commit.
    #[error(transparent)]
    Pages(#[from] lacuna_pages::Error),
}
