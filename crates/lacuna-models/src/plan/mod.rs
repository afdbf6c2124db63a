//! Where every byte goes, from a model's description and its directory of tensors alone.
//!
//! A [`Plan`] has five parts. The [`ArenaPlan`] is what a forward pass executes from: every
//! activation slot at a fixed offset of one arena, proved by [`ArenaPlan::verify`]. The [`KvPlan`]
//! says what sequences reserve and what they commit as tokens arrive, the [`WeightPlan`] what
//! is in the file and copied out of it, the [`Residency`] which of that is in memory, and the [`ProcessPlan`] what the
//! process takes besides. Planning touches no weight and commits no memory; the same input gives the same plan,
//! byte for byte. [`Plan::budget`] divides one number of bytes up among them all.

mod arena;
mod budget;
mod error;
mod experts;
mod kv;
mod map;
mod neurons;
mod process;
mod residency;
mod verify;
mod weights;

use std::str::FromStr;

use lacuna_kernels::CpuConfig;
use lacuna_kv::KvCache;

use crate::program::Program;
use crate::scratch::BatchLimits;
use crate::spec::ModelSpec;

pub use arena::{ALIGNMENT, ArenaPlan, Placement};
pub use budget::{
    Budget, BudgetTooSmall, Change, DraftMemory, Parts, Verdict, mebibytes_that_hold,
    request_bytes, request_bytes_beside,
};
pub use error::{PlanError, PlanFault};
pub use experts::{ExpertLru, ExpertSlots, ExpertTurn, ExpertUse, SlotUse};
pub use kv::{KvBuffer, KvPlan, KvRows, ResumePoints};
pub(crate) use neurons::{AHEAD_NEURONS, NeuronLru, PREDICTED_ROWS, PredictorUse, RUN_BYTES};
pub(crate) use neurons::{NeuronLayout, UpUse};
pub use neurons::{NeuronSlots, NeuronUse};
pub use process::{ProcessPlan, VocabularySize};
pub(crate) use residency::held;
pub use residency::{
    MatrixAccess, Rates, Residency, Streamed, UnknownWeightMode, WeightMode, WeightSource,
    WeightUse,
};
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
    /// Tokens guessed to follow one sequence's, at most, that a pass computes with a row of logits each; those of several
    /// sequences share the rows that there are.
    pub draft_tokens: usize,
    /// What the model takes that guesses them, if one does.
    pub draft: DraftMemory,
    /// What computes.
    pub cpu: CpuConfig,
    /// How weights are had, of a model that is not loaded yet.
    pub weights: WeightMode,
    /// Bytes that the process may commit in all. `None`: as many as it takes.
    pub budget_bytes: Option<u64>,
    /// Of those, bytes that requests may hold apart from their KV rows. `None`: [`request_bytes`], and `image_bytes`.
    pub request_bytes: Option<u64>,
    /// What decoding and encoding an image takes.
    pub image_bytes: u64,
}

impl Demand {
    /// The same with fewer guesses, `least` at least, where the logits of so many would take more memory than the activations
    /// of a batch do anyway.
    ///
    /// # Errors
    /// [`PlanError`] for a demand that nothing can meet.
    pub fn with_guesses_in_spare_memory(
        self,
        spec: &ModelSpec,
        least: usize,
    ) -> Result<Self, PlanError> {
        let program = Program::new(spec);
        let with = |draft_tokens| Self {
            draft_tokens,
            ..self
        };
        let bytes = |draft_tokens| -> Result<usize, PlanError> {
            let arena = ArenaPlan::new(&program, with(draft_tokens).limits()?)?;
            Ok(arena.bytes())
        };
        let spare = bytes(least)?;
        let mut draft_tokens = self.draft_tokens;
        // 15, 7, 3: with the pending token whole tiles of the kernels' products.
        while draft_tokens > least && bytes(draft_tokens)? > spare {
            draft_tokens /= 2;
        }
        Ok(with(draft_tokens.max(least)))
    }

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
                Logits::Last => self.sequences.max(1 + self.draft_tokens).min(tokens),
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
    /// Where weights are.
    pub residency: Residency,
    /// What a draft model takes beside KV pages, which it has of those that are left.
    pub draft: DraftMemory,
    /// What a device has that computes.
    pub device: DevicePlan,
    /// The rest of the process.
    pub program: ProcessPlan,
    /// What requests may hold together, apart from their KV rows.
    pub request_bytes: u64,
    /// Whether that is a share of the budget, and so more of a larger one.
    requests_share: bool,
    /// What of it is for an image, however large the share is.
    image_bytes: u64,
    /// What all of it may come to.
    pub budget_bytes: Option<u64>,
}

