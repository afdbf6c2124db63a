//! Where every byte goes, from a model's description and its directory of tensors alone.
//!
//! A [`Plan`] has three parts. The [`ArenaPlan`] is what a forward pass executes from: every
//! activation buffer at a fixed offset of one arena, proved by [`ArenaPlan::verify`]. The [`KvPlan`]
//! says what sequences reserve and what they commit as tokens arrive, and the [`WeightPlan`] what
//! is mapped from the file. Planning touches no weight and commits no memory; the same input
//! gives the same plan, byte for byte.
//!
//! Not in it: the vocabulary, what each thread needs for itself, and the program.

mod arena;
mod budget;
mod error;
mod kv;
mod map;
mod pass;
mod verify;
mod weights;

use std::str::FromStr;

use lacuna_kv::KvCache;

use crate::config::Config;
use crate::scratch::BatchLimits;

pub use arena::{ALIGNMENT, ArenaPlan, Placement};
pub use budget::{Budget, Change, Verdict};
pub use error::{PlanError, PlanFault};
pub use kv::{KvBuffer, KvPlan};
pub(crate) use pass::attention_shape;
pub use pass::{Buffer, Element, Lifetime, Shape, Step};
pub use weights::{Weight, WeightPlan};

/// Which rows of logits a forward pass must have room for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Logits {
    /// The last row of each sequence: enough to generate.
    #[default]
    Last,
    /// One after every token of a batch: to score a text.
    All,
}

impl Logits {
    /// The name on the command line and in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Last => "last",
            Self::All => "all",
        }
    }
}

/// A name of rows that is none.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown rows of logits `{0}`; use last or all")]
pub struct UnknownLogits(String);

impl FromStr for Logits {
    type Err = UnknownLogits;

    fn from_str(name: &str) -> Result<Self, UnknownLogits> {
        let known = [Self::Last, Self::All]
            .into_iter()
            .find(|rows| rows.name() == name);
        known.ok_or_else(|| UnknownLogits(name.to_owned()))
    }
}

/// What a model is to be run with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Demand {
    /// Tokens the context holds.
    pub context_tokens: usize,
    /// Tokens computed in one pass at most; no more than the contexts hold are planned for.
    pub batch_tokens: usize,
    /// Rows of logits wanted.
    pub logits: Logits,
    /// Sequences there are at once, each with a context of its own.
    pub sequences: usize,
}

impl Demand {
    fn limits(&self) -> Result<BatchLimits, PlanError> {
        if self.context_tokens == 0 {
            return Err(PlanError::EmptyContext);
        }
        if self.batch_tokens == 0 {
            return Err(PlanError::EmptyBatch);
        }
        if self.sequences == 0 {
            return Err(PlanError::NoSequence);
        }
        let contexts = self.context_tokens.saturating_mul(self.sequences);
        let tokens = self.batch_tokens.min(contexts);
        Ok(BatchLimits {
            tokens,
            logit_rows: match self.logits {
                Logits::Last => self.sequences.min(tokens),
                Logits::All => tokens,
            },
            context_tokens: self.context_tokens,
        })
    }
}

/// Where the bytes of a model and its sequences go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// Activations.
    pub arena: ArenaPlan,
    /// The KV cache.
    pub kv: KvPlan,
    /// Weights.
    pub weights: WeightPlan,
}

/// Bytes of a plan at one number of tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Total {
    /// Weights in the mapped file.
    pub weights: u64,
    /// Norms and biases copied out of it.
    pub copied: u64,
    /// The arena.
    pub activations: u64,
    /// Memory behind KV caches.
    pub kv_committed: u64,
    /// The most there was behind them on the way.
    pub kv_peak: u64,
}

impl Total {
    /// All of them.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.besides_kv() + self.kv_committed
    }

    /// The most that all of them came to on the way.
    #[must_use]
    pub fn peak_bytes(&self) -> u64 {
        self.besides_kv() + self.kv_peak
    }

    fn besides_kv(&self) -> u64 {
        self.weights + self.copied + self.activations
    }
}

impl Plan {
    /// Plans a model of `config` and `weights` with sequences of `cache`.
    ///
    /// # Errors
    /// [`PlanError`] for a demand that nothing can meet.
    pub fn new(
        config: &Config,
        weights: WeightPlan,
        cache: &KvCache,
        demand: &Demand,
    ) -> Result<Self, PlanError> {
        Ok(Self {
            arena: ArenaPlan::new(config, demand.limits()?)?,
            kv: KvPlan::new(cache, demand)?,
            weights,
        })
    }

    /// Bytes when every sequence holds `tokens` tokens.
    #[must_use]
    pub fn total(&self, tokens: usize) -> Total {
        Total {
            weights: self.weights.mapped_bytes(),
            copied: self.weights.copied_bytes(),
            activations: self.arena.bytes() as u64,
            kv_committed: self.kv.committed_bytes(tokens),
            kv_peak: self.kv.peak_bytes(tokens),
        }
    }

    /// Bytes before the first token.
    #[must_use]
    pub fn empty(&self) -> Total {
        self.total(0)
    }

    /// Bytes with every context full.
    #[must_use]
    pub fn full(&self) -> Total {
        self.total(self.kv.context_tokens)
    }
}
