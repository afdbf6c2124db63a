//! A draft model: which models can guess for which, what that takes, and how it is set up.

use std::num::NonZeroUsize;
use std::sync::Arc;

use lacuna_files::ModelFiles;
use lacuna_kernels::Cpu;
use lacuna_kv::{Geometry, GrowthSchedule, KvCache, KvPolicy, Layout};
use lacuna_models::plan::{
    DraftMemory, Plan, VocabularySize, WeightMode, WeightPlan, WeightSource,
};
use lacuna_models::{Description, Model, ModelSpec, Scratch};
use lacuna_text::tokenizer::{TokenKind, Tokenizer};

use super::runner::Runner;
use super::{Drafter, MOST_DRAFTS};
use crate::engine::EngineConfig;
use crate::error::EngineError;

/// A model that guesses tokens for another, and how many for one pass at most.
#[derive(Debug, Clone)]
pub struct DraftModel {
    model: Arc<Model>,
    most: NonZeroUsize,
}

/// Why a model cannot guess for another.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DraftError {
    /// The vocabularies have different tokens under one id. One may have more at its end, and ids that one of them has no
    /// use for (padding) may be anything in the other.
    #[error(
        "the draft model has another vocabulary: its token {token} is {draft}, and the model's is {model}; use a draft model of the same family"
    )]
    Vocabulary {
        /// The first id under which they differ.
        token: u32,
        /// What the draft model has there.
        draft: String,
        /// What the model has there.
        model: String,
    },
    /// The draft model writes nothing.
    #[error("the draft model makes embeddings and writes nothing; use one that writes")]
    Pooled,
    /// Layers of the draft model keep states. It guesses in one pass after another, and a state goes back within one.
    #[error(
        "the draft model keeps states, which cannot be taken back over several passes to the last right guess; use a draft model that keeps rows alone, or guess from the text itself"
    )]
    States,
}

/// Tokens that a draft model reads in one pass at most: enough for products to be those of prompts, and a small arena.
const BATCH_TOKENS: usize = 128;

/// Sequences that a draft model guesses for in one pass at most: more have no rows to check them anyway.
pub(super) const MOST_SEQUENCES: usize = 16;

impl DraftModel {
    /// Tokens guessed for one pass, if not said otherwise.
    pub const MOST_TOKENS: NonZeroUsize = MOST_DRAFTS;

    /// With as many guesses at once as suit the kernels.
    ///
    /// # Errors
    /// [`DraftError`] for a model that cannot guess.
    pub fn new(model: Arc<Model>) -> Result<Self, DraftError> {
        Self::check_spec(model.spec())?;
        Ok(Self {
            model,
            most: MOST_DRAFTS,
        })
    }

    /// The same with `most` guesses for one pass at most.
    #[must_use]
    pub fn with_most(self, most: NonZeroUsize) -> Self {
        Self { most, ..self }
    }

    /// Refuses a model of `spec`, before it is loaded, that could not guess.
    ///
    /// # Errors
    /// [`DraftError::Pooled`], [`DraftError::States`].
    pub fn check_spec(spec: &ModelSpec) -> Result<(), DraftError> {
        if spec.pooled().is_some() {
            return Err(DraftError::Pooled);
        }
        match keeps_states(spec) {
            true => Err(DraftError::States),
            false => Ok(()),
        }
    }

    /// Refuses to guess for `model`.
    ///
    /// # Errors
    /// [`DraftError::Vocabulary`].
    pub fn check_for(&self, model: &Model) -> Result<(), DraftError> {
        self.check(model.tokenizer())
    }

    /// The same for two models of which neither is loaded, each by its files and what they describe: a draft model, and
    /// the one that it is to guess for.
    ///
    /// # Errors
    /// As [`DraftModel::check_for`].
    pub fn check_described(
        (draft, of_draft): (&ModelFiles, &ModelSpec),
        (model, of_model): (&ModelFiles, &ModelSpec),
    ) -> Result<(), DraftError> {
        let draft = lacuna_models::tokenizer(draft, of_draft);
        match (draft, lacuna_models::tokenizer(model, of_model)) {
            (Ok(draft), Ok(model)) => check_vocabulary(&draft, &model),
            // Loading the models says what is wrong with them.
            _ => Ok(()),
        }
    }