/// A device that computes, as far as it counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DevicePlan {
    /// Of its weights, activations and what is copied through, the bytes that are under the budget.
    pub bytes: u64,
    /// The most that KV pages can have, those of layers on the processor included, before its memory is full.
    pub most_kv_bytes: Option<u64>,
}

/// Bytes of a plan at one number of tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Total {
    /// What is committed, by what it is for.
    pub parts: Parts,
    /// The most there was behind KV caches on the way.
    pub kv_peak_bytes: u64,
    /// Beside it: weights in the mapped file.
    pub mapped_weight_bytes: u64,
}

impl Total {
    /// Everything committed.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.parts.bytes()
    }

    /// The most that everything committed came to on the way.
    #[must_use]
    pub fn peak_bytes(&self) -> u64 {
        self.parts.besides_kv() + self.kv_peak_bytes
    }
}

impl Plan {
    /// Plans a model of `spec`, `weights` and `vocabulary` with sequences of `cache`.
    ///
    /// # Errors
    /// [`PlanError`] for a demand that nothing can meet.
    pub fn new(
        spec: &ModelSpec,
        weights: WeightPlan,
        vocabulary: VocabularySize,
        cache: &KvCache,
        demand: &Demand,
    ) -> Result<Self, PlanError> {
        let image_bytes = match demand.request_bytes {
            Some(_) => 0,
            None => demand.image_bytes,
        };
        let mut plan = Self {
            arena: ArenaPlan::new(&Program::new(spec), demand.limits()?)?,
            kv: KvPlan::new(cache, demand)?,
            weights,
            residency: Residency::mapped(),
            draft: demand.draft,
            device: DevicePlan::default(),
            program: ProcessPlan::new(spec, vocabulary, &demand.cpu),
            request_bytes: (demand.request_bytes)
                .unwrap_or_else(|| request_bytes(demand.budget_bytes) + image_bytes),
            requests_share: demand.request_bytes.is_none(),
            image_bytes,
            budget_bytes: demand.budget_bytes,
        };
        plan.residency = match &plan.weights.loaded {
            Some(loaded) => loaded.clone(),
            None => plan.place_weights(demand.weights),
        };
        Ok(plan)
    }

    /// Bytes when every sequence holds `tokens` tokens.
    #[must_use]
    pub fn total(&self, tokens: usize) -> Total {
        let kv_peak_bytes = self.kv.peak_bytes(tokens);
        let parts = Parts {
            kv_bytes: self.kv.committed_bytes(tokens),
            read_weight_bytes: self.residency_at(tokens).memory_bytes(),
            ..self.fixed()
        };
        Total {
            parts,
            kv_peak_bytes,
            mapped_weight_bytes: self.mapped_weight_bytes(),
        }
    }

    /// Bytes before the first request.
    #[must_use]
    pub fn empty(&self) -> Total {
        let mut total = self.total(0);
        total.parts.request_bytes = 0;
        total
    }

    /// Bytes with every context full.
    #[must_use]
    pub fn full(&self) -> Total {
        self.total(self.kv.context_tokens)
    }
}
