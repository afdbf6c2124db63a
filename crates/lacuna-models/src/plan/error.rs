//! What can be wrong with a plan, or with what it is asked for.

use crate::plan::pass::{Buffer, Step};
use crate::scratch::BatchLimits;

/// Settings nothing can be planned for.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// A context of no tokens.
    #[error("a context of 0 tokens can hold nothing; it takes 1 or more")]
    EmptyContext,
    /// A batch of no tokens.
    #[error("a batch of 0 tokens computes nothing; it takes 1 or more")]
    EmptyBatch,
    /// No sequence at all.
    #[error("0 sequences need no plan; it takes 1 or more")]
    NoSequence,
    /// Activations no address space can hold.
    #[error(
        "activations for {} tokens and {} rows of logits do not fit the address space; use a smaller batch",
        limits.tokens, limits.logit_rows
    )]
    BatchTooLarge {
        /// The batch asked for.
        limits: BatchLimits,
    },
    /// The KV cache cannot be had whatever memory there is.
    #[error(transparent)]
    Kv(#[from] lacuna_kv::KvError),
}

/// A plan that must not be executed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanFault {
    /// The buffers are not those of a forward pass, each once and in order.
    #[error(
        "the plan has {found} buffers, or has them out of order; a forward pass has {expected}"
    )]
    Buffers {
        /// Buffers of the plan.
        found: usize,
        /// Buffers of a forward pass.
        expected: usize,
    },
    /// A buffer does not have the shape that config and batch call for.
    #[error("{} does not have the shape the model and the batch call for", buffer.name())]
    Shape {
        /// The buffer.
        buffer: Buffer,
    },
    /// A buffer has not the bytes of its shape.
    #[error("{} has {bytes} bytes, which is not the size of its shape", buffer.name())]
    Size {
        /// The buffer.
        buffer: Buffer,
        /// What the plan says.
        bytes: usize,
    },
    /// A buffer does not start at a cache line.
    #[error("{} starts at byte {offset}, which is no multiple of 64", buffer.name())]
    Alignment {
        /// The buffer.
        buffer: Buffer,
        /// Its first byte.
        offset: usize,
    },
    /// A buffer ends outside the arena.
    #[error("{} ends outside the arena of {arena} bytes", buffer.name())]
    Bounds {
        /// The buffer.
        buffer: Buffer,
        /// Bytes of the arena.
        arena: usize,
    },
    /// A step uses a buffer outside its lifetime, or a block needs it again after its end.
    #[error("{} is needed during `{}`, outside its lifetime", buffer.name(), step.name())]
    Lifetime {
        /// The buffer.
        buffer: Buffer,
        /// A step that needs it.
        step: Step,
    },
    /// Two buffers that hold something at the same time share bytes.
    #[error("{} and {} share bytes while both are in use", buffers.0.name(), buffers.1.name())]
    Overlap {
        /// The two.
        buffers: (Buffer, Buffer),
    },
    /// The arena is no whole number of cache lines.
    #[error("the arena has {bytes} bytes, which is no multiple of 64")]
    ArenaSize {
        /// What the plan says.
        bytes: usize,
    },
}
