//! How an engine is set up, and what is refused and planned from that.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Arc;

use lacuna_files::{ModelFiles, Progress};
use lacuna_kernels::{CpuConfig, MatmulPrecision, PrecisionMode};
use lacuna_kv::{KvCache, KvElements, KvPolicy};
use lacuna_models::plan::{
    Budget, Demand, DraftMemory, Logits, Plan, Residency, VocabularySize, WeightMode, WeightPlan,
    WeightSource,
};
use lacuna_models::{
    ColumnsError, ComputeDevice, Description, DeviceLayers, ExecutorError, FiniteCheck,
    ForwardError, LoadError, ModelSpec,
};
use lacuna_pages::ByteLength;

use super::placement::Placed;
use crate::budget::Had;
use crate::error::EngineError;
use crate::speculation::{DraftModel, Speculation, head};

/// How an engine is set up.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// Threads that compute, the caller's included. `None`: one per core.
    pub threads: Option<NonZeroUsize>,
    /// How products with F32, F16 and BF16 weights, and those of attention, are computed. Default: in f32, which they
    /// also are with a device or with neurons if the processor may choose.
    pub matmul_precision: PrecisionMode,
    /// How KV memory is held.
    pub kv_policy: KvPolicy,
    /// Storage of K and of V.
    pub kv_elements: KvElements,
    /// Tokens a session may hold. `None`: what the model was made for.
    pub context_tokens: Option<usize>,
    /// Tokens computed in one pass at most. More is faster on long prompts and takes more
    /// activation memory.
    pub batch_tokens: usize,
    /// Sequences that run at once, and so get a token in one pass, at most. Each takes activation
    /// memory for a row of logits.
    pub sequences: usize,
    /// Rows of logits a pass has room for. All rows are needed only to score texts fast.
    pub logits: Logits,
    /// Whether values that are not finite are looked for. Default off.
    pub finite_check: FiniteCheck,
    /// Bytes that the process may commit: everything that [`lacuna_models::plan::Budget`] lists.
    /// `None`: what the system can spare.
    pub budget: Option<ByteLength>,
    /// Bytes that requests may hold outside the KV cache, from their first byte to their end: bodies,
    /// parsed and tokenized text, and what waits for its turn. `None`: an eighth of the budget, at
    /// least 2 and at most 64 MiB, and what encoding an image takes where the model sees. Below some 8 MiB, longer
    /// conversations are refused.
    pub request_memory: Option<ByteLength>,
    /// What the budget is held against. Default: the plan.
    pub accounting: Accounting,
    /// How weights are had, of a model that is loaded as [`EngineConfig::check`] says. Default: read into memory
    /// when there is a budget that can hold what a pass reads at once, and part of it then, else where the file is mapped.
    pub weights: WeightMode,
    /// What tokens are guessed from, so that one pass computes several. Default off. Not where values that are not finite
    /// are looked for, which wrong guesses may give.
    pub speculation: Speculation,
    /// What guesses tokens where [`EngineConfig::speculation`] has no guess that is worth it: a smaller model of the same
    /// vocabulary, under the same budget. Default none.
    pub draft: Option<DraftModel>,
    /// The files of a head (EAGLE-3, an assistant of Gemma 4) that guesses tokens for the model, in the place of one that the model's own files may carry:
    /// [`EngineConfig::with_head`] puts it beside them, and [`EngineConfig::speculation`] has it guess. Default none.
    pub head: Option<Arc<ModelFiles>>,
    /// Folder of files from which neurons of feed-forward blocks are read one by one, where activations are not zero:
    /// [`EngineConfig::with_neurons`] makes them. Weights are read into memory then, with a budget and without.
    pub neurons: Option<PathBuf>,
    /// What computes in place of the processor, or of all but the first layers, over KV pages in its own memory. Weights are
    /// copied there. The KV policy is one that the device can compute over, and there is no draft model, no look for values
    /// that are not finite, and no reading of weights beside it. Default none.
    pub device: Option<Arc<dyn ComputeDevice>>,
    /// How many of the last layers it computes, with KV rows and states beside each layer; the processor computes the first,
    /// from where weights are mapped. Default: as many as there is memory for.
    pub device_layers: DeviceLayers,
}

