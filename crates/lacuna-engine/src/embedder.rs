//! Embeddings of texts: a model that pools, with the threads and the arena that it runs with.

use std::num::NonZeroUsize;
use std::sync::Arc;

use lacuna_kernels::{Cpu, CpuConfig};
use lacuna_models::plan::{
    ArenaPlan, BudgetTooSmall, Parts, PlanError, VocabularySize, WeightPlan, request_bytes,
};
use lacuna_models::{BatchLimits, FiniteCheck, ForwardError, Model, ModelSpec, Scratch, Texts};
use lacuna_pages::ByteLength;
use lacuna_text::tokenizer::{EncodeLimits, Special};

use crate::budget::Had;
use crate::engine::{Accounting, EngineConfig};
use crate::error::EngineError;

/// How texts are embedded.
#[derive(Debug, Clone)]
pub struct EmbedderConfig {
    /// Threads that compute, the caller's included. `None`: one per core.
    pub threads: Option<NonZeroUsize>,
    /// Tokens computed in one pass at most, or as many as one text may have if that is more. More is
    /// faster with many short texts, and takes more activation memory. Default 512.
    pub batch_tokens: usize,
    /// Whether values that are not finite are looked for. Default off.
    pub finite_check: FiniteCheck,
    /// Bytes that the process may commit. `None`: what the system can spare.
    pub budget: Option<ByteLength>,
    /// Of those, bytes for requests: nothing here takes them. Default none.
    pub requests: ByteLength,
    /// What the budget is held against.
    pub accounting: Accounting,
}

impl Default for EmbedderConfig {
    fn default() -> Self {
        Self {
            threads: None,
            batch_tokens: 512,
            finite_check: FiniteCheck::Off,
            budget: None,
            requests: ByteLength::new(0),
            accounting: Accounting::default(),
        }
    }
}

impl EmbedderConfig {
    /// What an engine's settings mean for a model that makes embeddings, in a process that takes requests.
    #[must_use]
    pub fn of(engine: &EngineConfig) -> Self {
        let budget = engine.budget.map(ByteLength::get);
        let requests = engine.request_memory;
        Self {
            threads: engine.threads,
            batch_tokens: engine.batch_tokens,
            finite_check: engine.finite_check,
            budget: engine.budget,
            requests: requests.unwrap_or_else(|| ByteLength::new(request_bytes(budget))),
            accounting: engine.accounting,
        }
    }

    /// Refuses a budget, or a system, that does not hold what the model needs to run.
    fn check(&self, model: &Model, arena: &ArenaPlan, threads: usize) -> Result<(), EngineError> {
        let spec = model.spec();
        let needed = Parts::of_encoder(
            spec,
            &WeightPlan::of(model.files().tensors(), spec),
            VocabularySize::of(model.files(), spec),
            (arena, threads),
            self.requests.get(),
        );
        let had = Had::now(self.accounting, &needed);
        match had.budget(self.budget) {
            Some(budget) if budget < needed.bytes() => {
                Err(had.refusal(BudgetTooSmall { budget, needed }, self.budget))
            }
            _ => Ok(()),
        }
    }

    /// Where activations lie when a model of `spec` runs with this.
    fn plan(&self, model: &Model) -> Result<ArenaPlan, PlanError> {
        let spec = model.spec();
        let tokens = self.batch_tokens.max(spec.context_tokens);
        let limits = BatchLimits {
            tokens,
            logit_rows: tokens,
            context_tokens: spec.context_tokens,
        };
        ArenaPlan::new(model.program(), limits)
    }
}

/// What becomes of a text with more tokens than the model takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Excess {
    /// It is refused.
    #[default]
    Refuse,
    /// Its last tokens are left out, but for those that the vocabulary puts behind a text.
    Cut,
}

/// A model that makes embeddings, ready to run. Nothing is kept of a text that was embedded.
pub struct Embedder {
    model: Arc<Model>,
    cpu: Cpu,
    scratch: Scratch,
    texts: Texts,
    /// How many tokens the vocabulary puts behind a text.
    tokens_behind: usize,
}

impl std::fmt::Debug for Embedder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Embedder")
            .field("limits", &self.scratch.limits())
            .finish_non_exhaustive()
    }
}

