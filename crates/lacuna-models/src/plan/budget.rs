//! One byte budget for a process, divided up; whether a plan fits it, and what would make it fit.
//!
//! **What counts.** Everything the process commits: memory that no file stands behind, KV pages and weights that
//! are read included. That is what the kernel calls anonymous and shared memory. **What does not.** The program,
//! and weights where they are mapped, are pages of files; the system can evict them and read them again. They are
//! named beside the budget.
//!
//! What can be worked out is ([`Plan`]); the rest follows rules with a reserve; requests get a share;
//! KV pages get what is left. Weights that are read get what full contexts leave, and fifteen sixteenths at least: what
//! is beyond that is streamed ([`Residency`]). As KV pages come to need more, weights give way to them.

use std::fmt::{self, Display, Formatter};

use lacuna_kernels::{CpuConfig, ElementType};
use lacuna_kv::{Geometry, KvCache, KvElements, KvPolicy};
use serde::Serialize;

use crate::plan::arena::ArenaPlan;
use crate::plan::error::PlanError;
use crate::plan::kv::KvPlan;
use crate::plan::residency::{Residency, WeightMode, WeightSource};
use crate::plan::{Demand, Plan, ProcessPlan, VocabularySize, WeightPlan};
use crate::program::Program;
use crate::spec::ModelSpec;

/// What a process commits, by what it is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Parts {
    /// The program's own data and what the allocator keeps.
    pub program_bytes: u64,
    /// The tokenizer and the file's metadata.
    pub vocabulary_bytes: u64,
    /// Tables of the vocabulary by which replies are held to grammars. None are planned: what they take is had from KV
    /// pages and weights while there are any.
    pub constraint_bytes: u64,
    /// Buffers and stacks of the threads that compute.
    pub thread_bytes: u64,
    /// Candidates that a token is chosen from.
    pub sampling_bytes: u64,
    /// Norms and biases, which are copied out of the file.
    pub copied_weight_bytes: u64,
    /// Matrices in forms that cannot be computed from, which are converted, and those made of others.
    pub converted_weight_bytes: u64,
    /// Weights that are read into memory: those that stay, the ring that the others go through, rows of tables, and
    /// slots for experts.
    pub read_weight_bytes: u64,
    /// A draft model once it is loaded: its vocabulary, and weights that are copied, converted or read. Its arena is
    /// with activations, and its rows are in KV pages.
    pub draft_bytes: u64,
    /// The arena of a forward pass.
    pub activation_bytes: u64,
    /// What a device that computes has of a model beside KV pages: weights, activations, and what is copied through.
    pub device_bytes: u64,
    /// Requests, from their first byte to their end, apart from their KV rows.
    pub request_bytes: u64,
    /// KV pages, those of the prefix cache and idle ones included.
    pub kv_bytes: u64,
}

impl Parts {
    /// What a process commits that embeds texts, in the arena and with the threads that it does it in.
    #[must_use]
    pub fn of_encoder(
        spec: &ModelSpec,
        weights: &WeightPlan,
        vocabulary: VocabularySize,
        (arena, cpu): (&ArenaPlan, &CpuConfig),
        request_bytes: u64,
    ) -> Self {
        let process = ProcessPlan::new(spec, vocabulary, cpu);
        Self {
            program_bytes: process.program_bytes,
            vocabulary_bytes: process.vocabulary_bytes,
            constraint_bytes: 0,
            thread_bytes: process.thread_bytes,
            sampling_bytes: 0,
            copied_weight_bytes: weights.copied_bytes(),
            converted_weight_bytes: weights.converted_bytes() + weights.derived_bytes(),
            read_weight_bytes: weights.loaded.as_ref().map_or(0, Residency::memory_bytes),
            draft_bytes: 0,
            activation_bytes: arena.bytes() as u64,
            device_bytes: 0,
            request_bytes,
            kv_bytes: 0,
        }
    }

