//! The engine: a model, a processor, an arena and a pool of KV pages, stepped one batch at a time.

use std::num::NonZeroUsize;
use std::sync::Arc;

use lacuna_kernels::{Cpu, CpuConfig, ElementType};
use lacuna_kv::{Geometry, KvCache, KvPolicy, KvReport};
use lacuna_models::{BatchLimits, LogitRows, Model, Scratch, Segment};

use crate::error::EngineError;
use crate::sampler::{Sampler, Sampling};
use crate::session::Session;

/// How an engine is set up.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// Threads that compute, the caller's included. `None`: one per core.
    pub threads: Option<NonZeroUsize>,
    /// How KV memory is held.
    pub kv_policy: KvPolicy,
    /// Storage of one KV element.
    pub kv_element: ElementType,
    /// Tokens a session may hold. `None`: what the model was made for.
    pub context_tokens: Option<usize>,
    /// Tokens computed in one pass at most. More is faster on long prompts and takes more
    /// activation memory.
    pub batch_tokens: usize,
    /// Rows of logits computed in one pass at most, and so sequences that get a token in it.
    pub batch_rows: usize,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            threads: None,
            kv_policy: KvPolicy::default(),
            kv_element: ElementType::F16,
            context_tokens: None,
            batch_tokens: 512,
            batch_rows: 32,
        }
    }
}

impl EngineConfig {
    /// The number of threads to use: as asked for, but no more than the machine has.
    ///
    /// # Errors
    /// [`EngineError::TooManyThreads`].
    pub fn thread_count(&self) -> Result<NonZeroUsize, EngineError> {
        let available = std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
        match self.threads {
            None => Ok(available),
            Some(asked) if asked <= available => Ok(asked),
            Some(asked) => Err(EngineError::TooManyThreads { asked, available }),
        }
    }
}

/// A model ready to run.
pub struct Engine {
    model: Arc<Model>,
    cpu: Cpu,
    cache: KvCache,
    scratch: Scratch,
    context_tokens: usize,
}

impl Engine {
    /// Sets up threads, activation memory and a KV pool for `model`.
    ///
    /// # Errors
    /// [`EngineError`] when a setting is out of range or the system refuses memory or threads.
    pub fn new(model: Arc<Model>, config: &EngineConfig) -> Result<Self, EngineError> {
        let cpu = Cpu::new(CpuConfig {
            threads: config.thread_count()?,
            level: None,
        })?;
        let shape = model.config();
        let geometry = Geometry {
            layers: shape.layers,
            kv_heads: shape.kv_heads,
            head_dim: shape.head_dim,
            key_element: config.kv_element,
            value_element: config.kv_element,
        };
        let context_tokens = config.context_tokens.unwrap_or(shape.context_tokens);
        if context_tokens == 0 {
            return Err(EngineError::EmptyContext);
        }
        geometry.validate()?;
        geometry.bytes(context_tokens)?;
        let tokens = config.batch_tokens.clamp(1, context_tokens);
        let limits = BatchLimits {
            tokens,
            logit_rows: config.batch_rows.clamp(1, tokens),
            context_tokens,
        };
        let scratch = Scratch::new(shape, limits)?;
        let cache = KvCache::new(geometry, config.kv_policy)?;
        Ok(Self {
            model,
            cpu,
            cache,
            scratch,
            context_tokens,
        })
    }

    /// A new, empty session.
    ///
    /// # Errors
    /// [`EngineError`] for sampling settings out of range or a KV range that cannot be reserved.
    pub fn session(&self, sampling: Sampling) -> Result<Session, EngineError> {
        let sequence = self.cache.sequence(self.context_tokens)?;
        Ok(Session::new(sequence, Sampler::new(sampling)?))
    }

    /// Computes the session's next chunk of pending tokens. When none is left pending, samples one
    /// token, appends it (pending) and returns it.
    ///
    /// # Errors
    /// [`EngineError`]; the session is as it was before the step.
    pub fn step(&mut self, session: &mut Session) -> Result<Option<u32>, EngineError> {
        let (chunk, rows) = session.schedule(self.scratch.limits().tokens);
        session.sequence.prepare(chunk.len())?;
        let tokens = &session.tokens[chunk.clone()];
        let segment = Segment {
            tokens,
            sequence: &mut session.sequence,
            logits: rows,
        };
        let logits = self
            .model
            .forward(&self.cpu, &mut [segment], &mut self.scratch)?;
        let token =
            (rows != LogitRows::None).then(|| session.sampler.sample(logits, &session.tokens));
        session.sequence.accept(chunk.len());
        session.tokens.extend(token);
        Ok(token)
    }

    /// Logits after every one of `tokens`, a row of vocabulary size at a time and in order, each
    /// with the position of the token it follows.
    ///
    /// # Errors
    /// [`EngineError`] when a token is out of range or the context is too short.
    pub fn score(
        &mut self,
        tokens: &[u32],
        mut each: impl FnMut(usize, &[f32]),
    ) -> Result<KvReport, EngineError> {
        let mut sequence = self.cache.sequence(self.context_tokens)?;
        let vocabulary = self.model.config().vocabulary;
        for chunk in tokens.chunks(self.scratch.limits().logit_rows) {
            sequence.prepare(chunk.len())?;
            let segment = Segment {
                tokens: chunk,
                sequence: &mut sequence,
                logits: LogitRows::All,
            };
            let logits = self
                .model
                .forward(&self.cpu, &mut [segment], &mut self.scratch)?;
            for (offset, row) in logits.chunks_exact(vocabulary).enumerate() {
                each(sequence.len() + offset, row);
            }
            sequence.accept(chunk.len());
        }
        Ok(sequence.report())
    }

    /// Runs `segments`, all prepared, and returns the rows of logits they ask for.
    ///
    /// # Errors
    /// [`EngineError::Forward`] before anything is computed.
    pub(crate) fn forward(&mut self, segments: &mut [Segment<'_>]) -> Result<&[f32], EngineError> {
        Ok(self.model.forward(&self.cpu, segments, &mut self.scratch)?)
    }

    /// Bytes of weights that are copied out of the file: its vectors.
    pub(crate) fn copied_weight_bytes(&self) -> u64 {
        let tensors = self.model.files().tensors().iter();
        let vectors = tensors.filter(|tensor| tensor.shape.len() == 1);
        let elements = vectors.map(|tensor| tensor.shape.iter().product::<usize>());
        (elements.sum::<usize>() * size_of::<f32>()) as u64
    }

    /// The largest batch one pass takes.
    pub(crate) fn batch_limits(&self) -> BatchLimits {
        self.scratch.limits()
    }

    /// The model being run.
    #[must_use]
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// The processor it runs on.
    #[must_use]
    pub fn cpu(&self) -> &Cpu {
        &self.cpu
    }

    /// The pool its sessions' rows come from.
    #[must_use]
    pub fn kv_cache(&self) -> &KvCache {
        &self.cache
    }

    /// Tokens a session may hold.
    #[must_use]
    pub fn context_tokens(&self) -> usize {
        self.context_tokens
    }

    /// Bytes of activation memory.
    #[must_use]
    pub fn activation_bytes(&self) -> usize {
        self.scratch.bytes()
    }
}
