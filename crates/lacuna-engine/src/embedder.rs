//! Vectors of texts: embeddings, and scores of pairs of texts, by a model that pools with the threads and the
//! arena that it runs with.

use std::num::NonZeroUsize;
use std::sync::Arc;

use lacuna_kernels::{Cpu, CpuConfig, PrecisionMode};
use lacuna_models::plan::{
    ArenaPlan, BudgetTooSmall, Parts, PlanError, VocabularySize, request_bytes,
    request_bytes_beside,
};
use lacuna_models::{BatchLimits, FiniteCheck, ForwardError, Model, ModelSpec, Scratch, Texts};
use lacuna_pages::ByteLength;

use crate::budget::Had;
use crate::engine::{Accounting, EngineConfig};
use crate::error::EngineError;
use crate::text_encoder::{Pair, TextEncoder};

/// How vectors of texts are made.
#[derive(Debug, Clone)]
pub struct EmbedderConfig {
    /// Threads that compute, the caller's included. `None`: one per core.
    pub threads: Option<NonZeroUsize>,
    /// How products with F32, F16 and BF16 weights, and those of attention, are computed. Default: in f32.
    pub matmul_precision: PrecisionMode,
    /// Tokens computed in one pass at most, and what activation memory is for. More is faster with many
    /// short texts. A text that has more is computed alone, in memory that is taken for it and given back.
    /// Default 512.
    pub batch_tokens: usize,
    /// Tokens that a text may have. `None`: what the model was made for.
    pub context_tokens: Option<usize>,
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
            matmul_precision: PrecisionMode::default(),
            batch_tokens: 512,
            context_tokens: None,
            finite_check: FiniteCheck::Off,
            budget: None,
            requests: ByteLength::new(0),
            accounting: Accounting::default(),
        }
    }
}

impl EmbedderConfig {
    /// What an engine's settings mean for a model that pools, in a process that takes requests.
    #[must_use]
    pub fn of(engine: &EngineConfig) -> Self {
        let budget = engine.budget.map(ByteLength::get);
        let requests = engine.request_memory;
        Self {
            threads: engine.threads,
            matmul_precision: engine.matmul_precision,
            batch_tokens: engine.batch_tokens,
            context_tokens: engine.context_tokens,
            finite_check: engine.finite_check,
            budget: engine.budget,
            requests: requests.unwrap_or_else(|| ByteLength::new(request_bytes(budget))),
            accounting: engine.accounting,
        }
    }

    /// Refuses a budget, or a system, that does not hold what the model needs to run in `arena`, beside
    /// `kept` bytes of activations.
    fn check(
        &self,
        model: &Model,
        (arena, kept): (&ArenaPlan, usize),
        cpu: &CpuConfig,
    ) -> Result<(), EngineError> {
        let spec = model.spec();
        let mut needed = Parts::of_encoder(
            spec,
            model.weight_plan(),
            VocabularySize::of(model.files(), spec),
            (arena, cpu),
            self.requests.get(),
        );
        needed.activation_bytes += kept as u64;
        let had = Had::now(self.accounting, &needed);
        match had.budget(self.budget) {
            Some(budget) if budget < needed.bytes() => {
                let share = self.budget.map(ByteLength::get);
                if self.requests.get() == request_bytes(share) {
                    let others = needed.bytes() - needed.request_bytes;
                    needed.request_bytes = request_bytes_beside(others);
                }
                Err(had.refusal(BudgetTooSmall { budget, needed }, self.budget))
            }
            _ => Ok(()),
        }
    }

    /// What a pass of a model of `spec` has room for, but for texts that have one to themselves.
    #[must_use]
    pub fn limits(&self, spec: &ModelSpec) -> BatchLimits {
        let most = spec.context_tokens;
        BatchLimits {
            tokens: self.batch_tokens,
            logit_rows: self.batch_tokens,
            context_tokens: self.context_tokens.map_or(most, |tokens| tokens.min(most)),
        }
    }
}