    /// All but KV pages.
    #[must_use]
    pub fn besides_kv(&self) -> u64 {
        self.program_bytes
            + self.vocabulary_bytes
            + self.constraint_bytes
            + self.thread_bytes
            + self.sampling_bytes
            + self.copied_weight_bytes
            + self.converted_weight_bytes
            + self.read_weight_bytes
            + self.draft_bytes
            + self.activation_bytes
            + self.device_bytes
            + self.request_bytes
    }

    /// All of them.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.besides_kv().saturating_add(self.kv_bytes)
    }

    /// What there is once the model is loaded and nothing has been set up to run it.
    #[must_use]
    pub fn loaded(&self) -> u64 {
        let weights =
            self.copied_weight_bytes + self.converted_weight_bytes + self.read_weight_bytes;
        self.program_bytes + self.vocabulary_bytes + weights + self.draft_bytes
    }
}

/// What a draft model takes beside KV pages, all of it from the start: a draft whose weights were read for each pass would
/// take longer than what it guesses for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct DraftMemory {
    /// Its vocabulary, and weights that are copied, converted or read.
    pub loaded_bytes: u64,
    /// Its arena.
    pub activation_bytes: u64,
    /// Beside the budget: weights in its mapped file.
    pub mapped_bytes: u64,
}

impl DraftMemory {
    /// Of the draft model that `plan` is of.
    #[must_use]
    pub fn of(plan: &Plan) -> Self {
        let parts = plan.fixed();
        Self {
            loaded_bytes: parts.loaded() - parts.program_bytes,
            activation_bytes: parts.activation_bytes,
            mapped_bytes: plan.own_mapped_bytes(),
        }
    }
}

/// A budget, divided up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Budget {
    /// Bytes that the process may commit; `None` when nothing is known that would limit it.
    pub budget_bytes: Option<u64>,
    /// What they are for. They come to the budget exactly, if there is one, or to less where a device's memory does not hold
    /// as many KV pages.
    #[serde(flatten)]
    pub parts: Parts,
    /// The most that KV pages can have, where a device's memory says so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub most_kv_bytes: Option<u64>,
    /// Beside it: weights in the mapped file.
    pub mapped_weight_bytes: u64,
}

impl Budget {
    /// The same with so much for KV pages, or as much of it as they can have.
    #[must_use]
    pub fn with_kv(mut self, bytes: u64) -> Self {
        self.parts.kv_bytes = self.most_kv_bytes.map_or(bytes, |most| bytes.min(most));
        self
    }
}

/// A budget that does not hold what the first token needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "a budget of {} is too small: the first token needs {} ({needed})",
    mebibytes(*budget), mebibytes_that_hold(needed.bytes())
)]
pub struct BudgetTooSmall {
    /// What there is.
    pub budget: u64,
    /// What there would have to be.
    pub needed: Parts,
}

impl Display for Parts {
    /// What takes something, by name.
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let parts = [
            ("program", self.program_bytes),
            ("vocabulary", self.vocabulary_bytes),
            ("tables for grammars", self.constraint_bytes),
            ("threads", self.thread_bytes),
            ("sampling", self.sampling_bytes),
            ("copied weights", self.copied_weight_bytes),
            ("converted weights", self.converted_weight_bytes),
            ("read weights", self.read_weight_bytes),
            ("draft model", self.draft_bytes),
            ("activations", self.activation_bytes),
            ("device", self.device_bytes),
            ("requests", self.request_bytes),
            ("KV pages", self.kv_bytes),
        ];
        let parts = parts.into_iter().filter(|(_, bytes)| *bytes > 0);
        for (index, (name, bytes)) in parts.enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            write!(f, "{comma}{name} {}", mebibytes(bytes))?;
        }
        Ok(())
    }
}

/// Of what is left for weights that are read and KV pages together, the part that KV pages have from the start,
/// unless they need less. They get more as they come to need it, from weights.
const KV_SHARE: u64 = 16;