    /// The same for a model that is not loaded.
    ///
    /// # Errors
    /// As [`DraftModel::check_for`].
    pub(crate) fn check_files(
        &self,
        files: &ModelFiles,
        spec: &ModelSpec,
    ) -> Result<(), DraftError> {
        match lacuna_models::tokenizer(files, spec) {
            Ok(tokenizer) => self.check(&tokenizer),
            // Loading the model says what is wrong with it.
            Err(_) => Ok(()),
        }
    }

    fn check(&self, tokenizer: &Tokenizer) -> Result<(), DraftError> {
        check_vocabulary(self.model.tokenizer(), tokenizer)
    }

    /// The model.
    #[must_use]
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// Tokens guessed for one pass at most.
    #[must_use]
    pub fn most(&self) -> NonZeroUsize {
        self.most
    }

    /// What it takes beside KV pages in an engine as `config` says.
    ///
    /// # Errors
    /// [`EngineError`] for settings that it cannot be planned with.
    pub(crate) fn memory(&self, config: &EngineConfig) -> Result<DraftMemory, EngineError> {
        let (spec, weights) = (self.model.spec(), self.model.weight_plan().clone());
        let plan = plan(config, self.model.files(), spec, weights)?;
        Ok(DraftMemory::of(&plan))
    }

    /// It at work for `model`, as [`DraftModel::start`] sets it up.
    pub(crate) fn drafter(
        &self,
        config: &EngineConfig,
        cache: &KvCache,
        cpu: &Arc<Cpu>,
        model: &Model,
    ) -> Result<Drafter, EngineError> {
        let runner = self.start(config, cache, Arc::clone(cpu))?;
        let of_draft = self.model.active_weight_bytes() as f64;
        let ratio = of_draft / model.active_weight_bytes().max(1) as f64;
        let (most, vocabulary) = (self.most.get(), model.spec().vocabulary);
        Ok(Drafter::new(Box::new(runner), most, vocabulary, ratio))
    }

    /// Sets it up beside the engine whose pages `cache` has, to compute on `cpu`.
    ///
    /// # Errors
    /// [`EngineError`] when the system refuses memory.
    fn start(
        &self,
        config: &EngineConfig,
        cache: &KvCache,
        cpu: Arc<Cpu>,
    ) -> Result<Runner, EngineError> {
        let (spec, weights) = (self.model.spec(), self.model.weight_plan().clone());
        let plan = plan(config, self.model.files(), spec, weights)?;
        // Rows of any geometry lie in pages of any size: the same pool has them, under the same limit.
        let geometry = geometry(config, spec)?;
        let cache = KvCache::over(cache.pool().clone(), geometry, policy(cache.policy()))?;
        let mut scratch = Scratch::new(self.model.program(), plan.arena.clone())?;
        let context_tokens = plan.kv.context_tokens;
        Ok(Runner {
            is_head: false,
            cache: self
                .model
                .smooth_keys(&cpu, cache, context_tokens, &mut scratch)?,
            scratch,
            context_tokens,
            model: Arc::clone(&self.model),
            cpu,
        })
    }
}

impl EngineConfig {
    /// What a draft model of `description` would take beside KV pages, and its plan, for a model that runs with this. Nothing
    /// is loaded.
    ///
    /// # Errors
    /// [`EngineError`] for a model that cannot guess, or cannot be planned for.
    pub fn plan_of_draft(
        &self,
        files: &ModelFiles,
        description: &Description,
    ) -> Result<Plan, EngineError> {
        DraftModel::check_spec(&description.spec)?;
        let weights = WeightPlan::of_files(files, description);
        plan(self, files, &description.spec, weights)
    }
}

fn keeps_states(spec: &ModelSpec) -> bool {
    let elements = lacuna_kv::KvElements::default();
    spec.kv_geometry(elements)
        .is_ok_and(|geometry| geometry.has_states())
}