/// A model that pools, ready to run.
struct Passes {
    encoder: TextEncoder,
    model: Arc<Model>,
    config: EmbedderConfig,
    cpu: Cpu,
    scratch: Scratch,
    texts: Texts,
    /// Elements of a text's vector.
    width: usize,
}

impl Passes {
    fn new(model: Arc<Model>, config: &EmbedderConfig) -> Result<Self, EngineError> {
        let spec = model.spec();
        let pooled = spec.pooled().ok_or(ForwardError::NoEmbeddings)?;
        if config.context_tokens == Some(0) {
            return Err(PlanError::EmptyContext.into());
        }
        let engine = EngineConfig {
            threads: config.threads,
            matmul_precision: config.matmul_precision,
            ..EngineConfig::default()
        };
        let cpu = engine.cpu()?;
        let plan = ArenaPlan::new(model.program(), config.limits(spec))?;
        config.check(&model, (&plan, 0), &cpu)?;
        let cpu = Cpu::new(cpu)?;
        let scratch = Scratch::new(model.program(), plan)?.checking(config.finite_check);
        Ok(Self {
            encoder: TextEncoder::new(&model, scratch.limits().context_tokens)?,
            width: pooled.width(spec.hidden),
            texts: Texts::new(),
            config: config.clone(),
            scratch,
            cpu,
            model,
        })
    }

    /// Makes `budget` what longer texts are held against from now on.
    fn set_budget(&mut self, budget: ByteLength) {
        self.config.budget = Some(budget);
    }

    /// Activation memory for one text of `tokens` tokens, which are more than a pass has room for.
    fn larger(&self, tokens: usize) -> Result<Scratch, EngineError> {
        let program = self.model.program();
        let plan = ArenaPlan::new(program, self.scratch.limits().of_one_text(tokens))?;
        let kept = self.scratch.plan().bytes();
        let checked = (self.config).check(&self.model, (&plan, kept), &self.cpu.config());
        checked.map_err(|source| EngineError::LongText {
            tokens,
            source: Box::new(source),
        })?;
        Ok(Scratch::new(program, plan)?.checking(self.config.finite_check))
    }

    /// Computes the vectors of `texts`, as many at once as a pass holds, and calls `each` with every one in
    /// their order. `parts` says of a text its tokens and where its second part begins.
    fn run<T>(
        &mut self,
        texts: &[T],
        parts: impl Fn(&T) -> (&[u32], usize),
        mut each: impl FnMut(&[f32]),
    ) -> Result<(), EngineError> {
        let limits = self.scratch.limits();
        let mut start = 0;
        while start < texts.len() {
            self.texts.clear();
            for text in &texts[start..] {
                let (tokens, second) = parts(text);
                let fits = self.texts.tokens() + tokens.len() <= limits.tokens;
                if !self.texts.is_empty() && (!fits || self.texts.len() == limits.logit_rows) {
                    break;
                }
                self.texts.push_pair(tokens, second);
            }
            let mut larger = None;
            // What is too long for the model is refused with any memory.
            let tokens = self.texts.tokens();
            if tokens > limits.tokens && tokens <= limits.context_tokens {
                larger = Some(self.larger(tokens)?);
            }
            let scratch = larger.as_mut().unwrap_or(&mut self.scratch);
            let found = (self.model).embed(&self.cpu, &self.texts, scratch);
            let found = found.map_err(|error| error.after_texts(start))?;
            found.chunks_exact(self.width).for_each(&mut each);
            start += self.texts.len();
        }
        Ok(())
    }
}

impl std::fmt::Debug for Passes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Passes")
            .field("limits", &self.scratch.limits())
            .finish_non_exhaustive()
    }
}

/// A model that makes embeddings, ready to run. Nothing is kept of a text that was embedded.
#[derive(Debug)]
pub struct Embedder(Passes);