impl Embedder {
    /// Sets up threads and activation memory for `model`.
    ///
    /// # Errors
    /// [`ForwardError::NoEmbeddings`] for a model that writes, and [`EngineError`] when a setting is out
    /// of range or the system refuses memory or threads.
    pub fn new(model: Arc<Model>, config: &EmbedderConfig) -> Result<Self, EngineError> {
        Self::check(model.spec())?;
        let engine = EngineConfig {
            threads: config.threads,
            ..EngineConfig::default()
        };
        let threads = engine.thread_count()?;
        let plan = config.plan(&model)?;
        config.check(&model, &plan, threads.get())?;
        let cpu = Cpu::new(CpuConfig {
            threads,
            level: None,
        })?;
        let scratch = Scratch::new(model.program(), plan)?;
        Ok(Self {
            tokens_behind: model.tokenizer().describe().added_after.len(),
            scratch: scratch.checking(config.finite_check),
            texts: Texts::new(),
            cpu,
            model,
        })
    }

    /// Refuses a model that writes, from its description alone.
    ///
    /// # Errors
    /// [`ForwardError::NoEmbeddings`].
    pub fn check(spec: &ModelSpec) -> Result<(), EngineError> {
        match spec.pooled() {
            Some(_) => Ok(()),
            None => Err(ForwardError::NoEmbeddings.into()),
        }
    }

    /// The model.
    #[must_use]
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// Tokens that a text may have, those that the vocabulary puts around it included.
    #[must_use]
    pub fn max_tokens(&self) -> usize {
        self.scratch.limits().context_tokens
    }

    /// Elements of an embedding.
    #[must_use]
    pub fn dimensions(&self) -> usize {
        self.model.spec().hidden
    }

    /// The tokens of `text`, with those that the vocabulary puts around it.
    ///
    /// # Errors
    /// [`EngineError::Tokenizer`], also for a text that is longer than the model takes, unless it is cut.
    pub fn tokens(
        &self,
        text: &str,
        excess: Excess,
        limits: &EncodeLimits,
    ) -> Result<Vec<u32>, EngineError> {
        let most = self.max_tokens();
        let limits = EncodeLimits {
            tokens: match excess {
                Excess::Refuse => most,
                Excess::Cut => limits.tokens,
            },
            ..*limits
        };
        let tokenizer = self.model.tokenizer();
        let mut tokens = tokenizer.encode_within(text, Special::PROMPT, &limits)?;
        if tokens.len() > most {
            let behind = self.tokens_behind.min(most);
            let end = tokens.split_off(tokens.len() - behind);
            tokens.truncate(most - behind);
            tokens.extend(end);
        }
        Ok(tokens)
    }

    /// Embeds `texts`, as many at once as a pass holds, and calls `each` with every embedding in their
    /// order. An embedding does not depend on the texts beside its own.
    ///
    /// # Errors
    /// [`ForwardError`], with the number of the text where it is about one; those before it may have
    /// been embedded.
    pub fn embed<T: AsRef<[u32]>>(
        &mut self,
        texts: &[T],
        mut each: impl FnMut(&[f32]),
    ) -> Result<(), EngineError> {
        let limits = self.scratch.limits();
        let mut start = 0;
        while start < texts.len() {
            self.texts.clear();
            for text in &texts[start..] {
                let text = text.as_ref();
                let fits = self.texts.tokens() + text.len() <= limits.tokens;
                if !self.texts.is_empty() && (!fits || self.texts.len() == limits.logit_rows) {
                    break;
                }
                self.texts.push(text);
            }
            let width = self.model.spec().hidden;
            let found = (self.model).embed(&self.cpu, &self.texts, &mut self.scratch);
            let found = found.map_err(|error| error.after_texts(start))?;
            found.chunks_exact(width).for_each(&mut each);
            start += self.texts.len();
        }
        Ok(())
    }
}

/// A number of elements that an embedding cannot be cut to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{asked} dimensions asked for, but the model's embeddings have {most}; use 1 to {most}")]
pub struct WrongDimensions {
    /// What was asked for.
    pub asked: usize,
    /// What there are.
    pub most: usize,
}

/// The first elements of an embedding, brought to a length of 1 again where there were more. Models are
/// trained for that (Matryoshka representation learning), or lose precision by it.
///
/// # Errors
/// [`WrongDimensions`] for none, or for more than there are.
pub fn shortened(embedding: &[f32], dimensions: usize) -> Result<Vec<f32>, WrongDimensions> {
    let most = embedding.len();
    if dimensions == 0 || dimensions > most {
        return Err(WrongDimensions {
            asked: dimensions,
            most,
        });
    }
    let mut first = embedding[..dimensions].to_vec();
    if dimensions < most {
        lacuna_models::normalize(&mut first);
    }
    Ok(first)
}