/// What a budget is held against.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Accounting {
    /// The plan. For a process that does other things too, whose memory is not this engine's affair.
    #[default]
    Planned,
    /// The process: its anonymous memory is read from the kernel, and what it has beyond the plan is
    /// taken from KV pages. For a process that runs this engine and nothing else.
    Measured,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            threads: None,
            matmul_precision: PrecisionMode::default(),
            kv_policy: KvPolicy::default(),
            kv_elements: KvElements::default(),
            context_tokens: None,
            batch_tokens: 512,
            sequences: 1,
            logits: Logits::Last,
            finite_check: FiniteCheck::Off,
            budget: None,
            request_memory: None,
            accounting: Accounting::default(),
            weights: WeightMode::default(),
            speculation: Speculation::default(),
            draft: None,
            head: None,
            neurons: None,
            device: None,
            device_layers: DeviceLayers::default(),
        }
    }
}

impl EngineConfig {
    /// More than any machine has, so that more is refused as this is: sums with the other parts of a budget stay numbers.
    const MOST_REQUEST_BYTES: u64 = 1 << 60;

    /// Tokens scored in one pass: rows of logits are large beside everything else.
    const SCORED_TOKENS: usize = 32;

    /// What computes: as many threads as were asked for, but no more than the machine has.
    ///
    /// # Errors
    /// [`EngineError::TooManyThreads`].
    pub fn cpu(&self) -> Result<CpuConfig, EngineError> {
        let available = std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
        let threads = match self.threads {
            None => available,
            Some(asked) if asked <= available => asked,
            Some(asked) => return Err(EngineError::TooManyThreads { asked, available }),
        };
        Ok(CpuConfig {
            threads,
            precision: match self.device.is_some() || self.neurons.is_some() {
                true => self.matmul_precision.or_f32(),
                false => self.matmul_precision,
            },
            ..CpuConfig::default()
        })
    }

    /// The same, set up to score texts: every pass has room for all its rows of logits.
    #[must_use]
    pub fn scoring(self) -> Self {
        Self {
            batch_tokens: Self::SCORED_TOKENS,
            logits: Logits::All,
            ..self
        }
    }

    /// Tokens guessed for one pass at most, from history or by a draft model.
    pub(crate) fn most_drafts(&self) -> usize {
        self.most_from_history().max(self.most_drafts_of_model())
    }

    fn most_drafts_of_model(&self) -> usize {
        self.draft_model().map_or(0, |draft| draft.most().get())
    }

    /// Tokens guessed from a sequence's own for one pass at most.
    pub(crate) fn most_from_history(&self) -> usize {
        match self.finite_check {
            FiniteCheck::Off => self.speculation.most(),
            _ => 0,
        }
    }

    /// The draft model, where anything may be guessed.
    pub(crate) fn draft_model(&self) -> Option<&DraftModel> {
        let guesses = matches!(self.finite_check, FiniteCheck::Off);
        self.draft.as_ref().filter(|_| guesses)
    }

    /// Whether the head that a model's files carry guesses, where there is one.
    pub(super) fn asks_head(&self) -> bool {
        let guesses = matches!(self.finite_check, FiniteCheck::Off);
        matches!(
            self.speculation,
            Speculation::Mtp { .. } | Speculation::Auto
        ) && guesses
    }

    /// The model that `files` are to be loaded as ([`lacuna_models::Model::load_described`]): `description`, with the head
    /// that guesses tokens where [`EngineConfig::speculation`] asks for it. Where a budget does not hold all weights with the
    /// head's, a guess would read more than a token: with [`Speculation::Auto`] the model goes without.
    ///
    /// # Errors
    /// [`EngineError::NoHead`] for files without one, [`EngineError::HeadAndDraft`], [`EngineError::HeadOverBudget`], and as
    /// [`EngineConfig::check`].
    pub fn guessing(
        &self,
        files: &ModelFiles,
        description: Description,
    ) -> Result<Description, EngineError> {
        let may_do_without = self.speculation == Speculation::Auto;
        let without = [
            (!self.asks_head(), None),
            (!description.has_head(), Some(EngineError::NoHead)),
            (self.draft.is_some(), Some(EngineError::HeadAndDraft)),
            (self.device.is_some(), self.check_device().err()),
        ];
        if let Some((_, refusal)) = without.into_iter().find(|(without, _)| *without) {
            return match refusal.filter(|_| !may_do_without) {
                None => Ok(description),
                Some(refusal) => Err(refusal),
            };
        }
        let with_head = description.clone().with_head();
        let weights = WeightPlan::of_files(files, &with_head);
        let placed = self.placed(&with_head.spec);
        match self.prepare(files, &with_head.spec, weights, 0, placed) {
            Ok((_, plan, _)) if plan.residency.is_whole(&plan.weights) => Ok(with_head),
            Ok(_) | Err(EngineError::BudgetTooSmall(_) | EngineError::MemoryShort { .. })
                if may_do_without =>
            {
                Ok(description)
            }
            Ok(_) => Err(EngineError::HeadOverBudget),
            Err(error) => Err(error),
        }
    }