impl Embedder {
    /// Sets up threads and activation memory for `model`.
    ///
    /// # Errors
    /// [`ForwardError::NoEmbeddings`] for a model that makes none, and [`EngineError`] when a setting is out
    /// of range or the system refuses memory or threads.
    pub fn new(model: Arc<Model>, config: &EmbedderConfig) -> Result<Self, EngineError> {
        Self::check(model.spec())?;
        Passes::new(model, config).map(Self)
    }

    /// Refuses a model that makes no embeddings, from its description alone.
    ///
    /// # Errors
    /// [`ForwardError::NoEmbeddings`].
    pub fn check(spec: &ModelSpec) -> Result<(), EngineError> {
        match spec.embedding_width() {
            Some(_) => Ok(()),
            None => Err(ForwardError::NoEmbeddings.into()),
        }
    }

    /// The model.
    #[must_use]
    pub fn model(&self) -> &Arc<Model> {
        &self.0.model
    }

    /// What makes tokens of texts.
    #[must_use]
    pub fn encoder(&self) -> &TextEncoder {
        &self.0.encoder
    }

    /// Makes `budget` what the process may commit from now on: texts for which it leaves too little are refused.
    /// Everything else stays what it was set up with.
    pub fn set_budget(&mut self, budget: ByteLength) {
        self.0.set_budget(budget);
    }

    /// Elements of an embedding.
    #[must_use]
    pub fn dimensions(&self) -> usize {
        self.0.width
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
        each: impl FnMut(&[f32]),
    ) -> Result<(), EngineError> {
        self.0.run(texts, whole, each)
    }
}

/// A text that is compared with none.
fn whole<T: AsRef<[u32]>>(text: &T) -> (&[u32], usize) {
    let tokens = text.as_ref();
    (tokens, tokens.len())
}

/// A model that scores how well one text answers another, ready to run. Nothing is kept of either.
#[derive(Debug)]
pub struct Reranker(Passes);

impl Reranker {
    /// Sets up threads and activation memory for `model`.
    ///
    /// # Errors
    /// [`ForwardError::NoScores`] for a model that makes none, and otherwise as [`Embedder::new`].
    pub fn new(model: Arc<Model>, config: &EmbedderConfig) -> Result<Self, EngineError> {
        Self::check(model.spec())?;
        Passes::new(model, config).map(Self)
    }

    /// Refuses a model that makes no scores, from its description alone.
    ///
    /// # Errors
    /// [`ForwardError::NoScores`].
    pub fn check(spec: &ModelSpec) -> Result<(), EngineError> {
        match spec.judgement() {
            Some(_) => Ok(()),
            None => Err(ForwardError::NoScores.into()),
        }
    }

    /// The model.
    #[must_use]
    pub fn model(&self) -> &Arc<Model> {
        &self.0.model
    }

    /// What makes tokens of pairs of texts.
    #[must_use]
    pub fn encoder(&self) -> &TextEncoder {
        &self.0.encoder
    }

    /// Makes `budget` what the process may commit from now on: texts for which it leaves too little are refused.
    /// Everything else stays what it was set up with.
    pub fn set_budget(&mut self, budget: ByteLength) {
        self.0.set_budget(budget);
    }

    /// Scores `pairs`, as many at once as a pass holds, and calls `each` with how likely the second text
    /// answers the first, from 0 to 1, of every pair in their order. A score does not depend on the pairs
    /// beside its own.
    ///
    /// # Errors
    /// As [`Embedder::embed`].
    pub fn score(&mut self, pairs: &[Pair], mut each: impl FnMut(f32)) -> Result<(), EngineError> {
        self.0.run(pairs, both, |scores| each(relevance(scores)))
    }
}

fn both(pair: &Pair) -> (&[u32], usize) {
    (&pair.tokens, pair.second)
}