/// `bytes` for people.
fn mebibytes(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / (1u64 << 20) as f64)
}

/// The fewest tenths of a MiB that hold `bytes`, for people: a budget of what they read is enough.
#[must_use]
pub fn mebibytes_that_hold(bytes: u64) -> String {
    let tenths = (10 * u128::from(bytes)).div_ceil(1 << 20);
    format!("{}.{} MiB", tenths / 10, tenths % 10)
}

/// What requests may hold of `budget`, apart from their KV rows: an eighth, at least 2 MiB, which is a
/// conversation of some thousand tokens, and at most 64, which is as much as is ever received at once.
#[must_use]
pub fn request_bytes(budget: Option<u64>) -> u64 {
    let eighth = budget.map_or(u64::MAX, |budget| budget / 8);
    eighth.clamp(2 << 20, 64 << 20)
}

/// The same of the least budget that has room for `others` beside it: what is to be told where a budget has not, since
/// requests get more of a larger one.
#[must_use]
pub fn request_bytes_beside(others: u64) -> u64 {
    (others / 7).clamp(2 << 20, 64 << 20)
}

impl Plan {
    /// Everything but KV pages.
    pub(super) fn fixed(&self) -> Parts {
        Parts {
            program_bytes: self.program.program_bytes,
            vocabulary_bytes: self.program.vocabulary_bytes,
            constraint_bytes: 0,
            thread_bytes: self.program.thread_bytes,
            sampling_bytes: self.program.sampling_bytes,
            copied_weight_bytes: self.weights.copied_bytes(),
            converted_weight_bytes: self.weights.converted_bytes() + self.weights.derived_bytes(),
            read_weight_bytes: self.residency.memory_bytes(),
            draft_bytes: self.draft.loaded_bytes,
            activation_bytes: self.arena.bytes() as u64 + self.draft.activation_bytes,
            device_bytes: self.device.bytes,
            request_bytes: self.request_bytes,
            kv_bytes: 0,
        }
    }

    /// Where weights are to be.
    pub(super) fn place_weights(&self, mode: WeightMode) -> Residency {
        let source = match mode {
            WeightMode::Fixed(source) => source,
            WeightMode::Auto => {
                let read = self.read_weights(WeightSource::Direct);
                let least = read.memory_bytes() + self.least().bytes();
                let fits = self.budget_bytes.is_some_and(|budget| least <= budget);
                return if fits { read } else { Residency::mapped() };
            }
        };
        self.read_weights(source)
    }

    /// The same, had from `source`.
    fn read_weights(&self, source: WeightSource) -> Residency {
        let planned = |room| Residency::plan(&self.weights, source, room);
        let Some(budget) = self.budget_bytes else {
            return planned(None);
        };
        let left = budget.saturating_sub(self.fixed().bytes());
        let least = self.kv.sequence_peak_bytes(1);
        let kv = self.kv_to_begin_with(budget);
        let roomy = planned(Some(left.saturating_sub(kv)));
        match roomy.memory_bytes() + kv <= left {
            true => roomy,
            false => planned(Some(left.saturating_sub(least))),
        }
    }

    /// What KV pages have of a budget before weights do: more comes from what weights leave, or give up.
    #[must_use]
    pub fn kv_to_begin_with(&self, budget: u64) -> u64 {
        let others = self.fixed().bytes() - self.residency.memory_bytes();
        let left = budget.saturating_sub(others);
        let full = self.kv.peak_bytes(self.kv.context_tokens);
        let least = self.kv.sequence_peak_bytes(1);
        full.min(left / KV_SHARE).max(least)
    }

    /// Where weights are when every sequence holds `tokens` tokens: as many fewer in memory as it takes to stay within the
    /// budget, if they can be.
    #[must_use]
    pub fn residency_at(&self, tokens: usize) -> Residency {
        let needed = self.fixed().besides_kv() + self.kv.peak_bytes(tokens);
        let excess = self
            .budget_bytes
            .map(|budget| needed.saturating_sub(budget));
        let spare = self.residency.to_spare(&self.weights);
        let less = excess.unwrap_or(0).min(spare);
        let less = self.residency.less(&self.weights, less);
        less.unwrap_or_else(|| self.residency.clone())
    }