/// A draft's plan: all of its weights in memory or mapped, whichever way the model itself has its own, and as many tokens in a
/// pass as it reads at once.
fn plan(
    config: &EngineConfig,
    files: &ModelFiles,
    spec: &ModelSpec,
    weights: WeightPlan,
) -> Result<Plan, EngineError> {
    let weight_mode = match (config.weights, config.budget) {
        (WeightMode::Auto, None) => WeightMode::Fixed(WeightSource::Mmap),
        (WeightMode::Auto, Some(_)) => WeightMode::Fixed(WeightSource::Direct),
        (fixed, _) => fixed,
    };
    let context = spec.context_tokens;
    let config = EngineConfig {
        // It has seen no longer ones, and reads the end of what is longer.
        context_tokens: Some(config.context_tokens.map_or(context, |it| it.min(context))),
        batch_tokens: BATCH_TOKENS,
        sequences: config.sequences.min(MOST_SEQUENCES),
        budget: None,
        request_memory: Some(lacuna_pages::ByteLength::new(0)),
        weights: weight_mode,
        speculation: super::Speculation::Off,
        draft: None,
        head: None,
        neurons: None,
        ..config.clone()
    };
    let cache = KvCache::new(geometry(&config, spec)?, policy(config.kv_policy))?;
    let vocabulary = VocabularySize::of(files, spec);
    let demand = config.demand(context)?;
    Ok(Plan::new(spec, weights, vocabulary, &cache, &demand)?)
}

/// A draft's rows: windows keep all, since each step goes back from the guesses that were wrong.
pub(super) fn geometry(config: &EngineConfig, spec: &ModelSpec) -> Result<Geometry, EngineError> {
    Ok(spec.kv_geometry(config.kv_elements)?.keeping_all())
}

/// How a draft's rows are held in the pool of a cache of `policy`: they come and go with what others leave of it, so nothing
/// is taken ahead.
pub(super) fn policy(policy: KvPolicy) -> KvPolicy {
    match policy {
        KvPolicy::Sparse(_) => KvPolicy::Sparse(Layout::TokenMajor),
        _ => KvPolicy::Grow(GrowthSchedule::Mlx),
    }
}

/// Whether both have the same token under every id that both have a use for.
fn check_vocabulary(draft: &Tokenizer, model: &Tokenizer) -> Result<(), DraftError> {
    let described = |tokenizer: &Tokenizer, token| match tokenizer.kind(token) {
        None | Some(TokenKind::Unused) => None,
        Some(kind) => Some((tokenizer.token_text(token), kind.is_special())),
    };
    let both = draft.vocab_size().min(model.vocab_size());
    for token in 0..both {
        let (Some(of_draft), Some(of_model)) = (described(draft, token), described(model, token))
        else {
            continue;
        };
        if of_draft != of_model {
            let name = |(text, special): (Option<String>, bool)| {
                let kind = if special { ", a special token" } else { "" };
                format!("{:?}{kind}", text.unwrap_or_default())
            };
            return Err(DraftError::Vocabulary {
                token,
                draft: name(of_draft),
                model: name(of_model),
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use lacuna_kernels::{CpuConfig, ElementType};
    use lacuna_kv::{KvElements, Layer};

    use super::*;
    use crate::scheduler::tests::demo_model;

    #[test]
    fn a_draft_model_stores_keys_of_few_bits_smoothed_as_any_model_does() {
        let cpu = Arc::new(Cpu::new(CpuConfig::default()).expect("a processor"));
        let draft = DraftModel::new(demo_model()).expect("one that can guess");
        for (element, is_smoothed) in [(ElementType::Q4_0, true), (ElementType::F16, false)] {
            let config = EngineConfig {
                kv_elements: KvElements::both(element),
                context_tokens: Some(512),
                ..EngineConfig::default()
            };
            let geometry = demo_model().spec().kv_geometry(config.kv_elements);
            let cache = KvCache::new(geometry.expect("whole blocks"), config.kv_policy);
            let cache = cache.expect("the system has pages");
            let runner = draft.start(&config, &cache, Arc::clone(&cpu));
            let own = runner.expect("it starts").cache;
            let smoothing = own.geometry().key_smoothing(Layer(0));
            assert_eq!(smoothing.is_some(), is_smoothed, "{element}");
        }
    }
}