/// The probability that log-odds stand for, or the logits of yes and of no.
fn relevance(scores: &[f32]) -> f32 {
    let log_odds = match scores {
        [yes, no] => f64::from(*yes) - f64::from(*no),
        scores => scores.iter().copied().map(f64::from).sum(),
    };
    (1.0 / (1.0 + (-log_odds).exp())) as f32
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

#[cfg(test)]
mod tests {
    use lacuna_files::ModelFiles;

    use super::*;

    /// With a budget that holds short texts and no more, they are computed; a longer one is refused, which says
    /// so and leaves all as it was.
    #[test]
    fn a_text_that_is_too_long_for_the_budget_is_refused_and_shorter_ones_go_on() {
        let root =
            std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../reference/encoders");
        let files = ModelFiles::open(&root.join("bert/mean.gguf")).expect("a committed fixture");
        let model = Arc::new(Model::load(files).expect("a model"));
        let with_budget = |bytes| EmbedderConfig {
            threads: Some(NonZeroUsize::MIN),
            batch_tokens: 4,
            budget: Some(ByteLength::new(bytes)),
            ..EmbedderConfig::default()
        };
        let refused = Embedder::new(Arc::clone(&model), &with_budget(1));
        let Err(EngineError::BudgetTooSmall(BudgetTooSmall { needed, .. })) = refused else {
            panic!("a byte is no budget: {refused:?}");
        };
        let mut embedder =
            Embedder::new(model, &with_budget(needed.bytes())).expect("what is needed");
        let [short, long] = [[5_u32; 4].as_slice(), &[5; 20]];
        let mut vectors = Vec::new();
        let mut embed =
            |text: &[u32]| embedder.embed(&[text], |vector| vectors.push(vector.to_vec()));
        embed(short).expect("a text that there is room for");
        let error = embed(long).expect_err("there is no room for it");
        embed(short).expect("as before");
        assert!(
            matches!(&error, EngineError::LongText { tokens: 20, source }
                if matches!(**source, EngineError::BudgetTooSmall(_))),
            "{error:?}"
        );
        assert!(error.to_string().contains("send shorter ones"), "{error}");
        assert_eq!(vectors.len(), 2);
        assert_eq!(vectors[0], vectors[1]);
    }

    /// Requests get more of a larger budget, and the model has to fit beside that.
    #[test]
    fn a_budget_that_a_refusal_asks_for_is_enough() {
        let root =
            std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../reference/encoders");
        let files = ModelFiles::open(&root.join("bert/mean.gguf")).expect("a committed fixture");
        let model = Arc::new(Model::load(files).expect("a model"));
        let start = |budget| {
            let engine = EngineConfig {
                // Enough that an eighth is more than the least that requests get.
                batch_tokens: 1 << 16,
                budget: Some(ByteLength::new(budget)),
                ..EngineConfig::default()
            };
            Embedder::new(Arc::clone(&model), &EmbedderConfig::of(&engine))
        };
        let Err(EngineError::BudgetTooSmall(error)) = start(1) else {
            panic!("a byte is no budget");
        };
        assert!(
            error.needed.request_bytes > request_bytes(Some(1)),
            "{error}"
        );
        start(error.needed.bytes()).expect("what was asked for");
    }

    /// Every text was refused later, as one that is too long.
    #[test]
    fn a_context_of_no_tokens_is_refused_at_once() {
        let root =
            std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../reference/encoders");
        let files = ModelFiles::open(&root.join("bert/mean.gguf")).expect("a committed fixture");
        let model = Arc::new(Model::load(files).expect("a model"));
        let config = EmbedderConfig {
            context_tokens: Some(0),
            ..EmbedderConfig::default()
        };
        let refused = Embedder::new(model, &config).err();
        let empty = matches!(refused, Some(EngineError::Plan(PlanError::EmptyContext)));
        assert!(empty, "{refused:?}");
    }

    #[test]
    fn scores_become_probabilities_without_overflow() {
        assert_eq!(relevance(&[0.0]), 0.5);
        assert_eq!(relevance(&[3.0, 3.0]), 0.5);
        assert_eq!(relevance(&[2.0, 0.5]), relevance(&[1.5]));
        assert_eq!(relevance(&[f32::MAX, f32::MIN]), 1.0);
        assert_eq!(relevance(&[f32::MIN, f32::MAX]), 0.0);
    }
}