    /// Bytes of weights in mapped files, those of a draft model included.
    pub(super) fn mapped_weight_bytes(&self) -> u64 {
        self.own_mapped_bytes() + self.draft.mapped_bytes
    }

    fn own_mapped_bytes(&self) -> u64 {
        match self.residency.is_mapped() {
            true => self.weights.mapped_bytes(),
            false => 0,
        }
    }

    /// What must be there for the first token of one request.
    #[must_use]
    pub fn least(&self) -> Parts {
        Parts {
            kv_bytes: self.kv.sequence_peak_bytes(1),
            ..self.fixed()
        }
    }

    /// What there must be of a budget for that, of which requests have their share.
    fn least_budget(&self) -> Parts {
        let least = self.least();
        let share = self.request_bytes - self.image_bytes;
        let request_bytes = match self.requests_share {
            true => self.image_bytes + request_bytes_beside(least.bytes() - share),
            false => self.request_bytes,
        };
        Parts {
            request_bytes,
            ..least
        }
    }

    /// What the first token takes when all weights are read for each pass that can be: no budget is less while the model
    /// runs as it was planned.
    #[must_use]
    pub fn least_while_running(&self) -> Parts {
        let least = self.least();
        Parts {
            read_weight_bytes: least.read_weight_bytes - self.residency.to_spare(&self.weights),
            ..least
        }
    }

    /// Divides the budget that was planned for.
    ///
    /// # Errors
    /// [`BudgetTooSmall`] when it is less than [`Plan::least`].
    pub fn budget(&self) -> Result<Budget, BudgetTooSmall> {
        let (fixed, needed) = (self.fixed(), self.least());
        let kv_bytes = match self.budget_bytes {
            Some(budget) if budget < needed.bytes() => {
                return Err(BudgetTooSmall {
                    budget,
                    needed: self.least_budget(),
                });
            }
            Some(budget) => budget - fixed.bytes(),
            None => u64::MAX,
        };
        let parts = Parts { kv_bytes, ..fixed };
        Ok(Budget {
            budget_bytes: self.budget_bytes,
            parts,
            most_kv_bytes: self.device.most_kv_bytes,
            mapped_weight_bytes: self.mapped_weight_bytes(),
        }
        .with_kv(kv_bytes))
    }
}

/// Whether a plan stays within its budget until its contexts are full.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// It does.
    Fits {
        /// Bytes left over.
        spare: u64,
    },
    /// It does not.
    Exceeds {
        /// Bytes too many.
        excess: u64,
        /// Changes each of which makes it fit. None when all else alone is too much.
        changes: Vec<Change>,
    },
}

/// A change of what is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// A context of at most so many tokens.
    Context(usize),
    /// K and V of these element types.
    KvElements(KvElements),
    /// At most so many tokens in one pass.
    Batch(usize),
}

/// What rows may be stored in, the most exact first. Of 4 bits, keys cost real models several times what values do, and
/// q4_0, which is as large, more than iq4_nl.
const BY_EXACTNESS: [KvElements; 6] = [
    KvElements::both(ElementType::F32),
    KvElements::both(ElementType::F16),
    KvElements::both(ElementType::Bf16),
    KvElements::both(ElementType::Q8_0),
    KvElements {
        key: ElementType::Q8_0,
        value: ElementType::Iq4Nl,
    },
    KvElements::both(ElementType::Iq4Nl),
];

/// Tokens in one pass below which prompts become slow; not proposed below it.
const SMALLEST_BATCH: usize = 16;

