//! What can be wrong with a plan, or with what it is asked for.

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
    /// The slots are not those of the program, each once and in order.
    #[error("the plan has {found} slots, or has them out of order; the program has {expected}")]
    Slots {
        /// Slots of the plan.
        found: usize,
        /// Slots of the program.
        expected: usize,
    },
    /// A slot does not have the shape that program and batch call for.
    #[error("{slot} does not have the shape the program and the batch call for")]
    Shape {
        /// The slot's name.
        slot: &'static str,
    },
    /// A slot has not the bytes of its shape.
    #[error("{slot} has {bytes} bytes, which is not the size of its shape")]
    Size {
        /// The slot's name.
        slot: &'static str,
        /// What the plan says.
        bytes: usize,
    },
    /// A slot does not start at a cache line.
    #[error("{slot} starts at byte {offset}, which is no multiple of 64")]
    Alignment {
        /// The slot's name.
        slot: &'static str,
        /// Its first byte.
        offset: usize,
    },
    /// A slot ends outside the arena.
    #[error("{slot} ends outside the arena of {arena} bytes")]
    Bounds {
        /// The slot's name.
        slot: &'static str,
        /// Bytes of the arena.
        arena: usize,
    },
    /// A step reads what no step before it has written.
    #[error("{slot} is read before anything is written to it")]
    NeverWritten {
        /// The slot's name.
        slot: &'static str,
    },
    /// Two slots that hold something at the same time share bytes.
    #[error("{} and {} share bytes while both are in use", slots.0, slots.1)]
    Overlap {
        /// The names of the two.
        slots: (&'static str, &'static str),
    },
    /// The arena is no whole number of cache lines.
    #[error("the arena has {bytes} bytes, which is no multiple of 64")]
    ArenaSize {
        /// What the plan says.
        bytes: usize,
    },
}