    /// What is planned for when a model of `spec` runs with this.
    ///
    /// # Errors
    /// [`EngineError`] for settings that nothing can be planned with.
    pub fn demand_of(&self, spec: &ModelSpec) -> Result<Demand, EngineError> {
        let decided = self.for_model(spec);
        let mut demand = decided.demand(spec.context_tokens)?;
        if decided.speculation == Speculation::NGRAM {
            let by_model = decided.most_drafts_of_model();
            demand = demand.with_guesses_in_spare_memory(spec, by_model)?;
        }
        Ok(match spec.head {
            Some(_) => Demand {
                draft: head::memory(spec, &decided)?,
                ..demand
            },
            None => demand,
        })
    }

    /// The same, with what is guessed from decided.
    pub(crate) fn for_model(&self, spec: &ModelSpec) -> Self {
        Self {
            speculation: self.speculation.of_model(spec.head.is_some()),
            ..self.clone()
        }
    }

    /// What is planned for when a model made for `context_tokens` tokens runs with this.
    pub(crate) fn demand(&self, context_tokens: usize) -> Result<Demand, EngineError> {
        Ok(Demand {
            context_tokens: self.context_tokens.unwrap_or(context_tokens),
            batch_tokens: self.batch_tokens,
            logits: self.logits,
            sequences: self.sequences,
            draft_tokens: self.most_drafts(),
            draft: match self.draft_model() {
                Some(draft) => draft.memory(self)?,
                None => DraftMemory::default(),
            },
            cpu: self.cpu()?,
            weights: match (self.weights, self.budget) {
                // They are copied to it from where they are mapped.
                _ if self.device.is_some() => WeightMode::Fixed(WeightSource::Mmap),
                (WeightMode::Auto, _) if self.neurons.is_some() => {
                    WeightMode::Fixed(WeightSource::Direct)
                }
                (weights, Some(_)) => weights,
                (weights, None) => weights.without_budget(),
            },
            budget_bytes: self.budget.map(ByteLength::get),
            request_bytes: self
                .request_memory
                .map(|bytes| bytes.get().min(Self::MOST_REQUEST_BYTES)),
            image_bytes: 0,
        })
    }

    /// A model's files with those of the head that is to guess for it, if there is to be one. Before they are described.
    ///
    /// # Errors
    /// [`LoadError`] of a head whose files are damaged.
    pub fn with_head(&self, files: ModelFiles) -> Result<ModelFiles, LoadError> {
        match &self.head {
            None => Ok(files),
            Some(head) => lacuna_models::with_head(files, head),
        }
    }

    /// A model's files with the file of its neurons, if there is to be one: it is made when it is not there. Before
    /// [`EngineConfig::check`].
    ///
    /// # Errors
    /// [`ColumnsError`]: of a model that has no such neurons, where weights are mapped, or when the file cannot be made.
    pub fn with_neurons(
        &self,
        files: ModelFiles,
        progress: &mut dyn Progress,
    ) -> Result<ModelFiles, ColumnsError> {
        match &self.neurons {
            None => Ok(files),
            Some(_) if self.weights == WeightMode::Fixed(WeightSource::Mmap) => {
                Err(ColumnsError::Mapped)
            }
            Some(folder) => lacuna_models::with_columns(files, folder, progress),
        }
    }