impl Plan {
    /// Whether this plan of `spec` stays within its budget until its contexts are full, and if not
    /// what to change in `demand`. `None` without a budget.
    ///
    /// # Errors
    /// [`PlanError`] as [`Plan::new`].
    pub fn verdict(&self, spec: &ModelSpec, demand: &Demand) -> Result<Option<Verdict>, PlanError> {
        let Some(budget) = self.budget_bytes else {
            return Ok(None);
        };
        let full = self.full();
        let needed = full.peak_bytes();
        if let Some(spare) = budget.checked_sub(needed) {
            return Ok(Some(Verdict::Fits { spare }));
        }
        let others = full.parts.besides_kv() - self.arena.bytes() as u64;
        let search = Search {
            program: Program::new(spec),
            demand,
            policy: self.kv.policy,
            geometry: self.kv.geometry.clone(),
            room: budget.saturating_sub(others),
        };
        Ok(Some(Verdict::Exceeds {
            excess: needed - budget,
            changes: search.changes()?,
        }))
    }
}

/// Looks for demands whose activations and KV cache fit in `room` bytes.
struct Search<'a> {
    program: Program,
    demand: &'a Demand,
    policy: KvPolicy,
    geometry: Geometry,
    room: u64,
}

impl Search<'_> {
    fn changes(&self) -> Result<Vec<Change>, PlanError> {
        let changes = [self.context()?, self.element()?, self.batch()?];
        Ok(changes.into_iter().flatten().collect())
    }

    /// Whether `demand` fits until its contexts are full.
    fn fits(&self, cache: &KvCache, demand: &Demand) -> Result<bool, PlanError> {
        let arena = ArenaPlan::new(&self.program, demand.limits()?)?;
        let kv = KvPlan::new(cache, demand)?;
        let peak = kv.peak_bytes(demand.context_tokens);
        Ok(arena.bytes() as u64 + peak <= self.room)
    }

    fn cache(&self, geometry: &Geometry) -> Result<KvCache, PlanError> {
        Ok(KvCache::new(geometry.clone(), self.policy)?)
    }

    /// The longest context that fits, all else being equal.
    fn context(&self) -> Result<Option<Change>, PlanError> {
        let cache = self.cache(&self.geometry)?;
        let (mut fits, mut too_long) = (0, self.demand.context_tokens);
        while too_long - fits > 1 {
            let context_tokens = fits + (too_long - fits) / 2;
            let shorter = Demand {
                context_tokens,
                ..*self.demand
            };
            if self.fits(&cache, &shorter)? {
                fits = context_tokens;
            } else {
                too_long = context_tokens;
            }
        }
        Ok((fits > 0).then_some(Change::Context(fits)))
    }

    /// The cache with rows of `elements`, if it can be stored so and that makes it smaller. Where values are part of keys
    /// those of two types are as large as those of the first alone, which is looked at before.
    fn smaller(&self, elements: KvElements) -> Option<Geometry> {
        let geometry = self.geometry.with_elements(elements);
        geometry.validate().ok()?;
        (geometry.bytes_per_token() < self.geometry.bytes_per_token()).then_some(geometry)
    }

    fn element(&self) -> Result<Option<Change>, PlanError> {
        for elements in BY_EXACTNESS {
            let Some(geometry) = self.smaller(elements) else {
                continue;
            };
            if self.fits(&self.cache(&geometry)?, self.demand)? {
                return Ok(Some(Change::KvElements(elements)));
            }
        }
        Ok(None)
    }

    fn batch(&self) -> Result<Option<Change>, PlanError> {
        let cache = self.cache(&self.geometry)?;
        let mut batch_tokens = self.demand.limits()?.tokens;
        while batch_tokens > SMALLEST_BATCH {
            batch_tokens = (batch_tokens / 2).max(SMALLEST_BATCH);
            let smaller = Demand {
                batch_tokens,
                ..*self.demand
            };
            if self.fits(&cache, &smaller)? {
                return Ok(Some(Change::Batch(batch_tokens)));
            }
        }
        Ok(None)
    }
}
