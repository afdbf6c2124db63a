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
    /// A model of which no layer keeps rows or a state has no cache.
    #[error("no layer keeps rows or a state, so there is nothing for a KV cache to hold")]
    EmptyGeometry,
    /// States were given for other layers than there are.
    #[error("states are given for {states} layers, and there are {layers}; give one for each")]
    States {
        /// Layers there are.
        layers: usize,
        /// Layers that states were given for.
        states: usize,
    },
    /// States that no address space can hold.
    #[error("the layers' states do not fit the address space of {limit} bytes")]
    StatesTooLarge {
        /// Bytes there are addresses for.
        limit: usize,
    },
    /// Rows without heads or elements.
    #[error(
        "layer {layer} keeps rows of {kv_heads} heads of {key_dim} elements of K and {value_dim} of V; all must be above zero"
    )]
    EmptyRows {
        /// The decoder block.
        layer: usize,
        /// Its key/value heads.
        kv_heads: usize,
        /// Elements of a head of K.
        key_dim: usize,
        /// Elements of a head of V.
        value_dim: usize,
    },
    /// Values that are to be the first elements of keys and are longer than those.
    #[error(
        "layer {layer} is to read values of {value_dim} elements from keys of {key_dim}; keys must be as long"
    )]
    ValuesBeyondKeys {
        /// The decoder block.
        layer: usize,
        /// Elements of a head of K.
        key_dim: usize,
        /// Elements of a head of V.
        value_dim: usize,
    },
    /// Types of K and V of a model whose values are the first elements of its keys.
    #[error(
        "K is to be {key} and V {value}, but the model keeps both in the same rows; give one type for both, such as `{key}`"
    )]
    OneElement {
        /// Storage asked for keys.
        key: lacuna_kernels::ElementType,
        /// Storage asked for values.
        value: lacuna_kernels::ElementType,
    },
    /// A layer that is to read rows which are not there.
    #[error(
        "layer {layer} is to read the rows of layer {source_layer}, which is no earlier layer with rows of its own"
    )]
    NoRows {
        /// The decoder block that reads.
        layer: usize,
        /// The one whose rows it is to read.
        source_layer: usize,
    },
    /// An element type that heads of this size are no whole number of blocks of.
    #[error("layer {layer}: {why}")]
    HeadDim {
        /// The decoder block.
        layer: usize,
        /// What does not fit.
        why: lacuna_kernels::HeadDimError,
    },
    /// A layer of a device that is to read rows of one of the host's.
    #[error(
        "layer {layer} reads the rows of layer {source_layer}, which is one of the {host_layers} first that run on the \
         processor; run more layers on the device, or fewer"
    )]
    SplitRows {
        /// Layers of the host's.
        host_layers: usize,
        /// The decoder block that reads.
        layer: usize,
        /// The one whose rows it reads.
        source_layer: usize,
    },
    /// A layout or a policy that cannot hold rows in two places.
    #[error(
        "the policy `{policy}` does not hold rows in two places; use `sparse`, or run all layers in one place"
    )]
    SplitPolicy {
        /// The policy.
        policy: crate::policy::KvPolicy,
    },
    /// Rows that have not been accepted cannot be shared or released.
    #[error("the sequence holds {held} tokens and {requested} were asked for")]
    NotHeld {
        /// Tokens asked for.
        requested: usize,
        /// Tokens accepted.
        held: usize,
    },
    /// Rows that the tokens to come would see were given back, as windows pass them or because that was
    /// asked for, and cannot be had again.
    #[error(
        "{requested} tokens are to remain, and rows that those after them see were given back; keep {first} or more, or truncate to 0 and compute them again"
    )]
    Released {
        /// The fewest tokens that can remain, other than none.
        first: usize,
        /// Tokens that were to remain.
        requested: usize,
    },
    /// Layers keep a state, which is that after all tokens and none before.
    #[error(
        "{requested} tokens are to remain, and layers keep a state which is that after {held}; go back to a resume point, or truncate to 0 and compute them again"
    )]
    StatePassed {
        /// Tokens that the state comes after.
        held: usize,
        /// Tokens that were to remain.
        requested: usize,
    },
    /// A step changed the states of layers and was not accepted whole, so they are those of no accepted
    /// token any more.
    #[error(
        "a step has changed the layers' states and was not accepted whole; go back to a resume point, or truncate to 0 and compute again"
    )]
    StateSpent,
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