    /// Refuses what could never run, from the model's description and before anything is taken; and says where
    /// weights are to be when it is loaded ([`lacuna_models::Model::load_as`]).
    ///
    /// # Errors
    /// [`EngineError`] as [`crate::Engine::new`] for what does not fit the budget or the system.
    pub fn check(
        &self,
        files: &ModelFiles,
        description: &Description,
    ) -> Result<Residency, EngineError> {
        if let Some(draft) = &self.draft {
            draft.check_files(files, &description.spec)?;
        }
        let weights = WeightPlan::of_files(files, description);
        let (spec, placed) = (&description.spec, self.placed(&description.spec));
        let (_, plan, _) = self.prepare(files, spec, weights, 0, placed)?;
        Ok(plan.residency)
    }

    /// The plan of a model with the budget that was asked for, whatever the system has.
    pub(crate) fn plan_of(
        &self,
        files: &ModelFiles,
        spec: &ModelSpec,
        weights: WeightPlan,
    ) -> Result<Plan, EngineError> {
        let cache = self.cache(spec, self.placed(spec))?;
        let demand = self.demand_of(spec)?;
        let vocabulary = VocabularySize::of(files, spec);
        Ok(Plan::new(spec, weights, vocabulary, &cache, &demand)?)
    }

    /// An empty KV cache of a model that writes.
    pub(super) fn cache(&self, spec: &ModelSpec, placed: Placed) -> Result<KvCache, EngineError> {
        if spec.pooled().is_some() {
            return Err(ForwardError::NoLogits.into());
        }
        let geometry = spec.kv_geometry(self.kv_elements)?;
        Ok(match &self.device {
            None => KvCache::new(geometry, self.kv_policy)?,
            Some(device) => {
                let geometry = geometry.with_host_layers(placed.host_layers)?;
                device.kv_cache(geometry, self.kv_policy)?
            }
        })
    }

    /// Refuses settings that go with the processor alone, where another device computes.
    fn check_device(&self) -> Result<(), EngineError> {
        let Some(device) = &self.device else {
            return Ok(());
        };
        let mapped = matches!(
            self.weights,
            WeightMode::Auto | WeightMode::Fixed(WeightSource::Mmap)
        );
        let settings = [
            (!mapped, "weights that are read into memory"),
            (self.neurons.is_some(), "neurons that are read one by one"),
            (
                self.matmul_precision == MatmulPrecision::Bf16.into(),
                "products of rounded numbers",
            ),
            (self.draft.is_some(), "a draft model"),
            (
                matches!(self.speculation, Speculation::Mtp { .. }),
                "guesses by the model's own head",
            ),
            (
                self.finite_check != FiniteCheck::Off,
                "a look for values that are not finite",
            ),
        ];
        match settings.into_iter().find(|(asked, _)| *asked) {
            None => Ok(()),
            Some((_, what)) => Err(EngineError::Executor(ExecutorError::Setting {
                device: device.name().to_owned(),
                what,
            })),
        }
    }

    /// The KV cache, the plan and the divided budget of a model whose images take so much of the memory of requests.
    pub(super) fn prepare(
        &self,
        files: &ModelFiles,
        spec: &ModelSpec,
        weights: WeightPlan,
        image_bytes: u64,
        placed: Placed,
    ) -> Result<(KvCache, Plan, Budget), EngineError> {
        self.check_device()?;
        if self.neurons.is_some() && self.matmul_precision == MatmulPrecision::Bf16.into() {
            return Err(EngineError::RoundedNeurons);
        }
        if self.neurons.is_some() && files.columns().is_none() {
            return Err(EngineError::NoNeurons);
        }
        let cache = self.cache(spec, placed)?;
        let vocabulary = VocabularySize::of(files, spec);
        let mut demand = self.demand_of(spec)?;
        demand.image_bytes = image_bytes;
        let mut plan = Plan::new(spec, weights.clone(), vocabulary, &cache, &demand)?;
        let had = Had::now(self.accounting, &plan.least());
        demand.budget_bytes = had.budget(self.budget);
        if demand.budget_bytes != plan.budget_bytes {
            plan = Plan::new(spec, weights.clone(), vocabulary, &cache, &demand)?;
        }
        if demand.draft_tokens > 0 && plan.budget().is_err() {
            // Without room for rows of guesses there are none. A draft model that was asked for is not left out silently.
            demand.draft_tokens = 0;
            plan = Plan::new(spec, weights, vocabulary, &cache, &demand)?;
        }
        plan.device = placed.device;
        let budget = plan
            .budget()
            .map_err(|error| had.refusal(error, self.budget))?;
        Ok((cache, plan, budget))
    }
}
