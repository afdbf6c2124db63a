//! Timed forward passes over sequences that are filled with random rows.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use lacuna::{EngineConfig, Model};
use lacuna_kernels::Cpu;
use lacuna_kv::{KvCache, KvElements, KvPolicy, Layer, Sequence};
use lacuna_models::plan::ArenaPlan;
use lacuna_models::{BatchLimits, LogitRows, Scratch, Segment};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use crate::cli::BenchSpeedArgs;
use crate::commands::bench::processor;
use crate::commands::bench::samples::median;

/// Rows written at once into a context that is filled.
const FILLED_ROWS: usize = 256;

pub(super) struct Bench<'a> {
    model: &'a Model,
    cpu: Cpu,
    scratch: Scratch,
    policy: KvPolicy,
    context_tokens: usize,
    random: ChaCha8Rng,
}

impl<'a> Bench<'a> {
    pub(super) fn new(args: &BenchSpeedArgs, model: &'a Model) -> Result<Self> {
        let config = EngineConfig {
            threads: args.threads,
            ..EngineConfig::default()
        };
        let cpu = processor(&config)?;
        let most = |values: &[usize]| values.iter().copied().max().unwrap_or(0);
        let deepest = most(&args.depth) + args.generate + 1;
        let context_tokens = deepest.max(most(&args.prompt));
        let tokens = config
            .batch_tokens
            .min(context_tokens)
            .max(most(&args.batch));
        let limits = BatchLimits {
            tokens,
            logit_rows: most(&args.batch).max(1),
            context_tokens,
        };
        let plan = ArenaPlan::new(model.config(), limits)?;
        let scratch = Scratch::new(model.config(), plan)?;
        Ok(Self {
            model,
            cpu,
            scratch,
            policy: args.kv,
            context_tokens,
            random: ChaCha8Rng::seed_from_u64(0),
        })
    }

    pub(super) fn cpu(&self) -> &Cpu {
        &self.cpu
    }

    /// The median time of computing a prompt of `tokens`, in seconds.
    pub(super) fn prompt(
        &mut self,
        elements: KvElements,
        tokens: usize,
        repeats: usize,
    ) -> Result<f64> {
        let cache = self.cache(elements)?;
        let mut times = Vec::new();
        // One pass more, which finds memory and caches cold and is not counted.
        for repeat in 0..=repeats {
            let ids = self.ids(tokens);
            let mut sequence = cache.sequence(self.context_tokens)?;
            let time = self.compute(&mut sequence, &ids)?;
            if repeat > 0 {
                times.push(time.as_secs_f64());
            }
        }
        median(times).context("nothing was timed")
    }

    fn compute(&mut self, sequence: &mut Sequence, ids: &[u32]) -> Result<Duration> {
        let start = Instant::now();
        let chunk = self.scratch.limits().tokens;
        for (index, tokens) in ids.chunks(chunk).enumerate() {
            let last = (index + 1) * chunk >= ids.len();
            sequence.prepare(tokens.len())?;
            let segment = Segment {
                tokens,
                sequence,
                logits: if last {
                    LogitRows::Last
                } else {
                    LogitRows::None
                },
            };
            self.model
                .forward(&self.cpu, &mut [segment], &mut self.scratch)?;
            sequence.accept(tokens.len());
        }
        Ok(start.elapsed())
    }

    /// The median time of a step of `sequences` that hold `depth` rows, in seconds, and the bytes
    /// of a row over all layers.
    pub(super) fn steps(
        &mut self,
        elements: KvElements,
        depth: usize,
        sequences: usize,
        steps: usize,
    ) -> Result<(f64, usize)> {
        let cache = self.cache(elements)?;
        let mut filled = Vec::new();
        for _ in 0..sequences {
            filled.push(self.filled(&cache, depth)?);
        }
        let mut times = Vec::new();
        for step in 0..=steps {
            let ids = self.ids(sequences);
            let start = Instant::now();
            self.step(&mut filled, &ids)?;
            if step > 0 {
                times.push(start.elapsed().as_secs_f64());
            }
        }
        let time = median(times).context("nothing was timed")?;
        Ok((time, cache.geometry().bytes_per_token()))
    }

    fn step(&mut self, sequences: &mut [Sequence], ids: &[u32]) -> Result<()> {
        for sequence in &mut *sequences {
            sequence.prepare(1)?;
        }
        let segment = |(sequence, tokens)| Segment {
            tokens,
            sequence,
            logits: LogitRows::Last,
        };
        let mut segments: Vec<Segment<'_>> = sequences
            .iter_mut()
            .zip(ids.chunks(1))
            .map(segment)
            .collect();
        self.model
            .forward(&self.cpu, &mut segments, &mut self.scratch)?;
        for sequence in sequences {
            sequence.accept(1);
        }
        Ok(())
    }

    /// A sequence that holds `depth` random rows.
    fn filled(&mut self, cache: &KvCache, depth: usize) -> Result<Sequence> {
        let geometry = cache.geometry();
        let mut sequence = cache.sequence(self.context_tokens)?;
        let mut rows = vec![0.0; FILLED_ROWS * geometry.row_elements()];
        for value in &mut rows {
            *value = self.random.next_u32() as f32 / u32::MAX as f32 - 0.5;
        }
        for start in (0..depth).step_by(FILLED_ROWS) {
            let count = FILLED_ROWS.min(depth - start);
            let rows = &rows[..count * geometry.row_elements()];
            sequence.prepare(count)?;
            for layer in 0..geometry.layers {
                sequence.store(&self.cpu, Layer(layer), rows, rows);
            }
            sequence.accept(count);
        }
        Ok(sequence)
    }

    fn cache(&self, elements: KvElements) -> Result<KvCache> {
        let geometry = self.model.config().kv_geometry(elements);
        Ok(KvCache::new(geometry, self.policy)?)
    }

    fn ids(&mut self, tokens: usize) -> Vec<u32> {
        let vocabulary = self.model.config().vocabulary as u32;
        (0..tokens)
            .map(|_| self.random.next_u32() % vocabulary)
            .collect()
    }
}
